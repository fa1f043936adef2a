"""What engines export, read by transformers and by peft."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlkit.data import Batch
from rlkit.engines import export, make_engine
from rlkit.engines.distributed import full_tensor
from rlkit.engines.sampler_dtype import sampler_dtype
from rlkit.engines.value_head import load_value_model, scoring_batch, with_value_head
from rlkit.losses import token_mean
from rlkit.vlm import load_model, load_processor, lora

sys.path.insert(0, str(Path(__file__).parent))
import test_families
from rows import make_batch
from test_families import vision_model

PAD = 59
SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def text_model(kind=Qwen2ForCausalLM, config=Qwen2Config, **options):
    torch.manual_seed(0)
    return kind(config(**SIZES, num_attention_heads=4, num_key_value_heads=2, **options))


def text_batch():
    tokens = torch.randint(1, 50, (3, 9), generator=torch.Generator().manual_seed(1))
    lengths = [9, 6, 4]
    for row, length in enumerate(lengths):
        tokens[row, length:] = PAD
    return Batch(tokens, tokens != PAD, lengths)


def reward_engine(model, engine="fsdp2"):
    head = model.get_output_embeddings()
    head.weight.data.copy_(torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(3)))
    return make_engine(engine, "value_model", model=model, optimizer=adamw)


def dtypes(path):
    return {x.dtype for file in Path(path).glob("*.safetensors") for x in load_file(file).values()}


def test_dtype_of_the_files(tiny_dir, tmp_path):
    """bfloat16 in files and in every config; the engine keeps its own weights."""
    engine = make_engine("fsdp2", model=load_model(tiny_dir), processor=load_processor(tiny_dir))
    before = dict(engine.get_per_tensor_param())
    engine.export_hf(tmp_path / "half", torch.bfloat16)
    assert dtypes(tmp_path / "half") == {torch.bfloat16}
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert {config["dtype"], config["text_config"]["dtype"], config["vision_config"]["dtype"]} == {"bfloat16"}
    again = load_model(str(tmp_path / "half"))
    for name, x in make_engine("fsdp2", model=again).get_per_tensor_param():
        assert torch.equal(x, before[name].bfloat16().float()), name
    assert all(torch.equal(x, before[name]) for name, x in engine.get_per_tensor_param())
    engine.export_hf(tmp_path / "whole")
    assert dtypes(tmp_path / "whole") == {torch.float32}


@pytest.mark.parametrize("engine", ["fsdp2", "megatron"])
@pytest.mark.parametrize("kind,config", [(Qwen2ForCausalLM, Qwen2Config), (LlamaForCausalLM, LlamaConfig)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_reward_model_is_a_classifier(tmp_path, engine, kind, config, dtype):
    """transformers' classifier scores padded rows as the engine does, and the export trains again."""
    trained = reward_engine(with_value_head(text_model(kind, config, pad_token_id=PAD)), engine)
    scores = trained.infer_batch(scoring_batch(text_batch()))["values"].sum(1)
    trained.export_hf(tmp_path / "reward", dtype)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward", dtype=torch.float32).eval()
    assert classifier.config.num_labels == 1
    tokens = text_batch().tokens
    with torch.no_grad():
        found = classifier(tokens, attention_mask=(tokens != PAD).long()).logits[:, 0]
    tolerance = 1e-5 if dtype is None else 3e-2
    torch.testing.assert_close(found, scores, atol=tolerance, rtol=tolerance)
    if engine == "fsdp2":
        for on_meta in (False, True):
            again = load_value_model(str(tmp_path / "reward"), on_meta=on_meta)
            loaded = make_engine("fsdp2", "value_model", model=again, optimizer=adamw)
            repeated = loaded.infer_batch(scoring_batch(text_batch()))["values"].sum(1)
            torch.testing.assert_close(repeated, found, atol=1e-5, rtol=1e-5)
            assert loaded.train_batch(text_batch(), lambda out, mb: (out.values.mean(), {}))["skipped_steps"] == 0


def test_a_classifier_with_several_labels_is_refused(tmp_path):
    config = Qwen2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, num_labels=3, pad_token_id=PAD)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected a classifier with one label, got 3"):
        load_value_model(str(tmp_path))


def test_a_classifier_without_its_head_is_refused(tmp_path):
    """Not scored with a head of random numbers."""
    model = text_model()
    model.config.num_labels = 1
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen2ForSequenceClassification"]}))
    for on_meta in (False, True):
        with pytest.raises(ValueError, match=r"expected .*score.weight"):
            make_engine("fsdp2", "value_model", model=load_value_model(str(tmp_path), on_meta=on_meta))


