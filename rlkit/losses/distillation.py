r"""Distillation losses, one value per position: divergences of a teacher's and a student's next-token distributions.

Position by position, with no shift (as in `token_entropy`): `mask[b, t]` belongs to `logits[b, t]`. Logits that an
engine has aligned with the tokens they predict take the token mask as it is. A model's raw logits at t predict token
t + 1 and take `F.pad(mask[:, 1:], (0, 1))`.

P is the teacher's distribution and Q the student's, both at `temperature`. Values are in nats; there is no factor of
temperature squared (Hinton et al., https://arxiv.org/abs/1503.02531, multiply by it to keep the gradient's size; TRL
does not). Only the student gets a gradient, and it is exact: every form sums over the vocabulary and samples nothing.
Forward and backward work in pieces of rows; one float32 [B, T, V] tensor is kept for backward. There is no
second derivative.

A logit of -inf is a probability of 0 and adds nothing where the other side's is 0 too, or where the formula weighs it
with 0. A KL divergence is infinite where its first argument has a token that its second lacks, and comes out as inf
with no useful gradient: suppress the same tokens on both sides, or use `jsd_loss`, which is always finite.
"""

from functools import partial

import torch
from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import at_least_float32
from rlkit.losses._kernels import Buckets, Rule, divergence, forward_kl, jsd, reverse_kl, temperature_column

_TAIL_ROUNDING = 16.0  # in units of the dtype's eps: 1 - sum(p) below this is taken for rounding, not probability


