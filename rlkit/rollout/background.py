"""Calls and event loops in daemon threads, which never keep the interpreter from exiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def in_daemon_thread(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call a function in a thread of its own; the future cannot be cancelled.

    The thread belongs to no pool, so a call that never returns does not delay other calls either.
    """
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def call() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # raised again by `future.result()`
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


def start_event_loop(thread_name: str) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    """A new event loop, and the daemon thread that runs it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True, name=thread_name)
    thread.start()
    return loop, thread
