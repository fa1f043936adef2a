"""Groups of `rlkit.advantages`. Every contestant ends at [B, T], as peers do, also where our losses need only [B].

verl's functions come from its core_algos; TRL has its advantages inside one method of its trainer.
"""

import math
from collections import defaultdict
from unittest import mock

import torch
from functions_common import LARGE, PEERS, Batch, Contestants, group

from rlkit.advantages import (
    discounted_returns,
    dr_grpo_advantages,
    expand_to_tokens,
    gae,
    gdpo_advantages,
    gpg_advantages,
    grpo_advantages,
    masked_whiten,
    opo_advantages,
    optimal_token_baseline_advantages,
    passk_advantages,
    passk_leave_one_out_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)

if "verl" in PEERS:
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos as verl
    from verl.utils.torch_functional import masked_whiten as verl_whiten

GAMMA, LAM = 0.99, 0.95


def loop_gae(rewards, values, mask, gamma, lam):
    advantages, returns = [], []
    for r, v, m in zip(rewards, values, mask, strict=True):
        a, g, advantage, value = [0.0] * len(r), [0.0] * len(r), 0.0, 0.0
        for t in range(len(r) - 1, -1, -1):
            if m[t]:
                advantage = r[t] + gamma * value - v[t] + gamma * lam * advantage
                value = v[t]
                a[t], g[t] = advantage, advantage + value
        advantages.append(a)
        returns.append(g)
    return advantages, returns


def loop_returns(rewards, mask, gamma):
    returns = []
    for r, m in zip(rewards, mask, strict=True):
        g, later = [0.0] * len(r), 0.0
        for t in range(len(r) - 1, -1, -1):
            if m[t]:
                g[t] = later = r[t] + gamma * later
        returns.append(g)
    return returns


def loop_whiten(rows, mask, eps=1e-8):
    taken = [x for row, m in zip(rows, mask, strict=True) for x, on in zip(row, m, strict=True) if on]
    mean = sum(taken) / len(taken)
    scale = math.sqrt(sum((x - mean) ** 2 for x in taken) / (len(taken) - 1) + eps)
    return [
        [(x - mean) / scale if on else 0.0 for x, on in zip(row, m, strict=True)]
        for row, m in zip(rows, mask, strict=True)
    ]


def loop_expand(advantages, mask):
    return [[a if on else 0.0 for on in m] for a, m in zip(advantages, mask, strict=True)]


def loop_groups(rewards, ids, formula):
    """One advantage a sample: `formula(i, members)` with the rows of its group."""
    members = defaultdict(list)
    for i, k in enumerate(ids):
        members[k].append(i)
    return [formula(i, members[k]) for i, k in enumerate(ids)]


def loop_centred(r, ids):
    return loop_groups(r, ids, lambda i, rows: r[i] - sum(r[j] for j in rows) / len(rows))


def loop_grpo(r, ids, eps=1e-6):
    def formula(i, rows):
        mean = sum(r[j] for j in rows) / len(rows)
        return (r[i] - mean) / (math.sqrt(sum((r[j] - mean) ** 2 for j in rows) / (len(rows) - 1)) + eps)

    return loop_groups(r, ids, formula)


def gae_and_whitening(b: Batch) -> Contestants:
    rewards, values, mask, m = b.dense, b.values, b.mask, b.long_mask
    lists = b.nested("dense", "values", "mask")

    def ours():
        advantages, returns = gae(rewards, values, mask, GAMMA, LAM)
        return masked_whiten(advantages, mask), returns

    def loop():
        advantages, returns = loop_gae(*lists, GAMMA, LAM)
        return loop_whiten(advantages, lists[2]), returns

    theirs = lambda: verl.compute_gae_advantage_return(rewards, values, m, GAMMA, LAM)  # noqa: E731
    return {"rlkit": ours, "loop": loop, "verl": theirs}


group("GAE and whitening", "verl", mask="full")(gae_and_whitening)
group("GAE and whitening, tool turns", "verl")(gae_and_whitening)
group("GAE and whitening, tool turns, 1024 x 4096", "verl", size=LARGE)(gae_and_whitening)


