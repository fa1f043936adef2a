"""KTO, whose answers come without a partner."""

import math

import pytest
import torch
from pair_oracles import answers, sigmoid

from rlkit.losses.preference import kto_kl_estimate, kto_loss


@pytest.mark.parametrize("kl", [0.0, 0.7, torch.tensor(0.7, dtype=torch.float64)])
def test_kto_equals_the_loop(kl):
    lp, ref, good = answers()
    loss = kto_loss(lp, ref, good, kl, 0.2, 1.5, 0.75)
    loops = [
        1.5 * (1 - sigmoid(0.2 * (lp[i] - ref[i] - kl)))
        if good[i]
        else 0.75 * (1 - sigmoid(0.2 * (kl - lp[i] + ref[i])))
        for i in range(8)
    ]
    torch.testing.assert_close(loss, torch.stack(loops))
    weights = torch.arange(1.0, 9, dtype=torch.float64)
    (grad,) = torch.autograd.grad((loss * weights).sum(), lp)
    (expected,) = torch.autograd.grad(sum(w * x for w, x in zip(weights, loops, strict=True)), lp)
    torch.testing.assert_close(grad, expected)
    assert (grad[good] < 0).all() and (grad[~good] > 0).all()


def test_kto_golden():
    """beta (h - z) = log 3 for both: 1/4 lost of a good answer, 3/4 of a bad one."""
    lp, ref = torch.tensor([0.0, 0.0], requires_grad=True), torch.full((2,), -2 * math.log(3) - 1.0)
    kl = torch.tensor(1.0, requires_grad=True)
    good = torch.tensor([True, False])
    loss = kto_loss(lp, ref, good, kl, 0.5, 2.0, 4.0)
    torch.testing.assert_close(loss, torch.tensor([0.5, 3.0]))
    loss.sum().backward()
    torch.testing.assert_close(lp.grad, torch.tensor([-2 * 0.5 * 3 / 16, 4 * 0.5 * 3 / 16]))
    assert kl.grad is None


def test_kto_kl_estimate():
    lp = torch.tensor([-1.0, -2.0, -6.0], requires_grad=True)
    estimate = kto_kl_estimate(lp, torch.tensor([-2.0, -5.0, -4.0]))
    assert estimate.item() == pytest.approx(2 / 3) and not estimate.requires_grad and estimate.ndim == 0
    assert kto_kl_estimate(lp, torch.zeros(3)) == 0
    assert kto_kl_estimate(torch.zeros(0), torch.zeros(0)) == 0


def test_kto_kl_estimate_varies_with_the_split():
    lp, ref = torch.tensor([1.0, -3.0]), torch.zeros(2)
    assert kto_kl_estimate(lp, ref) == 0
    assert kto_kl_estimate(lp[:1], ref[:1]) + kto_kl_estimate(lp[1:], ref[1:]) == 1
