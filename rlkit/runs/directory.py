"""The directory of a run: claimed by one run at a time, and continued only with the options it was started with."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch.distributed as dist

from rlkit.tracking import CONFIG, METRICS

LOCK = "run.lock"
T = TypeVar("T")
_held: dict[Path, TextIO] = {}  # an open file holds its lock until this process ends

# options that say where and how fast a run computes, not what; all others may differ only if --allow_changes names them
CHANGEABLE = """
config out resume allow_changes epochs steps save_every trackers watchdog threads engine parallel
ulysses_sequence_parallel_size micro_batch_tokens use_remove_padding share_prompts use_fused_kernels
enable_gradient_checkpointing rollout servers gpu_memory_utilization reward_threads max_unjudged max_mismatch
""".split()
UNTOLD = {"config", "out", "resume", "allow_changes", "epochs"}


def claim_directory(out: str, name: str, *, resume: bool) -> Path:
    """Take a directory for this run before anything is loaded. All ranks call this together, and rank 0 decides.

    Args:
        out: the directory; if empty, runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that is free. With
            `resume`, the last of these that holds a run.
        resume: continue the run that the directory holds, if it holds one.

    Raises:
        ValueError: another process is writing to it; it holds a run and `resume` is not given; it is a file.
    """
    return decided_by_rank_0(lambda: _claim(Path(out), resume) if out else _claim_numbered(Path("runs") / name, resume))


def check_resumed_options(out: Path, options: Any) -> list[str]:
    """How these options differ from those the run was started with, a line each. All ranks call this together.

    Args:
        out: the run's directory; one without config.json is a new run.
        options: a dataclass with a field `allow_changes`.

    Raises:
        ValueError: an option differs that changes what the run computes, and `allow_changes` does not name it.
    """
    return decided_by_rank_0(lambda: _changed_options(out, asdict(options)))


def _changed_options(out: Path, options: Mapping[str, Any]) -> list[str]:
    if not (out / CONFIG).exists():
        return []
    before, now = json.loads((out / CONFIG).read_text()), json.loads(json.dumps(options, default=str))
    changed = {name: (before[name], x) for name, x in now.items() if before.get(name, x) != x}
    refused = [name for name in changed if name not in {*CHANGEABLE, *options["allow_changes"]}]
    if refused:
        described = ", ".join(f"{name} was {changed[name][0]!r} and is {changed[name][1]!r}" for name in refused)
        raise ValueError(
            f"resume: expected the options of the run in {out}, but {described}; to continue with them, add "
            f"--allow_changes {' '.join(refused)}"
        )
    return [f"{name} was {old!r} and is {new!r}" for name, (old, new) in changed.items() if name not in UNTOLD]


def decided_by_rank_0(decide: Callable[[], T]) -> T:
    """What `decide` returns on rank 0, on all ranks; a ValueError that it raises there is raised on all of them."""
    answer: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            answer[0] = decide()
        except ValueError as error:
            answer[1] = str(error)
    if dist.is_initialized():
        dist.broadcast_object_list(answer, 0)
    if answer[1] is not None:
        raise ValueError(answer[1])
    return answer[0]


def release_directory(out: Path) -> None:
    """Let another process claim the directory; the end of this process does the same."""
    if (file := _held.pop(out.resolve(), None)) is not None:
        file.close()


def holds_run(path: Path) -> bool:
    return (path / CONFIG).exists() or (path / METRICS).exists()


class _Taken(ValueError):
    """Another process holds the lock of a directory."""


def _claim_numbered(path: Path, resume: bool) -> Path:
    """The first of PATH, PATH-2, PATH-3, ... that is free; to resume, the last one before it."""
    numbers = count(2)
    last, candidate = path, path
    while True:
        if not holds_run(candidate):
            try:
                return _claim(last if resume else candidate, resume)
            except _Taken:
                if resume:
                    raise
        last, candidate = candidate, path.with_name(f"{path.name}-{next(numbers)}")


def _claim(path: Path, resume: bool) -> Path:
    if path.exists() and not path.is_dir():
        raise ValueError(f"out {str(path)!r}: expected a directory, got a file")
    try:
        path.mkdir(parents=True, exist_ok=True)
        _lock(path)
    except PermissionError as error:
        raise ValueError(f"out {str(path)!r}: expected a directory that can be written to, got: {error}") from error
    if holds_run(path) and not resume:
        release_directory(path)
        raise ValueError(f"out {str(path)!r}: holds a run already; continue it with --resume, or choose another --out")
    return path


def _lock(path: Path) -> None:
    """Hold the lock of a directory for the life of this process.

    Raises:
        _Taken: another process holds it.
    """
    import fcntl

    if path.resolve() in _held:
        return
    file = (path / LOCK).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise _Taken(f"out {str(path)!r}: {holder} is writing a run to it; choose another --out") from None
    except OSError:  # a file system without locks
        pass
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _held[path.resolve()] = file
