"""TRL 1.16: subclasses of GRPOTrainer and DPOTrainer that take rlkit's losses and advantages.

    from functools import partial
    from rlkit.advantages import rloo_advantages
    from rlkit.losses import cispo_loss
    from rlkit.plugins.trl import GRPOTrainer

    trainer = GRPOTrainer(..., loss=partial(cispo_loss, clip_high=4.0), advantages=rloo_advantages)

Set the constants of a loss with `functools.partial`. TRL's options for them (epsilon, beta of DPO, ...) must then keep
their defaults, because nothing would read them. `loss_type` of GRPOConfig still chooses how tokens are averaged. The
subclasses override `_calculate_rewards`, `_generate_and_score_completions` and `_compute_loss`, which are private
methods of TRL and may change with any version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from rlkit.losses import (
    fixed_length_mean,
    kl_k3,
    kl_k3_weighted,
    preference_mean,
    sequence_mean,
    sequence_sum_mean,
    token_mean,
)
from rlkit.plugins._versions import require
from rlkit.plugins.clip_stats import clip_stats

require("trl", "1.16")

from trl import DPOTrainer as TrlDPOTrainer  # noqa: E402
from trl import GRPOTrainer as TrlGRPOTrainer  # noqa: E402

REPLACED_BY_LOSS = (
    *("epsilon", "epsilon_high", "delta", "importance_sampling_level", "off_policy_mask_threshold"),
    *("sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg"),
    *("vespo_lambda_neg", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy"),
)
REPLACED_BY_ADVANTAGES = ("scale_rewards", "multi_objective_aggregation")
REPLACED_BY_PREFERENCE_LOSS = (
    *("loss_type", "loss_weights", "beta", "label_smoothing", "ld_alpha", "f_divergence_type"),
    *("f_alpha_divergence_coef", "discopop_tau", "use_weighting"),
)
MODEL_INPUTS = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)


class GRPOTrainer(TrlGRPOTrainer):
    """TRL's GRPOTrainer with a policy loss of rlkit, advantages of rlkit, or both.

    Args:
        loss: (logprobs, old_logprobs, advantages, mask) -> [B, T], such as `cispo_loss`. TRL's KL term (beta) is added
            to it, and TRL's importance weights for vLLM multiply it. None: TRL's loss.
        advantages: (rewards, group_ids) -> [B] for all completions on all processes, such as `rloo_advantages`. An
            argument named `lengths` gets the numbers of tokens. None: TRL's advantages.
        others: arguments of TRL's GRPOTrainer.

    Raises:
        ValueError: an option of GRPOConfig is set that the loss or the advantages replace.
    """

    def __init__(
        self,
        *positional: Any,
        loss: Callable[..., Tensor] | None = None,
        advantages: Callable[..., Tensor] | None = None,
        **others: Any,
    ) -> None:
        super().__init__(*positional, **others)
        if loss is not None:
            _refuse(self, REPLACED_BY_LOSS, "loss")
        if advantages is not None:
            _refuse(self, REPLACED_BY_ADVANTAGES, "advantages")
        self.own_loss, self.own_advantages = loss, advantages
        self._scored = torch.zeros(0)

    def _calculate_rewards(self, inputs: Any, *others: Any) -> Tensor:
        self._scored = super()._calculate_rewards(inputs, *others)  # [B of all processes, reward functions]
        return self._scored

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.own_advantages is None:
            return output
        scored, mode = self._scored, "train" if self.model.training else "eval"
        rewards = (scored * self.reward_weights.to(scored.device)).nansum(1)
        rewards = torch.where(scored.isnan().all(1), torch.nan, rewards)
        size = self.num_generations if mode == "train" else self.num_generations_eval
        given = {"group_ids": torch.arange(len(rewards), device=rewards.device) // size}
        if "lengths" in signature(self.own_advantages).parameters:
            given["lengths"] = self.accelerator.gather(_trained(output).sum(1))
        found = self.own_advantages(rewards, **given)
        logged = self._logs["advantages"]
        for _ in range(min(len(found), len(logged))):  # TRL has just logged its own
            logged.pop()
        logged.extend(found.tolist())
        first = self.accelerator.process_index * len(inputs)
        return output | {"advantages": found[first : first + len(inputs)]}

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self.own_loss is None:
            return super()._compute_loss(model, inputs)
        mask, mode = _trained(inputs), "train" if self.model.training else "eval"
        logprobs, entropy, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            mask.shape[1],
            compute_entropy=True,
            **{name: inputs.get(name) for name in MODEL_INPUTS},
        )
        old_logprobs = inputs.get("old_per_token_logps")
        old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
        loss = self.own_loss(logprobs, old_logprobs, inputs["advantages"], mask)
        if self.use_vllm and self.vllm_importance_sampling_correction:
            loss = loss * inputs["importance_sampling_ratio"]
        logged = {"entropy": token_mean(entropy, mask)}
        if self.beta:
            ref_logprobs = inputs["ref_per_token_logps"]
            if self.args.use_bias_correction_kl:
                kl = kl_k3_weighted(logprobs, ref_logprobs, old_logprobs, mask)
            else:
                kl = kl_k3(logprobs, ref_logprobs, mask)
            loss = loss + self.beta * kl
            logged["kl"] = token_mean(kl.detach(), mask)
        logged |= clip_stats(self.own_loss, logprobs, old_logprobs, inputs["advantages"], mask)
        for name, value in logged.items():
            self._metrics[mode][name].append(self.accelerator.gather(value.detach()).mean().item())
        return self._averaged(loss, mask, inputs["num_items_in_batch"], mode)

    def _averaged(self, loss: Tensor, mask: Tensor, tokens: Tensor, mode: str) -> Tensor:
        """The reduction of TRL's loss_type, with TRL's denominators: its trainer sums micro-batches, averages ranks."""
        parts = self.current_gradient_accumulation_steps if mode == "train" else 1
        if self.loss_type in ("dapo", "cispo", "vespo"):  # tokens counts the batch that was generated, of all ranks
            share = parts / self.args.steps_per_generation if mode == "train" else 1.0
            return token_mean(loss, mask, tokens.clamp(min=1) / self.accelerator.num_processes * share)
        if self.loss_type == "bnpo":
            return token_mean(loss, mask) / parts
        if self.loss_type == "dr_grpo":
            return fixed_length_mean(loss, mask, self.max_completion_length, len(mask)) / parts
        if self.loss_type == "luspo":
            return sequence_sum_mean(loss, mask, len(mask)) / parts
        return sequence_mean(loss, mask, len(mask)) / parts


class DPOTrainer(TrlDPOTrainer):
    """TRL's DPOTrainer with a preference loss of rlkit.

    Args:
        loss: a function that returns [P], such as `ipo_loss` or `simpo_loss`. Its arguments may be chosen, rejected,
            ref_chosen, ref_rejected (log-probabilities of the responses, [P]), chosen_lengths and rejected_lengths
            (numbers of tokens). The reference model runs only if the loss has ref_chosen. None: TRL's loss.
        others: arguments of TRL's DPOTrainer.

    Raises:
        ValueError: an option of DPOConfig is set that the loss replaces.
    """

    def __init__(self, *positional: Any, loss: Callable[..., Tensor] | None = None, **others: Any) -> None:
        super().__init__(*positional, **others)
        if loss is not None:
            _refuse(self, REPLACED_BY_PREFERENCE_LOSS, "loss")
        self.own_loss = loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False) -> Any:
        if self.own_loss is None:
            return super()._compute_loss(model, inputs, return_outputs)
        not_for_the_model = {"completion_mask", "ref_chosen_logps", "ref_rejected_logps"}
        model_inputs = {name: x for name, x in inputs.items() if name not in not_for_the_model}
        mask = inputs["completion_mask"][:, 1:].bool()
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        outputs = model(**model_inputs, use_cache=False, labels=labels, fused_lm_head=True)
        chosen, rejected = outputs.log_probs[:, -mask.shape[1] :].sum(1).chunk(2)  # 0 where there is no label
        chosen_lengths, rejected_lengths = mask.sum(1).chunk(2)
        given = {"chosen": chosen, "rejected": rejected}
        given |= {"chosen_lengths": chosen_lengths, "rejected_lengths": rejected_lengths}
        parameters = signature(self.own_loss).parameters
        if "ref_chosen" in parameters:
            given["ref_chosen"], given["ref_rejected"] = self._reference(inputs)
        loss = preference_mean(self.own_loss(**{name: x for name, x in given.items() if name in parameters}))
        logged = {"logps/chosen": chosen.mean(), "logps/rejected": rejected.mean()}
        if "ref_chosen" in given:
            better = chosen - given["ref_chosen"] > rejected - given["ref_rejected"]
            logged["rewards/accuracies"] = better.float().mean()
        for name, value in logged.items():
            gathered = self.accelerator.gather(value.detach()).mean().item()
            self._metrics["train" if self.model.training else "eval"][name].append(gathered)
        return (loss, outputs) if return_outputs else loss

    def _reference(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """[P] each: the log-probabilities of chosen and rejected responses under the reference."""
        if self.precompute_ref_logps:
            return inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]
        return self.compute_ref_log_probs(self.model if self.ref_model is None else self.ref_model, inputs)


def _trained(inputs: dict[str, Any]) -> Tensor:
    """bool [B, T]: the completions' tokens that are trained on, without tool output."""
    mask = inputs["completion_mask"]
    return (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()


def _refuse(trainer: Any, options: Iterable[str], argument: str) -> None:
    """Raise a ValueError if an option is set that nothing would read."""
    declared = {field.name: field for field in fields(trainer.args)}
    for name in options:
        default, factory = declared[name].default, declared[name].default_factory
        expected = default if factory is MISSING else factory()
        got = getattr(trainer.args, name)
        if got != expected:
            raise ValueError(f"{name}: expected its default, {expected!r}, beside {argument}=, got {got!r}")
    if trainer.aux_loss_enabled and argument == "loss":
        raise ValueError(f"router_aux_loss_coef: expected 0 beside loss=, got {trainer.router_aux_loss_coef!r}")
