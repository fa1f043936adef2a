"""Students, teachers and the losses of distillation, for several test files."""

import math
from functools import partial

import torch
from hypothesis import settings

from rlkit.losses.distillation import (
    forward_kl_loss,
    jsd_loss,
    reverse_kl_loss,
    topk_forward_kl_loss,
    topk_jsd_loss,
    topk_reverse_kl_loss,
)
from rlkit.losses.logprobs import suppress_tokens
from rlkit.losses.naive import distillation as naive

FEW = settings(max_examples=25, deadline=None, derandomize=True)
FULL = {
    "forward": forward_kl_loss,
    "reverse": reverse_kl_loss,
    "jsd": jsd_loss,
    "jsd0.2": partial(jsd_loss, beta=0.2),
    "jsd0.9": partial(jsd_loss, beta=0.9),
}
NAIVE = {
    "forward": naive.forward_kl_loss,
    "reverse": naive.reverse_kl_loss,
    "jsd": naive.jsd_loss,
    "jsd0.2": partial(naive.jsd_loss, beta=0.2),
    "jsd0.9": partial(naive.jsd_loss, beta=0.9),
}
TOPK = {"forward": topk_forward_kl_loss, "reverse": topk_reverse_kl_loss, "jsd": topk_jsd_loss}
INF = math.inf


def batch(seed=0, b=2, t=3, v=6, dtype=torch.float64, scale=2.0):
    g = torch.Generator().manual_seed(seed)
    student, teacher = (scale * torch.randn(2, b, t, v, generator=g, dtype=torch.float64)).to(dtype)
    return student.requires_grad_(), teacher, torch.rand(b, t, generator=g) < 0.7


def top(teacher, k, temperature=1.0):
    return (teacher / temperature).log_softmax(-1).topk(k, -1)


def check_against(loss, loops, student, mask, **close):
    """Values and the gradient of a weighted sum; `loops[b][t]` are scalar tensors."""
    weights = torch.randn(*mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    total = 0 * student[student.isfinite()].sum()
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            expected = loops[b][t] if mask[b, t] else torch.zeros((), dtype=torch.float64)
            torch.testing.assert_close(loss[b, t], expected, **close)
            total = total + weights[b, t] * expected
    (grad,) = torch.autograd.grad((loss * weights).sum(), student, retain_graph=True)
    (expected,) = torch.autograd.grad(total, student)
    torch.testing.assert_close(grad, expected, **close)


def open_and_shut(student_ids, teacher_ids):
    student, teacher, mask = batch(seed=3)
    closed = [
        suppress_tokens(x, torch.tensor(ids, dtype=torch.long))
        for x, ids in ((student, student_ids), (teacher, teacher_ids))
    ]
    return student, *closed, torch.ones_like(mask)
