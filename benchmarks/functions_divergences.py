"""Groups of what else `rlkit.losses` has on [B, T] tensors: policy losses, KL estimates, masks, diagnostics."""

import math
from functools import partial
from types import SimpleNamespace

import functions_loops as loops
import torch
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
    chord_phi_loss,
    dft_loss,
    flash_reinforce_loss,
    geometric_importance_weights,
    gppo_loss,
    gspo_loss,
    gspo_token_loss,
    kl_abs,
    kl_binary,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_k3_weighted,
    kl_straight_through,
    load_balancing_loss,
    luspo_loss,
    m2po_loss,
    off_policy_sequence_mask,
    reinforce_loss,
    sequence_masked_importance_weights,
    sequence_max_divergence_mask,
    sequence_mean,
    sequence_mean_divergence_mask,
    sequence_sapo_loss,
    sequence_sum_divergence_mask,
    token_divergence_mask,
    token_mean,
    top_entropy_mask,
    topr_loss,
)

if "verl" in PEERS:
    from verl.trainer.ppo import core_algos as verl
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


def sequence_sapo(positive, negative):
    def rule(ratios, a):
        n, s, tau = len(ratios), math.exp(sum(ratios) / len(ratios)), positive if a > 0 else negative
        gate = 1 / (1 + math.exp(-tau * (s - 1)))
        return -4 / tau * gate * a, [-4 * gate * (1 - gate) * s * a / n] * n

    return rule


def binary_kl(p, q):
    """Of probabilities: the KL of this token or another, and its derivative by the logarithm of the first."""
    kl = p * math.log(p / q) + (1 - p + 1e-8) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))
    return kl, p * (math.log(p / q) - math.log((1 - p + 1e-8) / (1 - q + 1e-8)))


def flash_reinforce(high):
    def rule(ratios, advantages, logprobs):
        p, q = [math.exp(x) for x in logprobs], [math.exp(x - r) for x, r in zip(logprobs, ratios, strict=True)]
        near = sum(binary_kl(y, x)[0] for x, y in zip(p, q, strict=True)) / len(p) <= high
        costs = [-near * a * math.exp(r) for a, r in zip(advantages, ratios, strict=True)]
        return [(c * x, c) for c, x in zip(costs, logprobs, strict=True)]

    return rule


policy_group(
    "SAPO, sequence",
    sequence_sapo_loss,
    by_sequence(sequence_sapo(1.0, 1.05)),
    trl=("sapo", dict(importance_sampling_level="sequence")),
    reduce=sequence_mean,
    a_row=True,
)
policy_group(
    "GSPO, dual clip",
    partial(gspo_loss, clip_low=3e-4, clip_high=4e-4, dual_clip=3.0),
    by_sequence(loops.gspo(3e-4, 4e-4)),  # whose ratios are never that large
    reduce=sequence_mean,
    a_row=True,
)
policy_group(
    "FlashREINFORCE", flash_reinforce_loss, by_row(flash_reinforce(3e-3)), reduce=sequence_mean, gradient_alone=True
)


@group("M2PO")
def m2po(b):
    lists = b.nested("logprobs", "old", "advantages", "mask")

    def loop():
        rows = enumerate(zip(*lists, strict=True))
        each = [(i, t, p[t] - q[t], a[t]) for i, (p, q, a, m) in rows for t in range(len(p)) if m[t]]
        away = sorted(((x * x, i, t) for i, t, x, a in each if x * a > 0), reverse=True)
        dropped, last, moment = {}, math.inf, sum(x for x, _, _ in away)
        for left, (x, i, t) in zip(range(len(away), 0, -1), away, strict=True):
            if moment / left <= 0.005 and x < last:  # what ties with the last one that goes, goes too
                break
            last = x
            dropped[i, t], moment = loops.dropped, moment - x
        return loops.by_token(loops.surrogate(), *lists, loops.token_weights(lists[3]), dropped)

    def ours():
        loss = m2po_loss(b.logprobs, b.old, b.advantages, b.mask, 0.005)
        return with_gradient(token_mean(loss, b.mask), b.logprobs)

    return {"rlkit": ours, "loop": loop}


# --- supervised losses: of the logprobs alone


def supervised_group(name, ours, weigh):
    """`weigh(p)` times the negative log-likelihood, without a gradient."""

    def rule(p, *_):
        weight = weigh(math.exp(p))
        return -weight * p, -weight

    @group(name)
    def build(b):
        lists = b.nested("logprobs", "old", "advantages", "mask")
        return {
            "rlkit": lambda: with_gradient(token_mean(ours(b.logprobs, b.mask), b.mask), b.logprobs),
            "loop": lambda: loops.by_token(rule, *lists, loops.token_weights(lists[3])),
        }


supervised_group("DFT", dft_loss, lambda p: p)
supervised_group("CHORD, phi", chord_phi_loss, lambda p: p * (1 - p))


@group("load balancing of 64 experts")
def load_balancing(_):
    g = torch.Generator().manual_seed(0)
    logits, mask = torch.randn(4, 256, 64, generator=g).requires_grad_(), torch.rand(4, 256, generator=g) < 0.8
    rows, k = logits.detach()[mask], 4

    def loop():
        n, gradient = len(rows), torch.zeros_like(logits)
        shares, p = [0.0] * 64, rows.softmax(1)
        for row in rows.tolist():
            for e in sorted(range(64), key=row.__getitem__, reverse=True)[:k]:
                shares[e] += 64 / n
        shares = torch.tensor(shares)
        gradient[mask] = p * (shares - (p * shares).sum(1, keepdim=True)) / n
        return (shares * p.mean(0)).sum(), gradient

    return {"rlkit": lambda: with_gradient(load_balancing_loss(logits, mask, k), logits), "loop": loop}


@group("top-entropy mask", "trl")
def top_entropy(b):
    entropy = -b.old  # >= 0
    lists, m = (entropy.tolist(), b.nested("mask")), b.long_mask
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
    logprobs, advantages, m, threshold = b.logprobs.detach(), b.rewards, b.long_mask, 1e-3
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
        lists, m, third = b.nested("logprobs", "old", "sampler", "mask"), b.mask, b.sampler

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
kl_group("KL, binary", without_third(kl_binary), lambda p, q, _: binary_kl(math.exp(p), math.exp(q)))


# --- masks and weights against the sampler's mismatch


def k3(x):
    return math.exp(x) - 1 - x


def divergences(keep):
    """`keep(k3 of a row's tokens)`: a bool, or one of each token."""

    def of_row(p, q, on):
        kept = keep([k3(x - y) for x, y, t in zip(p, q, on, strict=True) if t])
        responses = iter(kept) if isinstance(kept, list) else None
        return [t and (next(responses) if responses else kept) for t in on]

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
