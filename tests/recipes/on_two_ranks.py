"""Started by torchrun: the runs that a JSON file lists, one after the other, in one process a rank; those with a number
of steps are broken off after so many, and resumed.

Before them: what ranks with the same rows have of a sampler that answers each rank differently.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from helpers import run_here, stop_after
from megatron.core import parallel_state

from rlkit.data import extend, prompt
from rlkit.engines.distributed import init_distributed, ranks_with_equal_rows
from rlkit.rollout.same_rows import SameRows
from rlkit.tracking import Run, new_directory


class Sampler:
    """Writes its rank, and how many requests it was given."""

    def generate(self, requests, sampling, n, *, written=None):
        tokens = [10 + dist.get_rank(), len(requests)]
        found = [[extend(request, tokens, [-1.0, -1.0]) for _ in range(n)] for request in requests]
        for i in reversed(range(len(requests))):
            if written is not None:
                written(i, found[i])
        return [sample for group in found for sample in group]


def answers(together):
    group = ranks_with_equal_rows(0, 1)
    assert ranks_with_equal_rows(dist.get_rank(), 2) is None
    requests = [prompt([1], vision={"pixels": torch.full((1,), i)}, row={"answer": i}) for i in range(3)]
    seen = {}
    found = SameRows(Sampler(), group, together=together).generate(requests, None, 2, written=seen.setdefault)
    assert [sample.token_ids for i in range(3) for sample in seen[i]] == [sample.token_ids for sample in found]
    mine = [(s.response_ids, int(s.vision["pixels"]), s.row["answer"]) for s in found]
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return ranks


def started_late(root):
    """What the ranks call a new run's directory when one is far behind; without waiting it would be another's."""
    if dist.get_rank():
        time.sleep(1)
    run = Run(new_directory(root, "late"), {}, writes=dist.get_rank() == 0)
    run.start_at(0)
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, run.out.name)
    return ranks


if __name__ == "__main__":
    init_distributed()
    told = {str(together): answers(together) for together in (True, False)}
    told["late"] = started_late(Path(sys.argv[1]).parent)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).with_name("answers.json").write_text(json.dumps(told))
    for steps, recipe, *arguments in json.loads(Path(sys.argv[1]).read_text()):
        if steps:
            stop_after(steps, recipe, *arguments)
            parallel_state.destroy_model_parallel()
            arguments += ["--resume"]
        run_here(recipe, *arguments)
        parallel_state.destroy_model_parallel()
