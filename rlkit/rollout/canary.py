"""Whether weights arrive: what stops a run whose sampler has others than its trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlkit.data.samples import Sample, collate
from rlkit.rollout.sampling import Sampling


class Canary:
    """Watches how far apart sampler and trainer score tokens that weights of now wrote.

        canary = Canary(cfg.max_mismatch)
        if wrong := canary(metrics["mismatch/abs_dlogp"]):
            sys.exit(wrong)

    The first gap is rounding, for a sampler loads the weights that training starts from: about 1e-6 in float32, 0.03 in
    bfloat16. `times` as much, or any gap above `most`, is other weights. Weights that have moved by less than rounding
    cannot be told from those before.

    Args:
        most: largest gap that is ever rounding.
        times: gaps that are rounding differ by less than this factor.
        rounding: gaps below this are always taken for rounding.
    """

    def __init__(self, most: float, *, times: float = 10.0, rounding: float = 1e-3) -> None:
        self.most, self.times, self.rounding = most, times, rounding
        self.first: float | None = None

    def __call__(self, gap: float) -> str:
        """Why the run has to stop; empty where it has not.

        Args:
            gap: mean |dlogp| of a token, of all ranks.
        """
        if self.first is None:
            self.first = gap
        limit = min(self.most, max(self.times * self.first, self.rounding))
        if gap <= limit:
            return ""
        return (
            f"the sampler's logprobs differ from the trainer's by {gap:.2g} a token, at most {limit:.2g} expected: "
            "its weights are not the trainer's, they did not arrive"
        )


def fresh_gap(rollout: Any, engine: Any, prompts: Sequence[Sample], sampling: Sampling) -> float:
    """Mean |dlogp| of a token on answers that the sampler's weights of now give to a few fixed prompts.

    For runs whose batches are by older weights; all ranks call it together, each with prompts of its own or none.

    Args:
        engine: with `infer_batch` and `global_sum`; it has the same temperature as `sampling`.
    """
    batch = collate(rollout.generate(prompts, sampling))
    gaps = (engine.infer_batch(batch)["logprobs"] - batch.rollout_logprobs)[batch.mask].abs()
    total, count = engine.global_sum(torch.stack([gaps.sum(), gaps.new_tensor(len(gaps))])).tolist()
    return total / max(count, 1.0)
