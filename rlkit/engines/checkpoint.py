"""Checkpoints: sharded by torch.distributed.checkpoint, complete or absent, and checked before they are read.

A checkpoint is a directory of shards with a `manifest.json` that names every file and its size. It is written beside
its place and moved there whole, so a killed save leaves the one before it as it was. torch's own `.metadata` file is a
pickle: read checkpoints from your own run directories only; what travels is written by `export_hf`.

A save with `wait=False` copies the state to the host and writes it from a thread, while training goes on. The next save
or load waits for it, and so does the end of the process; before `destroy_process_group` call `finish`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

MANIFEST = "manifest.json"

_under_way: list[Future[None]] = []


def save(path: str | Path, state: dict[str, Any], extra: dict[str, Any], *, wait: bool = True) -> None:
    """Write `state` (tensors, sharded or not) and `extra` (JSON) on all ranks together; at once, or from a thread."""
    finish()
    path = Path(path)
    part = path.with_name(path.name + ".part")
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    dist.barrier()
    if wait:
        dcp.save(state, checkpoint_id=part)
        _complete(part, path, extra)
        dist.barrier()
        return
    written: Any = dcp.async_save(state, checkpoint_id=part, process_group=_own_group(dist.group.WORLD))

    def complete() -> None:
        written.result()
        _complete(part, path, extra)

    thread = ThreadPoolExecutor(1)
    _under_way.append(thread.submit(complete))
    thread.shutdown(wait=False)


def finish() -> None:
    """Wait, on all ranks together, until the checkpoint that is being written is in its place.

    Raises:
        CheckpointException: it could not be written; the one before it is as it was.
    """
    while _under_way:
        _under_way.pop().result()
        dist.barrier()


@cache
def _own_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Of all ranks, for what a thread sends: training sends in an order of its own meanwhile."""
    return dist.new_group(backend="gloo")


def _complete(part: Path, path: Path, extra: dict[str, Any]) -> None:
    """Rank 0, which torch tells last that all have written, puts the checkpoint in its place."""
    if dist.get_rank() == 0:
        files = {file.name: file.stat().st_size for file in sorted(part.iterdir())}
        (part / MANIFEST).write_text(json.dumps({"files": files, "extra": extra}, indent=1))
        replace_directory(part, path)


def replace_directory(new: Path, path: Path) -> None:
    """Move a finished directory to its place; what stood there goes only after that."""
    old = put_back(path)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def put_back(path: Path) -> Path:
    """Where `replace_directory` keeps what stood at a path; a process that was killed just then left it there."""
    old = path.with_name(path.name + ".old")
    if old.is_dir() and not path.exists():
        old.rename(path)
    return old


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The `extra` that was saved, once every file is there in its full size. All ranks call this together.

    Raises:
        ValueError: names the file that is missing or cut short.
    """
    finish()
    path = Path(path)
    if dist.get_rank() == 0:
        put_back(path)
    dist.barrier()
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise ValueError(f"checkpoint {path}: no {MANIFEST}: not a checkpoint, or not a whole one") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"checkpoint {path}: {MANIFEST} is cut short: {error}") from error
    for name, size in manifest["files"].items():
        file = path / name
        came = file.stat().st_size if file.is_file() else None
        if came != size:
            state = "is missing" if came is None else f"has {came} bytes"
            raise ValueError(f"checkpoint {path}: {name} {state}, {size} bytes expected; remove it to use an older one")
    return manifest["extra"]


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Where this rank's random numbers are, the host's and its GPU's (of dropout, say), by their names in a state."""
    found = {f"rng.{dist.get_rank()}": torch.get_rng_state()}
    if device.type == "cuda":
        found[f"rng.{dist.get_rank()}.cuda"] = torch.cuda.get_rng_state(device)
    return found


def set_random_states(state: Mapping[str, Any], device: torch.device) -> None:
    """Go on from those of `random_states` that a checkpoint had: one of fewer ranks, or of a CPU, has not all."""
    if (host := state.get(f"rng.{dist.get_rank()}")) is not None:
        torch.set_rng_state(host)
    if (gpu := state.get(f"rng.{dist.get_rank()}.cuda")) is not None:
        torch.cuda.set_rng_state(gpu, device)


class _OneByOne(dcp.FileSystemReader):
    """torch's holds what it has read until it has read the next, two of the largest tensors where they are side by
    side; this one has let go of it."""

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Any:
        for item in plan.items:
            super().read_data(replace(plan, items=[item]), planner)
        return super().read_data(replace(plan, items=[]), planner)


def load(path: str | Path, state: dict[str, Any]) -> None:
    """Fill `state` in place, resharding to this world size; read its manifest first.

    Raises:
        ValueError: the checkpoint is of another model, or cannot be read.
    """
    try:
        dcp.load(state, storage_reader=_OneByOne(path))
    except (dcp.api.CheckpointException, RuntimeError, ValueError, KeyError) as error:
        first = next(iter(error.failures.values()))[0] if isinstance(error, dcp.api.CheckpointException) else error
        reason = str(first).strip().partition("\n")[0]
        raise ValueError(
            f"checkpoint {path}: does not fit this model and optimizer, or is damaged: {reason}"
        ) from error


def saved_names(path: str | Path) -> set[str]:
    """Names of the tensors in a checkpoint.

    Raises:
        ValueError: its list of them cannot be read.
    """
    try:
        return set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    except Exception as error:  # a pickle that is damaged may raise anything
        raise ValueError(f"checkpoint {path}: .metadata cannot be read: {error}") from error


def check_names(path: str | Path, model: Iterable[str]) -> None:
    """A checkpoint that holds more than was asked for is of another model: `load` would leave the rest out.

    Raises:
        ValueError: names one that the model, or what of it trains, has not.
    """
    if more := {n.removeprefix("model.") for n in saved_names(path) if n.startswith("model.")} - set(model):
        raise ValueError(
            f"checkpoint {path}: of another model, or of one of which more trains: it holds {min(more)}, and "
            f"{len(more) - 1} more that are not asked for"
        )


def checkpoints(folder: str | Path) -> list[Path]:
    """Checkpoint directories `step_<n>` of a run, oldest first; unfinished ones are not among them."""
    found = [p for p in Path(folder).glob("step_*") if re.fullmatch(r"step_\d+", p.name)]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))


def keep_newest(folder: str | Path, count: int) -> None:
    """Remove all but the newest `count` checkpoints (rank 0 only)."""
    if dist.get_rank() == 0:
        for path in checkpoints(folder)[:-count] if count > 0 else []:
            shutil.rmtree(path)
