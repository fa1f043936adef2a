"""Groups of what else `rlkit.losses` has on [B, T] tensors: policy losses, KL estimates, masks, diagnostics."""

import math
from functools import partial
from types import SimpleNamespace

import functions_loops as loops
from functions_common import PEERS, group, with_gradient
from functions_losses import (
    by_sequence,
    by_token,
    exp20,
    inside,
    loop_row,
    mask_of,
    mismatch_group,
    policy_group,
    weights_of,
)

from rlkit.losses import (
    align_with_tokens,
    effective_sample_size,
    geometric_importance_weights,
    gppo_loss,
    gspo_token_loss,
    importance_weights,
    kl_abs,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_k3_weighted,
    kl_straight_through,
    luspo_loss,
    mismatch_stats,
    off_policy_sequence_mask,
    ratio_stats,
    reinforce_loss,
    sequence_masked_importance_weights,
    sequence_max_divergence_mask,
    sequence_mean,
    sequence_mean_divergence_mask,
    sequence_mismatch_stats,
    sequence_sum_divergence_mask,
    token_divergence_mask,
    token_mean,
    top_entropy_mask,
    topr_loss,
)

if "verl" in PEERS:
    from verl.trainer.ppo import core_algos as verl
    from verl.trainer.ppo import rollout_corr_helper as verl_mismatch
if "trl" in PEERS:
    from trl import GRPOTrainer

# --- policy losses


def by_row(rule):
    """`rule(log-ratios, advantages, logprobs)` of a row's tokens: (loss, derivative by its logprob) of each."""

    def loop(logprobs, old, advantages, mask, weights):
        loss, gradient = 0.0, []
        for p, q, a, on, w in zip(logprobs, old, advantages, mask, weights, strict=True):
            tokens = [t for t in range(len(p)) if on[t]]
            each = a if isinstance(a, list) else [a] * len(p)
            found = rule([p[t] - q[t] for t in tokens], [each[t] for t in tokens], [p[t] for t in tokens])
            g = [0.0] * len(p)
            for t, (x, d) in zip(tokens, found, strict=True):
                loss, g[t] = loss + w * x, w * d
            gradient.append(g)
        return loss, gradient

    return loop


def gspo_token(low, high):
    def rule(ratios, advantages, _):
        s = math.exp(sum(ratios) / len(ratios))
        held = min(max(s, 1 - low), 1 + high)
        return [(max(-a * s, -a * held), -a * s if -a * s >= -a * held else 0.0) for a in advantages]

    return rule


def luspo(low, high):
    """A sequence's loss times its n tokens, of whose gradient each of them has as much as the loss itself."""

    def rule(ratios, a):
        n, s = len(ratios), math.exp(sum(ratios) / len(ratios))
        loss, other = -a * s, -a * min(max(s, 1 - low), 1 + high)
        return n * max(loss, other), [loss if loss >= other else 0.0] * n

    return rule


def gppo(low, high):
    def rule(p, q, a):
        ratio = math.exp(p - q)
        x = -a * (min(ratio, 1 + high) if a > 0 else max(ratio, 1 - low))
        return x, x

    return rule


def topr(ratios, advantages, logprobs):
    weight = math.exp(min(max(sum(ratios), -20.0), 0.0))
    costs = [-a * (weight if a < 0 else 1.0) for a in advantages]
    return [(c * p, c) for c, p in zip(costs, logprobs, strict=True)]


policy_group("REINFORCE, sequence mean", reinforce_loss, by_token(loops.reinforce), reduce=sequence_mean)
policy_group("GPPO", gppo_loss, by_token(gppo(0.2, 0.2)))
policy_group(
    "GSPO-token",
    gspo_token_loss,
    by_row(gspo_token(3e-4, 4e-4)),
    verl=("gspo", dict(clip_ratio_low=3e-4, clip_ratio_high=4e-4)),
    reduce=sequence_mean,
)
policy_group(
    "LUSPO",
    luspo_loss,
    by_sequence(luspo(2e-3, 2.5e-3)),
    trl=("luspo", dict(epsilon_low=2e-3, epsilon_high=2.5e-3, importance_sampling_level="sequence")),
    reduce=sequence_mean,
    a_row=True,
)
policy_group("TOPR", topr_loss, by_row(topr))


@group("top-entropy mask", "trl")
def top_entropy(b):
    entropy = -b.old  # >= 0
    lists, m = (entropy.tolist(), b.nested("mask")), b.float_mask
    same = SimpleNamespace(pad_across_processes=lambda x, **_: x, gather=lambda x: x)

    def loop():
        taken = sorted(x for row, on in zip(*lists, strict=True) for x, t in zip(row, on, strict=True) if t)
        place = 0.8 * (len(taken) - 1)  # between two entropies
        least = taken[math.ceil(place - 1e-6)]
        return [[t and x >= least for x, t in zip(row, on, strict=True)] for row, on in zip(*lists, strict=True)]

    def theirs():
        return GRPOTrainer.get_high_entropy_mask(SimpleNamespace(accelerator=same), entropy, m, 0.8)

    return {"rlkit": lambda: top_entropy_mask(entropy, b.mask, 0.2), "loop": loop, "trl": theirs}


