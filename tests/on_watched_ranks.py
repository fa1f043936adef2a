"""A rank of `test_tracking_watchdog.py`: rank 1 is slow to judge, then rank 0 does not let go of its interpreter."""

import ctypes
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from rlkit.tracking import Run


def judge_slowly(folder):
    while not (folder / "scored").exists():
        time.sleep(0.01)


def keep_the_interpreter(folder):
    """Wait for a byte in one call into C, in which no other thread of this process gets a turn."""
    pipe = os.open(folder / "pipe", os.O_RDWR)
    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)


def main(folder):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    run = Run(folder / "run", {}, is_main_process=rank == 0, watchdog=0.4)
    run.phase("reward")
    if rank == 1:
        judge_slowly(folder)
    run.phase("train")
    dist.barrier()
    for name in ("reward", "train"):
        run.phase(name)
        if (rank, name) == (0, "reward"):
            keep_the_interpreter(folder)
    dist.barrier()
    run.log(0, {"loss": 1.0})
    run.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
