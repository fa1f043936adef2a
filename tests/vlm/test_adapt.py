import copy
import re
import sys
import weakref
from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
import test_families
from family_configs import BASE, REFUSED, TEXT, VISION

from rlkit.engines import make_engine
from rlkit.vlm import (
    audio_tower_pattern,
    disable_dropout,
    encoder_modules,
    freeze,
    load_model,
    load_processor,
    lora,
    merged_parameters,
    trainable_summary,
    vision_tower_pattern,
)
from rlkit.vlm.checkpoint_weights import checkpoint_parameters, converted_together
from rlkit.vlm.families import PUBLISHED_NAMES
from rlkit.vlm.tiny import tiny_config


def family_model(family):
    """Tiny, with random weights."""
    if family in VISION:
        return test_families.vision_model(family)
    config = transformers.AutoConfig.for_model(family, **VISION[family][0])
    return transformers.AutoModelForImageTextToText.from_config(config)


@pytest.fixture(scope="module")
def loaded(tiny_dir):
    return load_model(tiny_dir)


@pytest.fixture
def model(loaded):
    return copy.deepcopy(loaded)


def trained(model) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def randomise(model, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.3)


def test_freeze_vision_tower(model):
    everything = trained(model)
    frozen = freeze(model, vision_tower_pattern(model))
    assert frozen and set(frozen) == {name for name in everything if ".visual." in name}
    assert trained(model) == everything - set(frozen)
    assert freeze(model, vision_tower_pattern(model)) == frozen  # twice is once


@pytest.mark.parametrize(
    ("family", "options", "count"),
    [
        # each of two layers: attention, its output, the MLP's output
        ("seed_oss", {"attention_dropout": 0.5, "residual_dropout": 0.5}, 6),
        # modules: one on the embeddings, three in each of two layers
        ("gpt2", {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}, 7),
    ],
)
def test_disable_dropout(family, options, count):
    model = test_families.text_model(family, {**TEXT[family], **options}, "sdpa")
    ids = torch.arange(3, 15)[None]
    expected = model(ids).logits
    model.train()
    assert (model(ids).logits - expected).abs().max() > 1e-2
    assert len(disable_dropout(model)) == count and disable_dropout(model) == []
    torch.testing.assert_close(model(ids).logits, expected)
    assert [getattr(model.config, name) for name in options] == [0.5] * len(options)  # what an export says


def test_routers_choose_the_same_experts_in_training():
    """Phi-MoE draws among experts with scores close to the best; input noise is an option of its and of others."""
    config = {**TEXT["phimoe"], "router_jitter_noise": 0.3, "input_jitter_noise": 0.1}
    model = test_families.text_model("phimoe", config, "sdpa")
    ids = torch.arange(3, 15)[None]
    expected = model(ids).logits
    model.train()
    assert (model(ids).logits - expected).abs().max() > 1e-4
    disable_dropout(model)
    for _ in range(3):
        torch.testing.assert_close(model.train()(ids).logits, expected)


FALCON = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
DROPOUTS = {"attention_dropout": 0.5, "hidden_dropout": 0.5, "resid_dropout": 0.5, "embed_dropout": 0.5}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *(("falcon", {**FALCON, "parallel_attn": parallel}) for parallel in (True, False)),
        ("gpt_neo", {**BASE, **REFUSED["gpt_neo"][0]}),
    ],
)
def test_disable_dropout_where_layers_read_the_configuration_in_each_forward(family, options):
    config = AutoConfig.for_model(family, **options, **DROPOUTS)
    model = test_families.seeded(lambda: AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    ids = torch.arange(3, 15)[None]
    expected = model(ids).logits
    model.train()
    assert disable_dropout(model) and disable_dropout(model) == []
    torch.testing.assert_close(model(ids).logits, expected)


def test_freeze_by_name(model):
    (name,) = freeze(model, r"^model\.language_model\.norm\.weight$")
    assert name == "model.language_model.norm.weight" and name not in trained(model)


TOWERS = {  # family -> what encodes images and, in families that hear, audios
    **dict.fromkeys(
        ("llava", "internvl", "gemma3", "kimi_k25", "lfm2_vl", "minicpmv4_6", "mistral3", "mistral4"),
        ["model.vision_tower"],
    ),
    **dict.fromkeys(
        ("ernie4_5_vl_moe", "llava_next", "llava_next_video", "llava_onevision", "muse_glimmer"), ["model.vision_tower"]
    ),
    **dict.fromkeys(("smolvlm", "idefics3", "video_llama_3", "hyperclovax_vision_v2"), ["model.vision_model"]),
    **dict.fromkeys(("gemma3n", "gemma4"), ["model.vision_tower", "model.audio_tower"]),
    "gemma4_unified": ["model.embed_vision", "model.embed_audio"],
    "llama4": ["vision_model"],
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), ["visual", "audio_tower"]),
}


