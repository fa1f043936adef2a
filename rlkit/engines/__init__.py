"""Engines train and score a model behind one contract that hides how it is parallelised.

    engine = make_engine("fsdp2", "language_model", model=model, optimizer=lambda params: AdamW(params, lr=1e-5))
    metrics = engine.train_batch(batch, loss_fn)

`loss_fn(out, mb) -> (loss, metrics)` receives [B, T] outputs and the rows of one micro-batch. Gradients are summed over
micro-batches and data-parallel ranks, so the loss must divide by the global `mb.total_tokens` or `mb.total_sequences`.
"""

import inspect
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import torch

__all__ = ["make_engine", "register_engine"]

_ENGINES: dict[tuple[str, str, str], str] = {}


def register_engine(model_type: str, backend: str, device: str, target: str) -> None:
    """Register an engine class for a model type, a back end and a device.

    Args:
        model_type: "language_model" or "value_model".
        backend: the name that `make_engine` is called with.
        device: "cpu" or "cuda".
        target: "module:class", imported when the engine is first made.
    """
    _ENGINES[model_type, backend, device] = target


for _device in ("cpu", "cuda"):
    register_engine("language_model", "fsdp2", _device, "rlkit.engines.fsdp.fsdp2:Fsdp2Engine")
    register_engine("value_model", "fsdp2", _device, "rlkit.engines.fsdp.value_engine:Fsdp2ValueEngine")
    register_engine("language_model", "fsdp1", _device, "rlkit.engines.fsdp.fsdp1:Fsdp1Engine")
    register_engine("value_model", "fsdp1", _device, "rlkit.engines.fsdp.fsdp1:Fsdp1ValueEngine")
    register_engine("language_model", "megatron", _device, "rlkit.engines.megatron.engine:MegatronEngine")
    register_engine("value_model", "megatron", _device, "rlkit.engines.megatron.engine:MegatronValueEngine")


def _registered() -> dict[tuple[str, str, str], str]:
    """All engines: the entry points "MODEL_TYPE.BACKEND.DEVICE" of the group rlkit.engines, and `register_engine`'s."""
    installed = {tuple(point.name.split(".")): point.value for point in entry_points(group="rlkit.engines")}
    return {**{key: target for key, target in installed.items() if len(key) == 3}, **_ENGINES}


def engine_names() -> list[str]:
    """The back ends of all registered engines."""
    return sorted({backend for _, backend, _ in _registered()})


def make_engine(backend: str, model_type: str = "language_model", *, device: str | None = None, **options: Any) -> Any:
    """Make the engine that is registered for a back end, a model type and a device.

    Args:
        backend: "fsdp2", "fsdp1", "megatron", or a name given to `register_engine`.
        model_type: "language_model" or "value_model".
        device: "cpu" or "cuda"; by default the GPU if there is one.
        options: of the engine's class, e.g. rlkit.engines.fsdp.fsdp2.Fsdp2Engine.

    Raises:
        ValueError: no such engine, an unknown option, or a model wrapped by `torch.compile`, which renames its weights.
    """
    if hasattr(options.get("model"), "_orig_mod"):
        raise ValueError(
            "model: expected a plain module, got torch.compile(model), which renames its weights; compile in place "
            "with model.compile(), or with layer.compile() for each layer"
        )
    kind = (device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]
    engines = _registered()
    try:
        module, _, name = engines[model_type, backend, kind].partition(":")
    except KeyError:
        known = ", ".join(f"{b} for a {m} on {d}" for m, b, d in sorted(engines))
        raise ValueError(f"backend: expected {known}; got {backend!r} for a {model_type!r} on {kind!r}") from None
    engine = getattr(import_module(module), name)
    known_options = inspect.signature(engine).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known_options.values())
    if not takes_any and (unknown := [option for option in options if option not in known_options]):
        raise ValueError(f"{backend} engine: expected options {', '.join(known_options)}; got {', '.join(unknown)}")
    return engine(device=device, **options)
