"""lite_ppo_advantages, pf_ppo_power_weights, and what test_baselines.py leaves out of two others."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.advantages import (
    dr_grpo_advantages,
    grpo_advantages,
    lite_ppo_advantages,
    optimal_token_baseline_advantages,
    pf_ppo_indices,
    pf_ppo_power_weights,
    reinforce_plus_plus_advantages,
)

FEW = settings(max_examples=25, deadline=None, derandomize=True)
NAN = math.nan


def batch(seed=0, b=14):
    g = torch.Generator().manual_seed(seed)
    rewards = 3 * torch.randn(b, generator=g, dtype=torch.float64)
    if seed % 3 == 0:  # ties and zeros
        rewards = rewards.round().clamp(-1, 1)
    rewards[torch.rand(b, generator=g) < 0.15] = NAN
    return rewards, torch.tensor([7, -3, 10**12, 0])[torch.randint(0, 4, (b,), generator=g)]


def close(out, expected):
    torch.testing.assert_close(out, torch.tensor(expected, dtype=out.dtype))


def test_golden_lite_ppo():
    """Rewards 1, 3, 0, 6, their mean 2.5, squares 2.25 + 0.25 + 6.25 + 12.25 over three: a variance of 7."""
    rewards, groups = torch.tensor([1.0, 3.0, 0.0, 6.0, NAN]), torch.tensor([5, 5, 2, 2, 2])
    std = math.sqrt(7)
    close(lite_ppo_advantages(rewards, groups, eps=0.0), [-1 / std, 1 / std, -3 / std, 3 / std, 0])
    close(
        lite_ppo_advantages(rewards, groups, eps=1.0), [-1 / (std + 1), 1 / (std + 1), -3 / (std + 1), 3 / (std + 1), 0]
    )
    # the spread between groups counts: one always right, one always wrong, one that is neither
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    half = 0.5 / math.sqrt(0.3)
    close(lite_ppo_advantages(rewards, groups, eps=0.0), [0, 0, 0, 0, half, -half])


def test_golden_power():
    rewards, groups = torch.tensor([3.0, -1.0, 0.0, NAN, 0.0, 0.0, 5.0, NAN]), torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    close(pf_ppo_power_weights(rewards, groups), [0.9, 0.1, 0, 0, 0.5, 0.5, 1, 0])
    close(pf_ppo_power_weights(rewards, groups, 1.0), [0.75, 0.25, 0, 0, 0.5, 0.5, 1, 0])
    close(pf_ppo_power_weights(rewards, groups, 0.0), [1 / 3, 1 / 3, 1 / 3, 0, 0.5, 0.5, 1, 0])


@FEW
@given(seed=st.integers(0, 999))
def test_kinship(seed):
    rewards, groups = batch(seed)
    scored = ~rewards.isnan()
    out = lite_ppo_advantages(rewards, groups, eps=0.0)
    if scored.sum() > 1 and rewards[scored].std() > 0:
        torch.testing.assert_close(out, dr_grpo_advantages(rewards, groups) / rewards[scored].std())
        torch.testing.assert_close(lite_ppo_advantages(-4 * rewards + 9, groups, eps=0.0), -out)
    one = torch.zeros_like(groups)
    torch.testing.assert_close(lite_ppo_advantages(rewards, one), grpo_advantages(rewards, one))
    weights = pf_ppo_power_weights(rewards, groups)
    torch.testing.assert_close(pf_ppo_power_weights(-7 * rewards, groups), weights)
    for group in groups.unique():
        here = groups == group
        assert weights[here].sum().item() == pytest.approx(float((scored & here).any()))


def test_the_draw_goes_by_the_power():
    weights = pf_ppo_power_weights(torch.tensor([3.0, -1.0, 0.0, NAN]), torch.zeros(4, dtype=torch.long))
    rows = pf_ppo_indices(weights, 8000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(rows.bincount(minlength=4) / 8000, weights, atol=0.02, rtol=0)


def test_ranks_agree():
    """Two ranks with the same rows have the statistics of these rows twice; every rank takes part in both sums."""
    rewards, groups = batch(5)
    calls = []

    def two_ranks(x):
        calls.append(x.shape)
        return 2 * x

    out = lite_ppo_advantages(rewards, groups, global_sum=two_ranks)
    both_ranks = lite_ppo_advantages(torch.cat([rewards, rewards]), torch.cat([groups, groups + 1]))
    torch.testing.assert_close(out, both_ranks[:14])
    assert (out - lite_ppo_advantages(rewards, groups)).abs().max() > 1e-3
    lite_ppo_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long), global_sum=two_ranks)
    assert calls == [(2,), ()] * 2


@pytest.mark.parametrize("function", [lite_ppo_advantages, pf_ppo_power_weights])
@FEW
@given(seed=st.integers(0, 9999), b=st.integers(0, 14))
def test_group_order_interleaved(function, seed, b):
    rewards, groups = batch(seed, b)
    out = function(rewards, groups)
    order = torch.randperm(b, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(function(rewards[order], groups[order]), out[order])
    torch.testing.assert_close(function(rewards, torch.unique(groups, return_inverse=True)[1] * -5 + 2), out)


@pytest.mark.parametrize("function", [lite_ppo_advantages, pf_ppo_power_weights])
@FEW
@given(seed=st.integers(0, 9999))
def test_nan_reward_isolated(function, seed):
    rewards, groups = batch(seed)
    scored = ~rewards.isnan()
    out = function(rewards, groups)
    torch.testing.assert_close(out[scored], function(rewards[scored], groups[scored]))
    assert not out[~scored].any() and out.isfinite().all()
    assert not function(torch.full((3,), NAN), torch.tensor([0, 0, 1])).any()


def test_equal_rewards_give_no_advantage():
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    for reward in (0.0, 0.1, 100.1, 1e4 + 0.1):
        assert lite_ppo_advantages(torch.full((7,), reward), groups).abs().max() < 1e-4
    assert lite_ppo_advantages(torch.zeros(7), groups, eps=0.0).tolist() == [0] * 7
    assert lite_ppo_advantages(torch.tensor([0.7]), torch.tensor([3])).tolist() == [0.0]
    assert lite_ppo_advantages(torch.tensor([0.7, 0.1]), torch.tensor([3, 4])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("function", [lite_ppo_advantages, pf_ppo_power_weights])
def test_dtypes(function):
    groups, rewards = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32), torch.tensor([1, 0, 0, 0, 1])
    expected = function(rewards.float(), groups)
    assert expected.dtype == torch.float32
    for dtype in (torch.bfloat16, torch.int64, torch.bool):
        assert torch.equal(function(rewards.to(dtype), groups), expected)
    assert function(rewards.double(), groups).dtype == torch.float64


@pytest.mark.parametrize("function", [lite_ppo_advantages, pf_ppo_power_weights])
def test_empty_batch_and_inputs_left_alone(function):
    assert function(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)
    rewards, groups = batch(8)
    before = rewards.clone()
    function(rewards, groups)
    assert torch.equal(rewards.nan_to_num(9), before.nan_to_num(9))


Z, IDS = torch.zeros(2), torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        *((lambda f=f: f(torch.zeros(2, 2), IDS), "rewards") for f in (lite_ppo_advantages, pf_ppo_power_weights)),
        *((lambda f=f: f(Z, IDS[:1]), "group_ids") for f in (lite_ppo_advantages, pf_ppo_power_weights)),
        *((lambda f=f: f(Z, Z), "group_ids") for f in (lite_ppo_advantages, pf_ppo_power_weights)),
        (lambda: lite_ppo_advantages(Z, IDS, eps=-1.0), "eps"),
        (lambda: lite_ppo_advantages(Z, IDS, eps=NAN), "eps"),
        (lambda: pf_ppo_power_weights(Z, IDS, -1.0), "power"),
        (lambda: pf_ppo_power_weights(Z, IDS, NAN), "power"),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        call()


# ---- the optimal token baseline, by inputs in float32 and rows that are not scored


def token_batch(seed, b=8, t=30, sure=0.0):
    """Rewards, mask, groups, logprobs and sums of squares, float64; `sure` puts tokens close to probability 1."""
    g = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(b, t, 5, generator=g, dtype=torch.float64)
    logits[..., 0] += sure
    logprobs = logits.log_softmax(-1)
    mask = torch.rand(b, t, generator=g) < 0.6
    mask[0] = mask[1, 1:] = False
    groups = torch.tensor([0, 1, 0, 1, 2, 2, 0, 3])
    rewards = torch.randn(b, t, generator=g, dtype=torch.float64)
    return rewards, groups, logprobs[..., 0], logprobs.exp().square().sum(-1), mask


@pytest.mark.parametrize("outcome", [True, False])
@pytest.mark.parametrize("sure", [0.0, 5.0, 9.0])
def test_token_baseline_in_float32(outcome, sure):
    """As exact as its inputs, also where a norm of 1 - 2 pi + sum pi^2 is the difference of numbers close to 1."""
    rewards, groups, logprobs, squares, mask = token_batch(1, t=300, sure=sure)
    rewards = rewards[:, 0] if outcome else rewards
    rewards, logprobs, squares = rewards.float(), logprobs.float(), squares.float()
    out = optimal_token_baseline_advantages(rewards, groups, logprobs, squares, mask)
    assert out.dtype == torch.float32 and not out[~mask].any()
    wide = optimal_token_baseline_advantages(rewards.double(), groups, logprobs.double(), squares.double(), mask)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(out.double(), wide, atol=2e-5 * wide.abs().max().item(), rtol=0)


def test_token_baseline_of_sure_tokens_stays_within_the_returns():
    """Rounding takes a norm of 0 below 0, where it would weigh the other way."""
    mask, rewards = torch.ones(2, 1, dtype=torch.bool), torch.tensor([1.0, 0.0])
    squares = torch.tensor([[1 - 2.0**-24], [1 + 2.0**-23]])
    out = optimal_token_baseline_advantages(rewards, torch.zeros(2, dtype=torch.long), torch.zeros(2, 1), squares, mask)
    assert out.tolist() == [[1.0], [0.0]]


def test_token_baseline_does_not_round_the_end_of_a_long_return():
    """Alone at its end, a row has its return for an advantage: the last of 3000 rewards of 0.1 is 0.1."""
    mask = torch.arange(3000) < torch.tensor([[3000], [10]])
    rewards, logprobs = torch.full((2, 3000), 0.1), torch.full((2, 3000), -1.0)
    groups = torch.zeros(2, dtype=torch.long)
    out = optimal_token_baseline_advantages(rewards, groups, logprobs, torch.full_like(logprobs, 0.5), mask)
    torch.testing.assert_close(out[0, 10:], 0.1 * torch.arange(2990, 0, -1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("outcome", [True, False])
def test_token_baseline_keeps_a_row_that_is_not_scored_apart(outcome):
    """Whatever else it holds; and so do tokens outside the mask."""
    rewards, groups, logprobs, squares, mask = token_batch(2)
    mask[2, 5] = True
    rho = torch.full_like(logprobs, 1.5)
    kept = torch.arange(8) != 2
    rewards = rewards[:, 0].clone() if outcome else torch.where(mask, rewards, NAN)
    clean = optimal_token_baseline_advantages(*(x[kept] for x in (rewards, groups, logprobs, squares, mask, rho)))
    if outcome:
        rewards[2] = NAN
    else:
        rewards[2, 5] = NAN
    for bad in (NAN, math.inf, -math.inf):
        hole = ~mask
        hole[2] = True
        *policy, weights = [torch.where(hole, bad, x) for x in (logprobs, squares, rho)]
        out = optimal_token_baseline_advantages(rewards, groups, *policy, mask, weights)
        torch.testing.assert_close(out[kept], clean)
        assert not out[2].any()


@FEW
@given(seed=st.integers(0, 999), pad=st.integers(0, 4), gaps=st.integers(0, 4), outcome=st.booleans())
def test_token_baseline_rows_permute_and_what_lies_between_tokens_is_nothing(seed, pad, gaps, outcome):
    rewards, groups, logprobs, squares, mask = token_batch(seed, t=9)
    given_rewards = rewards[:, 0] if outcome else rewards
    out = optimal_token_baseline_advantages(given_rewards, groups, logprobs, squares, mask)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    rows = [x[order] for x in (given_rewards, groups, logprobs, squares, mask)]
    torch.testing.assert_close(optimal_token_baseline_advantages(*rows), out[order])

    columns = torch.cat([torch.arange(4), torch.arange(4 + gaps, 9 + gaps)])  # tool output after the fourth token

    def spread(x, value):
        wide = torch.full((8, 9 + gaps + pad), value, dtype=x.dtype)
        wide[:, columns] = x
        return wide

    wide_rewards = given_rewards if outcome else spread(rewards, NAN)
    wide = (wide_rewards, groups, spread(logprobs, NAN), spread(squares, math.inf), spread(mask, False))
    torch.testing.assert_close(optimal_token_baseline_advantages(*wide)[:, columns], out)


def test_token_baseline_has_no_gradient_and_leaves_its_inputs():
    inputs = token_batch(3)
    before = [x.clone() for x in inputs]
    rho = torch.full_like(inputs[2], 1.5)
    inputs[2].requires_grad_()
    assert not optimal_token_baseline_advantages(*inputs, rho).requires_grad
    with torch.inference_mode():
        optimal_token_baseline_advantages(*inputs, rho)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True)) and (rho == 1.5).all()


def test_compiles_without_a_graph_break():
    def all_of_them(rewards, groups, tokens, *rest):
        per_token = [optimal_token_baseline_advantages(x, *rest) for x in (tokens, tokens[:, 0])]
        return [function(rewards, groups) for function in (lite_ppo_advantages, pf_ppo_power_weights)] + per_token

    x = (*batch(4), *token_batch(4))
    compiled = torch.compile(all_of_them, fullgraph=True, backend="eager")(*x)
    torch.testing.assert_close(compiled, all_of_them(*x))


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_takes_integer_rewards(gamma):
    mask = torch.tensor([[False, True, True, False], [True, True, True, True]])
    for rewards in (torch.tensor([1, 0]), torch.tensor([[5, 0, 1, 5], [0, 0, 0, 1]])):
        came = reinforce_plus_plus_advantages(rewards, mask, gamma)
        torch.testing.assert_close(came, reinforce_plus_plus_advantages(rewards.float(), mask, gamma))
        assert came.dtype == torch.float32
