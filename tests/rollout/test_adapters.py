"""LoRA adapters on their way to servers: stand-ins here, real servers in test_vllm_server.py."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import peft
import pytest
import torch
from free_ports import free_ports
from safetensors import safe_open
from safetensors.torch import load
from transformers import AutoConfig

from rlkit.data.samples import prompt_sample
from rlkit.rollout import AsyncSampler, Sampling
from rlkit.rollout.adapters import adapter_folder, serialize_adapter
from rlkit.rollout.serve import serving
from rlkit.vlm import load_model, lora
from rlkit.vlm.checkpoint_weights import adapter_parameters

sys.path.insert(0, str(Path(__file__).parent))
from standin import VllmStandin

SAMPLING = Sampling(4, seed=(7,))
WEIGHTS = [("layers.0", torch.ones(3, 5))]


@pytest.fixture(scope="module")
def adapted(tiny_dir):
    return lora(load_model(tiny_dir), 4, 8)


def adapters(adapted):
    return adapted.peft_config["default"], adapter_parameters(adapted)


def test_adapters_are_sent_in_the_format_of_peft(adapted, tmp_path):
    file = serialize_adapter(*adapters(adapted))
    adapted.save_pretrained(tmp_path)
    adapted.peft_config["default"].save_pretrained(tmp_path)  # as it trains
    with adapter_folder(file) as (folder, names, rank):
        assert rank == 4
        theirs = peft.PeftConfig.from_pretrained(tmp_path).to_dict()
        assert peft.PeftConfig.from_pretrained(folder).to_dict() == theirs
        with safe_open(tmp_path / "adapter_model.safetensors", "pt") as saved:
            assert sorted(names) == sorted(saved.keys())
            assert all(torch.equal(saved.get_tensor(name), weight) for name, weight in load(file).items())
    assert not Path(folder).exists()


def test_adapters_go_to_all_servers_and_requests_name_them(connect, adapted):
    with VllmStandin() as a, VllmStandin() as b:
        rollout, requests = connect(a, b), [prompt_sample([10 + i, 11], group_id=i) for i in range(6)]
        rollout.update_adapter(*adapters(adapted))
        assert a.adapter == b.adapter == serialize_adapter(*adapters(adapted)) and not a.weights and not a.paused
        samples = rollout.generate(requests, SAMPLING, n=2)
        assert {s.version for s in samples} == {1} and {body["model"] for body in a.bodies + b.bodies} == {"policy"}
        rollout.update_adapter(*adapters(adapted))
        assert rollout.version == 2 and a.version == b.version == "2"
        for path in ("/reset_prefix_cache", "/reset_encoder_cache", "/resume"):
            assert a.order.index("/rlkit/adapter") < a.order.index(path) and a.calls[path] == 2
        rollout.sleep()
        rollout.update_weights(iter(WEIGHTS))  # with these, which are whole, none is asked for any more
        rollout.generate(requests[:1], SAMPLING)
        assert ["model" in body for body in a.bodies + b.bodies].count(False) == 1
        rollout.sleep()
        assert a.pauses == ["wait", "keep", "wait"] and a.slept == ["1", "2"]


def test_asynchronous_servers_take_adapters(connect, adapted):
    with VllmStandin() as a:
        sampler = AsyncSampler(connect(a), ([[prompt_sample([10])], SAMPLING] for _ in range(3)), max_staleness=1)
        for _ in sampler:
            sampler.update_adapter(*adapters(adapted))
        assert a.version == "3" and sampler.submitted == 3


def test_what_was_submitted_before_the_first_adapters_is_finished_with_the_base_model(connect, adapted):
    """A request says whether it is for the adapters, so none that waits for room may be sent after they came."""
    with VllmStandin(latency=0.01) as a:
        rollout = connect(a, max_sequences=1)
        requests = [prompt_sample([10 + i, 11], group_id=i) for i in range(3)]
        for update, version in ((adapters(adapted), 1), ((iter(WEIGHTS),), 2)):
            submitted = rollout.submit(requests, SAMPLING)
            rollout.update_adapter(*update) if version == 1 else rollout.update_weights(*update)
            assert {sample.version for sample in submitted.result(60)} == {version - 1}
        assert ["model" in body for body in a.bodies] == [False] * 3 + [True] * 3


def test_what_another_thread_submits_during_the_first_adapters_is_sampled_with_them(connect, adapted):
    with VllmStandin() as a, ThreadPoolExecutor(1) as thread:
        rollout, submitted = connect(a), []
        config, tensors = adapters(adapted)

        def sent():
            submitted.append(thread.submit(rollout.generate, [prompt_sample([10])], SAMPLING))
            with suppress(TimeoutError):
                submitted[0].result(0.3)  # while the server is paused
            yield from tensors

        rollout.update_adapter(config, sent())
        (sample,) = submitted[0].result(60)
        assert sample.version == 1 and ["model" in body for body in a.bodies] == [True]


def test_what_a_callback_submits_before_the_first_adapters_is_finished_before_them(connect, adapted):
    """It runs in the thread of the requests, which must not wait for the update."""
    with VllmStandin(latency=0.01) as a:
        rollout, later = connect(a), []
        again = lambda *_: later.append(rollout.submit([prompt_sample([11])], SAMPLING))  # noqa: E731
        rollout.submit([prompt_sample([10])], SAMPLING, on_finished=again)
        rollout.update_adapter(*adapters(adapted))
        assert later[0].result(60)[0].version == 0


def test_servers_that_were_not_started_for_adapters_are_named(connect, adapted):
    with VllmStandin(pages=["/rlkit/adapter"]) as a:
        rollout = connect(a)
        with pytest.raises(ValueError, match=f"{a.url}/rlkit/adapter/check: .* got 404.* --enable-lora"):
            rollout.check_adapter(["model.layers.0.q_proj.lora_A.weight"], 4)
        with pytest.raises(
            RuntimeError, match=f"update_adapter: {a.url}/rlkit/adapter: expected status 200, got 404.* --enable-lora"
        ):
            rollout.update_adapter(*adapters(adapted))
        with pytest.raises(RuntimeError, match="got servers whose last weight update failed"):
            rollout.generate([prompt_sample([10])], SAMPLING)


@pytest.mark.parametrize("with_lora", [True, False])
def test_a_server_is_started_for_adapters_where_that_is_asked_for(tiny_dir, tmp_path, monkeypatch, with_lora):
    code = "import sys; sys.exit('AdapterMiddleware' in str(sys.argv))"
    monkeypatch.setattr("rlkit.rollout.serve.command", lambda *_: [sys.executable, "-c", code])
    monkeypatch.setattr("rlkit.rollout.serve._check_installed", lambda _: None)
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError, match=f"got exit code {int(with_lora)}"):
        with serving(tiny_dir, port=free_ports(), logs=tmp_path, options=["--enable-lora"] * with_lora):
            pass


def test_a_family_whose_weights_vllm_does_not_update_is_refused(connect, processor, tmp_path):
    """With the message of the in-process sampler; nothing is sent."""
    AutoConfig.for_model("gpt_oss", vocab_size=len(processor.tokenizer)).save_pretrained(tmp_path / "tiny")
    assert json.loads((tmp_path / "tiny" / "config.json").read_text())["model_type"] == "gpt_oss"
    with VllmStandin() as a:
        with pytest.raises(
            ValueError,
            match="model: expected a family whose weights vLLM replaces completely on a GPU, got gpt_oss; use rollout",
        ):
            connect(a, model=str(tmp_path / "tiny")).update_weights(iter(WEIGHTS))
        assert not a.paused and not a.weights


def test_a_server_whose_class_leaves_out_weights_is_refused(connect, processor, tmp_path):
    """Servers that rlkit.rollout.serve starts have a class that uses them."""
    text = {"vocab_size": len(processor.tokenizer), "num_hidden_layers": 1}
    AutoConfig.for_model("gemma3n_text", **text).save_pretrained(tmp_path / "tiny")
    with VllmStandin() as a:
        with pytest.raises(ValueError, match="expected a server that rlkit.rollout.serve started for gemma3n_text"):
            connect(a, model=str(tmp_path / "tiny"))
        a.dtype = "float32"
        connect(a, model=str(tmp_path / "tiny"))
