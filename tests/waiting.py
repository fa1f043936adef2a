"""Waiting for a condition, with a deadline that no busy machine reaches; and whether a process still runs."""

import time
from collections.abc import Callable
from pathlib import Path


def until(condition: Callable[[], object], seconds: float = 100.0) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: it does not hold within this time.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"expected a condition to hold within {seconds:g} s"
        time.sleep(0.005)


def is_running(process_id: int) -> bool:
    """Whether there is such a process, and it is not a zombie, which waits for nothing but its parent."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the second one if it ends while the file is read
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
