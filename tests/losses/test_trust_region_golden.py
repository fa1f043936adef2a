"""Trust-region losses, each by itself: numbers by hand and the identities of its paper."""

import inspect
import math

import pytest
import torch
from trust_regions import batch, clip_cov, grad_of, kl_cov

from rlkit.losses.trust_region import clip_cov_loss, dppo_kl_loss, dppo_tv_loss, dro_loss, kl_cov_loss, vespo_loss


def test_clip_cov_golden():
    """The mean logprob is -2, the mean advantage 0. `uniform` prefers the third and fourth, which are no candidates."""
    old = torch.tensor([[-1.0, -1.0, -0.5, -0.5, -2.0, -7.0]])
    lp = old.clone().requires_grad_()
    adv = torch.tensor([[2.0, 1.0, -2.0, -1.0, 1.0, -1.0]])
    mask = torch.ones(1, 6, dtype=torch.bool)
    cov = [2.0, 1.0, -3.0, -1.5, 0.0, 5.0]  # (1, 1, 1.5, 1.5, 0, -5) * adv
    assert [(a + 2) * b for a, b in zip(old[0].tolist(), adv[0].tolist(), strict=True)] == cov
    uniform = torch.tensor([[0.9, 0.1, 0.0, 0.0, 0.2, 0.3]])

    def dropped(**knobs):
        loss = clip_cov_loss(lp, old, adv, mask, uniform, **knobs)
        grad = grad_of(loss, lp)
        assert torch.equal(loss, grad) and ((loss == 0) | (loss == -adv)).all()
        return (loss == 0).int()[0].tolist()

    assert dropped(cov_low=0.5, cov_high=9) == [0, 1, 0, 0, 0, 0]  # share 0.0002 of 6 is 0, so one
    assert dropped(cov_low=0.5, cov_high=9, share=0.5) == [1, 1, 0, 0, 0, 1]
    assert dropped(cov_low=0.5, cov_high=9, share=0.34) == [0, 1, 0, 0, 0, 1]
    assert dropped(share=0.5) == [1, 0, 0, 0, 0, 0]  # bounds 1 and 5 are not inside
    assert dropped(cov_low=1.5, cov_high=9, share=0.34) == [1, 0, 0, 0, 0, 1]
    assert dropped(cov_low=-9, cov_high=9, share=1.0) == [1] * 6
    assert dropped(cov_low=-9, cov_high=9, share=0.0) == [0] * 6
    assert dropped(cov_low=6, cov_high=9, share=1.0) == [0] * 6


def test_clip_cov_clips_like_ppo_and_a_clipped_token_is_no_candidate():
    ratio = torch.tensor([[1.1, 1.5, 0.5, 1.5, 0.5, 4.0]])
    adv = torch.tensor([[2.0, 2.0, 2.0, -2.0, -2.0, -2.0]])
    old, mask, uniform = torch.full((1, 6), -3.0), torch.ones(1, 6, dtype=torch.bool), torch.rand(1, 6)
    everything = {"cov_low": -math.inf, "cov_high": math.inf, "share": 1.0}
    none = clip_cov_loss(old + ratio.log(), old, adv, mask, uniform, 0.2, 0.2, share=0.0)
    torch.testing.assert_close(none, torch.tensor([[-2.2, -2.4, -1.0, 3.0, 1.6, 8.0]]))
    every_one = clip_cov_loss(old + ratio.log(), old, adv, mask, uniform, 0.2, 0.2, **everything)
    torch.testing.assert_close(every_one, torch.tensor([[0.0, -2.4, 0.0, 0.0, 1.6, 0.0]]))


def test_clip_cov_drops_the_share_at_random():
    """Which tokens go is the uniform tensor's business alone; every candidate goes now and then."""
    lp, old, adv, mask = batch()
    g, seen = torch.Generator().manual_seed(0), torch.zeros(6, 7)
    every_one = clip_cov(lp, old, adv, mask, share=1.0) == 0
    count = int(0.1 * mask.sum())
    for _ in range(60):
        uniform = torch.rand(6, 7, generator=g)
        loss = clip_cov_loss(lp, old, adv, mask, uniform, 0.3, 0.4, 0.1, 2.0, 0.1)
        again = clip_cov_loss(lp, old, adv, mask, uniform, 0.3, 0.4, 0.1, 2.0, 0.1)
        assert torch.equal(loss, again) and int((loss[mask] == 0).sum()) == count
        seen += (loss == 0) & mask
    assert torch.equal(seen > 0, every_one & mask)


