"""Random answers and the loop oracles of preference losses, for several test files."""

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


def sigmoid(x):
    return 1 / (1 + (-x).exp())


def soft(x):
    """-log sigmoid(x), written out."""
    return (1 + (-x).exp()).log()


def odds(p):
    return p / (1 - p)


ORACLE = {  # one pair on scalar tensors: chosen, rejected, and the references or the lengths
    "dpo": lambda w, v, rw, rv: soft(0.1 * (w - v - rw + rv)),
    "smoothed": lambda w, v, rw, rv: 0.8 * soft(0.3 * (w - v - rw + rv)) + 0.2 * soft(-0.3 * (w - v - rw + rv)),
    "robust": lambda w, v, rw, rv: (0.8 * soft(0.3 * (w - v - rw + rv)) - 0.2 * soft(-0.3 * (w - v - rw + rv))) / 0.6,
    "ipo": lambda w, v, rw, rv: (w - v - rw + rv - 5.0) ** 2,
    "hinge": lambda w, v, rw, rv: 1 - 0.1 * (w - v - rw + rv) if w - v - rw + rv < 10 else 0 * w,
    "apo": lambda w, v, rw, rv: 1 - sigmoid(0.1 * (w - rw)) + sigmoid(0.1 * (v - rv)),
    "simpo": lambda w, v, n, m: soft(2.0 * w / n - 2.0 * v / m - 1.0),
    "simpo2": lambda w, v, n, m: soft(1.3 * w / n - 1.3 * v / m - 0.4),
    "slic": lambda w, v: 1 - w + v if w - v < 1 else 0 * w,
    "slic_wide": lambda w, v: 6 - w + v if w - v < 6 else 0 * w,
    "bradley_terry": lambda w, v: soft(w - v),
    "bradley_terry_margin": lambda w, v, m: soft(w - v - m),
    "centred": lambda w, v: (w + v) * (w + v),
    "orpo": lambda w, v, n, m: soft((odds((w / n).exp()) / odds((v / m).exp())).log()),
}
EVERY = {**WITH_REFERENCE, **WITH_LENGTHS}


def arguments(name, data):
    if name in OF_THE_PAIR:
        return data[: 3 if name.endswith("margin") else 2]
    return data[:4] if name in WITH_REFERENCE else (*data[:2], *data[4:])


def answers(seed=0, b=8):
    """logprobs, ref_logprobs, desirable."""
    g = torch.Generator().manual_seed(seed)
    ref = -20 * torch.rand(b, generator=g, dtype=torch.float64)
    logprobs = (ref + 5 * torch.randn(b, generator=g, dtype=torch.float64)).requires_grad_()
    return logprobs, ref, torch.rand(b, generator=g) < 0.5
