"""Weights of which each rank reads a shard: the same as those of a full load. On two ranks: `test_ranks.py`."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule

from rlkit.engines import make_engine
from rlkit.engines.distributed import init_distributed
from rlkit.engines.fsdp import fsdp2, sharded_loading
from rlkit.engines.fsdp.sharded_loading import fully_read_parameters
from rlkit.engines.fsdp.sharding import make_device_mesh
from rlkit.engines.fsdp.value_engine import Fsdp2ValueEngine
from rlkit.engines.value_head import load_value_model, with_value_head
from rlkit.runs import TrainingOptions, build_reference, build_scorer
from rlkit.runs.models import trained_part
from rlkit.vlm import freeze, load_model, load_processor, lora, vision_tower_pattern

sys.path.insert(0, str(Path(__file__).parent))
import family_configs
import test_families
from one_gradient import OUTPUTS, POLICY, VALUE
from rows import make_batch


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.fixture
def saved(tmp_path):
    """A function that writes a tiny model of a family and returns its directory."""

    def save(family, **config):
        model = test_families.text_model(family, {**test_families.TEXT[family], **config})
        model.save_pretrained(tmp_path / family)
        return str(tmp_path / family)

    return save


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_weights_and_buffers_equal_those_of_a_full_load(saved, family):
    """Also experts, which are separate tensors in the files, and rotary tables, which are not in the files."""
    path = saved(family)
    expected = load_model(path)
    model = load_model(path, on_meta=True)
    assert all(p.is_meta for p in model.parameters()) and not model.training
    engine = make_engine("fsdp2", model=model)
    weights = dict(engine.get_per_tensor_param())
    full = dict(make_engine("fsdp2", model=expected).get_per_tensor_param())
    assert weights.keys() == full.keys() and all(torch.equal(weights[name], tensor) for name, tensor in full.items())
    buffers, full_buffers = dict(model.named_buffers()), dict(expected.named_buffers())
    assert buffers.keys() == full_buffers.keys() and len(buffers) >= 2
    assert all(torch.equal(buffers[name], buffer) for name, buffer in full_buffers.items())


@pytest.mark.parametrize("family", [*test_families.TEXT, *test_families.VISION])
def test_weights_that_are_made_of_full_tensors(family, tmp_path, monkeypatch):
    """Those that a plan counts, which docs/families.md lists, are those that are read so. Others are read in slices."""
    config = test_families.TEXT.get(family)
    model = test_families.vision_model(family) if config is None else test_families.text_model(family, config, "eager")
    names = fully_read_parameters(model)
    layers = {part: [n for n in names if f".{part}." in n] for part in family_configs.MADE_OF_FULL.get(family, ())}
    assert all(layers.values()) and names == {name for found in layers.values() for name in found}
    if not names and family != "qwen3_vl_moe":
        return
    model.save_pretrained(tmp_path)
    found, conversions = set(), sharded_loading._conversions

    def look(plain, slices):
        mapping, from_full = conversions(plain, slices)
        found.update(from_full)
        return mapping, from_full

    monkeypatch.setattr(sharded_loading, "_conversions", look)
    read = load_model(str(tmp_path), on_meta=True)
    make_engine("fsdp2", model=read, use_remove_padding=False)
    assert names == found & dict(model.named_parameters()).keys()
    assert all(torch.equal(x, read.state_dict()[name]) for name, x in load_model(str(tmp_path)).state_dict().items())


@pytest.mark.parametrize("family", ["gemma4_text", "glm4_moe", "nemotron_h", "ernie4_5_moe"])
def test_dtypes_equal_those_of_a_full_load(saved, family):
    """Layers of Gemma 4 have a scale in bfloat16; biases of routers, and whole routers of ERNIE, stay in float32."""
    path = saved(family)
    file = Path(path) / "model.safetensors"
    tensors = {name: x + 0.1 if name.endswith(("scalar", "bias")) else x for name, x in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    expected = load_model(path, dtype=torch.bfloat16).state_dict()
    model = load_model(path, dtype=torch.bfloat16, on_meta=True)
    make_engine("fsdp2", model=model)
    found = {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in model.state_dict().items()}
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in expected.items()}
    assert all(torch.equal(x, expected[name]) for name, x in found.items())


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_weights_of_several_dtypes_are_not_trained(saved, engine):
    """transformers keeps ERNIE's routers in float32."""
    model = load_model(saved("ernie4_5_moe"), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="^dtype: expected float32 for this family, .*float32"):
        make_engine(engine, model=model, optimizer=adamw)


