"""gae, discounted_returns, vtrace, rewards_to_tokens, length_adaptive_lambda, masked_whiten."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from rlkit.advantages import (
    discounted_returns,
    gae,
    length_adaptive_lambda,
    masked_whiten,
    rewards_to_tokens,
    vtrace,
)
from rlkit.advantages.naive import returns as naive

FEW = settings(max_examples=25, deadline=None, derandomize=True)


def steps(mask_row):
    """Positions of a row's steps, last first."""
    return [t for t in range(len(mask_row)) if mask_row[t]][::-1]


def batch(seed=0, b=4, t=9, share=0.6):
    """Rewards, values and a mask with gaps; the first row is empty."""
    g = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, b, t, generator=g, dtype=torch.float64)
    mask = torch.rand(b, t, generator=g) < share
    mask[:1] = False
    return rewards, values, mask


def policies(seed=0, b=4, t=9):
    g = torch.Generator().manual_seed(seed + 1000)
    return tuple(-2 * torch.rand(2, b, t, generator=g, dtype=torch.float64))


# --- gae


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("lam", [1.0, 0.95, 0.3, 0.0])
@pytest.mark.parametrize("t", [1, 2, 3, 8, 21])
def test_gae_equals_the_loop(gamma, lam, t):
    rewards, values, mask = batch(t, 5, t)
    for found, expected in zip(
        gae(rewards, values, mask, gamma, lam), naive.gae(rewards, values, mask, gamma, lam), strict=True
    ):
        torch.testing.assert_close(found, expected)
        assert found[~mask].abs().sum() == 0


