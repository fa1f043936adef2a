"""Rewards that are computed while other answers are being generated."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from rlkit.data import prompt_sample
from rlkit.rewards import Judge, combine, multiple_choice, score_as_written, score_parts
from rlkit.rewards.async_scoring import covered


def fails(text, row):
    raise RuntimeError("down")


class Sampler:
    """A server that takes the seconds in a prompt's row for its answers, and keeps when each was finished."""

    def __init__(self):
        self.pool, self.written, self.futures = ThreadPoolExecutor(4), {}, []

    def submit(self, prompts, sampling, n):
        self.futures.append(self.pool.submit(self.write, prompts, n))
        return self.futures[-1]

    def write(self, prompts, n):
        found = []
        for one in prompts:
            time.sleep(one.row["seconds"])
            found += [replace(one, text=f"{one.group_id}.{i}", number=i) for i in range(n)]
        self.written |= {one.group_id: time.perf_counter() for one in prompts}
        return found


def asked_for(*seconds):
    return [prompt_sample([1], group_id=i, row={"seconds": s}) for i, s in enumerate(seconds)]


def assert_work_without_wait(seconds, intervals):
    """`seconds` counts overlapping work once, and at most half of the idle time."""
    work = covered(*zip(*intervals, strict=True))
    idle = max(end for _, end in intervals) - min(start for start, _ in intervals) - work
    assert work <= seconds < work + idle / 2


def test_answers_are_judged_while_others_are_generated():
    sampler, judged = Sampler(), {}

    def slow(text, row):
        began = time.perf_counter()
        time.sleep(0.1)
        judged.setdefault(int(text[0]), []).append((began, time.perf_counter()))
        return float(text)

    submit = score_as_written(sampler.submit, slow, threads=2)
    samples, rewards, parts, seconds = submit(asked_for(0.6, 0.0, 0.05), None, n=2).result(10)
    assert [sample.text for sample in samples] == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"] and parts == {}
    torch.testing.assert_close(rewards, torch.tensor([0.0, 0.1, 1.0, 1.1, 2.0, 2.1]))
    assert_work_without_wait(seconds, [times for group in judged.values() for times in group])
    for early in (1, 2):  # all of their rewards were there before prompt 0 was written
        assert all(end < sampler.written[0] for _, end in judged[early])
    assert judged[1][0][0] < judged[2][0][0] < judged[1][1][1]  # and two prompts were judged at once


def test_judging_in_the_background_gives_what_score_parts_gives():
    reward = combine({"one": (1.0, lambda text, row: float(text)), "nan": (0.0, fails)})
    submit = score_as_written(Sampler().submit, reward)
    samples, rewards, parts, _ = submit(asked_for(0.02, 0.0), None, n=2).result(10)
    expected, expected_parts = score_parts(reward, samples)
    assert torch.equal(rewards, expected) and parts.keys() == expected_parts.keys() == {"one", "nan"}
    assert all(torch.equal(parts[name].nan_to_num(-1), expected_parts[name].nan_to_num(-1)) for name in parts)
    assert submit([], None, n=2).result(10)[0] == []


def test_a_sampler_that_fails_or_is_cancelled():
    def fails_at_1(prompts, sampling, n):
        return sampler.submit(prompts, sampling, n) if prompts[0].group_id != 1 else sampler.pool.submit(fails, "", {})

    sampler = Sampler()
    with pytest.raises(RuntimeError, match="down"):
        score_as_written(fails_at_1, multiple_choice)(asked_for(0.0, 0.0), None, n=1).result(10)
    sampler = Sampler()
    future = score_as_written(sampler.submit, multiple_choice)(asked_for(*[0.1] * 8), None, n=1)
    while len(sampler.futures) < 8:
        time.sleep(0.01)
    time.sleep(0.02)
    assert future.cancel()
    time.sleep(0.3)
    assert sum(one.cancelled() for one in sampler.futures) == 4  # those that had not begun


def write(judge, prompts, n=2):
    """A sampler that finishes the answers to the last prompt first."""
    groups = [[replace(one, text=f"{one.group_id}.{i}", number=i) for i in range(n)] for one in prompts]
    for i in reversed(range(len(groups))):
        time.sleep(prompts[i].row["seconds"])
        judge.submit(i, groups[i])
    return [sample for group in groups for sample in group]


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_a_judge_gives_what_score_parts_gives_in_the_order_of_the_prompts(threads):
    reward = combine({"one": (1.0, lambda text, row: float(text)), "nan": (0.0, fails)})
    judge = Judge(reward, threads=threads)
    for prompts in (asked_for(0.0, 0.01, 0.0), asked_for(0.0), []):  # one after the other, nothing stays
        samples = write(judge, prompts)
        rewards, parts, seconds = judge.result()
        expected, expected_parts = score_parts(reward, samples)
        assert torch.equal(rewards, expected) and parts.keys() == expected_parts.keys()
        assert all(torch.equal(parts[name].nan_to_num(-1), expected_parts[name].nan_to_num(-1)) for name in parts)
        assert (seconds > 0) == bool(samples)


def test_a_judge_works_during_generation():
    times = {}

    def slow(text, row):
        began = time.perf_counter()
        time.sleep(0.05)
        times[text] = (began, time.perf_counter(), threading.current_thread() is threading.main_thread())
        return 1.0

    judge = Judge(slow, threads=2)
    write(judge, asked_for(0.3, 0.0, 0.0))
    written = time.perf_counter()
    _, _, seconds = judge.result()
    early = [times[text] for text in ("1.0", "1.1", "2.0", "2.1")]
    assert all(end < written for _, end, _ in early) and not any(main for _, _, main in early)
    assert times["1.0"][0] < times["2.1"][1] and times["2.0"][0] < times["1.1"][1]  # two prompts at once
    assert_work_without_wait(seconds, [(start, end) for start, end, _ in times.values()])


def test_without_threads_rewards_are_computed_in_the_main_thread():
    def here(text, row):
        return float(threading.current_thread() is threading.main_thread())

    for threads in (0, 1):
        judge = Judge(here, threads=threads)
        write(judge, asked_for(0.0, 0.0))
        assert judge.result()[0].tolist() == [float(threads == 0)] * 4
    with pytest.raises(ValueError, match="reward_threads: expected at least 0, got -1"):
        Judge(here, threads=-1)


def test_covered():
    assert covered([], []) == 0 and covered([1.0, 5.0, 2.0], [3.0, 6.0, 2.5]) == 3
    assert covered([0.0, 1.0, 2.5], [2.0, 3.0, 2.75]) == 3


def test_reasons_of_the_last_result():
    judge = Judge(lambda text, row: row["missing"], threads=2)
    for i in range(3):
        judge.submit(i, [prompt_sample([1])])
    assert judge.result()[0].isnan().all()
    assert judge.reasons.startswith("3 x KeyError: 'missing' (test_async_scoring.py, line ")
    assert len(judge.result()[0]) == 0 and judge.reasons == ""
