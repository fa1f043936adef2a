"""RunningMoments and scaled_rewards: rewards on the scale of all rewards so far."""

import math

import pytest
import torch

from rlkit.advantages import RunningMoments, scaled_rewards


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_running_moments_are_those_of_everything(offset):
    batches = [torch.randn(n, generator=torch.Generator().manual_seed(n)).double() + offset for n in (1, 5, 0, 3, 40)]
    batches[1][2] = math.nan
    moments, everything = RunningMoments(), []
    for batch in batches:
        everything += [x for x in batch.tolist() if x == x]
        assert moments.update(batch) is moments
        mean = sum(everything) / len(everything)
        std = (sum((x - mean) ** 2 for x in everything) / len(everything)) ** 0.5 or 1.0
        assert moments.count == len(everything) and moments.mean == pytest.approx(mean, rel=1e-12)
        assert moments.std == pytest.approx(std, rel=1e-7)
    again = RunningMoments(**vars(moments)).update(batches[0])
    assert again.count == moments.count + 1 and vars(RunningMoments(**vars(moments))) == vars(moments)


def test_running_moments_over_ranks_are_those_of_one():
    """Two ranks, of which one has no reward: each is told the sums of both."""
    first, second = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([math.nan])
    said = []
    alone = RunningMoments().update(first, lambda x: said.append(x) or x)
    sums = iter(said)
    other = RunningMoments().update(second, lambda x: x + next(sums))
    assert vars(other) == vars(alone) == {"count": 3.0, "mean": pytest.approx(7 / 3), "square": pytest.approx(14 / 3)}


def test_scaled_rewards():
    rewards = torch.tensor([1.0, 3.0, -9.0, math.nan])
    expected = torch.tensor([0.0, 1.0, -2.5, math.nan])
    torch.testing.assert_close(scaled_rewards(rewards, 1.0, 2.0, 2.5), expected, equal_nan=True)
    assert scaled_rewards(rewards[:3], 1.0, 2.0).tolist() == [0.0, 1.0, -5.0]
    fresh = RunningMoments()
    assert torch.equal(scaled_rewards(rewards[:3], fresh.mean, fresh.std), rewards[:3])
    assert RunningMoments().update(torch.ones(4)).std == 1.0  # all alike: no division by 0
    assert scaled_rewards(torch.tensor([1, 2]), 0.0, 1.0).dtype == torch.float32
    assert scaled_rewards(rewards.double(), 0.0, 1.0).dtype == torch.float64


TABLE = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: RunningMoments().update(TABLE), "rewards"),
        (lambda: scaled_rewards(TABLE, 0.0, 1.0), "rewards"),
        (lambda: scaled_rewards(torch.zeros(2), 0.0, 0.0), "std"),
        (lambda: scaled_rewards(torch.zeros(2), 0.0, 1.0, 0.0), "clip"),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        call()