@FEW
@given(
    seed=st.integers(0, 9999),
    b=st.integers(0, 5),
    t=st.integers(0, 40),
    share=st.sampled_from([0.1, 0.7, 1.0]),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
def test_gae_any_shape(seed, b, t, share, gamma, lam):
    rewards, values, mask = batch(seed, b, t, share)
    found, expected = gae(rewards, values, mask, gamma, lam), naive.gae(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(found, expected)
    order = torch.randperm(b, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(gae(rewards[order], values[order], mask[order], gamma, lam)[0], found[0][order])


def test_gae_golden():
    """gamma lambda = 1/4. Errors of the three steps: 0 + 1/2 * 4 - 2 = 0, 1 + 1/2 * 2 - 4 = -2, 3 - 2 = 1."""
    mask = torch.tensor([[False, True, True, False, True, False]])
    rewards = torch.tensor([[9.0, 0.0, 1.0, 9.0, 3.0, 9.0]])
    values = torch.tensor([[9.0, 2.0, 4.0, 9.0, 2.0, 9.0]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[0.0, -0.4375, -1.75, 0.0, 1.0, 0.0]]
    assert returns.tolist() == [[0.0, 1.5625, 2.25, 0.0, 3.0, 0.0]]


def test_lambda_one_is_monte_carlo_and_lambda_zero_is_the_td_error():
    rewards, values, mask = batch()
    kept = torch.where(mask, rewards, 0.0)
    to_go = kept.flip(1).cumsum(1).flip(1)  # the undiscounted return
    advantages, returns = gae(rewards, values, mask, 1.0, 1.0)
    torch.testing.assert_close(returns, torch.where(mask, to_go, 0.0))
    torch.testing.assert_close(advantages, torch.where(mask, to_go - values, 0.0))
    everywhere = torch.ones_like(mask)
    advantages, returns = gae(rewards, values, everywhere, 0.9, 0.0)
    following = torch.cat([values[:, 1:], torch.zeros(4, 1).double()], 1)
    torch.testing.assert_close(advantages, rewards + 0.9 * following - values)
    torch.testing.assert_close(returns, rewards + 0.9 * following)


def test_terminal_value_zero():
    """Nothing comes after the last token of the mask, whatever the head says of the padding, or past the row's end."""
    rewards, values = torch.zeros(2, 4), torch.tensor([[1.0, 2.0, 7.0, 7.0], [1.0, 2.0, 3.0, 4.0]])
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    for lam, first in ((0.0, [[1.0, -2.0, 0.0, 0.0], [1.0, 1.0, 1.0, -4.0]]), (1.0, (-values * mask).tolist())):
        assert gae(rewards, values, mask, 1.0, lam)[0].tolist() == first
    _, targets = vtrace(rewards, values, values, values, mask, lam=0.0)
    assert targets.tolist() == [[2.0, 0.0, 0.0, 0.0], [2.0, 3.0, 4.0, 0.0]]


@pytest.mark.parametrize("lam", [0.0, 0.8, 1.0])
def test_gae_skips_observation_tokens(lam):
    """Two turns with tool output between them are one episode: cutting the output's tokens out changes nothing."""
    rewards, values, _ = batch(3, 2, 12)
    mask = torch.tensor([[False] * 2 + [True] * 3 + [False] * 4 + [True] * 2 + [False]]).expand(2, 12)
    kept = torch.ones(2, 5, dtype=torch.bool)
    cut = gae(rewards[mask].view(2, 5), values[mask].view(2, 5), kept, 0.9, lam)
    junk = torch.where(mask, values, 1e3)  # what the head says of observations
    for found, expected in zip(gae(rewards, junk, mask, 0.9, lam), cut, strict=True):
        torch.testing.assert_close(found[mask].view(2, 5), expected)
        assert found[~mask].abs().sum() == 0
    lp, rollout = policies(0, 2, 12)
    whole = vtrace(rewards, junk, lp, rollout, mask, 0.9, lam=lam)
    short = vtrace(*(x[mask].view(2, 5) for x in (rewards, values, lp, rollout)), kept, 0.9, lam=lam)
    for found, expected in zip(whole, short, strict=True):
        torch.testing.assert_close(found[mask].view(2, 5), expected)
    returns = discounted_returns(rewards, mask, 0.9)
    torch.testing.assert_close(returns[mask].view(2, 5), discounted_returns(rewards[mask].view(2, 5), kept, 0.9))


def test_reward_lands_on_last_response_token_not_pad():
    mask = torch.tensor(
        [
            [False, True, True, False, False],
            [True, False, True, True, True],
            [True, True, False, True, False],
            [False] * 5,
        ]
    )
    placed = rewards_to_tokens(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask)
    assert placed.tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 2], [0, 0, 0, 3, 0], [0] * 5]
    assert gae(placed, torch.zeros(4, 5), mask, lam=1.0)[1].tolist() == [
        [0, 1, 1, 0, 0],
        [2, 0, 2, 2, 2],
        [3, 3, 0, 3, 0],
        [0] * 5,
    ]
    misplaced = torch.zeros(4, 5)
    misplaced[:, -1] = 7.0  # a reward on padding belongs to no action
    assert gae(misplaced, torch.zeros(4, 5), mask)[0][[0, 2, 3]].abs().max() == 0


def test_lambda_of_each_row():
    rewards, values, mask = batch()
    lam = torch.tensor([0.2, 1.0, 0.0, 0.95], dtype=torch.float64)
    found = gae(rewards, values, mask, 0.99, lam)
    torch.testing.assert_close(found, naive.gae(rewards, values, mask, 0.99, lam))
    for row in range(4):
        one = gae(rewards[row : row + 1], values[row : row + 1], mask[row : row + 1], 0.99, lam[row].item())
        torch.testing.assert_close(one[0][0], found[0][row])
    on_policy = vtrace(rewards, values, values, values, mask, 0.99, lam=lam)
    torch.testing.assert_close(on_policy, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_lambda_may_be_a_0d_tensor(dtype):
    rewards, values, mask = batch()
    lam = torch.tensor(0.5, dtype=dtype)
    torch.testing.assert_close(gae(rewards, values, mask, 0.99, lam), gae(rewards, values, mask, 0.99, 0.5))
    found, expected = (vtrace(rewards, values, values, values, mask, 0.99, lam=x) for x in (lam, 0.5))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lam", [1.0, 0.99999, 0.95, 0.5, 1e-30, 0.0])
def test_long_rows_keep_their_digits(dtype, lam):
    """32k tokens with gaps, gamma * lambda from 0 to 1: no power under- or overflows into the result."""
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 2, 2**15, generator=g).to(dtype)
    mask = torch.rand(2, 2**15, generator=g) < 0.9
    found, _ = gae(rewards, values, mask, 1.0, lam)
    expected, _ = naive.gae(rewards, values, mask, 1.0, torch.full((2,), lam, dtype=dtype))
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert found.dtype == dtype and error < (5e-5 if dtype == torch.float32 else 1e-12)


# --- discounted_returns


@FEW
@given(seed=st.integers(0, 999), t=st.integers(0, 30), gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_discounted_returns_equal_the_loop(seed, t, gamma):
    rewards, _, mask = batch(seed, 3, t)
    expected = naive.discounted_returns(rewards, mask, gamma)
    torch.testing.assert_close(discounted_returns(rewards, mask, gamma), expected)


def test_discounted_returns_golden():
    rewards = torch.tensor([[1.0, 9.0, 2.0, 4.0]])
    mask = torch.tensor([[True, False, True, True]])
    assert discounted_returns(rewards, mask, 0.5).tolist() == [[3.0, 0.0, 4.0, 4.0]]
    assert discounted_returns(rewards, mask).tolist() == [[7.0, 0.0, 6.0, 4.0]]


# --- vtrace


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 0.5), (0.7, 1.0), (math.inf, math.inf)])
@pytest.mark.parametrize("lam", [1.0, 0.9, 0.0])
def test_vtrace_equals_the_loop(rho_bar, c_bar, lam):
    rewards, values, mask = batch()
    arguments = (rewards, values, *policies(), mask, 0.9, lam, rho_bar, c_bar)
    for found, expected in zip(vtrace(*arguments), naive.vtrace(*arguments), strict=True):
        torch.testing.assert_close(found, expected)
        assert found[~mask].abs().sum() == 0


