"""KTO, whose responses come without a partner."""

import math

import pytest
import torch

from rlkit.losses.preference import kto_kl_estimate, kto_loss


def test_kto_golden():
    """beta (h - z) = log 3 for both: 1/4 lost of a good response, 3/4 of a bad one."""
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
