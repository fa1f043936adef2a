"""Packed rows, with and without shared prompts, compared with one sequence at a time in transformers, by family."""

import sys
from copy import deepcopy
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, LlamaModel, LlamaPreTrainedModel

sys.path.insert(0, str(Path(__file__).parent))
from family_configs import BASE, IMAGE, REFUSED, SIGLIP, TEXT, VIDEO, VISION

from rlkit.data import append_response, collate
from rlkit.data.samples import prompt_sample
from rlkit.engines import make_engine
from rlkit.engines.packing.attention import (
    NAME,
    AttentionOptions,
    packed_attention,
    use_packed_attention,
    varlen_attention,
)
from rlkit.engines.packing.attention import temperature_by_position as by_position
from rlkit.engines.packing.inputs import prepare_model_inputs
from rlkit.engines.packing.layout import PackedLayout
from rlkit.engines.packing.ulysses import UlyssesGroup
from rlkit.vlm.adapt import lora
from rlkit.vlm.families import head_obstacle, image_groups
from rlkit.vlm.inputs import position_ids, position_spec, vision_kwargs

CPU = torch.device("cpu")
WAYS = {"packed": {"share_prompts": False}, "shared": {"share_prompts": True}, "padded": {"remove_padding": False}}
LEFT = "padded on the left"
LEFT_GRADIENT_IS_NAN = {
    "gemma3n",
    "gemma3n_text",
}  # transformers divides by the deviation of a row of zeros; outputs are right
RECURRENT = [
    "qwen3_5_text", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe", "nemotron_h", "olmo_hybrid",
    "qwen3_next", "bamba", "jamba", "qwen3_5_moe_text", "zamba2",
]  # fmt: skip
RECURRENT_VISION = ["qwen3_5", "qwen3_5_moe", "lfm2_vl", "minicpmv4_6"]
# an indexer chooses which tokens of a row are attended to
INDEXED = ["axk2", "deepseek_v32", "glm_moe_dsa", "qwen4_exp_text"]
INDEXED_VISION = ["glm5_next", "qwen4_exp"]


def seeded(build):
    torch.manual_seed(0)
    model = build().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # larger than at initialisation, so that attention matters
            # with a larger gate, GLM-5.3-Flash gives one key to pools that share a token; rounding chooses among them
            if parameter.ndim > 1 and not any(part in name for part in ("experts", "router", "kpool_compress_gate")):
                parameter.mul_(4)
            if name.endswith(("sinks", "mm_input_projection_weight", "correct_output_scale")):  # which are 0 at first
                parameter.normal_()
    return model


def text_model(family, options, attention="sdpa"):
    config = AutoConfig.for_model(family.removesuffix("_sliding"), **{**BASE, **options})
    return seeded(lambda: AutoModelForCausalLM.from_config(config, attn_implementation=attention))


def vision_model(family, attention="eager", **text):
    options = deepcopy(VISION[family][0])  # Qwen3.5's config writes into the dictionaries that it is given
    kind = options.pop("model_type", family)
    options["text_config"] |= text
    config = AutoConfig.for_model(kind, image_token_id=IMAGE, pad_token_id=0, **options)
    return seeded(lambda: AutoModelForImageTextToText.from_config(config, attn_implementation=attention))


def rows(family=None):
    """Three prompts with 2, 1 and 3 responses; for a vision family the first two have an image.

    If its images are patches, two more prompts have a video, and a video and an image.
    """
    g = torch.Generator().manual_seed(0)
    samples = []
    for group, (length, responses) in enumerate(((9, 2), (5, 1), (11, 3))):
        ids = torch.randint(3, 80, (length,), generator=g).tolist()
        tensors = {}
        if family and group < 2:
            _, count, shape = VISION[family]
            tensors["pixel_values"] = torch.randn(shape, generator=g)
            tensors |= layout_of_image(family, shape)
            ids = ids[:2] + [91] + [IMAGE] * count + [92] + ids[2:]
            ids = ids[3:] if group == 0 and family == "gemma3" else ids  # a row may begin with its image
        start = prompt_sample(ids, vision=tensors)
        for _ in range(responses):
            response = torch.randint(3, 80, (int(torch.randint(2, 9, (1,), generator=g)),), generator=g).tolist()
            samples.append(append_response(start, response, [-1.0] * len(response)))
    if family and len(VISION[family][2]) == 2:
        samples += [append_response(start, [7, 8, 9], [-1.0] * 3) for start in video_prompts(family, g)]
    batch = collate(samples)
    weights = torch.randn(batch.tokens.shape, generator=g)
    return batch, weights


