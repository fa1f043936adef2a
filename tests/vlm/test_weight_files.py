"""Published forms of weights: quantized ones are refused, and can be written again in bfloat16; missing ones are named.

Files are those of tiny models, with the names, dtypes and configurations of published repositories.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rlkit.vlm import load_model
from rlkit.vlm.dequantize import dequantize_model, from_mxfp4, main, scaled, unpacked
from rlkit.vlm.model_config import write_model

FP8 = torch.float8_e4m3fn
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
UP = "model.layers.0.mlp.up_proj.weight"  # 48 x 32
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [20, 20]}
GROUP = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
IN_BLOCKS = {**GROUP, "strategy": "block", "block_structure": [20, 20]}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP}},
}  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    """A function that writes a tiny model with changed tensors and a changed config.json, and returns its directory."""

    def save(change=dict, place="model", **config):
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SIZES, dtype="bfloat16")).to(torch.bfloat16).save_pretrained(tmp_path / place)
        return rewrite(tmp_path / place, change, **config)

    return save


def rewrite(path, change, **config):
    save_file(change(load_file(path / "model.safetensors")), path / "model.safetensors", {"format": "pt"})
    content = {**json.loads((path / "config.json").read_text()), **config}
    (path / "config.json").write_text(json.dumps(content))
    return str(path)


def integers(shape, low, high):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1))


def in_blocks(tensors):
    """DeepSeek's, Qwen's and GLM's: blocks of rows and columns, the last ones smaller (48 rows of 20 are 3 blocks)."""
    scale = torch.arange(1, 7).reshape(3, 2) / 64
    return {**tensors, UP: integers((48, 32), -9, 9).to(FP8), f"{UP}_scale_inv": scale}


def per_tensor(tensors):
    """Mistral's: one scale, and one for activations."""
    one = {f"{UP}_scale_inv": torch.tensor(0.5), UP.replace("weight", "activation_scale"): torch.tensor(3.0)}
    return {**tensors, UP: integers((48, 32), -9, 9).to(FP8), **one}


def per_row(tensors):
    """Those of compressed-tensors, modelopt and fbgemm, with scales of the cache."""
    scale, cache = torch.arange(1, 49)[:, None] / 32, "model.layers.0.self_attn.k_scale"
    return {**tensors, UP: integers((48, 32), -9, 9).to(FP8), f"{UP}_scale": scale, cache: torch.tensor(2.0)}


def exponents(tensors):
    """MXFP8: for 32 columns of a row a power of two, whose exponent plus 127 is in a byte."""
    scale = (119 + torch.arange(48) % 9).to(torch.uint8)[:, None]
    return {**tensors, UP: integers((48, 32), -9, 9).to(FP8), f"{UP}_scale": scale}


def packed(tensors):
    """Kimi's: eight integers of four bits in one of 32, a scale for 16 of a row."""
    del tensors[UP]
    codes = (integers((48, 32), -8, 8) + 8).reshape(48, 4, 8)
    words = sum(codes[..., i] << 4 * i for i in range(8))
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    scale = torch.arange(1, 97).reshape(48, 2).bfloat16() / 4
    return {**tensors, f"{UP}_packed": words, f"{UP}_scale": scale, f"{UP}_shape": torch.tensor([48, 32])}


def expected(low, high, factor):
    """Each integer times factor(row, column)."""
    values = integers((48, 32), low, high).tolist()
    return torch.tensor([[x * factor(r, c) for c, x in enumerate(row)] for r, row in enumerate(values)]).bfloat16()