@pytest.mark.parametrize("family", VISION)
def test_towers_of_every_family(family):
    """What the family calls them, whatever regular expression would match it."""
    model = family_model(family)
    names, everything = TOWERS.get(family, ["model.visual"]), trained(model)
    assert {*encoder_modules(model)} == {*names}
    frozen = freeze(model, vision_tower_pattern(model))
    assert set(frozen) == {name for name, _ in model.named_parameters() if name.startswith(f"{names[0]}.")}
    assert frozen and trained(model)  # the language model trains, and a projector beside the tower
    for tower in names[1:]:
        frozen = freeze(model, audio_tower_pattern(model))
        assert frozen and set(frozen) == {name for name in everything if name.startswith(f"{tower}.")}


@pytest.mark.parametrize("family", VISION)
def test_adapters_leave_the_towers_of_every_family_out(family):
    targets = "all-linear"
    if family == "qwen3_omni_moe_thinker":  # peft shortens "merger.mlp.0" to "0", which is the name of layers too
        with pytest.raises(ValueError, match="is not supported"):
            lora(family_model(family), 2, 4, targets)
        targets = r".*(q|k|v|o|out)_proj"
    model = family_model(family)
    names = tuple(f"base_model.model.{name}." for name in encoder_modules(model))
    adapted = trained(lora(model, 2, 4, targets))
    assert adapted and not [name for name in adapted if name.startswith(names)]
    with_towers = trained(lora(family_model(family), 2, 4, targets, adapt_towers=True))
    assert adapted < with_towers and all(name.startswith(names) for name in with_towers - adapted)
    fewer = trained(lora(family_model(family), 2, 4, targets, r".*(q_proj|q_a_proj|in_proj_qkv)"))
    assert adapted > fewer and not [name for name in fewer if "q_proj" in name or name.startswith(names)]


@pytest.mark.parametrize(
    "family",
    [
        "axk1", "ernie4_5_moe", "falcon_h1", "gemma4_text", "glm4_moe", "glm5_next", "granitemoehybrid",
        "kimi_linear", "lfm2_moe", "llama4", "llama4_text", "nemotron_h", "paddleocr_vl",
        "qwen3_5", "qwen3_5_moe", "qwen3_next",
    ],
)  # fmt: skip
def test_weights_are_handed_over_by_the_names_of_checkpoint_files(family, tmp_path):
    """vLLM reads these names, in a weight update as in a file; a file also has buffers, which do not change."""
    model = family_model(family) if family in VISION else test_families.text_model(family, TEXT[family])
    handed_over = {name for name, _ in checkpoint_parameters(model, model.named_parameters())}
    model.save_pretrained(tmp_path)
    in_file = set(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    if family == "kimi_linear":  # published files have experts alone under this name
        in_file = {re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name) for name in in_file}
    assert handed_over <= in_file
    assert all(name.endswith(("bias", "layer_scalar")) for name in in_file - handed_over)


