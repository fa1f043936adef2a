"""What a seed decides before the first step, and the end of a recipe whose options cannot be used."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rlkit.data import load_task
from rlkit.runs import (
    GenerationOptions,
    RunOptions,
    TrainingOptions,
    build_engine,
    one_sentence_errors,
    resume,
    run_recipe,
    start_run,
)
from rlkit.runs.directory import release_directory
from rlkit.vlm import build_tiny, load_processor


@dataclass
class SampledOptions(GenerationOptions, TrainingOptions):
    pass


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "model"
    build_tiny(path, load_task("sorting").train[:8], warm_up_steps=0)
    return str(path)


def adapters(tiny, out, **options):
    """The adapters of a run that starts in a process which has drawn random numbers before."""
    torch.rand(7)
    cfg = TrainingOptions(out=str(out), model=tiny, lora_rank=2, **options)
    run = start_run(cfg, "task")
    engine = build_engine(cfg, tiny, load_processor(tiny), optimizer_steps=1)
    run.close()
    release_directory(out)
    found = {name: x.detach().clone() for name, x in engine.module.named_parameters() if "lora_" in name}
    assert found
    return found


def test_a_seed_repeats_the_adapters(tiny, tmp_path):
    first, again, other = (adapters(tiny, tmp_path / str(i), seed=seed) for i, seed in enumerate((3, 3, 4)))
    assert all(torch.equal(x, again[name]) for name, x in first.items())
    assert not any(torch.equal(x, other[name]) for name, x in first.items() if "lora_A" in name)


@pytest.mark.parametrize("error", [ValueError, ImportError])
def test_what_a_person_can_mend_is_one_sentence(error):
    with pytest.raises(SystemExit, match="^ppo: steps: expected at least 1, got 0$"):
        with one_sentence_errors("ppo"):
            raise error("steps: expected at least 1, got 0")


def test_a_fault_of_the_program_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="^bug$"):
        with one_sentence_errors("ppo"):
            raise RuntimeError("bug")


def test_a_back_end_on_servers_needs_servers(tmp_path):
    """Said before the run has a directory, and before a model is loaded."""
    for rollout in ("vllm_server", "sglang"):
        cfg = SampledOptions(out=str(tmp_path / "run"), model="some/model", rollout=rollout)
        expected = f"servers: expected URLs for --rollout {rollout}, got none; .*serve --model some/model"
        with pytest.raises(ValueError, match=expected):
            start_run(cfg, "task")
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rollout", ["hf", "vllm"])
def test_servers_that_would_not_be_used_are_refused(tmp_path, rollout):
    cfg = SampledOptions(out=str(tmp_path / "run"), model="some/model", rollout=rollout, servers=("http://a:1",))
    sentence = f"servers: expected none with --rollout {rollout}, which samples in the processes of the run, got http:"
    with pytest.raises(ValueError, match=f"^{sentence}//a:1; use --rollout vllm_server or sglang$"):
        start_run(cfg, "task")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("set_up", [True, False])
def test_only_the_errors_of_the_set_up_are_one_sentence(tmp_path, monkeypatch, set_up):
    """`resume` is its last step. A run is named after the file of its options, so a copied recipe has its own name."""

    @dataclass
    class Config(RunOptions):
        pass

    def main(cfg: Config):
        run = start_run(cfg, "task")
        try:
            assert run.name == f"{Path(__file__).stem}-task-seed0"
            if set_up:
                resume(cfg, run)
            raise ValueError("batch: expected rows, got none")
        finally:
            run.close()
            release_directory(run.out)

    monkeypatch.setattr(sys, "argv", ["recipe", "--out", str(tmp_path)])
    with pytest.raises(ValueError if set_up else SystemExit, match="batch: expected rows, got none$") as error:
        run_recipe(main)
    assert set_up or str(error.value).startswith(f"{Path(__file__).stem}: ")


@pytest.mark.parametrize(
    ("options", "given", "expected"),
    [
        ([], {}, "expandable_segments:True"),
        (["--rollout", "vllm_server", "--servers", "http://a:1"], {}, "expandable_segments:True"),
        (["--rollout", "vllm_server"], {}, None),  # grpo_async starts a server, which inherits the environment
        (["--rollout", "vllm"], {}, None),
        (["--rollout", "my_rollout"], {}, None),
        ([], {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, None),
        ([], {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "expandable_segments:False"),
    ],
)
def test_a_recipe_uses_expandable_segments(monkeypatch, options, given, expected):
    found = []

    def main(cfg: SampledOptions):
        found.append(os.environ.get("PYTORCH_ALLOC_CONF"))
        sys.exit(0)  # before anything is loaded

    monkeypatch.setattr(sys, "argv", ["recipe", *options])
    monkeypatch.setattr(os, "environ", {k: x for k, x in os.environ.items() if "ALLOC_CONF" not in k} | given)
    run_recipe(main)
    assert found == [expected]


def test_torchruns_summary_ends_with_the_sentence(tmp_path):
    """What a rank ended with is in the last lines, under two screens of torchrun's own."""
    recipe = Path(__file__).parents[2] / "recipes" / "sft.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, str(recipe), "--task=no_rows.jsonl"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "sft: no_rows.jsonl: expected a file, got none of this name" in done.stderr.splitlines()[-2]


def test_a_run_is_planned_before_it_starts(tiny, tmp_path, monkeypatch):
    def refuse(cfg, out, rows):
        raise ValueError(f"the run does not fit with {len(rows)} rows")

    monkeypatch.setattr("rlkit.runs.start.planned_memory", refuse)
    cfg = TrainingOptions(out=str(tmp_path), model=tiny)
    with pytest.raises(SystemExit, match="^recipe: the run does not fit with 2 rows$"), one_sentence_errors("recipe"):
        start_run(cfg, "task", [{}, {}])
    monkeypatch.setattr("rlkit.runs.start.planned_memory", lambda cfg, out, rows: {"train": 1.5})
    run = start_run(cfg, "task")
    assert run.planned_memory == {"train": 1.5}
    run.close()
    release_directory(tmp_path)
