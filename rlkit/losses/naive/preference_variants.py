"""`rlkit.losses.preference_variants` pair by pair."""

import math

import torch
from torch import Tensor

from rlkit.losses.naive._loops import add, sequences
from rlkit.losses.naive.preference import log_ratios, means, sigmoid


def apo_down_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1
) -> Tensor:
    loss = torch.zeros(len(chosen), dtype=torch.float64)
    for i, (h_w, h_l) in enumerate(log_ratios(chosen, rejected, ref_chosen, ref_rejected)):
        loss[i] = sigmoid(beta * h_w) + (1 - sigmoid(beta * (h_w - h_l)))
    return loss


def exo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 1e-3,
) -> Tensor:
    loss = torch.zeros(len(chosen), dtype=torch.float64)
    for i, (h_w, h_l) in enumerate(log_ratios(chosen, rejected, ref_chosen, ref_rejected)):
        q = sigmoid(beta * (h_w - h_l))
        loss[i] = q * (q / (1 - label_smoothing)).log() + (1 - q) * ((1 - q) / label_smoothing).log()
    return loss


def nca_loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1) -> Tensor:
    loss = torch.zeros(len(chosen), dtype=torch.float64)
    for i, (h_w, h_l) in enumerate(log_ratios(chosen, rejected, ref_chosen, ref_rejected)):
        up, down = sigmoid(beta * h_w), sigmoid(beta * h_l)
        loss[i] = -up.log() - (1 - up).log() / 2 - (1 - down).log() / 2
    return loss


def sppo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.001
) -> Tensor:
    loss = torch.zeros(len(chosen), dtype=torch.float64)
    for i, (h_w, h_l) in enumerate(log_ratios(chosen, rejected, ref_chosen, ref_rejected)):
        loss[i] = (h_w - 1 / (2 * beta)) ** 2 + (h_l + 1 / (2 * beta)) ** 2
    return loss


def bco_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    delta: float | Tensor,
    beta: float = 0.1,
) -> Tensor:
    loss = torch.zeros(len(chosen), dtype=torch.float64)
    for i, (h_w, h_l) in enumerate(log_ratios(chosen, rejected, ref_chosen, ref_rejected)):
        good, bad = sigmoid(beta * h_w - float(delta)), sigmoid(beta * h_l - float(delta))
        loss[i] = -good.log() - (1 - bad).log()
    return loss


def discopop_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.05,
    tau: float = 0.05,
) -> Tensor:
    loss = torch.zeros(len(chosen), dtype=torch.float64)
    for i, (h_w, h_l) in enumerate(log_ratios(chosen, rejected, ref_chosen, ref_rejected)):
        x = beta * (h_w - h_l)
        share = sigmoid(x / tau)
        loss[i] = (1 - share) * -sigmoid(x).log() + share * (-x).exp()
    return loss


def alphapo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    alpha: float = 0.25,
    beta: float = 2.5,
    gamma: float = 0.1,
) -> Tensor:
    loss = torch.zeros(len(chosen), dtype=torch.float64)
    for i, (mean_w, mean_l) in enumerate(means(chosen, rejected, chosen_lengths, rejected_lengths)):
        r_w, r_l = ((1 - mean.exp() ** -alpha) / alpha if alpha else mean for mean in (mean_w, mean_l))
        loss[i] = -sigmoid(beta * r_w - beta * r_l - gamma).log()
    return loss


def tpo_loss(
    chosen: Tensor, rejected: Tensor, gold: Tensor, beta: float = 0.01, alpha: float = 1.0, gamma: float = 0.0
) -> Tensor:
    loss = torch.zeros(len(chosen), dtype=torch.float64)
    for i in range(len(chosen)):
        margin = beta * chosen[i].double() - beta * rejected[i].double() - gamma
        loss[i] = -sigmoid(margin).log() - alpha * gold[i].double()
    return loss


def a_star_po_loss(
    logprobs: Tensor, ref_logprobs: Tensor, rewards: Tensor, values: Tensor, beta: float = 1e-3
) -> Tensor:
    loss = torch.zeros(len(logprobs), dtype=torch.float64)
    for i in range(len(logprobs)):
        h = logprobs[i].double() - ref_logprobs[i].item()
        loss[i] = (beta * h - (rewards[i].item() - values[i].item())) ** 2
    return loss


def alpha_divergence_dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    alpha: float = 0.5,
) -> Tensor:
    loss = torch.zeros(len(chosen), dtype=torch.float64)
    for i, (h_w, h_l) in enumerate(log_ratios(chosen, rejected, ref_chosen, ref_rejected)):
        r_w, r_l = ((1 - h.exp() ** -alpha) / alpha if alpha else h for h in (h_w, h_l))
        loss[i] = -sigmoid(beta * r_w - beta * r_l).log()
    return loss


def forward_kl_dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1
) -> Tensor:
    loss = torch.zeros(len(chosen), dtype=torch.float64)
    for i, (h_w, h_l) in enumerate(log_ratios(chosen, rejected, ref_chosen, ref_rejected)):
        loss[i] = -sigmoid(beta / h_l.exp() - beta / h_w.exp()).log()
    return loss


def js_dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1
) -> Tensor:
    loss = torch.zeros(len(chosen), dtype=torch.float64)
    for i, (h_w, h_l) in enumerate(log_ratios(chosen, rejected, ref_chosen, ref_rejected)):
        r_w, r_l = ((2 * h.exp() / (1 + h.exp())).log() for h in (h_w, h_l))
        loss[i] = -sigmoid(beta * r_w - beta * r_l).log()
    return loss


def aot_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    margins = sorted(chosen[i].double() - rejected[i] for i in range(len(chosen)))
    ref_margins = sorted(ref_chosen[i].item() - ref_rejected[i].item() for i in range(len(chosen)))
    return _quantile_losses([m - ref for m, ref in zip(margins, ref_margins, strict=True)], beta, label_smoothing)


def aot_unpaired_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    both = log_ratios(chosen, rejected, ref_chosen, ref_rejected)
    good, bad = sorted(h_w for h_w, _ in both), sorted(h_l for _, h_l in both)
    return _quantile_losses([w - lose for w, lose in zip(good, bad, strict=True)], beta, label_smoothing)


def ld_sequence_logprobs(logprobs: Tensor, mask: Tensor, shared_lengths: Tensor, alpha: float = 0.5) -> Tensor:
    out = torch.zeros(len(mask), dtype=torch.float64)
    for b, tokens in sequences(mask):
        n = int(shared_lengths[b])
        out[b] = add(logprobs[b, t] for t in tokens[:n]) + alpha * add(logprobs[b, t] for t in tokens[n:])
    return out


@torch.no_grad()
def wpo_weights(logprobs: Tensor, sum_pi_squared: Tensor, mask: Tensor) -> Tensor:
    out = torch.ones(len(mask), dtype=torch.float64)
    for b, tokens in sequences(mask):
        surprise = [logprobs[b, t].item() - math.log(sum_pi_squared[b, t].item()) for t in tokens]
        out[b] = math.exp(sum(surprise) / len(tokens))
    return out


def _quantile_losses(gaps: list[Tensor], beta: float, label_smoothing: float) -> Tensor:
    """DPO's loss of each gap."""
    loss = torch.zeros(len(gaps), dtype=torch.float64)
    for i, gap in enumerate(gaps):
        win = sigmoid(beta * gap)
        loss[i] = -(1 - label_smoothing) * win.log() - label_smoothing * (1 - win).log()
    return loss
