"""Which groups teach anything, and drawing samples by weight."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reward_batches import FEW, NAN, batch, close, loop

from rlkit.advantages.filtering import informative_groups, pf_ppo_indices, pf_ppo_weights


def loop_pf_ppo(r, members, out):
    """Weights by rank, averaged over all orders of samples that tie."""
    n = len(members)
    orders = [o for o in itertools.permutations(members) if all(r[a] >= r[b] for a, b in itertools.pairwise(o))]
    for order in orders:
        for place, i in enumerate(order):
            out[i] += (1.0 if n == 1 else 0.5 if place == 0 else 0.5 / (n - 1)) / len(orders)


@FEW
@given(seed=st.integers(0, 9999), b=st.integers(0, 8))
def test_pf_ppo_weights_equal_the_loop(seed, b):
    rewards, groups = batch(seed, b)
    out = pf_ppo_weights(rewards, groups)
    assert out.tolist() == pytest.approx(loop(loop_pf_ppo, rewards.tolist(), groups.tolist()), abs=1e-12)


def test_golden_filters():
    rewards, groups = torch.tensor([5.0, 1.0, 2.0, 7.0, 3.0, 3.0]), torch.tensor([0, 0, 0, 1, 2, 2])
    assert informative_groups(rewards, groups).tolist() == [True, True, True, False, False, False]
    close(pf_ppo_weights(rewards, groups), [0.5, 0.25, 0.25, 1, 0.5, 0.5])
    close(pf_ppo_weights(rewards, groups, 0.5, 0.5), [0.5, 0.5, 0, 1, 0.5, 0.5])
    close(pf_ppo_weights(rewards, groups, 1.0), [1, 0, 0, 1, 0.5, 0.5])
    assert informative_groups(torch.tensor([1.0, NAN, 0.0, NAN]), torch.tensor([0, 0, 0, 1])).tolist() == [True] * 3 + [
        False
    ]


def test_resampling_follows_the_weights_and_the_seed():
    weights = torch.tensor([0.5, 0.0, 0.25, 0.25])
    rows = pf_ppo_indices(weights, 8000, torch.Generator().manual_seed(0))
    assert rows.dtype == torch.int64
    torch.testing.assert_close(rows.bincount(minlength=4) / 8000, weights, atol=0.02, rtol=0)
    assert torch.equal(rows, pf_ppo_indices(weights, 8000, torch.Generator().manual_seed(0)))
    assert not torch.equal(rows, pf_ppo_indices(weights, 8000, torch.Generator().manual_seed(1)))
    assert pf_ppo_indices(torch.zeros(0), 0, torch.Generator()).shape == (0,)
