"""The loss closure of a recipe: its arguments, the call for one micro-batch, and the sum of its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlkit.data.samples import Batch


@dataclass(frozen=True)
class Outputs:
    """The first argument of a loss closure: [B, T] tensors aligned with the tokens, 0 where the mask is False.

    They are attributes: `out.logprobs`, `out.entropy`, `out.values`.

    Attributes:
        tensors: the outputs by their names.
        dummy_loss: 0 with the model's graph behind it, so that a rank without rows has a backward like the others.
    """

    tensors: Mapping[str, Tensor]
    dummy_loss: Tensor

    def __getattr__(self, name: str) -> Tensor:
        tensors = self.__dict__.get("tensors", {})
        if name in tensors:
            return tensors[name]
        raise AttributeError(f"out.{name}: expected one of the requested outputs, {', '.join(tensors)}; got {name!r}")


LossFn = Callable[[Outputs, Batch], tuple[Tensor, Mapping[str, Tensor]]]


def check_output_names(names: Sequence[str], known: Sequence[str]) -> None:
    """Raise a ValueError if an engine does not compute one of the requested outputs."""
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"outputs: expected {', '.join(known)}; got {', '.join(unknown)}")


def compute_loss(loss_fn: LossFn, out: Outputs, micro_batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one micro-batch, and its metrics: the closure's own and `loss`, detached copies.

    The loss has no gradient if the outputs have none: rows of text, if only the projector of images trains.

    Raises:
        ValueError: the loss is not a 0-d tensor, or has no gradient though the outputs have one.
    """
    loss, metrics = loss_fn(out, micro_batch)
    if loss.ndim or (out.dummy_loss.requires_grad and not loss.requires_grad):
        got = f"shape {tuple(loss.shape)} and requires_grad={loss.requires_grad}"
        raise ValueError(f"loss_fn: expected a 0-d loss that requires grad, got {got}")
    metrics = {"loss": loss, **metrics}
    detached = {k: torch.as_tensor(x, device=loss.device).detach().clone() for k, x in metrics.items()}
    return loss + out.dummy_loss, detached


def sum_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Metrics of all micro-batches: summed, or the maximum for names that end in "/max"."""
    totals: dict[str, Tensor] = {}
    for micro_batch_metrics in metrics:
        for name, value in micro_batch_metrics.items():
            if name in totals:
                value = torch.maximum(totals[name], value) if name.endswith("/max") else totals[name] + value
            totals[name] = value
    return totals
