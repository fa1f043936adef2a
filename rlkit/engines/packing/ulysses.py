"""Ulysses sequence parallelism: the ranks of a group share the tokens of a packed row.

Outside attention a rank computes its own part of the tokens, and in attention, which must see them all, its own part of
the heads: an all-to-all on the way in and one on the way out (https://arxiv.org/abs/2309.14509). The engine hands whole
rows to the model; a forward pre-hook cuts what its decoder is given, so that images are put in their places first and
no model code is changed.
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

# a decoder's features of images, and the mask that says for which tokens they are
OF_IMAGES = {"deepstack_visual_embeds": "visual_pos_masks"}


class Ulysses(NamedTuple):
    """The groups that a rank is in.

    Attributes:
        size: ranks that share their rows.
        rank: this rank's place among them.
        group: these ranks; they stand next to each other in the world.
        data: the ranks in the same place of the other groups: what is summed over rows is summed over these.
    """

    size: int
    rank: int
    group: dist.ProcessGroup
    data: dist.ProcessGroup


def share_rows(model: Any, size: int, device: torch.device, *, packed: bool) -> Ulysses:
    """Let groups of `size` ranks share their rows: each rank's decoder gets its part of the tokens.

    Args:
        model: from transformers, the same on every rank.
        size: ranks in a group; it divides the world size and the number of attention heads. Where there are fewer
            key-value heads, they are repeated.
        device: where the model will be.
        packed: whether rows are packed; padded ones are refused.

    Raises:
        ValueError: on every rank alike, before any of them waits for another.
    """
    world, text = dist.get_world_size(), model.config.get_text_config()
    name = f"ulysses_sequence_parallel_size={size}"
    if size < 1 or world % size:
        raise ValueError(f"{name}: a divisor of the number of ranks expected, which is {world}")
    if text.num_attention_heads % size:
        heads = text.num_attention_heads
        raise ValueError(f"{name}: a divisor of the number of attention heads expected, {text.model_type} has {heads}")
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {str(one.get("rope_type")) for one in (rope, *rope.values()) if isinstance(one, dict)}
    if chosen := sorted(kinds & {"dynamic", "longrope"}):
        raise ValueError(
            f"{name}: {text.model_type} scales RoPE ({chosen[0]}) by the longest position, which is not in every part"
        )
    if not packed:
        raise ValueError(f"{name}: it shares packed rows; use_remove_padding=True expected")
    model.get_decoder().register_forward_pre_hook(_cut, with_kwargs=True)
    return _groups(dist.group.WORLD, size, device.type)


@cache
def _groups(world: dist.ProcessGroup, size: int, kind: str) -> Ulysses:
    """One set of groups for all engines of the process: each costs connections, and on a GPU memory."""
    mesh = init_device_mesh(kind, (world.size() // size, size), mesh_dim_names=("data", "ulysses"))
    return Ulysses(size, world.rank() % size, mesh.get_group("ulysses"), mesh.get_group("data"))


def _cut(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """The decoder's arguments, those that speak of tokens cut to this rank's."""
    given = {**dict(zip(signature(module.forward).parameters, args, strict=False)), **kwargs}
    layout = given.get("packed_layout")
    if layout is None or layout.ulysses is None:
        return (), given
    total, size, rank = sum(layout.lengths), layout.ulysses.size, layout.ulysses.rank
    mine = slice(total // size * rank, total // size * (rank + 1))
    own: dict[str, Any] = {}
    for name, x in given.items():
        if name in OF_IMAGES and x is not None:
            before, there = (given[OF_IMAGES[name]][0, s].sum() for s in (slice(mine.start), mine))
            own[name] = [features[before : before + there] for features in x]
        elif name == "position_ids" and x is not None:
            own[name] = x[..., mine]
        elif isinstance(x, Tensor) and x.shape[:2] == (1, total):
            own[name] = x[:, mine]
        elif name == "logits_to_keep":  # it is for the output layer, but some models hand it on
            own[name] = x
        elif any(isinstance(leaf, Tensor) for leaf in tree_leaves(x)):
            family = module.config.model_type
            raise ValueError(f"{family}: ulysses_sequence_parallel_size: how to cut its decoder's {name} is not known")
        else:
            own[name] = x
    return (), own


def to_heads(x: Tensor, ulysses: Ulysses) -> Tensor:
    """[n, H, D] of this rank's tokens -> [N, H / size, D] of this rank's heads."""
    return rearrange(
        _Exchange.apply(rearrange(x, "n (u h) d -> u n h d", u=ulysses.size), ulysses.group), "u n h d -> (u n) h d"
    )


def to_tokens(x: Tensor, ulysses: Ulysses) -> Tensor:
    """[N, H / size, D] of this rank's heads -> [n, H, D] of this rank's tokens: the inverse of `to_heads`."""
    return rearrange(
        _Exchange.apply(rearrange(x, "(u n) h d -> u n h d", u=ulysses.size), ulysses.group), "u n h d -> n (u h) d"
    )


class _Exchange(torch.autograd.Function):
    """`x[j]` goes to the group's rank j, `out[j]` comes from it; backward the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, x = group, x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradients[0], ctx.group), None


def gather(x: Tensor, counts: Sequence[int], ulysses: Ulysses) -> Tensor:
    """[counts[rank], ...] of each rank (what stands behind is left out) -> [sum of counts, ...] on all of them, in the
    order of the ranks.

    Every rank then works out the same loss, and its backward keeps the gradient of its own part: summed over the ranks,
    as gradients are, each token counts once.
    """
    whole: Tensor = _Gather.apply(x[: counts[ulysses.rank]], counts, ulysses)
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Sequence[int], ulysses: Ulysses) -> Tensor:
        ctx.counts, ctx.rank = list(counts), ulysses.rank
        mine = x.new_zeros(max(1, *counts), *x.shape[1:])
        mine[: len(x)] = x
        parts = [torch.empty_like(mine) for _ in counts]
        dist.all_gather(parts, mine, group=ulysses.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].split(ctx.counts)[ctx.rank], None, None