@pytest.mark.parametrize("family", [*VISION, *TEXT])
def test_tensors_of_a_file_are_complete_if_parameters_are_converted_a_few_at_a_time(family):
    """A file may have one tensor for several parameters, such as queries, keys and values."""
    model = family_model(family) if family in VISION else test_families.text_model(family, TEXT[family], "eager")
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    whole = revert_weight_conversion(model, dict(parameters))
    groups = converted_together(model, parameters.items())
    pieces = [piece for group in groups for piece in revert_weight_conversion(model, group).items()]
    assert sorted(name for name, _ in pieces) == sorted(whole)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in pieces)


@pytest.mark.parametrize("family", [*VISION, *TEXT])
def test_names_are_looked_up_once(family, monkeypatch):
    """A second call yields the same tensors, and asks transformers only for those that are converted."""
    model = family_model(family) if family in VISION else test_families.text_model(family, TEXT[family], "eager")
    parameters, renamed = [(name, p.detach()) for name, p in model.named_parameters()], {}
    first = dict(checkpoint_parameters(model, parameters, renamed))
    looked_up = []
    real = transformers.core_model_loading.revert_weight_conversion
    monkeypatch.setattr(
        transformers.core_model_loading,
        "revert_weight_conversion",
        lambda model, group: (looked_up.extend(group), real(model, group))[1],
    )
    second = dict(checkpoint_parameters(model, parameters, renamed))
    assert list(second) == list(first) and all(torch.equal(x, first[name]) for name, x in second.items())
    assert {*looked_up} == {name for name, _ in parameters} - renamed.keys() and len(renamed) > len(looked_up)


def test_weights_of_kimi_k25_have_their_published_names():
    model = family_model("kimi_k25")
    named = dict(checkpoint_parameters(model, ((name, p.detach()) for name, p in model.named_parameters())))
    beginnings = {re.sub(r"\.\d+\..*", "", name.removesuffix(".weight").removesuffix(".bias")) for name in named}
    assert beginnings == {
        "vision_tower.patch_embed.proj", "vision_tower.patch_embed.pos_emb", "vision_tower.encoder.blocks",
        "vision_tower.encoder.final_layernorm", "mm_projector.pre_norm", "mm_projector.proj.0", "mm_projector.proj.2",
        "language_model.model.embed_tokens", "language_model.model.layers", "language_model.model.norm",
    }  # fmt: skip
    of_block = {name.split(".", 4)[4] for name in named if ".blocks.0." in name}
    of_block = {name.rpartition(".")[0] for name in of_block}
    assert of_block == {"norm0", "norm1", "wqkv", "wo", "mlp.fc0", "mlp.fc1"}


@pytest.mark.parametrize("family", PUBLISHED_NAMES)
def test_a_model_is_read_by_the_published_names(family, tmp_path):
    """transformers writes other names, which vLLM does not know."""
    model = family_model(family) if family in VISION else test_families.text_model(family, TEXT[family])
    named = dict(checkpoint_parameters(model, ((name, p.detach()) for name, p in model.named_parameters())))
    for written, published in PUBLISHED_NAMES[family].items():
        assert any(published in name for name in named)
        assert not any(written in name for name in named if published not in name)
    model.config.save_pretrained(tmp_path)
    save_file({name: x.contiguous() for name, x in named.items()}, tmp_path / "model.safetensors")
    loaded = dict(load_model(str(tmp_path)).named_parameters())
    assert all(torch.equal(p, loaded[name]) for name, p in model.named_parameters())


def test_experts_for_text_are_not_lost_without_those_for_images():
    model = family_model("ernie4_5_vl_moe")
    of_text = [(name, x) for name, x in model.named_parameters() if "vision_moe" not in name]
    with pytest.raises(ValueError, match="^parameters: expected experts for text and .* got only .*text_moe"):
        list(checkpoint_parameters(model, of_text))


@pytest.mark.parametrize("targets", [["out_proj"], ("in_proj", "mamba.out_proj"), r".*out_proj"])
def test_a_layer_that_cannot_be_adapted_is_named(targets):
    model = test_families.text_model("granitemoehybrid", TEXT["granitemoehybrid"])
    expected = "target_modules: expected layers that LoRA can adapt, got model.layers.0.mamba.out_proj: a fused kernel"
    with pytest.raises(ValueError, match=expected):
        lora(model, 2, 4, targets)


