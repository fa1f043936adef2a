"""Diagnostics: of ratios, values and the mismatch of sampler and trainer, per token and per sequence."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.losses import (
    clipped_policy_loss,
    clipped_value_loss,
    effective_sample_size,
    explained_variance,
    geometric_importance_weights,
    gspo_loss,
    mismatch_stats,
    ratio_stats,
    sequence_importance_weights,
    sequence_mean,
    sequence_mismatch_stats,
    sequence_ratio_stats,
    value_stats,
)

FEW = settings(max_examples=25, deadline=None, derandomize=True)


def batch(seed=0, b=5, t=6):
    g = torch.Generator().manual_seed(seed)
    lp, old, adv = torch.randn(3, b, t, generator=g, dtype=torch.float64) * 0.6
    return lp.requires_grad_(), old, adv, torch.rand(b, t, generator=g) < 0.6


def numbers(stats):
    assert all(x.ndim == 0 and not x.requires_grad for x in stats.values())
    return {key: x.item() for key, x in stats.items()}


def test_value_stats_golden():
    """Moves of 1 with clips of 0.5: from 1 away from the target 3 or towards it; and the plain error."""
    values, old = torch.tensor([[2.0, 0.0, 1.0, math.nan]]), torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    returns, mask = torch.tensor([[3.0, 3.0, 4.0, 1.0]]), torch.tensor([[True, True, True, False]])
    found = numbers(value_stats(values, old, returns, mask))
    expected = {"clip_fraction": 1 / 3, "squared_error": (1 + 9 + 9) / 3, "mean": 1.0, "return": 10 / 3}
    assert found == pytest.approx({f"value/{key}": x for key, x in expected.items()})
    assert numbers(value_stats(values, old, returns, mask, math.inf))["value/clip_fraction"] == 0


def test_explained_variance_golden():
    """Returns 1, 2, 3, 6 have variance 3.5; the errors 0, 0, 0, 2 of these values have 0.75."""
    returns, values = torch.tensor([[1.0, 2.0, 3.0, 6.0, math.nan]]), torch.tensor([[1.0, 2.0, 3.0, 4.0, 9.0]])
    mask = torch.tensor([[True, True, True, True, False]])
    assert explained_variance(values, returns, mask).item() == pytest.approx(1 - 0.75 / 3.5)
    assert explained_variance(returns + 5, returns, mask).item() == 1
    assert explained_variance(torch.ones_like(returns), returns, mask).item() == 0
    assert math.isnan(explained_variance(values, torch.ones_like(returns), mask).item())
    assert math.isnan(explained_variance(values, returns, mask & False).item())
    # 256 - 257 / 256 is 255 in bfloat16
    coarse = torch.tensor([[256.0, 1.0]]).bfloat16()
    close = torch.tensor([[1.0 + 1 / 128, 0.0]]).bfloat16()
    expected = 1 - (((256 - close[0, 0].item()) - 1) / 255) ** 2
    assert explained_variance(close, coarse, torch.ones(1, 2).bool()).item() == pytest.approx(expected, rel=1e-9)
    # another rank with the returns 5 and 7 and the errors 2 and 0: the mean return is 4, the mean error 2/3
    of_other = iter([2, 12, 1 + 9, 2, (4 / 3) ** 2 + (2 / 3) ** 2])
    two = explained_variance(values, returns, mask, lambda x: x + next(of_other)).item()
    assert two == pytest.approx(1 - (48 / 9) / 28)


@FEW
@given(seed=st.integers(0, 99))
def test_value_clip_fraction_is_where_the_loss_has_no_gradient(seed):
    values, old, returns, mask = batch(seed)
    (grad,) = torch.autograd.grad(clipped_value_loss(values, old, returns, mask, 0.3).sum(), values)
    share = ((grad == 0) & mask).sum() / mask.sum()
    assert value_stats(values, old, returns, mask, 0.3)["value/clip_fraction"].item() == pytest.approx(share.item())


def test_clip_fraction_is_where_the_loss_has_no_gradient():
    lp, old, adv, mask = batch()
    (grad,) = torch.autograd.grad(clipped_policy_loss(lp, old, adv, mask, 0.2, 0.3).sum(), lp)
    share = ((grad == 0) & mask).sum() / mask.sum()
    assert ratio_stats(lp, old, adv, mask, 0.2, 0.3)["ratio/clip_fraction"].item() == pytest.approx(share.item())


def test_share_of_clipped_sequences_is_where_gspo_has_no_gradient():
    """The policy has moved a little: token ratios are outside GSPO's range, those of whole sequences rarely."""
    rng = torch.Generator().manual_seed(0)
    old = -torch.rand(64, 400, generator=rng, dtype=torch.float64)
    lp = (old + 0.004 * torch.randn(old.shape, generator=rng)).requires_grad_()
    adv, mask = torch.randn(64, generator=rng), torch.ones(old.shape, dtype=torch.bool)
    (grad,) = torch.autograd.grad(gspo_loss(lp, old, adv, mask).sum(), lp)
    share = (grad == 0).all(1).float().mean().item()
    assert 0 < share < 0.1
    stats = numbers(sequence_ratio_stats(lp, old, adv, mask))
    assert stats["ratio/clip_fraction"] == pytest.approx(share)
    assert stats["ratio/approx_kl"] == pytest.approx(0.004**2 / 2, rel=0.02)
    assert numbers(ratio_stats(lp, old, adv, mask, 3e-4, 4e-4))["ratio/clip_fraction"] > 0.3


