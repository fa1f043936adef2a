"""The fsdp1 engine in one process, beside fsdp2. On two ranks, its gradients and checkpoints: `test_ranks.py`."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rlkit.engines import make_engine
from rlkit.vlm import load_model, load_processor, lora

sys.path.insert(0, str(Path(__file__).parent))
from one_gradient import OUTPUTS, POLICY
from rows import make_batch


@pytest.fixture(scope="module")
def processor(tiny_dir):
    return load_processor(tiny_dir)


def engine_for(tiny_dir, backend="fsdp1", **options):
    options.setdefault("optimizer", lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4))
    return make_engine(backend, model=options.pop("model", None) or load_model(tiny_dir), **options)


def test_weights_checkpoint_export_and_sampling(tiny_dir, processor, tmp_path):
    """After two steps: its weights by name, a checkpoint that fsdp2 takes up, too, an export, a whole module."""
    batch = make_batch(processor)
    ours, other = engine_for(tiny_dir, processor=processor), engine_for(tiny_dir, "fsdp2")
    for loss_fn in POLICY[:2]:
        mine, theirs = (engine.train_batch(batch, loss_fn, OUTPUTS[POLICY]) for engine in (ours, other))
        assert mine == pytest.approx(theirs, abs=1e-5, rel=1e-5)
    weights, expected = dict(ours.get_per_tensor_param()), dict(other.get_per_tensor_param(bucket_bytes=100_000))
    assert list(weights) == list(expected) and "lm_head.weight" not in weights
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=1e-5, msg=name)
    logprobs = ours.infer_batch(batch)["logprobs"]
    ours.save_checkpoint(tmp_path / "step_2", {"step": 2})
    fresh = {backend: engine_for(tiny_dir, backend) for backend in ("fsdp1", "fsdp2")}
    for engine in fresh.values():
        assert engine.load_checkpoint(tmp_path / "step_2") == {"step": 2}
        torch.testing.assert_close(engine.infer_batch(batch)["logprobs"], logprobs, atol=1e-6, rtol=1e-6)
    for loss_fn in POLICY[2:]:
        expected = ours.train_batch(batch, loss_fn, OUTPUTS[POLICY])
        for engine in fresh.values():
            came = engine.train_batch(batch, loss_fn, OUTPUTS[POLICY])
            assert came == pytest.approx(expected, abs=1e-5, rel=1e-5)
    logprobs = ours.infer_batch(batch)["logprobs"]
    ours.export_hf(tmp_path / "model")
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with ours.gathered() as module:
        for model in (module, exported):
            again = engine_for(tiny_dir, "fsdp2", model=model).infer_batch(batch)["logprobs"]
            torch.testing.assert_close(again, logprobs, atol=1e-6, rtol=1e-6)


def test_what_it_cannot_do_is_said(tiny_dir):
    with pytest.raises(ValueError, match="model: the fsdp1 engine takes none with adapters; use the fsdp2 engine"):
        engine_for(tiny_dir, model=lora(load_model(tiny_dir), 4, 8))
    with pytest.raises(ValueError, match="model: its weights are on the meta device"):
        engine_for(tiny_dir, model=load_model(tiny_dir, on_meta=True))
    sizes = {"tensor": 2, "fsdp_size": 1, "ulysses_sequence_parallel_size": 2}
    for option, value in {**sizes, "use_fused_kernels": True, "router_replay": True}.items():
        with pytest.raises(ValueError, match=f"{option}={value}: not in the fsdp1 engine; use the fsdp2 engine"):
            engine_for(tiny_dir, **{option: value})
    engine = engine_for(tiny_dir, tensor=1, use_fused_kernels=False)
    with pytest.raises(ValueError, match="disable_adapter: the model has no adapters"):
        engine.disable_adapter()
    with pytest.raises(ValueError, match="to: FSDP1 does not let its weights be moved"):
        engine.to("meta")
    engine.to("cpu")
