"""`rlkit.losses.diagnostics` token by token and sequence by sequence."""

import math

import torch
from torch import Tensor

from rlkit._numerics import GlobalSum, one_rank
from rlkit.losses.naive._loops import per_token, sequences, trained


@torch.no_grad()
def ratio_stats(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor | None,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    total: float | Tensor | None = None,
) -> dict[str, Tensor]:
    adv = None if advantages is None else per_token(advantages, mask)
    clipped, kl, ratios = 0, 0.0, [0.0]
    for b, t in trained(mask):
        log_ratio = logprobs[b, t].item() - old_logprobs[b, t].item()
        ratio = math.exp(log_ratio)
        above = ratio > 1 + clip_high and (adv is None or adv[b, t] > 0)
        below = ratio < 1 - clip_low and (adv is None or adv[b, t] < 0)
        clipped += bool(above or below)
        kl += ratio - 1 - log_ratio
        ratios.append(ratio)
    means = _over({"ratio/clip_fraction": clipped, "ratio/approx_kl": kl}, len(trained(mask)), total)
    return means | {"ratio/max": torch.tensor(max(ratios), dtype=torch.float64)}


@torch.no_grad()
def sequence_ratio_stats(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor | None,
    mask: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    total: float | Tensor | None = None,
) -> dict[str, Tensor]:
    adv = None if advantages is None else per_token(advantages, mask)
    clipped, kl, ratios = 0.0, 0.0, [0.0]
    for b, tokens in sequences(mask):
        log_ratios = [logprobs[b, t].item() - old_logprobs[b, t].item() for t in tokens]
        ratio = math.exp(sum(log_ratios) / len(tokens))
        for t in tokens:
            above = ratio > 1 + clip_high and (adv is None or adv[b, t] > 0)
            below = ratio < 1 - clip_low and (adv is None or adv[b, t] < 0)
            clipped += bool(above or below) / len(tokens)
        kl += sum(math.exp(x) - 1 - x for x in log_ratios) / len(tokens)
        ratios.append(ratio)
    means = _over({"ratio/clip_fraction": clipped, "ratio/approx_kl": kl}, len(ratios) - 1, total)
    return means | {"ratio/max": torch.tensor(max(ratios), dtype=torch.float64)}


@torch.no_grad()
def value_stats(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float = 0.5,
    total: float | Tensor | None = None,
) -> dict[str, Tensor]:
    sums = dict.fromkeys(("value/clip_fraction", "value/squared_error", "value/mean", "value/return"), 0.0)
    for i in trained(mask):
        value, old, target = values[i].item(), old_values[i].item(), returns[i].item()
        clipped = min(max(value, old - clip), old + clip)
        sums["value/clip_fraction"] += (clipped - target) ** 2 > (value - target) ** 2
        sums["value/squared_error"] += (value - target) ** 2
        sums["value/mean"] += value
        sums["value/return"] += target
    return _over(sums, len(trained(mask)), total)


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, global_sum: GlobalSum = one_rank) -> Tensor:
    targets = [returns[i].item() for i in trained(mask)]
    errors = [returns[i].item() - values[i].item() for i in trained(mask)]
    spread = _variance(targets, global_sum)
    explained = 1 - _variance(errors, global_sum) / spread if spread else math.nan
    return torch.tensor(explained, dtype=torch.float64)


def _variance(numbers: list[float], global_sum: GlobalSum) -> float:
    """Mean of the squares minus the square of the mean, over all ranks."""

    def over_ranks(x: float) -> float:
        return global_sum(torch.tensor(x, dtype=torch.float64)).item()

    count = over_ranks(len(numbers))
    return over_ranks(sum(x * x for x in numbers)) / count - (over_ranks(sum(numbers)) / count) ** 2


@torch.no_grad()
def mismatch_stats(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, total: float | Tensor | None = None
) -> dict[str, Tensor]:
    deltas = [logprobs[i].item() - rollout_logprobs[i].item() for i in trained(mask)]
    sums = {
        "mismatch/abs_dlogp": sum(abs(d) for d in deltas),
        "mismatch/kl": sum(math.exp(d) - 1 - d for d in deltas),
        "mismatch/w_mean": sum(math.exp(d) for d in deltas),
        "mismatch/w2_mean": sum(math.exp(d) ** 2 for d in deltas),
        "mismatch/outside": sum(not 0.5 <= math.exp(d) <= 2 for d in deltas),
    }
    largest = max((abs(d) for d in deltas), default=0.0)
    return _over(sums, len(deltas), total) | {"mismatch/abs_dlogp/max": torch.tensor(largest, dtype=torch.float64)}


@torch.no_grad()
def sequence_mismatch_stats(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, total: float | Tensor | None = None
) -> dict[str, Tensor]:
    names = ("sequence_w_mean", "sequence_chi2", "ppl", "rollout_ppl", "ppl_ratio")
    sums = dict.fromkeys((f"mismatch/{name}" for name in names), 0.0)
    for b, tokens in sequences(mask):
        lp = sum(logprobs[b, t].item() for t in tokens)
        rollout = sum(rollout_logprobs[b, t].item() for t in tokens)
        weight = math.exp(lp - rollout)
        sums["mismatch/sequence_w_mean"] += weight
        sums["mismatch/sequence_chi2"] += weight**2 - 1
        sums["mismatch/ppl"] += math.exp(-lp / len(tokens))
        sums["mismatch/rollout_ppl"] += math.exp(-rollout / len(tokens))
        sums["mismatch/ppl_ratio"] += math.exp(-lp / len(tokens)) / math.exp(-rollout / len(tokens))
    return _over(sums, len(sequences(mask)), total)


def effective_sample_size(w_mean: float | Tensor, w2_mean: float | Tensor) -> Tensor:
    first, second = float(w_mean), float(w2_mean)
    return torch.tensor(first**2 / second if second > 0 else 0.0, dtype=torch.float64)


def _over(sums: dict[str, float], count: int, total: float | Tensor | None) -> dict[str, Tensor]:
    denominator = float(count if total is None else total)
    return {
        name: torch.tensor(x / denominator if denominator > 0 else 0.0, dtype=torch.float64) for name, x in sums.items()
    }