def test_adapters_are_read_by_peft(tmp_path):
    text_model().save_pretrained(tmp_path / "base")
    model = lora(load_model(str(tmp_path / "base")), 4, 8)
    engine = make_engine("fsdp2", model=model, optimizer=adamw)
    for _ in range(2):
        engine.train_batch(text_batch(), lambda out, mb: (-token_mean(out.logprobs, mb.mask, mb.total_tokens), {}))
    engine.export_adapter(tmp_path / "adapter")
    engine.export_hf(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert adapted.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")
    tokens = text_batch().tokens[:1]
    with torch.no_grad():
        logits, expected = adapted(tokens).logits, merged(tokens).logits
        with adapted.disable_adapter():
            plain = adapted(tokens).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert (plain - logits).abs().max() > 1e-3


def test_adapters_of_a_model_without_any(tiny_dir, tmp_path):
    with pytest.raises(ValueError, match="get_adapter: expected a model with adapters, got none"):
        make_engine("fsdp2", model=load_model(tiny_dir)).export_adapter(tmp_path / "adapter")
    assert not list(tmp_path.iterdir())


def test_adapters_are_not_all_that_is_trained(tiny_dir):
    model = lora(load_model(tiny_dir), 4, 8)
    engine = make_engine("fsdp2", model=model)
    whole = dict(engine.get_adapter()[1])
    bucketed = dict(engine.get_adapter(1 << 14, torch.bfloat16)[1])
    assert list(whole) == list(bucketed) and len(whole) > 20
    assert all(torch.equal(bucketed[name], weight.bfloat16()) for name, weight in whole.items())
    norm = model.get_base_model().model.language_model.norm.weight
    norm.requires_grad_(True)
    with pytest.raises(ValueError, match="get_adapter: expected adapters to be all that is trained, got .*norm.weight"):
        engine.get_adapter()


def test_images_rewards_stay_in_rlkits_form(tiny_dir, tmp_path):
    """Qwen2.5-VL has no classifier in transformers."""
    engine = reward_engine(load_value_model(tiny_dir))
    batch = make_batch(load_processor(tiny_dir))
    values = engine.infer_batch(batch)["values"]
    engine.export_hf(tmp_path / "reward", torch.float32)
    again = make_engine("fsdp2", "value_model", model=load_value_model(str(tmp_path / "reward")))
    torch.testing.assert_close(again.infer_batch(batch)["values"], values)


@pytest.mark.parametrize("family", ["glm4_moe", "glm5_next", "gemma4", "qwen4_exp", "ernie4_5_vl_moe"])
def test_files_of_a_family_hold_all_of_its_parameters_and_buffers(family, tmp_path):
    """Routers have a bias that is a buffer; in ERNIE's files the experts for text and for images are one list."""
    is_text = family in test_families.TEXT
    model = test_families.text_model(family, test_families.TEXT[family]) if is_text else vision_model(family, "sdpa")
    for name, buffer in model.named_buffers():
        if name.endswith(("correction_bias", "layer_scalar")):
            buffer.normal_()
    engine = make_engine("fsdp2", model=model)
    engine.export_hf(tmp_path)
    again = load_model(str(tmp_path))
    torch.testing.assert_close(dict(again.named_parameters()), parameters(engine), atol=0, rtol=0)
    torch.testing.assert_close(dict(again.named_buffers()), dict(engine.module.named_buffers()), atol=0, rtol=0)
    if family in ("glm4_moe", "gemma4"):  # vLLM has these; it drops their buffers when it sleeps
        sent = {name: tensor.detach() for name, tensor in engine.get_per_tensor_param()}
        assert any(name.endswith(("correction_bias", "layer_scalar")) for name in sent)
        torch.testing.assert_close(sent, load_file(tmp_path / "model.safetensors"), atol=0, rtol=0)


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp1"])
def test_buffers_of_a_wrapped_model_have_the_names_of_its_files(backend, tmp_path):
    """peft wraps routers, for adapters of their weights, and FSDP1 wraps layers."""
    model = test_families.text_model("glm4_moe", test_families.TEXT["glm4_moe"])
    (bias,) = (buffer.normal_() for name, buffer in model.named_buffers() if name.endswith("correction_bias"))
    engine = make_engine(backend, model=lora(model, 2, 4) if backend == "fsdp2" else model)
    engine.export_hf(tmp_path)
    sent, name = dict(engine.get_per_tensor_param()), "model.layers.1.mlp.gate.e_score_correction_bias"
    assert sent.keys() == load_file(tmp_path / "model.safetensors").keys()
    assert torch.equal(sent[name], bias) and torch.equal(load_model(str(tmp_path)).get_buffer(name), bias)
    with engine.gathered() as module:
        assert torch.equal(next(x for n, x in module.named_buffers() if n.endswith("correction_bias")), bias)


def parameters(engine):
    return {name: full_tensor(parameter) for name, parameter in engine.module.named_parameters()}


def test_large_models_are_several_files(tmp_path, monkeypatch):
    """Rank 0 writes a file as soon as its tensors are there, and holds no more."""
    monkeypatch.setattr(export, "FILE_BYTES", 20_000)
    engine = make_engine("fsdp2", model=text_model())
    engine.export_hf(tmp_path / "model", torch.bfloat16)
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    sizes = [sum(x.nbytes for x in load_file(file).values()) for file in files]
    largest = max(p.numel() for p in engine.module.parameters()) * 2
    assert max(sizes) <= max(20_000, largest)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    for name, weight in again.named_parameters():
        expected = engine.module.get_parameter(name)
        assert torch.equal(weight, expected.to(torch.bfloat16)), name
    assert not list((tmp_path / "model").glob("*.part"))


@pytest.mark.parametrize("adapters", [False, True])
def test_weights_in_the_dtype_of_the_sampler(adapters):
    """Matrices are cast before they are gathered, or after adapters were merged in float32; norms are not cast."""
    model = text_model()
    engine = make_engine("fsdp2", model=lora(model, 4, 8) if adapters else model, optimizer=adamw)
    engine.train_batch(text_batch(), lambda out, mb: (token_mean(-out.logprobs, mb.mask, mb.total_tokens), {}))
    own = dict(engine.get_per_tensor_param())
    for bucket_bytes in (0, 1 << 14):
        found = dict(engine.get_per_tensor_param(bucket_bytes, torch.bfloat16))
        assert found.keys() == own.keys()
        for name, tensor in found.items():
            dtype = torch.float32 if "norm" in name or "bias" in name else torch.bfloat16
            assert tensor.dtype == dtype and torch.equal(tensor, own[name].to(dtype)), name


def test_what_a_sampler_may_keep_in_float32_is_not_cast():
    def cast(shape, name, dtype=torch.bfloat16, own=torch.float32, model=None):
        return sampler_dtype(model, name, torch.empty(shape, dtype=own, device="meta"), dtype)

    layer = "model.layers.0"
    kept = {
        "mlp.gate.weight": (4, 8),
        "mlp.router.weight": (4, 8),
        "linear_attn.A_log": (8,),
        "moe_statics.e_score_correction_bias": (1, 8),
        "linear_attn.conv1d.weight": (8, 1, 4),
        "self_attn.q_conv1d.weight": (8, 1, 4),
    }
    assert all(cast(shape, f"{layer}.{name}") == torch.float32 for name, shape in kept.items())
    for name in ("mlp.gate_proj.weight", "mlp.experts.gate_up_proj", "self_attn.q_proj.weight", "embed_tokens.weight"):
        assert cast((4, 8), f"{layer}.{name}") == torch.bfloat16
    family = SimpleNamespace(_keep_in_fp32_modules_strict={"sinks", "q_proj"})
    assert cast((4, 8), f"{layer}.self_attn.q_proj.weight", model=family) == torch.float32
    assert cast((4, 8), f"{layer}.mlp.up_proj.weight", own=torch.bfloat16, dtype=torch.float32) == torch.bfloat16
    assert cast((4, 8), f"{layer}.mlp.up_proj.weight", own=torch.bfloat16, dtype=torch.float16) == torch.bfloat16
    assert cast((4, 8), f"{layer}.mlp.up_proj.weight", dtype=None) == torch.float32


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_published_generation_config_is_exported_as_it_is(tmp_path, on_meta):
    """transformers does not write a temperature without do_sample, which Vicuna's and others' files have."""
    text_model().save_pretrained(tmp_path / "model")
    published = {"eos_token_id": [2, 3], "temperature": 0.9, "top_p": 0.6}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(published))
    engine = make_engine("fsdp2", model=load_model(str(tmp_path / "model"), on_meta=on_meta))
    for _ in range(2):  # the model keeps its own
        engine.export_hf(tmp_path / "exported")
        written = json.loads((tmp_path / "exported" / "generation_config.json").read_text())
        assert {name: x for name, x in written.items() if name != "transformers_version"} == published