def test_a_reference_may_have_weights_of_several_dtypes(saved):
    """It has those of its files: here bfloat16, but routers in float32."""
    path = saved("ernie4_5_moe")
    config = json.loads((Path(path) / "config.json").read_text())
    (Path(path) / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    init_distributed("cpu")
    scorer = build_scorer(TrainingOptions(model=path), path, None)
    expected = make_engine("fsdp2", model=load_model(path)).infer_batch(test_families.rows()[0])["logprobs"]
    found = scorer.infer_batch(test_families.rows()[0])["logprobs"]
    assert {p.dtype for p in scorer.module.parameters()} == {torch.bfloat16, torch.float32}
    assert (found - expected).abs().max() < 0.2 and found.any()


@pytest.mark.parametrize("family", ["qwen2", "falcon_h1", "gemma4_text", "ernie4_5_moe"])
@pytest.mark.parametrize("on_meta", [True, False])
def test_a_reference_holds_weights_as_it_computes(saved, family, on_meta):
    """The results are those of float32 weights to the bit. Buffers (of Falcon-H1 and Gemma 4) keep their dtype."""
    path, options = saved(family), {"device": "cpu", "compute_dtype": torch.bfloat16}
    file, batch = Path(path) / "model.safetensors", test_families.rows()[0]
    tensors = {name: x + 0.1 if name.endswith("scalar") else x for name, x in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    expected = make_engine("fsdp2", model=load_model(path), **options).infer_batch(batch)["logprobs"]
    reference = make_engine("fsdp2", model=load_model(path, on_meta=on_meta), only_scores=True, **options)
    assert torch.equal(reference.infer_batch(batch)["logprobs"], expected) and expected.any()
    assert {p.dtype for p in reference.module.parameters()} == {torch.bfloat16}
    buffers = dict(load_model(path).named_buffers())
    assert all(x.dtype == buffers[name].dtype for name, x in reference.module.named_buffers())


@pytest.mark.parametrize("family", [*test_families.TEXT, *test_families.VISION])
def test_a_reference_of_bfloat16_files_scores_as_the_policy_in_float32(family, tmp_path):
    """To the bit, before the first step: the KL divergence of a policy from its own copy is 0.

    So does one that is read by shards, also if transformers keeps some of its weights in float32 (ERNIE, GLM-5 next).
    transformers makes a buffer of Falcon-H1, which scales activations, in the dtype that a model is loaded in.
    """
    config = test_families.TEXT.get(family)
    model = test_families.vision_model(family) if config is None else test_families.text_model(family, config, "eager")
    batch = test_families.rows(family if config is None else None)[0]
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    options = {"device": "cpu", "compute_dtype": torch.bfloat16}
    expected = make_engine("fsdp2", model=load_model(str(tmp_path)), **options).infer_batch(batch)["logprobs"]
    for on_meta, only_scores in ((False, True), (True, True), (True, False)):
        model = load_model(str(tmp_path), dtype=torch.bfloat16, on_meta=on_meta)
        reference = make_engine("fsdp2", model=model, only_scores=only_scores, **options)
        reference.module.requires_grad_(False)
        found = reference.infer_batch(batch)["logprobs"]
        if family == "falcon_h1":
            assert 0 < (found - expected).abs().max() < 0.05
        else:
            assert torch.equal(found, expected) and expected.any()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "glm4v", "qwen3_vl"])
def test_a_reference_is_the_policy_also_with_a_frozen_tower(family, tmp_path):
    """To the bit in bfloat16, before the first step; frozen layers of a tower get their inputs in float32."""
    test_families.vision_model(family).to(torch.bfloat16).save_pretrained(tmp_path)
    batch = test_families.rows(family)[0]
    cfg = TrainingOptions(model=str(tmp_path), freeze_vision_tower=True, compute_dtype="bfloat16")
    policy = trained_part(cfg, load_model(str(tmp_path)))
    engine = make_engine("fsdp2", model=policy, device="cpu", compute_dtype=torch.bfloat16)
    reference = build_reference(cfg, str(tmp_path), None, engine)
    assert torch.equal(reference(batch), engine.infer_batch(batch)["logprobs"]) and reference(batch).any()


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_weights_in_the_dtype_of_the_computation_are_not_copied(saved, lora_rank):
    """On a single rank; on several FSDP gathers weights into other tensors, as it does to cast those in float32."""
    batch, _ = test_families.rows()
    model = load_model(saved("olmo2"), dtype=torch.bfloat16)
    model = lora(model, lora_rank, 8).to(torch.bfloat16) if lora_rank else model
    addresses, used = {p.data_ptr() for p in model.parameters()}, set()
    engine = make_engine("fsdp2", model=model, compute_dtype=torch.bfloat16, device="cpu", optimizer=adamw)
    for part in model.modules():
        part.register_forward_hook(lambda part, *_: used.update(p.data_ptr() for p in part.parameters()))
    metrics = engine.train_batch(batch, lambda out, mb: (-(out.logprobs * mb.mask).sum() / mb.total_tokens, {}))
    assert used == addresses == {p.data_ptr() for p in engine.module.parameters()}
    assert 0 < metrics["grad_norm"] < 100 and not metrics["skipped_steps"]
    with engine.gathered() as module:
        assert {p.data_ptr() for p in module.parameters()} == addresses


