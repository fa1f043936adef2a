"""n-step returns, FIPO's weights of later tokens, and advantages with entropy."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reward_batches import FEW, close, token_batch

from rlkit.advantages import discounted_returns, entropy_advantages, fipo_advantages, gae, n_step_returns
from rlkit.advantages.naive import returns as naive
from rlkit.losses import clipped_policy_loss


def problem(seed, b=5, t=9):
    g = torch.Generator().manual_seed(seed)
    values, gamma = torch.randn(b, t, generator=g, dtype=torch.float64), torch.rand(b, t, generator=g).double()
    return *token_batch(seed, b, t), values, gamma, torch.randn(b, generator=g, dtype=torch.float64)


def test_golden_n_step():
    """The third token is tool output; the response was cut off where the value is 8."""
    rewards, values = torch.tensor([[1.0, 2.0, 99.0, 4.0]]), torch.tensor([[10.0, 20.0, 99.0, 40.0]])
    mask, end = torch.tensor([[True, True, False, True]]), torch.tensor([8.0])
    close(n_step_returns(rewards, values, mask, 1, 0.5, end), [[1 + 10.0, 2 + 20.0, 0, 4 + 4.0]])
    close(n_step_returns(rewards, values, mask, 2, 0.5, end), [[1 + 1 + 10.0, 2 + 2 + 2.0, 0, 4 + 4.0]])
    close(n_step_returns(rewards, values, mask, 3, 0.5, end), [[1 + 1 + 1 + 1.0, 2 + 2 + 2.0, 0, 8.0]])
    gamma = torch.tensor([[0.5, 0.0, 7.0, 1.0]])  # an episode ends with the second token
    close(n_step_returns(rewards, values, mask, 9, gamma, end), [[1 + 1.0, 2.0, 0, 12.0]])


@FEW
@given(seed=st.integers(0, 9999), n=st.integers(1, 12))
def test_n_step_equals_the_loop(seed, n):
    rewards, mask, values, gamma, end = problem(seed)
    ours, expected = (f(rewards, values, mask, n, gamma, end) for f in (n_step_returns, naive.n_step_returns))
    torch.testing.assert_close(ours, expected)


@FEW
@given(seed=st.integers(0, 9999), gamma=st.sampled_from([0.0, 0.9, 1.0]))
def test_n_step_has_known_ends(seed, gamma):
    rewards, mask, values, _, _ = problem(seed)
    td = gae(rewards, values, mask, gamma, 0.0).returns
    torch.testing.assert_close(n_step_returns(rewards, values, mask, 1, gamma), td)
    torch.testing.assert_close(
        n_step_returns(rewards, values, mask, 9, gamma), discounted_returns(rewards, mask, gamma)
    )


def test_golden_fipo():
    """At gamma 1/2, from the last token back: log 1/2, log 3/2 + half of it, half of that."""
    ratios = torch.tensor([[1.0, 1.5, 99.0, 0.5]])
    mask, zeros = torch.tensor([[True, True, False, True]]), torch.zeros(1, 4)
    log = torch.log(ratios)
    last, second = log[0, 3].item(), log[0, 1].item() + 0.5 * log[0, 3].item()
    weights = torch.tensor([[0.5 * second, second, 0.0, last]]).exp().clamp(0.6, 1.05)
    ours = fipo_advantages(torch.tensor([2.0]), log, zeros, mask, 0.5, 0.6, 1.05)
    torch.testing.assert_close(ours, torch.where(mask, 2 * weights, 0))
    # a ratio above the bound does not count, and a bad token that has become much likelier gets no more weight
    ours = fipo_advantages(torch.tensor([-1.0]), log, zeros, mask, 0.5, 0.6, 1.05, ratio_high=1.4, safe_ratio=1.2)
    weights = torch.tensor([[0.25 * last, 0.5 * last, 0.0, last]]).exp().clamp(0.6, 1.05)
    torch.testing.assert_close(ours, torch.where(mask, -weights, 0))
    ours = fipo_advantages(torch.tensor([-1.0]), log, zeros, mask, 0.0, 0.6, 1.6, safe_ratio=1.2)
    close(ours, [[-1.0, -1.0, 0.0, -0.6]])


@FEW
@given(seed=st.integers(0, 9999))
def test_fipo_changes_nothing_on_policy_and_scales_the_clipped_loss_else(seed):
    advantages, mask = token_batch(seed, 4, 8)
    old, shift = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(fipo_advantages(advantages, old, old, mask), torch.where(mask, advantages, 0))
    new = old + 0.3 * shift
    weighted = fipo_advantages(advantages, new, old, mask)
    weight = torch.where(mask, weighted / advantages, 1)
    assert (weight >= 0.8 - 1e-12).all() and (weight <= 1.2 + 1e-12).all()
    expected = weight * clipped_policy_loss(new, old, advantages, mask, dual_clip=3.0)
    torch.testing.assert_close(clipped_policy_loss(new, old, weighted, mask, dual_clip=3.0), expected)


def test_golden_entropy_advantages():
    advantages, mask = torch.tensor([[1.0, -1.0, 0.1, 0.0]]), torch.tensor([[True, True, True, False]])
    entropy = torch.tensor([[0.5, 2.0, 2.0, 9.0]])
    close(entropy_advantages(advantages, entropy, mask), [[1.2, -0.5, 0.15, 0.0]])


@FEW
@given(seed=st.integers(0, 9999), kappa=st.sampled_from([1.01, 2.0, 9.0]))
def test_entropy_never_changes_a_sign(seed, kappa):
    advantages, mask = token_batch(seed, 4, 8)
    entropy = 5 * torch.rand(4, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    shaped = entropy_advantages(advantages, entropy, mask, 1.0, kappa)
    assert shaped[mask].sign().equal(advantages[mask].sign()) and (shaped[mask] >= advantages[mask]).all()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x, m: n_step_returns(x, x, m, 0), "n"),
        (lambda x, m: n_step_returns(x, x, m, 1, 2.0), "gamma"),
        (lambda x, m: n_step_returns(x, x, m, 1, x[0]), "gamma"),
        (lambda x, m: n_step_returns(x, x, m, 1, 1.0, x), "bootstrap"),
        (lambda x, m: fipo_advantages(x, x, x, m, gamma=2.0), "gamma"),
        (lambda x, m: fipo_advantages(x, x, x, m, low=1.5), "low"),
        (lambda x, m: fipo_advantages(x, x, x, m, high=0.9), "high"),
        (lambda x, m: fipo_advantages(x, x, x, m, ratio_high=0.0), "ratio_high"),
        (lambda x, m: entropy_advantages(x, x, m, alpha=-1.0), "alpha"),
        (lambda x, m: entropy_advantages(x, x, m, kappa=1.0), "kappa"),
        (lambda x, m: entropy_advantages(x, x[0], m), "entropy"),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
        call(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool))