def gae_alone(b: Batch) -> Contestants:
    lists = b.nested("dense", "values", "mask")

    def theirs():  # verl whitens in the same function
        with mock.patch.object(verl.verl_F, "masked_whiten", lambda x, mask: x):
            return verl.compute_gae_advantage_return(b.dense, b.values, b.long_mask, GAMMA, LAM)

    return {
        "rlkit": lambda: gae(b.dense, b.values, b.mask, GAMMA, LAM),
        "loop": lambda: loop_gae(*lists, GAMMA, LAM),
        "verl": theirs,
    }


group("GAE, not whitened", "verl", mask="full")(gae_alone)
group("GAE, not whitened, tool turns", "verl")(gae_alone)


@group("masked_whiten", "verl")
def whiten(b):
    x, mask = b.nested("values", "mask")
    return {
        "rlkit": lambda: masked_whiten(b.values, b.mask),
        "loop": lambda: loop_whiten(x, mask),
        "verl": lambda m=b.long_mask: verl_whiten(b.values, m),
    }


@group("discounted returns, tool turns")
def returns(b):
    rewards, mask = b.nested("dense", "mask")
    return {
        "rlkit": lambda: discounted_returns(b.dense, b.mask, GAMMA),
        "loop": lambda: loop_returns(rewards, mask, GAMMA),
    }


def reinforce_plus_plus(given: str, theirs: str, gamma: float):
    def build(b):
        rewards, token_rewards, m = getattr(b, given), getattr(b, theirs), b.long_mask
        lists = b.nested(theirs, "mask")
        config = AlgoConfig(gamma=gamma) if "verl" in PEERS else None
        return {
            "rlkit": lambda: reinforce_plus_plus_advantages(rewards, b.mask, gamma),
            "loop": lambda: loop_whiten(loop_returns(*lists, gamma), lists[1]),
            "verl": lambda: verl.compute_reinforce_plus_plus_outcome_advantage(token_rewards, m, config=config)[0],
        }

    return build


group("REINFORCE++, outcome rewards, gamma 1", "verl")(reinforce_plus_plus("rewards", "outcome", 1.0))
group("REINFORCE++, outcome rewards, gamma 0.99", "verl")(reinforce_plus_plus("rewards", "outcome", GAMMA))
group("REINFORCE++, token rewards, gamma 0.99", "verl")(reinforce_plus_plus("dense", "dense", GAMMA))


@group("REINFORCE++ with baseline", "verl")
def reinforce_plus_plus_baseline(b):
    (r, ids, mask), m = b.nested("rewards", "ids", "mask"), b.long_mask

    def ours():
        advantages = reinforce_plus_plus_baseline_advantages(b.rewards, b.ids, lengths=b.mask.sum(1))
        return expand_to_tokens(advantages, b.mask)

    return {
        "rlkit": ours,
        "loop": lambda: loop_whiten(loop_expand(loop_centred(r, ids), mask), mask),
        "verl": lambda: verl.compute_reinforce_plus_plus_baseline_outcome_advantage(b.outcome, m, b.uid)[0],
    }


def grpo(b):
    (r, ids, mask), m = b.nested("rewards", "ids", "mask"), b.long_mask
    return {
        "rlkit": lambda: expand_to_tokens(grpo_advantages(b.rewards, b.ids), b.mask),
        "loop": lambda: loop_expand(loop_grpo(r, ids), mask),
        "verl": lambda: verl.compute_grpo_outcome_advantage(b.outcome, m, b.uid)[0],
        "verl_vectorised": lambda: verl.compute_grpo_vectorized_outcome_advantage(b.outcome, m, b.uid)[0],
    }


group("GRPO", "verl", "verl_vectorised")(grpo)
group("GRPO, 1024 x 4096", "verl", "verl_vectorised", size=LARGE)(grpo)


def one_a_sample(b: Batch, name: str):
    """verl's estimator on responses of one token: [B] in, [B] out."""
    function, rewards, mask = getattr(verl, name), b.rewards[:, None], torch.ones(b.b, 1)
    return lambda: function(rewards, mask, b.uid)[0][:, 0]


@group("GRPO, [B] to [B]", "verl", "verl_vectorised")
def grpo_alone(b):
    r, ids = b.nested("rewards", "ids")
    theirs = {
        "verl": one_a_sample(b, "compute_grpo_outcome_advantage"),
        "verl_vectorised": one_a_sample(b, "compute_grpo_vectorized_outcome_advantage"),
    } if "verl" in PEERS else {}  # fmt: skip
    return {"rlkit": lambda: grpo_advantages(b.rewards, b.ids), "loop": lambda: loop_grpo(r, ids), **theirs}


