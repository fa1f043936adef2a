"""target_logprobs, token_entropy and sum_pi_squared work in pieces of rows: memory, pieces, transforms, values."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlkit.losses import _kernels as module
from rlkit.losses import sum_pi_squared, target_logprobs, token_entropy, token_logprobs


class Sizes(TorchDispatchMode):
    """How many elements each operation's new tensors have; a view of an argument, or the argument itself, is not."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.made.append(x.numel())
        return out


@pytest.mark.parametrize("leading", [(40,), (4, 10)])
@pytest.mark.parametrize("what", ["logprobs", "kept logprobs", "entropy", "shifted logprobs", "squares"])
def test_from_logits_the_only_tensor_of_their_size_is_their_gradient(monkeypatch, what, leading):
    monkeypatch.setattr(module, "CPU_CACHE_BYTES", 4 * 50 * 8)  # four rows
    logits = torch.randn(*leading, 50, dtype=torch.float64, requires_grad=True)
    tokens, keep = torch.randint(0, 50, leading), torch.rand(*leading, 50) < 0.5
    if what == "shifted logprobs":
        logits, tokens = logits.detach().reshape(-1, 10, 50).requires_grad_(), tokens.reshape(-1, 10)
    call = {
        "logprobs": lambda: target_logprobs(logits, tokens, 0.7),
        "kept logprobs": lambda: target_logprobs(logits, tokens, 0.7, keep),
        "shifted logprobs": lambda: token_logprobs(logits, tokens, 0.7),
        "entropy": lambda: token_entropy(logits, 0.7),
        "squares": lambda: sum_pi_squared(logits, 0.7),
    }[what]
    with Sizes() as sizes:
        out = call()
        forward = len(sizes.made)
        if out.requires_grad:
            out.sum().backward()
    assert max(sizes.made[:forward]) == 4 * 50
    assert sum(n > 4 * 50 for n in sizes.made[forward:]) == (1 if out.requires_grad else 0)


@pytest.mark.parametrize("bytes_", [1, 3 * 11 * 8, 2**22])
def test_pieces_change_nothing(monkeypatch, bytes_):
    monkeypatch.setattr(module, "CPU_CACHE_BYTES", bytes_)
    logits = torch.randn(2, 4, 11, dtype=torch.float64, requires_grad=True)
    targets, temperature = torch.randint(0, 11, (2, 4)), torch.rand(2, 4, dtype=torch.float64) + 0.5
    logprobs, entropy = target_logprobs(logits, targets, temperature), token_entropy(logits, temperature)
    expected = []
    for b in range(2):
        for t in range(4):
            z = logits[b, t] / temperature[b, t]
            total = sum(z[v].exp() for v in range(11))
            logp = [z[v] - total.log() for v in range(11)]
            expected.append(torch.stack([logp[int(targets[b, t])], -sum(x.exp() * x for x in logp)]))
    expected = torch.stack(expected).reshape(2, 4, 2)
    torch.testing.assert_close(torch.stack([logprobs, entropy], -1), expected)
    weights = torch.randn(2, 4, dtype=torch.float64)
    for ours, theirs in ((logprobs, expected[..., 0]), (entropy, expected[..., 1])):
        grads = [torch.autograd.grad((x * weights).sum(), logits, retain_graph=True)[0] for x in (ours, theirs)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("bytes_", [1, 3 * 11 * 8, 2**22])
def test_several_targets_are_one_after_the_other(monkeypatch, bytes_):
    monkeypatch.setattr(module, "CPU_CACHE_BYTES", bytes_)
    logits = torch.randn(2, 4, 11, dtype=torch.float64, requires_grad=True)
    targets, temperature = torch.randint(0, 11, (2, 4, 5)), torch.rand(2, 4, dtype=torch.float64) + 0.5
    targets[0, 0, 1] = targets[0, 0, 0]  # twice the same
    ours = target_logprobs(logits, targets, temperature)
    single = torch.stack([target_logprobs(logits, targets[..., k], temperature) for k in range(5)], -1)
    torch.testing.assert_close(ours, single)
    weights = torch.randn(2, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(*(torch.autograd.grad((x * weights).sum(), logits) for x in (ours, single)))
    assert target_logprobs(logits, targets[..., :0]).shape == (2, 4, 0)
    assert target_logprobs(torch.zeros(0, 3), torch.zeros(0, 2).long()).shape == (0, 2)


@pytest.mark.parametrize("several", [False, True])
def test_a_kept_part_of_the_vocabulary_is_all_there_is(several):
    """As if the other logits were -inf; a target outside has no chance, and nothing outside has a gradient."""
    logits = torch.randn(2, 4, 11, dtype=torch.float64, requires_grad=True)
    keep = torch.rand(2, 4, 11) < 0.5
    keep[..., :2] = True  # without the target there is something left
    targets = logits.detach().masked_fill(~keep, -9).topk(2).indices
    targets = targets if several else targets[..., 0]
    keep = keep.scatter(2, targets.reshape(2, 4, -1), True)
    ours, expected = target_logprobs(logits, targets, 0.7, keep), logits.masked_fill(~keep, -torch.inf)
    torch.testing.assert_close(ours, target_logprobs(expected, targets, 0.7))
    assert (ours > target_logprobs(logits, targets, 0.7)).any()
    slopes = [torch.autograd.grad(x.sum(), logits)[0] for x in (ours, target_logprobs(expected, targets, 0.7))]
    torch.testing.assert_close(*slopes)
    assert (slopes[0][~keep] == 0).all()
    first = targets[..., 0] if several else targets
    gone = keep.scatter(2, first[..., None], False)
    assert (target_logprobs(logits, first, 0.7, gone) == -torch.inf).all()


def test_from_logits_compiles_and_transforms():
    logits, targets = torch.randn(2, 3, 5), torch.randint(0, 5, (2, 3))
    for fn in (lambda z: token_logprobs(z, targets, 0.7), lambda z: token_entropy(z, 0.7)):
        leaf = logits.clone().requires_grad_()
        (expected,) = torch.autograd.grad(fn(leaf).sum(), leaf)
        torch.testing.assert_close(torch.func.grad(lambda z, fn=fn: fn(z).sum())(logits), expected)
        compiled = torch.compile(fn, backend="eager", fullgraph=True)
        torch.testing.assert_close(torch.autograd.grad(compiled(leaf).sum(), leaf)[0], expected)


def test_sum_pi_squared_golden_and_loop():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, math.log(3), -math.inf, -math.inf], [99.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(sum_pi_squared(logits), torch.tensor([1 / 4, 10 / 16, 1.0]))
    logits, temperature = torch.randn(2, 3, 7, dtype=torch.float64), torch.rand(2, 1, dtype=torch.float64) + 0.5
    out = sum_pi_squared(logits, temperature)
    for b in range(2):
        for t in range(3):
            weights = [math.exp(z / temperature[b, 0].item()) for z in logits[b, t].tolist()]
            assert out[b, t].item() == pytest.approx(sum((w / sum(weights)) ** 2 for w in weights))
    assert sum_pi_squared(torch.zeros(0, 3, 4)).shape == (0, 3)
    for x in (temperature, 0.7):
        assert sum_pi_squared(logits.float(), x).dtype == sum_pi_squared(logits.bfloat16(), x).dtype == torch.float32
    assert sum_pi_squared(torch.zeros(5, dtype=torch.bfloat16)).item() == pytest.approx(0.2)
    assert sum_pi_squared(torch.zeros(1, 5, dtype=torch.bfloat16)).dtype == torch.float32
    with pytest.raises(ValueError, match="temperature"):
        sum_pi_squared(torch.zeros(3, 4), 0.0)