def layout_of_image(family, shape):
    """What a family gives its tower beside the pixels of an image of 4 x 4 patches."""
    if family == "gemma4_unified":
        return {"image_position_ids": torch.cartesian_prod(torch.arange(2), torch.arange(2)).flip(1)[None]}
    if family == "gemma4":
        return {"image_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(1)[None]}
    if family == "lfm2_vl":
        return {"spatial_shapes": torch.tensor([[4, 4]]), "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long)}
    if family == "minicpmv4_6":
        return {"target_sizes": torch.tensor([[8, 8]], dtype=torch.int32)}
    if family in ("mistral3", "mistral4"):
        return {"image_sizes": torch.tensor([[16, 16]])}
    if family in ("llava_next", "llava_next_video", "llava_onevision"):
        return {"image_sizes": torch.tensor([[16, 32]])}
    if family == "video_llama_3":
        return {"image_grid_thw": torch.tensor([[1, 4, 4]]), "image_merge_sizes": torch.tensor([2])}
    is_patches = len(shape) == 2 or family in ("kimi_k25", "paddleocr_vl")
    return {"image_grid_thw": torch.tensor([[1, 4, 4]])} if is_patches else {}


def video_prompts(family, g):
    """A prompt with a video of two frames of 2 x 2 merged patches, and one with an image after it.

    GLM has only the first: transformers, the reference, accepts images or videos in a forward, not both.
    """
    patches = torch.randn(32, VISION[family][2][1], generator=g)
    vision = {"pixel_values_videos": patches, "video_grid_thw": torch.tensor([[2, 4, 4]])}
    if family == "qwen2_5_vl":
        vision["second_per_grid_ts"] = torch.tensor([0.3])  # longer ones: `position_spec` counts on otherwise
    if family.endswith("_thinker"):
        vision["video_second_per_grid"] = torch.tensor([2.0])
    if family == "video_llama_3":
        vision["video_merge_sizes"] = torch.tensor([2])
    if family.startswith("glm"):
        return [prompt_sample([3, 93, *[91, *[IMAGE] * 4, 92, 6] * 2, 94, 4], vision=vision)]
    if family == "ernie4_5_vl_moe":  # which merges the two frames
        ids = [3, 93, *[VIDEO] * 4, 94, 4]
        both = {**vision, "pixel_values": patches[:16] + 1, "image_grid_thw": torch.tensor([[1, 4, 4]])}
        return [prompt_sample(ids, vision=vision), prompt_sample([*ids, 91, *[IMAGE] * 4, 92, 5], vision=both)]
    framewise = family.startswith(("qwen3_vl", "qwen3_5", "qwen4", "cohere_compass", "cosmos3"))
    ids = [3, *([91, *[VIDEO] * 4, 92, 6] * 2 if framewise else [91, *[VIDEO] * 8, 92]), 4]
    both = {**vision, "pixel_values": patches[:16] + 1, **layout_of_image(family, patches.shape)}
    return [prompt_sample(ids, vision=vision), prompt_sample([*ids, 91, *[IMAGE] * 4, 92, 5], vision=both)]


def kinds(ids):
    """mm_token_type_ids: 1 for image tokens, 2 for video tokens, which are image tokens between brackets in GLM."""
    inside = ((ids == 93).int() - (ids == 94).int()).cumsum(-1) > 0
    return (ids == IMAGE) * (1 + inside.int()) + 2 * (ids == VIDEO)


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def one_at_a_time(model, batch, weights):
    logprobs = torch.zeros(batch.tokens.shape)
    for b, length in enumerate(batch.lengths):
        ids, options = batch.tokens[b : b + 1, :length], dict(batch.vision[b])
        if model.config.model_type == "gemma3":
            options["token_type_ids"] = (ids == IMAGE).long()
        if "mm_token_type_ids" in signature(model.forward).parameters:
            options["mm_token_type_ids"] = kinds(ids).int()
        if "moe_mm_token_type_ids" in signature(model.forward).parameters:
            options["moe_mm_token_type_ids"] = ((ids >= IMAGE) & (ids <= VIDEO)).int()  # with the tokens around them
        if model.config.model_type == "gemma4_unified":  # its forward makes other masks than its `generate`
            embeddings = model.get_input_embeddings()(ids)
            none = dict.fromkeys(("attention_mask", "past_key_values", "position_ids"))
            options["attention_mask"] = model.create_masks_for_generate(
                model.config, embeddings, **none, mm_token_type_ids=kinds(ids)
            )
        # the first compute their position ids from it; the second takes tokens of images for starts of sequences else
        if model.config.model_type.endswith(("_thinker", "cosmos3_edge")):
            options["attention_mask"] = torch.ones_like(ids)
        scores = model(input_ids=ids, use_cache=False, **options).logits[0].log_softmax(-1)
        of_row = torch.zeros(batch.tokens.shape[1])
        of_row[1:length] = scores[:-1].gather(1, ids[0, 1:, None])[:, 0]
        logprobs = logprobs + torch.where(batch.mask, torch.eye(len(batch))[b][:, None] * of_row, 0)
    return logprobs.detach(), gradients(model, (weights * logprobs).sum())


def all_at_once(model, batch, weights, options):
    inputs = prepare_model_inputs(batch, position_spec(model.config), CPU, **options)
    logits = inputs.select_outputs(model(**inputs.kwargs, use_cache=False).logits)
    logprobs = inputs.scatter(logits.log_softmax(-1).gather(1, inputs.targets[:, None])[:, 0])
    return logprobs.detach(), gradients(model, (weights * logprobs).sum())


def left_padded(model, batch, weights):
    """Rows padded on the left, like a sampler's prompts."""
    spec, (rows, width) = position_spec(model.config), batch.tokens.shape
    tokens, logprobs = torch.zeros_like(batch.tokens), torch.zeros(rows, width)
    for row, length, ids in zip(tokens, batch.lengths, batch.tokens, strict=True):
        row[width - length :] = ids[:length]
    attended = torch.arange(width) >= width - torch.tensor(batch.lengths)[:, None]
    positions = position_ids(tokens, attended, batch.vision, spec)
    vision = vision_kwargs(tokens, batch.vision, spec)
    mask = attended.long()
    logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False, **vision).logits
    shifted = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    for b, length in enumerate(batch.lengths):
        logprobs[b, 1:length] = shifted[b, width - length :]
    logprobs = torch.where(batch.mask, logprobs, 0)
    return logprobs.detach(), gradients(model, (weights * logprobs).sum())


def check(model, batch, weights, ways=(*WAYS, LEFT), atol=1e-5):
    expected, expected_gradients = one_at_a_time(model, batch, weights)
    use_packed_attention(model)
    for way in ways:
        logprobs, found = (
            left_padded(model, batch, weights) if way == LEFT else all_at_once(model, batch, weights, WAYS[way])
        )
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5, msg=lambda m, way=way: f"{way}: {m}")
        assert found.keys() == expected_gradients.keys()
        for name, gradient in found.items():
            scale = expected_gradients[name].abs().max().clamp(min=1)
            torch.testing.assert_close(
                gradient / scale, expected_gradients[name] / scale, atol=atol, rtol=1e-4,
                msg=lambda m, way=way, name=name: f"{way} {name}: {m}",
            )  # fmt: skip


