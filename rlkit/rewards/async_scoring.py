"""Rewards that are worked out while other answers are still being written.

    judge = Judge(task.reward, threads=8)                              # once
    answers = rollout.generate(prompts, sampling, n, on_finished=judge.submit)
    rewards, parts, seconds = judge.result()                           # waits for those that are not there yet

`score_as_written` is for samplers on servers that write while the caller trains.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from rlkit.data.samples import Reward, Sample
from rlkit.data.user_code import Failures
from rlkit.rewards.scoring import score_parts

Judged = tuple[Tensor, dict[str, Tensor], float, float]  # of one prompt: rewards, parts, from when, until when


class Judge:
    """Judges the answers to each prompt as soon as they are written, in threads of its own.

    A slow reward (a judge on a server, a program that runs) is then under way while the sampler writes the rest: a step
    waits for the last prompts' rewards alone. What it gives is what `score_parts` gives.

    Args:
        reward: is called in several threads at once, none of them the main one: it cannot use `signal.alarm`.
        threads: prompts whose answers are judged at once. 0: in the caller's thread, in `result`, when all are written;
            for a reward that uses signals or bears no second thread.

    Attributes:
        reasons: why answers of the last `result` could not be judged, and how many for each reason.

    Raises:
        ValueError: fewer than 0 threads.
    """

    def __init__(self, reward: Reward, *, threads: int = 8) -> None:
        if threads < 0:
            raise ValueError(f"reward_threads: expected at least 0, got {threads}")
        self.reward, self.failures, self.reasons = reward, Failures("reward"), ""
        self.pool = ThreadPoolExecutor(threads, "reward") if threads else None
        self.under_way: dict[int, Future[Judged] | Sequence[Sample]] = {}

    def submit(self, i: int, samples: Sequence[Sample]) -> None:
        """The answers to prompt i are written; from any thread, in any order, each prompt once."""
        self.under_way[i] = self.pool.submit(_judge, self.reward, samples, self.failures) if self.pool else samples

    def result(self) -> tuple[Tensor, dict[str, Tensor], float]:
        """Of all that was submitted since the last call, in the order of the prompts; waits until it is judged.

        Returns:
            rewards [B], parts as in `score_parts`, and for how many seconds at least one answer was being judged,
            whether somebody waited for it or not: a run logs it as `time/judging`, beside `time/reward`, the wait.
        """
        taken, self.under_way = [self.under_way[i] for i in sorted(self.under_way)], {}
        judged = (one.result() if isinstance(one, Future) else _judge(self.reward, one, self.failures) for one in taken)
        found = list(judged)
        self.failures.log_repeated()
        self.reasons = self.failures.take()
        return _together(self.reward, found)


def score_as_written(
    submit: Callable[..., Future[list[Sample]]], reward: Reward, *, threads: int = 8, failures: Failures | None = None
) -> Callable:
    """A sampler's `submit` that has its samples judged: a prompt's are as soon as they are written, while others are
    still being written and while the caller trains.

        submit = score_as_written(rollout.submit, task.reward)
        samples, rewards, parts, seconds = submit(prompts, sampling, n).result()     # as of `Judge.result`, in order

    Args:
        submit: (prompts, sampling, n) -> future of n samples a prompt, as a rollout on servers has it.
        reward: is called in threads of its own, where a reward cannot use `signal.alarm`.
        threads: prompts whose samples are judged at once.
        failures: as in `score`.

    Returns:
        The new submit. Its future fails as the sampler does, and calls off what is being written when it is cancelled.
    """
    counted = Failures("reward") if failures is None else failures
    pool, loop = ThreadPoolExecutor(threads, "reward"), asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True, name="rewards").start()

    async def judge(written: Future[list[Sample]]) -> tuple[list[Sample], Judged]:
        samples = await asyncio.wrap_future(written)
        return samples, await loop.run_in_executor(pool, _judge, reward, samples, counted)

    async def judge_all(under_way: list[Future[list[Sample]]]) -> tuple[list[Sample], Tensor, dict[str, Tensor], float]:
        try:
            found = await asyncio.gather(*map(judge, under_way))
        finally:
            for written in under_way:
                written.cancel()  # does nothing to what is done
            counted.log_repeated()
        return [sample for group, _ in found for sample in group], *_together(reward, [one for _, one in found])

    def submit_judged(prompts: Sequence[Sample], sampling: Any, n: int = 1) -> Future:
        return asyncio.run_coroutine_threadsafe(judge_all([submit([p], sampling, n) for p in prompts]), loop)

    return submit_judged


def _judge(reward: Reward, samples: Sequence[Sample], failures: Failures) -> Judged:
    start = time.perf_counter()
    return *score_parts(reward, samples, failures=failures), start, time.perf_counter()


def _together(reward: Reward, found: Sequence[Judged]) -> tuple[Tensor, dict[str, Tensor], float]:
    if not found:
        return *score_parts(reward, []), 0.0
    rewards, parts, starts, ends = zip(*found, strict=True)
    together = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return torch.cat(rewards), together, covered(starts, ends)


def covered(starts: Sequence[float], ends: Sequence[float]) -> float:
    """The length of the union of intervals: overlapping ones count once."""
    total, until = 0.0, -float("inf")
    for start, end in sorted(zip(starts, ends, strict=True)):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
