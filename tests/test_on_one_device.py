"""No function of rlkit.losses and rlkit.advantages looks at a number on the host, or mixes tensors of two devices.

On meta tensors: they have no numbers, so that a look at one raises, as does here what takes them together with others.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent))
from test_every_function import EVERY, arguments, results

OTHERS = {"linear_logprobs"}  # autocast knows no meta tensors: tests/losses/test_no_device_wait.py has it


class OneDevice(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.ndim]
        if len({x.device for x in tensors}) > 1:
            raise RuntimeError(f"{func}: tensors on {[str(x.device) for x in tensors]}")
        return func(*args, **(kwargs or {}))


def unique(x, return_inverse=False, return_counts=False):
    """Of `torch.unique` the shapes: the one call that waits, for the number of groups."""
    found = [x.new_empty(2), *[x.new_empty(x.shape)] * return_inverse, *[x.new_empty(2)] * return_counts]
    return tuple(found) if len(found) > 1 else found[0]


@pytest.mark.parametrize("function", sorted(EVERY.keys() - OTHERS))
def test_functions_stay_on_the_device(function, monkeypatch):
    monkeypatch.setattr(torch, "unique", unique)
    given = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in arguments(function).items()}
    tensors = [x for x in given.values() if isinstance(x, torch.Tensor)]
    for x in tensors:
        x.requires_grad_(x.is_floating_point())
    with OneDevice():
        found = results(function, given)
        if scalars := [x.sum() for x in found if x.requires_grad]:
            sum(scalars).backward()
    assert {x.device.type for x in found} <= ({"meta"} if tensors else {"cpu"})


@pytest.mark.parametrize("wrong", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x + torch.ones(3)])
def test_the_test_can_tell(wrong):
    with OneDevice(), pytest.raises((RuntimeError, NotImplementedError)):
        wrong(torch.ones(3, device="meta"))