@pytest.mark.parametrize("family", TEXT)
def test_text_family_equals_one_sequence_at_a_time(family):
    model = text_model(family, TEXT[family], "eager")
    ways = WAYS if family in LEFT_GRADIENT_IS_NAN else (*WAYS, LEFT)
    is_recurrent = family in RECURRENT or family == "qwen4_exp_text"
    check(model, *rows(), ways, atol=5e-5 if is_recurrent else 1e-5)  # rounding accumulates in a recurrence
    assert model.config.get_text_config()._attn_implementation == ("sdpa" if family in INDEXED else NAME)


def after(before):
    """A batch of one sequence of random tokens, with another sequence before it that is not scored."""
    g = torch.Generator().manual_seed(0)
    sequence = torch.randint(3, 80, (9,), generator=g).tolist()
    samples = [append_response(prompt_sample(before[:1]), before[1:], [-1.0] * (len(before) - 1))]
    samples.append(append_response(prompt_sample(sequence[:2]), sequence[2:], [-1.0] * 7))
    batch = collate(samples)
    batch.mask[0] = False
    return batch


@pytest.mark.parametrize("family", [*RECURRENT, *INDEXED])
def test_no_state_comes_from_the_sequence_before(family):
    """Logprobs and gradients of a sequence are the same whatever precedes it in the packed row."""
    model = text_model(family, TEXT[family])
    model.get_input_embeddings().weight.requires_grad_()
    use_packed_attention(model)
    (logprobs, expected), *others = (
        all_at_once(model, after(before), 1.0, WAYS["packed"]) for before in ([5, 6, 7], [7, 5, 9, 8, 70, 71, 72], [30])
    )
    for found, gradient in others:
        torch.testing.assert_close(found[1], logprobs[1, : found.shape[1]], atol=1e-6, rtol=1e-6)
        for name, value in gradient.items():
            torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family", RECURRENT)
