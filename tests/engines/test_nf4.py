"""Adapters above weights in NF4, in an engine: as above dequantized weights. On two ranks: `test_ranks.py`."""

import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor

from rlkit.data import collate
from rlkit.engines import make_engine
from rlkit.rollout import Sampling, make_rollout
from rlkit.vlm import (
    encode_prompts,
    load_model,
    load_processor,
    lora,
    merged_parameters,
    quantize_base,
    suppressed_token_ids,
)
from rlkit.vlm.nf4 import Nf4Linear

sys.path.insert(0, str(Path(__file__).parent))
from one_gradient import OUTPUTS, POLICY
from rows import make_batch, make_samples
from test_fsdp2 import engine_for, gradients


@pytest.fixture(scope="module")
def processor(tiny_dir):
    return load_processor(tiny_dir)


def adapted(path, **options):
    torch.manual_seed(0)
    return lora(load_model(path, **options), 4, 8)


def quantized(path, **options):
    model = adapted(path, **options)
    quantize_base(model)
    return model


@pytest.fixture(scope="module")
def dequantized_dir(tiny_dir, tmp_path_factory):
    """The tiny model with the weights that its NF4 codes stand for."""
    model, path = load_model(tiny_dir), tmp_path_factory.mktemp("model") / "dequantized"
    model.load_state_dict(dict(merged_parameters(quantized(tiny_dir))), strict=False)
    model.save_pretrained(path)
    return str(path)


def trained(engine, processor):
    """The engine after two steps, with the metrics and gradients of the second one."""
    batch = make_batch(processor)
    for loss in POLICY[:2]:
        metrics = engine.train_batch(batch, loss, OUTPUTS[POLICY][:2])
    return metrics, gradients(engine)


@pytest.mark.parametrize("options", [{}, {"enable_gradient_checkpointing": True, "offload_between_phases": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trains_as_above_dequantized_weights(tiny_dir, dequantized_dir, processor, tmp_path, dtype, options):
    """Steps, gradients, scores with and without adapters, what a sampler is sent, and the export."""
    engine = engine_for(tiny_dir, model=quantized(tiny_dir), compute_dtype=dtype, **options)
    other = engine_for(dequantized_dir, model=adapted(dequantized_dir), compute_dtype=dtype, **options)
    batch, close = make_batch(processor), {"atol": 1e-5, "rtol": 1e-5}
    before = engine.infer_batch(batch)["logprobs"]
    (metrics, found), (expected_metrics, expected) = (trained(one, processor) for one in (engine, other))
    assert metrics == pytest.approx(expected_metrics, **{"abs": 1e-5, "rel": 1e-5})
    assert found.keys() == expected.keys() and all(".lora_" in name for name in found)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], **close, msg=name)
    scores, expected_scores = (one.infer_batch(batch)["logprobs"] for one in (engine, other))
    torch.testing.assert_close(scores, expected_scores, **close)
    assert (scores - before).abs().max() > 1e-3
    with engine.disable_adapter():
        torch.testing.assert_close(engine.infer_batch(batch)["logprobs"], before, **close)
    sent, expected_sent = (dict(one.get_per_tensor_param(1 << 20)) for one in (engine, other))
    assert list(sent) == list(expected_sent)
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, expected_sent[name], **close, msg=name)
    engine.export_hf(tmp_path / "model")
    exported = dict(load_model(str(tmp_path / "model")).named_parameters())
    assert all(torch.equal(exported[name], tensor) for name, tensor in sent.items())


def test_read_in_shards_they_are_the_same(tiny_dir):
    whole, in_shards = (make_engine("fsdp2", model=quantized(tiny_dir, on_meta=x)) for x in (False, True))
    weights = dict(in_shards.get_per_tensor_param())
    assert not any(p.is_meta for p in in_shards.module.parameters())
    assert all(torch.equal(weights.pop(name), tensor) for name, tensor in whole.get_per_tensor_param()) and not weights
    assert all(torch.equal(x, y) for x, y in zip(whole.module.buffers(), in_shards.module.buffers(), strict=True))


def test_bytes_of_weights_and_what_fsdp_gathers(tiny_dir, processor):
    """4.25 bits a weight, sharded, and gathered as they are: in bfloat16 neither codes nor scales are cast."""
    engine = engine_for(tiny_dir, model=quantized(tiny_dir), compute_dtype=torch.bfloat16)
    layers = [module for module in engine.module.modules() if isinstance(module, Nf4Linear)]
    assert len(layers) == 14 and all(isinstance(layer.codes, DTensor) for layer in layers)
    for layer in layers:
        blocks = -(-layer.in_features // 64)
        stored = layer.codes.to_local().nbytes + layer.scales.to_local().nbytes
        assert stored == layer.out_features * blocks * 64 * 4.25 / 8
    local = [(layer.codes.to_local().clone(), layer.scales.to_local().clone()) for layer in layers]
    engine.train_batch(make_batch(processor), POLICY[0], OUTPUTS[POLICY][:2])
    with engine.gathered():
        for layer, (codes, scales) in zip(layers, local, strict=True):
            assert torch.equal(layer.codes, codes) and torch.equal(layer.scales, scales)


def test_a_checkpoint_has_adapters_alone_and_resumes(tiny_dir, processor, tmp_path):
    engine = engine_for(tiny_dir, model=quantized(tiny_dir))
    trained(engine, processor)
    engine.save_checkpoint(tmp_path / "step_2", {"step": 2})
    names = FileSystemReader(tmp_path / "step_2").read_metadata().state_dict_metadata
    assert [name for name in names if name.startswith("model.") and ".lora_" not in name] == []
    other = engine_for(tiny_dir, model=quantized(tiny_dir, on_meta=True))
    assert other.load_checkpoint(tmp_path / "step_2") == {"step": 2}
    metrics, expected = (trained(one, processor) for one in (other, engine))
    assert metrics[0] == expected[0]
    assert all(torch.equal(x, metrics[1][name]) for name, x in expected[1].items())


def test_the_sampler_has_the_trainers_weights(tiny_dir, processor):
    """Log-probabilities of the sampler hf are the trainer's, after steps and with suppressed image tokens."""
    suppressed = suppressed_token_ids(load_model(tiny_dir).config, processor.tokenizer)
    engine = engine_for(tiny_dir, model=quantized(tiny_dir), suppressed_token_ids=suppressed)
    trained(engine, processor)
    rows = [(sample.group_id, sample.row) for sample in make_samples(processor, responses=(1, 1, 1, 1))]
    rollout = make_rollout("hf", engine.gathered, processor=processor)
    batch = collate(rollout.generate(encode_prompts(processor, rows)[0], Sampling(8, seed=(3,)), n=3))
    scores = engine.infer_batch(batch)["logprobs"]
    torch.testing.assert_close(scores[batch.mask], batch.rollout_logprobs[batch.mask], atol=1e-5, rtol=1e-5)