@FEW
@given(seed=st.integers(0, 9999), b=st.integers(0, 4), t=st.integers(0, 20), lam=st.floats(0, 1))
def test_vtrace_any_shape(seed, b, t, lam):
    rewards, values, mask = batch(seed, b, t)
    arguments = (rewards, values, *policies(seed, b, t), mask, 0.95, lam, 1.0, 1.0)
    torch.testing.assert_close(vtrace(*arguments), naive.vtrace(*arguments))


def test_vtrace_golden():
    """Ratios 1/2 and 2 (cut to 1). Errors: 1/2 * (0 + 4 - 2) = 1 and 1 * (6 - 4) = 2; c of the first step is 1/2."""
    lp, rollout = torch.tensor([[0.5, 9.0, 2.0]]).log(), torch.tensor([[1.0, 1.0, 1.0]]).log()
    rewards, values = torch.tensor([[0.0, 9.0, 6.0]]), torch.tensor([[2.0, 9.0, 4.0]])
    advantages, targets = vtrace(rewards, values, lp, rollout, torch.tensor([[True, False, True]]))
    torch.testing.assert_close(targets, torch.tensor([[4.0, 0.0, 6.0]]))  # 2 + 1 + 1/2 * 2
    torch.testing.assert_close(advantages, torch.tensor([[2.0, 0.0, 2.0]]))  # 1/2 * (0 + 6 - 2)


@pytest.mark.parametrize("lam", [1.0, 0.9, 0.0])
def test_vtrace_on_policy_is_gae(lam):
    rewards, values, mask = batch()
    lp, _ = policies()
    advantages, targets = vtrace(rewards, values, lp, lp, mask, 0.9, lam=lam)
    expected, returns = gae(rewards, values, mask, 0.9, lam)
    torch.testing.assert_close(targets, returns)
    torch.testing.assert_close(advantages, expected)
    if lam == 1.0:
        torch.testing.assert_close(targets, discounted_returns(rewards, mask, 0.9))


