"""Nothing scales advantages behind the caller's back."""

import pytest
import torch

from rlkit.advantages import dr_grpo_advantages, gae, grpo_advantages, masked_whiten
from rlkit.losses import cispo_loss, clipped_policy_loss, gspo_loss, reinforce_loss


def test_no_std_really_off():
    """Scaled or not is a function's name; there is no switch that a truthy string could leave on."""
    rewards, groups = torch.tensor([0.0, 1.0, 5.0, 9.0]), torch.tensor([0, 0, 1, 1])
    assert dr_grpo_advantages(rewards, groups).tolist() == [-0.5, 0.5, -2.0, 2.0]
    torch.testing.assert_close(grpo_advantages(rewards, groups).abs(), torch.full((4,), 0.5**0.5), atol=1e-5, rtol=0)
    for truthy in ("false", "none", "no"):
        with pytest.raises(TypeError):
            dr_grpo_advantages(rewards, groups, truthy)
        with pytest.raises((TypeError, ValueError)):
            grpo_advantages(rewards, groups, truthy)


@pytest.mark.parametrize("loss", [clipped_policy_loss, gspo_loss, cispo_loss, reinforce_loss])
def test_no_double_whitening(loss):
    """Twice the reward is twice the advantage and twice the loss: neither GAE nor a loss whitens again."""
    g = torch.Generator().manual_seed(0)
    rewards, values, logprobs, old = (torch.randn(3, 6, generator=g, dtype=torch.float64) for _ in range(4))
    mask = torch.rand(3, 6, generator=g) < 0.7
    once, returns = gae(rewards, values, mask)
    twice, doubled = gae(2 * rewards, 2 * values, mask)
    torch.testing.assert_close(twice, 2 * once)
    torch.testing.assert_close(doubled, 2 * returns)
    assert once[mask].mean().abs() > 1e-3
    torch.testing.assert_close(loss(logprobs, old, twice, mask), 2 * loss(logprobs, old, once, mask))
    white = masked_whiten(once, mask)
    torch.testing.assert_close(masked_whiten(white, mask), white, atol=1e-6, rtol=1e-6)
