"""Checks of arguments by shape, dtype and python number: none reads a tensor's values, so none waits for a device."""

import torch
from torch import Tensor


def fail(name: str, came: object, expected: str) -> None:
    """Raise the ValueError every check ends in: the argument, what came and what was expected."""
    if isinstance(came, Tensor):
        came = f"{came.dtype} of shape {list(came.shape)}"
    raise ValueError(f"{name}: expected {expected}, got {came}")


def check_tensor(name: str, x: Tensor) -> None:
    """`x` is a tensor: no list, array or None."""
    if not isinstance(x, Tensor):
        fail(name, x if x is None else f"a {type(x).__name__}", "a tensor")


def check_rank(name: str, x: Tensor, rank: int, layout: str) -> None:
    """`x` has `rank` dimensions; `layout` says which, such as "[B, T]"."""
    check_tensor(name, x)
    if x.ndim != rank:
        fail(name, x, f"rank {rank} {layout}")


def check_shape(name: str, x: Tensor, shape: tuple[int, ...], whose: str) -> None:
    """`x` has `shape`; `whose` says where the shape comes from, such as "as logprobs"."""
    check_tensor(name, x)
    if tuple(x.shape) != tuple(shape):
        fail(name, x, f"shape {list(shape)} {whose}")


def check_float(name: str, x: Tensor) -> None:
    """`x` is floating point."""
    check_tensor(name, x)
    if not x.is_floating_point():
        fail(name, x, "a floating point tensor")


def check_integer(name: str, x: Tensor) -> None:
    """`x` is an integer tensor (bool is not)."""
    check_tensor(name, x)
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        fail(name, x, "an integer tensor")


def check_mask(mask: Tensor) -> None:
    """`mask` is bool [B, T]."""
    check_tensor("mask", mask)
    if mask.dtype != torch.bool:
        fail("mask", mask, "a bool tensor [B, T], True on trained tokens")
    check_rank("mask", mask, 2, "[B, T]")


def check_per_token(mask: Tensor, **tensors: Tensor) -> None:
    """The named tensors are floating point [B, T] of one shape, and so is the bool mask."""
    check_mask(mask)
    check_masked_if_any(mask, **tensors)


def check_masked_if_any(mask: Tensor | None, **tensors: Tensor) -> None:
    """`check_per_token`, where the mask may be None."""
    whose, first = next(iter(tensors.items()))
    if mask is not None:
        check_mask(mask)
        whose, first = "mask", mask
    for name, x in tensors.items():
        check_float(name, x)
        check_rank(name, x, 2, "[B, T]")
        check_shape(name, x, tuple(first.shape), f"as {whose}")


def check_groups(group_ids: Tensor, **tensors: Tensor) -> None:
    """The named tensors are [B], and `group_ids` is an integer [B] beside them."""
    for name, x in tensors.items():
        check_rank(name, x, 1, "[B]")
        check_integer("group_ids", group_ids)
        check_shape("group_ids", group_ids, tuple(x.shape), f"as {name}")


def check_not_negative(**numbers: float) -> None:
    """Each named number is >= 0 (nan is not)."""
    for name, number in numbers.items():
        if not number >= 0:
            fail(name, number, "a number >= 0")


def check_positive(**numbers: float) -> None:
    """Each named number is > 0 (nan is not)."""
    for name, number in numbers.items():
        if not number > 0:
            fail(name, number, "a number > 0")


def check_share(**numbers: float) -> None:
    """Each named number is in [0, 1]."""
    for name, number in numbers.items():
        if not 0 <= number <= 1:
            fail(name, number, "a number in [0, 1]")


def advantages_per_token(advantages: Tensor, mask: Tensor) -> Tensor:
    """Advantages [B] as a [B, 1] view and [B, T] as they are, after a check against the mask [B, T]."""
    check_float("advantages", advantages)
    if advantages.ndim == 1:
        check_shape("advantages", advantages, (mask.shape[0],), "or that of mask")
        return advantages[:, None]
    check_shape("advantages", advantages, tuple(mask.shape), "as mask, or [B]")
    return advantages
