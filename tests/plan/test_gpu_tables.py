"""benchmarks/gpu.py, which needs a GPU for its numbers: one engine at a time, and no table is lost."""

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from rlkit.rollout.vllm import _check_logit_biases
from rlkit.vlm.loading import load_config

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "benchmarks")]
import gpu  # noqa: E402
from published_configs import qwen_vl  # noqa: E402


class Engine:
    """Remembers how many earlier engines exist when it trains; a cycle keeps it until the collector runs."""

    made, alive = [], []

    def __init__(self, *_, **__):
        self.itself = self
        Engine.made.append(weakref.ref(self))

    def train_batch(self, *_):
        Engine.alive.append(sum(engine() is not None for engine in Engine.made))


def test_one_engine_exists_at_a_time(monkeypatch):
    """A 3B with AdamW takes 42 GiB in float32, and 56 GiB while it trains."""
    monkeypatch.setattr(gpu, "make_engine", Engine)
    monkeypatch.setattr(gpu, "time_of_copies", lambda engine: "")
    monkeypatch.setattr(Engine, "made", [])
    monkeypatch.setattr(Engine, "alive", [])
    gc.disable()
    try:
        gpu.steps(gpu.small_config(), (1, 8, 4, 1), peak=1.0)
        gpu.copies(gpu.small_config(), (1, 8, 4, 1))
    finally:
        gc.enable()
    assert len(Engine.made) == 5 and set(Engine.alive) == {1}


class Sampler:
    """Remembers what it is started with and what it is sent."""

    weight_dtype = torch.bfloat16

    def __init__(self, backend, *, model, processor, **options):
        files = {path.name for path in Path(model).iterdir()}
        assert "config.json" in files and not [name for name in files if name.endswith(".safetensors")]
        config = load_config(model)
        assert config.text_config.hidden_size == gpu.small_config().text_config.hidden_size
        assert config.image_token_id == processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.started, self.sent, self.closed = (backend, options["load_format"]), [], False
        Sampler.last = self

    def update_weights(self, weights):
        assert not self.closed
        self.sent.append({name: tensor.dtype for name, tensor in weights if tensor.ndim > 1})

    def close(self):
        self.closed = True


def test_a_sampler_without_weights_of_its_own_is_sent_all_of_them(monkeypatch):
    monkeypatch.setattr(gpu, "make_rollout", Sampler)
    row = gpu.weight_sync(gpu.small_config()).splitlines()[-1]
    sampler = Sampler.last
    assert sampler.started == ("vllm", "dummy") and sampler.closed
    assert len(sampler.sent) == 5 and len(sampler.sent[0]) > 20  # one not counted, three, and one for the peak
    assert set(sampler.sent[0].values()) == {torch.bfloat16} and "lm_head.weight" not in sampler.sent[0]
    assert row.startswith("| vLLM takes all weights |") and "nan" not in row


def test_vllm_can_suppress_the_ids_without_a_token(tmp_path):
    """The tiny model's tokenizer has 293 tokens, the model 151,936 ids."""
    processor = gpu.write_without_weights(qwen_vl("qwen2.5-vl-3b"), tmp_path)
    _check_logit_biases(load_config(str(tmp_path)), processor)


def test_the_script_ends_within_eight_minutes_also_if_it_does_not_listen(tmp_path):
    """The command `timeout` is a stand-in that writes down what it is asked for."""
    command = tmp_path / "timeout"
    command.write_text('#!/bin/sh\necho "$@"\n')
    command.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "python"}
    script = HERE.parents[1] / "benchmarks" / "gpu.sh"
    done = subprocess.run([script, "--small"], env=env, capture_output=True, text=True)
    kill_after, limit, *rest = done.stdout.split()
    assert kill_after.startswith("--kill-after=") and int(limit) + int(kill_after.partition("=")[2]) < 480
    assert rest == ["python", "benchmarks/gpu.py", "--small"]


def test_a_table_is_written_before_the_next_one_fails(tmp_path, capsys):
    def fails():
        raise MemoryError

    with pytest.raises(MemoryError):
        gpu.write_each([lambda: "# title\n", lambda: "table\n", fails], tmp_path / "gpu.md")
    assert (tmp_path / "gpu.md").read_text() == "# title\n\ntable\n"
    assert capsys.readouterr().out == "# title\n\ntable\n\n"
