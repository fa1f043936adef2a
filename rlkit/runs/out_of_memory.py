"""What a run says when a GPU's memory is not enough, and the snapshot of allocations that it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from rlkit.tracking import Run

KEPT_EVENTS = 200_000  # the newest allocations and frees on the GPU whose stacks are kept
_watched: list[tuple[Run, bool]] = []  # the run of this process, and whether its allocations are recorded


def watch_memory(run: Run, *, record: bool) -> None:
    """From now on, `explained_out_of_memory` explains the errors of this run.

    Args:
        record: record allocations on the GPU with their stacks, for a snapshot.
    """
    record = record and torch.cuda.is_available()
    _watched[:] = [(run, record)]
    if record:
        torch.cuda.memory._record_memory_history(max_entries=KEPT_EVENTS)


@contextmanager
def explained_out_of_memory() -> Iterator[None]:
    """Inside the `with` block, an out-of-memory error gets a note that says where, and what to do; it is not caught."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        for run, record in _watched:
            rank, phase = dist.get_rank(), run.current_phase
            error.add_note(
                f"{run.name}: rank {rank} ran out of memory in the phase {phase}. `python -m rlkit.plan`, with the "
                "recipe and options of this run, says what takes memory, and which options make it fit."
            )
            if record:
                path = run.out / f"memory-rank-{rank}.pickle"
                torch.cuda.memory._dump_snapshot(str(path))
                error.add_note(f"{path} shows all allocations; open it at https://docs.pytorch.org/memory_viz")
        raise
    finally:
        _watched.clear()
