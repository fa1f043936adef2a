"""Asynchronous sampling: while a batch is trained on, servers generate the next ones.

    sampler = AsyncSampler(rollout, batches, n=8, max_staleness=1)        # batches: iterator of (prompts, Sampling)
    for samples in sampler:
        ...                                                               # rewards, training
        sampler.update_weights(engine.get_per_tensor_param())

Batches are trained on in the order in which they were submitted, so the prompts of a step do not depend on timing.
Batch k is submitted after k - max_staleness updates, and trained on after k updates. This bounds both the age of its
tokens and the number of batches in flight. Responses in flight continue under new weights, and each sample records
which weights generated which of its tokens (`versions`).

With max_staleness 0, sampling and training alternate. 1 is one step off-policy (https://arxiv.org/abs/2410.18252). With
more, long responses may take several steps (AReaL, https://arxiv.org/abs/2505.24298). Off-policy tokens need a
correction: `rlkit.losses.importance_weights` of `old_logprobs` over `rollout_logprobs`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import Tensor

from rlkit.data.samples import Sample
from rlkit.rollout.sampling import Sampling


class AsyncSampler:
    """An iterator of batches of samples, each submitted before it is needed.

    Args:
        rollout: on servers: it has `submit`, and takes weights while it samples.
        batches: (prompts, sampling parameters) of each step; the next one is taken only when it is submitted.
        n: samples of each prompt.
        max_staleness: most updates between the weights that generated a token and those that are trained with it.
        timeout: seconds to wait for a batch.
        submit: replaces `rollout.submit`, for example `score_as_written(rollout.submit, reward)`. Its results are those
            of the iteration.

    Raises:
        ValueError: a rollout that cannot sample while weights change, or a negative bound.
    """

    def __init__(
        self,
        rollout: Any,
        batches: Iterable[tuple[Sequence[Sample], Sampling]],
        *,
        n: int = 1,
        max_staleness: int = 1,
        timeout: float = 3600.0,
        submit: Callable[..., Future[Any]] | None = None,
    ) -> None:
        if not hasattr(rollout, "submit"):
            raise ValueError(
                f"rollout: expected one on servers, got {type(rollout).__name__}, which cannot sample during training"
            )
        if max_staleness < 0:
            raise ValueError(f"max_staleness: expected at least 0, got {max_staleness}")
        self.rollout, self.n, self.max_staleness, self.timeout = rollout, n, max_staleness, timeout
        self.submit = submit or rollout.submit
        self.batches, self.exhausted = iter(batches), False
        self.submitted = self.updates = 0
        self.in_flight: deque[Future[Any]] = deque()

    def __iter__(self) -> Iterator[Any]:
        """Batches in order; a batch that failed raises its error.

        Raises:
            RuntimeError: `update_weights` was not called after each batch, so no further one may be submitted.
            TimeoutError: a batch took longer than `timeout`.
        """
        try:
            while True:
                self._submit_next()
                if not self.in_flight and self.exhausted:
                    return
                if not self.in_flight:
                    raise RuntimeError(
                        f"AsyncSampler: expected update_weights after each batch, got {self.updates} updates after "
                        f"{self.submitted} batches: samples of a further one would be too old"
                    )
                samples = self.in_flight.popleft()
                if not wait([samples], self.timeout).done:
                    samples.cancel()
                    raise TimeoutError(f"AsyncSampler: expected a batch within {self.timeout:g} s, got none")
                yield samples.result()
        finally:
            self.close()

    def _submit_next(self) -> None:
        while not self.exhausted and self.submitted - self.updates <= self.max_staleness:
            if (batch := next(self.batches, None)) is None:
                self.exhausted = True
                return
            requests, sampling = batch
            self.in_flight.append(self.submit(requests, sampling, self.n))
            self.submitted += 1

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """The dtype in which the servers want weights, see `ServerRollout`."""
        return getattr(self.rollout, "weight_dtype", None)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send the weights that a batch was trained to, and submit the next batch."""
        self.rollout.update_weights(weights)
        self.updates += 1
        self._submit_next()

    def update_adapter(self, config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        """The same with LoRA adapters; see `VllmServerRollout.update_adapter`."""
        self.rollout.update_adapter(config, weights)
        self.updates += 1
        self._submit_next()

    def close(self) -> None:
        """Cancel the batches in flight and submit no more; the servers abort their requests."""
        self.exhausted = True
        for samples in self.in_flight:
            samples.cancel()
        self.in_flight.clear()
