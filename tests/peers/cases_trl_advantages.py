"""The advantages that TRL's GRPO, GDPO and RLOO make of rewards, and its penalty on length."""

import torch
from cases_trl_policy import B, G, policy, trainer_and_batch
from cases_trl_trainer import case

from rlkit.advantages import (
    dr_grpo_advantages,
    gdpo_advantages,
    grpo_advantages,
    kl_in_reward,
    lite_ppo_advantages,
    masked_whiten,
    overlong_penalty,
    rewards_to_tokens,
    rloo_advantages,
)
from rlkit.losses import kl_k1, sequence_logprobs

GROUPS = torch.arange(B) // G


def scored(*names, columns=1, nan=False, gaps=False):
    """Inputs: rewards, the first ones of the second group equal; with nan some are missing, of one row all."""

    def inputs(g):
        made = policy("ref_logprobs", gaps=gaps)(g)
        made["rewards"] = torch.rand(B, 3, generator=g)[:, :columns]
        made["rewards"][G:, 0] = 0.5
        if nan:
            made["rewards"][0] = made["rewards"][1, 1:2] = made["rewards"][5, 2:] = torch.nan
        return {name: made[name] for name in ("rewards", "old_logprobs", "mask", *names)}

    return inputs


def advantages_of(name="grpo", **options):
    def peer(rewards, **rest):
        return {"out": trainer_and_batch(name, rewards, **rest, **options)[1]["advantages"]}

    return peer


def soft_overlong(lengths):
    from trl.rewards import get_soft_overlong_punishment

    punishment = get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=8)
    return {"out": torch.tensor(punishment([[0] * n for n in lengths.tolist()]))}


def grpo(x):
    return grpo_advantages(x.rewards[:, 0], GROUPS, eps=1e-4)


def gdpo(x):
    weights = torch.tensor([1.0, 0.5, 2.0])
    columns = torch.stack([grpo_advantages(r, GROUPS, eps=1e-4) for r in x.rewards.T])
    std = (weights @ columns)[~x.rewards.isnan().all(1)].std()
    return gdpo_advantages(x.rewards, GROUPS, weights, eps=1e-4) * (std.square() + 1e-8).sqrt() / (std + 1e-4)


def weighted_sum(x):
    rewards = (x.rewards * torch.tensor([1.0, 0.5, 2.0])).nansum(1)
    return grpo_advantages(torch.where(x.rewards.isnan().all(1), torch.nan, rewards), GROUPS, eps=1e-4)


def rloo_with_kl(x):
    kl = kl_k1(x.old_logprobs, x.ref_logprobs, x.mask)
    rewards = kl_in_reward(rewards_to_tokens(x.rewards[:, 0], x.mask), kl, x.mask, 0.1)
    return rloo_advantages(sequence_logprobs(rewards, x.mask), GROUPS)


def rloo_whitened(x):
    advantages = rloo_advantages(x.rewards[:, 0], GROUPS)
    white = masked_whiten(advantages[:, None], torch.ones(B, 1, dtype=torch.bool), eps=0.0)[:, 0]
    return white * advantages.std() / (advantages.std() + 1e-4)


EPS = "TRL's eps is 1e-4."
CASES = [
    case("scale_by_group", scored(), advantages_of(), grpo, grad=(), why=EPS),
    case("scale_by_group_nan", scored(nan=True), advantages_of(), grpo, grad=(), why=EPS),
    case(
        "scale_by_batch",
        scored(nan=True),
        advantages_of(scale_rewards="batch"),
        lambda x: lite_ppo_advantages(x.rewards[:, 0], GROUPS, eps=1e-4),
        grad=(),
        why=EPS,
    ),
    case(
        "not_scaled",
        scored(nan=True),
        advantages_of(scale_rewards="none"),
        lambda x: dr_grpo_advantages(x.rewards[:, 0], GROUPS),
        grad=(),
    ),
    case(
        "sum_then_normalize",
        scored(columns=3, nan=True),
        advantages_of(reward_weights=[1.0, 0.5, 2.0]),
        weighted_sum,
        grad=(),
        why="TRL adds the rewards up with a missing one as 0; ours takes one reward.",
    ),
    case(
        "normalize_then_sum",
        scored(columns=3, nan=True),
        advantages_of(multi_objective_aggregation="normalize_then_sum", reward_weights=[1.0, 0.5, 2.0]),
        gdpo,
        grad=(),
        why="TRL adds 1e-4 to both standard deviations; ours adds 1e-8 to the batch's variance.",
    ),
    case(
        "rloo_advantages",
        scored(nan=True),
        advantages_of("rloo"),
        lambda x: rloo_advantages(x.rewards[:, 0], GROUPS),
        grad=(),
    ),
    case("rloo_advantages_kl", scored("ref_logprobs"), advantages_of("rloo", beta=0.1), rloo_with_kl, grad=()),
    case(
        "rloo_advantages_normalised",
        scored(),
        advantages_of("rloo", normalize_advantages=True),
        rloo_whitened,
        grad=(),
        why="TRL adds 1e-4 to the standard deviation; ours adds its eps to the variance.",
    ),
    case(
        "soft_overlong_punishment",
        lambda g: {"lengths": torch.arange(8, 24)},
        soft_overlong,
        lambda x: overlong_penalty(x.lengths, max_length=20, buffer=8),
        grad=(),
    ),
]