@group("Dr. GRPO", "verl", "verl_vectorised")
def dr_grpo(b):
    (r, ids, mask), m = b.nested("rewards", "ids", "mask"), b.long_mask
    plain = dict(norm_adv_by_std_in_grpo=False)
    return {
        "rlkit": lambda: expand_to_tokens(dr_grpo_advantages(b.rewards, b.ids), b.mask),
        "loop": lambda: loop_expand(loop_centred(r, ids), mask),
        "verl": lambda: verl.compute_grpo_outcome_advantage(b.outcome, m, b.uid, **plain)[0],
        "verl_vectorised": lambda: verl.compute_grpo_vectorized_outcome_advantage(b.outcome, m, b.uid, **plain)[0],
    }


def loop_rloo(r, ids):
    return loop_groups(r, ids, lambda i, rows: r[i] - sum(r[j] for j in rows if j != i) / (len(rows) - 1))


@group("RLOO, [B] to [B]", "verl", "verl_vectorised")
def rloo_alone(b):
    r, ids = b.nested("rewards", "ids")
    theirs = {
        "verl": one_a_sample(b, "compute_rloo_outcome_advantage"),
        "verl_vectorised": one_a_sample(b, "compute_rloo_vectorized_outcome_advantage"),
    } if "verl" in PEERS else {}  # fmt: skip
    return {"rlkit": lambda: rloo_advantages(b.rewards, b.ids), "loop": lambda: loop_rloo(r, ids), **theirs}


@group("RLOO", "verl", "verl_vectorised")
def rloo(b):
    (r, ids, mask), m = b.nested("rewards", "ids", "mask"), b.long_mask
    return {
        "rlkit": lambda: expand_to_tokens(rloo_advantages(b.rewards, b.ids), b.mask),
        "loop": lambda: loop_expand(loop_rloo(r, ids), mask),
        "verl": lambda: verl.compute_rloo_outcome_advantage(b.outcome, m, b.uid)[0],
        "verl_vectorised": lambda: verl.compute_rloo_vectorized_outcome_advantage(b.outcome, m, b.uid)[0],
    }


@group("ReMax", "verl")
def remax(b):
    greedy = b.values[:, 0].contiguous()
    (r, mask), baseline, m = b.nested("rewards", "mask"), greedy.tolist(), b.long_mask
    return {
        "rlkit": lambda: expand_to_tokens(remax_advantages(b.rewards, greedy), b.mask),
        "loop": lambda: loop_expand([x - y for x, y in zip(r, baseline, strict=True)], mask),
        "verl": lambda: verl.compute_remax_outcome_advantage(b.outcome, greedy, m)[0],
    }


@group("OPO", "verl")
def opo(b):
    (r, ids, mask), m = b.nested("rewards", "ids", "mask"), b.long_mask

    def loop():
        n = [sum(row) for row in mask]
        formula = lambda i, rows: r[i] - sum(n[j] * r[j] for j in rows) / sum(n[j] for j in rows)  # noqa: E731
        return loop_expand(loop_groups(r, ids, formula), mask)

    return {
        "rlkit": lambda: expand_to_tokens(opo_advantages(b.rewards, b.ids, b.mask.sum(1)), b.mask),
        "loop": loop,
        "verl": lambda: verl.compute_opo_outcome_advantage(b.outcome, m, b.uid)[0],
    }


@group("GPG", "verl")
def gpg(b):
    (r, ids, mask), m = b.nested("rewards", "ids", "mask"), b.long_mask

    def loop():
        differ = loop_groups(r, ids, lambda i, rows: max(r[j] for j in rows) > min(r[j] for j in rows))
        return loop_expand([len(r) / sum(differ) * x for x in loop_centred(r, ids)], mask)

    return {  # no reward is 0 and no group's are equal: verl's alpha and ours are 1 then
        "rlkit": lambda: expand_to_tokens(gpg_advantages(b.rewards, b.ids), b.mask),
        "loop": loop,
        "verl": lambda: verl.compute_gpg_outcome_advantage(b.outcome, m, b.uid)[0],
    }