def test_transformers_alone_leaks_state_on_a_cpu(family):
    """Its plain-torch layers ignore the boundaries; if that changes, rows need not be split for them any more."""
    model = text_model(family, TEXT[family])
    rows_before = torch.tensor([[5, 6, 7, 30, 31, 32, 33]]), torch.tensor([[9, 8, 4, 30, 31, 32, 33]])
    boundaries = torch.tensor([0, 3, 7], dtype=torch.int32)
    options = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries, "seq_idx": torch.tensor([[0] * 3 + [1] * 4])}
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    one, other = (model(ids, position_ids=positions, use_cache=False, **options).logits[0, 3:] for ids in rows_before)
    assert (one - other).abs().max() > 1e-3


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen3_next", "glm_moe_dsa"])
def test_layers_by_sequence_in_the_engine_with_gradient_checkpointing(family, checkpointing):
    """Several micro-batches with shared prompts; checkpointing calls decoder layers again in backward."""

    def loss_fn(out, mb):
        return (out.logprobs * mb.mask).sum() / mb.total_tokens, {}

    batch, _ = rows()
    norms = []
    for packed in (True, False):
        engine = make_engine(
            "fsdp2", model=text_model(family, TEXT[family]), device="cpu", micro_batch_tokens=40,
            optimizer=lambda p: torch.optim.SGD(p, 0.1), use_remove_padding=packed,
            enable_gradient_checkpointing=checkpointing and packed,
        )  # fmt: skip
        norms.append((engine.train_batch(batch, loss_fn)["grad_norm"], engine.infer_batch(batch)["logprobs"]))
    torch.testing.assert_close(norms[0][0], norms[1][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(norms[0][1], norms[1][1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", VISION)
def test_vision_family_equals_one_sequence_at_a_time(family):
    is_recurrent = family in RECURRENT_VISION or family in INDEXED_VISION
    atol = {"gemma3n": 4e-4}.get(family, 5e-5 if is_recurrent else 1e-5)  # 80 blocks; 2e-6 in float64
    ways = WAYS if family in LEFT_GRADIENT_IS_NAN else (*WAYS, LEFT)
    check(vision_model(family), *rows(family), ways, atol=atol)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_packed_is_named_and_padded_rows_are_right(family):
    (options, why), (batch, weights) = REFUSED[family], rows()
    model = text_model(family, options, "eager")
    expected = f"^use_remove_padding: expected False for {family}, .* cannot be packed, got True: .*{why}"
    with pytest.raises(ValueError, match=expected):
        use_packed_attention(model, packed=True)
    check(model, batch, weights, ["padded"], atol=5e-5)  # rounding accumulates in a recurrence
    forwards = []
    model.get_input_embeddings().register_forward_hook(lambda *_: forwards.append(1))
    for way in ("packed", "shared"):
        with pytest.raises(ValueError, match=f"^use_remove_padding: expected False for {family}"):
            all_at_once(model, batch, weights, WAYS[way])
    assert not forwards


def test_padding_on_the_left_is_refused_where_blocks_of_tokens_would_count_it():
    """transformers' logprobs of such rows differ by 0.5 from those of single sequences."""
    model, (batch, weights) = text_model("deepseek_v4", REFUSED["deepseek_v4"][0], "eager"), rows()
    (expected, _), (found, _) = (way(model, batch, weights) for way in (one_at_a_time, left_padded))
    assert (found - expected).abs().max() > 0.1
    use_packed_attention(model)
    with pytest.raises(ValueError, match="^attention_mask: expected no padding on the left for deepseek_v4"):
        left_padded(model, batch, weights)


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "lora"])
def test_the_engine_refuses_packed_rows_and_accepts_padded_ones(wrap):
    batch, _ = rows()

    def engine(**options):
        model = text_model("recurrent_gemma", REFUSED["recurrent_gemma"][0])
        model = lora(model, 2, 4, target_modules=["q_proj", "o_proj"]) if wrap else model
        return make_engine("fsdp2", "language_model", model=model, device="cpu", **options)

    with pytest.raises(ValueError, match="expected False for recurrent_gemma, whose rows cannot be packed"):
        engine().infer_batch(batch)
    expected, _ = one_at_a_time(text_model("recurrent_gemma", REFUSED["recurrent_gemma"][0]), batch, 1.0)
    logprobs = engine(use_remove_padding=False).infer_batch(batch)["logprobs"]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_gemma3_image_tokens_attend_to_each_other_under_lora(task):
    """PEFT wraps a model differently for a task; the hooks of the wrapped model must be called."""
    import peft

    batch, weights = rows("gemma3")
    expected, _ = one_at_a_time(vision_model("gemma3"), batch, weights)
    base = vision_model("gemma3")
    use_packed_attention(base)
    config = peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=".*vision.*", task_type=task)
    model = peft.get_peft_model(base, config)
    for options in WAYS.values():
        logprobs, _ = all_at_once(model, batch, weights, options)
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


def test_a_window_in_the_config_of_a_family_without_one_is_ignored():
    """As by transformers."""
    batch, weights = rows()
    check(text_model("llama", {"sliding_window": 4}), batch, weights)


def test_images_of_large_gemma4_models_attend_within_windows():
    """As in transformers' forward: in layers with a window only, where the first tokens of an image fall out of it."""
    larger = {"use_bidirectional_attention": "vision", "sliding_window": 3}
    (batch, weights), causal = rows("gemma4"), vision_model("gemma4", sliding_window=3)
    expected, _ = one_at_a_time(vision_model("gemma4", **larger), batch, weights)
    assert (one_at_a_time(causal, batch, weights)[0] - expected).abs().max() > 0.01
    check(vision_model("gemma4", **larger), batch, weights, atol=5e-5)


def test_prefix_attention_and_bidirectional_text_are_refused():
    vision = {"model_type": "siglip_vision_model", **SIGLIP, "projection_dim": 32, "vision_use_head": False}
    text = {**BASE, "model_type": "gemma"}
    config = AutoConfig.for_model("paligemma", text_config=text, vision_config=vision, image_token_id=IMAGE)
    model = AutoModelForImageTextToText.from_config(config)
    batch, weights = rows("llava")
    use_packed_attention(model)
    for options in WAYS.values():
        with pytest.raises(ValueError, match="model: expected causal .*, got paligemma: its image and prefix tokens"):
            all_at_once(model, batch, weights, options)
    bidirectional = text_model("gemma3_text", {"use_bidirectional_attention": True})
    with pytest.raises(ValueError, match="got gemma3_text: its config sets use_bidirectional_attention"):
        use_packed_attention(bidirectional, packed=True)
    with pytest.raises(ValueError, match="got hrm_text: its config sets prefix_lm"):
        use_packed_attention(text_model("hrm_text", {"num_layers_per_stack": 1}), packed=True)


def test_a_mask_beyond_causal_is_refused_for_packed_rows():
    """Whatever transformers adds to the causal mask, here by token types, is refused for any family."""
    model = vision_model("gemma3")
    use_packed_attention(model)
    kwargs = prepare_model_inputs(rows("gemma3")[0], None, CPU).kwargs
    kinds = (kwargs["input_ids"] == IMAGE).long()
    with pytest.raises(ValueError, match="for Gemma3Attention, .*: its attention has a mask of its own"):
        model(**kwargs, token_type_ids=kinds, use_cache=False)


@pytest.mark.parametrize(
    "options, keys, why",
    [
        ({"position_bias": torch.zeros(1)}, 3, "position_bias"),
        ({"is_causal": False}, 3, "no causal mask"),
        ({}, 2, "cross-attention"),
    ],
)
def test_attention_beyond_causal_is_refused_for_packed_rows(options, keys, why):
    x = torch.zeros(1, 2, 3, 8)
    k, layout = x[:, :, :keys], PackedLayout([0], [3], [(0, 0)], CPU)
    with pytest.raises(ValueError, match=f"for Identity, .*: its attention has {why}$"):
        packed_attention(torch.nn.Identity(), x, k, k, None, packed_layout=layout, **options)


def test_a_layer_that_does_not_call_packed_attention_is_an_error():
    """A model of remote code may claim support that one of its layers does not have."""
    model = text_model("llama", {})
    use_packed_attention(model)
    model.model.layers[1].self_attn.config = AutoConfig.for_model("llama", **BASE, attn_implementation="sdpa")
    with pytest.raises(ValueError, match="for llama, .*: only 1 of its 2 layers call packed attention"):
        model(**prepare_model_inputs(rows()[0], None, CPU).kwargs)


class OwnAttention(nn.Module):
    """transformers looks for such a class in the source of remote code, to see whether its attention can be set."""


class OwnLlama(LlamaPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)


def test_a_model_whose_attention_cannot_be_set_is_refused():
    model = OwnLlama(AutoConfig.for_model("llama", **BASE))
    with pytest.raises(ValueError, match="for llama, .*: its attention does not go through"):
        use_packed_attention(model, packed=True)


CHANGES_LOGITS = frozenset(
    """cohere cohere2 cohere2_moe gemma2 gemma3n_text granite granite_swa granitemoe granitemoe_swa granitemoeshared
    hyperclovax minicpm3 nanochat vaultgemma""".split()
)  # after the output layer; minicpm3 scales hidden states before it


@pytest.mark.parametrize("family", TEXT)
def test_logits_are_those_of_the_output_layer_where_fused_kernels_are_allowed(family):
    """Fused kernels compute logits from the output layer's inputs and its weight."""
    model, outputs = text_model(family, TEXT[family], "eager"), []
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: outputs.append(output))
    logits = model(torch.tensor([[5, 6, 7]]), use_cache=False).logits
    assert bool(head_obstacle(model.config)) == (family in CHANGES_LOGITS)
    assert torch.equal(logits, outputs[0]) == (family not in CHANGES_LOGITS - {"minicpm3"})


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma2", {"final_logit_softcapping": 0.5}),
        ("granite", {"logits_scaling": 3}),
        ("cohere", {}),
        ("falcon_h1", {**TEXT["falcon_h1"], "lm_head_multiplier": 0.5}),
        ("recurrent_gemma", {**REFUSED["recurrent_gemma"][0], "logits_soft_cap": 0.5}),
    ],
)
def test_families_that_change_logits_after_the_output_layer_are_known(family, options):
    """Fused kernels compute logits from hidden states only."""
    model = text_model(family, options)
    hidden = model.base_model(torch.tensor([[5, 6, 7]])).last_hidden_state
    logits = model(torch.tensor([[5, 6, 7]])).logits
    assert (model.get_output_embeddings()(hidden) - logits).abs().max() > 1e-2
    assert "its logits are transformed after the output layer" in head_obstacle(model.config)
    assert head_obstacle(text_model("llama", {}).config) is None