@pytest.mark.parametrize("targets", [["in_proj", "roj"], ("mamba.in_proj",), r".*\.in_proj"])
def test_a_list_of_target_modules_has_the_ends_of_their_names(targets):
    """Beside layers that cannot be adapted."""
    adapted = lora(test_families.text_model("granitemoehybrid", TEXT["granitemoehybrid"]), 2, 4, targets)
    assert {name.partition(".lora_")[0].rpartition(".")[2] for name in trained(adapted)} == {"in_proj"}


def test_adapters_of_a_state_space_model():
    """Its fused kernel would not see adapters of `out_proj`."""
    for family in ("falcon_h1", "granitemoehybrid", "nemotron_h"):
        adapted = trained(lora(test_families.text_model(family, TEXT[family]), 2, 4))
        assert any("in_proj" in name for name in adapted) and not any("out_proj" in name for name in adapted)
    expected = "expected layers that LoRA can adapt, got model.layers.1.feed_forward.router: a router returns more"
    with pytest.raises(ValueError, match=expected):
        lora(test_families.text_model("llama4_text", TEXT["llama4_text"]), 2, 4, r".*router")
    delta = trained(lora(test_families.text_model("qwen3_next", TEXT["qwen3_next"]), 2, 4))
    assert {name.split(".")[6] for name in delta if ".linear_attn." in name} == {
        "in_proj_qkvz", "in_proj_ba", "out_proj",
    }  # fmt: skip


def test_indexers_of_sparse_attention_get_no_adapters():
    """They choose tokens without a gradient, so adapters in them would never change."""
    model = test_families.text_model("glm_moe_dsa", TEXT["glm_moe_dsa"])
    names = {name for name, _ in model.named_modules() if name.endswith(".indexer.wk")}
    assert names and not any(".indexer." in name for name in trained(lora(model, 2, 4)))
    model = test_families.text_model("glm_moe_dsa", TEXT["glm_moe_dsa"])
    with pytest.raises(ValueError, match=r"got model.layers.0.self_attn.indexer.wk: choosing the tokens of sparse"):
        lora(model, 2, 4, r".*\.wk")


def test_a_tied_output_layer_gets_no_adapters():
    """Merged into the one weight, they would change the embedding too, in a sampler and in an export."""
    tied = test_families.text_model("qwen2", {"tie_word_embeddings": True})
    with pytest.raises(ValueError, match="^target_modules: expected no output layer that is tied to the embedding"):
        lora(tied, 2, 4, r".*(q_proj|lm_head)")
    untied = test_families.text_model("qwen2", {"tie_word_embeddings": False})
    assert any("lm_head" in name for name in trained(lora(untied, 2, 4, r".*(q_proj|lm_head)")))


def test_a_model_without_a_tower():
    model = test_families.text_model("qwen2", TEXT["qwen2"])
    assert encoder_modules(model) == [] and trained(lora(model, 2, 4))
    with pytest.raises(ValueError, match="^vision tower: expected a model that has one, got qwen2$"):
        vision_tower_pattern(model)


def test_the_tower_of_an_adapted_model_is_the_same(model):
    frozen = freeze(lora(model, 2, 4, adapt_towers=True), vision_tower_pattern(model))
    assert frozen and all(".visual." in name for name in frozen)


def test_freeze_nothing_is_an_error(model):
    before = trained(model)
    with pytest.raises(
        ValueError, match="freeze: expected a match in parameters of .*model.visual.*, got 'vision_tour'"
    ):
        freeze(model, "vision_tour")
    with pytest.raises(ValueError, match="freeze: expected a match"):
        freeze(nn.Identity(), ".*")
    with pytest.raises(ValueError, match="audio tower: expected a model that has one, got qwen2_5_vl"):
        audio_tower_pattern(model)
    assert trained(model) == before


