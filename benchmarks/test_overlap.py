"""Sampling ahead of training against taking turns, on a server whose time is latency.

    OMP_NUM_THREADS=1 pytest benchmarks/test_overlap.py --benchmark-enable

Two cores that sample and train cannot show what is gained when each has its own machine, so the stand-in server of the
tests writes a token every so many milliseconds and needs no core meanwhile, and training is a wait as long as a batch
takes to write. Requests, weights (over gloo), bookkeeping and their threads are the real ones. What could be gained is
2 * steps / (steps + 1), the first batch being waited for.
"""

import sys
import time
from collections import deque
from pathlib import Path

import pytest
import torch

from rlkit.data import load_task
from rlkit.data.samples import prompt_sample
from rlkit.rollout import Sampling, make_rollout
from rlkit.rollout.vllm_requests import request_seed
from rlkit.vlm import build_tiny, load_processor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rollout"))
from standin import VllmStandin, written

STEPS, TOKENS, LATENCY, GROUP = 10, 16, 0.02, 4
WEIGHTS = [(f"w{i}", torch.ones(256, 256)) for i in range(4)]


@pytest.fixture(scope="module")
def rollout(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("model") / "tiny")
    build_tiny(path, load_task("digits").train, warm_up_steps=0)
    with VllmStandin(latency=LATENCY) as server:
        rollout = make_rollout("vllm_server", model=path, processor=load_processor(path), urls=[server.url])
        rollout.update_weights(iter(WEIGHTS))  # the process group is made
        yield rollout
        rollout.close()


def train_steps(rollout, max_staleness):
    """What a recipe does, and what came of it: for each step the responses and how old they were."""
    prompts = [[prompt_sample([20 + step, i], group_id=2 * step + i) for i in range(2)] for step in range(STEPS)]
    requests = [(two, Sampling(TOKENS, seed=(step,))) for step, two in enumerate(prompts)]
    ahead, came = max_staleness + 1, []
    requested = deque(rollout.submit(*one, GROUP) for one in requests[:ahead])
    for step in range(STEPS):
        samples = requested.popleft().result()
        came.append(([s.response_ids for s in samples], max(rollout.version - s.version for s in samples)))
        time.sleep(TOKENS * LATENCY)
        rollout.update_weights(iter(WEIGHTS))
        requested.extend(rollout.submit(*one, GROUP) for one in requests[step + ahead :][:1])
    seeds = [[request_seed(how.seed, one) + i for one in two for i in range(GROUP)] for two, how in requests]
    expected = [[written(seed, TOKENS) for seed in batch] for batch in seeds]
    assert [responses for responses, _ in came] == expected  # nothing lost, nothing twice, in order
    assert [age for _, age in came] == [min(step, max_staleness) for step in range(STEPS)]


@pytest.mark.parametrize("way", ["in turn", "ahead"])
def test_overlap(benchmark, rollout, way):
    benchmark.group = f"{STEPS} steps of {TOKENS * LATENCY:g} s of sampling and as much of training"
    benchmark.pedantic(train_steps, (rollout, int(way == "ahead")), rounds=3)


def test_at_least_half_as_fast_again(rollout):
    """The target itself, so that it fails where it is missed."""
    seconds = []
    for bound in (0, 1):
        began = time.perf_counter()
        train_steps(rollout, bound)
        seconds.append(time.perf_counter() - began)
    print(f"in turn {seconds[0]:.2f} s, ahead {seconds[1]:.2f} s: {seconds[0] / seconds[1]:.2f}x")
    assert seconds[0] >= 1.5 * seconds[1]