def test_chameleon_suppresses_the_tokens_of_images_after_the_output_layer():
    """Fused kernels would give them a probability."""
    tokens_of_images = {f"IMGIMG{letter}Z": 10 + i for i, letter in enumerate("ABCD")}
    vq_config = {"base_channels": 32, "num_embeddings": 4, "embed_dim": 8, "latent_channels": 8, "resolution": 16}
    options = {"vocabulary_map": {"<image>": 3, **tokens_of_images}, "vq_config": {**vq_config, "num_res_blocks": 1}}
    config = AutoConfig.for_model("chameleon", **{**BASE, **options})
    logits = AutoModelForImageTextToText.from_config(config)(torch.tensor([[5, 6, 7]])).logits
    assert (logits[..., 10:14] == torch.finfo(logits.dtype).min).all() and logits[..., 14:].min() > -10
    assert "suppresses the tokens of images in its logits" in head_obstacle(config)


def test_attention_temperature_of_llama4_follows_positions():
    """transformers computes it by the index in the row, which padding on the left and packing shift."""
    model, (batch, weights) = text_model("llama4_text", {**TEXT["llama4_text"], "floor_scale": 3}, "eager"), rows()
    check(model, batch, weights, WAYS)
    expected = r"^attention_mask: expected less than 3 columns for llama4_text in rows padded on the left, .*got 19"
    with pytest.raises(ValueError, match=expected):
        left_padded(model, batch, weights)


