"""Routers of mixture-of-experts models: record which experts they choose, and replay a recorded choice.

Sampler and trainer round differently, so a token for which two experts score almost the same may go to one in the
sampler and to the other in the trainer. With routing replay (R3, https://arxiv.org/abs/2510.11370) the trainer uses the
sampler's experts, weighted by the trainer's own router logits, with their gradient.

Routing is an int16 tensor [tokens, layers, K]: the ids of the K experts of a token in each decoder layer; -1 where
unknown, and in layers without experts. Everything here uses forward hooks on the router modules.
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
    """({layer: router} for the decoder layers with experts, number of decoder layers).

    Raises:
        ValueError: the model has no router, or several in a layer.
    """
    layers, family = model.get_decoder().layers, model.config.model_type
    found: dict[int, nn.Module] = {}
    for i, layer in enumerate(layers):
        for module in layer.modules():
            if type(module).__name__.lower().endswith("topkrouter"):  # Qwen3MoeTopKRouter, DeepseekV3TopkRouter, ...
                if i in found:
                    raise ValueError(f"model: expected one router in each layer, got several in those of {family}")
                found[i] = module
    if not found:
        raise ValueError(f"model: expected a mixture of experts with a top-k router, got {family}")
    return found, len(layers)


@contextmanager
def record_routing(model: Any) -> Iterator[Callable[[], Tensor]]:
    """Yields a function that returns the routing of the model's last forward: [N, layers, K] with N = B * T."""
    found, layers = routers(model)
    chosen: dict[int, Tensor] = {}

    def record(layer: int, router: nn.Module, args: Any, output: tuple[Tensor, ...]) -> None:
        chosen[layer] = next(x for x in output if not x.is_floating_point()).to(torch.int16)

    def last_routing() -> Tensor:
        unknown = torch.full_like(next(iter(chosen.values())), -1)
        return torch.stack([chosen.get(layer, unknown) for layer in range(layers)], 1)

    hooks = [router.register_forward_hook(partial(record, layer)) for layer, router in found.items()]
    try:
        yield last_routing
    finally:
        for hook in hooks:
            hook.remove()


def use_router_replay(model: Any) -> int:
    """Adds the argument `routed_experts` [N, layers, K] to a model's forward, for all N tokens of its input.

    Each router runs a second time with the given experts, so the model's own formula computes their weights. A token
    with -1 keeps the experts that the router chooses itself. The caller checks expert ids: see `check_expert_ids`.

    Returns:
        The model's number of experts in a layer.

    Raises:
        ValueError: the model has no routers. In forward: routing of another shape.
    """
    found, layers = routers(model)
    experts = min(len(next(router.parameters())) for router in found.values())
    given: list[Tensor] = []  # of the last forward; gradient checkpointing runs layers again in backward

    def take_argument(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given[:] = [routing] if (routing := kwargs.pop("routed_experts", None)) is not None else []
        return args, kwargs

    def replay(layer: int, router: nn.Module, args: Any, kwargs: Mapping[str, Any], output: tuple[Tensor, ...]) -> Any:
        if not given:
            return None
        own = next(x for x in output if not x.is_floating_point())
        if (shape := tuple(given[0].shape)) != (len(own), layers, own.shape[1]):
            expected = f"[{len(own)} tokens, {layers} layers, {own.shape[1]} experts]"
            raise ValueError(f"routed_experts: expected {expected}, got {shape}")
        with ChosenExperts(given[0][:, layer], experts) as chosen:
            replayed = router.forward(*args, **kwargs)
        if not chosen.used:
            raise ValueError(
                f"routed_experts: expected a router that chooses by torch.topk, got {type(router).__name__}"
            )
        return replayed

    model.register_forward_pre_hook(take_argument, with_kwargs=True)
    for layer, router in found.items():
        router.register_forward_hook(partial(replay, layer), with_kwargs=True)
    return experts


def check_expert_ids(routing: Tensor, experts: int) -> None:
    """Raise a ValueError if an expert id is too large for a model with this number of experts.

    Args:
        routing: [..., K] on the host; on a GPU the host would wait for it.
        experts: of the model.
    """
    if routing.numel() and (largest := int(routing.max())) >= experts:
        raise ValueError(f"routed_experts: expected expert ids below {experts}, got {largest}; is it of another model?")


class ChosenExperts(TorchFunctionMode):
    """Inside this context, topk over all experts returns the `wanted` experts [N, K] instead of the largest."""

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
