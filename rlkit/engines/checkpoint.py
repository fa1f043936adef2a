"""Checkpoints: sharded by torch.distributed.checkpoint, either complete or absent, and checked before they are loaded.

A checkpoint is a directory of shards with a `manifest.json` that lists every file with its size and its checksum. It is
written next to its final path and then renamed, so a save that is killed, or finds no room, leaves the previous
checkpoint intact. torch's own `.metadata` file and the state of the scheduler are pickles: load checkpoints only from
run directories that you trust. To pass a model on, use `export_hf`.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._pytree import tree_leaves

from rlkit.engines.distributed import gather_objects, local_part

MANIFEST = "manifest.json"


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is missing, cut short or changed. An older checkpoint may be intact."""


class CheckpointNotWritten(OSError):
    """A checkpoint could not be written. The previous one is intact."""


# --- saving


def save(path: str | Path, state: dict[str, Any], extra: dict[str, Any]) -> None:
    """Save `state` (tensors, sharded or not) and `extra` (JSON). All ranks call this together.

    Args:
        path: of the checkpoint.
        state: saved by torch.distributed.checkpoint.
        extra: saved in the manifest.

    Raises:
        CheckpointNotWritten: on all ranks, also if it is one rank that could not write, or a weight in `state["model"]`
            is nan or infinite, or rank 0 does not see the files that another rank has written.
    """
    path = Path(path)
    if problem := first_problem(_not_finite(state.get("model", {}))):
        raise CheckpointNotWritten(f"checkpoint {path}: expected finite weights, got {problem}")
    part = path.with_name(path.name + ".part")
    problem = problem_of_rank_0(lambda: _make_empty(part)) or _write(part, path, state, extra)
    if problem:
        raise _not_written(path, part, problem, _local_bytes(state))


def _make_empty(part: Path) -> None:
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)


def _write(part: Path, path: Path, state: dict[str, Any], extra: dict[str, Any]) -> str:
    """Write the shards of all ranks and the manifest to `part`, and rename it to `path`.

    Returns:
        The first error of any rank, on all ranks; an empty string if there is none.

    Raises:
        CheckpointNotWritten: on all ranks, if machines write to directories of their own.
    """
    problem, checksums = "", {}
    try:
        dcp.save(state, checkpoint_id=part)
        checksums = {file.name: _checksum(file) for file in _files_of_rank(part)}
    except (dcp.api.CheckpointException, OSError, RuntimeError) as error:
        problem = _reason(error)
    if problem := first_problem(problem):
        return problem
    all_checksums = {
        name: checksum for rank_checksums in gather_objects(checksums) for name, checksum in rank_checksums.items()
    }
    if problem := problem_of_rank_0(lambda: [(part / name).stat() for name in all_checksums]):
        shutil.rmtree(part, ignore_errors=True)  # on each machine
        raise CheckpointNotWritten(
            f"checkpoint {path}: expected it on a file system that all machines share, got on rank 0: {problem}"
        )
    return problem_of_rank_0(lambda: _complete(part, path, all_checksums, extra))


def first_problem(problem: str) -> str:
    """The error of the first rank that has one; empty if none has. All ranks call this together."""
    return next((found for found in gather_objects(problem) if found), "")


def problem_of_rank_0(work: Callable[[], Any]) -> str:
    """Do `work` on rank 0 alone. Returns the message of its OSError on all ranks, an empty string if there is none.

    All ranks call this together.
    """
    problem = ""
    if dist.get_rank() == 0:
        try:
            work()
        except OSError as error:
            problem = str(error)
    return first_problem(problem)


