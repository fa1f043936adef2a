"""Advantages and weights of batches of any size, with samples that were not scored: against their loops."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reward_batches import FEW, LENGTHS, NAN, batch, token_batch

import rlkit.advantages
from rlkit.advantages.naive import baselines, filtering, group, token_baseline, whitened

MODULES = (baselines, filtering, group, whitened)
TAKES_GROUPS = [
    getattr(rlkit.advantages, name)
    for module in MODULES
    for name, x in vars(module).items()
    if inspect.isfunction(x) and x.__module__ == module.__name__ and "group_ids" in inspect.signature(x).parameters
]


def loop_of(function):
    return next(getattr(m, function.__name__) for m in MODULES if hasattr(m, function.__name__))


@pytest.mark.parametrize("function", TAKES_GROUPS)
@FEW
@given(seed=st.integers(0, 9999), b=st.integers(0, 14))
def test_groups(function, seed, b):
    rewards, groups = batch(seed, b)
    takes = inspect.signature(function).parameters
    more = {"lengths": LENGTHS[:b]} if "lengths" in takes else {}
    if "k" in takes:
        more = {"k": 1 + seed % 4}
    if function.__name__ == "gdpo_advantages":
        rewards = torch.stack([batch(seed + k, b)[0] for k in range(3)], 1)
        more |= {"weights": torch.tensor([1.0, -0.5, 2.0]).double()}
    came, expected = function(rewards, groups, **more), loop_of(function)(rewards, groups, **more)
    torch.testing.assert_close(came, expected, atol=1e-8, rtol=1e-7, check_dtype=False)


@pytest.mark.parametrize("function", TAKES_GROUPS)
@pytest.mark.parametrize("worst", [float("inf"), -float("inf")])
def test_an_infinite_reward_was_not_scored(function, worst):
    """And is no other sample's concern."""
    takes = inspect.signature(function).parameters
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, NAN, 2.0, 1.0]), torch.tensor([0, 0, 0, 0, 1, 1])
    more = {"lengths": torch.arange(1, 7)} if "lengths" in takes else {}
    more |= {"k": 2} if "k" in takes else {}
    if function.__name__ == "gdpo_advantages":
        rewards = torch.stack([rewards, rewards], 1)
    came = function(rewards.nan_to_num(nan=worst), groups, **more)
    assert came.equal(function(rewards, groups, **more)) and came.float().isfinite().all()


def test_every_function_of_groups_is_here():
    have = {f.__name__ for f in TAKES_GROUPS} | {"optimal_token_baseline_advantages"}
    have |= {"gigpo_advantages", "hgpo_advantages"}  # test_steps.py
    public = {n: getattr(rlkit.advantages, n) for n in rlkit.advantages.__all__}
    takes = {n for n, f in public.items() if inspect.isfunction(f) and "group_ids" in inspect.signature(f).parameters}
    assert takes == have


@FEW
@given(
    seed=st.integers(0, 9999),
    b=st.integers(0, 3),
    t=st.sampled_from([0, 1, 5, 128, 129, 300]),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
)
def test_reinforce_plus_plus(seed, b, t, gamma):
    rewards, mask = token_batch(seed, b, t)
    came = rlkit.advantages.reinforce_plus_plus_advantages(rewards, mask, gamma)
    expected = whitened.reinforce_plus_plus_advantages(rewards, mask, gamma)
    torch.testing.assert_close(came, expected, atol=1e-8, rtol=1e-7)


@FEW
@given(seed=st.integers(0, 9999), b=st.integers(0, 7), t=st.integers(0, 6), baseline_alone=st.booleans())
def test_optimal_token_baseline(seed, b, t, baseline_alone):
    rewards, mask = token_batch(seed, b, t)
    generator = torch.Generator().manual_seed(seed)
    rewards[torch.rand(b, t, generator=generator) < 0.05] = NAN
    logprobs = (3 * torch.randn(b, t, 5, generator=generator, dtype=torch.float64)).log_softmax(-1)
    policy = logprobs[..., 0], logprobs.exp().square().sum(-1)
    rho = torch.rand(b, t, generator=generator, dtype=torch.float64) + 0.5
    given = (rewards, batch(seed, b)[1], *policy, mask, rho, baseline_alone)
    spoilt = (*given[:2], *(x.where(mask, NAN) for x in policy), mask, rho.where(mask, torch.inf), baseline_alone)
    came = rlkit.advantages.optimal_token_baseline_advantages(*spoilt)
    expected = token_baseline.optimal_token_baseline_advantages(*given)
    torch.testing.assert_close(came, expected, atol=1e-9, rtol=1e-7)
