"""`rlkit.losses.preference` pair by pair and response by response."""

import torch
from torch import Tensor

from rlkit._numerics import GlobalSum, one_rank
from rlkit.losses.naive._loops import add, constant, sequences


def sequence_logprobs(logprobs: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros(len(mask), dtype=torch.float64)
    for b, tokens in sequences(mask):
        out[b] = add(logprobs[b, t] for t in tokens)
    return out


def sequence_mean_logprobs(logprobs: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros(len(mask), dtype=torch.float64)
    for b, tokens in sequences(mask):
        out[b] = add(logprobs[b, t] for t in tokens) / len(tokens)
    return out


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    loss = torch.zeros(len(chosen), dtype=torch.float64)
    for i, (h_w, h_l) in enumerate(log_ratios(chosen, rejected, ref_chosen, ref_rejected)):
        win = sigmoid(beta * (h_w - h_l))
        loss[i] = -(1 - label_smoothing) * win.log() - label_smoothing * (1 - win).log()
    return loss


def robust_dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> Tensor:
    loss = torch.zeros(len(chosen), dtype=torch.float64)
    for i, (h_w, h_l) in enumerate(log_ratios(chosen, rejected, ref_chosen, ref_rejected)):
        win = sigmoid(beta * (h_w - h_l))
        right, flipped = -win.log(), -(1 - win).log()
        loss[i] = ((1 - label_smoothing) * right - label_smoothing * flipped) / (1 - 2 * label_smoothing)
    return loss


def ipo_loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1) -> Tensor:
    loss = torch.zeros(len(chosen), dtype=torch.float64)
    for i, (h_w, h_l) in enumerate(log_ratios(chosen, rejected, ref_chosen, ref_rejected)):
        loss[i] = (h_w - h_l - 1 / (2 * beta)) ** 2
    return loss


def hinge_dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1
) -> Tensor:
    loss = torch.zeros(len(chosen), dtype=torch.float64)
    for i, (h_w, h_l) in enumerate(log_ratios(chosen, rejected, ref_chosen, ref_rejected)):
        if beta * (h_w - h_l) < 1:
            loss[i] = 1 - beta * (h_w - h_l)
    return loss


def slic_loss(chosen: Tensor, rejected: Tensor, margin: float = 1.0) -> Tensor:
    loss = torch.zeros(len(chosen), dtype=torch.float64)
    for i in range(len(chosen)):
        if chosen[i].double() - rejected[i].double() < margin:
            loss[i] = margin - chosen[i].double() + rejected[i].double()
    return loss


def apo_zero_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1
) -> Tensor:
    loss = torch.zeros(len(chosen), dtype=torch.float64)
    for i, (h_w, h_l) in enumerate(log_ratios(chosen, rejected, ref_chosen, ref_rejected)):
        loss[i] = (1 - sigmoid(beta * h_w)) + sigmoid(beta * h_l)
    return loss


def simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 2.0,
    gamma: float = 1.0,
) -> Tensor:
    loss = torch.zeros(len(chosen), dtype=torch.float64)
    for i, (mean_w, mean_l) in enumerate(means(chosen, rejected, chosen_lengths, rejected_lengths)):
        loss[i] = -sigmoid(beta * mean_w - beta * mean_l - gamma).log()
    return loss


def orpo_loss(chosen: Tensor, rejected: Tensor, chosen_lengths: Tensor, rejected_lengths: Tensor) -> Tensor:
    loss = torch.zeros(len(chosen), dtype=torch.float64)
    for i, (mean_w, mean_l) in enumerate(means(chosen, rejected, chosen_lengths, rejected_lengths)):
        odds_w, odds_l = (mean.exp() / (1 - mean.exp()) for mean in (mean_w, mean_l))
        loss[i] = -sigmoid((odds_w / odds_l).log()).log()
    return loss


def kto_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    kl: float | Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    logprobs, ref, loss = logprobs.double(), constant(ref_logprobs), torch.zeros(len(logprobs), dtype=torch.float64)
    for i in range(len(logprobs)):
        h = logprobs[i] - ref[i]
        if desirable[i]:
            loss[i] = desirable_weight * (1 - sigmoid(beta * (h - float(kl))))
        else:
            loss[i] = undesirable_weight * (1 - sigmoid(beta * (float(kl) - h)))
    return loss


@torch.no_grad()
def kto_kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, global_sum: GlobalSum = one_rank) -> Tensor:
    total = add(logprobs[i].double() - ref_logprobs[i] for i in range(len(logprobs)))
    total, count = global_sum(torch.stack([total, total.new_tensor(len(logprobs))]))
    return torch.clamp(total / max(count, 1), min=0)


def bradley_terry_loss(chosen_rewards: Tensor, rejected_rewards: Tensor, margin: Tensor | None = None) -> Tensor:
    loss = torch.zeros(len(chosen_rewards), dtype=torch.float64)
    for i in range(len(loss)):
        gap = chosen_rewards[i].double() - rejected_rewards[i]
        loss[i] = -sigmoid(gap if margin is None else gap - margin[i].item()).log()
    return loss


def reward_centring_loss(chosen_rewards: Tensor, rejected_rewards: Tensor) -> Tensor:
    loss = torch.zeros(len(chosen_rewards), dtype=torch.float64)
    for i in range(len(loss)):
        loss[i] = (chosen_rewards[i].double() + rejected_rewards[i]) ** 2
    return loss


@torch.no_grad()
def preference_stats(
    chosen_rewards: Tensor, rejected_rewards: Tensor, total: float | Tensor | None = None
) -> dict[str, Tensor]:
    sums = dict.fromkeys(("accuracy", "margin", "chosen", "rejected"), 0.0)
    for w, lose in zip(chosen_rewards.tolist(), rejected_rewards.tolist(), strict=True):
        sums["accuracy"] += w > lose
        sums["margin"] += w - lose
        sums["chosen"] += w
        sums["rejected"] += lose
    count = float(len(chosen_rewards) if total is None else total)
    return {f"preference/{k}": torch.tensor(x / count if count else 0.0, dtype=torch.float64) for k, x in sums.items()}


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def log_ratios(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """(h_w, h_l) of each pair."""
    ref_w, ref_l = constant(ref_chosen), constant(ref_rejected)
    return [(chosen[i].double() - ref_w[i], rejected[i].double() - ref_l[i]) for i in range(len(chosen))]


def means(
    chosen: Tensor, rejected: Tensor, chosen_lengths: Tensor, rejected_lengths: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Mean log-probabilities of both responses of each pair."""
    pairs = range(len(chosen))
    return [(chosen[i].double() / chosen_lengths[i], rejected[i].double() / rejected_lengths[i]) for i in pairs]
