"""Run by `test_differing_ranks.py`: what two ranks that differ from each other get.

on_differing_ranks.py OUT_DIR
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from forked_ranks import fork_ranks  # noqa: E402

from rlkit.data import Batch  # noqa: E402
from rlkit.engines.distributed import all_reduce, init_distributed, reduce_metrics  # noqa: E402
from rlkit.losses import token_mean  # noqa: E402
from rlkit.runs import RunOptions, global_loss  # noqa: E402
from rlkit.runs.directory import recorded_contents  # noqa: E402


def reduced():
    """Metrics with other names on each rank, and then with the same."""
    of_ranks = [{"a": 1.0, "both": 2.0, "a/max": -3.0}, {"b": 10.0, "both": 20.0, "c": 5.0}]
    return reduce_metrics(of_ranks[dist.get_rank()]), reduce_metrics({"x/max": dist.get_rank(), "y": 1.0})


def contents():
    """The recorded contents of the same rows, and the errors for other rows on rank 1."""
    rows = [{"question": str(i)} for i in range(7)]
    found = [recorded_contents(RunOptions(), rows, rows[:2])]
    for others in ((rows[:4], rows[:2]), (rows, rows[1::-1])):  # fewer, and in another order
        try:
            found.append(recorded_contents(RunOptions(), *(others if dist.get_rank() else (rows, rows[:2]))))
        except ValueError as error:
            found.append(str(error))
    return found


def heldout_loss():
    """Of rank 0's two rows and rank 1's one, with one and two trained tokens each."""
    rank = dist.get_rank()
    mask = torch.tensor([[False, True, True]] if rank else [[False, True, False]] * 2)
    batch = Batch(torch.zeros(mask.shape, dtype=torch.long), mask, [3] * len(mask))
    out = {"logprobs": torch.full(mask.shape, -4.0 if rank else -1.0)}

    def loss_fn(out, mb):
        loss = token_mean(-out.logprobs, mb.mask, mb.total_tokens)
        return loss, {"response/max": mb.mask.sum(1).max(), f"of_rank_{rank}": 1 / mb.total_sequences}

    engine = SimpleNamespace(global_sum=all_reduce, data_parallel_group=None)
    return global_loss(engine, loss_fn, out, batch)


CASES = [reduced, contents, heldout_loss]


def on_rank(out):
    init_distributed("cpu")
    results = {case.__name__: case() for case in CASES}
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    fork_ranks(on_rank, 2, sys.argv[1])
