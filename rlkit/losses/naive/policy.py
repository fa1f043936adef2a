"""`rlkit.losses.policy` token by token."""

from torch import Tensor

from rlkit.losses.naive._loops import constant, per_token, trained, zeros


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    logprobs, old, adv, loss = logprobs.double(), constant(old_logprobs), per_token(advantages, mask), zeros(mask)
    for b, t in trained(mask):
        ratio = (logprobs[b, t] - old[b, t]).exp()
        held = ratio.clamp(1 - clip_low, 1 + clip_high)
        surrogate = min(ratio * adv[b, t], held * adv[b, t])
        if dual_clip is not None and adv[b, t] < 0:
            surrogate = max(surrogate, dual_clip * adv[b, t])
        loss[b, t] = -surrogate
    return loss


def reinforce_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    logprobs, adv, loss = logprobs.double(), per_token(advantages, mask), zeros(mask)
    for b, t in trained(mask):
        loss[b, t] = -adv[b, t] * logprobs[b, t]
    return loss


gpg_loss = reinforce_loss


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Tensor:
    logprobs, old, adv, loss = logprobs.double(), constant(old_logprobs), per_token(advantages, mask), zeros(mask)
    for b, t in trained(mask):
        ratio = (logprobs[b, t] - old[b, t]).exp().item()
        weight = max(1 - clip_low, min(ratio, 1 + clip_high))
        loss[b, t] = -weight * adv[b, t] * logprobs[b, t]
    return loss


def gppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    logprobs, old, adv, loss = logprobs.double(), constant(old_logprobs), per_token(advantages, mask), zeros(mask)
    for b, t in trained(mask):
        ratio = (logprobs[b, t] - old[b, t]).exp()
        if adv[b, t] > 0:
            weight = min(ratio.item(), 1 + clip_high)
        else:
            weight = max(ratio.item(), 1 - clip_low)
        loss[b, t] = -weight * ratio / ratio.item() * adv[b, t]
    return loss


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Tensor:
    logprobs, old, adv, loss = logprobs.double(), constant(old_logprobs), per_token(advantages, mask), zeros(mask)
    for b, t in trained(mask):
        ratio = (logprobs[b, t] - old[b, t]).exp()
        tau = tau_pos if adv[b, t] > 0 else tau_neg
        gate = 4 / tau / (1 + (-tau * (ratio - 1)).exp())
        loss[b, t] = -gate * adv[b, t]
    return loss
