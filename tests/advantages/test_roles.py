"""Baselines of roles, values of prompts, deviations without the sample: what is not a group's mean."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reward_batches import FEW, NAN, batch, close

from rlkit.advantages import leave_one_out_grpo_advantages, optimal_values, rae_advantages, rloo_advantages
from rlkit.advantages.naive import baselines as naive


def test_golden_roles():
    """Decay 1/2: role 0 has rewards 1, -1 and then none that counts, role 1 has one."""
    rewards, roles = torch.tensor([1.0, 4.0, -1.0, NAN]), torch.tensor([0, 1, 0, 0])
    advantages, baselines = rae_advantages(rewards, roles, torch.tensor([0.0, 2.0, 7.0]), 0.5)
    close(advantages, [1.0, 2.0, -1.5, 0.0])
    close(baselines, [-0.25, 3.0, 7.0])


@FEW
@given(seed=st.integers(0, 9999), b=st.integers(0, 14), decay=st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_roles_equal_the_loop_and_two_calls_are_one(seed, b, decay):
    rewards, _ = batch(seed, b)
    g = torch.Generator().manual_seed(seed)
    roles, start = torch.randint(0, 3, (b,), generator=g), torch.randn(3, generator=g, dtype=torch.float64)
    whole = rae_advantages(rewards, roles, start, decay)
    torch.testing.assert_close(tuple(whole), tuple(naive.rae_advantages(rewards, roles, start, decay)))
    first = rae_advantages(rewards[: b // 2], roles[: b // 2], start, decay)
    second = rae_advantages(rewards[b // 2 :], roles[b // 2 :], first.baselines, decay)
    torch.testing.assert_close(torch.cat([first.advantages, second.advantages]), whole.advantages)
    torch.testing.assert_close(second.baselines, whole.baselines)


def test_a_long_run_does_not_underflow_to_nan():
    rewards = torch.ones(3000)
    advantages, baselines = rae_advantages(rewards, torch.zeros(3000).long(), torch.zeros(1), 0.5)
    assert advantages.isfinite().all() and baselines.item() == 1.0 and advantages[-1] == 0


def test_golden_optimal_values():
    """Rewards 0 and log 3 at beta 1: log of the mean of 1 and 3."""
    rewards, groups = torch.tensor([0.0, 5.0, math.log(3), NAN, NAN]), torch.tensor([4, 2, 4, 4, 1])
    close(optimal_values(rewards, groups, beta=1.0), [math.log(2), 5.0, math.log(2), math.log(2), 0.0])


@FEW
@given(seed=st.integers(0, 9999), b=st.integers(1, 14))
def test_optimal_values_lie_between_the_mean_and_the_best(seed, b):
    rewards, groups = batch(seed, b)
    for group in groups.unique():
        here = (groups == group) & ~rewards.isnan()
        if here.any():
            mean, best = rewards[here].mean(), rewards[here].max()
            values = [optimal_values(rewards, groups, beta)[groups == group] for beta in (1e4, 0.5, 1e-4)]
            torch.testing.assert_close(values[0], mean.expand_as(values[0]), atol=1e-3, rtol=0)
            torch.testing.assert_close(values[2], best.expand_as(values[2]), atol=1e-3, rtol=0)
            assert (values[1] >= mean - 1e-9).all() and (values[1] <= best + 1e-9).all()
            shifted = optimal_values(rewards + 1e4, groups)[groups == group]
            torch.testing.assert_close(shifted, values[1] + 1e4)


def test_golden_leave_one_out():
    rewards, groups = torch.tensor([0.0, 1.0, 3.0, 2.0, 5.0, 7.0]), torch.tensor([0, 0, 0, 1, 1, 2])
    others = [(1 + 3) / 2, (0 + 3) / 2, (0 + 1) / 2]
    deviations = [2**0.5, 4.5**0.5, 0.5**0.5]
    expected = [(r - m) / s for r, m, s in zip((0, 1, 3), others, deviations, strict=True)]
    close(leave_one_out_grpo_advantages(rewards, groups, eps=0.0), [*expected, -3.0, 3.0, 0.0])


@pytest.mark.parametrize("reward", [0.35, 1.0, 1e4 + 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_seven_equal_rewards_and_another_are_not_divided_by_rounding(reward, dtype):
    rewards, groups = torch.tensor([reward] * 7 + [0.0], dtype=dtype), torch.zeros(8).long()
    ours, difference = leave_one_out_grpo_advantages(rewards, groups), rloo_advantages(rewards, groups)
    torch.testing.assert_close(ours[-1], difference[-1])
    torch.testing.assert_close(ours[:7].float(), torch.full((7,), 7**-0.5), atol=1e-4, rtol=1e-4)
