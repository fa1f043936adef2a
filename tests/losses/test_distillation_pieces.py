"""Distillation losses work in pieces of rows: what is alive at once, and that pieces change nothing."""

from functools import partial

import pytest
import torch
from teachers import FULL, TOPK, batch, top
from test_from_logits import Sizes

from rlkit.losses import _kernels as module

LOSSES = {**FULL, **{f"topk {name}": loss for name, loss in TOPK.items()}}


def loss_of(name, student, teacher, mask):
    return partial(LOSSES[name], student, *(top(teacher, 3) if name not in FULL else (teacher,)), mask, temperature=0.7)


@pytest.mark.parametrize("name", LOSSES)
def test_one_tensor_of_the_logits_size_forward_and_the_gradient_backward(monkeypatch, name):
    monkeypatch.setattr(module, "CPU_CACHE_BYTES", 4 * 50 * 8)  # four rows
    student, teacher, mask = batch(b=4, t=10, v=50)
    loss = loss_of(name, student, teacher, mask)
    with Sizes() as sizes:
        out = loss()
        forward = len(sizes.made)
        out.sum().backward()
    assert sum(n > 4 * 50 for n in sizes.made[:forward]) == 1
    assert sum(n > 4 * 50 for n in sizes.made[forward:]) == 1


@pytest.mark.parametrize("name", LOSSES)
def test_pieces_change_nothing(monkeypatch, name):
    student, teacher, mask = batch(b=3, t=5, v=11)
    weights = torch.randn(3, 5, dtype=torch.float64)
    results = []
    for size in (1, 4 * 11 * 8, 2**20):  # one row, four, all fifteen
        monkeypatch.setattr(module, "CPU_CACHE_BYTES", size)
        out = loss_of(name, student, teacher, mask)()
        results.append((out, torch.autograd.grad((out * weights).sum(), student)[0]))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


@pytest.mark.parametrize("name", LOSSES)
def test_slices_of_logits(name):
    """What a caller has cut from longer rows, or from a larger vocabulary."""
    student, teacher, mask = batch(b=3, t=5, v=11)
    cut = [torch.nn.functional.pad(x.detach(), (1, 1, 1, 1), value=7.0)[:, 1:-1, 1:-1] for x in (student, teacher)]
    cut[0].requires_grad_()
    one, two = loss_of(name, student, teacher, mask)(), loss_of(name, *cut, mask)()
    torch.testing.assert_close(two, one)
    grads = torch.autograd.grad(one.sum(), student)[0], torch.autograd.grad(two.sum(), cut[0])[0]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", LOSSES)
def test_vmap_of_losses_and_their_gradients(name):
    students, teachers, masks = (torch.stack(x) for x in zip(*[batch(seed, v=11) for seed in range(3)], strict=True))

    def total(student, teacher, mask):
        return loss_of(name, student, teacher, mask)().sum()

    students = students.detach()
    came = torch.func.vmap(torch.func.grad_and_value(total))(students, teachers, masks)
    loop = [torch.func.grad_and_value(total)(*x) for x in zip(students, teachers, masks, strict=True)]
    torch.testing.assert_close(came, tuple(torch.stack(x) for x in zip(*loop, strict=True)))