def forward_kl_loss(
    student_logits: Tensor, teacher_logits: Tensor, mask: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    r"""KL(teacher || student), supervised distillation, which covers all that the teacher might say.

    $$L = \sum_v P_v (\log P_v - \log Q_v), \quad
    \frac{\partial L}{\partial \text{student\_logits}_v} = \frac{Q_v - P_v}{\tau}$$

    https://arxiv.org/abs/2306.13649 section 2; the limit of `jsd_loss` / beta as beta goes to 0.

    Args:
        student_logits: [B, T, V], any floating dtype; without a mask [..., V].
        teacher_logits: of the same shape and vocabulary; gets no gradient.
        mask: bool [B, T], see the module for its alignment; None for every position.
        temperature: of both distributions, > 0.

    Returns:
        [B, T], or [...] without a mask; to be minimised, never below 0.
    """
    return _divergence(forward_kl, student_logits, teacher_logits, mask, temperature)


def reverse_kl_loss(
    student_logits: Tensor, teacher_logits: Tensor, mask: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    r"""KL(student || teacher), which keeps the student to tokens that the teacher finds likely.

    $$L = \sum_v Q_v (\log Q_v - \log P_v), \quad
    \frac{\partial L}{\partial \text{student\_logits}_v} = \frac{Q_v (\log Q_v - \log P_v - L)}{\tau}$$

    https://arxiv.org/abs/2306.13649 section 2; the limit of `jsd_loss` / (1 - beta) as beta goes to 1. On tokens that
    the student sampled this is the exact form of on-policy distillation's per-token log-ratio.

    Args, Returns: as `forward_kl_loss`.
    """
    return _divergence(reverse_kl, student_logits, teacher_logits, mask, temperature)


def jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    r"""Generalised Jensen-Shannon divergence, bounded and finite for any pair of distributions.

    $$L = \beta\, KL(P \| M) + (1 - \beta)\, KL(Q \| M), \quad M = \beta P + (1 - \beta) Q$$

    GKD, https://arxiv.org/abs/2306.13649 eq. 1. At most $-\beta\log\beta - (1 - \beta)\log(1 - \beta)$; symmetric at
    beta 0.5.

    Choices: the value goes to 0 as beta goes to 0 or 1; divided by beta it goes to KL(teacher || student) at 0, divided
    by 1 - beta to KL(student || teacher) at 1. TRL returns those KLs at exactly 0 and 1, a jump in the loss's scale;
    here they are functions of their own.

    Args:
        student_logits, teacher_logits, mask, temperature: as in `forward_kl_loss`.
        beta: the teacher's share of the mixture, in (0, 1).

    Returns:
        [B, T], to be minimised, never below 0.
    """
    _check_beta(beta)
    return _divergence(partial(jsd, beta=beta), student_logits, teacher_logits, mask, temperature)


def topk_forward_kl_loss(
    student_logits: Tensor,
    teacher_logprobs: Tensor,
    teacher_indices: Tensor,
    mask: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    r"""KL(teacher || student) from the teacher's K likeliest tokens, the rest of the vocabulary in one bucket.

    $$L = \sum_{v \in K} P_v (\log P_v - \log Q_v) + P_{rest} (\log P_{rest} - \log Q_{rest}), \quad
    P_{rest} = 1 - \sum_{v \in K} P_v$$

    Never above `forward_kl_loss`, to which it is equal for K = V. The bucket keeps the student from putting mass
    outside the K tokens unseen, and makes K = 1 a sensible loss. A rest of the teacher's that is within rounding of 0
    counts as 0.

    Choices: TRL's trainers that ask a server have the bucket too; its self-distillation renormalises both sides over
    the K tokens, which is `forward_kl_loss(student_logits.gather(2, teacher_indices), teacher_logprobs, mask)`.

    Args:
        student_logits: [B, T, V], any floating dtype; without a mask [..., V].
        teacher_logprobs: [B, T, K], or [..., K], log-probabilities over the whole vocabulary at `temperature` (they
            cannot be tempered afterwards), in any order; -inf marks an entry that names no token. Gets no gradient.
        teacher_indices: of the shape of teacher_logprobs, integers in [0, V), distinct but for entries at -inf, which
            may hold anything.
        mask: bool [B, T], see the module for its alignment; None for every position.
        temperature: of the student, and of the teacher when it was asked; > 0.
    """
    mask = _checked_mask(mask, student_logits=student_logits)
    student, teacher, rest = _buckets(student_logits, teacher_logprobs, teacher_indices, mask, temperature)
    rest = torch.where(rest > _tail_rounding(rest), rest, 0).log()
    return torch.where(mask, _kl(torch.cat([teacher, rest], -1), student), 0)


def topk_reverse_kl_loss(
    student_logits: Tensor,
    teacher_logprobs: Tensor,
    teacher_indices: Tensor,
    mask: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    r"""KL(student || teacher) from the teacher's K likeliest tokens, the rest of the vocabulary in one bucket.

    $$L = \sum_{v \in K} Q_v (\log Q_v - \log P_v) + Q_{rest} (\log Q_{rest} - \log P_{rest})$$

    Never above `reverse_kl_loss`, to which it is equal for K = V. Loose where the student is far from the teacher:
    within the bucket all tokens are alike, so K should hold nearly all of the teacher's mass.

    Choices: the teacher's rest is held at 2e-6 at least (16 eps of float32), as a rest that rounds to 0 would make the
    loss infinite. TRL takes the student's K likeliest tokens instead, or the sampled one alone.

    Args, Returns: as `topk_forward_kl_loss`.
    """
    mask = _checked_mask(mask, student_logits=student_logits)
    student, teacher, rest = _buckets(student_logits, teacher_logprobs, teacher_indices, mask, temperature)
    rest = rest.clamp(min=_tail_rounding(rest)).log()
    return torch.where(mask, _kl(student, torch.cat([teacher, rest], -1)), 0)


def topk_jsd_loss(
    student_logits: Tensor,
    teacher_logprobs: Tensor,
    teacher_indices: Tensor,
    mask: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    r"""Generalised Jensen-Shannon divergence over the teacher's K likeliest tokens and a bucket for all others.

    $$L = \beta\, KL(P \| M) + (1 - \beta)\, KL(Q \| M), \quad M = \beta P + (1 - \beta) Q$$

    over K + 1 outcomes, as in `topk_forward_kl_loss`. Never above `jsd_loss`, to which it is equal for K = V.

    Args:
        student_logits, teacher_logprobs, teacher_indices, mask, temperature: as in `topk_forward_kl_loss`.
        beta: the teacher's share of the mixture, in (0, 1).
    """
    _check_beta(beta)
    mask = _checked_mask(mask, student_logits=student_logits)
    student, teacher, rest = _buckets(student_logits, teacher_logprobs, teacher_indices, mask, temperature)
    rest = torch.where(rest > _tail_rounding(rest), rest, 0).log()
    return divergence(partial(jsd, beta=beta), student, torch.cat([teacher, rest], -1), mask, temperature=1.0)


def _divergence(
    rule: Rule, student_logits: Tensor, teacher_logits: Tensor, mask: Tensor | None, temperature: float
) -> Tensor:
    """[B, T]: the divergence of a rule such as `forward_kl`, after the checks of all losses on whole vocabularies."""
    check.positive(temperature=temperature)
    mask = _checked_mask(mask, student_logits=student_logits, teacher_logits=teacher_logits)
    return divergence(rule, student_logits, teacher_logits, mask, temperature)


def _check_beta(beta: float) -> None:
    if not 0 < beta < 1:
        check.fail("beta", beta, "a number in (0, 1); for the ends see forward_kl_loss (0) and reverse_kl_loss (1)")


def _checked_mask(mask: Tensor | None, **logits: Tensor) -> Tensor:
    """The mask of logits [B, T, V], or True at every position of logits [..., V], which are checked."""
    if mask is not None:
        check.per_position(mask, **logits)
        return mask
    whose, first = next(iter(logits.items()))
    for name, x in logits.items():
        check.floating(name, x)
        check.shape(name, x, tuple(first.shape), f"as {whose}")
    return torch.ones(first.shape[:-1], dtype=torch.bool, device=first.device)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """KL of log-distributions over the last dimension; probability 0 in `first` adds 0 to value and gradient."""
    p = first.exp()
    return (p * torch.where(p > 0, first - second, 0)).sum(-1)


def _buckets(
    student_logits: Tensor, teacher_logprobs: Tensor, teacher_indices: Tensor, mask: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The student's log-probabilities [B, T, K + 1], the teacher's [B, T, K], and the teacher's rest [B, T, 1] as mass.

    The student's last bucket is summed over the tokens outside K, not taken as 1 minus the others, which would cancel.
    """
    check.positive(temperature=temperature)
    check.floating("teacher_logprobs", teacher_logprobs)
    check.rank("teacher_logprobs", teacher_logprobs, student_logits.ndim, "[B, T, K]")
    check.shape("teacher_logprobs", teacher_logprobs, (*mask.shape, teacher_logprobs.shape[-1]), "[B, T, K] as mask")
    check.integer("teacher_indices", teacher_indices)
    check.shape("teacher_indices", teacher_indices, tuple(teacher_logprobs.shape), "as teacher_logprobs")
    teacher = torch.where(mask[..., None], at_least_float32(teacher_logprobs.detach()), -torch.inf)
    named = teacher > -torch.inf
    index = torch.where(named, teacher_indices, 0).long()
    rows = mask.numel()
    logits, *others = (x.reshape(rows, x.shape[-1]) for x in (student_logits, index, named))
    others.append(mask.reshape(rows))
    column = temperature_column(temperature, logits[:, 0])
    top, rest, *_ = Buckets.apply(logits, *others, column)
    top = torch.where(named, top.view(named.shape), -torch.inf)
    everything = named.sum(-1, keepdim=True) == student_logits.shape[-1]
    mass = torch.where(everything, 0, 1 - teacher.exp().sum(-1, keepdim=True))
    return torch.cat([top, rest.view(*mask.shape, 1)], -1).log_softmax(-1), teacher, mass


def _tail_rounding(x: Tensor) -> float:
    """The largest 1 - sum(p) of the dtype of `x` that may be rounding alone."""
    return _TAIL_ROUNDING * torch.finfo(x.dtype).eps
