"""Run by `test_shared_rows.py`: two ranks with the same rows play episodes whose tool and reward differ between calls.

on_shared_rows.py MODEL
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from forked_ranks import fork_ranks  # noqa: E402

from rlkit.rewards import RewardScorer  # noqa: E402
from rlkit.rollout import Observation, Sampling, run_episodes  # noqa: E402
from rlkit.rollout.agent import ScriptedRollout  # noqa: E402
from rlkit.rollout.shared_rows import SharedRowsRollout  # noqa: E402
from rlkit.vlm import encode_prompt, load_processor  # noqa: E402


class Broken(Exception):
    """An error that cannot be sent to another process."""

    def __init__(self, what, more):
        super().__init__(f"{what} on {more}")


class Sampler(ScriptedRollout):
    def generate(self, requests, sampling, n=1, *, on_finished=None):
        return super().generate(requests, sampling, n)


def on_rank(model):
    dist.init_process_group("gloo")
    rank, processor, calls = dist.get_rank(), load_processor(model), {"tool": 0, "reward": 0}

    def tool(sample):
        calls["tool"] += 1
        if sample.row["state"]:
            return None
        sample.row["state"]["rank"] = rank
        if sample.group_id == 2:
            raise Broken("no result", f"rank {rank}")
        return Observation(f"from rank {rank}")

    def reward(text, row):
        calls["reward"] += 1
        return None if row["answer"] == "1" else float(row["state"]["rank"])

    scorer = RewardScorer(reward, threads=2, group=dist.group.WORLD)
    rollout = SharedRowsRollout(Sampler(processor, lambda sample: "go"), dist.group.WORLD, collective=False)
    requests = [encode_prompt(processor, {"question": "q", "answer": str(i)}, group_id=i) for i in range(4)]
    episodes = run_episodes(
        rollout,
        requests,
        Sampling(8),
        tool,
        processor=processor,
        n=2,
        on_failure=lambda error: Observation(str(error)),
        on_finished=scorer.submit,
    )
    rewards, _, _ = scorer.result()
    ranks = [None, None]
    tokens = [sample.token_ids for sample in episodes]
    observations = [sample.row["messages"][2]["content"] for sample in episodes]
    dist.all_gather_object(ranks, [tokens, observations, rewards.nan_to_num(-1).tolist(), scorer.reasons, calls])
    if rank == 0:
        print(json.dumps(ranks))
    dist.destroy_process_group()


if __name__ == "__main__":
    (model,) = sys.argv[1:]
    load_processor(model)  # imports what the ranks need
    torch.set_num_threads(1)
    fork_ranks(on_rank, 2, model)
