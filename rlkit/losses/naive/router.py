"""`rlkit.losses.router` token by token."""

import torch
from torch import Tensor

from rlkit._numerics import GlobalSum, one_rank
from rlkit.losses.naive._loops import add, trained


def load_balancing_loss(
    router_logits: Tensor,
    mask: Tensor,
    top_k: int,
    total: float | Tensor | None = None,
    global_sum: GlobalSum = one_rank,
) -> Tensor:
    experts, at = router_logits.shape[2], trained(mask)
    routed = torch.zeros(experts, dtype=torch.float64)
    for b, t in at:
        best = sorted(range(experts), key=lambda e: router_logits[b, t, e].item(), reverse=True)[:top_k]
        for e in best:
            routed[e] += 1
    counts = global_sum(torch.cat([routed, torch.tensor([float(len(at))], dtype=torch.float64)]))
    loss, tokens = [], len(at) if total is None else float(total)
    for e in range(experts):
        weights = (router_logits[b, t].double().exp() for b, t in at)
        probability = add(w[e] / w.sum() for w in weights) / tokens if tokens else 0 * router_logits.sum()
        loss.append(counts[e] / max(counts[-1].item(), 1) * probability)
    return experts * add(loss)