def test_kl_cov_golden():
    old = torch.tensor([[-1.5, -1.0, -0.5, -1.0, -2.0, -7.0]])
    lp = torch.tensor([[-1.0, -1.0, -0.5, -0.5, -2.0, -7.0]], requires_grad=True)
    adv = torch.tensor([[2.0, 1.0, -2.0, -1.0, 1.0, -1.0]])  # covariances 2, 1, -3, -1.5, 0, 5
    mask, e = torch.ones(1, 6, dtype=torch.bool), math.exp(0.5)
    plain = torch.tensor([[-2 * e, -1.0, 2.0, e, -1.0, 1.0]])
    for share, penalty in ((0.0, 0.0), (0.0002, 0.0), (0.34, 0.5), (0.5, 0.5)):
        loss = kl_cov_loss(lp, old, adv, mask, share=share)
        torch.testing.assert_close(loss, plain + torch.tensor([[penalty, 0, 0, 0, 0, 0]]))
        torch.testing.assert_close(grad_of(loss, lp), plain + torch.tensor([[2 * penalty, 0, 0, 0, 0, 0]]))
    loss = kl_cov_loss(lp, old, adv, mask, share=1.0, kl_coef=3.0)
    torch.testing.assert_close(loss, plain + torch.tensor([[1.5, 0, 0, 1.5, 0, 0]]))


def test_batch_statistics_vary_with_the_split():
    """As the docstrings say: not a bug of the reduction, a property of the method."""
    lp, old, adv, mask = batch()
    for fn in (clip_cov, kl_cov):
        parts = torch.cat([fn(lp[:3], old[:3], adv[:3], mask[:3]), fn(lp[3:], old[3:], adv[3:], mask[3:])])
        assert not torch.allclose(parts, fn(lp, old, adv, mask))
        assert "**It varies with the split**" in inspect.getdoc(globals()[fn.__name__ + "_loss"])


def test_dppo_tv_golden():
    """The probability moves by 0.2, 0.2, -0.2, -0.2, 0.1 and 0.009 (ratio 10)."""
    old = torch.tensor([[0.4, 0.4, 0.4, 0.4, 0.4, 0.001]]).log()
    lp = torch.tensor([[0.6, 0.6, 0.2, 0.2, 0.5, 0.01]]).log().requires_grad_()
    adv, mask = torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0, 2.0]]), torch.ones(1, 6, dtype=torch.bool)
    loss = dppo_tv_loss(lp, old, adv, mask)
    torch.testing.assert_close(loss, torch.tensor([[0.0, 3.0, -1.0, 0.0, -2.5, -20.0]]))
    torch.testing.assert_close(grad_of(loss, lp), loss)
    torch.testing.assert_close(
        dppo_tv_loss(lp, old, adv, mask, 0.25, 0.05, ratio_high=1.3), torch.tensor([[0.0, 2.6, -1.0, 1.0, 0.0, -2.6]])
    )


def test_the_bound_holds_the_weight_and_leaves_the_gradient():
    old, lp = torch.tensor([[-6.0, -6.0]]), torch.tensor([[-4.0, -6.0]], requires_grad=True)
    adv, mask = torch.tensor([3.0]), torch.ones(1, 2, dtype=torch.bool)
    for fn in (dppo_tv_loss, dppo_kl_loss):
        loss = fn(lp, old, adv, mask, ratio_high=5.0)
        torch.testing.assert_close(loss, torch.tensor([[-15.0, -3.0]]))
        torch.testing.assert_close(grad_of(loss, lp), torch.tensor([[-15.0, -3.0]]))


