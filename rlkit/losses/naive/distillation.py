"""`rlkit.losses.distillation` position by position, from sums over the vocabulary."""

import torch
from torch import Tensor

from rlkit.losses.naive._loops import add, constant, everywhere, trained, zeros


def forward_kl_loss(
    student_logits: Tensor, teacher_logits: Tensor, mask: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    mask = everywhere(mask, student_logits[..., 0])
    student, teacher, loss = student_logits.double() / temperature, constant(teacher_logits) / temperature, zeros(mask)
    for b, t in trained(mask):
        loss[b, t] = _kl(_softmax(teacher[b, t]), _softmax(student[b, t]))
    return loss


def reverse_kl_loss(
    student_logits: Tensor, teacher_logits: Tensor, mask: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    mask = everywhere(mask, student_logits[..., 0])
    student, teacher, loss = student_logits.double() / temperature, constant(teacher_logits) / temperature, zeros(mask)
    for b, t in trained(mask):
        loss[b, t] = _kl(_softmax(student[b, t]), _softmax(teacher[b, t]))
    return loss


def jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    mask = everywhere(mask, student_logits[..., 0])
    student, teacher, loss = student_logits.double() / temperature, constant(teacher_logits) / temperature, zeros(mask)
    for b, t in trained(mask):
        p, q = _softmax(teacher[b, t]), _softmax(student[b, t])
        mixture = beta * p + (1 - beta) * q
        loss[b, t] = beta * _kl(p, mixture) + (1 - beta) * _kl(q, mixture)
    return loss


def topk_forward_kl_loss(
    student_logits: Tensor,
    teacher_logprobs: Tensor,
    teacher_indices: Tensor,
    mask: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    mask = everywhere(mask, student_logits[..., 0])
    student, teacher, loss = student_logits.double() / temperature, constant(teacher_logprobs).exp(), zeros(mask)
    for b, t in trained(mask):
        q = _buckets(_softmax(student[b, t]), teacher_indices[b, t])
        p = torch.cat([teacher[b, t], 1 - teacher[b, t].sum()[None]])
        loss[b, t] = _kl(p, q)
    return loss


def topk_reverse_kl_loss(
    student_logits: Tensor,
    teacher_logprobs: Tensor,
    teacher_indices: Tensor,
    mask: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    mask = everywhere(mask, student_logits[..., 0])
    student, teacher, loss = student_logits.double() / temperature, constant(teacher_logprobs).exp(), zeros(mask)
    for b, t in trained(mask):
        q = _buckets(_softmax(student[b, t]), teacher_indices[b, t])
        p = torch.cat([teacher[b, t], 1 - teacher[b, t].sum()[None]])
        loss[b, t] = _kl(q, p)
    return loss


def topk_jsd_loss(
    student_logits: Tensor,
    teacher_logprobs: Tensor,
    teacher_indices: Tensor,
    mask: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    mask = everywhere(mask, student_logits[..., 0])
    student, teacher, loss = student_logits.double() / temperature, constant(teacher_logprobs).exp(), zeros(mask)
    for b, t in trained(mask):
        q = _buckets(_softmax(student[b, t]), teacher_indices[b, t])
        p = torch.cat([teacher[b, t], 1 - teacher[b, t].sum()[None]])
        mixture = beta * p + (1 - beta) * q
        loss[b, t] = beta * _kl(p, mixture) + (1 - beta) * _kl(q, mixture)
    return loss


def _softmax(z: Tensor) -> Tensor:
    return z.exp() / add(z[v].exp() for v in range(len(z)))


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """The sum of p log(p / q) over what p gives a probability."""
    return add(p[v] * (p[v] / q[v]).log() for v in range(len(p)) if p[v] > 0)


def _buckets(q: Tensor, indices: Tensor) -> Tensor:
    """The probabilities at the indices, and the sum of all others."""
    others = [v for v in range(len(q)) if v not in indices.tolist()]
    return torch.cat([q[indices], add(q[v] for v in others)[None]])
