"""Preference losses with their options, and random responses, for several test files."""

from functools import partial

import torch

from rlkit.losses.preference import (
    apo_zero_loss,
    bradley_terry_loss,
    dpo_loss,
    hinge_dpo_loss,
    ipo_loss,
    orpo_loss,
    reward_centring_loss,
    robust_dpo_loss,
    simpo_loss,
    slic_loss,
)

WITH_REFERENCE = {
    "dpo": dpo_loss,
    "smoothed": partial(dpo_loss, beta=0.3, label_smoothing=0.2),
    "robust": partial(robust_dpo_loss, beta=0.3, label_smoothing=0.2),
    "ipo": ipo_loss,
    "hinge": hinge_dpo_loss,
    "apo": apo_zero_loss,
}
OF_THE_PAIR = {  # alone, or with a number a pair
    "slic": slic_loss,
    "slic_wide": partial(slic_loss, margin=6.0),
    "bradley_terry": bradley_terry_loss,
    "bradley_terry_margin": bradley_terry_loss,
    "centred": reward_centring_loss,
}
WITH_LENGTHS = {"simpo": simpo_loss, "simpo2": partial(simpo_loss, beta=1.3, gamma=0.4), "orpo": orpo_loss}


EVERY = {**WITH_REFERENCE, **WITH_LENGTHS}


def arguments(name, data):
    if name in OF_THE_PAIR:
        return data[: 3 if name.endswith("margin") else 2]
    return data[:4] if name in WITH_REFERENCE else (*data[:2], *data[4:])


def responses(seed=0, b=8):
    """logprobs, ref_logprobs, desirable."""
    g = torch.Generator().manual_seed(seed)
    ref = -20 * torch.rand(b, generator=g, dtype=torch.float64)
    logprobs = (ref + 5 * torch.randn(b, generator=g, dtype=torch.float64)).requires_grad_()
    return logprobs, ref, torch.rand(b, generator=g) < 0.5