def test_an_engine_with_an_optimizer_does_not_only_score(saved):
    with pytest.raises(ValueError, match="^only_scores: expected False in an engine with an optimizer, got True"):
        make_engine("fsdp2", model=load_model(saved("qwen2")), optimizer=adamw, only_scores=True)


def test_an_engine_that_only_scores_does_not_give_its_weights_away(saved, tmp_path):
    engine = make_engine("fsdp2", model=load_model(saved("qwen2")), only_scores=True)
    uses = {
        "get_per_tensor_param": engine.get_per_tensor_param,
        "get_adapter": engine.get_adapter,
        "gathered": lambda: engine.gathered().__enter__(),
        "export_hf": lambda: engine.export_hf(tmp_path / "out"),
        "save_checkpoint": lambda: engine.save_checkpoint(tmp_path / "out"),
    }
    for name, use in uses.items():
        with pytest.raises(ValueError, match=f"^{name}: expected an engine without only_scores"):
            use()
    assert not (tmp_path / "out").exists()


def test_tied_embeddings_stay_tied(saved, tmp_path):
    model = load_model(saved("qwen2", tie_word_embeddings=True), on_meta=True)
    engine = make_engine("fsdp2", model=model, optimizer=adamw)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(engine.get_per_tensor_param())
    batch = test_families.rows()[0]
    batch.add(advantages=torch.ones(len(batch)), rollout_logprobs=torch.zeros(batch.tokens.shape))
    other = make_engine("fsdp2", model=load_model(str(tmp_path / "qwen2")), optimizer=adamw)
    for _ in range(2):
        metrics, expected = (one.train_batch(batch, POLICY[2]) for one in (engine, other))
        assert metrics == expected


def test_frozen_with_adapters_and_with_a_value_head(tiny_dir, tmp_path):
    batch = make_batch(load_processor(tiny_dir))
    expected = make_engine("fsdp2", model=load_model(tiny_dir)).infer_batch(batch)["logprobs"]
    model = load_model(tiny_dir, on_meta=True)
    frozen = freeze(model, vision_tower_pattern(model))
    engine = make_engine("fsdp2", model=lora(model, 4, 8), optimizer=adamw)
    assert torch.equal(engine.infer_batch(batch)["logprobs"], expected)  # adapters add 0 at first
    engine.train_batch(batch, POLICY[0], OUTPUTS[POLICY])
    assert (engine.infer_batch(batch)["logprobs"] - expected).abs().max() > 1e-3
    assert frozen and all(p.grad is None for p in model.parameters() if not p.requires_grad)

    values = make_engine("fsdp2", "value_model", model=load_value_model(tiny_dir, on_meta=True), optimizer=adamw)
    assert not values.infer_batch(batch)["values"].any()
    values.train_batch(batch, VALUE[0])
    values.export_hf(tmp_path / "values")
    again = make_engine("fsdp2", "value_model", model=load_value_model(str(tmp_path / "values"), on_meta=True))
    weights = dict(values.get_per_tensor_param())
    assert all(torch.equal(weights.pop(name), x) for name, x in again.get_per_tensor_param()) and not weights
    expected = values.infer_batch(batch)["values"]
    assert expected.any()
    # where a file's tensors begin in memory changes how products are rounded
    torch.testing.assert_close(again.infer_batch(batch)["values"], expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["language_model", "value_model", "adapters"])
