"""Encodes prompts in worker processes, so that this process does other work while images are decoded and resized.

Each worker has a pipe of its own, from which it takes one row at a time. It ends when the other end of the pipe is
closed, so none outlives this process, however that ends. Signals that end a run (Ctrl-C, SIGTERM) are left to this
process, which still needs the prompts of its last step; workers start with these signals blocked. Unlike torch's
DataLoader this draws no random numbers, takes rows instead of indices into a data set, and can say which row a worker
was encoding when it was killed.
"""

from __future__ import annotations

import atexit
import pickle
import signal
import traceback
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import resource_tracker
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, multiprocessing

from rlkit.data.media import Video
from rlkit.data.samples import Row, Sample
from rlkit.vlm.prompts import encode_prompt

EXIT_SECONDS = 10.0  # from the end of a worker's pipe to its exit


class PromptWorkerError(RuntimeError):
    """A row cannot be sent to a worker process, or a worker has ended."""


class _Worker(NamedTuple):
    process: Any
    pipe: Any


class PromptEncoder:
    """Encodes prompts with `encode_prompt`, in the caller's thread or in worker processes.

    Args:
        processor: of the model.
        workers: number of processes, which are started with the first prompts and used until `close`. Each has one
            thread. 0: the caller's thread.
    """

    def __init__(self, processor: Any, workers: int = 0) -> None:
        self.processor, self.count = processor, workers
        self.workers: list[_Worker] = []

    def __call__(self, rows: Iterable[tuple[int, Row]], **options: Any) -> Generator[Callable[[], Sample]]:
        """For each (group id, row), in order, a function that returns its prompt, or raises as `encode_prompt` does.

        Args:
            options: further arguments of `encode_prompt`.

        The functions raise `PromptWorkerError` for a row that cannot be pickled, and if a worker has ended.
        """
        if not self.count:
            for group_id, row in rows:
                yield partial(encode_prompt, self.processor, row, group_id=group_id, **options)
            return
        if not self.workers:
            self._start()
        prompts = [self.threads.submit(self._encode, row, {"group_id": i, **options}) for i, row in rows]
        try:
            for prompt in prompts:
                yield prompt.result
        except GeneratorExit:  # no more are needed
            for prompt in prompts:
                prompt.cancel()
            raise

    def close(self) -> None:
        """End the workers. So does the end of this process, or of the last reference to this encoder."""
        if self.workers:
            self.end()

    def _start(self) -> None:
        # torch's pipes send tensors through shared memory; a forked process could not use CUDA, or locks of threads
        context = multiprocessing.get_context("spawn")
        self.idle: SimpleQueue[_Worker] = SimpleQueue()
        self.threads = ThreadPoolExecutor(self.count, thread_name_prefix="prompt_workers")  # each waits for a worker
        self.end = weakref.finalize(self, _end, self.workers, self.threads)
        atexit.register(self.end)  # before multiprocessing waits for its processes
        for _ in range(self.count):
            pipe, other_end = context.Pipe()
            process = context.Process(target=_work, args=(other_end, self.processor), name="prompt_worker", daemon=True)
            with _pickling("a processor", type(self.processor).__name__), _signals_blocked():
                process.start()
            other_end.close()
            self.workers.append(worker := _Worker(process, pipe))
            self.idle.put(worker)

    def _encode(self, row: Row, options: dict[str, Any]) -> Sample:
        """`encode_prompt` in a worker that is idle."""
        where = row.get("where", "row")
        worker = self.idle.get()
        try:
            with _pickling("rows", where):
                worker.pipe.send((row, options))
            reply = worker.pipe.recv()
        except (EOFError, OSError) as error:
            worker.process.join(EXIT_SECONDS)
            if worker.process.is_alive():  # another error, such as too many open files
                raise
            raise PromptWorkerError(
                f"dataloader_num_workers: expected the prompt of {where}, got the end of its worker, process "
                f"{worker.process.pid}, {_ending(worker.process.exitcode)}"
            ) from error
        finally:
            self.idle.put(worker)
        if isinstance(reply, Exception):
            raise reply
        return _from_shared_memory(reply, row)


def _end(workers: list[_Worker], threads: ThreadPoolExecutor) -> None:
    for worker in workers:
        worker.process.kill()
        worker.process.join()
    threads.shutdown(cancel_futures=True)
    for worker in workers:
        worker.pipe.close()
    workers.clear()


@contextmanager
def _pickling(expected: str, got: str) -> Iterator[None]:
    """Inside the `with` block, what cannot be pickled raises PromptWorkerError."""
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PromptWorkerError(
            f"dataloader_num_workers: expected {expected} that can be pickled, got {got}: {error}; use 0 workers"
        ) from error


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Processes that are started inside the `with` block are not ended by Ctrl-C and SIGTERM."""
    resource_tracker.ensure_running()  # it would unblock them when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _from_shared_memory(reply: _Reply, row: Row) -> Sample:
    """The sample in memory of this process. Shared memory is small in containers, and takes an open file a tensor."""
    images = []
    for pixels, info in reply.images:
        images.append(image := Image.fromarray(pixels.numpy()))
        image.info = info
    videos = [
        Video(frames.numpy().copy(), video.fps, video.sound)
        for frames, video in zip(reply.frames, reply.sample.videos, strict=True)
    ]
    return replace(
        reply.sample,
        row={**row, "thinking_opened": True} if reply.thinking_opened else row,
        vision={name: x.clone() for name, x in reply.sample.vision.items()},
        images=images,
        videos=videos,
    )


def _ending(code: int | None) -> str:
    """How a process ended, from its exit code."""
    if code is None or code >= 0:
        return f"with exit code {code}; see its traceback"
    number = signal.Signals(-code)
    if number not in (signal.SIGKILL, signal.SIGBUS):
        return f"by {number.name}"
    return f"by {number.name}; if nobody has killed it, memory or /dev/shm was full: use fewer workers"


# --- in a worker process


class _Reply(NamedTuple):
    """A prompt on its way from a worker: without its row, and with images and frames as tensors.

    Attributes:
        thinking_opened: what `encode_prompt` has added to the row.
        images: (pixels, `info`) of each image.
    """

    sample: Sample
    thinking_opened: bool
    images: list[tuple[Tensor, dict[Any, Any]]]
    frames: list[Tensor]


def _work(pipe: Any, processor: Any) -> None:
    """Encode what comes through the pipe until its other end is closed."""
    torch.set_num_threads(1)
    try:
        while True:
            pipe.send(_reply(processor, *pipe.recv()))
    except (EOFError, ConnectionError):  # the other end is closed
        return


def _reply(processor: Any, row: Row, options: dict[str, Any]) -> _Reply | Exception:
    try:
        sample = encode_prompt(processor, row, **options)
    except ValueError as error:
        return ValueError(str(error))
    except Exception as error:
        worker_traceback = "".join(traceback.format_exception(error))
        error.add_note(worker_traceback)
        try:
            return pickle.loads(pickle.dumps(error))
        except Exception:  # its class does not allow it
            return PromptWorkerError(f"dataloader_num_workers: a worker process failed:\n{worker_traceback}")
    return _Reply(
        replace(sample, row={}, images=(), videos=[video._replace(frames=video.frames[:0]) for video in sample.videos]),
        bool(sample.row.get("thinking_opened")),
        [(torch.from_numpy(np.array(image)), image.info) for image in sample.images],
        [torch.from_numpy(video.frames) for video in sample.videos],
    )
