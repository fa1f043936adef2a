"""Floating-point operations of a batch, from the model's config; throughput and MFU are computed from them.

    flops = batch_flops(engine.config, batch)      # one forward of this rank's rows
    training = 3 * flops                           # with its backward; 2 * flops if most weights are frozen (LoRA)

Engines count each of their passes with `count_pass`. `take_flops()` returns the sum of all engines of the process, so
that a run can log it without knowing which passes a recipe makes.

Matrices of `n` weights cost 2n per token in the forward (a multiplication and an addition) and twice that in the
backward: the 6N of Kaplan et al. (https://arxiv.org/abs/2001.08361, section 2.1) and of PaLM
(https://arxiv.org/abs/2204.02311, appendix B). Recomputed activations are not counted, as in PaLM's MFU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlkit.data.samples import Batch
from rlkit.engines.packing.shared_prompts import prompt_lengths, shared_prompt_groups
from rlkit.vlm.families import PACKABLE_LAYERS, kinds_of_layers, layer_types


def forward_flops(
    config: Any, segments: Sequence[tuple[int, int]], scored: int = 0, image_patches: Sequence[int] = ()
) -> int:
    """FLOPs of one forward through a language or vision-language model.

        text = 2 N t + 4 A pairs + 2 H V scored,  t = sum_i n_i
        N = L (2 H A + 2 H K + 3 H I),  A = heads * head size,  K = key-value heads * head size
        pairs = sum over layers of attention, segments i and positions p from b_i to b_i + n_i - 1 of keys(p),
        keys(p) = p + 1;  min(p + 1, W) with a sliding window of W tokens;  p mod C + 1 in chunks of C tokens

    In Qwen3-Next and Qwen3.5, attention has a gate (H A more weights), and L counts layers of attention only. In the
    others, with the gated delta rule (https://arxiv.org/abs/2412.06464), the b_i tokens cost nothing, since responses
    continue from their prompt's last state. A token costs 2 weights, and 6 times the numbers in the state of a head:
    the state's prediction for the key, its update, and its output.

    Only the attention scores that a causal mask keeps are counted, half of PaLM's 12 L H Q T for a whole sequence.
    For a mixture of experts, I is the size of the experts that a token goes to, and the router is counted. Embeddings,
    norms and position ids are not counted. Attention and MLP are assumed to have the shape of Llama's, Qwen's or
    Gemma's.

    Args:
        config: of the transformers model.
        segments: (n, b): n tokens that are computed together, and b tokens before them that they also attend to.
        scored: tokens that go through the output layer, H x V.
        image_patches: patches of each image, or of each frame of a video. The vision tower is counted for the Qwen-VL
            families, windowed attention included; it is 0 for others.

    Raises:
        ValueError: a family with layers of another shape, see `flops_obstacle`.
    """
    text = config.get_text_config()
    if why := flops_obstacle(config):
        raise ValueError(f"model: expected a family whose FLOPs are known, got {config.model_type}: {why}")
    hidden, heads = text.hidden_size, text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or hidden // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    gated, linear = text.model_type in GATED_ATTENTION, layer_types(config).count("linear_attention")
    attention = text.num_hidden_layers - linear
    tokens = sum(new for new, _ in segments)
    pairs = _attention_pairs(config, segments)
    weights = attention * hidden * head_size * ((3 if gated else 2) * heads + 2 * kv_heads) + _mlp_weights(text)
    language = 2 * weights * tokens + 4 * heads * head_size * pairs + 2 * hidden * text.vocab_size * scored
    language += linear * _delta_rule_flops(text) * tokens if linear else 0
    vision = getattr(config, "vision_config", None)
    return language + (0 if vision is None else _tower_flops(vision, image_patches))


GATED_ATTENTION = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})


def flops_obstacle(config: Any) -> str | None:
    """Why `forward_flops` does not know the shape of this model's layers; None if it does."""
    text = config.get_text_config()
    kinds = set(layer_types(config)) - PACKABLE_LAYERS
    if kinds and (kinds != {"linear_attention"} or text.model_type not in GATED_ATTENTION):
        return f"its layers of {', '.join(sorted(kinds))} are not counted"
    if getattr(text, "kv_lora_rank", None):
        return "its multi-head latent attention is not counted"
    if getattr(text, "hidden_size_per_layer_input", None):
        return "its embeddings of each layer are not counted"
    if getattr(text, "is_heterogeneous", False):  # some layers of Gemma 4 have larger heads
        return "its layers of several sizes are not counted"
    if getattr(text, "n_shared_experts", None) or getattr(text, "moe_num_shared_experts", None):
        return "its shared experts are not counted"
    if isinstance(getattr(text, "moe_intermediate_size", None), list):
        return "its experts of several sizes are not counted"
    return None


def _attention_pairs(config: Any, segments: Sequence[tuple[int, int]]) -> int:
    """Pairs of a query and a key that the masks of all attention layers keep."""
    text, kinds = config.get_text_config(), Counter(kinds_of_layers(config))

    def pairs_among_first(count: int, kind: str) -> int:
        """Pairs of the first `count` positions of a sequence."""
        if kind == "sliding_attention":
            growing = min(count, text.sliding_window)
            return growing * (growing + 1) // 2 + (count - growing) * text.sliding_window
        if kind == "chunked_attention":
            chunks, rest = divmod(count, text.attention_chunk_size)
            return chunks * text.attention_chunk_size * (text.attention_chunk_size + 1) // 2 + rest * (rest + 1) // 2
        return count * (count + 1) // 2

    return sum(
        layers * (pairs_among_first(before + new, kind) - pairs_among_first(before, kind))
        for kind, layers in kinds.items()
        if kind != "linear_attention"
        for new, before in segments
    )


def _delta_rule_flops(text: Any) -> int:
    """FLOPs of a token in one layer with the gated delta rule: projections, convolution and recurrence."""
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    projections = text.hidden_size * (2 * keys + values + 2 * values + 2 * text.linear_num_value_heads)
    convolution = text.linear_conv_kernel_dim * (2 * keys + values)
    return 2 * (projections + convolution) + 6 * values * text.linear_key_head_dim


def _mlp_weights(text: Any) -> int:
    """Weights in the MLPs of all layers that are multiplied with one token."""
    hidden, layers, inner = text.hidden_size, text.num_hidden_layers, getattr(text, "intermediate_size", 0)
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    if not experts:
        return layers * 3 * hidden * inner
    active = text.num_experts_per_tok * (getattr(text, "moe_intermediate_size", None) or inner)
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    return layers * (3 * hidden * (active + shared) + hidden * experts + (hidden if shared else 0))


def _tower_flops(vision: Any, image_patches: Sequence[int]) -> int:
    """2 (E + D B) n + 4 D C pairs + 2 M n / merge^2: patch embedding E, D blocks of B weights and width C, merger M."""
    if not hasattr(vision, "spatial_merge_size") or not hasattr(vision, "depth"):
        return 0
    depth, width = vision.depth, getattr(vision, "embed_dim", None) or vision.hidden_size
    inner = getattr(vision, "intermediate_size", None) or int(width * vision.mlp_ratio)
    is_gated = vision.hidden_act == "silu"
    block = 4 * width**2 + (3 if is_gated else 2) * width * inner
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    embedding = channels * vision.temporal_patch_size * vision.patch_size**2 * width
    merge = vision.spatial_merge_size**2
    out = getattr(vision, "out_hidden_size", None) or vision.hidden_size
    mergers = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    merger = mergers * ((merge * width) ** 2 + merge * width * out)
    full_blocks = len(vision.fullatt_block_indexes) if hasattr(vision, "fullatt_block_indexes") else depth
    window = (getattr(vision, "window_size", 0) // vision.patch_size) ** 2
    total = 0
    for patches in image_patches:
        pairs = patches * (full_blocks * patches + (depth - full_blocks) * min(patches, window))
        total += 2 * (embedding + depth * block) * patches + 4 * width * pairs + 2 * merger * (patches // merge)
    return total


class _FlopCounter:
    """FLOPs of the passes of all engines in this process, since they were last taken."""

    def __init__(self) -> None:
        self.flops = 0.0


_counter = _FlopCounter()


def count_pass(engine: Any, batch: Batch, *, backward: bool = False) -> None:
    """Add an engine's pass over a batch to the FLOPs that `take_flops` returns. An engine calls this in its methods.

    A backward counts as two forwards; as one if the engine trains adapters alone, as the gradient of most weights is
    not computed then.

    Args:
        engine: its `config`, `known_outputs`, `share_prompts`, `has_adapters` and `model_parallel_group` are read.
        batch: this rank's rows. Ranks of a model-parallel group have the same rows, and each counts its share.
        backward: whether the pass has a backward.
    """
    head, share_prompts = "logprobs" in engine.known_outputs, getattr(engine, "share_prompts", True)
    passes = 1 + (1 if getattr(engine, "has_adapters", False) else 2) * backward
    ranks = 1 if engine.model_parallel_group is None else engine.model_parallel_group.size()
    _counter.flops += passes * batch_flops(engine.config, batch, share_prompts=share_prompts, head=head) / ranks


def take_flops() -> float:
    """FLOPs that the engines of this process have computed since the last call. The sum over ranks is that of all.

    nan if one of the models is of a family whose FLOPs are not known.
    """
    taken, _counter.flops = _counter.flops, 0.0
    return taken


def batch_flops(config: Any, batch: Batch, *, share_prompts: bool = True, head: bool = True) -> float:
    """FLOPs of one forward of this rank's rows, images included; nan for a family whose FLOPs are not known.

    A prompt that several rows answer is counted once with its images, because an engine computes it once. If the token
    budget splits such rows over several micro-batches, the engine computes it once in each; that is not counted.

    Args:
        config: of the model.
        batch: on the host; its masked tokens go through the output layer.
        share_prompts: as in the engine.
        head: False for a value head, which costs next to nothing.
    """
    if flops_obstacle(config) is not None:
        return float("nan")
    prompts = prompt_lengths(batch)
    groups = shared_prompt_groups(batch) if share_prompts else [[row] for row in range(len(batch))]
    segments, image_patches = [], []
    for group in groups:
        prompt = prompts[group[0]] if len(group) > 1 else 0
        segments += [(prompt, 0)] * bool(prompt) + [(batch.lengths[row] - prompt, prompt) for row in group]
        for name, grid in batch.vision[group[0]].items():
            if name.endswith("_grid_thw"):
                image_patches += [h * w for t, h, w in grid.tolist() for _ in range(t)]
    return forward_flops(config, segments, int(batch.mask.sum()) if head else 0, image_patches)
