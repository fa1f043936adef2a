"""Packed rows, with and without shared prompts, against one sequence at a time in transformers, family by family."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, LlamaModel, LlamaPreTrainedModel

from rlkit.data import collate, extend
from rlkit.data.samples import prompt
from rlkit.engines import make_engine
from rlkit.engines.attention import NAME, Layout, use_packed_attention, varlen_attention
from rlkit.engines.packer import pack
from rlkit.vlm.families import head_obstacle, image_groups
from rlkit.vlm.inputs import position_spec

CPU = torch.device("cpu")
IMAGE = 90
BASE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
BOTH = ["sliding_attention", "full_attention"]
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
TEXT = {
    "qwen2": {},
    "qwen2_sliding": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {},
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "layer_types": BOTH, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 3},
    "gemma3_text": {"sliding_window": 5, "layer_types": BOTH, "query_pre_attn_scalar": 3},
    "qwen3_moe": {**EXPERTS, "decoder_sparse_step": 1, "num_key_value_heads": 1},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4, "sliding_window": 5},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "layer_types": BOTH},
    "deepseek_v3": {
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
        "num_key_value_heads": 4, "first_k_dense_replace": 2, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
        "head_dim": 4, "num_experts_per_tok": 2,
    },
    "diffllama": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
}  # fmt: skip
SIGLIP = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
WORDS = {k: v for k, v in BASE.items() if k != "head_dim"}
VISION = {  # the config, tokens of an image, its tensors
    "llava": (
        {
            "text_config": {**WORDS, "model_type": "llama"},
            "vision_config": {**SIGLIP, "model_type": "clip_vision_model", "projection_dim": 16},
            "image_seq_length": 16,
        },
        16,
        (1, 3, 16, 16),
    ),
    "internvl": (
        {
            "text_config": {**WORDS, "model_type": "qwen2"},
            "vision_config": {**SIGLIP, "model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]},
            "image_seq_length": 4,
        },
        4,
        (1, 3, 16, 16),
    ),
    "smolvlm": (
        {"text_config": {**WORDS, "model_type": "llama"}, "vision_config": {**SIGLIP}, "scale_factor": 2},
        4,
        (1, 1, 3, 16, 16),
    ),
    "idefics3": (
        {"text_config": {**WORDS, "model_type": "llama"}, "vision_config": {**SIGLIP}, "scale_factor": 2},
        4,
        (1, 1, 3, 16, 16),
    ),
    "gemma3": (
        {
            "text_config": {**BASE, "sliding_window": 5, "layer_types": BOTH, "model_type": "gemma3_text"},
            "vision_config": {**SIGLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
            "mm_tokens_per_image": 4,
        },
        4,
        (1, 3, 16, 16),
    ),
    "glm4v": (
        {
            "text_config": {
                **WORDS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            },
            "vision_config": {
                "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
                "image_size": 16, "out_hidden_size": 32,
            },
            "image_start_token_id": 91, "image_end_token_id": 92, "video_start_token_id": 93,
            "video_end_token_id": 94, "video_token_id": 95,
        },
        4,
        (16, 3 * 2 * 4 * 4),
    ),
}  # fmt: skip
REFUSED = {
    "qwen3_next": ({**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16}, "linear-attention, state-space"),
    "qwen3_5_text": (LINEAR, "linear-attention, state-space"),
    "mamba": ({"state_size": 4}, "linear-attention, state-space"),
    "falcon_h1": ({"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}, "state-space"),
    "minimax": ({"num_local_experts": 2, "layer_types": LINEAR["layer_types"]}, "linear-attention"),
    "lfm2": ({"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}, "convolution"),
    "llama4_text": (
        {
            "num_local_experts": 2, "intermediate_size_mlp": 32, "attention_chunk_size": 5,
            "layer_types": ["chunked_attention", "full_attention"],
        },
        "layers of chunked_attention",
    ),
    "gpt_neo": (
        {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 5},
        "does not go through transformers' AttentionInterface",
    ),
    "recurrent_gemma": ({"lru_width": 32, "attention_window_size": 5, "num_hidden_layers": 3}, "state-space"),
    "stablelm": ({}, "does not go through transformers' AttentionInterface"),  # or does not say so
    "bloom": ({"n_layer": 2, "n_head": 4}, "does not go through transformers' AttentionInterface"),
}  # fmt: skip
WAYS = {"packed": {"share_prompts": False}, "shared": {"share_prompts": True}, "padded": {"packed": False}}


def seeded(build):
    torch.manual_seed(0)
    model = build().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # far from what an initialiser gives: attention must matter
            if parameter.ndim > 1 and "experts" not in name and "router" not in name:
                parameter.mul_(4)
            if name.endswith(("sinks", "mm_input_projection_weight")):  # Gemma3 starts that at 0
                parameter.normal_()
    return model


def text_model(family, more, attention="sdpa"):
    config = AutoConfig.for_model(family.removesuffix("_sliding"), **{**BASE, **more})
    return seeded(lambda: AutoModelForCausalLM.from_config(config, attn_implementation=attention))


def vision_model(family):
    config = AutoConfig.for_model(family, image_token_id=IMAGE, pad_token_id=0, **VISION[family][0])
    return seeded(lambda: AutoModelForImageTextToText.from_config(config, attn_implementation="eager"))


def rows(family=None):
    """Three prompts of 2, 1 and 3 answers; with a family of VISION the first two have an image."""
    g = torch.Generator().manual_seed(0)
    samples = []
    for group, (length, answers) in enumerate(((9, 2), (5, 1), (11, 3))):
        ids = torch.randint(3, 80, (length,), generator=g).tolist()
        tensors = {}
        if family and group < 2:
            _, count, shape = VISION[family]
            tensors["pixel_values"] = torch.randn(shape, generator=g)
            if family == "glm4v":
                tensors["image_grid_thw"] = torch.tensor([[1, 4, 4]])
            ids = ids[:2] + [91] + [IMAGE] * count + [92] + ids[2:]
            ids = ids[3:] if group == 0 and family == "gemma3" else ids  # a row may begin with its image
        start = prompt(ids, vision=tensors)
        for _ in range(answers):
            answer = torch.randint(3, 80, (int(torch.randint(2, 9, (1,), generator=g)),), generator=g).tolist()
            samples.append(extend(start, answer, [-1.0] * len(answer)))
    batch = collate(samples)
    weights = torch.randn(batch.tokens.shape, generator=g)
    return batch, weights


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def one_at_a_time(model, batch, weights):
    logprobs = torch.zeros(batch.tokens.shape)
    for b, length in enumerate(batch.lengths):
        ids, more = batch.tokens[b : b + 1, :length], dict(batch.vision[b])
        if model.config.model_type == "gemma3":
            more["token_type_ids"] = (ids == IMAGE).long()
        if model.config.model_type == "glm4v":
            more["mm_token_type_ids"] = (ids == IMAGE).int()
        scores = model(input_ids=ids, use_cache=False, **more).logits[0].log_softmax(-1)
        own = torch.zeros(batch.tokens.shape[1])
        own[1:length] = scores[:-1].gather(1, ids[0, 1:, None])[:, 0]
        logprobs = logprobs + torch.where(batch.mask, torch.eye(len(batch))[b][:, None] * own, 0)
    return logprobs.detach(), gradients(model, (weights * logprobs).sum())


def all_at_once(model, batch, weights, options):
    inputs = pack(batch, position_spec(model.config), CPU, **options)
    logits = model(**inputs.kwargs, use_cache=False).logits.flatten(0, 1)
    kept = logits if options.get("packed", True) else logits[inputs.keep]
    logprobs = inputs.scatter(kept.log_softmax(-1).gather(1, inputs.targets[:, None])[:, 0])
    return logprobs.detach(), gradients(model, (weights * logprobs).sum())


def check(model, batch, weights, ways=WAYS, atol=1e-5):
    expected, expected_gradients = one_at_a_time(model, batch, weights)
    use_packed_attention(model)
    for way in ways:
        logprobs, came = all_at_once(model, batch, weights, WAYS[way])
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5, msg=lambda m, way=way: f"{way}: {m}")
        assert came.keys() == expected_gradients.keys()
        for name, gradient in came.items():
            scale = expected_gradients[name].abs().max().clamp(min=1)
            torch.testing.assert_close(
                gradient / scale, expected_gradients[name] / scale, atol=atol, rtol=1e-4,
                msg=lambda m, way=way, name=name: f"{way} {name}: {m}",
            )  # fmt: skip


@pytest.mark.parametrize("family", TEXT)
def test_text_family_equals_one_sequence_at_a_time(family):
    model = text_model(family, TEXT[family], "eager")
    check(model, *rows())
    assert model.config._attn_implementation == NAME


@pytest.mark.parametrize("family", VISION)
def test_vision_family_equals_one_sequence_at_a_time(family):
    check(vision_model(family), *rows(family))


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_does_not_pack_is_refused_by_name_and_padded_rows_are_right(family):
    more, why = REFUSED[family]
    model = text_model(family, more, "eager")
    batch, weights = rows()
    with pytest.raises(ValueError, match=f"^{family}: rows cannot be packed: .*{why}.*use_remove_padding=False"):
        use_packed_attention(model, packed=True)
    check(model, batch, weights, ["padded"], atol=5e-5)  # a recurrence over the row adds up its rounding
    ran = []
    model.get_input_embeddings().register_forward_hook(lambda *_: ran.append(1))
    for way in ("packed", "shared"):
        with pytest.raises(ValueError, match=f"^{family}: rows cannot be packed"):
            all_at_once(model, batch, weights, WAYS[way])
    assert not ran


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "lora"])
def test_the_engine_refuses_and_trains_padded(wrap):
    from rlkit.vlm import lora

    batch, _ = rows()

    def engine(**options):
        model = text_model("qwen3_next", REFUSED["qwen3_next"][0])
        model = lora(model, 2, 4, target_modules=["q_proj", "o_proj"]) if wrap else model
        return make_engine("fsdp2", "language_model", model=model, device="cpu", **options)

    with pytest.raises(ValueError, match="qwen3_next: rows cannot be packed: .*use_remove_padding=False"):
        engine().infer_batch(batch)
    expected, _ = one_at_a_time(text_model("qwen3_next", REFUSED["qwen3_next"][0]), batch, 1.0)
    came = engine(use_remove_padding=False).infer_batch(batch)["logprobs"]
    torch.testing.assert_close(came, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_gemma3_images_see_themselves_under_lora(task):
    """PEFT wraps a model in other ways for a task; the hooks of the model inside must be called."""
    import peft

    batch, weights = rows("gemma3")
    expected, _ = one_at_a_time(vision_model("gemma3"), batch, weights)
    base = vision_model("gemma3")
    use_packed_attention(base)
    config = peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=".*vision.*", task_type=task)
    model = peft.get_peft_model(base, config)
    for options in WAYS.values():
        came, _ = all_at_once(model, batch, weights, options)
        torch.testing.assert_close(came, expected, atol=1e-5, rtol=1e-5)


def test_prefix_attention_and_bidirectional_text_are_refused():
    vision = {"model_type": "siglip_vision_model", **SIGLIP, "projection_dim": 32, "vision_use_head": False}
    text = {**BASE, "model_type": "gemma"}
    config = AutoConfig.for_model("paligemma", text_config=text, vision_config=vision, image_token_id=IMAGE)
    model = AutoModelForImageTextToText.from_config(config)
    batch, weights = rows("llava")
    use_packed_attention(model)
    for options in WAYS.values():
        with pytest.raises(ValueError, match="paligemma: cannot be trained: its image and prefix tokens see later"):
            all_at_once(model, batch, weights, options)
    seeing = text_model("gemma3_text", {"use_bidirectional_attention": True})
    with pytest.raises(ValueError, match="gemma3_text: cannot be trained: its config sets use_bidirectional_attention"):
        use_packed_attention(seeing, packed=True)


def test_a_mask_of_its_own_is_refused_under_packing():
    """What transformers joins to the causal mask, here by token types, is noticed for any family."""
    model = vision_model("gemma3")
    use_packed_attention(model)
    kwargs = pack(rows("gemma3")[0], None, CPU).kwargs
    kinds = (kwargs["input_ids"] == IMAGE).long()
    with pytest.raises(ValueError, match="Gemma3Attention: rows cannot be packed: its attention has a mask of its own"):
        model(**kwargs, token_type_ids=kinds, use_cache=False)


@pytest.mark.parametrize(
    "extra, keys, why",
    [
        ({"position_bias": torch.zeros(1)}, 3, "position_bias"),
        ({"is_causal": False}, 3, "no causal order"),
        ({}, 2, "keys of something else"),
    ],
)
def test_attention_beyond_causal_is_refused_under_packing(extra, keys, why):
    from rlkit.engines.attention import _attention

    x = torch.zeros(1, 2, 3, 8)
    k, layout = x[:, :, :keys], Layout([0], [3], [(0, 0)], CPU)
    with pytest.raises(ValueError, match=f"Identity: rows cannot be packed: its attention has {why};"):
        _attention(torch.nn.Identity(), x, k, k, None, packed_layout=layout, **extra)


def test_a_layer_that_goes_its_own_way_is_noticed():
    """A model of remote code may say that it supports what one of its layers does not."""
    model = text_model("llama", {})
    use_packed_attention(model)
    model.model.layers[1].self_attn.config = AutoConfig.for_model("llama", **BASE, attn_implementation="sdpa")
    with pytest.raises(ValueError, match="llama: rows cannot be packed: of its 2 layers 1 asked for packed attention"):
        model(**pack(rows()[0], None, CPU).kwargs)


class OwnAttention(nn.Module):
    """transformers looks for such a class, and for what it calls, in the source of a model of remote code."""


class OwnLlama(LlamaPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)


def test_a_model_whose_attention_cannot_be_set_is_refused():
    model = OwnLlama(AutoConfig.for_model("llama", **BASE))
    with pytest.raises(ValueError, match="llama: rows cannot be packed: its attention does not go through"):
        use_packed_attention(model, packed=True)


@pytest.mark.parametrize(
    "family, more", [("gemma2", {"final_logit_softcapping": 0.5}), ("granite", {"logits_scaling": 3}), ("cohere", {})]
)
def test_logits_changed_after_the_output_layer_are_known(family, more):
    """The fused kernels make logits from hidden states."""
    model = text_model(family, more)
    hidden = model.base_model(torch.tensor([[5, 6, 7]])).last_hidden_state
    logits = model(torch.tensor([[5, 6, 7]])).logits
    assert (model.get_output_embeddings()(hidden) - logits).abs().max() > 1e-2
    assert "its logits are changed after the output layer" in head_obstacle(model.config)
    assert head_obstacle(text_model("llama", {}).config) is None


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_the_same_model_generates_and_runs_without_a_mask(family):
    """Windows, soft caps and sinks hold outside of packed rows too."""
    ids = torch.randint(3, 80, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    options["output_logits"] = True
    plain, model = (text_model(family, TEXT[family], "eager") for _ in range(2))
    use_packed_attention(model)
    expected, came = (torch.stack(m.generate(ids, **options).logits) for m in (plain, model))
    torch.testing.assert_close(came, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_attention_dropout_is_honoured_in_training_alone(family):
    model = text_model(family, {**TEXT[family], "attention_dropout": 0.5})
    use_packed_attention(model)
    kwargs = pack(rows()[0], None, CPU).kwargs
    scored, again = (model(**kwargs).logits for _ in range(2))
    assert torch.equal(scored, again)
    model.train()
    one, other = (model(**kwargs).logits for _ in range(2))
    assert (one - other).abs().max() > 0.1 and (one - scored).abs().max() > 0.1


def test_images_end_where_sequences_do():
    tokens = torch.tensor([IMAGE, IMAGE, IMAGE, 3, IMAGE, IMAGE])
    assert image_groups(tokens, IMAGE).tolist() == [0, 0, 0, -1, 1, 1]
    assert image_groups(tokens, IMAGE, torch.tensor([0, 2, 3, 5])).tolist() == [0, 0, 1, -1, 2, 3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_caps_sinks_and_images_on_a_gpu_equal_the_cpu():
    g = torch.Generator().manual_seed(0)
    lengths, prefixes = [7, 2, 3, 1, 5, 40], [(0, 0), (0, 7), (0, 7), (0, 0), (12, 1), (0, 0)]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    q, k, v = (torch.randn(sum(lengths), heads, 64, generator=g) for heads in (4, 2, 2))
    images = image_groups(torch.randint(0, 2, (sum(lengths),), generator=g), 1, torch.tensor(starts))
    for options in ({"softcap": 0.5}, {"sinks": torch.randn(4, generator=g)}, {"images": images}):
        outs = []
        for device in ("cpu", "cuda"):
            layout = Layout(starts, lengths, prefixes, torch.device(device))
            moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
            layout.images = moved.pop("images", None)
            outs.append(varlen_attention(q.to(device), k.to(device), v.to(device), layout, window=3, **moved).cpu())
        torch.testing.assert_close(outs[1], outs[0], atol=1e-4, rtol=1e-4)


def test_the_engine_refuses_what_it_cannot_do_when_it_is_built():
    def engine(model, **options):
        return make_engine("fsdp2", "language_model", model=model, device="cpu", **options)

    capped = {"final_logit_softcapping": 0.5}
    with pytest.raises(ValueError, match="gemma2: use_fused_kernels: its logits are changed after the output layer"):
        engine(text_model("gemma2", capped), use_fused_kernels=True)
    engine(text_model("gemma2", capped))
    with pytest.raises(ValueError, match="qwen3_next: rows cannot be packed"):
        engine(text_model("qwen3_next", REFUSED["qwen3_next"][0]))