@pytest.mark.parametrize("gap", [25.0, 1e4, math.inf])
def test_vtrace_extreme_ratios_stay_finite(gap):
    rewards, values, mask = batch()
    zero = torch.zeros_like(values)
    for sign in (1, -1):
        unbounded = vtrace(rewards, values, zero + sign * gap, zero, mask, rho_bar=math.inf)
        outputs = vtrace(rewards, values, zero + sign * gap, zero, mask)
        assert all(x.isfinite().all() for x in (*unbounded, *outputs))
    torch.testing.assert_close(outputs.returns, torch.where(mask, values, 0.0))  # ratio 0: nothing is learnt
    assert outputs.advantages.abs().max() < 1e-7


# --- rewards_to_tokens, length_adaptive_lambda


@FEW
@given(seed=st.integers(0, 999), b=st.integers(0, 5), t=st.integers(0, 8))
def test_rewards_to_tokens_any_shape(seed, b, t):
    rewards, _, mask = batch(seed, b, max(t, 1))
    mask = mask[:, :t]
    expected = torch.zeros(b, t).double()
    for row in range(b):
        if at := steps(mask[row].tolist()):
            expected[row, at[0]] = rewards[row, 0]
    assert torch.equal(rewards_to_tokens(rewards[:, 0], mask), expected)


def test_an_unscored_sample_stays_in_its_row():
    mask = torch.tensor([[True, True], [True, True]])
    rewards = torch.tensor([math.nan, 1.0])
    advantages, returns = gae(rewards_to_tokens(rewards, mask), torch.zeros(2, 2), mask, lam=1.0)
    assert advantages[0].isnan().all() and advantages[1].tolist() == [1.0, 1.0]
    scored = mask & ~rewards.isnan()[:, None]
    advantages, returns = gae(rewards_to_tokens(rewards, scored), torch.zeros(2, 2), scored, lam=1.0)
    assert advantages.tolist() == returns.tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_length_adaptive_lambda_golden():
    mask = torch.arange(400)[None] < torch.tensor([400, 40, 20, 10, 0])[:, None]
    torch.testing.assert_close(length_adaptive_lambda(mask), torch.tensor([0.95, 0.5, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(length_adaptive_lambda(mask, 0.1), torch.tensor([0.975, 0.75, 0.5, 0.0, 0.0]))
    assert length_adaptive_lambda(mask, 10.0)[-1] == 0
    gapped = mask & (torch.arange(400) % 2 == 0)  # the length is the mask's count
    torch.testing.assert_close(length_adaptive_lambda(gapped)[0], torch.tensor(0.9))
    reach = sum(length_adaptive_lambda(mask)[0].item() ** k for k in range(4000))
    assert reach == pytest.approx(0.05 * 400, rel=1e-4)  # the weights add up to alpha * length


# --- all of them


def every(rewards, values, mask, lp, rollout):
    return [
        *gae(rewards, values, mask, 0.9, 0.8),
        *vtrace(rewards, values, lp, rollout, mask, 0.9),
        discounted_returns(rewards, mask, 0.9),
        masked_whiten(rewards, mask),
        rewards_to_tokens(rewards[:, 1], mask),
    ]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e300])
def test_masked_values_never_leak(bad):
    rewards, values, mask = batch()
    clean = every(rewards, values, mask, *policies())
    dirty = every(
        *(torch.where(mask, x, bad) for x in (rewards, values)), mask, *(torch.where(mask, x, bad) for x in policies())
    )
    for one, other in zip(clean[:-1], dirty[:-1], strict=True):
        assert torch.equal(one, other) and one[~mask].abs().sum() == 0


def test_inputs_stay_as_they_were_and_no_gradient_flows():
    rewards, values, mask = batch(share=1.0)
    mask[:] = True
    tensors = [x.requires_grad_() for x in (rewards, values, *policies())]
    before = [x.detach().clone() for x in tensors]
    for out in every(tensors[0], tensors[1], mask, *tensors[2:])[:-1]:
        assert not out.requires_grad
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True)) and mask.all()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (1, 1)])
def test_empty(shape):
    zeros, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    outputs = [*gae(zeros, zeros, mask), *vtrace(zeros, zeros, zeros, zeros, mask), discounted_returns(zeros, mask)]
    outputs += [masked_whiten(zeros, mask), rewards_to_tokens(torch.zeros(shape[0]), mask)]
    assert all(x.shape == shape and x.abs().sum() == 0 for x in outputs)
    assert length_adaptive_lambda(mask).shape == shape[:1]


