"""Logprobs and entropies from hidden states with a sharded vocabulary: chunks, extreme values, and memory.

Here the group has one rank; several ranks are tested in test_megatron.py ("tp2" and others).
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
    is_finite = logprobs.isfinite()  # false for suppressed targets
    ((logprobs * seeds[0])[is_finite].sum() + (entropy * seeds[1]).sum()).backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("scale", [1.0, 60.0])
@pytest.mark.parametrize("suppress", [None, [2, 10]])
def test_chunks_equal_one_computation(chunk, scale, suppress):
    init_distributed("cpu")
    torch.manual_seed(0)
    hidden, weight = scale * torch.randn(TOKENS, HIDDEN), torch.randn(VOCABULARY, HIDDEN)
    targets = torch.tensor([0, 3, 10, 1, 2, 5, 5])  # two of them suppressed
    suppress = None if suppress is None else torch.tensor(suppress)
    options = {"suppress": suppress, "chunk": chunk}
    chunked = values_and_gradients(vocab_parallel_linear_logprobs, hidden, weight, targets, **options)
    expected = values_and_gradients(linear_logprobs, hidden, weight, targets, suppress=suppress)
    assert suppress is None or chunked[0].isinf().sum() == 2
    for one, other in zip(chunked, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_autocast_is_ignored():
    init_distributed("cpu")
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(TOKENS, HIDDEN), torch.randn(VOCABULARY, HIDDEN), torch.arange(TOKENS)
    expected = values_and_gradients(vocab_parallel_linear_logprobs, hidden, weight, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        in_autocast = values_and_gradients(vocab_parallel_linear_logprobs, hidden, weight, targets)
    torch.testing.assert_close(in_autocast, expected)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is created."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            self.elements = max(self.elements, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


def test_all_logits_never_exist_at_once():
    init_distributed("cpu")
    hidden, weight = torch.randn(50, 4), torch.randn(40, 4)
    with Largest() as largest:
        values_and_gradients(vocab_parallel_linear_logprobs, hidden, weight, torch.zeros(50).long(), chunk=5)
    assert largest.elements == 50 * 4  # hidden states, or the logits of 5 tokens; those of all tokens would be 2000
