"""Hugging Face's Trainer: a `compute_loss_func` from a loss on log-probabilities, such as `dft_loss`.

    from rlkit.losses import dft_loss
    from rlkit.plugins.hf_trainer import compute_loss_func

    trainer = Trainer(..., compute_loss_func=compute_loss_func(dft_loss))

TRL's SFTTrainer takes it as well, where its loss type builds the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rlkit.losses import token_logprobs, token_mean


def compute_loss_func(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A `compute_loss_func` for Trainer: the mean of a loss over the labels that are not -100.

    The denominator is Trainer's `num_items_in_batch`, the labels of all micro-batches of a step, so the gradient does
    not depend on how the step is split.

    Args:
        loss: (logprobs, mask) -> [B, T], both [B, T] and aligned with the labels.

    Returns:
        A function of a model's outputs, the labels and `num_items_in_batch`.

    Raises:
        ValueError: a batch without labels, or a model that returns no logits.
    """

    def trainer_loss(outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        if labels is None:
            raise ValueError("labels: expected a tensor [B, T] in the batch, got None")
        logits = outputs.get("logits") if isinstance(outputs, dict) else getattr(outputs, "logits", None)
        if logits is None or logits.shape[:2] != labels.shape:
            got = None if logits is None else f"shape {list(logits.shape)}"
            raise ValueError(f"logits: expected [B, T, V] for labels {list(labels.shape)} from the model, got {got}")
        mask = labels != -100
        mask[:, 0] = False  # nothing predicts the first token
        logprobs = token_logprobs(logits, labels.clamp(min=0))
        return token_mean(loss(logprobs, mask), mask, num_items_in_batch)

    return trainer_loss