def test_bfloat16_and_mixed_inputs():
    rewards, values, mask = batch()
    low = [x.bfloat16() for x in (rewards, values, *policies())]
    for one, other in zip(
        every(low[0], low[1], mask, *low[2:]), every(*(x.float() for x in low[:2]), mask, *low[2:]), strict=True
    ):
        assert one.dtype == torch.float32 and torch.equal(one, other)
    assert gae(rewards, low[1], mask)[0].dtype == torch.float64


def test_one_mask_after_the_other():
    rewards, values = (torch.randn(3, 6, generator=torch.Generator().manual_seed(i)) for i in range(2))
    masks = torch.rand(4, 3, 6, generator=torch.Generator().manual_seed(2)) < 0.6
    came = torch.func.vmap(lambda mask: gae(rewards, values, mask, 0.9, 0.8))(masks)
    for i, mask in enumerate(masks):
        for x, expected in zip(came, gae(rewards, values, mask, 0.9, 0.8), strict=True):
            torch.testing.assert_close(x[i], expected)


def test_no_value_is_read_on_the_host():
    with FakeTensorMode():
        x, mask = torch.zeros(2, 5), torch.ones(2, 5, dtype=torch.bool)
        every(x, x, mask, x, x)
        gae(x, x, mask, lam=length_adaptive_lambda(mask))
        masked_whiten(x, mask)


FLOAT, BOOL = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: gae(torch.zeros(3), FLOAT, BOOL), "rewards"),
        (lambda: gae(FLOAT, torch.zeros(2, 4), BOOL), "values"),
        (lambda: gae(FLOAT, FLOAT, FLOAT), "mask"),
        (lambda: gae(FLOAT, FLOAT, BOOL, gamma=1.1), "gamma"),
        (lambda: gae(FLOAT, FLOAT, BOOL, lam=-0.1), "lam"),
        (lambda: gae(FLOAT, FLOAT, BOOL, lam=math.nan), "lam"),
        (lambda: gae(FLOAT, FLOAT, BOOL, lam=torch.ones(3)), "lam"),
        (lambda: gae(FLOAT, FLOAT, BOOL, lam=torch.ones(2).long()), "lam"),
        (lambda: discounted_returns(torch.zeros(3), BOOL), "rewards"),
        (lambda: discounted_returns(FLOAT, BOOL, -1.0), "gamma"),
        (lambda: vtrace(FLOAT, FLOAT, torch.zeros(2), FLOAT, BOOL), "logprobs"),
        (lambda: vtrace(FLOAT, FLOAT, FLOAT, torch.zeros(2, 4), BOOL), "rollout_logprobs"),
        (lambda: vtrace(FLOAT, torch.zeros(3), FLOAT, FLOAT, BOOL), "values"),
        (lambda: vtrace(FLOAT, FLOAT, FLOAT, FLOAT, BOOL, rho_bar=0.0), "rho_bar"),
        (lambda: vtrace(FLOAT, FLOAT, FLOAT, FLOAT, BOOL, c_bar=-1.0), "c_bar"),
        (lambda: vtrace(FLOAT, FLOAT, FLOAT, FLOAT, BOOL, lam=2.0), "lam"),
        (lambda: rewards_to_tokens(FLOAT, BOOL), "rewards"),
        (lambda: rewards_to_tokens(torch.zeros(3), BOOL), "rewards"),
        (lambda: rewards_to_tokens(torch.zeros(2), FLOAT), "mask"),
        (lambda: length_adaptive_lambda(FLOAT), "mask"),
        (lambda: length_adaptive_lambda(BOOL, 0.0), "alpha"),
        (lambda: masked_whiten(torch.zeros(2), BOOL), "x"),
        (lambda: masked_whiten(FLOAT, BOOL, eps=-1.0), "eps"),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        call()
