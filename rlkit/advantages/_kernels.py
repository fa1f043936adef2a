"""What changes the order of growth: a recurrence over tokens in log2(T) rounds on whole tensors."""

import torch
from torch import Tensor


def recurrence(x: Tensor, decay: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: y[t] = x[t] + decay[t] * y[t + 1], where t counts the tokens of the mask; 0 past the last of them.

    A token outside the mask has y of the next token of the mask: x counts as 0 there and the decay as 1. `decay`
    broadcasts to [B, T]. The scan runs over dimension 0 of [T, B], so that it merges whole rows of memory.
    """
    x, decay = torch.where(mask, x, 0), torch.where(mask, decay, 1)
    return suffix_scan(x.t().contiguous(), decay.t().contiguous()).t().contiguous()


def next_token(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: x of the next token of the mask; 0 past the last of them."""
    this_or_next = recurrence(x, x.new_zeros(()), mask)
    return torch.cat([this_or_next[:, 1:], torch.zeros_like(x[:, :1])], 1)


def suffix_scan(x: Tensor, decay: Tensor) -> Tensor:
    """x[t] + decay[t] * x[t + 1] + decay[t] * decay[t + 1] * x[t + 2] + ... along dimension 0.

    Steps t and t + 1 are one step: x[t] + decay[t] * x[t + 1] with decay[t] * decay[t + 1]. Merge the pairs into their
    even steps, solve that problem of half the length, fill in the odd steps: about three products per token in all, and
    no division by a power of decay, which would overflow.
    """
    length = len(x)
    if length < 2:
        return x
    if length % 2:
        x, decay = (torch.cat([y, torch.zeros_like(y[:1])]) for y in (x, decay))
    even, odd, even_decay, odd_decay = x[::2], x[1::2], decay[::2], decay[1::2]
    even = suffix_scan(torch.addcmul(even, even_decay, odd), even_decay * odd_decay)
    odd = torch.cat([torch.addcmul(odd[:-1], odd_decay[:-1], even[1:]), odd[-1:]])
    return torch.stack([even, odd], 1).flatten(0, 1)[:length]
