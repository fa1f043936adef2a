"""Clip-Cov, KL-Cov, DPPO, DRO and VESPO."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from rlkit.losses.policy import clipped_policy_loss
from rlkit.losses.trust_region import (
    clip_cov_loss,
    dppo_kl_loss,
    dppo_tv_loss,
    dro_loss,
    kl_cov_loss,
    vespo_loss,
)

FEW = settings(max_examples=25, deadline=None, derandomize=True)


def uniform_of(x):
    """The same number for the same old logprob, so that slices and orders keep their draw."""
    return (x.detach().double() * 1e3).sin() * 0.5 + 0.5


def clip_cov(lp, old, adv, mask, **knobs):
    knobs = {"share": 0.1, "cov_low": 0.1, "cov_high": 2.0, "clip_low": 0.3, "clip_high": 0.4} | knobs
    return clip_cov_loss(lp, old, adv, mask, uniform_of(old), **knobs)


def kl_cov(lp, old, adv, mask, **knobs):
    return kl_cov_loss(lp, old, adv, mask, **({"share": 0.3, "kl_coef": 0.7} | knobs))


def dppo_tv(lp, old, adv, mask):
    return dppo_tv_loss(lp, old, adv, mask, 0.1, 0.07, 1.5)


def dppo_kl(lp, old, adv, mask):
    return dppo_kl_loss(lp, old, adv, mask, 0.05, 0.03, 1.5)


def dro(lp, old, adv, mask):
    return dro_loss(lp, old, adv, mask, 0.4)


def vespo(lp, old, adv, mask):
    return vespo_loss(lp, old, adv, mask, 1.5, 2.5, 3.0, 0.5)


LOSSES = [clip_cov, kl_cov, dppo_tv, dppo_kl, dro, vespo]
PER_TOKEN = [dppo_tv, dppo_kl, dro]
every = pytest.mark.parametrize("fn", LOSSES)


# the loop: scalar tensors and python numbers, no function of the library


def loop_covariances(lp, old, adv, mask):
    at = [(b, t) for b in range(lp.shape[0]) for t in range(lp.shape[1]) if mask[b, t]]
    mean_lp = sum(lp[i].item() for i in at) / len(at)
    mean_adv = sum(adv[i].item() for i in at) / len(at)
    return {i: (lp[i].item() - mean_lp) * (adv[i].item() - mean_adv) for i in at}


def loop_clip_cov(lp, old, adv, mask):
    cov, keys, losses, candidates = loop_covariances(lp, old, adv, mask), uniform_of(old), {}, []
    for i, c in cov.items():
        r = (lp[i] - old[i]).exp()
        binds = (adv[i] > 0 and r > 1.4) or (adv[i] < 0 and r < 0.7)
        losses[i] = -(1.4 if r > 1 else 0.7) * adv[i] + 0 * r if binds else -r * adv[i]
        if not binds and 0.1 < c < 2.0:
            candidates.append(i)
    candidates.sort(key=lambda i: keys[i].item())
    count = max(int(0.1 * len(cov)), 1)
    assert 0 < count < len(candidates)
    for i in candidates[:count]:
        losses[i] = 0 * lp[i]
    return losses


def loop_kl_cov(lp, old, adv, mask):
    cov = loop_covariances(lp, old, adv, mask)
    largest = sorted(cov, key=cov.get, reverse=True)[: max(int(0.3 * len(cov)), 1)]
    losses = {}
    for i in cov:
        losses[i] = -(lp[i] - old[i]).exp() * adv[i]
        if i in largest:
            losses[i] = losses[i] + 0.7 * (lp[i] - old[i] if lp[i] > old[i] else old[i] - lp[i])
    return losses


def loop_dppo(lp, old, adv, mask, divergence, low, high):
    losses = {}
    for i in loop_covariances(lp, old, adv, mask):
        p, q, r = math.exp(lp[i].item()), math.exp(old[i].item()), (lp[i] - old[i]).exp()
        d = divergence(p, q)
        if (adv[i] > 0 and p > q and d > high) or (adv[i] < 0 and p < q and d > low):
            losses[i] = 0 * r
        else:
            losses[i] = -r * adv[i] * (1.5 / r.item() if r > 1.5 else 1)
    assert {loss.item() == 0 for loss in losses.values()} == {False, True}
    return losses


def loop_dppo_tv(lp, old, adv, mask):
    return loop_dppo(lp, old, adv, mask, lambda p, q: abs(p - q), 0.1, 0.07)


def loop_dppo_kl(lp, old, adv, mask):
    def kl(p, q):
        return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))

    return loop_dppo(lp, old, adv, mask, kl, 0.05, 0.03)


def loop_dro(lp, old, adv, mask):
    return {i: 0.2 * (lp[i] - old[i]) ** 2 - adv[i] * lp[i] for i in loop_covariances(lp, old, adv, mask)}


def loop_vespo(lp, old, adv, mask):
    losses, at = {}, loop_covariances(lp, old, adv, mask)
    for b, t in at:
        w = math.prod(math.exp((lp[i] - old[i]).item()) for i in at if i[0] == b)
        k, lam = (1.5, 2.5) if adv[b, t] >= 0 else (3.0, 0.5)
        losses[b, t] = -(w**k) * math.exp(lam * (1 - w)) * adv[b, t] * lp[b, t]
    return losses


LOOPS = dict(zip(LOSSES, (loop_clip_cov, loop_kl_cov, loop_dppo_tv, loop_dppo_kl, loop_dro, loop_vespo), strict=True))


def batch(seed=0, b=6, t=7):
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(b, t, generator=g, dtype=torch.float64) * 2.5 - 0.3
    lp = old + torch.randn(b, t, generator=g, dtype=torch.float64) * 0.4
    adv = torch.randn(b, t, generator=g, dtype=torch.float64)
    mask = torch.rand(b, t, generator=g) < 0.7
    return lp.clamp(max=-0.01).requires_grad_(), old, adv, mask


def grad_of(loss, lp):
    return torch.autograd.grad(loss.sum(), lp)[0]


@every
@pytest.mark.parametrize("outcome", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_the_loop(fn, outcome, seed):
    lp, old, adv, mask = batch(seed)
    per_token = adv[:, :1].expand(6, 7) if outcome else adv
    loss = fn(lp, old, adv[:, 0] if outcome else adv, mask)
    weights = torch.randn(6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    (grad,) = torch.autograd.grad((loss * weights).sum(), lp)
    total = 0 * lp.sum()
    expected = LOOPS[fn](lp, old, per_token, mask)
    for i in ((b, t) for b in range(6) for t in range(7)):
        assert loss[i].item() == pytest.approx(expected[i].item() if mask[i] else 0.0, abs=1e-7)
        if mask[i]:
            total = total + weights[i] * expected[i]
    (loop,) = torch.autograd.grad(total, lp)
    torch.testing.assert_close(grad, loop, rtol=1e-7, atol=1e-7)


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
        dppo_tv_loss(lp, old, adv, mask, 0.25, 0.05, cap=1.3), torch.tensor([[0.0, 2.6, -1.0, 1.0, 0.0, -2.6]])
    )


def test_the_cap_holds_the_weight_and_leaves_the_gradient():
    old, lp = torch.tensor([[-6.0, -6.0]]), torch.tensor([[-4.0, -6.0]], requires_grad=True)
    adv, mask = torch.tensor([3.0]), torch.ones(1, 2, dtype=torch.bool)
    for fn in (dppo_tv_loss, dppo_kl_loss):
        loss = fn(lp, old, adv, mask, cap=5.0)
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


@every
def test_on_policy_gradient_is_the_policy_gradient(fn):
    """At ratio 1 the gradient is -A on every token that is not dropped, also where the caller detaches nothing."""
    lp, _, adv, mask = batch()
    knobs = {"share": 0.0} if fn is clip_cov else {}
    grad = grad_of(fn(lp, lp, adv, mask, **knobs), lp)
    torch.testing.assert_close(grad, torch.where(mask, -adv, 0.0))


@pytest.mark.parametrize("fn", [dppo_tv_loss, dppo_kl_loss])
def test_inside_the_region_is_the_importance_weighted_policy_gradient(fn):
    lp, old, adv, mask = batch()
    loss = fn(lp, old, adv, mask, 9.0, 9.0)
    expected = torch.where(mask, -adv * (lp - old).exp(), 0.0)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad_of(loss, lp), expected)


def test_no_share_is_the_loss_without_covariances():
    lp, old, adv, mask = batch()
    ppo = clipped_policy_loss(lp, old, adv, mask, 0.3, 0.4)
    torch.testing.assert_close(clip_cov(lp, old, adv, mask, share=0), ppo)
    plain = torch.where(mask, -adv * (lp - old).exp(), 0.0)
    torch.testing.assert_close(kl_cov(lp, old, adv, mask, share=0), plain)
    torch.testing.assert_close(kl_cov(lp, old, adv, mask, kl_coef=0.0), plain)


@every
def test_only_logprobs_get_a_gradient(fn):
    lp, old, adv, mask = batch()
    old.requires_grad_()
    adv.requires_grad_()
    fn(lp, old, adv, mask).sum().backward()
    assert lp.grad is not None and old.grad is None and adv.grad is None


@every
def test_mask_equals_slice(fn):
    lp, old, adv, mask = batch()
    loss = fn(lp, old, adv, mask)
    for rows in [[b] for b in range(6)] if fn is vespo else [list(range(6))]:
        one = torch.ones(1, int(mask[rows].sum()), dtype=torch.bool)
        sliced = fn(*(x[rows][mask[rows]][None] for x in (lp, old, adv)), one)
        torch.testing.assert_close(loss[rows][mask[rows]], sliced[0])


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e4])
@pytest.mark.parametrize("where", ["logprobs", "old_logprobs", "advantages", "all"])
@every
def test_masked_ratio_no_nan_gradient(fn, bad, where):
    lp, old, adv, mask = batch()
    clean = fn(lp, old, adv, mask)
    clean_grad = grad_of(clean, lp)
    dirty = [
        torch.where(mask, x.detach(), bad if where in (name, "all") else x.detach())
        for name, x in (("logprobs", lp), ("old_logprobs", old), ("advantages", adv))
    ]
    dirty[0].requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        loss = fn(*dirty, mask)
        loss.sum().backward()
    assert torch.equal(loss, clean) and torch.equal(dirty[0].grad, clean_grad)
    assert loss[~mask].abs().max() == 0 and dirty[0].grad[~mask].abs().max() == 0


@pytest.mark.parametrize("log_ratio", [25.0, 100.0, 1e4, math.inf, -25.0, -1e4, -math.inf])
@pytest.mark.parametrize("adv", [1.0, -1.0, 0.0])
@every
def test_extreme_unmasked_ratio(fn, log_ratio, adv):
    lp = torch.tensor([[log_ratio, -1.0], [-1.0, -1.0]], requires_grad=True)
    mask, old = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.0, -1.0], [-1.0, -1.0]])
    loss = fn(lp, old, torch.tensor([adv, adv]), mask)
    loss.sum().backward()
    assert loss.isfinite().all() and lp.grad.isfinite().all() and lp.grad[0, 0] == 0
    if fn in PER_TOKEN:
        assert lp.grad[0, 1] == -adv


@FEW
@given(seed=st.integers(0, 999), pad=st.integers(0, 5), fn=st.sampled_from(LOSSES))
def test_rows_permute_and_padding_is_nothing(seed, pad, fn):
    lp, old, adv, mask = batch(seed)
    loss = fn(lp, old, adv, mask)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(fn(lp[order], old[order], adv[order], mask[order]), loss[order])
    wide = [
        torch.nn.functional.pad(x, (0, pad), value=v) for x, v in ((lp, 9.0), (old, -9.0), (adv, 9.0), (mask, False))
    ]
    padded = fn(*wide)
    torch.testing.assert_close(padded[:, :7], loss)
    assert padded[:, 7:].abs().sum() == 0


@FEW
@given(
    x=st.floats(-(2.0**60), 2.0**60, width=32),
    y=st.floats(-(2.0**60), 2.0**60, width=32),
    adv=st.floats(-1024, 1024, width=32),
    fn=st.sampled_from(LOSSES),
)
def test_any_finite_numbers_stay_finite(x, y, adv, fn):
    lp = torch.tensor([[x, -1.0]], requires_grad=True)
    loss = fn(lp, torch.tensor([[y, -1.0]]), torch.tensor([[adv, 1.0]]), torch.ones(1, 2, dtype=torch.bool))
    loss.sum().backward()
    assert loss.isfinite().all() and lp.grad.isfinite().all()


def test_vespo_without_decay_does_not_overflow():
    lp = torch.tensor([[19.0, 19.0, -1.0]], requires_grad=True)
    loss = vespo_loss(lp, torch.zeros(1, 3), torch.ones(1), torch.ones(1, 3, dtype=torch.bool), k_pos=9.0, lambda_pos=0)
    assert loss.isfinite().all() and grad_of(loss, lp).isfinite().all()


@every
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)])
def test_empty_batch(fn, shape):
    lp = torch.zeros(shape, requires_grad=True)
    loss = fn(lp, lp, torch.zeros(shape[0]), torch.zeros(shape, dtype=torch.bool))
    loss.sum().backward()
    assert loss.shape == shape and lp.grad.shape == shape and lp.grad.abs().sum() == 0


@every
def test_bfloat16_inputs(fn):
    lp, old, adv, mask = (x.detach().bfloat16() if x.is_floating_point() else x for x in batch())
    loss = fn(lp.requires_grad_(), old, adv, mask)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, fn(lp.float(), old.float(), adv.float(), mask))
    assert grad_of(loss, lp).dtype == torch.bfloat16


def test_compiles():
    def all_of_them(*x):
        return [fn(*x) for fn in LOSSES]

    lp, old, adv, mask = batch()
    compiled = torch.compile(all_of_them, backend="eager", fullgraph=True)(lp, old, adv[:, 0], mask)
    torch.testing.assert_close(compiled, all_of_them(lp, old, adv[:, 0], mask))


@every
def test_transforms(fn):
    lp, old, adv, mask = batch()
    functional = torch.func.grad(lambda x: fn(x, old, adv[:, 0], mask).sum())(lp.detach())
    torch.testing.assert_close(functional, grad_of(fn(lp, old, adv[:, 0], mask), lp))


def test_nothing_reads_a_value_on_the_host():
    """Fake tensors hold no values."""
    with FakeTensorMode():
        x, mask = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3, dtype=torch.bool)
        for fn in LOSSES:
            fn(x, x, torch.zeros(2), mask).sum().backward()


KNOBS = {
    clip_cov_loss: [
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"cov_low": 5.0}, "cov_high"),
        ({"share": 1.1}, "share"),
        ({"share": math.nan}, "share"),
        ({"uniform": torch.zeros(2, 2)}, "uniform"),
        ({"uniform": torch.zeros(2, 3, dtype=torch.long)}, "uniform"),
    ],
    kl_cov_loss: [({"share": -0.1}, "share"), ({"kl_coef": -1.0}, "kl_coef")],
    dppo_tv_loss: [({"delta_low": -0.1}, "delta_low"), ({"delta_high": -0.1}, "delta_high"), ({"cap": 0.0}, "cap")],
    dppo_kl_loss: [({"delta_low": -0.1}, "delta_low"), ({"delta_high": -0.1}, "delta_high"), ({"cap": 0.0}, "cap")],
    dro_loss: [({"beta": 0.0}, "beta"), ({"beta": math.nan}, "beta")],
    vespo_loss: [({name: -0.1}, name) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")],
}
TENSORS = [
    ({"logprobs": torch.zeros(2)}, "logprobs"),
    ({"logprobs": torch.zeros(2, 3, dtype=torch.long)}, "logprobs"),
    ({"old_logprobs": torch.zeros(2, 2)}, "old_logprobs"),
    ({"advantages": torch.zeros(3)}, "advantages"),
    ({"advantages": torch.zeros(2, 1)}, "advantages"),
    ({"advantages": torch.zeros(2, dtype=torch.long)}, "advantages"),
    ({"mask": torch.ones(2, 3)}, "mask"),
    ({"mask": torch.ones(3, dtype=torch.bool)}, "mask"),
]


@pytest.mark.parametrize(("fn", "change", "name"), [(f, *case) for f, own in KNOBS.items() for case in TENSORS + own])
def test_errors_name_the_argument(fn, change, name):
    arguments = {
        "logprobs": torch.zeros(2, 3),
        "old_logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2),
        "mask": torch.ones(2, 3, dtype=torch.bool),
    } | ({"uniform": torch.zeros(2, 3)} if fn is clip_cov_loss else {})
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        fn(**(arguments | change))