def _not_written(path: Path, part: Path, problem: str, local_bytes: int) -> CheckpointNotWritten:
    """The error for a checkpoint that could not be written, of which nothing is left. All ranks call this."""
    size = sum(gather_objects(local_bytes))
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)
    existing = next(folder for folder in path.parents if folder.exists())
    complete = [checkpoint.name for checkpoint in checkpoints(path.parent)]
    return CheckpointNotWritten(
        f"checkpoint {path}: expected room for {size} bytes, got {shutil.disk_usage(existing).free} bytes free: "
        f"{problem}; the last complete checkpoint is {complete[-1] if complete else 'none'}"
    )


def _reason(error: BaseException) -> str:
    """The first line of an error's message, on the rank where the error was raised."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _local_bytes(state: Mapping[str, Any]) -> int:
    """Bytes of this rank's tensors."""
    tensors = (local_part(x) for x in tree_leaves(state) if isinstance(x, Tensor))
    return sum(x.numel() * x.element_size() for x in tensors)


def _not_finite(weights: Mapping[str, Any]) -> str:
    """The first of this rank's weights that is nan or infinite, with its tensor's name; empty if all are finite."""
    tensors = {name: local_part(x) for name, x in weights.items() if isinstance(x, Tensor)}
    all_finite = [x.isfinite().all() for x in tensors.values()]
    if not all_finite or torch.stack(all_finite).all():  # the host waits for the device once, not for each tensor
        return ""
    name, x = next((name, x) for name, x in tensors.items() if not x.isfinite().all())
    return f"{x[~x.isfinite()][0].item()} in {name}"


def _files_of_rank(part: Path) -> list[Path]:
    """The files that this rank has written: torch names shards by their rank; all others are rank 0's."""
    shard = re.compile(r"__(\d+)_\d+\.distcp")
    writers = {file: int(name[1]) if (name := shard.fullmatch(file.name)) else 0 for file in sorted(part.iterdir())}
    return [file for file, rank in writers.items() if rank == dist.get_rank()]


def _checksum(file: Path) -> str:
    """CRC-32 of a file, in hexadecimal. It detects damage, not manipulation."""
    checksum = 0
    with file.open("rb", buffering=0) as opened:
        while block := opened.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return f"{checksum:08x}"


def _complete(part: Path, path: Path, checksums: Mapping[str, str], extra: dict[str, Any]) -> None:
    """Write the manifest, with a checksum of its own, and rename the directory."""
    files = {name: (part / name).stat().st_size for name in sorted(checksums)}
    content = {"files": files, "checksums": {name: checksums[name] for name in files}, "extra": extra}
    (part / MANIFEST).write_text(json.dumps({**content, "checksum": _checksum_of(content)}, indent=1))
    replace_directory(part, path)


def _checksum_of(content: Mapping[str, Any]) -> str:
    """CRC-32 of a manifest's content after a round trip through JSON."""
    return f"{zlib.crc32(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode()):08x}"


def replace_directory(new: Path, path: Path) -> None:
    """Rename a finished directory to `path`; the directory that was there is removed only after that."""
    old = _restore_replaced(path)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _restore_replaced(path: Path) -> Path:
    """Restore a directory if a process was killed in `replace_directory`; returns the path where it is kept aside."""
    old = path.with_name(path.name + ".old")
    if old.is_dir() and not path.exists():
        old.rename(path)
    return old


