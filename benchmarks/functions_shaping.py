"""Groups of what else `rlkit.advantages` has: V-trace, advantages no peer has alone, filters, rewards that are shaped.

TRL computes its advantages in the middle of a method that also generates and scores, so it stands beside ours where a
function of its own has the formula.
"""

import math
from collections import defaultdict

import torch
from functions_advantages import GAMMA, loop_centred, loop_expand, loop_groups
from functions_common import PEERS, group

from rlkit.advantages import (
    RunningMoments,
    entropy_advantages,
    expand_to_tokens,
    fipo_advantages,
    gigpo_advantages,
    hgpo_advantages,
    informative_groups,
    kl_in_reward,
    leave_one_out_grpo_advantages,
    length_adaptive_lambda,
    lite_ppo_advantages,
    maxrl_advantages,
    n_step_returns,
    optimal_values,
    overlong_penalty,
    pf_ppo_power_weights,
    pf_ppo_weights,
    rae_advantages,
    rewards_to_tokens,
    scaled_rewards,
    vtrace,
)

if "trl" in PEERS:
    from trl.rewards import get_soft_overlong_punishment


@group("V-trace, tool turns")
def v_trace(b):
    logprobs, lists = b.logprobs.detach(), b.nested("logprobs", "old", "dense", "values", "mask")

    def loop():
        targets, advantages = [], []
        for p, q, r, v, on in zip(*lists, strict=True):
            target, advantage, value, excess = [0.0] * len(r), [0.0] * len(r), 0.0, 0.0  # of the next token
            for t in range(len(r) - 1, -1, -1):
                if on[t]:
                    ratio = min(math.exp(min(p[t] - q[t], 20.0)), 1.0)
                    advantage[t] = ratio * (r[t] + GAMMA * (value + excess) - v[t])
                    excess = ratio * (r[t] + GAMMA * value - v[t]) + GAMMA * ratio * excess
                    value = v[t]
                    target[t] = value + excess
            targets.append(target)
            advantages.append(advantage)
        return advantages, targets

    return {"rlkit": lambda: vtrace(b.dense, b.values, logprobs, b.old, b.mask, GAMMA), "loop": loop}


@group("n-step returns, n = 5, tool turns")
def n_step(b):
    lists = b.nested("dense", "values", "mask")

    def of_row(r, v, on):
        tokens, out = [t for t in range(len(r)) if on[t]], [0.0] * len(r)
        for i, t in enumerate(tokens):
            window = tokens[i : i + 5]
            after = v[tokens[i + 5]] if i + 5 < len(tokens) else 0.0
            out[t] = sum(GAMMA**k * r[s] for k, s in enumerate(window)) + GAMMA ** len(window) * after
        return out

    return {
        "rlkit": lambda: n_step_returns(b.dense, b.values, b.mask, 5, GAMMA),
        "loop": lambda: [of_row(*row) for row in zip(*lists, strict=True)],
    }


@group("FIPO, tool turns")
def fipo(b):
    logprobs, lists = b.logprobs.detach(), b.nested("logprobs", "old", "advantages", "mask")
    gamma = 2 ** (-1 / 32)

    def of_row(p, q, a, on):
        out, future = [0.0] * len(p), 0.0
        for t in range(len(p) - 1, -1, -1):
            if on[t]:
                ratio = math.exp(p[t] - q[t])
                future = (p[t] - q[t] if ratio <= 10 else 0.0) + gamma * future
                weight = min(max(math.exp(future), 0.8), 1.2)
                out[t] = a[t] * (min(weight, 1.0) if a[t] < 0 and ratio > 4 else weight)
        return out

    return {
        "rlkit": lambda: fipo_advantages(b.advantages, logprobs, b.old, b.mask),
        "loop": lambda: [of_row(*row) for row in zip(*lists, strict=True)],
    }


@group("advantages with entropy")
def with_entropy(b):
    entropy = -b.old
    lists = [x.tolist() for x in (b.advantages, entropy, b.mask)]

    def of_row(*row):
        return [a + min(0.4 * h, abs(a) / 2) if on else 0.0 for a, h, on in zip(*row, strict=True)]

    return {
        "rlkit": lambda: entropy_advantages(b.advantages, entropy, b.mask),
        "loop": lambda: [of_row(*row) for row in zip(*lists, strict=True)],
    }


