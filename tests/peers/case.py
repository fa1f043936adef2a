"""One function of ours beside a peer's: the same inputs into both, values and gradients out of both."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A comparison. Where the two differ by choice, `ours` turns our number into theirs, and `why` says the reason."""

    name: str
    inputs: Callable[[torch.Generator], Tensors]
    peer: Callable[..., Tensors]  # (**inputs) -> outputs; imports the peer itself, so that this file needs torch alone
    ours: Callable[..., Tensors]
    grad: tuple[str, ...] = ()  # inputs whose gradient, of the sum of all outputs, is compared too
    why: str = ""
    rtol: float = 1e-5
    atol: float = 1e-6


def run(function: Callable[..., Tensors], inputs: Tensors, grad: tuple[str, ...]) -> Tensors:
    """Outputs by name, and `d_<input>` for each gradient."""
    given = {name: x.clone().requires_grad_(name in grad) for name, x in inputs.items()}
    outputs = function(**given)
    results = {name: x.detach().clone() for name, x in outputs.items()}
    if grad:
        total = torch.stack([x.double().sum() for x in outputs.values()]).sum()
        found = torch.autograd.grad(total, [given[name] for name in grad], allow_unused=True)
        for name, g in zip(grad, found, strict=True):
            results[f"d_{name}"] = torch.zeros_like(inputs[name]) if g is None else g
    return results


def compare(case: Case, theirs: Tensors, inputs: Tensors) -> None:
    ours = run(case.ours, inputs, case.grad)
    assert ours.keys() == theirs.keys(), f"{case.name}: {sorted(ours)} beside {sorted(theirs)}"
    for name, expected in theirs.items():
        came = ours[name].to(expected.dtype)
        torch.testing.assert_close(
            came, expected, rtol=case.rtol, atol=case.atol, msg=lambda m, name=name: f"{case.name}, {name}: {m}"
        )
