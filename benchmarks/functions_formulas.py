"""Formulas as one writes them down in torch for oneself. No code is shared with ours.

They are masked, and log-ratios are held within 20 nats, as ours are. So are the log-probabilities that VESPO weighs:
within 20 nats of the old ones, so that one of -inf has no gradient. A loss takes (logprobs, old_logprobs, advantages,
mask); with one advantage a sequence they are [B].
"""

import torch


def log_ratio(logprobs, old, mask):
    return torch.where(mask, logprobs - old, 0).clamp(-20, 20)


def ratio(logprobs, old, mask):
    return log_ratio(logprobs, old, mask).exp()


def per_token(advantages, mask):
    return torch.where(mask, advantages[:, None] if advantages.ndim == 1 else advantages, 0)


def clipped(low, high, dual=None):
    def loss(logprobs, old, advantages, mask):
        r, a = ratio(logprobs, old, mask), per_token(advantages, mask)
        result = torch.maximum(-a * r, -a * r.clamp(1 - low, 1 + high))
        return result if dual is None else torch.where(a < 0, torch.minimum(result, -dual * a), result)

    return loss


def reinforce(logprobs, old, advantages, mask):
    return -per_token(advantages, mask) * torch.where(mask, logprobs, 0)


def cispo(low, high):
    def loss(logprobs, old, advantages, mask):
        weight = ratio(logprobs.detach(), old, mask).clamp(1 - low, 1 + high)
        return -weight * reinforce(-logprobs, old, advantages, mask)

    return loss


def sapo(logprobs, old, advantages, mask):
    r, a = ratio(logprobs, old, mask), per_token(advantages, mask)
    tau = torch.where(a > 0, 1.0, 1.05)
    return -4 / tau * torch.sigmoid(tau * (r - 1)) * a


def mean_log_ratio(logprobs, old, mask):
    return log_ratio(logprobs, old, mask).sum(1) / mask.sum(1).clamp(min=1)


def gspo(low, high):
    def loss(logprobs, old, advantages, mask):
        s = mean_log_ratio(logprobs, old, mask).exp()
        of_row = torch.maximum(-advantages * s, -advantages * s.clamp(1 - low, 1 + high))
        return torch.where(mask, of_row[:, None], 0)

    return loss


def gmpo(low, high):
    def loss(logprobs, old, advantages, mask):
        d, a = log_ratio(logprobs, old, mask), per_token(advantages, mask)
        held = a.sign() * torch.minimum(a.sign() * d, a.sign() * d.clamp(-low, high))
        return -a * (held.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).exp()

    return loss


def dppo_tv(delta, ratio_high):
    def loss(logprobs, old, advantages, mask):
        r, a = ratio(logprobs, old, mask), per_token(advantages, mask)
        gain = torch.where(mask, logprobs.detach().exp() - old.exp(), 0)
        out = ((a > 0) & (gain > delta)) | ((a < 0) & (gain < -delta))
        return torch.where(out, 0, -a * r * (ratio_high / r.detach()).clamp(max=1))

    return loss


def dro(beta):
    def loss(logprobs, old, advantages, mask):
        return reinforce(logprobs, old, advantages, mask) + beta / 2 * log_ratio(logprobs, old, mask).square()

    return loss


def vespo(logprobs, old, advantages, mask):
    d = log_ratio(logprobs, old, mask)
    log_w = d.detach().sum(1).clamp(-20, 20)
    k, decay = torch.where(advantages < 0, 3.0, 2.0), torch.where(advantages < 0, 2.0, 3.0)
    phi = (k * log_w + decay * (1 - log_w.exp())).clamp(max=20).exp()
    return -(phi * advantages)[:, None] * (torch.where(mask, old, 0) + d)


def value(clip):
    def loss(values, old, returns, mask):
        values, old, returns = (torch.where(mask, x, 0) for x in (values, old, returns))
        held = values.clamp(old - clip, old + clip)
        return torch.maximum((values - returns) ** 2, (held - returns) ** 2) / 2

    return loss


def kl_k3(logprobs, ref, mask):
    d = log_ratio(ref, logprobs, mask)
    return d.exp() - 1 - d


def mean_of_tokens(loss, mask):
    return torch.where(mask, loss, 0).sum() / mask.sum()


def mean_of_sequences(loss, mask):
    rows = torch.where(mask, loss, 0).sum(1) / mask.sum(1).clamp(min=1)
    return rows.sum() / mask.any(1).sum()
