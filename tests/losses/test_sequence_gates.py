"""Gates on a whole sequence: dual clip and SAPO on GSPO's ratio, FlashREINFORCE's divergence; and M2PO's on a batch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_batches import FEW, batch

from rlkit.losses import (
    cispo_loss,
    clipped_policy_loss,
    flash_reinforce_loss,
    full_vocabulary_kl,
    gspo_loss,
    gspo_token_loss,
    kl_binary,
    m2po_loss,
    sapo_loss,
    sequence_mean,
    sequence_sapo_loss,
)

FULL = torch.ones(1, 2, dtype=torch.bool)


def gradient(loss, logprobs):
    return torch.autograd.grad(loss.sum(), logprobs)[0]


# --- the dual clip


@pytest.mark.parametrize("fn", [gspo_loss, gspo_token_loss])
def test_golden_dual_clip(fn):
    """The ratio of the sequence is 2: bad sequences lose 2 without the dual clip, 1.5 and no gradient with it."""
    logprobs = torch.tensor([[math.log(4), 0.0]]).requires_grad_()
    for advantage, dual_clip, value, slope in (-1, None, 2, 1), (-1, 1.5, 1.5, 0), (-1, 3.0, 2, 1), (1, 1.5, -1.1, 0):
        loss = fn(logprobs, torch.zeros(1, 2), torch.tensor([float(advantage)]), FULL, 0.1, 0.1, dual_clip)
        torch.testing.assert_close(loss, torch.full((1, 2), float(value)))
        torch.testing.assert_close(gradient(sequence_mean(loss, FULL), logprobs), torch.full((1, 2), float(slope)))


@FEW
@given(seed=st.integers(0, 999), dual_clip=st.sampled_from([1.1, 1.5, 3.0]))
def test_one_token_a_row_is_the_clipped_loss(seed, dual_clip):
    lp, old, adv, mask = batch(seed)
    mask = mask & (mask.cumsum(1) == 1)
    expected = clipped_policy_loss(lp, old, adv, mask, 0.1, 0.2, dual_clip)
    for fn in (gspo_loss, gspo_token_loss):
        torch.testing.assert_close(fn(lp, old, adv, mask, 0.1, 0.2, dual_clip), expected)


@pytest.mark.parametrize("fn", [gspo_loss, gspo_token_loss])
def test_a_dual_clip_is_above_1(fn):
    lp, old, adv, mask = batch()
    with pytest.raises(ValueError, match="^dual_clip: expected a number > 1, or None, got 1"):
        fn(lp, old, adv, mask, dual_clip=1.0)


# --- SAPO


def test_golden_sequence_sapo():
    """Ratio 2 at temperature 1: the gate is 4 sigmoid(1), and its slope 4 sigmoid(1) (1 - sigmoid(1)) 2."""
    logprobs = torch.tensor([[math.log(4), 0.0]]).requires_grad_()
    loss = sequence_sapo_loss(logprobs, torch.zeros(1, 2), torch.tensor([1.0]), FULL)
    gate = 1 / (1 + math.exp(-1))
    torch.testing.assert_close(loss, torch.full((1, 2), -4 * gate))
    slope = gradient(sequence_mean(loss, FULL), logprobs)
    torch.testing.assert_close(slope, torch.full((1, 2), -4 * gate * (1 - gate) * 2 / 2))


@FEW
@given(seed=st.integers(0, 999))
def test_one_token_a_row_is_sapo(seed):
    lp, old, adv, mask = batch(seed)
    mask = mask & (mask.cumsum(1) == 1)
    ours, expected = (fn(lp, old, adv, mask, 2.0, 3.0) for fn in (sequence_sapo_loss, sapo_loss))
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradient(ours, lp), gradient(expected, lp))


# --- the binary KL, and FlashREINFORCE


def test_golden_binary_kl():
    logprobs, ref = torch.tensor([[math.log(0.5), math.log(0.75)]]), torch.tensor([[math.log(0.25), math.log(0.75)]])
    expected = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    torch.testing.assert_close(kl_binary(logprobs, ref), torch.tensor([[expected, 0.0]]))


@FEW
@given(seed=st.integers(0, 999), sharpness=st.sampled_from([0.3, 1.0]))
def test_binary_kl_is_at_most_the_whole_vocabularys_and_equal_for_two_tokens(seed, sharpness):
    logits = sharpness * torch.randn(2, 1, 6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    p, q = logits.log_softmax(-1)
    for token in range(5):
        assert (kl_binary(p[..., token], q[..., token]) <= full_vocabulary_kl(*logits) + 1e-6).all()
    whole = full_vocabulary_kl(*logits[..., :2])
    p, q = logits[..., :2].log_softmax(-1)
    torch.testing.assert_close(kl_binary(p[..., 0], q[..., 0]), whole, atol=1e-6, rtol=1e-5)


def test_binary_kl_is_finite_where_a_token_is_certain():
    logprobs = torch.tensor([[0.0, 0.0, -30.0]]).requires_grad_()
    kl = kl_binary(logprobs, torch.tensor([[0.0, -30.0, 0.0]]))
    assert kl.isfinite().all() and kl[0, 0] == 0 and gradient(kl, logprobs).isfinite().all()


def test_golden_flash_reinforce():
    """p goes from 1/2 to 1/4 at one of two tokens: the mean divergence is half of 1/2 log 2 + 1/2 log 2/3."""
    logprobs = torch.log(torch.tensor([[0.25, 0.5]])).requires_grad_()
    old = torch.log(torch.tensor([[0.5, 0.5]]))
    divergence = (0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)) / 2
    for high, kept in ((divergence + 1e-4, 1), (divergence - 1e-4, 0), (math.inf, 1)):
        loss = flash_reinforce_loss(logprobs, old, torch.tensor([2.0]), FULL, high)
        torch.testing.assert_close(gradient(loss, logprobs), -2 * torch.tensor([[0.5, 1.0]]) * kept)


@FEW
@given(seed=st.integers(0, 999))
def test_without_a_bound_flash_reinforce_is_cispo_without_clips(seed):
    lp, old, adv, mask = batch(seed)
    ours = flash_reinforce_loss(lp, old, adv, mask, math.inf)
    torch.testing.assert_close(ours, cispo_loss(lp, old, adv, mask, 1.0, math.inf))
    kept = flash_reinforce_loss(lp, old, adv, mask, 0.02)
    rows = (kept != 0).any(1) | ~mask.any(1)
    torch.testing.assert_close(kept[rows], ours[rows])
    assert (gradient(kept, lp)[~rows] == 0).all() and 0 < rows.sum()


# --- M2PO


def test_golden_m2po():
    """Squares of log-ratios that move away: 0.01, 0.04, 0.09. Their mean is 0.0467; without the last it is 0.025."""
    log_ratio = torch.tensor([[0.1, 0.2, -0.3, -5.0, 0.0]]).requires_grad_()
    advantages, mask = torch.tensor([[1.0, 1.0, -1.0, 1.0, -1.0]]), torch.ones(1, 5, dtype=torch.bool)
    plain = -advantages * log_ratio.detach().exp()
    for high, dropped in ((0.047, []), (0.04, [2]), (0.02, [1, 2]), (0.0, [0, 1, 2])):
        loss = m2po_loss(log_ratio, torch.zeros(1, 5), advantages, mask, high)
        expected = plain.clone()
        expected[0, dropped] = 0
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradient(loss, log_ratio), expected)


def test_what_ties_with_a_dropped_token_is_dropped_too():
    log_ratio, mask = torch.tensor([[0.1, 0.3, 0.3, 0.3]]), torch.ones(1, 4, dtype=torch.bool)
    loss = m2po_loss(log_ratio, torch.zeros(1, 4), torch.ones(1), mask, 0.06)  # two of the three would be enough
    assert (loss != 0).tolist() == [[True, False, False, False]]


@FEW
@given(seed=st.integers(0, 999), high=st.sampled_from([0.0, 0.01, 0.1, 1.0]))
def test_the_moment_of_what_m2po_keeps_is_at_most_the_bound_and_of_one_more_above(seed, high):
    lp, old, adv, mask = batch(seed)
    loss, log_ratio = m2po_loss(lp, old, adv, mask, high), (lp - old).detach()
    away = mask & (adv * log_ratio > 0)
    kept, dropped = away & (loss != 0), away & (loss == 0)
    squares = log_ratio.square()
    assert not kept.any() or squares[kept].mean() <= high + 1e-12
    if dropped.any():
        more = torch.cat([squares[kept], squares[dropped].min()[None]])
        assert more.mean() > high and (not kept.any() or squares[kept].max() < squares[dropped].min())
    torch.testing.assert_close(loss[mask & ~away], (-adv * log_ratio.exp())[mask & ~away])
    torch.testing.assert_close(m2po_loss(lp, old, adv, mask, math.inf), torch.where(mask, -adv * log_ratio.exp(), 0))


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0)])
def test_nothing_to_keep(shape):
    nothing, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for fn in (m2po_loss, flash_reinforce_loss, sequence_sapo_loss):
        assert fn(nothing, nothing, nothing, mask).shape == shape
