"""Batches that are submitted ahead of training, on stand-ins: what overlaps, how old tokens get, and how it ends."""

import sys
from collections import defaultdict, deque
from pathlib import Path

import pytest
import torch
from waiting import until

from rlkit.data.samples import prompt_sample
from rlkit.rollout import Sampling, make_rollout
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


def train(rollout, count, bound, tokens=6, n=1):
    """The loop of a recipe: (step, samples, requested batches) of each step; weights are sent after it."""
    requests = [(*batch, n) for batch in batches(count, tokens)]
    requested = deque(rollout.submit(*one) for one in requests[: bound + 1])
    for step in range(count):
        yield step, requested.popleft().result(60), requested
        rollout.update_weights(iter(WEIGHTS))
        requested.extend(rollout.submit(*one) for one in requests[step + bound + 1 :][:1])


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_staleness_is_bounded_and_reached(make, bound):
    """Batches are in order, and their oldest token is as old as allowed."""
    rollout, server = make()
    seen = []
    for step, samples, requested in train(rollout, 6, bound, n=3):
        assert [s.token_ids[0] for s in samples] == [20 + step] * 6 and rollout.version == step
        assert all(step - bound <= v <= step for s in samples for v in s.versions)
        seen.append(max(rollout.version - sample.version for sample in samples))
        for responses in requested:  # training that takes longer than sampling
            responses.result(60)
    assert seen == [min(step, bound) for step in range(6)]
    assert rollout.version == 6 and len(server.answered) == 36


def test_sampling_and_training_overlap(make):
    """With a staleness of 1 the next batch is generated during training; with 0 never."""
    for bound in (0, 1):
        rollout, server = make()
        trained, during = 0, []
        # until the step before is trained
        server.holds = lambda body, tokens: tokens > 0 and step_of(body) > trained  # noqa: B023
        for step, _, _ in train(rollout, 5, bound):
            if bound and step < 4:
                until(lambda: server.now == 2)  # noqa: B023
            during.append(server.now)
            trained = step + 1
        assert during == [2 * bound] * 4 + [0]


def test_unfinished_responses_continue_under_new_weights(make):
    """Long responses during short steps have tokens of several versions, all recorded."""
    rollout, server = make()
    begun = defaultdict(set)  # step -> prompts with a first token

    def holds(body, tokens):
        begun[step_of(body)] |= {body["token_ids"][1]} if tokens else set()
        return tokens >= 6 and rollout.version < step_of(body)  # the rest is written under the weights of its step

    server.holds, mixed = holds, []
    for step, samples, requested in train(rollout, 6, bound=2, tokens=12):
        for sample in samples:
            assert sample.versions == sorted(sample.versions) and sample.version == sample.versions[0]
            assert len(sample.versions) == 12 and step - 2 <= sample.version and sample.versions[-1] <= step
            mixed += [step] if len(set(sample.versions)) > 1 else []
        until(lambda: all(len(begun[step + 1 + i]) == 2 for i in range(len(requested))))  # noqa: B023
    assert mixed == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_a_cancelled_batch_is_cancelled_on_the_server(make):
    """What a recipe does when it ends early: no request runs on, and those that wait are not sent."""
    rollout, server = make()
    server.holds = lambda *_: True
    requested = [rollout.submit(*batch) for batch in batches(4, tokens=400)]
    until(lambda: server.now)
    for future in requested:
        future.cancel()
    until(lambda: server.now == 0, 50)  # before they time out
    assert len(server.bodies) <= 8


def test_failures_are_raised_in_the_training_loop(make):
    rollout, server = make()
    server.faults[:] = ["", ""] + ["500"] * 9
    rollout.pool.backoff = 0.001
    with pytest.raises(RuntimeError, match="expected a response within 4 attempts"):
        for step, _, _ in train(rollout, 4, bound=0):
            assert step == 0