def test_attention_temperature_of_llama4_on_two_ranks_that_share_a_row():
    layer = text_model("llama4_text", {**TEXT["llama4_text"], "floor_scale": 3}).model.layers[1].self_attn
    layout = PackedLayout([0, 5, 7], [5, 2, 3], [(0, 0), (0, 5), (0, 0)], CPU)

    def temperature(at):
        return 1 + layer.attn_scale * torch.log1p((at + 1) // 3)

    expected = temperature(torch.tensor([0, 1, 2, 3, 4, 5, 6, 0, 1, 2]))
    for rank in range(2):
        layout.ulysses = UlyssesGroup(2, rank, None, None)
        found = by_position(layer, temperature(torch.arange(5)).expand(1, 1, 1, 5).mT, layout)
        torch.testing.assert_close(found.flatten(), expected[5 * rank : 5 * rank + 5])


def test_chunks_of_a_sequence_become_segments():
    """A response's chunk may begin in its prompt; a sequence that fits into one chunk is not cut."""
    layout = PackedLayout([0, 7, 9, 12], [7, 2, 3, 4], [(0, 0), (0, 7), (0, 7), (0, 0)], CPU).chunked(4)
    assert layout.starts == [0, 4, 7, 8, 9, 10, 12] and layout.lengths == [4, 3, 1, 1, 1, 2, 4]
    assert layout.prefixes == [(0, 0), (0, 0), (4, 3), (0, 0), (4, 3), (0, 0), (0, 0)]


def test_each_query_has_a_key():
    """Also padding of a block, which would lie beyond the window: otherwise kernels may return nan."""
    layout = PackedLayout([0, 40, 50, 70], [40, 10, 20, 31], [(0, 0), (0, 40), (0, 0), (50, 20)], CPU)
    masks = [block.attention_mask(4, None) for block in layout.blocks]
    assert [mask.ndim for mask in masks] == [4, 2] and all(mask.any(-1).all() for mask in masks)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "llama4_text"])
