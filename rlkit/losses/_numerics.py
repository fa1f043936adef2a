"""The numeric rules every loss keeps: float32 at least, and what is masked is masked before it is used."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkit.losses._check import advantages_per_token, check_tensor

LOG_RATIO_LIMIT = 20.0  # nats; exp(20) is 4.9e8


def at_least_float32(x: Tensor) -> Tensor:
    """`x` as float32; float64 stays float64."""
    if x.dtype == torch.float32:  # a microsecond less, of the ten that a loss of preferences takes
        return x
    return x.to(torch.promote_types(x.dtype, torch.float32))


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """`torch.where(mask, x, 0)`, made for a CPU.

    There `torch.where` branches at every element, on a scattered mask twenty times as slow as this.
    """
    if by_branch(x):
        return torch.where(mask, x, 0)
    return _Masked.apply(x.expand(torch.broadcast_shapes(x.shape, mask.shape)), mask)


def by_branch(x: Tensor) -> bool:
    """Whether x is to be masked by `torch.where`: on a device, and where what runs is traced or transformed.

    torch asks the same of its transforms before it calls an autograd.Function. One that serves them too (it has a
    `setup_context`) costs 40 us more a call, which is as long as masking half a megabyte takes.
    """
    return not x.is_cpu or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def choose(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """`torch.where(condition, x, y)` in the way of `masked`: for [B, T] conditions that change from token to token."""
    return masked(x, condition) + masked(y, ~condition)


def mask_bits(mask: Tensor, like: Tensor) -> Tensor:
    """Integers as wide as `like`'s elements: all bits set where the mask is True, none where it is False."""
    return mask.view(torch.int8).neg().to(_INTEGERS[like.element_size()])


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def masked_rows(mask: Tensor, keep: Tensor) -> Tensor:
    """`mask & keep`, where `keep` may be [B, 1]. As bytes: a CPU takes twenty times as long to broadcast bools."""
    return (mask.view(torch.int8) & keep.view(torch.int8)).view(torch.bool)


def masked_sums(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of each row of x [B, T] over its mask, [B]; tokens of each row's mask, int32 [B]), whatever x holds outside.

    In one piece, as the mask then becomes numbers once, and the sum needs no backward of its own.
    """
    if by_branch(x):
        return torch.where(mask, x, 0).sum(1), mask.sum(1, dtype=torch.int32)
    return _MaskedSums.apply(x, mask)


class _Masked(torch.autograd.Function):
    """`masked`, by the product of an element's bits, as an integer, with 0 or 1: a nan comes to 0 too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.save_for_forward(mask)
        integers = _INTEGERS[x.element_size()]
        bits, taken = mask.view(torch.int8).to(integers), x.view(integers)
        return (bits.mul_(taken) if bits.shape == taken.shape else bits * taken).view(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return masked(grad, *ctx.saved_tensors), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return masked(tangent, *ctx.saved_tensors)


class _MaskedSums(torch.autograd.Function):
    """`masked_sums`, in the way of `_Masked`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(mask)
        ctx.save_for_forward(mask)
        integers = _INTEGERS[x.element_size()]
        bits = mask.view(torch.int8).to(integers)
        lengths = bits.sum(1, dtype=torch.int32)
        ctx.mark_non_differentiable(lengths)
        return bits.mul_(x.view(integers)).view(x.dtype).sum(1), lengths

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return mask.view(torch.int8).to(grad.dtype).mul_(grad[:, None]), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> tuple[Tensor, None]:
        return masked_sums(tangent, *ctx.saved_tensors)[0], None


def masked_log_ratio(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor | None) -> Tensor:
    r"""`logprobs - base_logprobs`, 0 outside the mask, held within +-LOG_RATIO_LIMIT; safe to put through `exp`.

    Masking comes first: with it after `exp`, backward multiplies a zero by an inf and the gradient is nan while the
    loss looks finite. The limit is for unmasked tokens: beyond it the value is that at the limit and the gradient is 0.
    """
    log_ratio = at_least_float32(logprobs) - at_least_float32(base_logprobs)
    if mask is None or by_branch(log_ratio):
        log_ratio = log_ratio if mask is None else torch.where(mask, log_ratio, 0)
        return F.hardtanh_(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)  # its backward is one pass, that of clamp four
    return _MaskedAndBounded.apply(log_ratio, mask)


class _MaskedAndBounded(torch.autograd.Function):
    """`hardtanh(masked(x, mask))` in the memory of one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        bounded = masked(x, mask).clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ctx.save_for_backward(bounded, mask)
        ctx.save_for_forward(bounded, mask)
        return bounded

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        bounded, mask = ctx.saved_tensors
        grad = masked(grad, mask)
        if torch.is_grad_enabled():
            return torch.ops.aten.hardtanh_backward(grad, bounded, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), None
        torch.ops.aten.hardtanh_backward(grad, bounded, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT, grad_input=grad)
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        bounded, mask = ctx.saved_tensors
        return torch.ops.aten.hardtanh_backward(masked(tangent, mask), bounded, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def masked_cost(advantages: Tensor, mask: Tensor) -> Tensor:
    """-A as [B, T], detached and float32 at least; 0 outside the mask, whatever the advantages hold there."""
    return masked(at_least_float32(advantages_per_token(advantages, mask).detach()), mask).neg_()


def sequence_cost(advantages: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """`masked_cost`; but [B] advantages give [B, 1], for what is one value a sequence: 0 where its length [B, 1] is."""
    check_tensor("advantages", advantages)
    return masked_cost(advantages, mask if advantages.ndim == 2 else lengths > 0)