@group("advantages of roles")
def roles(b):
    r, role, start = b.nested("rewards"), b.ids % 4, torch.zeros(4)

    def loop():
        running, out = start.tolist(), []
        for x, k in zip(r, role.tolist(), strict=True):
            out.append(x - running[k])
            running[k] = 0.95 * running[k] + 0.05 * x
        return torch.tensor(out), torch.tensor(running)

    return {"rlkit": lambda: rae_advantages(b.rewards, role, start), "loop": loop}


def steps_group(name, ours, theirs):
    """16 steps an episode, in one of 8 states each."""

    @group(name)
    def build(b):
        rewards, states = b.dense[:, :16].contiguous(), (b.values[:, :16].abs() * 8).long() % 8
        mask = torch.arange(16) < 1 + b.lengths % 16
        lists = [x.tolist() for x in (rewards, b.ids, states, mask)]
        return {"rlkit": lambda: ours(rewards, b.ids, states, mask), "loop": lambda: theirs(*lists)}


def normed(x, group):
    if len(group) < 2:
        return 0.0
    mean = sum(group) / len(group)
    return (x - mean) / (math.sqrt(sum((y - mean) ** 2 for y in group) / (len(group) - 1)) + 1e-6)


def with_states(rewards, states, mask):
    """Of each episode's steps: (return, the states up to it)."""
    found = []
    for r, s, on in zip(rewards, states, mask, strict=True):
        g, row = 0.0, []
        for t in range(sum(on) - 1, -1, -1):
            g = r[t] + 0.95 * g
            row.append((g, s[: t + 1]))
        found.append(row[::-1])
    return found


def spread(rows, mask):
    return [[*row, *[0.0] * (len(on) - len(row))] for row, on in zip(rows, mask, strict=True)]


def gigpo(rewards, ids, states, mask):
    steps, totals = with_states(rewards, states, mask), [sum(r[: sum(on)]) for r, on in zip(rewards, mask, strict=True)]
    same, episodes = defaultdict(list), defaultdict(list)
    for row, k, total in zip(steps, ids, totals, strict=True):
        episodes[k].append(total)
        for g, seen in row:
            same[k, seen[-1]].append(g)

    def one(g, seen, k, total):
        return normed(total, episodes[k]) + normed(g, same[k, seen[-1]])

    rows = zip(steps, ids, totals, strict=True)
    return spread([[one(g, seen, k, total) for g, seen in row] for row, k, total in rows], mask)


def hgpo(rewards, ids, states, mask):
    steps, same = with_states(rewards, states, mask), defaultdict(list)
    for row, k in zip(steps, ids, strict=True):
        for g, seen in row:
            for n in range(1, min(len(seen), 3) + 1):
                same[k, *seen[-n:]].append(g)

    def one(g, seen, k):
        each = [(n, normed(g, same[k, *seen[-n:]])) for n in range(1, min(len(seen), 3) + 1)]
        return sum(n * a for n, a in each) / max(1, sum(n for n, a in each if a))

    return spread([[one(g, seen, k) for g, seen in row] for row, k in zip(steps, ids, strict=True)], mask)


steps_group("GiGPO, 16 steps", gigpo_advantages, gigpo)
steps_group("HGPO, 16 steps", hgpo_advantages, hgpo)


def of_group(name, ours, formula, tokens=True):
    """One number a sample: `formula(rewards, ids)` of lists; spread over its tokens, as the other advantages."""

    @group(name)
    def build(b):
        r, ids, mask = b.nested("rewards", "ids", "mask")
        if not tokens:
            return {"rlkit": lambda: ours(b.rewards, b.ids), "loop": lambda: formula(r, ids)}
        return {
            "rlkit": lambda: expand_to_tokens(ours(b.rewards, b.ids), b.mask),
            "loop": lambda: loop_expand(formula(r, ids), mask),
        }


def maxrl(r, ids):
    def formula(i, rows):
        mean = sum(r[j] for j in rows) / len(rows)
        return (r[i] - mean) / mean if mean > 0 else 0.0

    return loop_groups(r, ids, formula)


def lite_ppo(r, ids):
    mean = sum(r) / len(r)
    scale = math.sqrt(sum((x - mean) ** 2 for x in r) / (len(r) - 1)) + 1e-6
    return [x / scale for x in loop_centred(r, ids)]


def best_random(r, ids):
    """PF-PPO: half for the best, half for the others; no two rewards are equal."""
    return loop_groups(r, ids, lambda i, rows: 0.5 if r[i] == max(r[j] for j in rows) else 0.5 / (len(rows) - 1))