@group("off-policy sequence mask", "trl")
def off_policy(b):
    logprobs, advantages, m, threshold = b.logprobs.detach(), b.rewards, b.float_mask, 1e-3
    lists = b.nested("logprobs", "old", "rewards", "mask")

    def of_row(p, q, a, on):
        drift = sum(y - x for x, y, t in zip(p, q, on, strict=True) if t) / sum(on)
        return [t and (a >= 0 or drift <= threshold) for t in on]

    def theirs():
        return GRPOTrainer.get_off_policy_mask(advantages[:, None], logprobs, b.old, m, threshold) * m

    return {
        "rlkit": lambda: off_policy_sequence_mask(logprobs, b.old, advantages, b.mask, threshold),
        "loop": lambda: [of_row(*row) for row in zip(*lists, strict=True)],
        "trl": theirs,
    }


# --- KL estimates: rules of (logprob, reference, old logprob)


def kl_group(name, ours, rule, kind=None):
    @group(name, *["verl"] * (kind is not None))
    def build(b):
        lists, m, third = b.nested("logprobs", "old", "sampler", "mask"), b.float_mask, b.sampler

        def theirs():
            return with_gradient(verl.agg_loss(verl.kl_penalty(b.logprobs, b.old, kind), m, "token-mean"), b.logprobs)

        return {
            "rlkit": lambda: with_gradient(token_mean(ours(b.logprobs, b.old, third, b.mask), b.mask), b.logprobs),
            "loop": lambda: loops.by_token(rule, *lists, loops.token_weights(lists[3])),
            "verl": theirs,
        }


def without_third(function):
    return lambda p, q, _, mask: function(p, q, mask)


def weighted_k3(p, q, old):
    ratio, (x, slope) = exp20(p - old), loops.kl_k3(p, q, old)
    return ratio * x, ratio * (slope + x)


kl_group("KL, k1", without_third(kl_k1), lambda p, q, _: (p - q, 1.0), "k1")
kl_group("KL, k2", without_third(kl_k2), lambda p, q, _: ((p - q) ** 2 / 2, p - q), "k2")
kl_group("KL, absolute", without_third(kl_abs), lambda p, q, _: (abs(p - q), (p > q) - (p < q)), "abs")
kl_group(
    "KL, k3, straight through",
    lambda p, q, _, mask: kl_straight_through(p, q, kl_k3(p, q, mask), mask),
    lambda p, q, old: (loops.kl_k3(p, q, old)[0], p - q),
    "k3+",
)
kl_group("KL, k3, importance-weighted", kl_k3_weighted, weighted_k3)


# --- masks and weights against the sampler's mismatch


def k3(x):
    return math.exp(x) - 1 - x


def divergences(keep):
    """`keep(k3 of a row's tokens)`: a bool, or one of each token."""

    def of_row(p, q, on):
        kept = keep([k3(x - y) for x, y, t in zip(p, q, on, strict=True) if t])
        answers = iter(kept) if isinstance(kept, list) else None
        return [t and (next(answers) if answers else kept) for t in on]

    return of_row


TOKEN, SUM, MEAN, MAX = 0.0049, 5.5, 0.0048, 0.06
for name, mask, keep, theirs in (
    ("token", token_divergence_mask, lambda x: [y <= TOKEN for y in x], ("token_k3", TOKEN)),
    ("sum", sequence_sum_divergence_mask, lambda x: sum(x) <= SUM, ("seq_sum_k3", SUM)),
    (
        "mean",
        sequence_mean_divergence_mask,
        lambda x: sum(x) / len(x) <= MEAN,
        ("seq_mean_k3", MEAN),
    ),
    ("largest", sequence_max_divergence_mask, lambda x: max(x) <= MAX, ("seq_max_k3", MAX)),
):
    mismatch_group(
        f"rejection mask, {name} k3",
        lambda p, q, on, mask=mask, high=theirs[1]: mask(kl_k3(q, p, on), on, high),
        divergences(keep),
        mask_of(*theirs),
    )
mismatch_group(
    "importance weights, IcePop, sequence",
    partial(sequence_masked_importance_weights, low=0.1, high=10.0),
    loop_row(lambda x: inside(x, 0.1, 10.0) * exp20(x)),
    weights_of("sequence", "0.1_10.0"),
)


@group("importance weights, geometric mean")
def geometric(b):
    logprobs, lists = b.logprobs.detach(), b.nested("logprobs", "old", "mask")
    loop = loop_row(lambda x: min(exp20(x), 2.0), mean=True)
    return {
        "rlkit": lambda: geometric_importance_weights(logprobs, b.old, b.mask),
        "loop": lambda: [loop(*rows) for rows in zip(*lists, strict=True)],
    }


# --- diagnostics, as numbers


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


@group("mismatch metrics, token and sequence", "verl")
def mismatch(b):
    """What both have; verl's function has no largest difference, ours no variants of the perplexities."""
    logprobs, m = b.logprobs.detach(), b.float_mask
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
