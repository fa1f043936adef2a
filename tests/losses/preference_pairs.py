"""Random preference pairs, and the less common losses on them by name, for the tests of both."""

from functools import partial

import torch

from rlkit.losses.preference_variants import (
    alpha_divergence_dpo_loss,
    alphapo_loss,
    aot_loss,
    aot_unpaired_loss,
    apo_down_loss,
    bco_loss,
    discopop_loss,
    exo_loss,
    forward_kl_dpo_loss,
    js_dpo_loss,
    nca_loss,
    sppo_loss,
)

PAIRWISE = {  # an entry of the loss is a pair's
    "apo_down": partial(apo_down_loss, beta=0.3),
    "exo": partial(exo_loss, beta=0.3, label_smoothing=0.01),
    "nca": partial(nca_loss, beta=0.3),
    "sppo": partial(sppo_loss, beta=0.1),
    "bco": partial(bco_loss, delta=0.4, beta=0.3),
    "discopop": partial(discopop_loss, beta=0.3, tau=0.5),
    "discopop_wide": partial(discopop_loss, beta=0.3, tau=3.0),
    "alpha": partial(alpha_divergence_dpo_loss, beta=0.3, alpha=0.4),
    "alpha0": partial(alpha_divergence_dpo_loss, beta=0.3, alpha=0.0),
    "forward_kl": partial(forward_kl_dpo_loss, beta=0.3),
    "js": partial(js_dpo_loss, beta=0.3),
}
SORTED = {"aot": partial(aot_loss, beta=0.3), "aot_unpaired": partial(aot_unpaired_loss, beta=0.3)}
SMOOTHED = {name + "_smoothed": partial(loss, label_smoothing=0.2) for name, loss in SORTED.items()}
WITH_REFERENCE = {**PAIRWISE, **SORTED, **SMOOTHED}
WITH_LENGTHS = {"alphapo": alphapo_loss, "alphapo_minus": partial(alphapo_loss, alpha=-0.5, beta=1.3, gamma=0.4)}
EVERY = {**WITH_REFERENCE, **WITH_LENGTHS}


def pairs(seed=0, p=7, dtype=torch.float64, spread=4):
    """chosen, rejected, ref_chosen, ref_rejected, chosen_lengths, rejected_lengths; the first two get gradients."""
    g = torch.Generator().manual_seed(seed)
    ref = -20 * torch.rand(2, p, generator=g, dtype=torch.float64) - 4
    policy = (ref + spread * torch.randn(2, p, generator=g, dtype=torch.float64)).clamp(max=-0.1)
    chosen, rejected = (x.to(dtype).requires_grad_() for x in policy)
    lengths = torch.randint(1, 9, (2, p), generator=g)
    return chosen, rejected, *(x.to(dtype) for x in ref), *lengths


def arguments(name, data):
    return data[:4] if name in WITH_REFERENCE else (*data[:2], *data[4:])