FORMS = {
    "blocks": (
        in_blocks,
        {"quantization_config": BLOCKS},
        expected(-9, 9, lambda r, c: (r // 20 * 2 + c // 20 + 1) / 64),
    ),
    "blocks of compressed-tensors": (
        in_blocks,
        {"quantization_config": {**COMPRESSED, "config_groups": {"group_0": {"weights": IN_BLOCKS}, "group_1": {}}}},
        expected(-9, 9, lambda r, c: (r // 20 * 2 + c // 20 + 1) / 64),
    ),
    "one": (
        per_tensor,
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}},
        expected(-9, 9, lambda r, c: 0.5),
    ),
    "rows": (per_row, {"quantization_config": COMPRESSED}, expected(-9, 9, lambda r, c: (r + 1) / 32)),
    "older": (per_row, {"compression_config": COMPRESSED}, expected(-9, 9, lambda r, c: (r + 1) / 32)),
    "modelopt": (
        per_row,
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
        expected(-9, 9, lambda r, c: (r + 1) / 32),
    ),
    "no configuration": (per_row, {}, expected(-9, 9, lambda r, c: (r + 1) / 32)),
    "mxfp8": (
        exponents,
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MXFP8"}},
        expected(-9, 9, lambda r, c: 2.0 ** (r % 9 - 8)),
    ),
    "four bits": (
        packed,
        {"quantization_config": {**COMPRESSED, "format": "pack-quantized"}},
        expected(-8, 8, lambda r, c: (r * 2 + c // 16 + 1) / 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_quantized_weights_are_refused_and_can_be_written_in_bfloat16(saved, tmp_path, form, monkeypatch, capsys):
    """transformers 5.19 would read "rows" and "modelopt" without their scales, and draw "blocks" at random."""
    change, config, weight = FORMS[form]
    path, new = saved(change, **config), tmp_path / "new"
    for on_meta in (False, True):
        with pytest.raises(ValueError, match=r"expected weights that are not quantized, got .*rlkit\.vlm\.dequantize"):
            load_model(path, on_meta=on_meta)
    monkeypatch.setattr(sys, "argv", ["dequantize", path, str(new)])
    main()
    assert "wrote new/model.safetensors" in capsys.readouterr().out
    model = load_model(str(new), dtype=torch.bfloat16)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, weight)
    unchanged = load_model(saved(place="unchanged"), dtype=torch.bfloat16)
    assert all(torch.equal(x, unchanged.get_parameter(name)) for name, x in model.named_parameters() if name != UP)
    assert not {"quantization_config", "compression_config"} & json.loads((new / "config.json").read_text()).keys()
    assert load_file(new / "model.safetensors").keys() == unchanged.state_dict().keys()


def test_a_configuration_of_the_language_model_alone_is_seen(tmp_path):
    """Kimi's is in text_config."""
    import transformers

    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = transformers.Qwen3VLConfig(text_config={**SIZES, "rope_parameters": rope}, vision_config=vision)
    transformers.Qwen3VLForConditionalGeneration(config).save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    path = rewrite(tmp_path, dict, text_config={**text, "quantization_config": COMPRESSED})
    with pytest.raises(ValueError, match="expected weights that are not quantized, got compressed-tensors"):
        load_model(path)


def test_several_files_are_written_with_an_index(saved, tmp_path):
    """A scale may be in another file than its weight; files of Mistral's own format are left out."""
    path = Path(saved(in_blocks, quantization_config=BLOCKS))
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").rename(path / "consolidated.safetensors")
    index = {name: f"model-{1 + name.endswith('scale_inv')}.safetensors" for name in tensors}
    index["model.norm.weight"] = "model-2.safetensors"
    for file in set(index.values()):
        save_file({name: x for name, x in tensors.items() if index[name] == file}, path / file, {"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    dequantize_model(str(path), tmp_path / "new")
    new = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())["weight_map"]
    assert new == {name: file for name, file in index.items() if not name.endswith("scale_inv")}
    model = load_model(str(tmp_path / "new"), dtype=torch.bfloat16)
    assert torch.equal(model.get_parameter(UP), FORMS["blocks"][2])
    assert not (tmp_path / "new" / "consolidated.safetensors").exists()


def test_a_configuration_file_of_a_quantized_model_gets_random_weights(saved, tmp_path):
    path = saved(quantization_config=BLOCKS)
    write_model(f"{path}/config.json", [], tmp_path / "new")
    assert load_model(str(tmp_path / "new")).get_parameter(UP).std() > 0


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "torchao", "quark", "hqq", "a new one"])
def test_other_quantized_weights_are_refused_by_name(saved, tmp_path, method):
    path = saved(quantization_config={"quant_method": method, "bits": 4, "load_in_4bit": method == "bitsandbytes"})
    for on_meta in (False, True):
        with pytest.raises(ValueError, match=f"got {method}; pass the model in bfloat16 that it was made of$"):
            load_model(path, on_meta=on_meta)
    with pytest.raises(ValueError, match="not quantized, got an unknown kind; "):
        load_model(saved(place="other", quantization_config={"bits": 4}))
    with pytest.raises(ValueError, match="expected quantized weights with their scales, got none"):
        dequantize_model(path, tmp_path / "new")
    assert not (tmp_path / "new").exists() and not (tmp_path / "new.part").exists()


def test_weights_with_unknown_scales_are_not_converted(saved, tmp_path):
    cases = {
        "without a scale": (lambda t: {**t, UP: t[UP].to(FP8)}, "expected F8_E4M3 with one scale beside it, got none"),
        "nvfp4": (
            lambda t: {**t, UP: t[UP].view(torch.uint8), f"{UP}_scale": t[UP].to(FP8), f"{UP}_scale_2": torch.ones(1)},
            "weight_scale_2",
        ),
        "asymmetric": (lambda t: {**packed(t), f"{UP}_zero_point": torch.zeros(48, 2)}, "weight_zero_point"),
        "integers of others": (
            lambda t: {**t, UP: integers((48, 32), -9, 9).to(torch.int8), f"{UP}_scale": torch.ones(48, 1)},
            "got I8 of fp8",
        ),
    }
    for place, (change, message) in cases.items():
        path = saved(change, place, quantization_config=BLOCKS)
        with pytest.raises(ValueError, match=message):
            dequantize_model(path, tmp_path / "new")


def test_gpt_oss_in_mxfp4(tmp_path):
    """The published names and shapes; the numbers are those that transformers reads."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = GptOssConfig(
        **{**SIZES, "intermediate_size": 32}, num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"]
    )
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    parts = {}

    def change(tensors):
        for name in [name for name in tensors if name.endswith(("experts.down_proj", "experts.gate_up_proj"))]:
            experts, columns, rows = tensors.pop(name).shape
            parts[f"{name}_blocks"] = integers((experts, rows, columns // 32, 16), 0, 256).to(torch.uint8)
            parts[f"{name}_scales"] = integers((experts, rows, columns // 32), 120, 130).to(torch.uint8)
        return {**tensors, **parts}

    path = rewrite(tmp_path / "model", change, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ValueError, match=r"got mxfp4; .*rlkit\.vlm\.dequantize"):
        load_model(path)
    dequantize_model(path, tmp_path / "new")
    model = load_model(str(tmp_path / "new"), dtype=torch.bfloat16)
    for name in ("down_proj", "gate_up_proj"):
        blocks, scales = (parts[f"model.layers.0.mlp.experts.{name}_{part}"] for part in ("blocks", "scales"))
        read = getattr(model.model.layers[0].mlp.experts, name)
        assert torch.equal(read, convert_moe_packed_tensors(blocks, scales)) and read.abs().max() > 1


def test_small_numbers():
    byte = torch.tensor([[[0x21, 0xF8]]], dtype=torch.uint8)
    assert from_mxfp4(byte, torch.tensor([[128]], dtype=torch.uint8)).tolist() == [[1.0, 2.0, -0.0, -12.0]]
    words = torch.tensor([[0x00000F80, -1]], dtype=torch.int32)
    assert unpacked(words[:, :1], [1, 7]).tolist() == [[-8, 0, 7, -8, -8, -8, -8]]
    assert unpacked(words, [1, 8]).tolist() == [[0, -113, -128, -128, 127, 127, 127, 127]]
    experts = torch.ones(2, 2, 2)
    assert scaled(experts, torch.tensor([2.0, 3.0])).amax((1, 2)).tolist() == [2, 3]
    assert scaled(experts, torch.tensor([[[2.0]], [[3.0]]])).amin((1, 2)).tolist() == [2, 3]
    assert scaled(torch.ones(2, 2), torch.tensor([2.0, 3.0])).tolist() == [[2, 2], [3, 3]]
    for wrong in (torch.ones(3, 1), torch.ones(2, 2)):
        with pytest.raises(ValueError, match="scale: expected one"):
            scaled(torch.ones(4, 4) if wrong.shape[0] == 3 else experts, wrong)


def test_blocks_of_unknown_size_are_refused():
    """192 rows with two scales may be blocks of 96, or of 128, the size of published ones."""
    scale = torch.tensor([[1.0], [2.0]])
    assert scaled(torch.ones(192, 1), scale, (128, 128))[:, 0].tolist() == [1] * 128 + [2] * 64
    assert scaled(torch.ones(256, 1), scale)[:, 0].tolist() == [1] * 128 + [2] * 128
    assert scaled(torch.ones(3, 2), torch.tensor([[1.0], [2.0], [3.0]]))[:, 0].tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="states the size of blocks, got 192 in 2 blocks, which may be of 96 or of 12"):
        scaled(torch.ones(192, 1), scale)


def test_missing_weights_are_named_when_a_model_is_read_whole(saved):
    """transformers draws them."""
    path = saved(lambda t: {name: x for name, x in t.items() if name != UP})
    with pytest.raises(ValueError, match=f"expected every weight in its shape, got missing or different ones: {UP}$"):
        load_model(path)


def test_two_sets_of_weights_and_adapters_are_refused(saved, tmp_path):
    path = Path(saved())
    save_file(load_file(path / "model.safetensors"), path / "model-00001-of-00001.safetensors", {"format": "pt"})
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {UP: "model-00001-of-00001.safetensors"}})
    )
    for on_meta in (False, True):
        with pytest.raises(ValueError, match="expected one set of weights, got model.safetensors and the other files"):
            load_model(str(path), on_meta=on_meta)
    for index in ('{"weight_map": []}', "[]", "{"):
        (path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ValueError, match="index.json: expected a weight_map from names to files, got: "):
            load_model(str(path))
    path = Path(saved(place="adapted"))
    (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/base"}))
    for _ in range(2):  # with and without a config.json
        with pytest.raises(
            ValueError, match="expected a whole model, got LoRA adapters .* of 'owner/base'; merge them"
        ):
            load_model(str(path), on_meta=True)
        (path / "config.json").unlink(missing_ok=True)
