"""`rlkit.losses.reductions` token by token."""

import torch
from torch import Tensor

from rlkit.losses.naive._loops import add, sequences, trained


def token_sum(loss: Tensor, mask: Tensor) -> Tensor:
    return add(loss[b, t].double() for b, t in trained(mask))


def token_mean(loss: Tensor, mask: Tensor, total: float | Tensor | None = None) -> Tensor:
    return _over(token_sum(loss, mask), len(trained(mask)) if total is None else total)


def sequence_mean(loss: Tensor, mask: Tensor, total: float | Tensor | None = None) -> Tensor:
    means = []
    for b, tokens in sequences(mask):
        one = loss[b].double()
        means.append(one if loss.ndim == 1 else add(one[t] for t in tokens) / len(tokens))
    return _over(add(means), len(means) if total is None else total)


def sequence_sum_mean(loss: Tensor, mask: Tensor, total: float | Tensor | None = None) -> Tensor:
    sums = []
    for b, tokens in sequences(mask):
        one = loss[b].double()
        sums.append(one if loss.ndim == 1 else add(one[t] for t in tokens))
    return _over(add(sums), len(sums) if total is None else total)


def fixed_length_mean(loss: Tensor, mask: Tensor, length: float, total: float | Tensor | None = None) -> Tensor:
    return sequence_sum_mean(loss, mask, total) / length


def prompt_mean(loss: Tensor, mask: Tensor, group_tokens: Tensor, total: float | Tensor | None = None) -> Tensor:
    prompts = sum(len(own) / group_tokens[b].item() for b, own in sequences(mask))
    shares = (loss[b, t].double() / group_tokens[b] for b, t in trained(mask))
    return _over(add(shares), prompts if total is None else total)


def group_token_counts(mask: Tensor, group_ids: Tensor) -> Tensor:
    return torch.stack([mask[group_ids == group].sum() for group in group_ids])


def preference_mean(loss: Tensor, total: float | Tensor | None = None) -> Tensor:
    return _over(add(one.double() for one in loss), len(loss) if total is None else total)


def _over(result: Tensor, total: float | Tensor) -> Tensor:
    return result / total if total > 0 else 0 * result
