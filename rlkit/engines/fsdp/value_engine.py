"""The FSDP2 engine for value and reward models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rlkit.data.samples import Batch
from rlkit.engines.fsdp.fsdp2 import Fsdp2Engine
from rlkit.engines.fsdp.outputs import model_logits
from rlkit.engines.logit_functions import LogitFunction
from rlkit.engines.loss_closure import LossFn
from rlkit.engines.packing.inputs import ModelInputs
from rlkit.engines.value_head import check_head_trains, has_value_head


class Fsdp2ValueEngine(Fsdp2Engine):
    """Trains and scores a value or reward model, see rlkit.engines.value_head.

    `values[b, t]` is the value of the prefix before `tokens[b, t]`. The arguments are those of `Fsdp2Engine`;
    `temperature`, `suppressed_token_ids` and `use_fused_kernels` have no effect. The head works in float32 whatever
    `compute_dtype` is: bfloat16 would round a return of 100 to a multiple of 0.5.
    """

    known_outputs = ("values",)

    def train_batch(
        self, batch: Batch, loss_fn: LossFn, outputs: Sequence[str] = ("values",), **options: Any
    ) -> dict[str, float]:
        """`Fsdp2Engine.train_batch` with values as outputs; there are no logits, so no `logit_functions`."""
        return super().train_batch(batch, loss_fn, outputs, **options)

    def infer_batch(self, batch: Batch, outputs: Sequence[str] = ("values",)) -> dict[str, Tensor]:
        """`Fsdp2Engine.infer_batch` with values as outputs."""
        return super().infer_batch(batch, outputs)

    def _check_head(self, *, trains: bool) -> None:
        if not has_value_head(self.base):
            raise ValueError(
                "model: expected a value head, got none; use rlkit.engines.value_head.with_value_head(model)"
            )
        if trains:
            check_head_trains(self.base)

    def _results(
        self, batch: Batch, inputs: ModelInputs, outputs: Sequence[str], logit_functions: Mapping[str, LogitFunction]
    ) -> dict[str, Tensor]:
        if logit_functions:
            raise ValueError(f"logit_functions: expected none for a value head, got {', '.join(logit_functions)}")
        return {"values": model_logits(self.module, inputs)[:, 0]}
