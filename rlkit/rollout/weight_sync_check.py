"""Detects that the sampler does not have the trainer's weights, by the difference of their logprobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from rlkit.data.samples import Sample, collate
from rlkit.rollout.sampling import Sampling


class WeightSyncCheck:
    """Checks how much the logprobs of sampler and trainer differ on tokens that were sampled with the current weights.

        check_sync = WeightSyncCheck(cfg.max_mismatch)
        if problem := check_sync(metrics["mismatch/abs_dlogp"]):
            sys.exit(problem)

    The sampler starts with the weights that training starts from, so the first mismatch is rounding, unless it is
    larger than rounding can be: 0.003 in float32, 0.1 in bfloat16. Published mismatches are at most half of that: a
    root mean square of 0.002 in float32 and of 0.02 to 0.03 in bfloat16 for Qwen2.5 of 0.5B and 7B
    ([Fast-LLM #525](https://github.com/ServiceNow/Fast-LLM/pull/525)), and sqrt(2 KL) = 0.055 for the mixture of
    experts Qwen3-30B-A3B ([R3](https://arxiv.org/abs/2510.11370)); in float32 on a CPU it is 1e-6. Later mismatches
    fail if they exceed `factor` times the first one, or `max_mismatch`. An update that is smaller than rounding cannot
    be distinguished from none.

    A resumed run is given `first` of the run before it. Its sampler may round differently, so the first mismatch after
    resuming may reach the larger of both limits: that of a first step and that of a later step.

    Args:
        max_mismatch: always fail above this. Infinity: never fail, for responses that other weights have sampled.
        dtype: that trainer and sampler compute in, the less precise one of the two; by default what both use by
            default: bfloat16 on a GPU, float32 on a CPU.
        factor: mismatches of rounding vary by less than this factor.
        min_mismatch: after the first call, never fail below this.
        first: the first mismatch of the run that is resumed; None for a new run.
    """

    def __init__(
        self,
        max_mismatch: float,
        *,
        dtype: torch.dtype | None = None,
        factor: float = 10.0,
        min_mismatch: float = 1e-3,
        first: float | None = None,
    ) -> None:
        self.max_mismatch, self.factor, self.min_mismatch = max_mismatch, factor, min_mismatch
        self.dtype = dtype or (torch.bfloat16 if torch.cuda.is_available() else torch.float32)
        self.first = first
        self.started = False

    def __call__(self, mismatch: float) -> str:
        """Why the run has to stop; empty if it can continue.

        Args:
            mismatch: mean |dlogp| of a token, over all ranks.
        """
        if self.max_mismatch == math.inf:
            return ""
        limit, other_cause = -math.inf, ""
        if self.first is not None:
            limit = max(self.factor * self.first, self.min_mismatch)
        if not self.started and not mismatch <= limit:
            name = str(self.dtype).removeprefix("torch.")
            limit = max(limit, 3e-3 if self.dtype.itemsize >= 4 else 0.1)
            other_cause = f", or it does not compute in {name} as the trainer does"
            self.first = mismatch
        self.started = True
        if mismatch <= (limit := min(self.max_mismatch, limit)):
            return ""
        return (
            f"mismatch/abs_dlogp: expected at most {limit:.2g}, got {mismatch:.2g}: the sampler does not have the "
            f"trainer's weights, they did not arrive{other_cause}"
        )


def measure_mismatch(rollout: Any, engine: Any, prompts: Sequence[Sample], sampling: Sampling) -> float:
    """Mean |dlogp| of a token on responses that the sampler generates now, with its current weights.

    For runs whose batches were sampled with older weights. All ranks call it together, each with prompts of its own or
    with none.

    Args:
        engine: with `infer_batch` and `global_sum`, and with the temperature of `sampling`.
    """
    batch = collate(rollout.generate(prompts, sampling))
    differences = (engine.infer_batch(batch)["logprobs"] - batch.rollout_logprobs)[batch.mask].abs()
    sums = torch.stack([differences.sum(), differences.new_tensor(len(differences))])
    total, count = engine.global_sum(sums).tolist()
    return total / max(count, 1.0)
