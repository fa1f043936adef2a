"""A rank of `test_tracking_watchdog.py`: rank 1 is slow to judge, then rank 0 does not let go of its interpreter."""

import itertools
import sys
import time

import torch.distributed as dist

from rlkit.tracking import Run


def judge_slowly():
    time.sleep(1.4)


def main(out):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    run = Run(out, {}, writes=rank == 0, watchdog=0.4)
    run.phase("reward")
    if rank == 1:
        judge_slowly()
    run.phase("train")
    dist.barrier()
    for name in ("reward", "train"):
        run.phase(name)
        if (rank, name) == (0, "reward"):
            sum(itertools.repeat(1, 2 * 10**8))  # a second or more in which no other thread gets a turn
    dist.barrier()
    run.log(0, {"loss": 1.0})
    run.close()


if __name__ == "__main__":
    main(sys.argv[1])
    dist.destroy_process_group()
