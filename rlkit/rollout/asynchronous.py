"""Sampling ahead of training: while a batch is trained on, servers write the next ones.

    ahead = Ahead(rollout, batches, n=8, max_staleness=1)        # batches: iterator of (prompts, Sampling)
    for samples in ahead:
        ...                                                      # judge, train
        ahead.update_weights(engine.get_per_tensor_param())

Batches are trained on in the order in which they were asked for, so which prompts a step sees does not depend on who
was faster. Batch k is asked for once k - max_staleness updates have been made, and trained on after k: that bounds both
how old its tokens can be and how much is under way. Answers that are being written when weights arrive go on under
them, and every sample says which weights wrote which of its tokens (`versions`).

max_staleness 0 takes turns; 1 is one step off (asynchronous RLHF, https://arxiv.org/abs/2410.18252); more lets long
answers finish over several steps (AReaL, https://arxiv.org/abs/2505.24298). Off-policy tokens want a correction:
rlkit.losses.importance_weights of `old_logprobs` over `rollout_logprobs`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlkit.data.samples import Sample
from rlkit.rollout.sampling import Sampling


@dataclass(eq=False)
class Span:
    """When a batch was written, by `time.perf_counter()`.

    Attributes:
        asked: when it was asked for.
        done: when its last answer was there; inf until then.
    """

    asked: float
    done: float = float("inf")

    def note(self, _: Future[list[Sample]]) -> None:
        self.done = time.perf_counter()


class Ahead:
    """Batches of samples, each asked for before it is needed.

    Args:
        rollout: a sampler on servers: it has `submit`, and takes weights while it samples.
        batches: (prompts, how to sample), one for each step; taken from only when it is time to ask for it.
        n: samples a prompt.
        max_staleness: most updates between the weights that wrote a token and those that are trained with it.
        timeout: seconds to wait for a batch.

    Raises:
        ValueError: a sampler that cannot sample while weights change, or a negative bound.
    """

    def __init__(
        self,
        rollout: Any,
        batches: Iterable[tuple[Sequence[Sample], Sampling]],
        *,
        n: int = 1,
        max_staleness: int = 1,
        timeout: float = 3600.0,
    ) -> None:
        if not hasattr(rollout, "submit"):
            raise ValueError(f"rollout: one on servers expected, {type(rollout).__name__} cannot sample while training")
        if max_staleness < 0:
            raise ValueError(f"max_staleness: at least 0 expected, came {max_staleness}")
        self.rollout, self.n, self.max_staleness, self.timeout = rollout, n, max_staleness, timeout
        self.batches, self.ended = iter(batches), False
        self.asked = self.updates = 0
        self.under_way: deque[tuple[Future[list[Sample]], Span]] = deque()
        self.taken: list[Span] = []  # of the batches that came, to see how much was overlapped

    def __iter__(self) -> Iterator[list[Sample]]:
        """Each batch in turn; one that failed raises what it failed with.

        Raises:
            RuntimeError: `update_weights` was not called after each batch, so no other may be asked for.
        """
        try:
            while True:
                self._ask()
                if not self.under_way and self.ended:
                    return
                if not self.under_way:
                    raise RuntimeError(
                        f"{len(self.taken)} batches were taken and {self.updates} updates made: call update_weights "
                        "after each batch, more samples would be too old"
                    )
                answers, span = self.under_way.popleft()
                self.taken.append(span)
                yield answers.result(self.timeout)
        finally:
            self.close()

    def _ask(self) -> None:
        while not self.ended and self.asked - self.updates <= self.max_staleness:
            if (found := next(self.batches, None)) is None:
                self.ended = True
                return
            requests, sampling = found
            span = Span(time.perf_counter())
            answers = self.rollout.submit(requests, sampling, self.n)
            answers.add_done_callback(span.note)
            self.under_way.append((answers, span))
            self.asked += 1

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Give the sampler the weights that a batch was trained to, and ask for the next one."""
        self.rollout.update_weights(weights)
        self.updates += 1
        self._ask()

    def update_adapter(self, config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        """The same with LoRA adapters alone; see `VllmServerRollout.update_adapter`."""
        self.rollout.update_adapter(config, weights)
        self.updates += 1
        self._ask()

    def staleness(self, samples: Iterable[Sample]) -> int:
        """How many updates ago the oldest of their tokens was written."""
        return max((self.rollout.version - sample.version for sample in samples), default=0)

    def close(self) -> None:
        """Call off what is under way, and ask for nothing more; the servers stop writing."""
        self.ended = True
        for answers, _ in self.under_way:
            answers.cancel()
        self.under_way.clear()