def test_lora_all_linear_leaves_vision_alone(model):
    before = {name: p.clone() for name, p in model.named_parameters() if ".visual." in name}
    adapted = lora(model, 4, 8)
    adapters = trained(adapted)
    assert adapters and all(".lora_" in name for name in adapters)
    assert not [name for name, _ in adapted.named_parameters() if "visual" in name and "lora_" in name]
    targets = {name.split(".lora_")[0].rsplit(".", 1)[1] for name in adapters}
    assert targets == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert not any("lm_head" in name for name in adapters)
    now = {name.removeprefix("base_model.model."): p for name, p in adapted.named_parameters() if ".visual." in name}
    assert now.keys() == before.keys() and all(torch.equal(now[name], p) for name, p in before.items())
    assert not any(p.requires_grad for p in now.values())


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_begin_with_the_same_numbers_however_weights_are_loaded(family, dtype, tmp_path):
    test_families.text_model(family, TEXT[family]).save_pretrained(tmp_path)
    starts = []
    for options in ({"dtype": torch.float32}, {"dtype": dtype}, {"dtype": dtype, "on_meta": True}):
        torch.manual_seed(3)
        adapted = lora(load_model(str(tmp_path), **options), rank=2, alpha=4)
        starts.append({name: p for name, p in adapted.named_parameters() if p.requires_grad})
        starts[-1]["next random number"] = torch.rand(1)
    for start in starts[1:]:
        assert start.keys() == starts[0].keys() and all(torch.equal(start[name], starts[0][name]) for name in start)
    assert all(p.std() > 0 for name, p in starts[0].items() if "lora_A" in name)


def test_lora_reaches_vision_when_it_is_asked_to(model):
    adapted = lora(model, 2, 4, adapt_towers=True)
    assert any(".visual." in name for name in trained(adapted))


def test_lora_by_pattern(model):
    adapted = lora(model, 2, 4, r".*language_model.*\.q_proj")
    assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name in trained(adapted)} == {"q_proj"}


def test_lora_refuses(model):
    with pytest.raises(ValueError, match="rank: expected at least 1, got 0"):
        lora(model, 0, 8)
    with pytest.raises(ValueError, match="No modules were targeted for adaptation"):
        lora(model, 2, 8, "no_such_layer")
    with pytest.raises(
        ValueError, match="target_modules: expected linear layers, .* got .*embed_tokens.lora_embedding"
    ):
        lora(model, 2, 8, r".*\.embed_tokens")


def test_lora_starts_as_the_model_and_gives_it_back(model):
    tokens = torch.tensor([[7, 8, 9, 10]])
    with torch.no_grad():
        before = model(tokens).logits
        adapted = lora(model, 4, 8).eval()
        torch.testing.assert_close(adapted(tokens).logits, before, rtol=0, atol=0)
        randomise(adapted)
        assert (adapted(tokens).logits - before).abs().max() > 1e-3
        with adapted.disable_adapter():
            torch.testing.assert_close(adapted(tokens).logits, before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapt_towers", [False, True])
def test_merged_parameters_equal_peft(model, adapt_towers, dtype):
    names = [name for name, _ in model.named_parameters()]
    plain = {name: tensor.clone() for name, tensor in merged_parameters(model)}
    assert list(plain) == names and all(torch.equal(plain[n], p) for n, p in model.named_parameters())
    adapted = lora(model.to(dtype), 4, 12, adapt_towers=adapt_towers)
    randomise(adapted)
    ours = {name: tensor.clone() for name, tensor in merged_parameters(adapted)}
    assert list(ours) == names
    merged = dict(adapted.merge_and_unload().named_parameters())
    assert merged.keys() == ours.keys()
    moved = 0
    for name, theirs in merged.items():
        assert ours[name].dtype == theirs.dtype == dtype and not ours[name].requires_grad
        if dtype == torch.float32:
            torch.testing.assert_close(ours[name], theirs.detach(), rtol=1e-6, atol=1e-6)
        else:
            torch.testing.assert_close(ours[name], theirs.detach(), rtol=0.02, atol=0.02)
        moved += not torch.equal(ours[name].float(), plain[name].float().to(dtype).float())
    assert moved >= 14


EXPERTS = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_merged_experts_equal_peft(family):
    """One adapter on all experts of a layer; gpt-oss holds them transposed."""
    more = {"moe_intermediate_size": 16, "num_experts": 4} if family == "Qwen3Moe" else {"num_local_experts": 4}
    config = getattr(transformers, f"{family}Config")(**EXPERTS, **more)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    experts = [name for name in before if re.search(r"experts\.(gate_up|down)_proj$", name)]
    if family == "Qwen3Moe":  # "all-linear" takes the experts too
        adapted = lora(model, 4, 12)
    else:
        targets = [name.removeprefix("model.") for name in experts]
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[], target_parameters=targets))
    randomise(adapted)
    ours = {name: tensor.clone() for name, tensor in merged_parameters(adapted)}
    merged = dict(adapted.merge_and_unload().named_parameters())
    assert list(ours) == list(before) and ours.keys() == merged.keys()
    for name, theirs in merged.items():
        torch.testing.assert_close(ours[name], theirs.detach(), rtol=1e-6, atol=1e-6)
    assert len(experts) == 4 and not any(torch.equal(ours[name], before[name]) for name in experts)


