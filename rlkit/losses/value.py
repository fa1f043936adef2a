"""Losses of the value head, one value per token."""

import torch
from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import masked


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float = 0.5) -> Tensor:
    r"""Half the squared error of the values, with their move since sampling bounded as PPO bounds the ratio.

    $$L = \tfrac{1}{2} \max\big((v - R)^2, (\mathrm{clip}(v, v_{old} - \epsilon, v_{old} + \epsilon) - R)^2\big)$$

    From the code of PPO (https://github.com/openai/baselines, `baselines/ppo2/model.py`), written down in
    https://arxiv.org/abs/2005.12729 section 3. verl has the same formula, factor 1/2 and 0.5 included.

    A value that has moved more than `clip` towards its return gets gradient 0 until it overshoots; one that has moved
    away from it keeps its gradient. Only `values` gets a gradient.

    Args:
        values: [B, T], of the head being trained: `values[b, t]` is that of the prefix before token t.
        old_values: [B, T], under the weights the batch was sampled with.
        returns: [B, T], the targets, such as the returns of `gae`.
        clip: in units of the return, so it goes with the scale of the rewards; >= 0; `math.inf` gives the plain squared
            error.
    """
    check.per_token(mask, values=values, old_values=old_values, returns=returns)
    check.not_negative(clip=clip)
    values = masked(values, mask)
    old_values, returns = masked(old_values.detach(), mask), masked(returns.detach(), mask)
    clipped = values.clamp(old_values - clip, old_values + clip)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
