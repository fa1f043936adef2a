"""A call in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def in_thread(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run in a thread that keeps neither a pool nor the end of the interpreter waiting; nobody can call it off."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # the thread's own, handed to whoever asks
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
