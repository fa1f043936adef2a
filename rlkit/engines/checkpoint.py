"""Checkpoints: sharded by torch.distributed.checkpoint, either complete or absent, and checked before they are loaded.

A checkpoint is a directory of shards with a `manifest.json` that lists every file and its size. It is written next to
its final path and then renamed, so a killed save leaves the previous checkpoint intact. torch's own `.metadata` file is
a pickle: load checkpoints only from run directories that you trust. To pass a model on, use `export_hf`.

A save with `wait=False` copies the state to the host and writes it from a thread while training continues. The next
save or load waits for it, and so does the exit of the process. Call `finish` before `destroy_process_group`.
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

_pending_saves: list[Future[None]] = []


def save(path: str | Path, state: dict[str, Any], extra: dict[str, Any], *, wait: bool = True) -> None:
    """Save `state` (tensors, sharded or not) and `extra` (JSON). All ranks call this together.

    Args:
        path: of the checkpoint.
        state: saved by torch.distributed.checkpoint.
        extra: saved in the manifest.
        wait: until it is written; otherwise a thread writes it.
    """
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
    written: Any = dcp.async_save(state, checkpoint_id=part, process_group=_saving_group(dist.group.WORLD))

    def complete() -> None:
        written.result()
        _complete(part, path, extra)

    thread = ThreadPoolExecutor(1)
    _pending_saves.append(thread.submit(complete))
    thread.shutdown(wait=False)


def finish() -> None:
    """Wait until the checkpoint that a thread is writing is complete. All ranks call this together.

    Raises:
        CheckpointException: it could not be written; the previous checkpoint is intact.
    """
    while _pending_saves:
        _pending_saves.pop().result()
        dist.barrier()


@cache
def _saving_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of all ranks for the thread that saves, whose collectives must not mix with those of training."""
    return dist.new_group(backend="gloo")


def _complete(part: Path, path: Path, extra: dict[str, Any]) -> None:
    """Write the manifest and rename the directory, on rank 0: torch returns there after all ranks have written."""
    if dist.get_rank() == 0:
        files = {file.name: file.stat().st_size for file in sorted(part.iterdir())}
        (part / MANIFEST).write_text(json.dumps({"files": files, "extra": extra}, indent=1))
        replace_directory(part, path)


def replace_directory(new: Path, path: Path) -> None:
    """Rename a finished directory to `path`; the directory that was there is removed only after that."""
    old = restore_replaced(path)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def restore_replaced(path: Path) -> Path:
    """Restore a directory if a process was killed in `replace_directory`; returns the path where it is kept aside."""
    old = path.with_name(path.name + ".old")
    if old.is_dir() and not path.exists():
        old.rename(path)
    return old


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The `extra` of a checkpoint whose files are all there in full size. All ranks call this together.

    Raises:
        ValueError: names a file that is missing or cut short.
    """
    finish()
    path = Path(path)
    if dist.get_rank() == 0:
        restore_replaced(path)
    dist.barrier()
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise ValueError(f"checkpoint {path}: expected {MANIFEST}, got none: not a complete checkpoint") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"checkpoint {path}: expected JSON in {MANIFEST}, got a damaged file: {error}") from error
    for name, size in manifest["files"].items():
        file = path / name
        found = f"{file.stat().st_size} bytes" if file.is_file() else "no file"
        if found != f"{size} bytes":
            raise ValueError(
                f"checkpoint {path}: expected {size} bytes in {name}, got {found}; remove it to use an older checkpoint"
            )
    return manifest["extra"]


def random_states(device: torch.device) -> dict[str, Tensor]:
    """This rank's random states, of the host and of its GPU (for dropout, say), under their names in a checkpoint."""
    states = {f"rng.{dist.get_rank()}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"rng.{dist.get_rank()}.cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore `random_states` from a checkpoint; one of fewer ranks, or of a CPU, does not have all of them."""
    if (host := state.get(f"rng.{dist.get_rank()}")) is not None:
        torch.set_rng_state(host)
    if (gpu := state.get(f"rng.{dist.get_rank()}.cuda")) is not None:
        torch.cuda.set_rng_state(gpu, device)


class _OneTensorReader(dcp.FileSystemReader):
    """Frees each tensor that it has read before it reads the next; torch's reader holds two tensors of a file."""

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Any:
        for item in plan.items:
            super().read_data(replace(plan, items=[item]), planner)
        return super().read_data(replace(plan, items=[]), planner)


def load(path: str | Path, state: dict[str, Any]) -> None:
    """Fill `state` in place, resharded to this world size; call `read_manifest` first.

    Raises:
        ValueError: the checkpoint is of another model, or cannot be read.
    """
    try:
        dcp.load(state, storage_reader=_OneTensorReader(path))
    except (dcp.api.CheckpointException, RuntimeError, ValueError, KeyError) as error:
        first = next(iter(error.failures.values()))[0] if isinstance(error, dcp.api.CheckpointException) else error
        reason = str(first).strip().partition("\n")[0]
        raise ValueError(
            f"checkpoint {path}: expected the state of this model and optimizer, got another or a damaged one: {reason}"
        ) from error


def tensor_names(path: str | Path) -> set[str]:
    """The names of the tensors in a checkpoint.

    Raises:
        ValueError: its metadata cannot be read.
    """
    try:
        return set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(
            f"checkpoint {path}: expected a readable .metadata file, got a damaged one: {error}"
        ) from error


def check_parameter_names(path: str | Path, expected: Iterable[str]) -> None:
    """Check that a checkpoint holds no other parameters than those that the model trains; `load` would ignore them.

    Raises:
        ValueError: names one parameter that the model does not have or does not train.
    """
    saved = {name.removeprefix("model.") for name in tensor_names(path) if name.startswith("model.")}
    if unknown := saved - set(expected):
        raise ValueError(
            f"checkpoint {path}: expected only parameters that this model trains, got {len(unknown)} others such as "
            f"{min(unknown)}"
        )


def checkpoints(folder: str | Path) -> list[Path]:
    """Checkpoint directories `step_<n>` of a run, oldest first, without unfinished ones."""
    found = [p for p in Path(folder).glob("step_*") if re.fullmatch(r"step_\d+", p.name)]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))


def keep_newest(folder: str | Path, count: int) -> None:
    """Remove all but the newest `count` checkpoints of a run, on rank 0; a count of 0 keeps all."""
    if dist.get_rank() == 0:
        for path in checkpoints(folder)[:-count] if count > 0 else []:
            shutil.rmtree(path)
