"""Ranks that one process forks, with the environment variables that torchrun sets.

What that process has imported no rank imports again; with transformers that takes seconds on each.
"""

import gc
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp


def fork_ranks(function: Callable[..., Any], world: int, *arguments: Any) -> None:
    """Call `function(*arguments)` on each of `world` ranks, and wait until they have ended.

    Raises:
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException: a rank failed; the others are ended.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    gc.freeze()  # as in conftest.py: no rank's garbage collection looks through what is imported
    gc.set_threshold(50_000, 20, 100)
    try:
        mp.start_processes(_on_rank, (world, port, function, arguments), nprocs=world, start_method="fork")
    finally:
        gc.unfreeze()


def _on_rank(rank, world, port, function, arguments):
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    own |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({name: str(x) for name, x in own.items()})
    torch.set_num_threads(1)
    function(*arguments)
