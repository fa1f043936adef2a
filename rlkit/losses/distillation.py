r"""Distillation losses, one value per position: divergences of a teacher's and a student's next-token distributions.

Position by position, with no shift (as in `token_entropy`): `mask[b, t]` belongs to `logits[b, t]`. Logits that an
engine has aligned with the tokens they predict take the token mask as it is. A model's raw logits at t speak of token
t + 1 and take `F.pad(mask[:, 1:], (0, 1))`.

P is the teacher's distribution and Q the student's, both at `temperature`. Values are in nats; there is no factor of
temperature squared (Hinton et al., https://arxiv.org/abs/1503.02531, multiply by it to keep the gradient's size; TRL
does not). Only the student gets a gradient, and it is exact: every form sums over the vocabulary and samples nothing.
Backward keeps one float32 [B, T, V] tensor; there is no second derivative.

A logit of -inf is a probability of 0 and adds nothing where the other side's is 0 too, or where the formula weighs it
with 0. A KL divergence is infinite where its first argument has a token that its second lacks, and comes out as inf
with no useful gradient: suppress the same tokens on both sides, or use `jsd_loss`, which is always finite.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlkit.losses._check import check_float, check_integer, check_mask, check_positive, check_rank, check_shape, fail
from rlkit.losses._numerics import at_least_float32, masked
from rlkit.losses.logprobs import _LOG2_E, _exp, _pieces, _scaled

_TAIL_ROUNDING = 16.0  # in units of the dtype's eps: what 1 - sum(p) may be off by; no tail mass below it is believed


def forward_kl_loss(student_logits: Tensor, teacher_logits: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    r"""KL(teacher || student), supervised distillation, which covers all that the teacher might say.

    $$L = \sum_v P_v (\log P_v - \log Q_v), \quad
    \frac{\partial L}{\partial \text{student\_logits}_v} = \frac{Q_v - P_v}{\tau}$$

    https://arxiv.org/abs/2306.13649 section 2; the limit of `jsd_loss` / beta as beta goes to 0.

    Args:
        student_logits: [B, T, V], any floating dtype.
        teacher_logits: [B, T, V], of the same vocabulary; gets no gradient.
        mask: bool [B, T]; see the module for its alignment.
        temperature: of both distributions, > 0.

    Returns:
        [B, T], to be minimised, float32 (float64 for float64 logits); exactly 0, with gradient 0, outside the mask
        whatever the inputs hold there.

    Raises:
        ValueError: for a wrong rank, shape or dtype, or a temperature that is not positive.
    """
    return _divergence(_forward_kl, student_logits, teacher_logits, mask, temperature)


def reverse_kl_loss(student_logits: Tensor, teacher_logits: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    r"""KL(student || teacher), which keeps the student to what the teacher finds likely.

    $$L = \sum_v Q_v (\log Q_v - \log P_v), \quad
    \frac{\partial L}{\partial \text{student\_logits}_v} = \frac{Q_v (\log Q_v - \log P_v - L)}{\tau}$$

    https://arxiv.org/abs/2306.13649 section 2; the limit of `jsd_loss` / (1 - beta) as beta goes to 1. On tokens that
    the student sampled this is the exact form of on-policy distillation's per-token log-ratio.

    Args, Returns, Raises: as `forward_kl_loss`.
    """
    return _divergence(_reverse_kl, student_logits, teacher_logits, mask, temperature)


def jsd_loss(
    student_logits: Tensor, teacher_logits: Tensor, mask: Tensor, beta: float = 0.5, temperature: float = 1.0
) -> Tensor:
    r"""Generalised Jensen-Shannon divergence, bounded and finite for any pair of distributions.

    $$L = \beta\, KL(P \| M) + (1 - \beta)\, KL(Q \| M), \quad M = \beta P + (1 - \beta) Q$$

    GKD, https://arxiv.org/abs/2306.13649 eq. 1. At most $-\beta\log\beta - (1 - \beta)\log(1 - \beta)$; symmetric at
    beta 0.5.

    The value goes to 0 as beta goes to 0 or 1; divided by beta it goes to KL(teacher || student) at 0, divided by
    1 - beta to KL(student || teacher) at 1. TRL weighs and mixes as here, but at exactly 0 and 1 returns those KLs, a
    jump in the loss's scale. Here beta is strictly between, and the ends are functions of their own.

    Args:
        student_logits, teacher_logits, mask: as in `forward_kl_loss`.
        beta: the teacher's share of the mixture, in (0, 1).
        temperature: as in `forward_kl_loss`.

    Returns:
        [B, T], to be minimised, float32 (float64 for float64 logits); exactly 0, with gradient 0, outside the mask
        whatever the inputs hold there.

    Raises:
        ValueError: for a wrong rank, shape or dtype, a beta outside (0, 1), or a temperature that is not positive.
    """
    if not 0 < beta < 1:
        fail("beta", beta, "a number in (0, 1); for the ends see forward_kl_loss (0) and reverse_kl_loss (1)")
    return _divergence(partial(_jsd, beta=beta), student_logits, teacher_logits, mask, temperature)


def topk_forward_kl_loss(
    student_logits: Tensor,
    teacher_logprobs: Tensor,
    teacher_indices: Tensor,
    mask: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    r"""KL(teacher || student) from the teacher's K likeliest tokens, the rest of the vocabulary in one bucket.

    $$L = \sum_{v \in K} P_v (\log P_v - \log Q_v) + P_{rest} (\log P_{rest} - \log Q_{rest}), \quad
    P_{rest} = 1 - \sum_{v \in K} P_v$$

    Never above `forward_kl_loss`, to which it is equal for K = V. The bucket keeps the student from putting mass
    outside the K tokens unseen, and makes K = 1 a sensible loss. TRL's trainers that ask a server have the bucket too,
    its self-distillation renormalises both sides over the K tokens, which is
    `forward_kl_loss(student_logits.gather(2, teacher_indices), teacher_logprobs, mask)`.

    A rest of the teacher's that is within rounding of 0 counts as 0.

    Args:
        student_logits: [B, T, V], any floating dtype.
        teacher_logprobs: [B, T, K], log-probabilities over the whole vocabulary at `temperature` (they cannot be
            tempered afterwards), in any order; -inf marks an entry that names no token. Gets no gradient.
        teacher_indices: [B, T, K], integers in [0, V), distinct but for entries at -inf, which may hold anything.
        mask: bool [B, T]; see the module for its alignment.
        temperature: of the student, and of the teacher when it was asked; > 0.

    Returns:
        [B, T], to be minimised, float32 (float64 for float64 inputs); exactly 0, with gradient 0, outside the mask
        whatever the inputs hold there.

    Raises:
        ValueError: for a wrong rank, shape or dtype, or a temperature that is not positive.
    """
    student, teacher, rest = _topk_buckets(student_logits, teacher_logprobs, teacher_indices, mask, temperature)
    rest = torch.where(rest > _tail_rounding(rest), rest, 0.0).log()
    return torch.where(mask, _kl(torch.cat([teacher, rest], -1), student), 0.0)


def topk_reverse_kl_loss(
    student_logits: Tensor,
    teacher_logprobs: Tensor,
    teacher_indices: Tensor,
    mask: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    r"""KL(student || teacher) from the teacher's K likeliest tokens, the rest of the vocabulary in one bucket.

    $$L = \sum_{v \in K} Q_v (\log Q_v - \log P_v) + Q_{rest} (\log Q_{rest} - \log P_{rest})$$

    Never above `reverse_kl_loss`, to which it is equal for K = V. Loose where the student is far from the teacher:
    within the bucket all tokens are alike, so K should hold nearly all of the teacher's mass.

    The teacher's rest is held at 2e-6 at least (16 eps of float32), as a rest that rounds to 0 would make the loss
    infinite. TRL takes the student's K likeliest tokens instead, or the sampled one alone.

    Args, Returns, Raises: as `topk_forward_kl_loss`.
    """
    student, teacher, rest = _topk_buckets(student_logits, teacher_logprobs, teacher_indices, mask, temperature)
    rest = rest.clamp(min=_tail_rounding(rest)).log()
    return torch.where(mask, _kl(student, torch.cat([teacher, rest], -1)), 0.0)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """KL of log-distributions over the last dimension; probability 0 in `first` adds 0 to value and gradient."""
    p = first.exp()
    return (p * masked(first - second, p > 0)).sum(-1)


def _forward_kl(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Of log-distributions [n, V]: the divergences [n, 1] and their gradients [n, V] by the student's scaled logits."""
    p, _, kl = _excess(teacher, student)
    return kl, _exp(student).sub_(p)


