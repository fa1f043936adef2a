"""Advantages: pure functions on tensors that need torch alone. The conventions are those of `rlkit.losses`.

Outcome advantages are [B], token-level ones [B, T]; losses take either. Groups may have any size and their samples any
order. A sample that was not judged (reward nan) stays outside all statistics, and its advantage is 0. Results are
float32, or float64 where the rewards are.

A function describes the arguments that are special to it. Those that many have mean the same in all:

Args:
    rewards: [B], one a sample; nan means "not judged".
    group_ids: [B], any integers, in any order: equal ids are one group.
    mask: bool [B, T], True on the tokens that the policy wrote and is trained on.
    logprobs: [B, T], of the policy being trained.
    old_logprobs: [B, T], under the weights that the batch was sampled with.
    rollout_logprobs: [B, T], the sampler's own.
    global_sum: adds a tensor over ranks, such as an engine's method of that name: the statistics are then those of all
        rows. All ranks must call, also one without rows, and no group may be split between them. By default these rows
        are the batch.
"""

from rlkit.advantages.baselines import (
    gpg_advantages,
    maxrl_advantages,
    opo_advantages,
    passk_advantages,
    passk_leave_one_out_advantages,
    remax_advantages,
    rloo_advantages,
)
from rlkit.advantages.filtering import informative_groups, pf_ppo_indices, pf_ppo_power_weights, pf_ppo_weights
from rlkit.advantages.group import dr_grpo_advantages, expand_to_tokens, grpo_advantages
from rlkit.advantages.returns import (
    AdvantagesAndReturns,
    discounted_returns,
    gae,
    length_adaptive_lambda,
    rewards_to_tokens,
    vtrace,
)
from rlkit.advantages.shaping import (
    AdaptiveKL,
    FixedKL,
    RunningMoments,
    adaptive_kl_coef,
    kl_in_reward,
    overlong_penalty,
    scaled_rewards,
)
from rlkit.advantages.token_baseline import optimal_token_baseline_advantages
from rlkit.advantages.whitened import (
    gdpo_advantages,
    lite_ppo_advantages,
    masked_whiten,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
)

__all__ = [
    "AdaptiveKL",
    "AdvantagesAndReturns",
    "FixedKL",
    "RunningMoments",
    "adaptive_kl_coef",
    "discounted_returns",
    "dr_grpo_advantages",
    "expand_to_tokens",
    "gae",
    "gdpo_advantages",
    "gpg_advantages",
    "grpo_advantages",
    "informative_groups",
    "kl_in_reward",
    "length_adaptive_lambda",
    "lite_ppo_advantages",
    "masked_whiten",
    "maxrl_advantages",
    "opo_advantages",
    "optimal_token_baseline_advantages",
    "overlong_penalty",
    "passk_advantages",
    "passk_leave_one_out_advantages",
    "pf_ppo_indices",
    "pf_ppo_power_weights",
    "pf_ppo_weights",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "remax_advantages",
    "rewards_to_tokens",
    "rloo_advantages",
    "scaled_rewards",
    "vtrace",
]
