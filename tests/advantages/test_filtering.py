"""Which groups teach anything, and drawing samples by weight."""

import torch
from reward_batches import NAN, close

from rlkit.advantages.filtering import informative_groups, pf_ppo_indices, pf_ppo_weights


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
