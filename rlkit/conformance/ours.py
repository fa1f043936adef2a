"""The adapter of rlkit's own functions: --trainer rlkit.conformance.ours:Trainer."""

from __future__ import annotations

import torch
from torch import Tensor

import rlkit
from rlkit import losses
from rlkit.advantages import gae, grpo_advantages
from rlkit.conformance.adapter import Split


class Trainer:
    """rlkit as its recipes use it: GRPO's loss over all tokens of the batch."""

    name = f"rlkit {rlkit.__version__}"
    ranks_average = False  # the engines sum gradients

    def token_logprobs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        return losses.token_logprobs(logits, tokens, temperature)

    def token_entropy(self, logits: Tensor) -> Tensor:
        return losses.token_entropy(logits)

    def policy_loss(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        split: Split,
        clip_low: float,
        clip_high: float,
    ) -> Tensor:
        loss = losses.clipped_policy_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
        return losses.token_mean(loss, mask, total=split.tokens)

    def kl_loss(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return losses.kl_k3(logprobs, ref_logprobs)

    def group_advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return grpo_advantages(rewards, group_ids)

    def gae(self, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
        return gae(rewards, values, mask, gamma, lam).advantages

    def accumulated_gradient(self, weight: Tensor, features: Tensor, mask: Tensor, micro_batches: int) -> Tensor:
        weight.requires_grad_()
        for part, part_mask in zip(features.chunk(micro_batches), mask.chunk(micro_batches), strict=True):
            losses.token_mean(part @ weight, part_mask, total=int(mask.sum())).backward()
        return torch.zeros_like(weight) if weight.grad is None else weight.grad
