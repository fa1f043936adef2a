"""Worker processes that answer one question at a time, and are killed if an answer takes too long."""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable

from rlkit.rewards.sandbox import WALL, processor_seconds

Worker = subprocess.Popen[bytes]
EXIT_SECONDS = 10.0  # from the end of a worker's output to its exit, on a busy machine


class WorkerPool:
    """A pool of worker processes, at most one per processor, which end with this process.

    Args:
        start: starts a worker, with pipes for input and output, in a session of its own.
    """

    def __init__(self, start: Callable[[], Worker]) -> None:
        self.start = start
        self.reset()
        _pools.add(self)

    def reset(self) -> None:
        """Forget the workers and the slots that threads hold; after a fork they belong to the parent."""
        self.idle: list[Worker] = []
        self.slots = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))

    def take(self) -> Worker:
        """An idle worker that is alive, or a new one."""
        while True:
            try:
                worker = self.idle.pop()
            except IndexError:
                return self.start()
            if worker.poll() is None:
                return worker
            end_worker(worker)

    def ask(
        self, question: bytes, seconds: float, keep: Callable[[bytes], bool] = bool
    ) -> tuple[bytes | None, int | None]:
        """Returns (the line that a worker answers, None), or (None, its exit code), which is None if it took too long.

        Args:
            question: written to the worker's input.
            seconds: limit of processor time, so that other processes do not use it up. The limit of wall time is four
                times as long.
            keep: whether the worker that gave this line can answer another question; otherwise it is ended.
        """
        with self.slots:
            worker = self.take()
            try:
                if worker.stdin is not None:
                    worker.stdin.write(question)
                reply = read_line(worker, seconds)
            except BrokenPipeError:
                reply = b""
            if reply:
                if keep(reply):
                    self.idle.append(worker)
                else:
                    end_worker(worker)
                return reply, None
            code = worker.poll() if reply is None else exit_code(worker)
            end_worker(worker)
            return None, code


def read_line(worker: Worker, seconds: float) -> bytes | None:
    """The next line of a worker's output; b"" if it has closed its output, None if it takes longer than `seconds`, see
    `WorkerPool.ask`."""
    assert worker.stdout is not None
    waiting = select.poll()
    waiting.register(worker.stdout, select.POLLIN)
    deadline, computed = time.monotonic() + WALL * seconds, processor_seconds(worker.pid) + seconds
    while not waiting.poll(50):
        if time.monotonic() > deadline or processor_seconds(worker.pid) > computed:
            return None
    return worker.stdout.readline()


def exit_code(worker: Worker) -> int | None:
    """Exit code of a worker that has closed its pipes, which it does a moment before it ends; None if it lives on."""
    try:
        return worker.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def end_worker(worker: Worker) -> None:
    """Kill a worker and what it has started."""
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            pipe.close()


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for pool in list(_pools):
        while pool.idle:
            end_worker(pool.idle.pop())


def _after_fork() -> None:
    for pool in list(_pools):
        pool.reset()


os.register_at_fork(after_in_child=_after_fork)
