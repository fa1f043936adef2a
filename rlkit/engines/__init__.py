"""Engines hide parallelism behind one contract; a loss arrives as a closure.

    engine = make_engine("fsdp2", "language_model", model=model, optimizer=lambda params: AdamW(params, lr=1e-5))
    metrics = engine.train_batch(batch, loss_fn)

`loss_fn(out, mb) -> (loss, metrics)` gets [B, T] outputs and the micro-batch's rows. Its gradient is summed over
micro-batches and data-parallel ranks, so the closure divides by the global `mb.total_tokens` or `mb.total_sequences`.
"""

import inspect
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import torch

__all__ = ["make_engine", "register_engine"]

_ENGINES: dict[tuple[str, str, str], str] = {
    ("language_model", "fsdp2", "cpu"): "rlkit.engines.fsdp2:Fsdp2Engine",
    ("language_model", "fsdp2", "cuda"): "rlkit.engines.fsdp2:Fsdp2Engine",
    ("language_model", "fsdp1", "cpu"): "rlkit.engines.fsdp1:Fsdp1Engine",
    ("language_model", "fsdp1", "cuda"): "rlkit.engines.fsdp1:Fsdp1Engine",
    ("language_model", "megatron", "cpu"): "rlkit.engines.megatron:MegatronEngine",
    ("language_model", "megatron", "cuda"): "rlkit.engines.megatron:MegatronEngine",
    ("value_model", "megatron", "cpu"): "rlkit.engines.megatron:MegatronValueEngine",
    ("value_model", "megatron", "cuda"): "rlkit.engines.megatron:MegatronValueEngine",
    ("value_model", "fsdp1", "cpu"): "rlkit.engines.fsdp1:Fsdp1ValueEngine",
    ("value_model", "fsdp1", "cuda"): "rlkit.engines.fsdp1:Fsdp1ValueEngine",
    ("value_model", "fsdp2", "cpu"): "rlkit.engines.fsdp2:Fsdp2ValueEngine",
    ("value_model", "fsdp2", "cuda"): "rlkit.engines.fsdp2:Fsdp2ValueEngine",
}


def register_engine(model_type: str, backend: str, device: str, target: str) -> None:
    """Add an engine: `target` is "module:class", imported when it is first asked for."""
    _ENGINES[model_type, backend, device] = target


def _engines() -> dict[tuple[str, str, str], str]:
    """Those of installed packages (entry points "MODEL_TYPE.BACKEND.DEVICE" of the group rlkit.engines), and these."""
    outside = {tuple(point.name.split(".")): point.value for point in entry_points(group="rlkit.engines")}
    return {**{key: target for key, target in outside.items() if len(key) == 3}, **_ENGINES}


def make_engine(backend: str, model_type: str = "language_model", *, device: str | None = None, **options: Any) -> Any:
    """The engine for a back end, a model type and a device (the GPU if there is one).

    Args:
        options: the engine's own; see its class, e.g. rlkit.engines.fsdp2.Fsdp2Engine.

    Raises:
        ValueError: no such engine, an option that it has not, or a model in the wrapper of `torch.compile`, which would
            give other names to its weights.
    """
    if hasattr(options.get("model"), "_orig_mod"):
        raise ValueError(
            "model: torch.compile(model) renames its weights; compile it in place: model.compile(), or layer.compile() "
            "for each of its layers"
        )
    kind = (device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]
    engines = _engines()
    try:
        module, _, name = engines[model_type, backend, kind].partition(":")
    except KeyError:
        known = ", ".join(f"{b} for a {m} on {d}" for m, b, d in sorted(engines))
        raise ValueError(f"no engine {backend!r} for a {model_type!r} on {kind!r}; there are: {known}") from None
    engine = getattr(import_module(module), name)
    takes = inspect.signature(engine).parameters
    if unknown := [o for o in options if o not in takes and not any(p.kind is p.VAR_KEYWORD for p in takes.values())]:
        raise ValueError(f"{backend} engine: no option {', '.join(unknown)}; there are: {', '.join(takes)}")
    return engine(device=device, **options)
