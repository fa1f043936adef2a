"""Claims the directory of a run for one run at a time, and checks the options of a resumed run."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from itertools import count, filterfalse
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO, TypeVar

import torch.distributed as dist

from rlkit.data.samples import Row
from rlkit.data.tables import as_rows
from rlkit.engines.distributed import gather_objects
from rlkit.rollout.vllm_families import config_or_empty
from rlkit.runs.command_line import NOT_OPTIONS
from rlkit.runs.option_types import changeable_options
from rlkit.runs.options import RUN_ONLY_OPTIONS, RunOptions, TaskOptions
from rlkit.runs.vllm_options import longest_row
from rlkit.tracking import CONFIG, EVAL, METRICS, SAMPLES
from rlkit.vlm.long_rope import has_long_factors, original_length

LOCK = "run.lock"
BUILT_MODEL = "init"  # the tiny model, or one with another configuration
PROBE_BYTES = 1 << 20
T = TypeVar("T")
_held: dict[Path, TextIO] = {}  # an open file holds its lock until this process ends
os.register_at_fork(after_in_child=_held.clear)  # a forked child must not keep the lock after this process ends

NOT_REPORTED = {*RUN_ONLY_OPTIONS, "epochs"}
CONTENTS = "contents"  # in config.json: what options alone do not tell, such as the rows of a file
ALLOWED_BY = {  # options of --allow_changes; the first is advised
    "train": ("task", "heldout"),
    "heldout": ("task", "heldout", "heldout_rows"),
    "chat_template": ("chat_template",),
}


def claim_directory(out: str, name: str, *, resume: bool) -> Path:
    """Claim a directory for this run before anything is loaded. All ranks call this together, and rank 0 decides.

    Args:
        out: the directory; if empty, the first free one of runs/NAME, runs/NAME-2, runs/NAME-3, ... or, with `resume`,
            the last of these that contains a run.
        name: NAME in the default directory.
        resume: continue the run in the directory, if there is one.

    Raises:
        ValueError: another process is writing to the directory; it contains a run and `resume` is False; it is a file,
            read-only or full.
    """
    default = Path("runs") / name
    return decided_by_rank_0(lambda: _claim(Path(out), resume) if out else _claim_numbered(default, resume))


def check_resumed_options(out: Path, options: RunOptions, contents: Mapping[str, str] | None = None) -> list[str]:
    """Compare options with those at the start of the run: one line per changed option. All ranks call this together.

    Args:
        out: the run's directory. If no step was logged there, the run is new.
        options: of the recipe.
        contents: see `recorded_contents`. One that the run has not recorded is not compared.

    Raises:
        ValueError: an option that changes the results, or the data, differs, and `allow_changes` does not name it.
    """
    may_differ = {*changeable_options(type(options)), *options.allow_changes}
    return decided_by_rank_0(lambda: _changed_options(out, asdict(options), may_differ, contents or {}))


def recorded_contents(cfg: RunOptions, train: Sequence[Row], heldout: Sequence[Row]) -> dict[str, str]:
    """Fingerprints of the files behind a run's options: its rows, on which their order depends, and its chat template.

    All ranks call this together, and each reads its own, see `rlkit.data.tables.Rows.fingerprint`.

    Raises:
        ValueError: on all ranks, if they differ between ranks.
    """
    tables = {"train": as_rows(train), "heldout": as_rows(heldout)}
    found = {name: f"{len(rows)} rows, fingerprint {rows.fingerprint()}" for name, rows in tables.items()}
    if isinstance(cfg, TaskOptions) and cfg.chat_template:
        with suppress(OSError):  # an error of `processor_of` says that it cannot be read
            template = Path(cfg.chat_template).read_bytes()
            found["chat_template"] = f"fingerprint {sha256(template).hexdigest()[:16]}"
    _check_same_contents(gather_objects(found), cfg.allow_changes)
    return found


def _check_same_contents(of_ranks: Sequence[Mapping[str, str]], allowed: Collection[str]) -> None:
    for rank, found in enumerate(of_ranks):
        for name, first in of_ranks[0].items():
            if found.get(name, first) != first and not set(ALLOWED_BY[name]) & set(allowed):
                raise ValueError(
                    f"{name}: expected the same contents on all ranks, got {first} on rank 0 and {found[name]} on rank "
                    f"{rank}; a task that shuffles needs a fixed seed, and files must be the same on all nodes; to "
                    f"start all the same, add --allow_changes {ALLOWED_BY[name][0]}"
                )


def _changed_options(
    out: Path, options: Mapping[str, Any], may_differ: Collection[str], contents: Mapping[str, str]
) -> list[str]:
    if not (_holds_run(out) and (out / CONFIG).exists()):
        return []
    before, now = json.loads((out / CONFIG).read_text()), json.loads(json.dumps(options, default=str))
    changed = {
        name: f"{name} was {x!r} and is {repr(now[name]) if name in now else 'no option of this recipe'}"
        for name, x in before.items()
        if name not in NOT_OPTIONS and (now[name] != x if name in now else x is not None)
    }
    if refused := [name for name in changed if name not in may_differ]:
        raise ValueError(
            f"resume: expected the options of the run in {out}, but {', '.join(changed[name] for name in refused)}; to "
            f"continue with them, add --allow_changes {' '.join(refused)}"
        )
    _check_same_factors(out, before, now)
    changed |= _changed_contents(out, before.get(CONTENTS, {}), contents, options["allow_changes"])
    return [sentence for name, sentence in changed.items() if name not in NOT_REPORTED]


def _changed_contents(
    out: Path, before: Mapping[str, str], now: Mapping[str, str], allowed: Collection[str]
) -> dict[str, str]:
    changed = {name: (before[name], x) for name, x in now.items() if before.get(name, x) != x}
    refused = [name for name in changed if not set(ALLOWED_BY[name]) & set(allowed)]
    if refused:
        described = ", ".join(f"{name} had {changed[name][0]}, and now {changed[name][1]}" for name in refused)
        advised = " ".join(dict.fromkeys(ALLOWED_BY[name][0] for name in refused))
        why = "" if refused == ["chat_template"] else "; rows that were trained on may be held out now"
        raise ValueError(
            f"resume: expected the data of the run in {out}, but {described}{why}; to continue all the same, add "
            f"--allow_changes {advised}"
        )
    return {name: f"{name} was {old!r} and is {new!r}" for name, (old, new) in changed.items()}


def _check_same_factors(out: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse other lengths that would change the LongRoPE factors of the run's model, see rlkit.vlm.long_rope."""
    longest = [longest_row(SimpleNamespace(**options)) for options in (before, now)]
    if longest[0] == longest[1]:
        return
    model = str(out / BUILT_MODEL) if (out / BUILT_MODEL).exists() else now["model"]
    config = config_or_empty(model, trust_remote_code=now["trust_remote_code"])
    was_long, is_long = (has_long_factors(config, length) for length in longest)
    if was_long != is_long:
        most, old, new = ("more than", "long", "short") if was_long else ("at most", "short", "long")
        raise ValueError(
            f"resume: expected sequences of {most} {original_length(config)} tokens as in the run in {out}, got up to "
            f"{longest[1] or 'an unknown number of'}: {config.model_type} would change from {old} LongRoPE factors to "
            f"{new} ones; start a new run"
        )