def test_dppo_kl_golden():
    """KL(0.5 to 0.75) is 0.5 log(1/1.5) + 0.5 log(1/0.5) = 0.5 log(4/3) = 0.1438; to 0.25 it is the same."""
    old = torch.full((1, 4), 0.5).log()
    lp = torch.tensor([[0.75, 0.75, 0.25, 0.25]]).log().requires_grad_()
    adv, mask = torch.tensor([[2.0, -2.0, 2.0, -2.0]]), torch.ones(1, 4, dtype=torch.bool)
    for low, high, expected in (
        (0.05, 0.05, [0.0, 3.0, -1.0, 0.0]),
        (0.143, 0.144, [-3.0, 3.0, -1.0, 0.0]),
        (0.144, 0.143, [0.0, 3.0, -1.0, 1.0]),
    ):
        loss = dppo_kl_loss(lp, old, adv, mask, low, high)
        torch.testing.assert_close(loss, torch.tensor([expected]))
        torch.testing.assert_close(grad_of(loss, lp), torch.tensor([expected]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dppo_kl_of_a_token_that_is_all_but_certain(dtype):
    """0.999 to 1 moves next to nothing, though the KL to exactly 1 is infinite; 0.9 to 1 moves too far."""
    old = torch.tensor([[0.999, 0.9, 1.0, 1.0]], dtype=dtype).log()
    lp = torch.tensor([[0.0, 0.0, 0.0, math.log(0.9)]], dtype=dtype)
    adv, mask = torch.tensor([[1.0, 1.0, 1.0, -1.0]], dtype=dtype), torch.ones(1, 4, dtype=torch.bool)
    stays = dppo_kl_loss(lp, old, adv, mask) != 0
    assert stays.tolist() == [[True, False, True, False]]
    above = dppo_kl_loss(lp + 1e-6, old, adv, mask)  # rounding may leave a logprob above 0
    assert above.isfinite().all() and torch.equal(above != 0, stays)


def test_dro_golden():
    old = torch.tensor([[-1.0, -2.0, -3.0]])
    lp = torch.tensor([[-1.0, -1.0, -5.0]], requires_grad=True)
    adv, mask = torch.tensor([2.0]), torch.ones(1, 3, dtype=torch.bool)
    loss = dro_loss(lp, old, adv, mask, 0.5)
    torch.testing.assert_close(loss, torch.tensor([[2.0, 2.25, 11.0]]))  # -2 lp + 0.25 (lp - old)^2
    torch.testing.assert_close(grad_of(loss, lp), torch.tensor([[-2.0, -1.5, -3.0]]))  # -2 + 0.5 (lp - old)


def test_dro_of_one_token_is_the_papers_squared_error():
    """1/2 (r - V - tau log(pi / ref))^2 over tau has the same gradient and minimum, a log-ratio of (r - V) / tau."""
    lp, old, adv, _ = batch(t=1)
    mask = torch.ones(6, 1, dtype=torch.bool)
    paper = 0.5 * (adv - 0.4 * (lp - old)).square() / 0.4
    torch.testing.assert_close(grad_of(dro_loss(lp, old, adv, mask, 0.4), lp), grad_of(paper, lp))
    best = (old + adv / 0.4).requires_grad_()
    assert grad_of(dro_loss(best, old, adv, mask, 0.4), best).abs().max() < 1e-12


def test_vespo_golden():
    """W = 2 * 2 / 8 = 1/2 on the first row, 4 on the second; phi = W^k exp(lambda (1 - W))."""
    old = torch.full((2, 4), -5.0)
    lp = (old + torch.tensor([[2.0, 2.0, 0.125, 9.0], [4.0, 1.0, 1.0, 9.0]]).log()).requires_grad_()
    mask = torch.tensor([[True, True, True, False]] * 2)
    for adv, phi in (
        (2.0, [0.25 * math.exp(1.5), 16 * math.exp(-9)]),
        (-2.0, [0.125 * math.exp(1), 64 * math.exp(-6)]),
    ):
        loss = vespo_loss(lp, old, torch.tensor([adv, adv]), mask)
        coefficient = torch.where(mask, -adv * torch.tensor(phi)[:, None], 0.0)
        torch.testing.assert_close(loss, coefficient * lp)
        torch.testing.assert_close(grad_of(loss, lp), coefficient)


def test_vespo_weight_peaks_at_k_over_lambda_and_dies_out():
    w = torch.logspace(-3, 2, 2001, dtype=torch.float64)[:, None]
    lp, mask = w.log().requires_grad_(), torch.ones(2001, 1, dtype=torch.bool)
    for adv, k, lam in ((1.0, 2.0, 3.0), (-1.0, 3.0, 2.0)):
        loss = vespo_loss(lp, torch.zeros_like(w), torch.full((2001,), adv, dtype=torch.float64), mask)
        phi = grad_of(loss, lp)[:, 0].abs()
        assert w[phi.argmax(), 0].item() == pytest.approx(k / lam, rel=0.01)
        assert phi[0] < 1e-3 and phi[-1] < 1e-3
