"""verl 0.9: importing this module registers rlkit's policy losses and advantages as `rlkit_...`.

verl imports it by itself, in the driver and in every worker, by the entry point `verl.plugins` of an installed rlkit.
From a checkout that is not installed: `VERL_USE_EXTERNAL_MODULES=rlkit.plugins.verl`. Then

    actor_rollout_ref.actor.policy_loss.loss_mode=rlkit_cispo algorithm.adv_estimator=rlkit_rloo

This module translates between verl's conventions and rlkit's:

- verl's tensors cover the response only, and its masks may be integers or floats.
- An argument of a loss takes its value from verl's option for it (`VERL_OPTIONS`). An argument without such an option
  keeps rlkit's default.
- `rollout_is_weights` multiply the loss of each token.
- verl's `agg_loss` reduces the loss, by `loss_agg_mode` and with the counts of the global batch. It multiplies by the
  number of data-parallel ranks, because FSDP averages gradients over them.
- verl's rewards are per token. An advantage of whole responses gets their sum. Groups are given by the prompts' ids.

To register another function, or other values, name a module of yours in `VERL_USE_EXTERNAL_MODULES`:

    from functools import partial
    from rlkit.losses import vespo_loss
    from rlkit.plugins.verl import register_loss

    register_loss("my_vespo", partial(vespo_loss, k_pos=3.0))
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit import advantages as adv
from rlkit import losses
from rlkit.plugins._versions import require
from rlkit.plugins.clip_stats import CLIPS, clip_stats

try:
    require("verl", "0.9")
except ImportError as error:  # verl hides what an entry point raises
    logging.getLogger(__name__).warning("%s", error)
    raise

from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss  # noqa: E402

# argument of a loss -> verl's option for it, below actor_rollout_ref.actor; LOSSES has those of single functions
VERL_OPTIONS = {
    "clip_low": "clip_ratio_low",
    "clip_high": "clip_ratio_high",
    "dual_clip": "clip_ratio_c",
    "log_clip_low": "clip_ratio_low",
    "log_clip_high": "clip_ratio_high",
    "delta_low": "clip_ratio_low",
    "delta_high": "clip_ratio_high",
    "ratio_high": "clip_ratio_c",
    "tau_pos": "tau_pos",
    "tau_neg": "tau_neg",
    "cov_low": "policy_loss.clip_cov_lb",
    "cov_high": "policy_loss.clip_cov_ub",
}
CLIP_COV = {"share": "policy_loss.clip_cov_ratio"}
KL_COV = {"share": "policy_loss.kl_cov_ratio", "kl_coef": "policy_loss.ppo_kl_coef"}
DRO = {"kl_coef": "policy_loss.dro_beta"}

LOSSES: dict[Callable[..., Tensor], dict[str, str]] = {  # loss -> arguments with an option of their own
    losses.clipped_policy_loss: {},
    losses.reinforce_loss: {},
    losses.cispo_loss: {},
    losses.gppo_loss: {},
    losses.sapo_loss: {},
    losses.gspo_loss: {},
    losses.gspo_token_loss: {},
    losses.luspo_loss: {},
    losses.gmpo_loss: {},
    losses.topr_loss: {},
    losses.sequence_sapo_loss: {},
    losses.flash_reinforce_loss: {},
    losses.clip_cov_loss: CLIP_COV,
    losses.kl_cov_loss: KL_COV,
    losses.dppo_tv_loss: {},
    losses.dppo_kl_loss: {},
    losses.dro_loss: DRO,
    losses.vespo_loss: {},
    losses.m2po_loss: {},
}
ADVANTAGES: list[Callable[..., Tensor]] = [  # they need no more than verl passes to every registered estimator
    adv.grpo_advantages,
    adv.leave_one_out_grpo_advantages,
    adv.dr_grpo_advantages,
    adv.rloo_advantages,
    adv.opo_advantages,
    adv.gpg_advantages,
    adv.maxrl_advantages,
    adv.passk_leave_one_out_advantages,
    adv.reinforce_plus_plus_advantages,
    adv.reinforce_plus_plus_baseline_advantages,
    adv.lite_ppo_advantages,
]


def register_loss(name: str, loss: Callable[..., Tensor], options: dict[str, str] | None = None) -> None:
    """Register a loss with rlkit's signature for `actor_rollout_ref.actor.policy_loss.loss_mode`.

    Args:
        name: the value of `loss_mode`.
        loss: (logprobs, old_logprobs, advantages, mask, ...) -> [B, T]. Arguments that a `functools.partial` has fixed
            keep their value.
        options: argument of the loss -> verl's option below `actor_rollout_ref.actor`, in addition to VERL_OPTIONS. An
            argument that is in both has the option that is named here.
    """
    option_of = {**VERL_OPTIONS, **(options or {})}
    parameters = list(signature(loss).parameters)
    fixed = getattr(loss, "keywords", {})
    wanted = {name: option_of[name] for name in parameters if name in option_of and name not in fixed}

    def verl_loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        mask = response_mask.bool()
        found = {argument: _option(config, path) for argument, path in wanted.items()}
        given: dict[str, Any] = {argument: value for argument, value in found.items() if value is not None}
        if "uniform" in parameters:
            given["uniform"] = torch.rand_like(log_prob, dtype=torch.float32)
        per_token = loss(log_prob, old_log_prob, advantages, mask, **given)
        if rollout_is_weights is not None:
            per_token = per_token * torch.where(mask, rollout_is_weights, 0)
        value = agg_loss(per_token, mask, loss_agg_mode, **config.global_batch_info)
        clip = {argument: given[argument] for argument in CLIPS if argument in given}
        stats = clip_stats(loss, log_prob, old_log_prob, advantages, mask, **clip)
        kl = losses.token_mean(losses.kl_k1(old_log_prob, log_prob.detach(), mask), mask)
        return value, {"actor/ppo_kl": kl.item(), "actor/pg_clipfrac": stats["ratio/clip_fraction"].item()}

    register_policy_loss(name)(verl_loss)


def register_advantages(name: str, advantages: Callable[..., Tensor]) -> None:
    """Register an advantage function of rlkit for `algorithm.adv_estimator`.

    Args:
        name: the value of `adv_estimator`.
        advantages: a function that returns [B] or [B, T]. Its arguments may be rewards ([B], or [B, T] if it takes a
            mask), group_ids [B], mask [B, T], lengths [B] and gamma.
    """
    parameters = list(signature(advantages).parameters)
    fixed = getattr(advantages, "keywords", {})

    def verl_advantages(
        token_level_rewards: Tensor, response_mask: Tensor, index: Any = None, config: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        mask = response_mask.bool()
        if index is None and "group_ids" in parameters:
            raise ValueError(f"algorithm.adv_estimator={name}: expected the prompts' ids (uid) in the batch, got none")
        rewards = torch.where(mask, token_level_rewards, 0) if "mask" in parameters else token_level_rewards.sum(-1)
        possible: dict[str, Any] = {"rewards": rewards, "mask": mask, "lengths": mask.sum(1), "gamma": 1.0}
        if index is not None:
            ids = np.unique(np.asarray(index), return_inverse=True)[1]
            possible["group_ids"] = torch.as_tensor(ids, device=mask.device)
        if config is not None:
            possible["gamma"] = config.gamma
        given = {name: possible[name] for name in parameters if name in possible and name not in fixed}
        with torch.no_grad():
            found = advantages(**given)
        found = found if found.ndim == 2 else adv.expand_to_tokens(found, mask)
        return found, found

    register_adv_est(name)(verl_advantages)


def _option(config: Any, path: str) -> Any:
    """The value of an option, such as "policy_loss.dro_beta"; None where the configuration does not have it."""
    for part in path.split("."):
        config = getattr(config, part, None)
    return config


for _loss, _options in LOSSES.items():
    register_loss(f"rlkit_{_loss.__name__.removesuffix('_loss')}", _loss, _options)
for _advantages in ADVANTAGES:
    register_advantages(f"rlkit_{_advantages.__name__.removesuffix('_advantages')}", _advantages)
