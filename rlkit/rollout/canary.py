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

    A sampler has the weights that training starts from, so the first gap is rounding, unless it is larger than rounding
    can be: 0.003 in float32, 0.1 in bfloat16. Published gaps are at most half of that: a root mean square of 0.002 in
    float32 and of 0.02 to 0.03 in bfloat16 for Qwen2.5 of 0.5B and 7B
    ([Fast-LLM #525](https://github.com/ServiceNow/Fast-LLM/pull/525)), and with experts sqrt(2 KL) = 0.055 for
    Qwen3-30B-A3B ([R3](https://arxiv.org/abs/2510.11370)); on a CPU it is 1e-6 in float32. After that `times` the first
    gap, or any above `most`, is other weights. Weights that have moved by less than rounding cannot be told from those
    before.

    Args:
        most: largest gap that is ever rounding.
        dtype: that trainer and sampler compute in, the rougher of the two; by default the one that both take by
            themselves: bfloat16 on a GPU, float32 on a CPU.
        times: gaps that are rounding differ by less than this factor.
        rounding: after the first, gaps below this are always taken for rounding.
    """

    def __init__(
        self, most: float, *, dtype: torch.dtype | None = None, times: float = 10.0, rounding: float = 1e-3
    ) -> None:
        self.most, self.times, self.rounding = most, times, rounding
        self.dtype = dtype or (torch.bfloat16 if torch.cuda.is_available() else torch.float32)
        self.first: float | None = None

    def __call__(self, gap: float) -> str:
        """Why the run has to stop; empty where it has not.

        Args:
            gap: mean |dlogp| of a token, of all ranks.
        """
        if self.first is None:
            name = str(self.dtype).removeprefix("torch.")
            limit, why = (3e-3 if self.dtype.itemsize >= 4 else 0.1), f", or it does not compute in {name} as that does"
            self.first = gap
        else:
            limit, why = max(self.times * self.first, self.rounding), ""
        if gap <= (limit := min(self.most, limit)):
            return ""
        return (
            f"the sampler's logprobs differ from the trainer's by {gap:.2g} a token, at most {limit:.2g} expected: "
            f"its weights are not the trainer's, they did not arrive{why}"
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
