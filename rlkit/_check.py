"""Checks of arguments by shape, dtype and python number: none reads a tensor's values, so none waits for a device."""

import torch
from torch import Tensor


def fail(name: str, came: object, expected: str) -> None:
    """Raise the ValueError of a failed check: the name of the argument, what was expected, and what it got."""
    if isinstance(came, Tensor):
        came = f"{came.dtype} of shape {list(came.shape)}"
    raise ValueError(f"{name}: expected {expected}, got {came}")


def tensor(name: str, x: Tensor) -> None:
    """`x` is a tensor: no list, array or None."""
    if not isinstance(x, Tensor):
        fail(name, x if x is None else f"a {type(x).__name__}", "a tensor")


def rank(name: str, x: Tensor, rank: int, layout: str) -> None:
    """`x` has `rank` dimensions; `layout` says which, such as "[B, T]"."""
    tensor(name, x)
    if x.ndim != rank:
        fail(name, x, f"rank {rank} {layout}")


def shape(name: str, x: Tensor, shape: tuple[int, ...], whose: str) -> None:
    """`x` has `shape`; `whose` says where the shape comes from, such as "as logprobs"."""
    tensor(name, x)
    if tuple(x.shape) != tuple(shape):
        fail(name, x, f"shape {list(shape)} {whose}")


def floating(name: str, x: Tensor) -> None:
    """`x` is floating point."""
    tensor(name, x)
    if not x.is_floating_point():
        fail(name, x, "a floating point tensor")


def integer(name: str, x: Tensor) -> None:
    """`x` is an integer tensor (bool is not)."""
    tensor(name, x)
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        fail(name, x, "an integer tensor")


def token_mask(mask: Tensor) -> None:
    """`mask` is bool [B, T]."""
    tensor("mask", mask)
    if mask.dtype != torch.bool:
        fail("mask", mask, "a bool tensor [B, T], True on trained tokens")
    rank("mask", mask, 2, "[B, T]")


def per_token(mask: Tensor, **tensors: Tensor) -> None:
    """The named tensors are floating point [B, T] of one shape, and so is the bool mask."""
    token_mask(mask)
    masked_if_any(mask, **tensors)


def masked_if_any(mask: Tensor | None, **tensors: Tensor) -> None:
    """`per_token`, where the mask may be None."""
    whose, first = next(iter(tensors.items()))
    if mask is not None:
        token_mask(mask)
        whose, first = "mask", mask
    for name, x in tensors.items():
        floating(name, x)
        rank(name, x, 2, "[B, T]")
        shape(name, x, tuple(first.shape), f"as {whose}")


def per_position(mask: Tensor, **logits: Tensor) -> None:
    """The named tensors are floating point [B, T, V] of one shape, with the [B, T] of the bool mask."""
    token_mask(mask)
    first = next(iter(logits))
    for name, x in logits.items():
        floating(name, x)
        rank(name, x, 3, "[B, T, V]")
        shape(name, x, (*mask.shape, x.shape[2]), "[B, T, V] with the [B, T] of mask")
        shape(name, x, tuple(logits[first].shape), f"as {first}")


def groups(group_ids: Tensor, **tensors: Tensor) -> None:
    """The named tensors are [B], and `group_ids` is an integer [B] beside them."""
    for name, x in tensors.items():
        rank(name, x, 1, "[B]")
        integer("group_ids", group_ids)
        shape("group_ids", group_ids, tuple(x.shape), f"as {name}")


def not_negative(**numbers: float) -> None:
    """Each named number is >= 0 (nan is not)."""
    for name, number in numbers.items():
        if not number >= 0:
            fail(name, number, "a number >= 0")


def positive(**numbers: float) -> None:
    """Each named number is > 0 (nan is not)."""
    for name, number in numbers.items():
        if not number > 0:
            fail(name, number, "a number > 0")


def share(**numbers: float) -> None:
    """Each named number is in [0, 1]."""
    for name, number in numbers.items():
        if not 0 <= number <= 1:
            fail(name, number, "a number in [0, 1]")


def dual_clip(dual_clip: float | None) -> None:
    """The bound on the ratio of bad tokens is above 1, or None."""
    if dual_clip is not None and not dual_clip > 1:
        fail("dual_clip", dual_clip, "a number > 1, or None")


def advantages_per_token(advantages: Tensor, mask: Tensor) -> Tensor:
    """Advantages [B] as a [B, 1] view and [B, T] as they are, after a check against the mask [B, T]."""
    floating("advantages", advantages)
    if advantages.ndim == 1:
        shape("advantages", advantages, (mask.shape[0],), "or that of mask")
        return advantages[:, None]
    shape("advantages", advantages, tuple(mask.shape), "as mask, or [B]")
    return advantages