def by_square(r, ids):
    return loop_groups(r, ids, lambda i, rows: r[i] ** 2 / sum(r[j] ** 2 for j in rows))


def differing(r, ids):
    return loop_groups(r, ids, lambda i, rows: min(r[j] for j in rows) < max(r[j] for j in rows))


def leave_one_out(r, ids):
    def formula(i, rows):
        others = [r[j] for j in rows if j != i]
        mean = sum(others) / len(others)
        return (r[i] - mean) / (math.sqrt(sum((x - mean) ** 2 for x in others) / (len(others) - 1)) + 1e-6)

    return loop_groups(r, ids, formula)


def optimal(r, ids):
    return loop_groups(r, ids, lambda i, rows: 0.5 * math.log(sum(math.exp(r[j] / 0.5) for j in rows) / len(rows)))


of_group("GRPO, leave one out", leave_one_out_grpo_advantages, leave_one_out)
of_group("A*-PO's values", optimal_values, optimal, tokens=False)
of_group("MaxRL", maxrl_advantages, maxrl)
of_group("Lite PPO", lite_ppo_advantages, lite_ppo)
of_group("PF-PPO weights", pf_ppo_weights, best_random, tokens=False)
of_group("PF-PPO weights, power", pf_ppo_power_weights, by_square, tokens=False)
of_group("informative groups", lambda r, ids: informative_groups((r > -0.5).float(), ids),
         lambda r, ids: differing([x > -0.5 for x in r], ids), tokens=False)  # fmt: skip


@group("rewards to tokens")
def to_tokens(b):
    rewards, mask = b.nested("rewards", "mask")

    def of_row(r, on):
        last = max(t for t, taken in enumerate(on) if taken)
        return [r if t == last else 0.0 for t in range(len(on))]

    return {
        "rlkit": lambda: rewards_to_tokens(b.rewards, b.mask),
        "loop": lambda: [of_row(*row) for row in zip(rewards, mask, strict=True)],
    }


@group("KL in the reward", "verl")
def reward_with_kl(b):
    """verl: the lines of its `apply_kl_penalty`, whose module wants more packages than verl installs."""
    kl, m = b.logprobs.detach() - b.old, b.long_mask
    lists = [x.tolist() for x in (b.dense, kl, b.mask)]

    def of_row(*row):
        return [r - 0.1 * x if on else 0.0 for r, x, on in zip(*row, strict=True)]

    return {
        "rlkit": lambda: kl_in_reward(b.dense, kl, b.mask, 0.1),
        "loop": lambda: [of_row(*row) for row in zip(*lists, strict=True)],
        "verl": lambda: b.dense - 0.1 * (kl * m),
    }


@group("overlong penalty", "trl")
def overlong(b):
    lengths, longest, buffer = b.lengths[:, 0], int(0.9 * b.t), int(0.2 * b.t)
    n, responses = lengths.tolist(), [[0] * n for n in lengths.tolist()]
    return {
        "rlkit": lambda: overlong_penalty(lengths, longest, buffer),
        "loop": lambda: [-min(max((x - longest + buffer) / buffer, 0.0), 1.0) for x in n],
        "trl": lambda: get_soft_overlong_punishment(longest, buffer)(responses),
    }


@group("length-adaptive lambda")
def adaptive_lambda(b):
    mask = b.nested("mask")
    return {
        "rlkit": lambda: length_adaptive_lambda(b.mask),
        "loop": lambda: [max(0.0, 1 - 1 / (0.05 * sum(on))) for on in mask],
    }


@group("rewards scaled by their running moments")
def running(b):
    r = b.nested("rewards")

    def ours():
        moments = RunningMoments(count=64.0, mean=0.5, square=32.0).update(b.rewards)
        return scaled_rewards(b.rewards, moments.mean, moments.std, clip=1.0)

    def loop():
        """As if 32 rewards of 0.5 + sqrt(0.5) and as many of 0.5 - sqrt(0.5) had come before."""
        seen = [0.5 + s * math.sqrt(0.5) for s in (1, -1) for _ in range(32)] + r
        mean = sum(seen) / len(seen)
        std = math.sqrt(sum((x - mean) ** 2 for x in seen) / len(seen))
        return [min(max((x - mean) / std, -1.0), 1.0) for x in r]

    return {"rlkit": ours, "loop": loop}
