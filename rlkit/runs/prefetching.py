"""Prepares the input of the next step while the current one runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rlkit.tracking import Run

T = TypeVar("T")


def prefetch(items: Iterable[T], run: Run) -> Iterator[T]:
    """Yield the same items; while one is in use, a thread computes the next.

    Whoever asks for an item waits in the run's phase `encode`, which goes on until the next `run.phase`.

    The thread takes time from the main one where it holds Python's lock. With `--dataloader_num_workers`, it waits for
    processes that read and resize images. An exception is raised where its item would have been yielded.
    """
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as thread:
        following = thread.submit(next, iterator, end)
        run.phase("encode")
        while (item := following.result()) is not end:
            following = thread.submit(next, iterator, end)
            yield item  # type: ignore[misc]
            run.phase("encode")