def _reverse_kl(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """As `_forward_kl`."""
    q, excess, kl = _excess(student, teacher)
    return kl, excess.sub_(kl).mul_(q)


def _jsd(student: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """As `_forward_kl`. What the student does to the mixture changes nothing, as the mixture sums to 1."""
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    _, _, kl_teacher = _excess(teacher, mixture)
    kl_student, gradient = _reverse_kl(student, mixture)
    return beta * kl_teacher + (1 - beta) * kl_student, gradient.mul_(1 - beta)


def _excess(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of log-distributions: first's probabilities p, first - second but 0 where p is 0, and their product's sum."""
    p = _exp(first)
    excess = first - second
    # by the bits of both: a CPU takes three times as long to compare p with 0 and to choose by the outcome
    bits = torch.int32 if p.dtype == torch.float32 else torch.int64
    excess.view(bits).mul_(p.view(bits).clamp(max=1))
    return p, excess, (p * excess).sum(-1, keepdim=True)


class _Divergence(torch.autograd.Function):
    """(values [N], gradients [N, V]) of a rule like `_forward_kl`, piece by piece; saves the second alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        rule: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        student: Tensor,
        teacher: Tensor,
        mask: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(student.dtype, torch.float32)
        values, gradients = student.new_empty(mask.shape, dtype=dtype), torch.empty_like(student, dtype=dtype)
        for rows in _pieces(student):
            value, gradient = rule(*(_scaled(x[rows], temperature).log_softmax(1) for x in (student, teacher)))
            values[rows], gradients[rows] = value[:, 0], masked(gradient, mask[rows, None])
        return masked(values, mask), gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # no zeros for the second output
        ctx.save_for_backward(output[1])
        ctx.dtype, ctx.temperature = inputs[1].dtype, inputs[4]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        (gradients,) = ctx.saved_tensors
        return None, (gradients * (grad / ctx.temperature)[:, None]).to(ctx.dtype), None, None, None


class _Buckets(torch.autograd.Function):
    """Of tempered logits [N, V]: those at `index` [N, K], and logsumexp [N] of the others; finite outside the mask.

    Entries that are not `named` take no token from the others. Saves exp(logit - largest) of the others and its sums.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor, index: Tensor, named: Tensor, mask: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        others = at_least_float32(masked(logits, mask[:, None]))
        top = others.gather(1, index) / temperature
        others.scatter_add_(1, index, torch.where(named, -torch.inf, 0.0).to(others.dtype))
        largest, total = others.new_empty(2, len(others))
        lowest = torch.finfo(others.dtype).min  # where no other is left
        for rows in _pieces(others):
            largest[rows] = others[rows].amax(1).clamp(min=lowest)
            below = others[rows].sub_(largest[rows, None])
            total[rows] = below.mul_(_LOG2_E / temperature).exp2_().sum(1)
        return top, total.log() + largest / temperature, others, total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, index, _, _, ctx.temperature = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)  # no zeros for the last outputs
        ctx.save_for_backward(index, *output[2:])
        ctx.dtype = logits.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_top: Tensor | None, grad_rest: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_top is None or grad_rest is None:  # both go into one `cat`, so that neither has a gradient alone
            return (None,) * 5
        index, shares, total = ctx.saved_tensors
        scale = torch.where(total > 0, grad_rest / (total * ctx.temperature), 0.0)
        result = (shares * scale[:, None]).scatter_add_(1, index, grad_top / ctx.temperature)
        return result.to(ctx.dtype), None, None, None, None


def _divergence(
    rule: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    temperature: float,
) -> Tensor:
    """`_Divergence` of checked logits, as [B, T]."""
    _check(student_logits, mask, temperature)
    check_float("teacher_logits", teacher_logits)
    check_shape("teacher_logits", teacher_logits, tuple(student_logits.shape), "as student_logits")
    student, teacher = student_logits.flatten(0, 1), teacher_logits.detach().flatten(0, 1)
    return _Divergence.apply(rule, student, teacher, mask.flatten(), temperature)[0].view(mask.shape)


def _check(student_logits: Tensor, mask: Tensor, temperature: float) -> None:
    """student_logits [B, T, V] with the [B, T] of the bool mask, and a positive temperature."""
    check_positive(temperature=temperature)
    check_mask(mask)
    check_float("student_logits", student_logits)
    check_rank("student_logits", student_logits, 3, "[B, T, V]")
    shape = (*mask.shape, student_logits.shape[2])
    check_shape("student_logits", student_logits, shape, "[B, T, V] with the [B, T] of mask")


def _topk_buckets(
    student_logits: Tensor, teacher_logprobs: Tensor, teacher_indices: Tensor, mask: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The student's log-probabilities [B, T, K + 1], the teacher's [B, T, K], and the teacher's rest [B, T, 1] as mass.

    The student's last bucket is summed over the tokens outside K, not taken as 1 minus the others, which would cancel.
    """
    _check(student_logits, mask, temperature)
    check_float("teacher_logprobs", teacher_logprobs)
    check_rank("teacher_logprobs", teacher_logprobs, 3, "[B, T, K]")
    check_shape("teacher_logprobs", teacher_logprobs, (*mask.shape, teacher_logprobs.shape[2]), "[B, T, K] as mask")
    check_integer("teacher_indices", teacher_indices)
    check_shape("teacher_indices", teacher_indices, tuple(teacher_logprobs.shape), "as teacher_logprobs")
    teacher = torch.where(mask[..., None], at_least_float32(teacher_logprobs.detach()), -torch.inf)
    named = teacher > -torch.inf
    index = torch.where(named, teacher_indices, 0).long()
    rows = [x.flatten(0, 1) for x in (student_logits, index, named, mask)]
    top, rest, *_ = _Buckets.apply(*rows, temperature)
    top = torch.where(named, top.view(named.shape), -torch.inf)
    everything = named.sum(-1, keepdim=True) == student_logits.shape[2]
    mass = torch.where(everything, 0.0, 1 - teacher.exp().sum(-1, keepdim=True))
    return torch.cat([top, rest.view(*mask.shape, 1)], -1).log_softmax(-1), teacher, mass


def _tail_rounding(x: Tensor) -> float:
    """The largest 1 - sum(p) of the dtype of `x` that may be rounding alone."""
    return _TAIL_ROUNDING * torch.finfo(x.dtype).eps
