"""Random rewards in groups, and the functions that take them, for several test files."""

import math
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import settings

from rlkit.advantages.baselines import (
    gpg_advantages,
    maxrl_advantages,
    opo_advantages,
    passk_advantages,
    passk_leave_one_out_advantages,
    rloo_advantages,
)
from rlkit.advantages.filtering import informative_groups, pf_ppo_weights
from rlkit.advantages.whitened import gdpo_advantages, reinforce_plus_plus_baseline_advantages

FEW = settings(max_examples=25, deadline=None, derandomize=True)
NAN = math.nan
LENGTHS = torch.tensor([3, 1, 0, 2, 7, 4, 1, 5, 2, 2, 6, 1, 3, 1])


def passk2(rewards, groups):
    return passk_advantages(rewards, groups, 2)


def opo(rewards, groups):
    """Lengths that go with the reward, not with the row, so that rows can be permuted."""
    return opo_advantages(rewards, groups, 1 + (7 * rewards.double().nan_to_num()).abs().long() % 5)


def gdpo_one(rewards, groups):
    return gdpo_advantages(torch.stack([rewards, rewards * rewards], 1), groups)


BASELINES = [rloo_advantages, opo, gpg_advantages, maxrl_advantages, passk2, passk_leave_one_out_advantages]
BATCHWISE = [reinforce_plus_plus_baseline_advantages, gdpo_one]
WEIGHTS = [informative_groups, pf_ppo_weights]
ALL = BASELINES + BATCHWISE + WEIGHTS


def batch(seed=0, b=14, binary=False):
    g = torch.Generator().manual_seed(seed)
    rewards = torch.rand(b, generator=g, dtype=torch.float64)
    rewards = (rewards > 0.6).double() if binary or seed % 3 == 0 else rewards
    rewards[torch.rand(b, generator=g) < 0.15] = NAN
    return rewards, torch.tensor([7, -3, 10**12, 0])[torch.randint(0, 4, (b,), generator=g)]


def groups_of(rewards, groups):
    """Lists of scored row numbers."""
    return [
        [i for i, g in enumerate(groups) if g == group and not math.isnan(rewards[i])]
        for group in dict.fromkeys(groups)
    ]


def white(x, weights, eps=1e-8):
    """Weighted mean and variance of a list by repeating each value."""
    values = [v for v, w in zip(x, weights, strict=True) for _ in range(w)]
    mean = statistics.mean(values) if values else 0.0
    var = statistics.variance(values) if len(values) > 1 else 0.0
    return [(v - mean) / math.sqrt(var + eps) if w else 0.0 for v, w in zip(x, weights, strict=True)]


def token_batch(seed, b, t):
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randn(b, t, generator=g, dtype=torch.float64)
    return rewards, torch.rand(b, t, generator=g) < 0.6


def close(out, expected):
    torch.testing.assert_close(out, torch.tensor(expected, dtype=out.dtype))


def over_ranks(function, *parts):
    """What `function(part, global_sum)` gives on each of as many ranks as there are parts, which are threads here."""
    barrier, given = threading.Barrier(len(parts), timeout=60), [None] * len(parts)

    def on(rank):
        def global_sum(x):
            given[rank] = x
            barrier.wait()
            total = sum(given)
            barrier.wait()
            return total

        return function(parts[rank], global_sum)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(on, range(len(parts))))


def loop(function, rewards, groups):
    out = [0.0] * len(rewards)
    for members in groups_of(rewards, groups):
        function(rewards, members, out)
    return out