def test_checkpoint_parameters_are_what_files_hold(tmp_path):
    """Experts one by one, as in the files that transformers writes; what is one tensor there too keeps its name."""
    config = transformers.Qwen3MoeConfig(**EXPERTS, moe_intermediate_size=16, num_experts=4)
    model = transformers.Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    ours = dict(checkpoint_parameters(model, ((n, p.detach()) for n, p in model.named_parameters())))
    assert ours.keys() == files.keys() and "model.layers.1.mlp.experts.3.up_proj.weight" in ours
    for name, tensor in files.items():
        assert torch.equal(ours[name], tensor), name


def test_merged_parameters_leave_the_model_alone_and_gather_once(model):
    adapted = lora(model, 4, 8)
    randomise(adapted)
    before = {name: p.clone() for name, p in adapted.named_parameters()}
    seen = []

    def full(tensors):
        seen.extend(tensors)
        yield from (tensor.clone() for tensor in tensors)

    assert len(list(merged_parameters(adapted, full))) < len(before)
    with_adapters = re.compile(r"\.base_layer\.weight$")
    others = [p.data_ptr() for name, p in adapted.named_parameters() if not with_adapters.search(name)]
    addresses = [tensor.data_ptr() for tensor in seen]
    assert len(addresses) == len({*addresses}) == len(before) > len(others)  # each once
    bases = {p.data_ptr() for p in adapted.parameters()}.difference(others)
    assert bases.isdisjoint(addresses) and {*others} < {*addresses}  # sums are gathered in place of the bases
    assert all(torch.equal(before[name], p) for name, p in adapted.named_parameters())


@pytest.mark.parametrize(("bucket_bytes", "again"), [(0, False), (0, True), (100_000, False)])
def test_no_tensor_is_held_when_the_next_is_asked_for(model, bucket_bytes, again):
    """Merged or not, in pieces or not: what is whole is there until it is let go of, and no longer."""
    adapted, renamed = lora(model, 3, 8), {}
    if again:
        dict(checkpoint_parameters(model, merged_parameters(adapted), renamed))
    alive, buckets, of_adapters = weakref.WeakSet(), [], []

    def full(tensors):
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if any(tensor.ndim == 2 and 3 in tensor.shape for tensor in tensors):
            of_adapters.append(size)
        else:
            buckets.append(size)
        for tensor in tensors:
            assert len(alive) == (tensor.ndim == 2 and tensor.shape[1] == 3)  # B comes beside A
            part = tensor.clone()
            alive.add(part)
            yield part
            del part

    count = 0
    for pair in checkpoint_parameters(model, merged_parameters(adapted, full, bucket_bytes), renamed):
        count += 1
        del pair
    sizes = [p.numel() * p.element_size() for p in adapted.parameters()]
    assert count == len([name for name, _ in adapted.named_parameters() if ".lora_" not in name])
    assert sum(buckets) + sum(of_adapters) == sum(sizes) and len(of_adapters) <= len(buckets)
    assert (len(buckets) == count) == (bucket_bytes == 0)
    if bucket_bytes:
        assert max(b for b in buckets if b > bucket_bytes) < max(sizes) + 10_000 and 4 < len(buckets) < count / 2


