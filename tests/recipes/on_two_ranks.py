"""Run by `test_two_ranks.py`: cases on two ranks, one after the other, in one process a rank.

on_two_ranks.py RUNS_FILE NAME...

RUNS_FILE holds, by name, the steps after which a run is broken off and resumed (0: never), its recipe and its options.
The other cases are `responses`, what ranks with the same rows have of a sampler that answers each rank differently;
`late`, a rank that starts late; `refused`, what the ranks say of a directory that rank 0 cannot have; `measured`,
what they measure of responses that they share, or that rank 0 has alone; and `replayed/NAME`, the saved step of a run
of before, computed again by both ranks.
"""

import io
import json
import os
import sys
import time
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from forked_ranks import fork_ranks
from helpers import run_here, stop_after
from isolated_cases import case
from megatron_groups import destroy_megatron_groups
from runs.some_responses import PROMPTS, measure, of_a_rank

from rlkit.data import append_response, prompt_sample
from rlkit.engines.distributed import TIMEOUT, init_distributed, make_model_parallel_group
from rlkit.replay.__main__ import replay
from rlkit.replay.bundles import read_bundle
from rlkit.replay.compare import compare_bundles
from rlkit.rollout.shared_rows import SharedRowsRollout
from rlkit.runs.directory import claim_directory
from rlkit.tracking import Run


class Sampler:
    """Writes its rank, and how many requests it was given."""

    def generate(self, requests, sampling, n, *, on_finished=None):
        tokens = [10 + dist.get_rank(), len(requests)]
        found = [[append_response(request, tokens, [-1.0, -1.0]) for _ in range(n)] for request in requests]
        for i in reversed(range(len(requests))):
            if on_finished is not None:
                on_finished(i, found[i])
        return [sample for group in found for sample in group]


def samples_of_each_rank(collective):
    group = make_model_parallel_group(0, 1)
    assert make_model_parallel_group(dist.get_rank(), 2) is None
    requests = [prompt_sample([1], vision={"pixels": torch.full((1,), i)}, row={"answer": i}) for i in range(3)]
    seen = {}
    rollout = SharedRowsRollout(Sampler(), group, collective=collective)
    samples = rollout.generate(requests, None, 2, on_finished=seen.setdefault)
    assert [sample.token_ids for i in range(3) for sample in seen[i]] == [sample.token_ids for sample in samples]
    found = [(s.response_ids, int(s.vision["pixels"]), s.row["answer"]) for s in samples]
    return of_all_ranks(found)


def of_all_ranks(found):
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    return ranks


def started_late(root):
    """What the ranks call a new run's directory when one is far behind; by itself it would find another's."""
    os.chdir(root)  # the default directories are runs/NAME, runs/NAME-2, ...
    if dist.get_rank():
        time.sleep(1)
    run = Run(claim_directory("", "late", resume=False), {}, is_main_process=dist.get_rank() == 0)
    run.drop_metrics_from(0)
    return of_all_ranks(run.out.name)


def refused(root):
    out = root / f"out{dist.get_rank()}"
    out.write_text("a file")
    try:
        return of_all_ranks(str(claim_directory(str(out), "x", resume=False)))
    except ValueError as error:
        return of_all_ranks(str(error))


def measured():
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = of_a_rank(0, 1) if rank == 0 else of_a_rank(len(PROMPTS), 1)  # rank 1 has nothing
    return [of_all_ranks(measure(responses)) for responses in (of_a_rank(rank, world), alone)]


def replayed(rollouts):
    """Rows and responses of the step that was computed again, and how it compares with the saved one."""
    saved = read_bundle(rollouts / "step_0")
    computed = replay(rollouts / "step_0", saved, "", "", [])
    destroy_megatron_groups()
    fields, found = computed.updates[0].fields, compare_bundles(saved, computed, 1e-4)
    return {
        "rows": sorted(zip(fields["group_ids"].tolist(), fields["numbers"].tolist(), strict=True)),
        "responses": sorted((sample.group_id, sample.number) for sample in computed.draws[0].samples),
        "compared": {one.name: True for one in found},
        "differ": [f"{one.name}: {one.where}" for one in found if one.differs],
    }


def run(steps, recipe, *arguments):
    if steps:
        stop_after(steps, recipe, *arguments)
        destroy_megatron_groups()
        arguments += ("--resume",)
    run_here(recipe, *arguments)
    assert waiting_times() == {TIMEOUT}
    destroy_megatron_groups()


def waiting_times():
    """The time-outs of all process groups."""
    groups = [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, dist.ProcessGroup)]
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


def on_rank(runs_file, names):
    init_distributed()
    runs, folder = json.loads(runs_file.read_text()), runs_file.parent
    for name in names:
        with case(folder, name):
            if name in runs:
                with redirect_stdout(io.StringIO()) as printed:
                    run(*runs[name])
                if dist.get_rank() == 0:
                    (folder / f"{name}.printed").write_text(printed.getvalue())
                continue
            others = {
                "responses": lambda: list(map(samples_of_each_rank, (True, False))),
                "late": lambda: started_late(folder),
                "refused": lambda: refused(folder),
                "measured": measured,
                **{f"replayed/{run}": partial(replayed, folder / run / "rollouts") for run in runs},
            }
            found = others[name]()
            if dist.get_rank() == 0:
                (folder / f"{name.replace('/', '_')}.json").write_text(json.dumps(found))


def import_what_recipes_need():
    """In the process that forks the ranks, what they would each import on first use."""
    import matplotlib.backends.backend_agg  # noqa: F401
    import peft  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import tyro  # noqa: F401
    from transformers import GenerationMixin, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor  # noqa: F401

    from rlkit.engines.fsdp import fsdp2  # noqa: F401
    from rlkit.engines.megatron import engine  # noqa: F401


if __name__ == "__main__":
    import_what_recipes_need()
    fork_ranks(on_rank, 2, Path(sys.argv[1]), sys.argv[2:])
