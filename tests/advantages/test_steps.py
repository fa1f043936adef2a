"""GiGPO and HGPO: advantages of an agent's steps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reward_batches import FEW

from rlkit.advantages import discounted_returns, gigpo_advantages, grpo_advantages, hgpo_advantages
from rlkit.advantages.naive import steps as naive

ROOT2 = 2**0.5


def episodes(seed, b=6, s=5, states=3):
    """Of several lengths, from few states, so that most are met again."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, s + 1, (b, 1), generator=g)
    return {
        "rewards": torch.randn(b, s, generator=g, dtype=torch.float64),
        "group_ids": torch.tensor([7, -3])[torch.randint(0, 2, (b,), generator=g)],
        "state_ids": torch.randint(0, states, (b, s), generator=g) * 10**12,
        "mask": torch.arange(s) < lengths,
    }


def test_golden_gigpo():
    """Two episodes from one prompt; both start in state 1. Returns there are 1 and 0 with gamma 1/2: 1/2 + 1/2, 0."""
    rewards = torch.tensor([[0.5, 1.0], [0.0, 9.0]])
    mask = torch.tensor([[True, True], [True, False]])
    states, groups = torch.tensor([[1, 2], [1, 2]]), torch.zeros(2).long()
    episode = torch.tensor([1.0, -1.0]) / ROOT2  # of 1.5 and 0
    step = torch.tensor([[1 / ROOT2, 0.0], [-1 / ROOT2, 0.0]])  # one step alone in state 2
    ours = gigpo_advantages(rewards, groups, states, mask, gamma=0.5, step_weight=2.0, eps=0.0)
    torch.testing.assert_close(ours, (episode[:, None] + 2 * step) * mask)


def test_golden_hgpo():
    """State 3 twice after state 1 and once after 2: with one state of history the third is alone."""
    rewards = torch.tensor([[0.0, 3.0], [0.0, 1.0], [0.0, 2.0]])
    states, mask = torch.tensor([[1, 3], [1, 3], [2, 3]]), torch.ones(3, 2, dtype=torch.bool)
    ours = hgpo_advantages(rewards, torch.zeros(3).long(), states, mask, gamma=0.0, history=1, eps=0.0)
    deviation = 1.0  # of 3, 1 and 2
    first = (1 * 1 / deviation + 2 * 1 / ROOT2) / 3  # weights 1 and 2
    torch.testing.assert_close(ours, torch.tensor([[0.0, first], [0.0, -first], [0.0, 0.0]]))


@FEW
@given(seed=st.integers(0, 9999), gamma=st.sampled_from([0.0, 0.9, 1.0]), history=st.integers(0, 4))
def test_equal_the_loops(seed, gamma, history):
    given = episodes(seed)
    torch.testing.assert_close(gigpo_advantages(**given, gamma=gamma), naive.gigpo_advantages(**given, gamma=gamma))
    options = dict(gamma=gamma, history=history, alpha=0.5)
    torch.testing.assert_close(hgpo_advantages(**given, **options), naive.hgpo_advantages(**given, **options))


def test_without_step_weight_gigpo_is_grpo_of_whole_episodes():
    given = episodes(1)
    expected = grpo_advantages((given["rewards"] * given["mask"]).sum(1), given["group_ids"])
    ours = gigpo_advantages(**given, step_weight=0.0)
    torch.testing.assert_close(ours, expected[:, None] * given["mask"])


def test_without_history_hgpo_is_grpo_of_equal_states():
    given = episodes(2)
    mask, returns = given["mask"], discounted_returns(given["rewards"], given["mask"], 0.95)
    pairs = given["group_ids"][:, None] * 10**13 + given["state_ids"]
    expected = grpo_advantages(returns[mask], pairs[mask])
    torch.testing.assert_close(hgpo_advantages(**given, history=0)[mask], expected)


@pytest.mark.parametrize("function", [gigpo_advantages, hgpo_advantages])
def test_episodes_permute_and_what_was_not_taken_is_nothing(function):
    given = episodes(3)
    expected = function(**given)
    order = torch.randperm(6)
    torch.testing.assert_close(function(**{name: x[order] for name, x in given.items()}), expected[order])
    spoilt = given | {
        "rewards": given["rewards"].masked_fill(~given["mask"], torch.nan),
        "state_ids": given["state_ids"].masked_fill(~given["mask"], 5),
    }
    torch.testing.assert_close(function(**spoilt), expected)
    assert (expected[~given["mask"]] == 0).all() and expected.abs().max() > 0


@pytest.mark.parametrize("function", [gigpo_advantages, hgpo_advantages])
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0)])
def test_no_steps(function, shape):
    out = function(
        torch.zeros(shape), torch.zeros(shape[0]).long(), torch.zeros(shape).long(), torch.ones(shape).bool()
    )
    assert out.shape == shape


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(state_ids=torch.zeros(6, 5)), "state_ids"),
        (dict(state_ids=torch.zeros(6).long()), "state_ids"),
        (dict(group_ids=torch.zeros(5).long()), "group_ids"),
        (dict(rewards=torch.zeros(6)), "rewards"),
        (dict(gamma=1.5), "gamma"),
        (dict(eps=-1.0), "eps"),
    ],
)
@pytest.mark.parametrize("function", [gigpo_advantages, hgpo_advantages])
def test_errors_name_the_argument(function, change, name):
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
        function(**episodes(0) | change)