def test_the_same_model_generates_and_runs_without_a_mask(family):
    """Windows, soft caps and sinks also apply outside of packed rows."""
    ids = torch.randint(3, 80, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    options["output_logits"] = True
    plain, model = (text_model(family, TEXT[family], "eager") for _ in range(2))
    use_packed_attention(model)
    expected, logits = (torch.stack(m.generate(ids, **options).logits) for m in (plain, model))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_attention_dropout_is_applied_in_training_only(family):
    model = text_model(family, {**TEXT[family], "attention_dropout": 0.5})
    use_packed_attention(model)
    kwargs = prepare_model_inputs(rows()[0], None, CPU).kwargs
    first, second = (model(**kwargs).logits for _ in range(2))
    assert torch.equal(first, second)
    model.train()
    dropped, dropped_again = (model(**kwargs).logits for _ in range(2))
    assert (dropped - dropped_again).abs().max() > 0.1 and (dropped - first).abs().max() > 0.1


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
            layout = PackedLayout(starts, lengths, prefixes, torch.device(device))
            moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
            layout.image_ids = moved.pop("images", None)
            attention_options = AttentionOptions(window=3, **moved)
            outs.append(varlen_attention(q.to(device), k.to(device), v.to(device), layout, attention_options).cpu())
        torch.testing.assert_close(outs[1], outs[0], atol=1e-4, rtol=1e-4)


def test_unsupported_families_are_refused_when_the_engine_is_made():
    def engine(model, **options):
        return make_engine("fsdp2", "language_model", model=model, device="cpu", **options)

    capped = {"final_logit_softcapping": 0.5}
    expected = "use_fused_kernels: expected False for gemma2, got True: its logits are transformed after"
    with pytest.raises(ValueError, match=expected):
        engine(text_model("gemma2", capped), use_fused_kernels=True)
    engine(text_model("gemma2", capped))
    adapted = lora(text_model("qwen2", {"tie_word_embeddings": False}), 2, 4, r".*(q_proj|lm_head)")
    expected = "use_fused_kernels: expected False for qwen2, got True: its output layer has adapters"
    with pytest.raises(ValueError, match=expected):
        engine(adapted, use_fused_kernels=True)
    teacher = engine(adapted)
    for part in (teacher.output_layer, lambda: teacher.hidden_states(rows()[0])):
        with pytest.raises(ValueError, match="logits that are the output layer's, got qwen2: its output layer has"):
            part()
    with pytest.raises(ValueError, match="use_remove_padding: expected False for recurrent_gemma"):
        engine(text_model("recurrent_gemma", REFUSED["recurrent_gemma"][0]))
