"""Starts experiment trackers of accelerate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def start_trackers(names: Sequence[str], out: Path, config: Mapping[str, Any]) -> list[Any]:
    """Starts trackers of accelerate and sends them the config. The project is `rlkit`; the run is named after `out`.

    TensorBoard writes to `out/tensorboard`; other trackers are configured by their own environment variables.

    Args:
        names: names of the trackers.
        out: the run's directory.
        config: the run's options.

    Raises:
        ValueError: accelerate does not know a name, or its package is not installed.
    """
    if not names:
        return []
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    tracker_options = {
        "tensorboard": {"run_name": "tensorboard", "logging_dir": str(out)},
        "mlflow": {"experiment_name": "rlkit", "run_name": out.name},
        "wandb": {"run_name": "rlkit", "name": out.name},
        "trackio": {"run_name": "rlkit", "name": out.name},
    }
    installed = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ValueError(f"trackers: expected some of {', '.join(LOGGER_TYPE_TO_CLASS)}, got {name!r}")
        if name in LoggerType.list() and name not in installed:
            raise ValueError(f"trackers: expected installed ones, got {name!r}, whose package is not installed")
    PartialState()  # accelerate's trackers need it
    plain = {name: x if isinstance(x, bool | int | float | str | None) else str(x) for name, x in config.items()}
    trackers = []
    for name in dict.fromkeys(names):
        kind = LOGGER_TYPE_TO_CLASS[name]
        directory = {"logging_dir": str(out)} if kind.requires_logging_directory else {}
        tracker = kind(**tracker_options.get(name, {"run_name": "rlkit", **directory}))
        tracker.start()
        tracker.store_init_configuration(plain)
        trackers.append(tracker)
    return trackers