def test_trainable_summary(model):
    total = sum(p.numel() for p in model.parameters())
    parts = "model.language_model, model.visual"
    assert trainable_summary(model) == f"{total:,} of {total:,} parameters train (100.0%): {parts}"
    freeze(model, vision_tower_pattern(model))
    assert trainable_summary(model).endswith("): model.language_model")
    adapted = lora(model, 4, 8)
    train = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert trainable_summary(adapted).startswith(f"{train:,} of {total + train:,} parameters train (")
    assert trainable_summary(adapted).endswith("): LoRA in model.language_model")
    freeze(adapted, ".")
    assert trainable_summary(adapted).endswith("(0.0%): none") and trainable_summary(nn.Identity()).endswith("none")


def test_tiny_config_is_a_family_member(tiny_dir, loaded):
    tokenizer = load_processor(tiny_dir).tokenizer
    config = tiny_config(tokenizer)
    assert config.text_config.rope_parameters["mrope_section"] == [4, 6, 6]
    assert config.text_config.vocab_size == len(tokenizer) == loaded.get_input_embeddings().num_embeddings
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
    assert 0.4e6 < sum(p.numel() for p in loaded.parameters()) < 1e6


@pytest.mark.parametrize("family", ["llava", "gemma3", "mixtral", "qwen3_vl_moe"])
def test_weights_go_out_as_in_the_files_they_came_from(family, tmp_path):
    """vLLM reads these families in the names and shapes of their published files alone, from a sync and an export."""
    model = test_families.vision_model(family) if family in VISION else test_families.text_model(family, TEXT[family])
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    published = load_file(file)
    if family in ("llava", "gemma3"):  # as transformers reads them, which writes others
        published = {name.replace("vision_tower.", "vision_tower.vision_model."): x for name, x in published.items()}
    if family == "qwen3_vl_moe":
        published = {name: x.mT.contiguous() if ".experts." in name else x for name, x in published.items()}
    save_file(published, file, metadata={"format": "pt"})
    loaded = load_model(str(tmp_path))
    torch.testing.assert_close(dict(loaded.named_parameters()), dict(model.named_parameters()), atol=0, rtol=0)
    came = dict(checkpoint_parameters(loaded, ((name, x.detach()) for name, x in loaded.named_parameters())))
    assert came.keys() == published.keys()
    torch.testing.assert_close(came, published, atol=0, rtol=0)
    make_engine("fsdp2", model=loaded).export_hf(tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == published.keys()
    torch.testing.assert_close(exported, published, atol=0, rtol=0)
    read = load_model(str(tmp_path / "exported"))
    torch.testing.assert_close(dict(read.named_parameters()), dict(model.named_parameters()), atol=0, rtol=0)


@pytest.mark.parametrize(("width", "square"), [(16, "gate_up_proj"), (32, "down_proj")])
def test_square_experts_are_refused_where_transformers_tells_layouts_apart_by_shapes(tmp_path, width, square):
    """It would read published files without transposing them, unlike vLLM. No published model has square experts."""
    config = copy.deepcopy(VISION["qwen3_vl_moe"][0])
    config["text_config"]["moe_intermediate_size"] = width
    transformers.AutoConfig.for_model("qwen3_vl_moe", **config).save_pretrained(tmp_path)
    expected = f"expected experts whose matrices are not square, .* got {square} of 32 x 32"
    for on_meta in (False, True):
        with pytest.raises(ValueError, match=expected):
            load_model(str(tmp_path), on_meta=on_meta)
