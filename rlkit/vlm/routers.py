"""The routers of a mixture of experts: which experts they chose, and having them choose the same again.

A sampler and a trainer round differently, and where two experts are nearly even a token goes to one in the sampler and
to the other in the trainer. Routing replay (R3, https://arxiv.org/abs/2510.11370) has the trainer use the sampler's
experts, weighed by the trainer's own logits, with their gradient.

Routing is [tokens, layers, K] int16: the numbers of the K experts that a token went to, in each decoder layer; -1 where
that is not known, and in layers without experts. All of it goes through forward hooks on the router modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def routers(model: Any) -> tuple[dict[int, nn.Module], int]:
    """The router of each decoder layer that has one, and the number of all layers.

    Raises:
        ValueError: there is none.
    """
    layers = model.get_decoder().layers
    found = {
        i: module
        for i, layer in enumerate(layers)
        for module in layer.modules()
        if type(module).__name__.lower().endswith("topkrouter")  # Qwen3MoeTopKRouter, DeepseekV3TopkRouter, ...
    }
    if not found:
        raise ValueError(f"model: {model.config.model_type} has no layer whose router could be recorded or replayed")
    return found, len(layers)


@contextmanager
def record_routing(model: Any) -> Iterator[Callable[[], Tensor]]:
    """Within it, what it yields returns the routing of the model's last forward, [N, layers, K]; N is B * T."""
    found, layers = routers(model)
    chosen: dict[int, Tensor] = {}

    def note(layer: int, router: nn.Module, args: Any, output: tuple[Tensor, ...]) -> None:
        chosen[layer] = next(x for x in output if not x.is_floating_point()).to(torch.int16)

    def last() -> Tensor:
        unknown = torch.full_like(next(iter(chosen.values())), -1)
        return torch.stack([chosen.get(layer, unknown) for layer in range(layers)], 1)

    hooks = [router.register_forward_hook(partial(note, layer)) for layer, router in found.items()]
    try:
        yield last
    finally:
        for hook in hooks:
            hook.remove()


def use_router_replay(model: Any) -> None:
    """Have a model's forward take `routed_experts` [N, layers, K], for all N tokens of its input, and replay them.

    A router runs again with the experts given, so their weights are by the family's own formula. Tokens of -1 keep the
    experts that the router chose itself.

    Raises:
        ValueError: the model has no routers; in forward: routing of another shape, or of more experts.
    """
    found, layers = routers(model)
    experts = min(len(next(router.parameters())) for router in found.values())
    given: list[Tensor] = []  # of the last forward, which checkpointed layers run again in backward

    def take(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given[:] = [routing] if (routing := kwargs.pop("routed_experts", None)) is not None else []
        if given:
            check_expert_ids(given[0], experts)
        return args, kwargs

    def again(layer: int, router: nn.Module, args: Any, kwargs: Mapping[str, Any], output: tuple[Tensor, ...]) -> Any:
        if not given:
            return None
        own = next(x for x in output if not x.is_floating_point())
        if (came := tuple(given[0].shape)) != (len(own), layers, own.shape[1]):
            expected = f"[{len(own)} tokens, {layers} layers, {own.shape[1]} experts]"
            raise ValueError(f"routed_experts: {expected} expected, came {came}")
        with ChosenExperts(given[0][:, layer], experts) as chosen:
            replayed = router.forward(*args, **kwargs)
        if not chosen.used:
            raise ValueError(f"routed_experts: {type(router).__name__} does not choose by topk, it cannot be replayed")
        return replayed

    model.register_forward_pre_hook(take, with_kwargs=True)
    for layer, router in found.items():
        router.register_forward_hook(partial(again, layer), with_kwargs=True)


def check_expert_ids(routing: Tensor, experts: int) -> None:
    """Raise a ValueError that says that routing is of a model with more experts."""
    if (most := int(routing.max())) >= experts:
        raise ValueError(f"routed_experts: numbers below {experts} expected, came {most}: is it another model's?")


class ChosenExperts(TorchFunctionMode):
    """Within it, topk over all experts gives those that are wanted [N, K], not the largest."""

    def __init__(self, wanted: Tensor, experts: int) -> None:
        super().__init__()
        self.wanted, self.experts, self.used = wanted.long(), experts, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].shape != (len(self.wanted), self.experts):
            return out
        self.used = True
        indices = torch.where((self.wanted < 0).any(1, keepdim=True), out.indices, self.wanted)
        return torch.return_types.topk((args[0].gather(1, indices), indices))
