"""Weights and masks for the mismatch of sampler and trainer."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from rlkit.losses.mismatch import (
    geometric_importance_weights,
    geometric_rejection_mask,
    importance_weights,
    masked_importance_weights,
    rejection_mask,
    sequence_importance_weights,
    sequence_masked_importance_weights,
    sequence_rejection_mask,
)

FEW = settings(max_examples=25, deadline=None, derandomize=True)
LOW, HIGH = 0.6, 1.8


def capped(fn, high):
    return lambda lp, rollout, mask: fn(lp, rollout, mask, high=high)


def floored(fn, low):
    return lambda lp, rollout, mask: fn(lp, rollout, mask, low=low, high=math.inf)


def banded(fn, *bounds):
    return lambda lp, rollout, mask: fn(lp, rollout, mask, *bounds)


# name: (the function, how a row's ratios make its statistic, what the statistic makes of a token)
CASES = {
    "token": capped(importance_weights, 1.5),
    "token_raw": capped(importance_weights, math.inf),
    "token_floor": floored(importance_weights, 0.7),
    "sequence_floor": floored(sequence_importance_weights, 0.7),
    "geometric_floor": floored(geometric_importance_weights, 0.9),
    "sequence": capped(sequence_importance_weights, 1.5),
    "geometric": capped(geometric_importance_weights, 1.1),
    "icepop": banded(masked_importance_weights, LOW, HIGH),
    "mis": banded(sequence_masked_importance_weights, 0, HIGH),
    "mis_band": banded(sequence_masked_importance_weights, LOW, HIGH),
    "reject": banded(rejection_mask, LOW, HIGH),
    "reject_sequence": banded(sequence_rejection_mask, LOW, HIGH),
    "reject_geometric": banded(geometric_rejection_mask, 0.9, 1.1),
}
WEIGHTS = [name for name in CASES if not name.startswith("reject")]
MASKS = [name for name in CASES if name.startswith("reject")]
every = pytest.mark.parametrize("name", CASES)


def batch(seed=0, b=6, t=7):
    g = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(b, t, generator=g, dtype=torch.float64) * 3
    lp = rollout + torch.randn(b, t, generator=g, dtype=torch.float64) * 0.4
    mask = torch.rand(b, t, generator=g) < 0.7
    mask[1] = False
    return lp, rollout, mask


def test_golden():
    ratios = torch.tensor([[2.0, 0.5, 3.0, 9.0], [0.25, 0.5, 1.0, 9.0]])
    mask = torch.tensor([[True, True, True, False]] * 2)
    lp, rollout = ratios.log() - 2, torch.full((2, 4), -2.0)
    close = torch.testing.assert_close
    x = (lp, rollout, mask)
    close(importance_weights(*x, high=2.5), torch.tensor([[2.0, 0.5, 2.5, 0.0], [0.25, 0.5, 1.0, 0.0]]))
    close(importance_weights(*x), torch.tensor([[2.0, 0.5, 2.0, 0.0], [0.25, 0.5, 1.0, 0.0]]))
    close(importance_weights(*x, high=2.5, low=0.4), torch.tensor([[2.0, 0.5, 2.5, 0.0], [0.4, 0.5, 1.0, 0.0]]))
    close(importance_weights(*x, high=0.5, low=0.5), 0.5 * mask)
    three = torch.tensor([1.0, 1.0, 1.0, 0.0])
    close(sequence_importance_weights(*x, low=0.2), torch.stack([2 * three, 0.2 * three]))
    close(geometric_importance_weights(*x, low=0.6), torch.stack([3 ** (1 / 3) * three, 0.6 * three]))
    close(sequence_importance_weights(*x, high=10), torch.stack([3 * three, 0.125 * three]))
    close(sequence_importance_weights(*x), torch.stack([2 * three, 0.125 * three]))
    close(geometric_importance_weights(*x), torch.stack([3 ** (1 / 3) * three, 0.5 * three]))
    close(geometric_importance_weights(*x, high=1.2), torch.stack([1.2 * three, 0.5 * three]))
    close(masked_importance_weights(*x, 0.4, 2.5), torch.tensor([[2.0, 0.5, 0.0, 0.0], [0.0, 0.5, 1.0, 0.0]]))
    close(sequence_masked_importance_weights(*x, 0, 2), torch.stack([0 * three, 0.125 * three]))
    close(sequence_masked_importance_weights(*x, 0.2, 4), torch.stack([3 * three, 0 * three]))
    assert rejection_mask(*x, 0.4, 2.5).int().tolist() == [[1, 1, 0, 0], [0, 1, 1, 0]]
    assert rejection_mask(*x, 0, 10, 0.3).int().tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]
    assert rejection_mask(*x, 0.6, 2.5, 0.3).int().tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]
    assert sequence_rejection_mask(*x, 0.1, 2).int().tolist() == [[0, 0, 0, 0], [1, 1, 1, 0]]
    assert sequence_rejection_mask(*x, 0.1, 10, 0.3).int().tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]
    assert geometric_rejection_mask(*x, 0.6, 2).int().tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]
    assert geometric_rejection_mask(*x, 0.4, 2, 0.4).int().tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]


@every
def test_equal_logprobs_change_nothing(name):
    lp, _, mask = batch()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        result = CASES[name](lp.to(dtype), lp.to(dtype), mask)
        assert torch.equal(result, mask.to(result.dtype))  # weights of exactly 1, nothing rejected


def test_bounds_of_one_keep_what_is_equal():
    lp, _, mask = batch()
    for fn in (rejection_mask, sequence_rejection_mask, geometric_rejection_mask):
        assert torch.equal(fn(lp, lp, mask, 1.0, 1.0, 1.0), mask)


def test_an_infinite_cap_is_the_raw_ratio():
    lp, rollout, mask = batch()
    ratio = torch.where(mask, (lp - rollout).exp(), 0.0)
    torch.testing.assert_close(importance_weights(lp, rollout, mask, high=math.inf), ratio)
    for low, high in ((0, math.inf), (0.0, 1e9)):
        torch.testing.assert_close(masked_importance_weights(lp, rollout, mask, low, high), ratio)
        for fn in (rejection_mask, sequence_rejection_mask, geometric_rejection_mask):
            assert torch.equal(fn(lp, rollout, mask, low, high), mask)


def test_one_token_a_sequence_is_the_token():
    lp, rollout, _ = batch(b=20)
    mask = torch.arange(7) == torch.randint(7, (20, 1), generator=torch.Generator().manual_seed(3))
    weights = importance_weights(lp, rollout, mask, high=1.2)
    torch.testing.assert_close(sequence_importance_weights(lp, rollout, mask, high=1.2), weights)
    torch.testing.assert_close(geometric_importance_weights(lp, rollout, mask, high=1.2), weights)
    icepop = masked_importance_weights(lp, rollout, mask, LOW, HIGH)
    torch.testing.assert_close(sequence_masked_importance_weights(lp, rollout, mask, LOW, HIGH), icepop)
    keep = rejection_mask(lp, rollout, mask, LOW, HIGH)
    assert 0 < keep.sum() < 20
    assert torch.equal(sequence_rejection_mask(lp, rollout, mask, LOW, HIGH), keep)
    assert torch.equal(geometric_rejection_mask(lp, rollout, mask, LOW, HIGH), keep)


def test_a_masked_weight_is_the_weight_on_what_stays():
    lp, rollout, mask = batch()
    for masked, reject, weigh in (
        (masked_importance_weights, rejection_mask, importance_weights),
        (sequence_masked_importance_weights, sequence_rejection_mask, sequence_importance_weights),
    ):
        keep = reject(lp, rollout, mask, LOW, HIGH)
        assert torch.equal(masked(lp, rollout, mask, LOW, HIGH), weigh(lp, rollout, mask, high=math.inf) * keep)


def test_veto_takes_whole_sequences():
    lp, rollout, mask = batch()
    for fn in (rejection_mask, sequence_rejection_mask, geometric_rejection_mask):
        without, vetoed = fn(lp, rollout, mask, 0.1, 10), fn(lp, rollout, mask, 0.1, 10, 0.5)
        low = torch.tensor([any((lp - rollout)[b][mask[b]].exp() < 0.5) for b in range(6)])
        assert low.any() and not low.all()
        assert torch.equal(vetoed, without & ~low[:, None])


@every
def test_nothing_gets_a_gradient(name):
    lp, rollout, mask = batch()
    result = CASES[name](lp.requires_grad_(), rollout.requires_grad_(), mask)
    assert not result.requires_grad and result.shape == mask.shape
    assert (result.dtype == torch.bool) == (name in MASKS)
    loss = (lp * result).sum()
    loss.backward()
    torch.testing.assert_close(lp.grad, result.to(lp.dtype))  # a weight is a constant to the loss it scales
    assert rollout.grad is None


@every
def test_mask_equals_slice(name):
    fn, (lp, rollout, mask) = CASES[name], batch()
    result = fn(lp, rollout, mask)
    for b in range(6):
        one = torch.ones(1, int(mask[b].sum()), dtype=torch.bool)
        sliced = fn(lp[b][mask[b]][None], rollout[b][mask[b]][None], one)
        torch.testing.assert_close(result[b][mask[b]], sliced[0])
    assert not result[~mask].any()


@every
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e4])
@pytest.mark.parametrize("where", ["logprobs", "rollout_logprobs", "both"])
def test_what_is_masked_changes_nothing(name, bad, where):
    fn, (lp, rollout, mask) = CASES[name], batch()
    dirty_lp = lp if where == "rollout_logprobs" else torch.where(mask, lp, bad)
    dirty_rollout = rollout if where == "logprobs" else torch.where(mask, rollout, bad)
    assert torch.equal(fn(dirty_lp, dirty_rollout, mask), fn(lp, rollout, mask))
    for veto in (rejection_mask, sequence_rejection_mask, geometric_rejection_mask):
        clean = veto(lp, rollout, mask, 0.1, 10, 0.5)
        assert torch.equal(veto(dirty_lp, dirty_rollout, mask, 0.1, 10, 0.5), clean)


@pytest.mark.parametrize("log_ratio", [25.0, 1e4, math.inf, -25.0, -1e4, -math.inf])
@pytest.mark.parametrize("name", WEIGHTS)
def test_extreme_log_ratios_give_finite_weights(name, log_ratio):
    lp, mask = torch.tensor([[log_ratio, 0.0], [log_ratio, -log_ratio]]), torch.ones(2, 2, dtype=torch.bool)
    weights = CASES[name](lp, torch.zeros(2, 2), mask)
    assert weights.isfinite().all() and (weights >= 0).all()
    raw = importance_weights(lp, torch.zeros(2, 2), mask, high=math.inf)[0]
    assert raw.tolist() == [pytest.approx(math.exp(math.copysign(20, log_ratio))), 1.0]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_long_sequence_does_not_overflow(sign):
    lp, mask = torch.full((1, 10), 15.0 * sign), torch.ones(1, 10, dtype=torch.bool)
    held = torch.full((1, 10), math.exp(20 * sign))
    torch.testing.assert_close(sequence_importance_weights(lp, torch.zeros(1, 10), mask, high=math.inf), held)
    torch.testing.assert_close(
        sequence_masked_importance_weights(lp, torch.zeros(1, 10), mask, 0, math.inf), held, rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("log_ratio", [25.0, 1e4, math.inf, -25.0, -1e4, -math.inf])
@pytest.mark.parametrize("fn", [rejection_mask, sequence_rejection_mask, geometric_rejection_mask])
def test_extreme_log_ratios_are_rejected(fn, log_ratio):
    """By what they are, not as +-20: bounds wider than exp(20) tell 25 from 20."""
    lp, mask = torch.tensor([[log_ratio, log_ratio], [0.0, 0.0]]), torch.ones(2, 2, dtype=torch.bool)
    rows = torch.tensor([[False, False], [True, True]])
    for low, high in ((0.1, 10.0), (math.exp(-22), math.exp(22))):
        assert torch.equal(fn(lp, torch.zeros(2, 2), mask, low, high), rows)
    assert fn(lp, torch.zeros(2, 2), mask, 0, math.inf).all()
    assert torch.equal(fn(lp, torch.zeros(2, 2), mask, 0, math.inf, 1e-10), rows | (torch.tensor(log_ratio) > 0))


@pytest.mark.parametrize("fn", [rejection_mask, sequence_rejection_mask, geometric_rejection_mask])
def test_nan_is_rejected(fn):
    lp, mask = torch.tensor([[math.nan, 0.0], [math.inf, -math.inf]]), torch.ones(2, 2, dtype=torch.bool)
    keep = fn(lp, torch.zeros(2, 2), mask, 0.1, 10)
    assert not keep[0, 0] and not keep[1].any()


@pytest.mark.parametrize("fn", [importance_weights, sequence_importance_weights, geometric_importance_weights])
def test_nan_has_weight_0(fn):
    """As in the masks: a token that the sampler did not score goes, or its whole sequence does."""
    lp, mask = torch.tensor([[math.nan, 0.5, -0.5], [0.1, 0.2, math.nan]]), torch.ones(2, 3, dtype=torch.bool)
    mask[1, 2] = False
    weights = fn(lp, torch.zeros(2, 3), mask)
    assert weights[0, 0] == 0 and weights[1, 2] == 0 and (weights[1, :2] > 1).all()
    assert (weights[0, 1:] > 0).all() if fn is importance_weights else (weights[0] == 0).all()


@FEW
@given(seed=st.integers(0, 999), pad=st.integers(0, 5), name=st.sampled_from(list(CASES)))
def test_rows_permute_and_padding_is_nothing(seed, pad, name):
    fn, x = CASES[name], batch(seed)
    result = fn(*x)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(fn(*(y[order] for y in x)), result[order])
    wide = [torch.nn.functional.pad(y, (0, pad), value=v) for y, v in zip(x, (9.0, -9.0, False), strict=True)]
    torch.testing.assert_close(fn(*wide)[:, :7], result)
    assert not fn(*wide)[:, 7:].any()


@FEW
@given(
    x=st.floats(-(2.0**100), 2.0**100, width=32),
    y=st.floats(-(2.0**100), 2.0**100, width=32),
    name=st.sampled_from(WEIGHTS),
)
def test_any_finite_numbers_stay_finite(x, y, name):
    weights = CASES[name](torch.tensor([[x, 0.0]]), torch.tensor([[y, 0.0]]), torch.ones(1, 2, dtype=torch.bool))
    assert weights.isfinite().all() and (weights >= 0).all()


@every
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_empty_batch(name, shape):
    lp = torch.zeros(shape)
    assert CASES[name](lp, lp, torch.zeros(shape, dtype=torch.bool)).shape == shape


@every
def test_bfloat16_inputs(name):
    lp, rollout, mask = batch()
    lp, rollout = lp.bfloat16(), rollout.bfloat16()
    result = CASES[name](lp, rollout, mask)
    assert result.dtype == (torch.bool if name in MASKS else torch.float32)
    torch.testing.assert_close(result, CASES[name](lp.float(), rollout.float(), mask))


def test_compiles():
    def all_of_them(*x):
        return [fn(*x) for fn in CASES.values()]

    x = batch()
    compiled = torch.compile(all_of_them, backend="eager", fullgraph=True)(*x)
    torch.testing.assert_close(compiled, all_of_them(*x))


def test_nothing_reads_a_value_on_the_host():
    """Fake tensors hold no values."""
    with FakeTensorMode():
        x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
        for fn in CASES.values():
            fn(x, x, mask)


BOUNDED = [
    masked_importance_weights,
    sequence_masked_importance_weights,
    rejection_mask,
    sequence_rejection_mask,
    geometric_rejection_mask,
]
CAPPED = [importance_weights, sequence_importance_weights, geometric_importance_weights]


TAKES = {"veto": BOUNDED[2:]}
WRONG = [
    ({"logprobs": torch.zeros(2)}, "logprobs"),
    ({"logprobs": torch.zeros(2, 3, dtype=torch.long)}, "logprobs"),
    ({"rollout_logprobs": torch.zeros(2, 2)}, "rollout_logprobs"),
    ({"mask": torch.ones(2, 3)}, "mask"),
    ({"mask": torch.ones(3, dtype=torch.bool)}, "mask"),
    ({"low": -0.1}, "low"),
    ({"low": math.nan}, "low"),
    ({"low": 2.1}, "high"),
    ({"low": 0.5, "high": 0.4}, "high"),
    ({"high": math.nan}, "high"),
    ({"veto": -0.1}, "veto"),
]


@pytest.mark.parametrize(
    ("fn", "change", "name"), [(fn, *wrong) for wrong in WRONG for fn in TAKES.get(wrong[1], CAPPED + BOUNDED)]
)
def test_errors_name_the_argument(fn, change, name):
    arguments = {
        "logprobs": torch.zeros(2, 3),
        "rollout_logprobs": torch.zeros(2, 3),
        "mask": torch.ones(2, 3, dtype=torch.bool),
    } | ({"low": 0.5, "high": 2.0} if fn in BOUNDED else {})
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        fn(**(arguments | change))
