"""The fsdp1 engine in one process, compared with fsdp2. On two ranks: `test_ranks.py`."""

import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoModelForImageTextToText

from rlkit.engines import make_engine
from rlkit.engines.value_head import load_value_model
from rlkit.vlm import load_model, load_processor, lora

sys.path.insert(0, str(Path(__file__).parent))
from one_gradient import OUTPUTS, POLICY, train, with_teacher
from rows import make_batch
from test_families import IMAGE, VISION, text_model, vision_model


@pytest.fixture(scope="module")
def processor(tiny_dir):
    return load_processor(tiny_dir)


def engine_for(tiny_dir, backend="fsdp1", **options):
    options.setdefault("optimizer", lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4))
    return make_engine(backend, model=options.pop("model", None) or load_model(tiny_dir), **options)


def test_weights_checkpoint_export_and_sampling(tiny_dir, processor, tmp_path):
    """After two steps: weights by name, a checkpoint that fsdp2 also loads, an export, and a gathered module."""
    batch = make_batch(processor)
    fsdp1, fsdp2 = engine_for(tiny_dir, processor=processor), engine_for(tiny_dir, "fsdp2")
    for loss_fn in POLICY[:2]:
        metrics, expected = (engine.train_batch(batch, loss_fn, OUTPUTS[POLICY]) for engine in (fsdp1, fsdp2))
        assert metrics == pytest.approx(expected, abs=1e-5, rel=1e-5)
    weights, expected = dict(fsdp1.get_per_tensor_param()), dict(fsdp2.get_per_tensor_param(bucket_bytes=100_000))
    assert list(weights) == list(expected) and "lm_head.weight" not in weights
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=1e-5, msg=name)
    logprobs = fsdp1.infer_batch(batch)["logprobs"]
    fsdp1.save_checkpoint(tmp_path / "step_2", {"step": 2})
    resumed = [engine_for(tiny_dir, backend) for backend in ("fsdp1", "fsdp2")]
    for engine in resumed:
        assert engine.load_checkpoint(tmp_path / "step_2") == {"step": 2}
        torch.testing.assert_close(engine.infer_batch(batch)["logprobs"], logprobs, atol=1e-6, rtol=1e-6)
    with_teacher(batch)
    for loss_fn in POLICY[2:]:
        expected = train(fsdp1, batch, loss_fn, POLICY)
        for engine in resumed:
            assert train(engine, batch, loss_fn, POLICY) == pytest.approx(expected, abs=1e-5, rel=1e-5)
    logprobs = fsdp1.infer_batch(batch)["logprobs"]
    fsdp1.export_hf(tmp_path / "model")
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with fsdp1.gathered() as module:
        for model in (module, exported):
            again = engine_for(tiny_dir, "fsdp2", model=model).infer_batch(batch)["logprobs"]
            torch.testing.assert_close(again, logprobs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("keep", [False, True])
def test_gradients_are_freed_by_the_step(tiny_dir, processor, keep):
    """A sampler may need their memory; FSDP1 alone frees them at the next forward."""
    engine = engine_for(tiny_dir, keep_gradients=keep)
    engine.train_batch(make_batch(processor), POLICY[0], OUTPUTS[POLICY])
    units = FullyShardedDataParallel.fsdp_modules(engine.module)
    assert len(units) > 2 and all((unit._flat_param.grad is not None) == keep for unit in units)


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4, "long_factor": [1.0, 4.0, 8.0, 16.0],
}  # fmt: skip
PHI3 = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}
SAMPLED = {
    "images": lambda: vision_model("gemma3"),
    "longrope": lambda: text_model("phi3", PHI3),
    "norms": lambda: text_model("olmo2", {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", SAMPLED)
def test_the_sampled_copy_computes_as_the_trained_module(case, dtype):
    """Images whose tokens attend to later ones, LongRoPE's factors of the run, and the dtype: the same bits."""
    tokens = torch.tensor([[5, 6, 91, IMAGE, IMAGE, IMAGE, IMAGE, 92, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]])
    inputs = {"input_ids": tokens if case == "images" else tokens % 80, "attention_mask": torch.ones_like(tokens)}
    if case == "images":
        inputs["pixel_values"] = torch.randn(VISION["gemma3"][2], generator=torch.Generator().manual_seed(0))
    engine = make_engine("fsdp1", model=SAMPLED[case](), longest_sequence=64, compute_dtype=dtype)
    with torch.no_grad():
        expected = engine.module.eval()(**inputs).logits
        with engine.gathered() as module:
            assert {x.dtype for x in module.parameters()} == {dtype}
            assert torch.equal(module(**inputs).logits, expected)


@pytest.mark.parametrize("load", [load_model, load_value_model])
def test_weights_read_in_shards_are_the_same_bits(tiny_dir, load):
    """In one process; on two ranks: the cases `fsdp1_frozen` and `fsdp1_value` of `test_ranks.py`."""
    kind = "language_model" if load is load_model else "value_model"
    in_shards, full = (make_engine("fsdp1", kind, model=load(tiny_dir, on_meta=x)) for x in (True, False))
    weights, expected = dict(in_shards.get_per_tensor_param()), dict(full.get_per_tensor_param())
    assert weights.keys() == expected.keys() and len(weights) > 20
    assert all(torch.equal(x, expected[name]) for name, x in weights.items())
    head, embedding = (get() for get in (in_shards.base.get_output_embeddings, in_shards.base.get_input_embeddings))
    assert (head.weight is embedding.weight) == (load is load_model)


def test_what_is_not_supported_is_named(tiny_dir):
    expected = "model: expected no adapters in the fsdp1 engine, got some; use the fsdp2 engine"
    with pytest.raises(ValueError, match=expected):
        engine_for(tiny_dir, model=lora(load_model(tiny_dir), 4, 8))
    sizes = {"tensor": 2, "fsdp_size": 1, "ulysses_sequence_parallel_size": 2}
    for option, value in {**sizes, "use_fused_kernels": True, "router_replay": True}.items():
        expected = f"{option}: expected .* in the fsdp1 engine, got {value}; use the fsdp2 engine"
        with pytest.raises(ValueError, match=expected):
            engine_for(tiny_dir, **{option: value})
    engine = engine_for(tiny_dir, tensor=1, use_fused_kernels=False)
    with pytest.raises(ValueError, match="disable_adapter: expected a model with adapters, got none"):
        engine.disable_adapter()
    with pytest.raises(ValueError, match="output_layer: expected the fsdp2 engine, got fsdp1"):
        engine.output_layer()
    with pytest.raises(ValueError, match="to: expected model=False in the fsdp1 engine"):
        engine.to("meta")
    engine.to("cpu")
