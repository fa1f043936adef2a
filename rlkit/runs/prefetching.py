"""Prepares the input of the next step while the current one runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def prefetch(items: Iterable[T]) -> Iterator[T]:
    """Yield the same items; while one is in use, a thread computes the next.

    The thread takes time from the main one where it holds Python's lock. With `--dataloader_num_workers`, it waits for
    processes that read and resize images. An exception is raised where its item would have been yielded.
    """
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as thread:
        following = thread.submit(next, iterator, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, iterator, end)
            yield item  # type: ignore[misc]
