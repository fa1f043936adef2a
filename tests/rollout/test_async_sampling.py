"""Asynchronous sampling, on stand-ins: what overlaps, how old tokens get, and how it ends."""

import sys
from collections import defaultdict
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from waiting import until

from rlkit.data.samples import prompt_sample
from rlkit.rewards import score_as_written
from rlkit.rollout import Sampling, make_rollout
from rlkit.rollout.async_sampling import AsyncSampler
from rlkit.vlm import load_processor

sys.path.insert(0, str(Path(__file__).parent))
from standin import VllmStandin

WEIGHTS = [("w", torch.ones(3))]


@pytest.fixture(scope="module")
def processor(tiny_dir):
    return load_processor(tiny_dir)


@pytest.fixture
def make(tiny_dir, processor):
    """A rollout on one stand-in."""
    made = []

    def make():
        server = VllmStandin().__enter__()
        rollout = make_rollout("vllm_server", model=tiny_dir, processor=processor, urls=[server.url], timeout=60.0)
        made.append((rollout, server))
        return rollout, server

    yield make
    for rollout, server in made:
        rollout.close()
        server.__exit__()


def batches(count, tokens=6):
    """Two prompts per step; their first token is the step."""
    for step in range(count):
        yield [prompt_sample([20 + step, i], group_id=2 * step + i) for i in range(2)], Sampling(tokens, seed=(step,))


def step_of(body):
    """The step of a request of `batches`."""
    return body["token_ids"][0] - 20


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_staleness_is_bounded_and_reached(make, bound):
    """Batches are in order, their oldest token is as old as allowed, and no more requests run than needed."""
    rollout, server = make()
    sampler, seen = AsyncSampler(rollout, batches(6), n=3, max_staleness=bound), []
    for step, samples in enumerate(sampler):
        assert [s.token_ids[0] for s in samples] == [20 + step] * 6
        assert rollout.version == step and len(sampler.in_flight) <= bound
        assert all(step - bound <= v <= step for s in samples for v in s.versions)
        seen.append(max(rollout.version - sample.version for sample in samples))
        for answers in sampler.in_flight:  # training that takes longer than sampling
            answers.result(60)
        sampler.update_weights(iter(WEIGHTS))
    assert seen == [min(step, bound) for step in range(6)]
    assert rollout.version == 6 and not sampler.in_flight and len(server.answered) == 36


def test_sampling_and_training_overlap(make):
    """With a staleness of 1 the next batch is generated during training; with 0 never."""
    for bound in (0, 1):
        rollout, server = make()
        trained, during = 0, []
        # until the step before is trained
        server.holds = lambda body, tokens: tokens > 0 and step_of(body) > trained  # noqa: B023
        sampler = AsyncSampler(rollout, batches(5), max_staleness=bound)
        for step, _ in enumerate(sampler):
            if bound and step < 4:
                until(lambda: server.now == 2)  # noqa: B023
            during.append(server.now)
            trained = step + 1
            sampler.update_weights(iter(WEIGHTS))
        assert during == [2 * bound] * 4 + [0]


def test_unfinished_answers_continue_under_new_weights(make):
    """Long answers during short steps have tokens of several versions, all recorded."""
    rollout, server = make()
    begun = defaultdict(set)  # step -> prompts with a first token

    def holds(body, tokens):
        begun[step_of(body)] |= {body["token_ids"][1]} if tokens else set()
        return tokens >= 6 and rollout.version < step_of(body)  # the rest is written under the weights of its step

    server.holds = holds
    sampler, mixed = AsyncSampler(rollout, batches(6, tokens=12), max_staleness=2), []
    for step, samples in enumerate(sampler):
        for sample in samples:
            assert sample.versions == sorted(sample.versions) and sample.version == sample.versions[0]
            assert len(sample.versions) == 12 and step - 2 <= sample.version and sample.versions[-1] <= step
            mixed += [step] if len(set(sample.versions)) > 1 else []
        until(lambda: all(len(begun[later]) == 2 for later in range(step + 1, sampler.submitted)))  # noqa: B023
        sampler.update_weights(iter(WEIGHTS))
    assert mixed == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_leaving_early_cancels_requests(make):
    """Leaving the loop cancels running requests, also on the server, and sends no more."""
    rollout, server = make()
    server.holds = lambda *_: True
    sampler = AsyncSampler(rollout, batches(50, tokens=400), max_staleness=3)
    sampler._submit_next()
    until(lambda: server.now)
    sampler.close()
    until(lambda: server.now == 0, 50)  # before they time out
    assert not sampler.in_flight
    sampler.update_weights(iter(WEIGHTS))
    assert list(sampler) == [] and len(server.bodies) <= 8


def test_failures_are_raised_in_the_training_loop(make):
    rollout, server = make()
    server.faults[:] = ["", ""] + ["500"] * 9
    rollout.pool.backoff = 0.001
    sampler = AsyncSampler(rollout, batches(4), max_staleness=0)
    with pytest.raises(RuntimeError, match="expected a response within 4 attempts"):
        for _ in sampler:
            sampler.update_weights(iter(WEIGHTS))
    assert sampler.submitted == 2
    server.faults.clear()
    with pytest.raises(RuntimeError, match="expected update_weights after each batch, got 0 updates after 2 batches"):
        for _ in AsyncSampler(rollout, batches(4), max_staleness=1):
            pass
    with pytest.raises(ValueError, match="max_staleness: expected at least 0, got -1"):
        AsyncSampler(rollout, batches(1), max_staleness=-1)
    with pytest.raises(
        ValueError, match="rollout: expected one on servers, got object, which cannot sample during training"
    ):
        AsyncSampler(object(), batches(1))


def test_submit_can_add_rewards_to_the_samples(make):
    """Weights still go to the rollout."""
    rollout, _ = make()
    submit = score_as_written(rollout.submit, lambda text, row: 0.5)
    sampler = AsyncSampler(rollout, batches(2), max_staleness=0, submit=submit)
    for samples, rewards, _, _ in sampler:
        assert len(samples) == 2 and rewards.tolist() == [0.5, 0.5]
        sampler.update_weights(iter(WEIGHTS))
    assert rollout.version == 2


def test_a_batch_that_takes_too_long_is_named_and_cancelled():
    future = Future()
    rollout = SimpleNamespace(submit=lambda requests, sampling, n: future)
    with pytest.raises(TimeoutError, match=r"^AsyncSampler: expected a batch within 0.05 s, got none$"):
        next(iter(AsyncSampler(rollout, batches(1), timeout=0.05)))
    assert future.cancelled()
