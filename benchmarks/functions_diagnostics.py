"""Groups of what a run logs: ratios, values, mismatch, as numbers."""

import math
from statistics import pvariance

from functions_common import PEERS, group
from functions_divergences import k3
from functions_losses import exp20

from rlkit.losses import (
    align_with_tokens,
    effective_sample_size,
    explained_variance,
    importance_weights,
    mismatch_stats,
    ratio_stats,
    sequence_mismatch_stats,
    sequence_ratio_stats,
    token_mean,
    value_stats,
)

if "verl" in PEERS:
    from verl.trainer.ppo import core_algos as verl
    from verl.trainer.ppo import rollout_corr_helper as verl_mismatch


def ratios_of(b):
    p, q, mask = b.nested("logprobs", "old", "mask")
    rows = [*zip(p, q, mask, strict=True)]
    return [[x - y for x, y, on in zip(*row, strict=True) if on] for row in rows]


@group("ratio metrics")
def ratio(b):
    logprobs, advantages = b.logprobs.detach(), b.nested("advantages", "mask")

    def loop():
        each = [x for row in ratios_of(b) for x in row]
        signs = [a for row, on in zip(*advantages, strict=True) for a, t in zip(row, on, strict=True) if t]
        bound = sum(math.exp(x) > 1.2 if a > 0 else math.exp(x) < 0.8 for x, a in zip(each, signs, strict=True))
        return bound / len(each), sum(map(k3, each)) / len(each), math.exp(max(each))

    def ours():
        return tuple(x.item() for x in ratio_stats(logprobs, b.old, b.advantages, b.mask).values())

    return {"rlkit": ours, "loop": loop}


@group("sequence ratio metrics")
def sequence_ratio(b):
    logprobs, advantages = b.logprobs.detach(), b.nested("advantages", "mask")

    def loop():
        bound, kl, largest = [], [], 0.0
        for log_ratios, signs, on in zip(ratios_of(b), *advantages, strict=True):
            s = math.exp(sum(log_ratios) / len(log_ratios))
            trained = [a for a, t in zip(signs, on, strict=True) if t]
            bound.append(sum(s > 1 + 4e-4 if a > 0 else a < 0 and s < 1 - 3e-4 for a in trained) / len(trained))
            kl.append(sum(map(k3, log_ratios)) / len(log_ratios))
            largest = max(largest, s)
        return sum(bound) / len(bound), sum(kl) / len(kl), largest

    def ours():
        return tuple(x.item() for x in sequence_ratio_stats(logprobs, b.old, b.advantages, b.mask).values())

    return {"rlkit": ours, "loop": loop}


@group("value metrics", "verl")
def value_metrics(b):
    """verl's come with its loss."""
    new, m = b.values + 0.4 * b.dense, b.mask
    lists = [x.tolist() for x in (new, b.values, b.advantages, b.mask)]

    def ours():
        found = value_stats(new, b.values, b.advantages, b.mask)
        return found["value/clip_fraction"].item(), found["value/squared_error"].item()

    def loop():
        rows = [*zip(*lists, strict=True)]
        each = [(v, old, r) for row in rows for v, old, r, on in zip(*row, strict=True) if on]
        error = [(v - r) ** 2 for v, _, r in each]
        binds = [(min(max(v, old - 0.5), old + 0.5) - r) ** 2 > x for (v, old, r), x in zip(each, error, strict=True)]
        return sum(binds) / len(each), sum(error) / len(each)

    def theirs():
        clipped = verl.compute_value_loss(new, b.advantages, b.values, m, 0.5)[1]
        return clipped.item(), 2 * verl.compute_value_loss(new, b.advantages, b.values, m, 1e9)[0].item()

    return {"rlkit": ours, "loop": loop, "verl": theirs}


@group("explained variance")
def explained(b):
    lists = [x.tolist() for x in (b.values, b.advantages, b.mask)]

    def loop():
        each = [(v, r) for row in zip(*lists, strict=True) for v, r, on in zip(*row, strict=True) if on]
        return 1 - pvariance(r - v for v, r in each) / pvariance(r for _, r in each)

    return {"rlkit": lambda: explained_variance(b.values, b.advantages, b.mask).item(), "loop": loop}


@group("mismatch metrics, token and sequence", "verl")
def mismatch(b):
    """What both have; verl's function has no largest difference, ours no variants of the perplexities."""
    logprobs, m = b.logprobs.detach(), b.long_mask
    names = ("mismatch/kl", "mismatch/sequence_chi2", "mismatch/ppl", "mismatch/rollout_ppl", "mismatch/ppl_ratio")
    theirs = ("k3_kl", "chi2_seq", "training_ppl", "rollout_ppl", "ppl_ratio")

    def ours():
        found = mismatch_stats(logprobs, b.old, b.mask) | sequence_mismatch_stats(logprobs, b.old, b.mask)
        found = {name: x.item() for name, x in found.items()}  # as verl does
        return found["mismatch/w2_mean"], *(found[name] for name in names)

    def loop():
        rows = ratios_of(b)
        each, n = [x for row in rows for x in row], len(rows)
        p, q, mask = b.nested("logprobs", "old", "mask")
        mean = [
            [sum(x for x, on in zip(row, m, strict=True) if on) / sum(m) for row, m in zip(rows_, mask, strict=True)]
            for rows_ in (p, q)
        ]
        return (
            sum(math.exp(2 * x) for x in each) / len(each),
            sum(map(k3, each)) / len(each),
            sum(math.exp(2 * min(max(sum(row), -20.0), 20.0)) - 1 for row in rows) / n,
            *(sum(math.exp(-x) for x in side) / n for side in mean),
            sum(math.exp(y - x) for x, y in zip(*mean, strict=True)) / n,
        )

    def verls():
        found = verl_mismatch.compute_offpolicy_metrics(logprobs, b.old, m)
        return found["chi2_token"] + 1, *(found[name] for name in theirs)

    return {"rlkit": ours, "loop": loop, "verl": verls}


@group("effective sample size of weights")
def sample_size(b):
    logprobs = b.logprobs.detach()

    def ours():
        weights = importance_weights(logprobs, b.old, b.mask)
        return effective_sample_size(token_mean(weights, b.mask), token_mean(weights.square(), b.mask))

    def loop():
        weights = [min(exp20(x), 2.0) for row in ratios_of(b) for x in row]
        return sum(weights) ** 2 / len(weights) / sum(w * w for w in weights)

    return {"rlkit": ours, "loop": loop}


@group("values of positions, aligned with tokens")
def aligned(b):
    x = b.nested("dense")
    return {"rlkit": lambda: align_with_tokens(b.dense), "loop": lambda: [[0.0, *row[:-1]] for row in x]}