@group("pass@k, k = 4")
def passk(b):
    (r, ids, mask), k = b.nested("rewards", "ids", "mask"), 4

    def formula(i, rows):
        n, failed = len(rows), sum(r[j] <= 0.5 for j in rows)
        f = math.comb(failed, k) / math.comb(n, k)
        others = 0.0 if r[i] > 0.5 else math.comb(failed - 1, k - 1) / math.comb(n - 1, k - 1)
        return (f - others) / (math.sqrt(f * (1 - f)) + 1e-6)

    return {
        "rlkit": lambda: expand_to_tokens(passk_advantages(b.rewards, b.ids, k), b.mask),
        "loop": lambda: loop_expand(loop_groups(r, ids, formula), mask),
    }


@group("pass@k, leave one out", "verl")
def passk_leave_one_out(b):
    (r, ids, mask), m = b.nested("rewards", "ids", "mask"), b.long_mask
    config = AlgoConfig(norm_adv_by_std_in_grpo=False) if "verl" in PEERS else None

    def formula(i, rows):
        return max(0.0, r[i] - max(r[j] for j in rows if j != i))

    return {
        "rlkit": lambda: expand_to_tokens(passk_leave_one_out_advantages(b.rewards, b.ids), b.mask),
        "loop": lambda: loop_expand(loop_groups(r, ids, formula), mask),
        "verl": lambda: verl.compute_grpo_passk_outcome_advantage(b.outcome, m, b.uid, config=config)[0],
    }


@group("GDPO, 3 rewards", "verl")
def gdpo(b):
    rewards, weights = b.dense[:, :3].contiguous(), torch.tensor([1.0, 0.5, 2.0])
    (ids, mask), m, w = b.nested("ids", "mask"), b.long_mask, weights.tolist()
    columns = rewards.T.tolist()
    config = dict(gdpo_reward_keys=["a", "b", "c"], gdpo_reward_weights=w)
    scores = {k: rewards[:, i].numpy() for i, k in enumerate(config["gdpo_reward_keys"])}
    prompted = dict(prompts=torch.zeros(b.b, 0), attention_mask=b.attended.long())

    def loop():
        normed = [loop_grpo(column, ids) for column in columns]
        added = [sum(x * y for x, y in zip(w, a, strict=True)) for a in zip(*normed, strict=True)]
        return loop_whiten(loop_expand(added, mask), mask)

    def theirs():
        more = dict(config=config, non_tensor_batch=scores, batch=prompted)
        return verl.compute_gdpo_outcome_advantage(b.outcome, m, b.uid, **more)[0]

    return {
        "rlkit": lambda: expand_to_tokens(gdpo_advantages(rewards, b.ids, weights, lengths=b.mask.sum(1)), b.mask),
        "loop": loop,
        "verl": theirs,
    }


def optimal_token_baseline(several_turns: bool):
    def build(b):
        squared = b.old.exp().square() + 0.1
        (r, ids, mask, old), m = b.nested("rewards", "ids", "mask", "old"), b.long_mask
        squares = squared.tolist()

        def loop():
            energies = []  # of each row's trained tokens
            for row, square, on in zip(old, squares, mask, strict=True):
                so_far, kept = 0.0, []
                for x, s, taken in zip(row, square, on, strict=True):
                    if taken:
                        so_far += 1 - 2 * math.exp(x) + s
                        kept.append(so_far)
                energies.append(kept)
            members = defaultdict(list)
            for i, k in enumerate(ids):
                members[k].append(i)
            baselines = {}
            for k, rows in members.items():
                baselines[k] = []
                for place in range(max(len(energies[i]) for i in rows)):
                    here = [i for i in rows if place < len(energies[i])]
                    top = sum(energies[i][place] * r[i] for i in here)
                    low = sum(energies[i][place] for i in here)
                    baselines[k].append(top / (low + 1e-8) if len(here) > 1 else 0.0)
            out = []
            for i, on in enumerate(mask):
                baseline = iter(baselines[ids[i]])
                out.append([r[i] - next(baseline) if taken else 0.0 for taken in on])
            return out

        name = "compute_multi_turn_optimal" if several_turns else "compute_optimal"
        return {
            "rlkit": lambda: optimal_token_baseline_advantages(b.rewards, b.ids, b.old, squared, b.mask),
            "loop": loop,
            "verl": lambda: getattr(verl, f"{name}_token_baseline_advantage")(b.outcome, m, b.uid, b.old, squared)[0],
        }

    return build


group("optimal token baseline", "verl", mask="full")(optimal_token_baseline(False))
group("optimal token baseline, tool turns", "verl")(optimal_token_baseline(True))
