"""Students, teachers and the loop oracles of distillation, for several test files."""

import math
from functools import partial

import torch
from hypothesis import settings

from rlkit.losses.distillation import (
    forward_kl_loss,
    jsd_loss,
    reverse_kl_loss,
    topk_forward_kl_loss,
    topk_reverse_kl_loss,
)
from rlkit.losses.logprobs import suppress_tokens

FEW = settings(max_examples=25, deadline=None, derandomize=True)
FULL = {
    "forward": forward_kl_loss,
    "reverse": reverse_kl_loss,
    "jsd": jsd_loss,
    "jsd0.2": partial(jsd_loss, beta=0.2),
    "jsd0.9": partial(jsd_loss, beta=0.9),
}
TOPK = {"forward": topk_forward_kl_loss, "reverse": topk_reverse_kl_loss}
INF = math.inf


def kl(p, q):
    """Sum over tokens that p has, python or scalar tensors."""
    return sum((x * (x / y).log() for x, y in zip(p, q, strict=True) if x > 0), start=torch.zeros(()).double())


def mix(p, q, beta):
    m = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


ORACLE = {  # of the teacher's and the student's probabilities, lists of scalar tensors
    "forward": lambda p, q: kl(p, q),
    "reverse": lambda p, q: kl(q, p),
    "jsd": lambda p, q: mix(p, q, 0.5),
    "jsd0.2": lambda p, q: mix(p, q, 0.2),
    "jsd0.9": lambda p, q: mix(p, q, 0.9),
}


def probabilities(logits, temperature=1.0):
    """Softmax of one position without a max trick; a logit of -inf is a plain zero, off the graph."""
    weights = [(z / temperature).exp() if z > -INF else torch.zeros((), dtype=torch.float64) for z in logits]
    return [w / sum(weights) for w in weights]


def bucketed(p, ids):
    """Probabilities of `ids` and of all others together."""
    return [p[v] for v in ids] + [sum((p[v] for v in range(len(p)) if v not in ids), start=torch.zeros(()).double())]


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
