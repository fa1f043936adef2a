"""The auxiliary loss of mixtures of experts."""

import torch
from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import GlobalSum, divide, masked, one_rank


def load_balancing_loss(
    router_logits: Tensor,
    mask: Tensor,
    top_k: int,
    total: float | Tensor | None = None,
    global_sum: GlobalSum = one_rank,
) -> Tensor:
    r"""How unevenly a router spreads tokens over its experts: k where it is even, up to the number of experts.

    $$L = E \sum_e f_e P_e, \quad f_e = \frac{1}{n} \sum_t [e \in \mathrm{top}_k(t)], \quad
    P_e = \frac{1}{\text{total}} \sum_t p_t(e)$$
    with p the softmax of the logits over the E experts and n the tokens that f counts.

    Switch Transformers, https://arxiv.org/abs/2101.03961 eq. 4 to 6, with k experts per token as in Mixtral. Only P
    gets a gradient. With `global_sum` the shares f are those of all ranks, https://arxiv.org/abs/2501.11873, which
    leaves experts free to specialise within a micro-batch.

    Choices: this is the loss of one layer; add up the layers'. transformers takes f and P over the tokens of all layers
    together, so that one layer's load can make up for another's. For one layer both are the same.

    Args:
        router_logits: [B, T, E], of one layer.
        mask: bool [B, T], True on the tokens to balance: all but padding.
        top_k: number of experts that a token goes to, in [1, E].
        total: tokens of the mask over all micro-batches and ranks; None counts this mask.
        global_sum: adds a tensor over ranks, such as an engine's method of that name; by default this is the batch.

    Returns:
        0-d.
    """
    check.floating("router_logits", router_logits)
    check.rank("router_logits", router_logits, 3, "[B, T, E]")
    check.token_mask(mask)
    check.shape("mask", mask, tuple(router_logits.shape[:2]), "as router_logits without E")
    check.positive(top_k=top_k)
    experts = router_logits.shape[2]
    logits = masked(router_logits, mask[..., None])
    chosen = torch.zeros_like(logits).scatter(2, logits.topk(top_k).indices, 1)
    counts = global_sum(masked(chosen, mask[..., None]).sum((0, 1)))
    share = counts * top_k / counts.sum().clamp(min=1)
    probability = masked(logits.softmax(-1), mask[..., None]).sum((0, 1))
    return experts * (share * divide(probability, mask.sum() if total is None else total)).sum()
