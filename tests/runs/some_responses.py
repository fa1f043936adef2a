"""Responses to a few prompts, shared among ranks, and what plain loops find of them."""

import math
from dataclasses import replace
from statistics import fmean, pstdev, stdev
from types import SimpleNamespace

import torch

from rlkit.data import append_response, prompt_sample
from rlkit.engines.distributed import all_reduce
from rlkit.runs import PolicySampler, Responses
from rlkit.runs.responses import accuracy, too_few_scored

# of each prompt its responses: (reward, a part of it, tokens, finish reason); None: not scored
PROMPTS = [
    [(1.0, 0.5, 3, "stop"), (0.0, 0.25, 5, "length"), (None, 0.5, 1, "stop")],
    [(0.25, None, 5, "length"), (0.25, 1.0, 2, "stop")],
    [(None, None, 4, "stop"), (None, 0.0, 6, "length")],
    [(0.5, 0.75, 2, "stop")],
]
SKIPPED = ["row 8: too long", "row 9: no image", "row 10: too long"]
EVERY = [response for group in PROMPTS for response in group]


def of_a_rank(rank, world):
    """Each rank has every world-th prompt and skipped row; the last of three ranks or more may have none."""
    samples, rewards, parts = [], [], []
    for i in range(rank, len(PROMPTS), world):
        for reward, part, tokens, finish in PROMPTS[i]:
            prompt = replace(prompt_sample([1, 2]), group_id=i)
            samples.append(replace(append_response(prompt, [5] * tokens, [0.0] * tokens), finish_reason=finish))
            rewards.append(math.nan if reward is None else reward)
            parts.append(math.nan if part is None else part)
    return Responses(samples, torch.tensor(rewards), {"form": torch.tensor(parts)}, SKIPPED[rank::world])


def measure(responses, global_sum=all_reduce, *, config=None, run=None):
    """What a recipe asks about its responses; JSON can hold it."""
    cfg = config or SimpleNamespace(reward_threads=0, max_new_tokens=6, group_size=3)
    engine = SimpleNamespace(global_sum=global_sum, data_parallel_group=None)
    run, rollout = run or SimpleNamespace(print=print, is_main_process=False), SimpleNamespace(generate=None)
    sampler = PolicySampler(cfg, run, SimpleNamespace(reward=None), None, engine, rollout)
    return {
        "metrics": sampler.metrics(responses),
        "accuracy": accuracy(responses, global_sum),
        "stops": [bool(too_few_scored(responses, global_sum, share)) for share in (0.1, 0.3, 0.4, 1.0)],
    }


def expected():
    """The same by loops over all responses."""
    rewards = [reward for reward, *_ in EVERY if reward is not None]
    scored = [[reward for reward, *_ in group if reward is not None] for group in PROMPTS]
    scored = [group for group in scored if group]
    lengths = [tokens for *_, tokens, _ in EVERY]
    unscored = len(EVERY) - len(rewards)
    metrics = {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/best": fmean(map(max, scored)),
        "reward/worst": fmean(map(min, scored)),
        "reward/equal": fmean(max(group) == min(group) for group in scored),
        "reward_part/form": fmean(part for _, part, *_ in EVERY if part is not None),
        "response_length/mean": fmean(lengths),
        "response_length/max": max(lengths),
        "response_length/truncated": fmean(finish == "length" for *_, finish in EVERY),
        "unscored": unscored,
        "skipped_rows": len(SKIPPED),
        "time/scoring": 0.0,
    }
    error = stdev(rewards) / len(rewards) ** 0.5
    return {
        "metrics": metrics,
        "accuracy": {
            "accuracy": fmean(rewards),
            "accuracy_error": error,
            "accuracy_rows": len(rewards),
            "unscored": unscored,
        },
        "stops": [share < unscored / len(EVERY) for share in (0.1, 0.3, 0.4, 1.0)],
    }
