"""Sampling with the model that is being trained, without a copy: a decoding loop around its public `forward`.

`generate` of transformers is not used, for three reasons: a prompt and its images are processed once for all of its n
samples, the random numbers of a sample do not depend on the batch, and positions come from the function that training
uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlkit.data.samples import Sample, append_response
from rlkit.data.thinking_tags import thinking_tags_of
from rlkit.rollout.decoding import (
    RecordedExperts,
    decode_one_token,
    drop_finished_rows,
    mark_finished,
    prefill,
    row_params,
    sample_next_tokens,
)
from rlkit.rollout.sampling import OnFinished, Sampling, end_token_ids, sampling_per_request
from rlkit.vlm.families import attention_cache_numbers
from rlkit.vlm.processors import decode, suppressed_token_ids
from rlkit.vlm.routers import record_routing


class HfRollout:
    """Samples with the module that an engine trains.

    Args:
        gathered: context that yields the module with full weights, e.g. `engine.gathered`.
        processor: for the end tokens, and for decoding.
        max_sequences: most sequences decoded at once.
        gpu_memory_utilization: share of a GPU's memory up to which the key-value cache may fill it. If need be, fewer
            sequences are decoded at once.
        model_parallel_group: ranks that generate each sample together; they decode the same requests at once.
        return_routed_experts: samples carry the experts of each token, `routed_experts`.
    """

    collective = True  # all ranks of a model-parallel group generate each sample together

    def __init__(
        self,
        gathered: Callable[[], AbstractContextManager[Any]],
        *,
        processor: Any,
        max_sequences: int = 512,
        gpu_memory_utilization: float = 0.8,
        model_parallel_group: dist.ProcessGroup | None = None,
        return_routed_experts: bool = False,
    ) -> None:
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization: expected a share in (0, 1], got {gpu_memory_utilization}")
        self.gathered, self.processor, self.max_sequences = gathered, processor, max_sequences
        self.gpu_memory_utilization, self.return_routed_experts = gpu_memory_utilization, return_routed_experts
        self.model_parallel_group = model_parallel_group
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.version = 0

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Count an update. The iterator is not used: the sampled module is the trained one."""
        self.version += 1

    def sleep(self) -> None:
        """Do nothing: no memory is kept between calls of `generate`."""

    def wake_up(self) -> None:
        """Do nothing; see `sleep`."""

    def close(self) -> None:
        """Do nothing; see `sleep`."""

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[Sample],
        sampling: Sampling | Sequence[Sampling],
        n: int = 1,
        *,
        on_finished: OnFinished | None = None,
    ) -> list[Sample]:
        """Generate n samples for each request; those of one request are adjacent, in the order of the requests.

        Args:
            sampling: for all requests, or one for each.
            on_finished: called with (i, samples) as soon as the n samples of request i are finished; see
                `rlkit.rollout.sampling.OnFinished`.
        """
        params = sampling_per_request(sampling, requests)
        by_length = sorted(range(len(requests)), key=lambda i: len(requests[i].token_ids))
        lengths = [len(request.token_ids) + p.max_new_tokens for request, p in zip(requests, params, strict=True)]
        groups: list[list[Sample]] = [[] for _ in requests]
        with self.gathered() as module, _evaluation_mode(module), self._recording(module) as last_routing:
            most = self._most_sequences(module, max(lengths, default=1))
            requests_per_batch = max(1, most // n)
            for start in range(0, len(requests), requests_per_batch):
                batch = by_length[start : start + requests_per_batch]  # indices of its requests
                samples = self._generate_batch(
                    module,
                    [requests[i] for i in batch],
                    [params[i] for i in batch],
                    n,
                    last_routing,
                    _renumbered(on_finished, batch),
                )
                for j, i in enumerate(batch):
                    groups[i] = samples[j * n : (j + 1) * n]
        return [sample for group in groups for sample in group]

    def _recording(self, module: Any) -> AbstractContextManager[Callable[[], Tensor] | None]:
        return record_routing(module) if self.return_routed_experts else nullcontext()

    def _most_sequences(self, module: Any, tokens: int) -> int:
        """How many sequences of this many tokens to decode at once: as many as fit on every rank of the group."""
        most = torch.tensor(min(self.max_sequences, self._sequences_in_memory(module, tokens)))
        if self.model_parallel_group is not None:
            dist.all_reduce(most, op=dist.ReduceOp.MIN, group=self.model_parallel_group)
        return int(most)

    def _sequences_in_memory(self, module: Any, tokens: int) -> int:
        """How many sequences of this many tokens fit into the free GPU memory, by their cache."""
        weight = next(module.parameters())
        if not weight.is_cuda:
            return self.max_sequences
        free, total = torch.cuda.mem_get_info(weight.device)
        reserved = torch.cuda.memory_reserved(weight.device) - torch.cuda.memory_allocated(weight.device)
        available = free + reserved - (1 - self.gpu_memory_utilization) * total
        return int(available // (tokens * cache_bytes_per_token(module.config, weight.element_size())))

    def _generate_batch(
        self,
        module: Any,
        requests: Sequence[Sample],
        sampling: Sequence[Sampling],
        n: int,
        last_routing: Callable[[], Tensor] | None,
        on_finished: OnFinished | None,
    ) -> list[Sample]:
        """Decode n samples of each request together: B = len(requests) * n rows."""
        device = next(module.parameters()).device
        suppressed = suppressed_token_ids(module.config, self.tokenizer).to(device)
        model_ends = end_token_ids(self.tokenizer, module.generation_config.eos_token_id)
        ends = [{*model_ends, *request_sampling.stop} for request_sampling in sampling]
        params = row_params(requests, sampling, n, ends, device)
        tokens = torch.zeros(len(requests) * n, params.steps, dtype=torch.int64, device=device)
        logprobs = torch.zeros(len(requests) * n, params.steps, device=device)
        finished = torch.zeros(len(requests) * n, dtype=torch.bool, device=device)
        groups: dict[int, list[Sample]] = {}  # of the requests that are finished

        def collect(finished_requests: Iterable[int], length: int) -> None:
            for j in sorted(set(finished_requests) - groups.keys()):
                rows, end = slice(j * n, j * n + n), min(length, sampling[j].max_new_tokens)
                groups[j] = self._make_samples(requests[j], tokens[rows, :end], logprobs[rows, :end], ends[j])
                if on_finished is not None:
                    on_finished(j, groups[j])

        state = prefill(module, requests, n)
        experts = RecordedExperts(last_routing, state, n) if last_routing else None
        for step in range(params.steps):
            next_tokens, next_logprobs = sample_next_tokens(state, params, step, suppressed)
            tokens[state.rows, step], logprobs[state.rows, step] = next_tokens, next_logprobs
            mark_finished(state, params, step, next_tokens)
            if state.finished.all():
                break
            if on_finished is not None:
                finished[state.rows] = state.finished
                collect(finished.view(-1, n).all(1).nonzero()[:, 0].tolist(), step + 1)
            next_tokens = drop_finished_rows(state, next_tokens)
            decode_one_token(module, state, next_tokens)
            if experts:
                experts.add_step(state)
        collect(range(len(requests)), step + 1)

        samples = [sample for j in range(len(requests)) for sample in groups[j]]
        if experts:
            samples = experts.add_to(samples, [len(request.token_ids) for request in requests for _ in range(n)])
        return samples

    def _make_samples(self, request: Sample, tokens: Tensor, logprobs: Tensor, ends: set[int]) -> list[Sample]:
        """The request followed by each of its n responses, which are cut after their end token.

        Args:
            tokens, logprobs: [n, T]
            ends: token ids that end a response.
        """
        samples = []
        for i, (row, row_logprobs) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
            length = next((t + 1 for t, token in enumerate(row) if token in ends), None)
            samples.append(
                append_response(
                    replace(request, number=request.number * len(tokens) + i),
                    row[:length],
                    row_logprobs[:length],
                    finish_reason="length" if length is None else "stop",
                    text=decode(self.processor, row[:length], thinking_tags_of(request.row)),
                    version=self.version,
                )
            )
        return samples


def _renumbered(on_finished: OnFinished | None, indices: Sequence[int]) -> OnFinished | None:
    """`on_finished` for a batch whose request j is number `indices[j]` of the call."""
    return None if on_finished is None else lambda j, samples: on_finished(indices[j], samples)


def cache_bytes_per_token(config: Any, element_size: int) -> int:
    """At most the cache of one token: that of attention to all tokens in every layer."""
    text = config.get_text_config()
    numbers = sum(attention_cache_numbers(text.per_layer_config[i]) for i in range(text.num_hidden_layers))
    return numbers * element_size


@contextmanager
def _evaluation_mode(module: Any) -> Iterator[None]:
    """Evaluation mode inside; the previous mode afterwards."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)