def test_sequence_ratio_golden():
    lp = torch.tensor([[0.5, 2.0, 4.0, 9.0], [0.5, 0.5, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]]).log()
    mask = torch.tensor([[True, True, True, False], [True, True, False, False], [False] * 4])
    old, binds = torch.zeros(3, 4), torch.tensor([1.0, -1.0, 1.0])
    kl = (3.5 - math.log(4)) / 3 + math.log(2) - 0.5  # of 0.5, 2 and 4, and of 0.5 twice: r - 1 - log r
    expected = {"ratio/clip_fraction": 1.0, "ratio/approx_kl": kl / 2, "ratio/max": 4 ** (1 / 3)}
    assert numbers(sequence_ratio_stats(lp, old, None, mask)) == pytest.approx(expected)
    assert numbers(sequence_ratio_stats(lp, old, binds, mask)) == pytest.approx(expected)
    assert numbers(sequence_ratio_stats(lp, old, -binds, mask))["ratio/clip_fraction"] == 0


def test_ratio_golden():
    lp = torch.tensor([[0.5, 1.0, 2.0, 9.0]]).log()
    stats = numbers(ratio_stats(lp, torch.zeros(1, 4), None, torch.tensor([[True, True, True, False]])))
    log2 = math.log(2)
    assert stats == pytest.approx(
        {
            "ratio/clip_fraction": 2 / 3,
            "ratio/approx_kl": (log2 - 0.5 + 1 - log2) / 3,
            "ratio/max": 2.0,
        }
    )
    adv = torch.tensor([[1.0, 1.0, -1.0, 1.0]])  # the clip binds on neither side
    assert (
        ratio_stats(lp, torch.zeros(1, 4), adv, torch.tensor([[True, True, True, False]]))["ratio/clip_fraction"] == 0
    )


def test_on_policy_ratio_is_one():
    lp, _, adv, mask = batch()
    loss = clipped_policy_loss(lp, lp.detach(), adv, mask)
    for low, high in ((0.2, 0.2), (0.0, 0.0)):
        stats = ratio_stats(lp, lp.detach(), adv, mask, low, high)
        assert stats["ratio/max"] == 1 and stats["ratio/clip_fraction"] == 0 and stats["ratio/approx_kl"] == 0
        assert ratio_stats(lp, lp.detach(), None, mask, low, high)["ratio/clip_fraction"] == 0
    assert torch.equal(loss, torch.where(mask, -adv, 0.0))
    same = mismatch_stats(lp, lp.detach(), mask)
    assert same["mismatch/abs_dlogp"] == 0 and same["mismatch/kl"] == 0 and same["mismatch/outside"] == 0
    assert effective_sample_size(same["mismatch/w_mean"], same["mismatch/w2_mean"]) == 1


def test_mismatch_golden():
    lp = torch.tensor([[0.25, 1.0, 4.0, 0.5, 2.0]]).log()
    stats = numbers(mismatch_stats(lp, torch.zeros(1, 5), torch.tensor([[True, True, True, True, False]])))
    assert stats["mismatch/abs_dlogp"] == pytest.approx(5 * math.log(2) / 4)
    assert stats["mismatch/abs_dlogp/max"] == pytest.approx(2 * math.log(2))
    assert stats["mismatch/w_mean"] == pytest.approx(5.75 / 4) and stats["mismatch/outside"] == 0.5
    assert stats["mismatch/w2_mean"] == pytest.approx((0.0625 + 1 + 16 + 0.25) / 4)