# --- reading the manifest, and checking the files


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The `extra` of a checkpoint whose files are all there, as they were written. All ranks call this together.

    Each rank reads a part of the files to compare their checksums.

    Raises:
        DamagedCheckpoint: on all ranks; it names a file that is missing, cut short or changed.
        OSError: on all ranks, if an interrupted save left only `PATH.old` and rank 0 cannot rename it to PATH.
    """
    path = Path(path)
    if problem := problem_of_rank_0(lambda: _restore_replaced(path)):
        raise OSError(f"checkpoint {path}: expected to restore it from {path.name}.old, got: {problem}")
    manifest, problem = _read_intact(path)
    if problem := first_problem(problem):
        raise DamagedCheckpoint(f"checkpoint {path}: {problem}")
    return manifest["extra"]


def _read_intact(path: Path) -> tuple[dict[str, Any], str]:
    """The manifest, and the first error in it or in the files; an empty string for none.

    Each rank compares the checksums of its share of the files.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        checksum, sizes, checksums = manifest.pop("checksum"), manifest["files"], manifest["checksums"]
    except FileNotFoundError:
        return {}, f"expected {MANIFEST}, got none: not a complete checkpoint"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, f"expected JSON in {MANIFEST}, got a damaged file: {error}"
    if _checksum_of(manifest) != checksum:
        return {}, f"expected the checksum {checksum} of {MANIFEST}, got {_checksum_of(manifest)}: a damaged file"
    for name, size in sizes.items():
        file = path / name
        try:
            got = f"{file.stat().st_size} bytes" if file.is_file() else "no file"
        except OSError as error:
            got = str(error)
        if got != f"{size} bytes":
            return manifest, f"expected {size} bytes in {name}, got {got}"
    for name in sorted(sizes)[dist.get_rank() :: dist.get_world_size()]:
        try:
            computed = _checksum(path / name)
        except OSError as error:
            return manifest, f"expected {name} to be readable, got: {error}"
        if computed != checksums[name]:
            return manifest, f"expected the checksum {checksums[name]} of {name}, got {computed}: a damaged file"
    return manifest, ""


# --- the states of random generators, scheduler and optimizer


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


def scheduler_state(scheduler: Any) -> dict[str, bytes]:
    """The state of a learning-rate scheduler, under its name in a checkpoint; empty for None.

    It is pickled, because JSON and torch.distributed.checkpoint would turn its integer keys into strings.
    """
    return {} if scheduler is None else {"scheduler": pickle.dumps(scheduler.state_dict())}


def set_scheduler_state(state: Mapping[str, Any], manifest: Mapping[str, Any], scheduler: Any) -> None:
    """Restore `scheduler_state` from a checkpoint; one of an engine without a scheduler does not have it.

    Earlier checkpoints have the state in their manifest, as JSON.
    """
    if scheduler is None:
        return
    if "scheduler" in state:
        scheduler.load_state_dict(pickle.loads(state["scheduler"]))
    elif manifest.get("scheduler") is not None:
        scheduler.load_state_dict(manifest["scheduler"])


def leave_out_unsaved_moments(optimizer: Mapping[str, Any], saved: Collection[str]) -> None:
    """Remove parameters without saved moments from the state of an optimizer.

    They had no gradient before the checkpoint was saved, as a vision tower if no row had an image. The state of a new
    optimizer has moments of all parameters.

    Args:
        optimizer: what `get_state_dict` returns of an optimizer.
        saved: names of all tensors in the checkpoint.
    """
    with_moments, moments = parameters_with_moments(saved), optimizer.get("state", {})
    for name in [name for name in moments if name not in with_moments]:
        del moments[name]


def parameters_with_moments(saved: Iterable[str]) -> set[str]:
    """The names of the parameters of which a checkpoint with these tensors has moments, among other prefixes.

    `optimizer.state.a.b.exp_avg` is a moment of the parameter `a.b`, and gives a, a.b and a.b.exp_avg: how many parts
    the name of a moment has depends on the optimizer.
    """
    start = "optimizer.state."
    names = (name.removeprefix(start).split(".") for name in saved if name.startswith(start))
    return {prefix for name in names for prefix in accumulate(name, "{}.{}".format)}


# --- loading


class _OneTensorReader(dcp.FileSystemReader):
    """Frees each tensor that it has read before it reads the next; torch's reader holds two tensors of a file.

    It reads the metadata once, however often it is used.
    """

    _metadata: Any = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata

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


