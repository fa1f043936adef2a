"""Statistics over ranks: what each of several gets is its part of what one rank gets that has all rows."""

import inspect
from functools import partial

import pytest
import torch
from reward_batches import batch, over_ranks, token_batch

import rlkit.advantages
import rlkit.losses

PARTS = (slice(0, 5), slice(5, 5), slice(5, 14))  # the second rank has no row


def groups_stay_together(ids):
    """Ids that no two of the parts share."""
    return torch.cat([ids[rows] + 10**13 * k for k, rows in enumerate(PARTS)])


def split(function, *given):
    return torch.cat(over_ranks(lambda rows, add: function(*(x[rows] for x in given), global_sum=add), *PARTS))


def cases():
    rewards, ids = batch(5)
    values, mask = token_batch(5, 14, 6)
    ids, lengths = groups_stay_together(ids), mask.sum(1)
    several = torch.stack([rewards, rewards.square()], 1)
    advantages = rlkit.advantages
    baseline, gdpo = advantages.reinforce_plus_plus_baseline_advantages, advantages.gdpo_advantages
    plus_plus = partial(advantages.reinforce_plus_plus_advantages, gamma=0.9)
    return {
        "masked_whiten": (advantages.masked_whiten, values, mask),
        "gpg_advantages": (advantages.gpg_advantages, rewards, ids),
        "lite_ppo_advantages": (advantages.lite_ppo_advantages, rewards, ids),
        "reinforce_plus_plus_advantages": (plus_plus, rewards, mask),
        "reinforce_plus_plus_baseline_advantages": (baseline, rewards, ids),
        "reinforce_plus_plus_baseline_advantages by token": (
            lambda r, i, n, **over: baseline(r, i, lengths=n, **over), rewards, ids, lengths
        ),
        "gdpo_advantages": (gdpo, several, ids),
        "gdpo_advantages by token": (lambda r, i, n, **over: gdpo(r, i, lengths=n, **over), several, ids, lengths),
    }  # fmt: skip


@pytest.mark.parametrize("name", cases())
def test_parts_over_ranks_are_the_whole(name):
    function, *given = cases()[name]
    whole = function(*given)
    torch.testing.assert_close(split(function, *given), whole)
    alone = torch.cat([function(*(x[rows] for x in given)) for rows in PARTS])
    assert not torch.allclose(alone, whole)  # it matters


def test_kto_kl_estimate():
    logprobs, ref_logprobs = torch.randn(2, 14, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logprobs += 0.3
    whole = rlkit.losses.kto_kl_estimate(logprobs, ref_logprobs)
    found = over_ranks(lambda rows, add: rlkit.losses.kto_kl_estimate(logprobs[rows], ref_logprobs[rows], add), *PARTS)
    assert whole > 0
    torch.testing.assert_close(torch.stack(found), whole.expand(3))


def test_explained_variance():
    (values, mask), (returns, _) = token_batch(5, 14, 6), token_batch(6, 14, 6)
    whole = rlkit.losses.explained_variance(values, returns, mask)
    one = lambda rows, add: rlkit.losses.explained_variance(values[rows], returns[rows], mask[rows], add)  # noqa: E731
    torch.testing.assert_close(torch.stack(over_ranks(one, *PARTS)), whole.expand(3))
    assert not torch.isclose(rlkit.losses.explained_variance(values[:5], returns[:5], mask[:5]), whole)


def test_load_balancing_loss():
    logits = torch.randn(14, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.rand(14, 6, generator=torch.Generator().manual_seed(2)) < 0.6
    whole = rlkit.losses.load_balancing_loss(logits, mask, 2)
    one = lambda rows, add: rlkit.losses.load_balancing_loss(logits[rows], mask[rows], 2, mask.sum(), add)  # noqa: E731
    torch.testing.assert_close(sum(over_ranks(one, *PARTS)), whole)


def test_every_function_with_a_global_sum_is_here():
    every = [getattr(p, n) for p in (rlkit.losses, rlkit.advantages) for n in p.__all__]
    have = {f.__name__ for f in every if inspect.isfunction(f) and "global_sum" in inspect.signature(f).parameters}
    others = {"explained_variance", "kto_kl_estimate", "load_balancing_loss"}
    assert have == {name.split()[0] for name in cases()} | others
