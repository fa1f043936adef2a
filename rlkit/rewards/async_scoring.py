"""Rewards that are computed while other responses are still being generated.

    scorer = RewardScorer(task.reward, threads=8)                      # once
    responses = rollout.generate(prompts, sampling, n, on_finished=scorer.submit)
    rewards, parts, seconds = scorer.result()                          # waits for the rewards that are missing

`score_as_written` is for servers that generate while the caller trains.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlkit.data.samples import Reward, Sample
from rlkit.data.user_code import Failures
from rlkit.rewards.scoring import score_parts

Scored = tuple[Tensor, dict[str, Tensor], float, float]  # of one prompt: rewards, parts, from when, until when


class RewardScorer:
    """Computes the rewards of each prompt's responses as soon as they are finished, in threads.

    A slow reward (a judge on a server, a program that runs) overlaps with generation: a step waits for the rewards of
    the last prompts only. The rewards are those of `score_parts`.

    Args:
        reward: called from several threads at once, none of them the main thread, so it cannot use `signal.alarm`.
        threads: prompts whose responses are scored at the same time. 0: `result` scores all responses in the thread
            that calls it; for a reward that uses signals or is not thread-safe.
        group: ranks that are given the same samples. The responses to each prompt are scored on one of them, and
            `result` is that of all on each: a reward may differ from call to call, but ranks train on the same batch.

    Attributes:
        reasons: why responses of the last `result` have no reward, and how many for each reason.

    Raises:
        ValueError: fewer than 0 threads.
    """

    def __init__(self, reward: Reward, *, threads: int = 8, group: dist.ProcessGroup | None = None) -> None:
        if threads < 0:
            raise ValueError(f"reward_threads: expected at least 0, got {threads}")
        self.reward, self.failures, self.reasons, self.group = reward, Failures("reward"), "", group
        self.pool = ThreadPoolExecutor(threads, "reward") if threads else None
        self.under_way: dict[int, Future[Scored] | Sequence[Sample]] = {}

    def submit(self, i: int, samples: Sequence[Sample]) -> None:
        """Score the responses to prompt i. Called once for each prompt, in any order, from any thread."""
        if self.group is None or i % self.group.size() == self.group.rank():
            self.under_way[i] = self.pool.submit(_score, self.reward, samples, self.failures) if self.pool else samples

    def result(self) -> tuple[Tensor, dict[str, Tensor], float]:
        """Wait for the rewards of all responses submitted since the last call, in the order of the prompts.

        All ranks of a group call this together.

        Returns:
            rewards [B], parts as in `score_parts`, and the seconds during which at least one response was being scored.
            A run logs these as `time/scoring`; `time/reward` is the time that the run waited.
        """
        taken, self.under_way = sorted(self.under_way.items()), {}
        scored = {
            i: one.result() if isinstance(one, Future) else _score(self.reward, one, self.failures) for i, one in taken
        }
        self.failures.log_repeated()
        self.reasons = self.failures.take()
        if self.group is not None:
            scored, self.reasons = _gather_scored(scored, self.reasons, self.group)
        return _together(self.reward, [scored[i] for i in sorted(scored)])


def score_as_written(
    submit: Callable[..., Future[list[Sample]]], reward: Reward, *, threads: int = 8, failures: Failures | None = None
) -> Callable:
    """A rollout's `submit` whose result includes rewards; samples of a prompt are scored as soon as they are finished.

        submit = score_as_written(rollout.submit, task.reward)
        samples, rewards, parts, seconds = submit(prompts, sampling, n).result()    # in order, as `RewardScorer.result`

    Args:
        submit: (prompts, sampling, n) -> future of n samples per prompt; `submit` of a rollout on servers.
        reward: called from threads other than the main thread, so it cannot use `signal.alarm`.
        threads: prompts whose samples are scored at the same time, at least 1.
        failures: as in `score`.

    Returns:
        The new `submit`. Its future fails if generation fails. Cancelling it cancels the requests.

    Raises:
        ValueError: fewer than 1 thread.
    """
    if threads < 1:
        raise ValueError(f"reward_threads: expected at least 1 where the caller trains meanwhile, got {threads}")
    counted = Failures("reward") if failures is None else failures
    pool, loop = ThreadPoolExecutor(threads, "reward"), asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True, name="rewards").start()

    async def score(sampled: Future[list[Sample]]) -> tuple[list[Sample], Scored]:
        samples = await asyncio.wrap_future(sampled)
        return samples, await loop.run_in_executor(pool, _score, reward, samples, counted)

    async def score_all(under_way: list[Future[list[Sample]]]) -> tuple[list[Sample], Tensor, dict[str, Tensor], float]:
        try:
            groups = await asyncio.gather(*map(score, under_way))
        finally:
            for sampled in under_way:
                sampled.cancel()  # a finished request stays as it is
            counted.log_repeated()
        samples = [sample for group, _ in groups for sample in group]
        return samples, *_together(reward, [scored for _, scored in groups])

    def submit_scored(prompts: Sequence[Sample], sampling: Any, n: int = 1) -> Future:
        return asyncio.run_coroutine_threadsafe(score_all([submit([p], sampling, n) for p in prompts]), loop)

    return submit_scored


def _score(reward: Reward, samples: Sequence[Sample], failures: Failures) -> Scored:
    start = time.time()  # comparable between machines, as time.perf_counter() is not
    return *score_parts(reward, samples, failures=failures), start, time.time()


def _gather_scored(scored: dict[int, Scored], reasons: str, group: dist.ProcessGroup) -> tuple[dict[int, Scored], str]:
    """What each rank of a group scored, by prompt, and the reasons of all."""
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, (scored, reasons), group=group)
    everything = {i: one for rank_scored, _ in gathered for i, one in rank_scored.items()}
    return everything, "; ".join(why for _, why in gathered if why)


def _together(reward: Reward, scored: Sequence[Scored]) -> tuple[Tensor, dict[str, Tensor], float]:
    if not scored:
        return *score_parts(reward, []), 0.0
    rewards, parts, starts, ends = zip(*scored, strict=True)
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return torch.cat(rewards), joined, covered(starts, ends)


def covered(starts: Sequence[float], ends: Sequence[float]) -> float:
    """The length of the union of intervals: overlapping ones count once."""
    total, until = 0.0, -float("inf")
    for start, end in sorted(zip(starts, ends, strict=True)):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
