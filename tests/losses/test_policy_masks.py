"""Masks that policy losses are used with: top-entropy tokens and sequences that the policy has left."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_batches import FEW, B, T, batch

from rlkit.losses import top_entropy_mask
from rlkit.losses.sequence_policy import off_policy_sequence_mask


def test_the_masks_compile():
    lp, old, adv, mask = batch()
    top = torch.compile(top_entropy_mask, backend="eager", fullgraph=True)(-old, mask)
    assert torch.equal(top, top_entropy_mask(-old, mask))
    keep = torch.compile(off_policy_sequence_mask, backend="eager", fullgraph=True)(lp, old, adv, mask, 0.1)
    assert torch.equal(keep, off_policy_sequence_mask(lp, old, adv, mask, 0.1))


def test_top_entropy_golden():
    entropy = torch.tensor([[0.1, 0.9, 9.0, 0.5], [0.3, 0.2, 0.8, math.nan]], requires_grad=True)
    mask = torch.tensor([[True, True, False, True], [True, True, True, False]])  # 6 tokens
    for share, kept in ((0.01, {0.9}), (0.2, {0.9, 0.8}), (0.39, {0.9, 0.8}), (0.4, {0.9, 0.8, 0.5}), (1.0, None)):
        top = top_entropy_mask(entropy, mask, share)
        assert top.dtype == torch.bool and not top.requires_grad
        expected = mask if kept is None else mask & torch.isin(entropy, torch.tensor(sorted(kept)))
        assert torch.equal(top, expected)
    assert torch.equal(top_entropy_mask(entropy, mask), top_entropy_mask(entropy, mask, 0.2))


@pytest.mark.parametrize("share", [0.29, 0.57, 0.58])
def test_top_entropy_counts_exactly(share):
    """100 * share is a hair under a whole number in floating point."""
    assert 100 * share < round(100 * share)
    top = top_entropy_mask(torch.arange(101.0)[None], torch.ones(1, 101, dtype=torch.bool), share)
    assert top.sum() == 1 + round(100 * share)


def test_top_entropy_ties_and_nothing():
    flat = torch.zeros(3, 4)
    mask = torch.arange(4).expand(3, 4) < 2
    assert torch.equal(top_entropy_mask(flat, mask, 0.2), mask)  # all tie: all stay
    assert not top_entropy_mask(flat, torch.zeros_like(mask), 1.0).any()
    one = torch.zeros_like(mask)
    one[1, 2] = True
    assert torch.equal(top_entropy_mask(flat, one, 0.01), one)


@FEW
@given(
    values=st.lists(st.integers(0, 12), min_size=1, max_size=40),
    percent=st.integers(1, 100),
    seed=st.integers(0, 99),
)
def test_top_entropy_equals_the_loop(values, percent, seed):
    entropy = torch.tensor([values]) / 8
    mask = torch.rand(entropy.shape, generator=torch.Generator().manual_seed(seed)) < 0.8
    tokens = sorted((v for v, m in zip(values, mask[0].tolist(), strict=True) if m), reverse=True)
    kept = 1 + math.floor(Fraction(percent, 100) * (len(tokens) - 1)) if tokens else 0
    expected = [m and v >= tokens[kept - 1] for v, m in zip(values, mask[0].tolist(), strict=True)]
    assert top_entropy_mask(entropy, mask, percent / 100)[0].tolist() == expected
    if tokens and percent % 25 == 0:
        threshold = torch.quantile(entropy[mask], 1 - percent / 100)
        assert torch.equal(top_entropy_mask(entropy, mask, percent / 100), mask & (entropy >= threshold))


def test_an_entropy_of_nan_takes_no_place():
    entropy = torch.tensor([[math.nan, 1.0, 2.0, 3.0, math.nan, 0.5]])
    full, known = torch.ones(1, 6, dtype=torch.bool), torch.tensor([[False, True, True, True, False, True]])
    for share in (0.2, 0.5, 1.0):
        assert top_entropy_mask(entropy, full, share).equal(top_entropy_mask(entropy, known, share))
    assert not top_entropy_mask(torch.full((1, 3), math.nan), full[:, :3], 1.0).any()


def test_off_policy_sequence_golden():
    """Mean drifts 0.3, 0.3, -0.3, 0.1, and none; only the likelier past and a negative advantage drop a row."""
    drift = torch.tensor([[0.6, 0.0, 9.0], [0.6, 0.0, -9.0], [-0.6, 0.0, 9.0], [0.1, 0.1, 9.0], [9.0, 9.0, 9.0]])
    adv = torch.tensor([-1.0, 1.0, -1.0, -1.0, -1.0])
    mask = torch.tensor([[True, True, False]] * 4 + [[False] * 3])
    old = torch.full((5, 3), -1.0)
    lp = (old - drift).requires_grad_()
    keep = off_policy_sequence_mask(lp, old, adv, mask, 0.2)
    dropped = torch.tensor([[True], [False], [False], [False], [False]])
    assert keep.dtype == torch.bool and torch.equal(keep, mask & ~dropped)
    assert torch.equal(off_policy_sequence_mask(lp, old, adv, mask, 0.31), mask)
    assert torch.equal(off_policy_sequence_mask(lp, old, torch.zeros(5), mask, 0.0), mask)
    per_token = torch.tensor([[-1.0, 1.0, 0.0]]).expand(5, 3)
    expected = mask & ~(torch.tensor([[True], [True], [False], [False], [False]]) & (per_token < 0))
    assert torch.equal(off_policy_sequence_mask(lp, old, per_token, mask, 0.2), expected)


def test_off_policy_sequence_equals_the_loop_and_masked_values_are_nothing():
    for seed in range(5):
        lp, old, adv, mask = batch(seed)
        dirty = [torch.where(mask, x.detach(), math.nan) for x in (lp, old)]
        keep = off_policy_sequence_mask(*dirty, adv[:, 0], mask, 0.1)
        for b in range(B):
            drifts = [(old[b, t] - lp[b, t]).item() for t in range(T) if mask[b, t]]
            drop = bool(drifts) and adv[b, 0] < 0 and sum(drifts) / len(drifts) > 0.1
            assert torch.equal(keep[b], mask[b] & (not drop))
    row = torch.tensor([[-math.inf, -1.0]])
    ones = torch.ones(1, 2, dtype=torch.bool)
    assert not off_policy_sequence_mask(row, torch.tensor([[-1.0, -1.0]]), torch.tensor([-1.0]), ones, 30.0).any()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"entropy": torch.zeros(2)}, "entropy"),
        ({"entropy": torch.zeros(2, 3, dtype=torch.long)}, "entropy"),
        ({"mask": torch.ones(2, 3)}, "mask"),
        ({"share": 0.0}, "share"),
        ({"share": 1.1}, "share"),
        ({"share": math.nan}, "share"),
    ],
)
def test_top_entropy_errors_name_the_argument(change, name):
    arguments = {"entropy": torch.zeros(2, 3), "mask": torch.ones(2, 3, dtype=torch.bool)}
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        top_entropy_mask(**(arguments | change))
