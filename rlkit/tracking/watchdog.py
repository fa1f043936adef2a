"""A thread in each rank that reports which ranks wait, in which phase, and which ranks do not respond."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

BEAT_SECONDS = 5.0  # interval of each rank's heartbeat
SILENT_SECONDS = 30.0  # a rank without a heartbeat for this long is reported


def watch(run: weakref.ref[Any], stop: threading.Event, file: Path, seconds: float) -> None:
    """Until the run ends, prints which ranks wait in which phase, and which ranks do not respond.

    A rank's heartbeat touches its file. Only the lowest responsive rank prints.
    """
    beat, patience = min(BEAT_SECONDS, seconds / 4), min(SILENT_SECONDS, 0.75 * seconds)
    printed, own_rank = time.time(), int(file.name)
    touched: dict[int, tuple[float, float]] = {}  # rank -> (its file's mtime, when this rank first saw that mtime)
    named: set[int] = set()
    while not stop.wait(beat) and run() is not None:
        try:
            os.utime(file)  # no heartbeat if the process is stopped, or a long call holds the GIL
            now, phases = time.time(), {phase.rank: phase for phase in _phases(file.parent)}
            for rank, phase in phases.items():
                if touched.get(rank, (0.0, 0.0))[0] != phase.touched:
                    touched[rank] = phase.touched, now  # this machine's clock: clocks of machines may differ
            silent = {rank: now - touched[rank][1] for rank in phases if now - touched[rank][1] >= patience}
            if own_rank != min(phases.keys() - silent.keys(), default=own_rank):
                continue
            for rank in sorted(silent.keys() - named):
                _warn(f"rank {rank} {_how_silent(phases[rank], silent[rank])}")
            named = set(silent)
            waits = [(now - phase.since, rank, phase.name) for rank, phase in phases.items()]
            if now - printed >= seconds and max(waits)[0] >= seconds:
                printed = now
                _warn(
                    f"{describe_waits(waits)}; kill -USR1 prints the stacks of a process, their ids are in "
                    f"{file.parent}"
                )
        except (OSError, ValueError):  # a file is being removed
            continue


def _warn(text: str) -> None:
    print(f"\nwatchdog: {text}", file=sys.stderr, flush=True)


def _how_silent(phase: _Phase, seconds: float) -> str:
    """Describes a rank that does not respond, and what to do."""
    where = f"(process {phase.process} on {phase.host}, in {phase.name})"
    state = _process_state(phase.process) if phase.host == socket.gethostname() else "unknown"
    if state == "T":
        return f"{where} was stopped {seconds:.0f} s ago: continue it with kill -CONT {phase.process}, or end the run"
    if not state:
        return f"{where} has ended: end the run, and continue it with --resume"
    return (
        f"{where} has not responded for {seconds:.0f} s: it is in one long call, or its machine hangs or cannot be "
        "reached; if it stays so, end the run, and continue it with --resume"
    )


def _process_state(process: int) -> str:
    """Linux's letter for the state of a local process, such as T for stopped; "" if there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "" if Path("/proc/self/stat").exists() else "unknown"


class _Phase(NamedTuple):
    """The content of a rank's file, and its mtime."""

    rank: int
    since: float
    process: int
    host: str
    name: str
    touched: float


def _phases(folder: Path) -> list[_Phase]:
    """The files of all ranks."""
    phases = []
    for rank in range(int(os.environ.get("WORLD_SIZE", 1))):
        if (path := folder / str(rank)).exists():
            since, process, host, name = path.read_text().split(" ", 3)
            phases.append(_Phase(rank, float(since), int(process), host, name, path.stat().st_mtime))
    return phases


def describe_waits(waits: Sequence[tuple[float, int, str]]) -> str:
    """A sentence made of (seconds, rank, phase): "rank 1 in reward for 65 s; ranks 0, 2 in train for 63 s".

    The phase with the fewest ranks comes first, because the other ranks probably wait for those ranks.
    """
    by_phase: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for seconds, rank, phase in waits:
        by_phase[phase].append((seconds, rank))
    parts = []
    for phase, members in sorted(by_phase.items(), key=lambda item: len(item[1])):
        ranks = ", ".join(str(rank) for _, rank in sorted(members, key=lambda member: member[1]))
        parts.append(f"rank{'s' * (len(members) > 1)} {ranks} in {phase} for {max(members)[0]:.0f} s")
    return "; ".join(parts)
