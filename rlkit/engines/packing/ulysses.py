"""Ulysses sequence parallelism: the ranks of a group share the tokens of a packed row.

Outside attention each rank computes a part of the tokens. Attention needs all tokens, so each rank computes a part of
the heads there, with an all-to-all before and after (https://arxiv.org/abs/2309.14509). The engine passes whole rows to
the model. A forward pre-hook slices the inputs of its decoder, after image features have been inserted, so no model
code changes. Layers that need whole sequences (rlkit/engines/packing/separate_sequences.py) gather the tokens, and each
rank computes all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

from rlkit.engines.distributed import set_timeouts
from rlkit.vlm.families import VISION_EXPERT_FAMILIES

# a decoder's argument with one entry for each image token -> the argument that says which tokens these are
IMAGE_TOKEN_MASKS = {"deepstack_visual_embeds": "visual_pos_masks"}


class UlyssesGroup(NamedTuple):
    """The process groups of a rank.

    Attributes:
        size: number of ranks that share their rows.
        rank: of this process in the group.
        group: the ranks that share rows; they are neighbours in the world.
        data_parallel_group: the ranks with the same `rank` in all groups; sums over rows are sums over these.
    """

    size: int
    rank: int
    group: dist.ProcessGroup
    data_parallel_group: dist.ProcessGroup


def apply_ulysses(model: Any, size: int, device: torch.device, *, packed: bool) -> UlyssesGroup:
    """Let groups of `size` ranks share their rows: the decoder of each rank receives its part of the tokens.

    Args:
        model: from transformers, the same on every rank.
        size: ranks in a group; it must divide the world size and the number of attention heads. Key-value heads are
            repeated if there are fewer of them.
        device: where the model will be.
        packed: whether rows are packed; padded rows are not supported.

    Raises:
        ValueError: on every rank alike, before any of them waits for another.
    """
    world, text = dist.get_world_size(), model.config.get_text_config()
    name, heads = "ulysses_sequence_parallel_size", text.num_attention_heads
    if size < 1 or world % size:
        raise ValueError(f"{name}: expected a divisor of the {world} ranks, got {size}")
    if heads % size:
        raise ValueError(f"{name}: expected a divisor of the {heads} attention heads of {text.model_type}, got {size}")
    rope = getattr(text, "rope_parameters", None) or {}
    if any(isinstance(one, dict) and one.get("rope_type") == "dynamic" for one in (rope, *rope.values())):
        raise ValueError(
            f"{name}: expected 1 for {text.model_type}, whose RoPE (dynamic) depends on the longest position, "
            f"got {size}"
        )
    if model.config.model_type in VISION_EXPERT_FAMILIES:
        raise ValueError(
            f"{name}: expected 1 for {model.config.model_type}, whose experts for images have no gradient on a rank "
            f"without image tokens, got {size}"
        )
    if not packed:
        raise ValueError(f"{name}: expected 1 with use_remove_padding=False, got {size}")
    model.get_decoder().register_forward_pre_hook(slice_decoder_inputs, with_kwargs=True)
    return _make_groups(dist.group.WORLD, size, device.type)


@cache
def _make_groups(world: dist.ProcessGroup, size: int, kind: str) -> UlyssesGroup:
    """Shared by all engines of the process, because each group costs connections, and memory on a GPU."""
    mesh = set_timeouts(init_device_mesh(kind, (world.size() // size, size), mesh_dim_names=("dp", "ulysses")))
    return UlyssesGroup(size, world.rank() % size, mesh.get_group("ulysses"), mesh.get_group("dp"))


def slice_decoder_inputs(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]]:
    """Forward pre-hook of a decoder: slice the arguments that have an entry for each token to this rank's tokens.

    Raises:
        ValueError: an argument that contains tensors and is not known.
    """
    inputs = {**dict(zip(signature(module.forward).parameters, args, strict=False)), **kwargs}
    layout = inputs.get("packed_layout")
    if layout is None or layout.ulysses is None:
        return (), inputs
    total = sum(layout.lengths)
    part = total // layout.ulysses.size
    local = slice(part * layout.ulysses.rank, part * (layout.ulysses.rank + 1))
    sliced = dict(inputs)
    for name, x in inputs.items():
        if name in IMAGE_TOKEN_MASKS and x is not None:
            is_image = inputs[IMAGE_TOKEN_MASKS[name]][0]
            # slicing by numbers on a GPU would make the host wait for each of them
            first, count = torch.stack([is_image[: local.start].sum(), is_image[local].sum()]).tolist()
            sliced[name] = [features[first : first + count] for features in x]
        elif name == "position_ids" and x is not None:
            sliced[name] = x[..., local]
        elif isinstance(x, Tensor) and x.shape[:2] == (1, total):
            sliced[name] = x[:, local]
        elif name == "logits_to_keep":  # already this rank's own; some models hand it to their decoder
            pass
        elif any(isinstance(leaf, Tensor) for leaf in tree_leaves(x)):
            raise ValueError(
                f"ulysses_sequence_parallel_size: expected arguments of the decoder that are known, got {name} of "
                f"{module.config.model_type}, which may have to be sliced"
            )
    return (), sliced


def gather_tokens_scatter_heads(x: Tensor, ulysses: UlyssesGroup) -> Tensor:
    """[n, H, D] of this rank's tokens -> [N, H / size, D] of this rank's heads."""
    parts = rearrange(x, "n (u h) d -> u n h d", u=ulysses.size)
    return rearrange(_AllToAll.apply(parts, ulysses.group), "u n h d -> (u n) h d")


def gather_heads_scatter_tokens(x: Tensor, ulysses: UlyssesGroup) -> Tensor:
    """[N, H / size, D] of this rank's heads -> [n, H, D] of this rank's tokens."""
    parts = rearrange(x, "(u n) h d -> u n h d", u=ulysses.size)
    return rearrange(_AllToAll.apply(parts, ulysses.group), "u n h d -> n (u h) d")


def gather_tokens(x: Tensor, ulysses: UlyssesGroup) -> Tensor:
    """[1, n, ...] of this rank's tokens -> [1, N, ...]; backward sums the ranks' gradients of each token."""
    parts = _AllToAll.apply(x.expand(ulysses.size, *x.shape[1:]), ulysses.group)
    return rearrange(parts, "u n ... -> 1 (u n) ...")


class _AllToAll(torch.autograd.Function):
    """`x[j]` is sent to rank j of the group, and `out[j]` is what rank j sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, x = group, x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradients[0], ctx.group), None


def gather_outputs(x: Tensor, counts: Sequence[int], ulysses: UlyssesGroup) -> Tensor:
    """The first counts[rank] entries of each rank's [K, ...] -> [sum of counts, ...] on all ranks, in rank order.

    Every rank then computes the same loss, and backward keeps the gradient of the rank's own part. Gradients are summed
    over the ranks, so each token counts once.
    """
    return _GatherOutputs.apply(x[: counts[ulysses.rank]], counts, ulysses)


class _GatherOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Sequence[int], ulysses: UlyssesGroup) -> Tensor:
        ctx.counts, ctx.rank = list(counts), ulysses.rank
        padded = x.new_zeros(max(1, *counts), *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=ulysses.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].split(ctx.counts)[ctx.rank], None, None
