"""Sampling from the trainer's own model, without a copy: a plain decoding loop over its public forward.

`generate` of transformers is not used for three reasons: a prompt and its images are computed once for all of its n
answers, the noise is keyed by sample, and the positions are those of training, from the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlkit.data.samples import Sample, append_response
from rlkit.losses.logprobs import suppress_tokens
from rlkit.rollout.sampling import Sampling, Written, end_tokens, of_each, sample_tokens, uniforms, with_routing
from rlkit.vlm.inputs import position_ids, position_spec, vision_kwargs
from rlkit.vlm.processors import decode, suppressed_token_ids
from rlkit.vlm.routers import record_routing


class HfRollout:
    """Samples with the module that an engine trains.

    Args:
        gathered: context that yields the module with whole weights, e.g. `engine.gathered`.
        processor: for the end tokens, and to decode.
        max_sequences: most sequences decoded at once.
        gpu_memory_utilization: share of a GPU's memory up to which the key-value cache may fill it; fewer sequences are
            decoded at once if need be.
        return_routed_experts: samples carry the experts that each token went to, `routed_experts`.
    """

    def __init__(
        self,
        gathered: Callable[[], AbstractContextManager[Any]],
        *,
        processor: Any,
        max_sequences: int = 512,
        gpu_memory_utilization: float = 0.8,
        return_routed_experts: bool = False,
    ) -> None:
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization: in (0, 1] expected, came {gpu_memory_utilization}")
        self.gathered, self.processor, self.max_sequences = gathered, processor, max_sequences
        self.gpu_memory_utilization, self.return_routed_experts = gpu_memory_utilization, return_routed_experts
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.version = 0

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """The trainer's module is sampled from, so its weights are here already: none is gathered."""
        self.version += 1

    def sleep(self) -> None:
        """Nothing to free between calls: the cache goes with each `generate`."""

    def wake_up(self) -> None:
        """See `sleep`."""

    def close(self) -> None:
        """Nothing to free."""

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[Sample],
        sampling: Sampling | Sequence[Sampling],
        n: int = 1,
        *,
        written: Written | None = None,
    ) -> list[Sample]:
        """n samples a request, those of one request next to each other, in the order of the requests.

        Args:
            sampling: of all requests, or of each.
            written: is given (i, its samples) as soon as the n samples of request i are written, while others still
                are; see `rlkit.rollout.sampling.Written`.
        """
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].token_ids))
        results: list[list[Sample]] = [[] for _ in requests]
        how = of_each(sampling, requests)
        longest = max((len(r.token_ids) + s.max_new_tokens for r, s in zip(requests, how, strict=True)), default=0)
        with self.gathered() as module, _evaluating(module), self._recording(module) as routing:
            size = max(1, min(self.max_sequences, self._fits(module, longest)) // n)
            for start in range(0, len(order), size):
                chosen = order[start : start + size]
                here = [requests[i] for i in chosen]
                tell = _numbered(written, chosen)
                samples = self._generate(here, [how[i] for i in chosen], n, module, routing, tell)
                for j, i in enumerate(chosen):
                    results[i] = samples[j * n : (j + 1) * n]
        return [sample for group in results for sample in group]

    def _recording(self, module: Any) -> AbstractContextManager[Callable[[], Tensor] | None]:
        return record_routing(module) if self.return_routed_experts else nullcontext()

    def _fits(self, module: Any, tokens: int) -> int:
        """Sequences of so many tokens whose cache the GPU has room for."""
        weight = next(module.parameters())
        if not weight.is_cuda:
            return self.max_sequences
        free, total = torch.cuda.mem_get_info(weight.device)
        reserved = torch.cuda.memory_reserved(weight.device) - torch.cuda.memory_allocated(weight.device)
        room = free + reserved - (1 - self.gpu_memory_utilization) * total
        return int(room // (tokens * cache_bytes_per_token(module.config, weight.element_size())))

    def _generate(
        self,
        requests: Sequence[Sample],
        how: Sequence[Sampling],
        n: int,
        module: Any,
        routing: Callable[[], Tensor] | None,
        tell: Written | None,
    ) -> list[Sample]:
        config, device = module.config, next(module.parameters()).device
        suppressed = suppressed_token_ids(config, self.tokenizer).to(device)
        ends = end_tokens(self.tokenizer, module.generation_config.eos_token_id)
        stops = [{*ends, *s.stop} for s in how for _ in range(n)]
        stop_ids = torch.tensor([[*row, *[-1] * (max(map(len, stops)) - len(row))] for row in stops], device=device)
        limits = torch.tensor([s.max_new_tokens for s in how], device=device).repeat_interleave(n)
        heat = torch.tensor([s.temperature or 1.0 for s in how], device=device).repeat_interleave(n)[:, None]
        cold = torch.tensor([s.temperature == 0 for s in how], device=device).repeat_interleave(n)
        some_warm, some_cold = any(s.temperature for s in how), not all(s.temperature for s in how)
        most = max(s.max_new_tokens for s in how)
        noise = torch.cat([
            uniforms(s.seed, [r.group_id], n, most, numbers=[r.number], used=[sum(r.mask)])
            for r, s in zip(requests, how, strict=True)
        ]).to(device)  # fmt: skip

        tokens, attended = _left_pad([r.token_ids for r in requests])
        vision = [r.vision for r in requests]
        spec = position_spec(config)
        positions = position_ids(tokens, attended, vision, spec)
        inputs = {"input_ids": tokens, "attention_mask": attended.long(), "position_ids": positions}
        inputs |= vision_kwargs(tokens, vision, spec)
        out = module(**{k: v.to(device) for k, v in inputs.items()}, use_cache=True, logits_to_keep=1)
        routed = [] if routing is None else [routing().unflatten(0, tokens.shape).repeat_interleave(n, 0).cpu()]
        cache = out.past_key_values
        cache.batch_repeat_interleave(n)
        logits = out.logits[:, -1].repeat_interleave(n, 0)
        attended = attended.to(device).repeat_interleave(n, 0)
        last = positions.amax(0) if positions.ndim == 3 else positions  # on text the three axes agree
        last = last[:, -1].to(device).repeat_interleave(n, 0)

        live = torch.arange(len(logits), device=device)  # rows in the cache
        ended = torch.zeros(len(logits), dtype=torch.bool, device=device)  # of those
        written = tokens.new_zeros(len(logits), most, device=device)
        scored = torch.zeros(len(logits), most, device=device)
        parents = [replace(request, number=request.number * n + i) for request in requests for i in range(n)]
        groups: dict[int, list[Sample]] = {}  # of the requests whose samples are all written

        def finish(done: Iterable[int], length: int) -> None:
            for j in sorted(set(done) - groups.keys()):
                rows, longest = slice(j * n, j * n + n), min(length, how[j].max_new_tokens)
                ids, scores = written[rows, :longest].tolist(), scored[rows, :longest].tolist()
                came = zip(parents[rows], ids, scores, stops[rows], strict=True)
                groups[j] = [self._finish(*row) for row in came]
                if tell is not None:
                    tell(j, groups[j])

        over = torch.zeros(len(logits), dtype=torch.bool, device=device)  # of all rows
        for t in range(most):
            logprobs = suppress_tokens(logits.float(), suppressed).div(heat[live]).log_softmax(-1)
            chosen = sample_tokens(logprobs, noise[live, t]) if some_warm else logprobs.argmax(-1)
            if some_warm and some_cold:
                chosen = logprobs.argmax(-1).where(cold[live], chosen)
            written[live, t] = chosen
            scored[live, t] = logprobs.gather(1, chosen[:, None])[:, 0]
            ended |= (chosen[:, None] == stop_ids[live]).any(1) | (limits[live] == t + 1)
            on = ~ended
            if not on.any():
                break
            if tell is not None:
                over[live] = ended
                finish(over.view(-1, n).all(1).nonzero()[:, 0].tolist(), t + 1)
            attended = torch.cat([attended, attended.new_ones(len(attended), 1)], 1)
            last = last + 1
            if on.sum() <= len(on) // 2:  # the cache is copied, so not for every row that ends
                cache.batch_select_indices(on.nonzero()[:, 0])
                live, chosen, attended, last, ended = live[on], chosen[on], attended[on], last[on], ended[on]
            step = last[:, None] if positions.ndim == 2 else last[None, :, None].expand(3, -1, -1)
            out = module(
                input_ids=chosen[:, None], attention_mask=attended.long(), position_ids=step, past_key_values=cache,
                use_cache=True,
            )  # fmt: skip
            logits = out.logits[:, -1]
            if routing is not None:
                step_routing = torch.full_like(routed[0][:, :1], -1)
                step_routing[live.cpu(), 0] = routing().cpu()
                routed.append(step_routing)
        finish(range(len(requests)), t + 1)
        samples = [sample for j in range(len(requests)) for sample in groups[j]]
        if routing is None:
            return samples
        starts = [tokens.shape[1] - len(parent.token_ids) for parent in parents]
        rows = zip(samples, torch.cat(routed, 1), starts, strict=True)
        return [with_routing(sample, row[start:][: len(sample.token_ids) - 1]) for sample, row, start in rows]

    def _finish(self, request: Sample, ids: list[int], logprobs: list[float], ends: set[int]) -> Sample:
        """Cut a row behind its end token, if it has one."""
        end = next((t + 1 for t, token in enumerate(ids) if token in ends), None)
        facts = {"text": decode(self.processor, ids[:end]), "version": self.version}
        return append_response(
            request, ids[:end], logprobs[:end], finish_reason="length" if end is None else "stop", **facts
        )


def _numbered(written: Written | None, numbers: Sequence[int]) -> Written | None:
    """`written` for requests of which the i-th is number `numbers[i]` of all."""
    return None if written is None else lambda i, group: written(numbers[i], group)


def cache_bytes_per_token(config: Any, element_size: int) -> int:
    """Of the key-value cache, for one token of one sequence: 2 * layers * key-value heads * head size * bytes."""
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim * element_size


def _left_pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ragged tokens -> [B, T] int64 and its [B, T] bool attention mask; the padding is token 0 and never attended."""
    width = max(len(row) for row in rows)
    tokens = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return tokens, torch.arange(width) >= (width - lengths)[:, None]


@contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    """Evaluation mode, and the mode it was in restored."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