def test_what_is_not_read_from_files_is_moved_to_the_device(saved, monkeypatch, kind):
    """Buffers, adapters and a value head, on one rank, whose model FSDP does not wrap; here to the meta device."""
    init_distributed("cpu")
    cpu, meta = torch.device("cpu"), torch.device("meta")
    monkeypatch.setattr(fsdp2, "init_distributed", lambda device: meta)
    monkeypatch.setattr(fsdp2, "make_device_mesh", lambda device, *sizes: make_device_mesh(cpu, *sizes))
    monkeypatch.setattr(fsdp2, "load_sharded_weights", lambda base, device: None)  # they are there already
    model = (load_value_model if kind == "value_model" else load_model)(saved("qwen2"), on_meta=True)
    model = lora(model, 4, 8) if kind == "adapters" else model
    engine_class = Fsdp2ValueEngine if kind == "value_model" else fsdp2.Fsdp2Engine
    module = engine_class(model=model, compute_dtype=torch.float32).module
    assert not isinstance(module, FSDPModule)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert [name for name, x in tensors.items() if not x.is_meta] == []


def error_of(path, load=load_model):
    with pytest.raises(ValueError) as error:
        make_engine("fsdp2", "language_model" if load is load_model else "value_model", model=load(path, on_meta=True))
    return str(error.value)


def test_damaged_files_are_named(saved):
    path = saved("qwen2")
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    missing, reshaped = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    wrong = f"model {path!r}: expected every weight in its shape, got missing or different ones: "
    save_file({name: x for name, x in tensors.items() if name != missing}, file, {"format": "pt"})
    assert error_of(path) == wrong + missing
    save_file({**tensors, reshaped: torch.zeros(7)}, file, {"format": "pt"})
    assert error_of(path) == wrong + reshaped
    assert error_of(path, load_value_model) == wrong + reshaped
    save_file(tensors, file, {"format": "pt"})
    file.write_bytes(file.read_bytes()[:-1000])
    assert f"model {path!r}: " in error_of(path)
    file.unlink()
    index = {"weight_map": {name: "model-1.safetensors" for name in tensors}}
    (Path(path) / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-1.safetensors" in error_of(path)
    (Path(path) / "model.safetensors.index.json").unlink()
    assert "model.safetensors" in error_of(path)


def test_quantized_weights_are_refused_also_by_engines(saved):
    """Their scales would be left out. Here only the configuration of a loaded model says that they are quantized."""
    path = saved("qwen2")
    model = load_model(path, on_meta=True)
    model.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with pytest.raises(ValueError, match="expected weights that are not quantized, got fp8"):
        make_engine("fsdp2", model=model)
    file = Path(path) / "model.safetensors"
    model, tensors = load_model(path, on_meta=True), load_file(file)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"].to(torch.float8_e4m3fn)}, file)
    with pytest.raises(ValueError, match="not quantized, got model.norm.weight in F8_E4M3"):
        make_engine("fsdp2", model=model)


def test_an_output_layer_beside_tied_embeddings(saved):
    """transformers uses another one although config.json says that it is tied; vLLM does not."""
    path = saved("qwen2", tie_word_embeddings=True)
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    for factor in (1, 2):
        save_file(tensors | {"lm_head.weight": factor * tensors["model.embed_tokens.weight"]}, file, {"format": "pt"})
        for on_meta in (False, True):
            if factor == 1:
                model = load_model(path, on_meta=on_meta)
                make_engine("fsdp2", model=model)
                assert model.lm_head.weight is model.model.embed_tokens.weight
                continue
            with pytest.raises(ValueError, match="equals the embedding, .* --model_config tie_word_embeddings=false"):
                make_engine("fsdp2", model=load_model(path, on_meta=on_meta))


def test_weights_that_are_not_used_are_named(saved, capsys):
    path = saved("qwen3_next", **test_families.TEXT["qwen3_next"])
    file = Path(path) / "model.safetensors"
    extra = {"mtp.fc.weight": torch.ones(2), "model.layers.2.input_layernorm.weight": torch.ones(32)}
    save_file(load_file(file) | extra, file, {"format": "pt"})
    make_engine("fsdp2", model=load_model(path, on_meta=True))
    listed = "model.layers.*.input_layernorm.weight"  # and not what transformers leaves out by itself
    assert f"model {path!r}: tensors in its files that are not used (1): {listed}\n" in capsys.readouterr().out


def test_a_value_head_has_its_values_before_the_weights_are_read(saved):
    model = with_value_head(load_model(saved("qwen2"), on_meta=True))
    assert not model.lm_head.weight.is_meta and not model.lm_head.weight.any()
