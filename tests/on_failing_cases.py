"""Run by `test_isolated_cases.py`: cases that succeed, raise, kill their process, and hang, alone or on two ranks.

on_failing_cases.py alone|ranks OUT_DIR NAME...
"""

import os
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
from isolated_cases import case


def run(out, names, rank=0):
    for name in names:
        with case(out, name):
            if name == "raises" and rank == 0:
                raise ValueError("wrong on purpose")
            if name == "dies":
                os.kill(os.getpid(), signal.SIGSEGV)
            if name == "hangs":
                time.sleep(1000)


def on_rank(rank, out, names):
    import torch.distributed as dist

    store = dist.FileStore(f"{out}/{len(names)}.store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    run(out, names, rank)


if __name__ == "__main__":
    how, out, *names = sys.argv[1:]
    if how == "ranks":
        from torch import multiprocessing

        multiprocessing.start_processes(on_rank, (out, names), nprocs=2, start_method="fork")
    else:
        run(out, names)
