"""Advantages: pure functions on tensors that need torch alone. The conventions are those of `rlkit.losses`.

    from rlkit.advantages import gae, grpo_advantages

    advantages = grpo_advantages(rewards, group_ids)  # [B], one per sample
    advantages, returns = gae(rewards, values, mask)  # [B, T], with a critic

What most people need: `grpo_advantages`, `dr_grpo_advantages`, `rloo_advantages`, `gae`, `masked_whiten`,
`reinforce_plus_plus_advantages`, `overlong_penalty`, `kl_in_reward`, `informative_groups`.

All, by family, each a module:

- group: relative to the other samples of the prompt. `grpo_advantages`,
  `leave_one_out_grpo_advantages`, `dr_grpo_advantages`, `expand_to_tokens`
- baselines: relative to another baseline. `rloo_advantages`, `remax_advantages`, `AdvantagesAndBaselines`,
  `rae_advantages`, `optimal_values`, `opo_advantages`, `gpg_advantages`, `maxrl_advantages`, `passk_advantages`,
  `passk_leave_one_out_advantages`
- returns: per token, from the rewards and values after it. `AdvantagesAndReturns`, `gae`, `discounted_returns`,
  `n_step_returns`, `vtrace`, `fipo_advantages`, `rewards_to_tokens`, `length_adaptive_lambda`
- whitened: with statistics of the whole batch. `masked_whiten`, `reinforce_plus_plus_advantages`,
  `reinforce_plus_plus_baseline_advantages`, `gdpo_advantages`, `lite_ppo_advantages`
- token_baseline: `optimal_token_baseline_advantages`
- steps: of an agent's episodes. `gigpo_advantages`, `hgpo_advantages`
- shaping: changes of rewards before advantages are computed. `kl_in_reward`, `overlong_penalty`, `entropy_advantages`,
  `RunningMoments`, `scaled_rewards`, `adaptive_kl_coef`, `FixedKL`, `AdaptiveKL`
- filtering: which samples to train on. `informative_groups`, `pf_ppo_weights`, `pf_ppo_power_weights`,
  `pf_ppo_indices`

Outcome advantages are [B], token-level ones [B, T]; losses take either. Groups may have any size and their samples any
order. A sample whose reward is nan or infinite counts as not scored: it is left out of all statistics, and its
advantage is 0. Results are float32, or float64 if the rewards are.

A function describes only its special arguments. Common arguments have the same meaning everywhere:

Args:
    rewards: [B], one per sample; a reward that is not finite means "not scored".
    group_ids: [B], any integers, in any order: equal ids are one group.
    mask: bool [B, T], True on the tokens that the policy wrote and is trained on.
    logprobs: [B, T], of the policy being trained.
    old_logprobs: [B, T], the trainer's, under the weights that the batch was sampled with.
    rollout_logprobs: [B, T], the sampler's own.
    global_sum: sums a tensor over ranks, such as an engine's method of that name, so that statistics are over the rows
        of all ranks. All ranks must call the function, even without rows, and the samples of a group must be on one
        rank. By default the statistics are over the given rows.
"""

from rlkit.advantages.baselines import *
from rlkit.advantages.filtering import *
from rlkit.advantages.group import *
from rlkit.advantages.returns import *
from rlkit.advantages.shaping import *
from rlkit.advantages.steps import *
from rlkit.advantages.token_baseline import *
from rlkit.advantages.whitened import *

__all__ = [
    # group
    "grpo_advantages",
    "leave_one_out_grpo_advantages",
    "dr_grpo_advantages",
    "expand_to_tokens",
    # baselines
    "rloo_advantages",
    "remax_advantages",
    "AdvantagesAndBaselines",
    "rae_advantages",
    "optimal_values",
    "opo_advantages",
    "gpg_advantages",
    "maxrl_advantages",
    "passk_advantages",
    "passk_leave_one_out_advantages",
    # returns
    "AdvantagesAndReturns",
    "gae",
    "discounted_returns",
    "n_step_returns",
    "vtrace",
    "fipo_advantages",
    "rewards_to_tokens",
    "length_adaptive_lambda",
    # whitened
    "masked_whiten",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "gdpo_advantages",
    "lite_ppo_advantages",
    # token_baseline
    "optimal_token_baseline_advantages",
    # steps
    "gigpo_advantages",
    "hgpo_advantages",
    # shaping
    "kl_in_reward",
    "overlong_penalty",
    "entropy_advantages",
    "RunningMoments",
    "scaled_rewards",
    "adaptive_kl_coef",
    "FixedKL",
    "AdaptiveKL",
    # filtering
    "informative_groups",
    "pf_ppo_weights",
    "pf_ppo_power_weights",
    "pf_ppo_indices",
]


def __dir__() -> list[str]:
    return __all__
