"""Started by torchrun: cases of `test_two_ranks.py`, one after the other, in one process a rank.

on_two_ranks.py RUNS_FILE NAME...

RUNS_FILE holds, by name, the steps after which a run is broken off and resumed (0: never), its recipe and its options.
Two more cases are `answers`, what ranks with the same rows have of a sampler that answers each rank differently, and
`late`, a rank that starts late.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from helpers import run_here, stop_after
from isolated_cases import case
from megatron.core import parallel_state

from rlkit.data import append_response, prompt_sample
from rlkit.engines.distributed import init_distributed, make_model_parallel_group
from rlkit.rollout.same_rows import SameRows
from rlkit.runs import claim_directory
from rlkit.tracking import Run


class Sampler:
    """Writes its rank, and how many requests it was given."""

    def generate(self, requests, sampling, n, *, written=None):
        tokens = [10 + dist.get_rank(), len(requests)]
        found = [[append_response(request, tokens, [-1.0, -1.0]) for _ in range(n)] for request in requests]
        for i in reversed(range(len(requests))):
            if written is not None:
                written(i, found[i])
        return [sample for group in found for sample in group]


def answers(together):
    group = make_model_parallel_group(0, 1)
    assert make_model_parallel_group(dist.get_rank(), 2) is None
    requests = [prompt_sample([1], vision={"pixels": torch.full((1,), i)}, row={"answer": i}) for i in range(3)]
    seen = {}
    found = SameRows(Sampler(), group, together=together).generate(requests, None, 2, written=seen.setdefault)
    assert [sample.token_ids for i in range(3) for sample in seen[i]] == [sample.token_ids for sample in found]
    mine = [(s.response_ids, int(s.vision["pixels"]), s.row["answer"]) for s in found]
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return ranks


def started_late(root):
    """What the ranks call a new run's directory when one is far behind; by itself it would find another's."""
    os.chdir(root)  # the default directories are runs/NAME, runs/NAME-2, ...
    if dist.get_rank():
        time.sleep(1)
    run = Run(claim_directory("", "late", resume=False), {}, writes=dist.get_rank() == 0)
    run.drop_metrics_from(0)
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, run.out.name)
    return ranks


def run(steps, recipe, *arguments):
    if steps:
        stop_after(steps, recipe, *arguments)
        parallel_state.destroy_model_parallel()
        arguments += ("--resume",)
    run_here(recipe, *arguments)
    parallel_state.destroy_model_parallel()


def main(runs_file, names):
    init_distributed()
    runs, folder = json.loads(runs_file.read_text()), runs_file.parent
    for name in names:
        with case(folder, name):
            if name in runs:
                run(*runs[name])
                continue
            found = started_late(folder) if name == "late" else [answers(together) for together in (True, False)]
            if dist.get_rank() == 0:
                (folder / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