def test_sequence_mismatch_golden():
    """To the trainer two tokens have 1/8 and 1/2, to the sampler 1/8 and 1: w 1/2. Another has 1/2 and 1/8: w 4."""
    lp = torch.tensor([[1 / 8, 1 / 2, 9.0], [9.0, 1 / 2, 9.0], [9.0, 9.0, 9.0]]).log()
    rollout = torch.tensor([[1 / 8, 1.0, 9.0], [9.0, 1 / 8, 9.0], [1.0, 1.0, 1.0]]).log()
    mask = torch.tensor([[True, True, False], [False, True, False], [False] * 3])
    stats = numbers(sequence_mismatch_stats(lp, rollout, mask))
    assert stats == pytest.approx(
        {
            "mismatch/sequence_w_mean": (0.5 + 4) / 2,
            "mismatch/sequence_chi2": (0.25 + 16) / 2 - 1,
            "mismatch/ppl": (4 + 2) / 2,
            "mismatch/rollout_ppl": (8**0.5 + 8) / 2,
            "mismatch/ppl_ratio": (2**0.5 + 0.25) / 2,
        }
    )
    share = effective_sample_size(stats["mismatch/sequence_w_mean"], 1 + stats["mismatch/sequence_chi2"])
    assert share.item() == pytest.approx(4.5**2 / (2 * 16.25))  # (sum w)^2 / (n sum w^2)
    halves = [numbers(sequence_mismatch_stats(lp[i : i + 1], rollout[i : i + 1], mask[i : i + 1], 4)) for i in (0, 1)]
    assert halves[0]["mismatch/ppl"] + halves[1]["mismatch/ppl"] == pytest.approx(6 / 4)


def test_sequence_mismatch_is_that_of_the_weights():
    lp, rollout, _, mask = batch(3)
    stats = sequence_mismatch_stats(lp, rollout, mask)
    weights = sequence_importance_weights(lp, rollout, mask, high=math.inf)
    geometric = geometric_importance_weights(lp, rollout, mask, high=math.inf)
    torch.testing.assert_close(stats["mismatch/sequence_w_mean"], sequence_mean(weights, mask))
    torch.testing.assert_close(stats["mismatch/sequence_chi2"], sequence_mean(weights.square(), mask) - 1)
    torch.testing.assert_close(stats["mismatch/ppl_ratio"], sequence_mean(1 / geometric, mask))


def test_a_tiny_chi2_is_not_lost_in_float32():
    lp = torch.full((1, 4), -0.5)
    stats = sequence_mismatch_stats(lp + torch.tensor([2.0**-25, 0, 0, 0]), lp, torch.ones(1, 4, dtype=torch.bool))
    assert stats["mismatch/sequence_chi2"].item() == pytest.approx(2.0**-24, rel=1e-3)


def test_kl_is_that_of_the_sampler():
    """Over the sampler's own distribution the mean of the estimate is KL(sampler || trainer), exactly."""
    p, q = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    exact = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    estimate = 0.0
    for v in range(3):
        one = torch.ones(1, 1, dtype=torch.bool)
        estimate += (
            p[v].item() * mismatch_stats(q[v].log().view(1, 1), p[v].log().view(1, 1), one)["mismatch/kl"].item()
        )
    assert estimate == pytest.approx(exact)


def test_effective_sample_size_golden():
    assert effective_sample_size(torch.tensor(1.0), torch.tensor(1.0)) == 1
    assert effective_sample_size(1.0, 2.0) == 0.5
    w = [1.0, 0.0, 0.0, 0.0]  # one weight carries all: one token of four
    assert effective_sample_size(sum(w) / 4, sum(x * x for x in w) / 4) == 0.25
    assert effective_sample_size(torch.tensor(0.0), torch.tensor(0.0)) == 0


@FEW
@given(seed=st.integers(0, 999), cut=st.integers(0, 5), pad=st.integers(0, 3))
def test_parts_add_up_to_the_whole(seed, cut, pad):
    lp, old, adv, mask = batch(seed)
    lp, old, adv = (torch.nn.functional.pad(x, (0, pad), value=math.nan) for x in (lp, old, adv))
    mask = torch.nn.functional.pad(mask, (0, pad))
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    parts = [order[:cut], order[cut:]]
    for function, arguments, total in (
        (ratio_stats, (lp, old, adv, mask), mask.sum()),
        (sequence_ratio_stats, (lp, old, adv, mask), mask.any(1).sum()),
        (mismatch_stats, (lp, old, mask), mask.sum()),
        (sequence_mismatch_stats, (lp, old, mask), mask.any(1).sum()),
    ):
        whole = numbers(function(*arguments))
        pieces = [numbers(function(*(x[rows] for x in arguments), total=total)) for rows in parts]
        for key, value in whole.items():
            values = [piece[key] for piece in pieces]
            assert (max(values) if key.endswith("/max") else sum(values)) == pytest.approx(value)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 3)])
