"""Random batches and the trust-region losses as functions of them, for several test files."""

import torch

from rlkit.losses.trust_region import clip_cov_loss, dppo_kl_loss, dppo_tv_loss, dro_loss, kl_cov_loss, vespo_loss


def uniform_of(x):
    """The same number for the same old logprob, so that slices and orders keep their draw."""
    return (x.detach().double() * 1e3).sin() * 0.5 + 0.5


def clip_cov(lp, old, adv, mask, **knobs):
    knobs = {"share": 0.1, "cov_low": 0.1, "cov_high": 2.0, "clip_low": 0.3, "clip_high": 0.4} | knobs
    return clip_cov_loss(lp, old, adv, mask, uniform_of(old), **knobs)


def kl_cov(lp, old, adv, mask, **knobs):
    return kl_cov_loss(lp, old, adv, mask, **({"share": 0.3, "kl_coef": 0.7} | knobs))


def dppo_tv(lp, old, adv, mask):
    return dppo_tv_loss(lp, old, adv, mask, 0.1, 0.07, 1.5)


def dppo_kl(lp, old, adv, mask):
    return dppo_kl_loss(lp, old, adv, mask, 0.05, 0.03, 1.5)


def dro(lp, old, adv, mask):
    return dro_loss(lp, old, adv, mask, 0.4)


def vespo(lp, old, adv, mask):
    return vespo_loss(lp, old, adv, mask, 1.5, 2.5, 3.0, 0.5)


def batch(seed=0, b=6, t=7):
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(b, t, generator=g, dtype=torch.float64) * 2.5 - 0.3
    lp = old + torch.randn(b, t, generator=g, dtype=torch.float64) * 0.4
    adv = torch.randn(b, t, generator=g, dtype=torch.float64)
    mask = torch.rand(b, t, generator=g) < 0.7
    return lp.clamp(max=-0.01).requires_grad_(), old, adv, mask


def grad_of(loss, lp):
    return torch.autograd.grad(loss.sum(), lp)[0]
