"""Floating-point operations of a batch, from the model's config: what throughput and MFU are measured by.

    flops = batch_flops(engine.config, batch)      # one forward of this rank's rows
    training = 3 * flops                           # and its backward; 2 * flops where the weights are frozen (LoRA)

Matrices of `n` weights cost 2n a token, forward (a multiplication and an addition), and twice that backward: the 6N of
Kaplan et al. (https://arxiv.org/abs/2001.08361, section 2.1) and of PaLM (https://arxiv.org/abs/2204.02311,
appendix B). Recomputed activations are not counted, as in PaLM's MFU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlkit.data.samples import Batch
from rlkit.engines.packing.inputs import prompt_lengths, shared_prompts


def forward_flops(config: Any, spans: Sequence[tuple[int, int]], scored: int = 0, frames: Sequence[int] = ()) -> int:
    """Of one forward through a language or vision-language model.

        text = 2 N t + 4 L A pairs + 2 H V scored,  t = sum_i n_i,  pairs = sum_i n_i b_i + n_i (n_i + 1) / 2
        N = L (2 H A + 2 H K + 3 H I),  A = heads * head size,  K = key-value heads * head size

    The attention counts what a causal mask leaves, half of PaLM's 12 L H Q T for a whole sequence; sliding windows are
    taken as full. Of a mixture of experts, I is that of the experts which see a token, with the router. Embeddings,
    norms and position ids count nothing. Attention and MLP are taken to be Llama's, Qwen's or Gemma's in shape.

    Args:
        config: transformers' of the model.
        spans: (n, b): tokens computed together, and the tokens before them that they attend to as well.
        scored: tokens that go through the output layer, H x V.
        frames: patches of each image, or of each frame of a video: the tower is counted for the Qwen-VL kinds, with
            windowed attention where it has that, and is 0 for others.

    Source: see the module.
    """
    text = config.get_text_config()
    hidden, layers, heads = text.hidden_size, text.num_hidden_layers, text.num_attention_heads
    size = getattr(text, "head_dim", None) or hidden // heads
    grouped = getattr(text, "num_key_value_heads", None) or heads
    tokens = sum(new for new, _ in spans)
    pairs = sum(new * before + new * (new + 1) // 2 for new, before in spans)
    matrices = layers * 2 * hidden * size * (heads + grouped) + _mlp_weights(text)
    language = 2 * matrices * tokens + 4 * layers * heads * size * pairs + 2 * hidden * text.vocab_size * scored
    vision = getattr(config, "vision_config", None)
    return language + (0 if vision is None else _tower_flops(vision, frames))


def _mlp_weights(text: Any) -> int:
    """Weights of all layers' MLPs that a token meets."""
    hidden, layers, inner = text.hidden_size, text.num_hidden_layers, text.intermediate_size
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    if not experts:
        return layers * 3 * hidden * inner
    active = text.num_experts_per_tok * (getattr(text, "moe_intermediate_size", None) or inner)
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    return layers * (3 * hidden * (active + shared) + hidden * experts + (hidden if shared else 0))


def _tower_flops(vision: Any, frames: Sequence[int]) -> int:
    """2 (E + D B) n + 4 D C pairs + 2 M n / merge^2: patch embedding, D blocks of width C, and M of the merger."""
    if not hasattr(vision, "spatial_merge_size") or not hasattr(vision, "depth"):
        return 0
    depth, width = vision.depth, getattr(vision, "embed_dim", None) or vision.hidden_size
    inner = getattr(vision, "intermediate_size", None) or int(width * vision.mlp_ratio)
    gated = vision.hidden_act == "silu"
    block = 4 * width**2 + (3 if gated else 2) * width * inner
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    embedding = channels * vision.temporal_patch_size * vision.patch_size**2 * width
    merge = vision.spatial_merge_size**2
    out = getattr(vision, "out_hidden_size", None) or vision.hidden_size
    mergers = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    merger = mergers * ((merge * width) ** 2 + merge * width * out)
    whole = len(vision.fullatt_block_indexes) if hasattr(vision, "fullatt_block_indexes") else depth
    window = (getattr(vision, "window_size", 0) // vision.patch_size) ** 2
    total = 0
    for patches in frames:
        pairs = patches * (whole * patches + (depth - whole) * min(patches, window))
        total += 2 * (embedding + depth * block) * patches + 4 * width * pairs + 2 * merger * (patches // merge)
    return total


def batch_flops(config: Any, batch: Batch, *, share_prompts: bool = True, head: bool = True) -> int:
    """Of one forward of this rank's rows, images included.

    A prompt that several rows answer, and its images, are counted once, as an engine computes them; where the token
    budget of a micro-batch parts such rows, the engine computes them once for each part, which is not counted.

    Args:
        config: of the model.
        batch: on the host; its masked tokens go through the output layer.
        share_prompts: as the engine was told.
        head: False for a value head, which costs nothing beside the rest.
    """
    prompts = prompt_lengths(batch)
    groups = shared_prompts(batch) if share_prompts else [[i] for i in range(len(batch))]
    spans, frames = [], []
    for group in groups:
        before = prompts[group[0]] if len(group) > 1 else 0
        spans += [(before, 0)] * bool(before) + [(batch.lengths[i] - before, before) for i in group]
        for name, grid in batch.vision[group[0]].items():
            if name.endswith("_grid_thw"):
                frames += [h * w for t, h, w in grid.tolist() for _ in range(t)]
    return forward_flops(config, spans, int(batch.mask.sum()) if head else 0, frames)