@pytest.mark.parametrize("total", [None, 0, 7, torch.tensor(0)])
def test_nothing_gives_zeros(shape, total):
    x, mask = torch.full(shape, math.nan), torch.zeros(shape, dtype=torch.bool)
    for stats in (
        ratio_stats(x, x, x, mask, total=total),
        sequence_ratio_stats(x, x, x, mask, total=total),
        mismatch_stats(x, x, mask, total),
        sequence_mismatch_stats(x, x, mask, total),
    ):
        assert set(numbers(stats).values()) == {0.0}


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_mask_equals_slice_whatever_is_masked(bad):
    lp, old, adv, mask = batch()
    one = torch.ones(1, int(mask.sum()), dtype=torch.bool)
    dirty = [torch.where(mask, x.detach(), bad) for x in (lp, old, adv)]
    sliced = [x.detach()[mask][None] for x in (lp, old, adv)]
    assert numbers(ratio_stats(dirty[0], dirty[1], dirty[2], mask)) == pytest.approx(
        numbers(ratio_stats(sliced[0], sliced[1], sliced[2], one))
    )
    assert numbers(mismatch_stats(dirty[0], dirty[1], mask)) == pytest.approx(
        numbers(mismatch_stats(sliced[0], sliced[1], one))
    )
    rows = [
        numbers(sequence_mismatch_stats(*(x[b][mask[b]][None] for x in (lp, old, mask)), total=mask.any(1).sum()))
        for b in range(5)
    ]
    whole = {key: sum(row[key] for row in rows) for key in rows[0]}
    assert numbers(sequence_mismatch_stats(dirty[0], dirty[1], mask)) == pytest.approx(whole)


@pytest.mark.parametrize("gap", [100.0, -100.0, 1e30])
def test_extreme_gaps_stay_finite(gap):
    lp, mask = torch.tensor([[gap, 0.0]]), torch.ones(1, 2, dtype=torch.bool)
    for stats in (
        ratio_stats(lp, torch.zeros(1, 2), None, mask),
        sequence_ratio_stats(lp, torch.zeros(1, 2), None, mask),
        mismatch_stats(lp, torch.zeros(1, 2), mask),
        sequence_mismatch_stats(lp, torch.zeros(1, 2), mask),
        sequence_mismatch_stats(torch.full((1, 2), -math.inf), torch.zeros(1, 2), mask),
    ):
        assert all(math.isfinite(x) for x in numbers(stats).values())
    assert numbers(mismatch_stats(lp, torch.zeros(1, 2), mask))["mismatch/abs_dlogp/max"] == pytest.approx(abs(gap))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_long_sequence_does_not_overflow(sign):
    lp, mask = torch.full((1, 10), 15.0 * sign), torch.ones(1, 10, dtype=torch.bool)
    stats = numbers(sequence_mismatch_stats(lp, torch.zeros(1, 10), mask))
    held = (math.exp(20 * sign), math.expm1(40 * sign), math.exp(-15 * sign), 1.0, math.exp(-15 * sign))
    assert tuple(stats.values()) == pytest.approx(held, rel=1e-5, abs=0)


def test_bfloat16_inputs():
    lp, old, adv, mask = (x.detach().bfloat16() if x.is_floating_point() else x for x in batch())
    for small, wide in (
        (ratio_stats(lp, old, adv, mask), ratio_stats(lp.float(), old.float(), adv.float(), mask)),
        (mismatch_stats(lp, old, mask), mismatch_stats(lp.float(), old.float(), mask)),
        (sequence_mismatch_stats(lp, old, mask), sequence_mismatch_stats(lp.float(), old.float(), mask)),
    ):
        assert all(x.dtype == torch.float32 for x in small.values())
        assert numbers(small) == numbers(wide)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x, m: ratio_stats(x, x[:1], None, m), "old_logprobs"),
        (lambda x, m: ratio_stats(x, x, None, m.float()), "mask"),
        (lambda x, m: ratio_stats(x, x, x[0], m), "advantages"),
        (lambda x, m: ratio_stats(x, x, None, m, clip_low=-1.0), "clip_low"),
        (lambda x, m: ratio_stats(x, x, None, m, clip_high=-1.0), "clip_high"),
        (lambda x, m: ratio_stats(x, x, None, m, total=-1), "total"),
        (lambda x, m: mismatch_stats(x, x[:, 1:], m), "rollout_logprobs"),
        (lambda x, m: mismatch_stats(x[0], x[0], m[0]), "mask"),
        (lambda x, m: sequence_mismatch_stats(x, x[:, 1:], m), "rollout_logprobs"),
        (lambda x, m: sequence_mismatch_stats(x.long(), x, m), "logprobs"),
        (lambda x, m: sequence_mismatch_stats(x, x, m.float()), "mask"),
        (lambda x, m: sequence_mismatch_stats(x, x, m, -1), "total"),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        call(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool))


def test_compiles_without_a_graph_break():
    def all_of_them(*x):
        return mismatch_stats(*x) | sequence_mismatch_stats(*x)

    lp, rollout, _, mask = batch(1)
    compiled = torch.compile(all_of_them, fullgraph=True, backend="eager")
    assert numbers(compiled(lp, rollout, mask)) == pytest.approx(numbers(all_of_them(lp, rollout, mask)))
