"""Groups of divergences between two distributions over a vocabulary of 32,000, with backward and the memory they take.

The loops go row by row, as in functions_logits.py: a rule takes the log-probabilities of student and teacher at one
position, and returns the divergence and its gradient by the student's logits.
"""

from functools import partial

import torch
from functions_common import PEERS, group

from rlkit.losses import (
    forward_kl_loss,
    full_vocabulary_kl,
    jsd_loss,
    reverse_kl_loss,
    suppress_tokens,
    token_mean,
    topk_forward_kl_loss,
    topk_jsd_loss,
    topk_reverse_kl_loss,
)

if "trl" in PEERS:
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.iw_opd import IWOPDTrainer

B, T, V, K = 4, 16, 32000, 64
BETA = 0.3


def inputs():
    g = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, B, T, V, generator=g).mul_(2)
    mask = torch.arange(T) < torch.tensor([T, T - 3, T, T - 1])[:, None]
    return student.clone().requires_grad_(), teacher.clone(), mask, torch.where(mask, 0, -100)


def through_softmax(q, slope):
    """From derivatives by probabilities to those by logits."""
    return q * (slope - (q * slope).sum())


def forward(student, teacher):
    return (teacher.exp() * (teacher - student)).sum(), student.exp() - teacher.exp()


def reverse(student, teacher):
    q, slope = student.exp(), student - teacher
    return (q * slope).sum(), through_softmax(q, slope)


def jsd(student, teacher):
    q, p = student.exp(), teacher.exp()
    mixture = (BETA * p + (1 - BETA) * q).log()
    value = BETA * (p * (teacher - mixture)).sum() + (1 - BETA) * (q * (student - mixture)).sum()
    return value, through_softmax(q, (1 - BETA) * (student - mixture))


def topk(rule, by):
    """The rule of the K likeliest tokens and a bucket of the others, whose derivative their tokens share out."""

    def of_row(student, teacher):
        top = (teacher if by == "teacher" else student).topk(K).indices
        rest = torch.ones(V, dtype=torch.bool).index_fill_(0, top, False)
        few = [torch.cat([x[top], x[rest].logsumexp(0)[None]]) for x in (student, teacher)]
        value, by_bucket = rule(*few)
        gradient = (student - few[0][-1]).exp() * by_bucket[-1]
        gradient[top] = by_bucket[:-1]
        return value, gradient

    return of_row


def loop_mean(rule, student, teacher, mask):
    """The mean over the mask; row by row."""
    value, gradient, n = 0.0, torch.zeros_like(student), mask.sum().item()
    for i, t in mask.nonzero().tolist():
        x, by_logits = rule(student[i, t].log_softmax(0), teacher[i, t].log_softmax(0))
        value, gradient[i, t] = value + x / n, by_logits / n
    return value, gradient


def divergence_group(name, ours, rule, theirs=None):
    """Ours takes (student, teacher, mask), TRL's (student, teacher, labels)."""

    @group(f"{name}, 64 x 32000", *(["trl"] if theirs else []), memory=True)
    def build(_):
        student, teacher, mask, labels = inputs()

        def run(function, *last):
            loss = function(student, teacher, *last)
            return loss, torch.autograd.grad(loss, student)[0]

        def loop():
            return loop_mean(rule, student.detach(), teacher, mask)

        contestants = {"rlkit": lambda: run(lambda *x: token_mean(ours(*x), mask), mask), "loop": loop}
        return {**contestants, "trl": lambda: run(theirs, labels)} if theirs else contestants


def gkd(beta):
    return lambda *x: GKDTrainer.generalized_jsd_loss(*x, beta=beta)


def opd(beta):
    return lambda *x: IWOPDTrainer.generalized_jsd_loss(*x, beta=beta, top_k=K)


def from_logits(formula, by):
    """Ours of the teacher's log-probabilities at its own K likeliest tokens, or at the student's."""

    def ours(student, teacher, mask):
        indices = (teacher if by == "teacher" else student.detach()).topk(K).indices
        return formula(student, teacher.log_softmax(-1).gather(-1, indices), indices, mask)

    return ours


divergence_group("distillation, forward KL", forward_kl_loss, forward, gkd(0))
divergence_group("distillation, reverse KL", reverse_kl_loss, reverse, gkd(1))
divergence_group("distillation, JSD", lambda *x: jsd_loss(*x, beta=BETA), jsd, gkd(BETA))
divergence_group(
    "distillation, forward KL of 64", from_logits(topk_forward_kl_loss, "teacher"), topk(forward, "teacher"), opd(0)
)
divergence_group(
    "distillation, reverse KL of 64", from_logits(topk_reverse_kl_loss, "student"), topk(reverse, "student"), opd(1)
)
divergence_group(  # TRL's is over the likeliest tokens of the teacher and of the student
    "distillation, JSD of 64", from_logits(partial(topk_jsd_loss, beta=BETA), "teacher"), topk(jsd, "teacher")
)
divergence_group("KL over the vocabulary", full_vocabulary_kl, reverse, gkd(1))


@group("suppressed tokens, 64 x 32000", memory=True)
def suppressed(_):
    student, up, _, _ = inputs()
    ids = torch.randint(V, (200,), generator=torch.Generator().manual_seed(1))

    def ours():
        out = suppress_tokens(student, ids)
        return out.clamp(min=-1e4), torch.autograd.grad(out, student, up)[0]

    def loop():
        out, gradient = student.detach().clone(), up.clone()
        for v in ids.tolist():
            out[..., v], gradient[..., v] = -1e4, 0.0
        return out, gradient

    return {"rlkit": ours, "loop": loop}
