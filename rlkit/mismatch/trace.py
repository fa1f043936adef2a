"""Records what each part of a model computes in one forward pass, for models of transformers and of vLLM.

The parts, in the order of the forward pass. Text models have no vision parts, and dense models no routers:

    pixels               input of the vision tower
    positions            [axes, tokens], input of the decoder
    vision tower         output of the vision tower
    injected features    input of the first layer: token embeddings, with image features at image tokens
    layer 3: attention   output of the layer's attention, before it is added to the residual stream
    layer 3: router      expert probabilities
    layer 3              the residual stream after the layer
    final norm           output of the final norm
    logits               next-token logits, before temperature and token suppression
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

TOWERS = ("visual", "vision_tower", "vision_model")
Parts = dict[str, Tensor]


@contextmanager
def recorded_parts(model: nn.Module, tokens: int) -> Iterator[Parts]:
    """Inside the `with` block, the first forward pass over at least `tokens` tokens fills all parts but the logits.

    The input of a vision tower that normalises uint8 pixels itself is recorded as `raw pixels`.

    Args:
        model: a model of transformers or vLLM, not compiled, whose modules are called so that hooks run.
        tokens: length of the sequence, including image tokens.
    """
    parts: Parts = {}
    hooks: list[Any] = []

    def keep(name: str, x: Any, rows: int | None = tokens) -> None:
        if name not in parts and isinstance(x, Tensor) and (rows is None or x.numel() and _rows(x) >= rows):
            parts[name] = _flat(x)[:rows].detach().float().cpu().clone()

    def watch(module: nn.Module, before: Callable[..., None] | None, after: Callable[..., None] | None) -> None:
        if before is not None:
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if after is not None:
            hooks.append(module.register_forward_hook(after))

    def pixels(module: nn.Module, args: Any, kwargs: Any) -> None:
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if x is not None:
            keep("pixels" if x.is_floating_point() else "raw pixels", x, None)

    def positions(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = _arguments(module, args, kwargs)
        x = given.get("position_ids", given.get("positions"))
        if "positions" not in parts and isinstance(x, Tensor) and x.shape[-1] >= tokens:
            parts["positions"] = x.detach().reshape(-1, x.shape[-1])[-3:, :tokens].float().cpu().clone()

    def first_input(module: nn.Module, args: Any, kwargs: Any) -> None:
        positions(module, args, kwargs)  # vLLM calls the decoder's `forward` directly, so its hooks do not run
        keep("injected features", _arguments(module, args, kwargs)["hidden_states"])

    if (tower := _tower(model)) is not None:
        watch(tower, pixels, lambda module, args, out: keep("vision tower", _vision_output(out), None))
    decoder = decoder_of(model)
    watch(decoder, positions, None)
    watch(decoder.layers[0], first_input, None)
    for i, layer in enumerate(decoder.layers):
        if isinstance(attention := getattr(layer, "self_attn", None), nn.Module):
            watch(attention, None, lambda module, args, out, i=i: keep(f"layer {i}: attention", _first(out)))
        for router in _routers(layer):
            watch(router, None, lambda module, args, out, i=i: keep(f"layer {i}: router", _probabilities(out)))
        watch(layer, None, lambda module, args, out, i=i: keep(f"layer {i}", _stream(out)))
    watch(decoder.norm, None, lambda module, args, out: keep("final norm", _first(out)))
    try:
        yield parts
    finally:
        for hook in hooks:
            hook.remove()


def _arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call, by name."""
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    return {**given.pop("kwargs", {}), **given}


def decoder_of(model: nn.Module) -> Any:
    """The decoder: the module with `embed_tokens`, `layers` and `norm`.

    Raises:
        ValueError: the model has no such module.
    """
    for module in model.modules():
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and all(
            hasattr(module, name) for name in ("embed_tokens", "norm")
        ):
            return module
    raise ValueError(f"model: expected a decoder with embed_tokens, layers and norm, got {type(model).__name__}")


def _tower(model: nn.Module) -> nn.Module | None:
    return next((x for name, x in model.named_modules() if name.rpartition(".")[2] in TOWERS), None)


def _routers(layer: nn.Module) -> list[nn.Module]:
    named = {name.rpartition(".")[2]: x for name, x in layer.named_modules()}
    return [x for name, x in named.items() if name == "gate" or type(x).__name__.lower().endswith("topkrouter")][:1]


def _flat(x: Tensor) -> Tensor:
    """[batch, tokens, features] or [tokens, features] as [batch * tokens, features]."""
    return x.reshape(-1, x.shape[-1])


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def _stream(out: Any) -> Tensor:
    """The residual stream after a layer. vLLM's layers return (layer output, residual), which have to be added."""
    added = isinstance(out, tuple) and len(out) > 1 and isinstance(out[1], Tensor) and out[1].shape == out[0].shape
    return out[0] + out[1] if added else _first(out)


def _probabilities(out: Any) -> Tensor:
    """Expert probabilities from a router's output, which is logits or, in some models, already their softmax."""
    first = _first(out).detach().float()
    sums_to_1 = bool((first >= 0).all()) and bool((first.sum(-1) - 1).abs().max() < 1e-3)
    return first if sums_to_1 else first.softmax(-1)


def _vision_output(out: Any) -> Any:
    """Patch features for the decoder's input, concatenated with those for its inner layers (DeepStack)."""
    if isinstance(out, Tensor):
        return out
    for name in ("pooler_output", "last_hidden_state"):
        if isinstance(found := getattr(out, name, None), Tensor):
            return torch.cat([found, *(getattr(out, "deepstack_features", None) or ())], -1)
    return next((x for x in out if isinstance(x, Tensor)), None) if isinstance(out, tuple | list) else None


@torch.no_grad()
def head_logits(model: Any, hidden: Tensor) -> Tensor:
    """Logits [tokens, vocabulary] of a transformers model, from the output of its final norm."""
    head = model.get_output_embeddings()
    logits = head(hidden.to(head.weight.device, head.weight.dtype)).float().cpu()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits
