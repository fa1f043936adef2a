"""The numeric rules every loss keeps: float32 at least, and what is masked is masked before it is used."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkit.losses._check import advantages_per_token

LOG_RATIO_LIMIT = 20.0  # nats; exp(20) is 4.9e8


def at_least_float32(x: Tensor) -> Tensor:
    """`x` as float32; float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """`torch.where(mask, x, 0)` for x that broadcasts to the mask, made for a CPU.

    There `torch.where` branches at every element, on a scattered mask twenty times as slow as this.
    """
    if not x.is_cpu or torch.compiler.is_compiling():
        return torch.where(mask, x, 0)
    return _Masked.apply(x.expand(mask.shape), mask)


def choose(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """`torch.where(condition, x, y)` in the way of `masked`: for [B, T] conditions that change from token to token."""
    return masked(x, condition) + masked(y, ~condition)


def mask_bits(mask: Tensor, like: Tensor) -> Tensor:
    """Integers as wide as `like`'s elements: all bits set where the mask is True, none where it is False."""
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[like.element_size()]
    return mask.view(torch.int8).neg().to(width)


class _Masked(torch.autograd.Function):
    """`masked`, by bits."""

    @staticmethod
    def forward(x: Tensor, mask: Tensor) -> Tensor:
        bits = mask_bits(mask, x)
        return bits.bitwise_and_(x.view(bits.dtype)).view(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return masked(grad, *ctx.saved_tensors), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return masked(tangent, *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, dims: tuple, x: Tensor, mask: Tensor) -> tuple[Tensor, int]:
        x, mask = (y if d is None else y.movedim(d, 0) for y, d in zip((x, mask), dims, strict=True))
        return torch.where(mask, x, 0), 0


def masked_log_ratio(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor | None) -> Tensor:
    r"""`logprobs - base_logprobs`, 0 outside the mask, held within +-LOG_RATIO_LIMIT; safe to put through `exp`.

    Masking comes first: with it after `exp`, backward multiplies a zero by an inf and the gradient is nan while the
    loss looks finite. The limit is for unmasked tokens: beyond it the value is that at the limit and the gradient is 0.
    """
    log_ratio = at_least_float32(logprobs) - at_least_float32(base_logprobs)
    if mask is not None:
        log_ratio = masked(log_ratio, mask)
    return F.hardtanh(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)  # a clamp whose backward is one pass, not four


def masked_cost(advantages: Tensor, mask: Tensor) -> Tensor:
    """-A as [B, T], detached and float32 at least; 0 outside the mask, whatever the advantages hold there."""
    return masked(at_least_float32(advantages_per_token(advantages.detach(), mask)), mask).neg_()


def sequence_cost(advantages: Tensor, mask: Tensor) -> Tensor:
    """`masked_cost`; but [B] advantages give [B, 1], for what is one value a sequence: 0 for a row without tokens."""
    if advantages.ndim == 2:
        return masked_cost(advantages, mask)
    return masked_cost(advantages, mask.sum(1, keepdim=True, dtype=torch.int32) > 0)
