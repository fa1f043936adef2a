"""grpo_advantages, dr_grpo_advantages, expand_to_tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.advantages import (
    dr_grpo_advantages,
    expand_to_tokens,
    gdpo_advantages,
    grpo_advantages,
    leave_one_out_grpo_advantages,
    lite_ppo_advantages,
    masked_whiten,
    opo_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
    scaled_rewards,
)
from rlkit.advantages.naive import group as naive

FEW = settings(max_examples=25, deadline=None, derandomize=True)
BOTH = [grpo_advantages, dr_grpo_advantages]


def batch(seed=0, b=14):
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randn(b, generator=g, dtype=torch.float64)
    rewards[torch.rand(b, generator=g) < 0.15] = math.nan
    return rewards, torch.tensor([7, -3, 10**12, 0])[torch.randint(0, 4, (b,), generator=g)]


@pytest.mark.parametrize("function", BOTH)
@FEW
@given(seed=st.integers(0, 9999), b=st.integers(0, 14))
def test_any_order(function, seed, b):
    rewards, groups = batch(seed, b)
    out = function(rewards, groups)
    order = torch.randperm(b, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(function(rewards[order], groups[order]), out[order])


def test_grpo_golden():
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 5.0, 7.0, 9.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    third, std = 1 / 3, math.sqrt(1 / 3)  # squares 1/9, 4/9, 1/9 over two
    expected = [third / std, -2 * third / std, third / std, -1.0, 0.0, 1.0]
    torch.testing.assert_close(grpo_advantages(rewards, groups, eps=0.0), torch.tensor(expected))
    torch.testing.assert_close(
        dr_grpo_advantages(rewards, groups), torch.tensor([third, -2 * third, third, -2.0, 0.0, 2.0])
    )
    torch.testing.assert_close(grpo_advantages(rewards, groups, eps=2.0)[3:], torch.tensor([-0.5, 0.0, 0.5]))


@pytest.mark.parametrize("function", BOTH)
def test_group_order_interleaved(function):
    sorted_rewards, sorted_groups = torch.tensor([1.0, 2.0, 3.0, 10.0, 30.0, 20.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    woven = torch.tensor([0, 3, 1, 4, 2, 5])
    out = function(sorted_rewards, sorted_groups)
    torch.testing.assert_close(function(sorted_rewards[woven], sorted_groups[woven]), out[woven])
    torch.testing.assert_close(function(sorted_rewards, torch.tensor([9, 9, 9, -4, -4, -4])), out)


@pytest.mark.parametrize("function", BOTH)
def test_uneven_and_singleton_groups(function):
    rewards, groups = torch.tensor([3.0, 1.0, 2.0, 2.0, 5.0, 0.1]), torch.tensor([4, 2, 2, 2, 2, 8])
    out = function(rewards, groups)
    assert out[0] == 0 and out[5] == 0 and out.isfinite().all()
    expected = getattr(naive, function.__name__)(rewards, groups)
    torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=0)
    assert function(torch.tensor([3.0]), torch.tensor([0])).tolist() == [0.0]
    assert grpo_advantages(torch.tensor([3.0, 3.0, 1.0]), torch.tensor([0, 0, 1]), eps=0.0).tolist() == [0.0, 0.0, 0.0]


def test_ddof_explicit():
    """Rewards 0 and 1: the sample std (divisor G - 1) is sqrt(1/2), the population's would be 1/2 and give +-1."""
    out = grpo_advantages(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]), eps=0.0)
    torch.testing.assert_close(out, torch.tensor([-math.sqrt(0.5), math.sqrt(0.5)]))


@pytest.mark.parametrize("function", BOTH)
def test_nan_or_none_reward_isolated(function):
    rewards = torch.tensor([1.0, math.nan, 3.0, 8.0, 5.0, 6.0, math.nan, math.nan, 4.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3, 3])
    out = function(rewards, groups)
    scored = ~rewards.isnan()
    torch.testing.assert_close(out[scored], function(rewards[scored], groups[scored]))
    assert out[~scored].abs().max() == 0
    assert out[8] == 0  # the only one scored of its group


def test_equal_rewards_give_no_advantage():
    """Rounding must not be scaled up: in float32 three rewards of 100.1 lie 7.6e-6 from their mean, eps is 1e-6."""
    for reward in (0.1, 100.1, 1e4 + 0.1):
        out = grpo_advantages(torch.full((7,), reward), torch.tensor([0, 0, 0, 1, 1, 1, 1]))
        assert out.abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, -0.7, 1e4 + 0.1, 1e-9])
def test_equal_rewards_are_exactly_0_without_eps_too(reward, dtype):
    for size in (3, 7, 10):
        rewards, groups = torch.full((size,), reward, dtype=dtype), torch.zeros(size).long()
        for function in (grpo_advantages, lite_ppo_advantages, reinforce_plus_plus_baseline_advantages):
            assert (function(rewards, groups, eps=0.0) == 0).all()
        assert (gdpo_advantages(rewards[:, None], groups, eps=0.0) == 0).all()
        assert masked_whiten(rewards[None], torch.ones(1, size, dtype=torch.bool), eps=0.0).abs().max() < 1e-9


def lengthwise_opo(rewards, groups):
    return opo_advantages(rewards, groups, torch.arange(1, len(rewards) + 1))


def gdpo_of_one(rewards, groups):
    return gdpo_advantages(rewards[:, None], groups)


