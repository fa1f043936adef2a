"""Rewards that are computed while other responses are being generated."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from waiting import until

from rlkit.data import prompt_sample
from rlkit.rewards import RewardScorer, async_scoring, combine, multiple_choice, score_as_written, score_parts
from rlkit.rewards.async_scoring import covered

DEADLINE = 100.0


def fails(text, row):
    raise RuntimeError("down")


class Sampler:
    """A server that writes the responses of a prompt when the event in its row is set."""

    def __init__(self):
        self.pool, self.begun, self.futures = ThreadPoolExecutor(4), [], []

    def submit(self, prompts, sampling, n):
        self.futures.append(self.pool.submit(self.write, prompts, n))
        return self.futures[-1]

    def write(self, prompts, n):
        found = []
        for one in prompts:
            self.begun.append(one.group_id)
            wait_for(one.row["event"])
            found += [replace(one, text=f"{one.group_id}.{i}", number=i) for i in range(n)]
        return found


def wait_for(event):
    assert event is None or event.wait(DEADLINE)


def asked_for(*events):
    return [prompt_sample([1], group_id=i, row={"event": event}) for i, event in enumerate(events)]


class SlowReward:
    """Rewards on a clock of their own. Prompts 1 and 2 are scored together, in two seconds; two responses meet each
    time. Prompt 0 is to be written after that; at 10 its judgement begins, and takes two seconds, too."""

    def __init__(self, monkeypatch):
        self.now, self.reads, self.early_ones_are_scored = 0.0, 0, threading.Event()
        self.meeting, self.main, self.lock = threading.Barrier(2, self.tick, DEADLINE), [], threading.Lock()
        monkeypatch.setattr(async_scoring, "time", SimpleNamespace(time=self.clock))

    def clock(self):
        with self.lock:
            self.reads += 1
            found = self.now
            if self.reads == 4:  # two beginnings and two ends
                self.now = 10.0
                self.early_ones_are_scored.set()
            return found

    def tick(self):
        self.now += 1.0

    def __call__(self, text, row):
        self.main.append(threading.current_thread() is threading.main_thread())
        if text.startswith("0"):
            self.tick()
        else:
            self.meeting.wait()
        return float(text)


def test_responses_are_scored_while_others_are_generated(monkeypatch):
    sampler, slow = Sampler(), SlowReward(monkeypatch)
    submit = score_as_written(sampler.submit, slow, threads=2)
    prompts = asked_for(slow.early_ones_are_scored, None, None)
    samples, rewards, parts, seconds = submit(prompts, None, n=2).result(DEADLINE)
    assert [sample.text for sample in samples] == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"] and parts == {}
    torch.testing.assert_close(rewards, torch.tensor([0.0, 0.1, 1.0, 1.1, 2.0, 2.1]))
    assert seconds == 4.0 and not any(slow.main)  # work of two threads counts once, and the time between not at all


def test_scoring_in_the_background_gives_what_score_parts_gives():
    reward = combine({"one": (1.0, lambda text, row: float(text)), "nan": (0.0, fails)})
    submit = score_as_written(Sampler().submit, reward)
    samples, rewards, parts, _ = submit(asked_for(None, None), None, n=2).result(DEADLINE)
    expected, expected_parts = score_parts(reward, samples)
    assert torch.equal(rewards, expected) and parts.keys() == expected_parts.keys() == {"one", "nan"}
    assert all(torch.equal(parts[name].nan_to_num(-1), expected_parts[name].nan_to_num(-1)) for name in parts)
    assert submit([], None, n=2).result(DEADLINE)[0] == []


def test_a_sampler_that_fails_or_is_cancelled():
    def fails_at_1(prompts, sampling, n):
        return sampler.submit(prompts, sampling, n) if prompts[0].group_id != 1 else sampler.pool.submit(fails, "", {})

    sampler = Sampler()
    with pytest.raises(RuntimeError, match="down"):
        score_as_written(fails_at_1, multiple_choice)(asked_for(None, None), None, n=1).result(DEADLINE)
    sampler, go_on = Sampler(), threading.Event()
    future = score_as_written(sampler.submit, multiple_choice)(asked_for(*[go_on] * 8), None, n=1)
    until(lambda: len(sampler.begun) == 4)
    assert future.cancel()
    until(lambda: sum(one.cancelled() for one in sampler.futures) == 4)  # those that had not begun
    go_on.set()
    sampler.pool.shutdown()
    assert len(sampler.begun) == 4


def test_rewards_beside_training_need_a_thread():
    with pytest.raises(
        ValueError, match="reward_threads: expected at least 1 where the caller trains meanwhile, got 0"
    ):
        score_as_written(Sampler().submit, multiple_choice, threads=0)


def write(scorer, prompts, n=2):
    """A sampler that finishes the responses to the last prompt first."""
    groups = [[replace(one, text=f"{one.group_id}.{i}", number=i) for i in range(n)] for one in prompts]
    for i in reversed(range(len(groups))):
        wait_for(prompts[i].row["event"])
        scorer.submit(i, groups[i])
    return [sample for group in groups for sample in group]


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_a_scorer_gives_what_score_parts_gives_in_the_order_of_the_prompts(threads):
    reward = combine({"one": (1.0, lambda text, row: float(text)), "nan": (0.0, fails)})
    scorer = RewardScorer(reward, threads=threads)
    for prompts in (asked_for(None, None, None), asked_for(None), []):  # one after the other, nothing stays
        samples = write(scorer, prompts)
        rewards, parts, seconds = scorer.result()
        expected, expected_parts = score_parts(reward, samples)
        assert torch.equal(rewards, expected) and parts.keys() == expected_parts.keys()
        assert all(torch.equal(parts[name].nan_to_num(-1), expected_parts[name].nan_to_num(-1)) for name in parts)
        assert (seconds > 0) == bool(samples)


def test_a_scorer_works_during_generation(monkeypatch):
    slow = SlowReward(monkeypatch)
    scorer = RewardScorer(slow, threads=2)
    write(scorer, asked_for(slow.early_ones_are_scored, None, None))
    rewards, _, seconds = scorer.result()
    torch.testing.assert_close(rewards, torch.tensor([0.0, 0.1, 1.0, 1.1, 2.0, 2.1]))
    assert seconds == 4.0 and not any(slow.main)


def test_without_threads_rewards_are_computed_in_the_main_thread():
    def here(text, row):
        return float(threading.current_thread() is threading.main_thread())

    for threads in (0, 1):
        scorer = RewardScorer(here, threads=threads)
        write(scorer, asked_for(None, None))
        assert scorer.result()[0].tolist() == [float(threads == 0)] * 4
    with pytest.raises(ValueError, match="reward_threads: expected at least 0, got -1"):
        RewardScorer(here, threads=-1)


def test_covered():
    assert covered([], []) == 0 and covered([1.0, 5.0, 2.0], [3.0, 6.0, 2.5]) == 3
    assert covered([0.0, 1.0, 2.5], [2.0, 3.0, 2.75]) == 3


def test_reasons_of_the_last_result():
    scorer = RewardScorer(lambda text, row: row["missing"], threads=2)
    for i in range(3):
        scorer.submit(i, [prompt_sample([1])])
    assert scorer.result()[0].isnan().all()
    assert scorer.reasons.startswith("3 x KeyError: 'missing' (test_async_scoring.py, line ")
    assert len(scorer.result()[0]) == 0 and scorer.reasons == ""
