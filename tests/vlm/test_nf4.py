"""Weights in NF4: their values beside plain loops, the layer beside a linear one, and which layers get them."""

import copy
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
import test_families
from family_configs import TEXT

from rlkit.vlm import load_model, lora, merged_parameters, quantize_base, trainable_summary
from rlkit.vlm.nf4 import NF4_VALUES, Nf4Linear, dequantize_nf4, quantize_nf4, weight_counts


def test_values_are_quantiles_of_the_normal_distribution():
    """Section 3 of the paper: eight quantiles below 0 and nine from 0 on, scaled to [-1, 1], with an offset."""
    offset = 0.9677083
    below = -torch.special.ndtri(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    above = torch.special.ndtri(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    values = torch.cat([below, above.new_zeros(1), above]).sort().values
    torch.testing.assert_close(torch.tensor(NF4_VALUES).double(), values / values.max(), atol=1e-6, rtol=0)


def naive_nf4(row):
    """The dequantized weights of a row, block by block and weight by weight."""
    result = []
    for start in range(0, len(row), 64):
        block = row[start : start + 64]
        scale = torch.tensor(max(abs(w) for w in block)).bfloat16().item()
        for w in block:
            nearest = min(NF4_VALUES, key=lambda value: abs(w - scale * value))
            result.append(scale * nearest)
    return result


@pytest.mark.parametrize("columns", [1, 63, 64, 130, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_plain_loops(columns, dtype):
    weight = torch.randn(5, columns, generator=torch.Generator().manual_seed(columns)).to(dtype)
    weight[2] = 0
    weight[3] *= 1e-30
    codes, scales = quantize_nf4(weight)
    blocks = -(-columns // 64)
    assert (codes.dtype, codes.shape) == (torch.uint8, (5, 32 * blocks))
    assert (scales.dtype, scales.shape) == (torch.bfloat16, (5, blocks))
    found = dequantize_nf4(codes, scales, columns)
    torch.testing.assert_close(found, torch.tensor([naive_nf4(row) for row in weight.tolist()]), atol=0, rtol=1e-6)
    again = quantize_nf4(found)
    assert torch.equal(again.codes, codes) and torch.equal(again.scales, scales)


def test_a_shard_of_rows_is_quantized_like_the_whole():
    weight = torch.randn(6, 100)
    whole, parts = quantize_nf4(weight), [quantize_nf4(rows) for rows in weight.split(4)]
    assert all(torch.equal(x, torch.cat(shards)) for x, *shards in zip(whole, *parts, strict=True))
    with pytest.raises(ValueError, match=r"weight: expected a matrix, got shape \[3\]"):
        quantize_nf4(torch.ones(3))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layer_is_a_linear_layer_with_dequantized_weights(bias, dtype):
    """Forward and the gradient of its input are equal; only codes and scales are kept for backward."""
    linear = nn.Linear(128, 24, bias=bias, dtype=dtype).requires_grad_(False)
    layer, x = Nf4Linear(linear), torch.randn(2, 3, 128, dtype=dtype)
    weight = layer.dequantized(layer.codes, layer.scales)
    assert weight.dtype == dtype and 0 < (weight - linear.weight).abs().max() < 0.2 * linear.weight.abs().max()
    ours, theirs, kept = x.clone().requires_grad_(), x.clone().requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        y = layer(ours)
    expected = F.linear(theirs, weight, linear.bias)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert {x.shape for x in kept} == {layer.codes.shape, layer.scales.shape, (256, 2)}


def test_a_weight_takes_four_and_a_quarter_bits():
    linear = nn.Linear(4096, 512, bias=False).requires_grad_(False)
    size = sum(p.nbytes for p in Nf4Linear(linear).parameters())
    assert size * 8 == 4.25 * linear.weight.numel() == 4.25 * sum(weight_counts(Nf4Linear(linear)))


def quantized_names(model):
    return {name.removesuffix(".base_layer") for name in quantize_base(model)}


def test_the_language_model_is_quantized_and_the_rest_is_not(tiny_dir):
    model = load_model(tiny_dir)
    before = {name: p.clone() for name, p in model.named_parameters()}
    linear = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    adapted = lora(model, 4, 8)
    names = quantized_names(adapted)
    assert names == {name for name in linear if ".visual." not in name} - {"lm_head"} and len(names) == 14
    assert trainable_summary(adapted).startswith("19,456 of 733,504 parameters train")
    assert trainable_summary(adapted).endswith("; 53.6% are frozen in 4 bits")
    after = dict(merged_parameters(adapted))
    assert list(after) == list(before)
    changed = {name.removesuffix(".weight") for name in before if not torch.equal(after[name], before[name])}
    assert changed == names


@pytest.mark.parametrize("family", ["qwen2_moe", "llama4_text", "gemma3n_text", "nemotron_h"])
def test_routers_and_layers_inside_kernels_are_not_quantized(family):
    names = quantized_names(lora(test_families.text_model(family, TEXT[family]), 2, 4))
    ends = {name.rsplit(".", 1)[1] for name in names}
    assert "q_proj" in ends and not {end for end in ends if end.endswith(("gate", "router"))} - {"per_layer_input_gate"}
    if family == "nemotron_h":
        assert "in_proj" in ends and not any(name.endswith("mixer.out_proj") for name in names)


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_omni_thinker"])
def test_encoders_are_not_quantized(family):
    names = quantized_names(lora(test_families.vision_model(family), 2, 4))
    assert names and not any("visual" in name or "vision" in name or "audio" in name for name in names)


def test_refuses_a_model_without_frozen_layers(tiny_dir):
    with pytest.raises(ValueError, match="^model: expected frozen linear layers, as below LoRA adapters, got none"):
        quantize_base(load_model(tiny_dir))
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64))
    with pytest.raises(ValueError, match="expected frozen linear layers"):  # GPT-2's are of a class of its own
        quantize_base(lora(gpt2, 2, 4, r".*c_attn"))


def test_on_the_meta_device_the_same_layers_have_the_same_sizes(tiny_dir):
    real, empty = lora(load_model(tiny_dir), 2, 4), lora(load_model(tiny_dir, on_meta=True), 2, 4)
    assert quantized_names(real) == quantized_names(empty)
    sizes = [{name: (p.shape, p.dtype, p.requires_grad) for name, p in m.named_parameters()} for m in (real, empty)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "falcon_h1", "gemma3n_text", "qwen3_next"])
def test_as_a_model_with_dequantized_weights(family):
    """Logits and the gradients of the adapters."""
    torch.manual_seed(0)
    plain = lora(test_families.text_model(family, TEXT[family]), 2, 4).eval()
    for name, p in plain.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    quantized = copy.deepcopy(plain)
    for name in quantize_base(quantized):
        layer = quantized.get_base_model().get_submodule(name)
        plain.get_base_model().get_submodule(name).weight.data = layer.dequantized(layer.codes, layer.scales)
    tokens = torch.randint(3, 30, (2, 9))
    logits = [model(input_ids=tokens, use_cache=False).logits for model in (quantized, plain)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    assert logits[0].std() > 0
    for x in logits:
        x.square().mean().backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in quantized.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys() and any(grad.abs().max() > 0 for grad in found.values())
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], atol=1e-5, rtol=1e-5, msg=name)
    merged = dict(merged_parameters(quantized))
    for name, p in merged_parameters(plain):
        torch.testing.assert_close(merged[name], p, atol=1e-6, rtol=1e-6, msg=name)