IGNORE_A_CONSTANT = [
    *BOTH,
    leave_one_out_grpo_advantages,
    rloo_advantages,
    lengthwise_opo,
    gdpo_of_one,
    lite_ppo_advantages,
    reinforce_plus_plus_baseline_advantages,
]


@pytest.mark.parametrize("function", IGNORE_A_CONSTANT, ids=lambda function: function.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@settings(FEW, max_examples=60)
@given(
    shape=st.sampled_from(["one above", "one below", "three values"]),
    offset=st.sampled_from([0.0, 1.0, -20.3, 100.1, -1000.0, 1e4]),
    spread=st.sampled_from([1.0, 0.1, 0.001]),
    size=st.integers(2, 16),
)
def test_a_constant_added_to_all_rewards_changes_nothing(function, dtype, shape, offset, spread, size):
    place = torch.arange(size)
    steps = {"one above": place == 0, "one below": -(place == 0).int(), "three values": place % 3}[shape]
    rewards, groups = (offset + spread * steps.double()).to(dtype), torch.zeros_like(place)
    without = rewards.double() - rewards[-1].double()  # exact
    torch.testing.assert_close(function(rewards, groups).double(), function(without, groups), atol=1e-8, rtol=1e-5)


def test_large_integers_keep_their_differences():
    rewards, groups = torch.tensor([2**24, 2**24 + 1, 2**24 + 3]), torch.zeros(3).long()
    assert dr_grpo_advantages(rewards, groups).tolist() == pytest.approx([-4 / 3, -1 / 3, 5 / 3])
    assert rloo_advantages(rewards, groups).tolist() == [-2.0, -0.5, 2.5]
    assert opo_advantages(rewards, groups, torch.ones(3)).tolist() == pytest.approx([-4 / 3, -1 / 3, 5 / 3])
    assert remax_advantages(rewards, rewards[:1].expand(3)).tolist() == [0.0, 1.0, 3.0]
    assert scaled_rewards(rewards, mean=2.0**24, std=1.0).tolist() == [0.0, 1.0, 3.0]


def test_advantages_sum_to_zero_and_scale_out():
    rewards, groups = batch(3)
    for group in groups.unique():
        assert grpo_advantages(rewards, groups)[groups == group].sum().abs() < 1e-9
    torch.testing.assert_close(
        grpo_advantages(100 * rewards + 5, groups, eps=0.0), grpo_advantages(rewards, groups, eps=0.0)
    )


@pytest.mark.parametrize("function", BOTH)
def test_gradient_to_rewards_equals_finite_differences(function):
    rewards = torch.tensor([0.3, 1.0, -0.5, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    groups = torch.tensor([1, 0, 1, 0, 1])
    assert torch.autograd.gradcheck(lambda r: function(r, groups), rewards)


@pytest.mark.parametrize("function", BOTH)
def test_dtypes(function):
    groups = torch.tensor([0, 0, 0], dtype=torch.int32)
    expected = function(torch.tensor([1.0, 0.0, 1.0]), groups)
    assert expected.dtype == torch.float32
    for dtype in (torch.bfloat16, torch.int64, torch.bool):
        assert torch.equal(function(torch.tensor([1, 0, 1]).to(dtype), groups), expected)
    assert function(torch.tensor([1.0, 0.0]).double(), groups[:2]).dtype == torch.float64


@pytest.mark.parametrize("function", BOTH)
def test_empty_batch(function):
    assert function(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_expand_to_tokens():
    adv = torch.tensor([2.0, math.nan, -1.0], requires_grad=True)
    mask = torch.tensor([[False, True, True], [False, False, False], [True, False, True]])
    out = expand_to_tokens(adv, mask)
    assert out.tolist() == [[0, 2, 2], [0, 0, 0], [-1, 0, -1]]
    out.sum().backward()
    assert adv.grad.tolist() == [2, 0, 2]
    for shape in ((0, 3), (3, 0)):
        assert expand_to_tokens(torch.zeros(shape[0]), torch.zeros(shape, dtype=torch.bool)).shape == shape
    assert expand_to_tokens(adv.bfloat16(), mask).dtype == torch.bfloat16


@FEW
@given(seed=st.integers(0, 999), pad=st.integers(0, 4))
def test_expand_to_tokens_equals_the_loop(seed, pad):
    g = torch.Generator().manual_seed(seed)
    adv, mask = torch.randn(4, generator=g), torch.rand(4, 5, generator=g) < 0.5
    mask = torch.nn.functional.pad(mask, (0, pad))
    expected = [[adv[b].item() if mask[b, t] else 0.0 for t in range(5 + pad)] for b in range(4)]
    assert expand_to_tokens(adv, mask).tolist() == expected


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: grpo_advantages(torch.zeros(2, 2), torch.zeros(2, dtype=torch.long)), "rewards"),
        (lambda: grpo_advantages(torch.zeros(2), torch.zeros(3, dtype=torch.long)), "group_ids"),
        (lambda: grpo_advantages(torch.zeros(2), torch.zeros(2)), "group_ids"),
        (lambda: grpo_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.bool)), "group_ids"),
        (lambda: grpo_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.long), -1.0), "eps"),
        (lambda: dr_grpo_advantages(torch.zeros(2), torch.zeros(1, dtype=torch.long)), "group_ids"),
        (lambda: expand_to_tokens(torch.zeros(2, 1), torch.ones(2, 3, dtype=torch.bool)), "advantages"),
        (lambda: expand_to_tokens(torch.zeros(3), torch.ones(2, 3, dtype=torch.bool)), "advantages"),
        (lambda: expand_to_tokens(torch.zeros(2), torch.ones(2, 3)), "mask"),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        call()