class TensorReader:
    """Reads tensors of a checkpoint on this rank alone, a few at a time. All ranks make their readers together.

    Attributes:
        saved: the `extra` of the checkpoint, see `read_manifest`, which checks the files.
        names: of all that was saved.
        shapes: of the tensors in the checkpoint, by their names there.
    """

    def __init__(self, path: str | Path) -> None:
        self.saved = read_manifest(path)
        self.path, self._reader = path, _OneTensorReader(path)
        saved = _metadata(path, self._reader).state_dict_metadata
        self.names = set(saved)
        self.shapes = {name: x.size for name, x in saved.items() if isinstance(x, TensorStorageMetadata)}

    def fill(self, state: dict[str, Any]) -> None:
        """Fill the tensors of `state`, a part of the state that was saved."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # other ranks read other tensors
            dcp.load(state, storage_reader=self._reader, no_dist=True)

    def check(self, expected: Mapping[str, torch.Size], parameters: Iterable[str]) -> None:
        """Check that the checkpoint is of this model. All ranks call this together.

        Args:
            expected: shapes of the tensors that this rank will read, by their names in the checkpoint.
            parameters: names of all parameters that the model trains.

        Raises:
            ValueError: on all ranks; it names the first tensor that is missing or has another shape, or a parameter
                that the model does not train.
        """
        wrong = next((name for name, shape in expected.items() if self.shapes.get(name) != shape), None)
        problem = ""
        if wrong is not None:
            got = f"{list(self.shapes[wrong])}" if wrong in self.shapes else "none"
            problem = f"expected {list(expected[wrong])} for {wrong}, got {got}"
        if problem := first_problem(problem):
            raise ValueError(
                f"checkpoint {self.path}: expected the state of this model and optimizer, got another: {problem}"
            )
        check_parameter_names(self.path, self.shapes, parameters)


def tensor_names(path: str | Path) -> set[str]:
    """The names of the tensors, and of all else that torch saved, in a checkpoint.

    Raises:
        ValueError: its metadata cannot be read.
    """
    return set(_metadata(path, dcp.FileSystemReader(path)).state_dict_metadata)


def _metadata(path: str | Path, reader: dcp.FileSystemReader) -> Any:
    try:
        return reader.read_metadata()
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(
            f"checkpoint {path}: expected a readable .metadata file, got a damaged one: {error}"
        ) from error


def check_parameter_names(path: str | Path, saved_tensors: Iterable[str], trained: Iterable[str]) -> None:
    """Check that a checkpoint holds no other parameters than those that the model trains; `load` would ignore them.

    Args:
        path: of the checkpoint, for the message.
        saved_tensors: names of the tensors in the checkpoint.
        trained: names of the parameters that the model trains.

    Raises:
        ValueError: names one parameter that the model does not have or does not train.
    """
    saved = {name.removeprefix("model.") for name in saved_tensors if name.startswith("model.")}
    if unknown := saved - set(trained):
        raise ValueError(
            f"checkpoint {path}: expected only parameters that this model trains, got {len(unknown)} others such as "
            f"{min(unknown)}"
        )


# --- the checkpoints of a run


def checkpoints(folder: str | Path) -> list[Path]:
    """Checkpoint directories `step_<n>` of a run, oldest first, without unfinished ones."""
    complete = [p for p in Path(folder).glob("step_*") if re.fullmatch(r"step_\d+", p.name)]
    return sorted(complete, key=step_of)


def step_of(path: Path) -> int:
    """The number of finished steps in the name of a checkpoint."""
    return int(path.name.removeprefix("step_"))


def keep_newest(folder: str | Path, count: int) -> None:
    """Remove all but the newest `count` checkpoints of a run; a count of 0 keeps all. All ranks call this together.

    Raises:
        OSError: on all ranks, if rank 0 cannot remove one.
    """

    def remove() -> None:
        for path in checkpoints(folder)[:-count] if count > 0 else []:
            shutil.rmtree(path)

    if problem := problem_of_rank_0(remove):
        raise OSError(f"checkpoints {folder}: expected to remove all but the newest {count}, got: {problem}")