def decided_by_rank_0(decide: Callable[[], T]) -> T:
    """Call `decide` on rank 0, and return its result on all ranks. A ValueError is raised on all ranks, too."""
    decided: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            decided[0] = decide()
        except ValueError as error:
            decided[1] = str(error)
    if dist.is_initialized():
        dist.broadcast_object_list(decided, 0)
    if decided[1] is not None:
        raise ValueError(decided[1])
    return decided[0]


def release_directory(out: Path) -> None:
    """Release the claim on a directory. The end of this process releases it, too."""
    if (file := _held.pop(out.resolve(), None)) is not None:
        file.close()


def _holds_run(path: Path) -> bool:
    """Whether a run has logged a step there. A run that failed before its first step has nothing to continue."""
    metrics = path / METRICS
    return metrics.exists() and metrics.stat().st_size > 0


class _Taken(ValueError):
    """The directory already contains a run, or another process is writing to it."""


def _claim_numbered(path: Path, resume: bool) -> Path:
    """Claim the first free one of PATH, PATH-2, PATH-3, ...; to resume, the last one that contains a run."""
    if resume:
        started = {number: found for number, found in _existing(path) if _holds_run(found)}
        return _claim(started[max(started)] if started else path, resume)
    without_run = filterfalse(_holds_run, _numbered(path))
    while True:
        try:
            return _claim(next(without_run), resume)
        except _Taken:  # another process is writing to it
            continue


def _numbered(path: Path) -> Iterator[Path]:
    """PATH, PATH-2, PATH-3, ..."""
    yield path
    for number in count(2):
        yield path.with_name(f"{path.name}-{number}")


def _existing(path: Path) -> Iterator[tuple[int, Path]]:
    """The numbers and paths of those of PATH, PATH-2, PATH-3, ... that exist."""
    numbered = re.compile(re.escape(path.name) + r"(?:-([2-9]|[1-9]\d+))?")
    for found in path.parent.glob("*"):
        if match := numbered.fullmatch(found.name):
            yield int(match[1] or 1), found


def _claim(path: Path, resume: bool) -> Path:
    if path.exists() and not path.is_dir():
        raise ValueError(f"out {str(path)!r}: expected a directory, got a file")
    try:
        path.mkdir(parents=True, exist_ok=True)
        claimed_before = (path / LOCK).exists()
        _check_writable(path)
        lock = _lock(path)
    except OSError as error:
        raise ValueError(f"out {str(path)!r}: expected a directory that can be written to, got: {error}") from error
    if _holds_run(path) and not resume:
        release_directory(path)
        raise _Taken(f"out {str(path)!r}: holds a run already; continue it with --resume, or choose another --out")
    if claimed_before and not _holds_run(path):  # left by a start that failed
        shutil.rmtree(path / BUILT_MODEL, ignore_errors=True)  # this start may have other options
        for name in () if resume else (CONFIG, EVAL, METRICS, SAMPLES):
            (path / name).unlink(missing_ok=True)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return path


def _check_writable(path: Path) -> None:
    """Write and remove a file of one MiB. Raises OSError if the directory is read-only or full."""
    probe = path / f".probe-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)


def _lock(path: Path) -> TextIO:
    """Lock a directory, and return the locked file. The lock lasts until this process ends or releases it.

    Raises:
        _Taken: another process holds the lock.
    """
    import fcntl

    if path.resolve() in _held:
        return _held[path.resolve()]
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
    _held[path.resolve()] = file
    return file
