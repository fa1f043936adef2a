"""Advantages whose rewards or baselines are of single tokens: REINFORCE++ and the optimal token baseline."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from reward_batches import FEW, NAN, batch, close, token_batch

from rlkit.advantages.baselines import remax_advantages
from rlkit.advantages.token_baseline import optimal_token_baseline_advantages
from rlkit.advantages.whitened import gdpo_advantages, reinforce_plus_plus_advantages


@FEW
@given(seed=st.integers(0, 999), gamma=st.sampled_from([0.0, 0.7, 1.0]))
def test_outcome_rewards_lie_on_the_last_token_of_the_mask(seed, gamma):
    _, mask = token_batch(seed, 6, 9)
    rewards = batch(seed, 6)[0]
    last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    tokens = torch.where(last, rewards[:, None], 0.0)
    out = reinforce_plus_plus_advantages(rewards, mask, gamma)
    torch.testing.assert_close(out, reinforce_plus_plus_advantages(tokens, mask, gamma))
    if gamma < 1:
        return
    groups, logprobs, squares = torch.tensor([0, 1, 0, 1, 0, 1]), *policy(seed, 6, 9)
    torch.testing.assert_close(
        optimal_token_baseline_advantages(rewards, groups, logprobs, squares, mask),
        optimal_token_baseline_advantages(tokens, groups, logprobs, squares, mask),
    )


def policy(seed, b, t, vocabulary=5):
    g = torch.Generator().manual_seed(seed)
    logprobs = (3 * torch.randn(b, t, vocabulary, generator=g, dtype=torch.float64)).log_softmax(-1)
    return logprobs[..., 0], logprobs.exp().square().sum(-1)


def test_golden_reinforce_plus_plus():
    """Rewards 1 and 3 on 1 and 2 tokens: mean 7/3, variance ((4/3)^2 + 2 (2/3)^2) / 2 = 4/3."""
    mask = torch.tensor([[False, True, False], [True, False, True]])
    std = math.sqrt(4 / 3)
    expected = [[0, -4 / 3 / std, 0], [2 / 3 / std, 0, 2 / 3 / std]]
    close(reinforce_plus_plus_advantages(torch.tensor([1.0, 3.0]), mask), expected)
    tokens = torch.tensor([[9.0, 1.0, 9.0], [1.0, 9.0, 2.0]])  # the second row returns 3 and 2; 9 is outside the mask
    mean, std = 2.0, 1.0
    expected = [[0, (1 - mean) / std, 0], [(3 - mean) / std, 0, (2 - mean) / std]]
    close(reinforce_plus_plus_advantages(tokens, mask), expected)
    out = reinforce_plus_plus_advantages(torch.tensor([0.0, 4.0]), mask, 0.5)  # returns 0, 2, 4
    close(out, [[0, -1, 0], [0, 0, 1]])


def test_golden_optimal_token_baseline():
    """Squared norms 1 - 2 pi + sum: 0.5 and 1.5 at the first token, then 0.5 more for the one that goes on."""
    mask = torch.tensor([[False, True, False], [False, True, True]])
    probability, squares = torch.tensor([[1, 0.5, 1], [1, 0.25, 0.5]]), torch.tensor([[0, 0.5, 0], [0, 1.0, 0.5]])
    args = (torch.tensor([4.0, 0.0]), torch.tensor([5, 5]), probability.log(), squares, mask)
    out = optimal_token_baseline_advantages(*args, eps=0.0)  # the baseline is 0.5 * 4 / 2 = 1
    close(out, [[0, 3, 0], [0, -1, 0]])
    args = (torch.tensor([0.0, 4.0]), *args[1:])
    close(optimal_token_baseline_advantages(*args, eps=0.0), [[0, -3, 0], [0, 1, 4]])  # alone at the end: the return
    close(optimal_token_baseline_advantages(*args, baseline_alone=True, eps=0.0), [[0, -3, 0], [0, 1, 0]])
    rho = torch.tensor([[1.0, 3.0, 1.0], [1.0, 1.0, 1.0]]).sqrt()
    out = optimal_token_baseline_advantages(*args, rollout_weights=rho, eps=0.0)  # 1.5 against 1.5
    close(out, [[0, -2, 0], [0, 2, 4]])


def test_nan_reward_isolated_by_token():
    rewards, mask = token_batch(7, 5, 6)
    groups, (logprobs, squares) = torch.tensor([0, 0, 1, 0, 1]), policy(7, 5, 6)
    mask[2] = True
    bad, kept = rewards.clone(), torch.tensor([0, 1, 3, 4])
    bad[2, 3] = NAN
    bad[~mask] = NAN  # outside the mask nan is nothing
    for gamma in (1.0, 0.9):
        out = reinforce_plus_plus_advantages(bad, mask, gamma)
        torch.testing.assert_close(out[kept], reinforce_plus_plus_advantages(rewards[kept], mask[kept], gamma))
        assert not out[2].any()
    out = optimal_token_baseline_advantages(bad, groups, logprobs, squares, mask)
    args = (rewards[kept], groups[kept], logprobs[kept], squares[kept], mask[kept])
    torch.testing.assert_close(out[kept], optimal_token_baseline_advantages(*args))
    assert not out[2].any()


def test_equal_rewards_and_one_sample_by_token():
    mask = torch.tensor([[True, True, False], [False, True, True]])
    logprobs, squares = policy(0, 2, 3)
    for gamma, rewards in ((1.0, torch.tensor([100.1, 100.1])), (0.9, torch.zeros(2))):
        assert reinforce_plus_plus_advantages(rewards, mask, gamma).abs().max() < 1e-4
    for groups in (torch.tensor([0, 0]), torch.tensor([0, 1])):
        out = optimal_token_baseline_advantages(torch.tensor([100.1, 100.1]), groups, logprobs, squares, mask)
        assert out.abs().max() < 1e-4
    one = reinforce_plus_plus_advantages(torch.tensor([5.0]), torch.tensor([[False, True]]))
    assert one.tolist() == [[0, 0]]


def test_dtypes_by_token():
    rewards, mask = torch.tensor([1, 0, 3]), torch.ones(3, 2, dtype=torch.bool)
    groups, (logprobs, squares) = torch.zeros(3, dtype=torch.int32), policy(1, 3, 2)
    for function in (
        reinforce_plus_plus_advantages,
        lambda r, m: optimal_token_baseline_advantages(r, groups, logprobs, squares, m),
        lambda r, m: remax_advantages(r, r.flip(0)),
    ):
        expected = function(rewards.float(), mask)
        assert expected.dtype == torch.float32
        assert torch.equal(function(rewards.bfloat16(), mask), expected) and torch.equal(
            function(rewards, mask), expected
        )
        assert torch.equal(function(rewards.bool(), mask), function(rewards.bool().float(), mask))
        assert function(rewards.double(), mask).dtype == torch.float64


def test_empty_batch_by_token():
    for b, t in ((0, 3), (3, 0), (0, 0)):
        mask, groups = torch.zeros(b, t, dtype=torch.bool), torch.zeros(b, dtype=torch.long)
        for rewards in (torch.zeros(b), torch.zeros(b, t)):
            for gamma in (1.0, 0.9):
                assert reinforce_plus_plus_advantages(rewards, mask, gamma).shape == (b, t)
            out = optimal_token_baseline_advantages(rewards, groups, torch.zeros(b, t), torch.zeros(b, t), mask)
            assert out.shape == (b, t)
    assert gdpo_advantages(torch.zeros(3, 0), torch.zeros(3, dtype=torch.long)).tolist() == [0, 0, 0]
    assert remax_advantages(torch.zeros(0), torch.zeros(0)).shape == (0,)
