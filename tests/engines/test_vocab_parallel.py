"""Logprobs and entropies from hidden states, a slice of the vocabulary each: pieces, extremes, and memory.

That several ranks give what one does is in test_megatron.py ("tp2-fused" and others); here the group has one rank.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlkit.engines.distributed import init_distributed
from rlkit.engines.megatron.vocab_parallel import vocab_parallel_linear_logprobs
from rlkit.losses import linear_logprobs

TOKENS, HIDDEN, VOCABULARY = 7, 5, 11


def values_and_gradients(function, hidden, weight, targets, **options):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, entropy = function(hidden, weight, targets, 1.3, **options)
    draw = torch.Generator().manual_seed(2)
    seeds = [torch.randn(len(targets), generator=draw) for _ in range(2)]
    kept = logprobs.isfinite()  # a suppressed target's
    ((logprobs * seeds[0])[kept].sum() + (entropy * seeds[1]).sum()).backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("scale", [1.0, 60.0])
@pytest.mark.parametrize("suppress", [None, [2, 10]])
def test_pieces_give_what_one_does(chunk, scale, suppress):
    init_distributed("cpu")
    torch.manual_seed(0)
    hidden, weight = scale * torch.randn(TOKENS, HIDDEN), torch.randn(VOCABULARY, HIDDEN)
    targets = torch.tensor([0, 3, 10, 1, 2, 5, 5])  # two of them suppressed
    suppress = None if suppress is None else torch.tensor(suppress)
    came = values_and_gradients(vocab_parallel_linear_logprobs, hidden, weight, targets, suppress=suppress, chunk=chunk)
    expected = values_and_gradients(linear_logprobs, hidden, weight, targets, suppress=suppress)
    assert suppress is None or came[0].isinf().sum() == 2
    for mine, theirs in zip(came, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


class Largest(TorchDispatchMode):
    """How many elements the largest new tensor has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            self.elements = max(self.elements, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


def test_the_logits_are_never_there():
    init_distributed("cpu")
    hidden, weight = torch.randn(50, 4), torch.randn(40, 4)
    with Largest() as largest:
        values_and_gradients(vocab_parallel_linear_logprobs, hidden, weight, torch.zeros(50).long(), chunk=5)
    assert largest.elements == 50 * 4  # the hidden states; 5 of 50 tokens' logits are as many, all of them 2000
