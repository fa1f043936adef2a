"""A teacher on vLLM servers: what it thinks of the tokens of samples that a student has generated.

    python -m rlkit.rollout.serve --model TEACHER --port 8100 --max-logprobs 64

    teacher = VllmTeacher(model="TEACHER", urls="http://127.0.0.1:8100", top_k=64)
    logprobs, ids = teacher.topk_logprobs(samples, 64)

Its weights stay as they are, so several students may use the same servers, and none claims them. Log-probabilities are
those of vLLM's `prompt_logprobs`: at temperature 1, over the whole vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlkit.data.messages import MEDIA
from rlkit.data.samples import Sample
from rlkit.losses.logprobs import TopkLogprobs
from rlkit.rollout.inference_requests import check_prompt_expansion
from rlkit.rollout.sampling import sample_name
from rlkit.rollout.servers.media import MediaEncoder, Part
from rlkit.rollout.servers.pool import RequestRejected, Server, ServerPool, ServerUnavailable
from rlkit.rollout.servers.rollout import version_number
from rlkit.rollout.servers.shared_load import connect_to_store
from rlkit.rollout.servers.weight_dtype import WEIGHT_DTYPE_ROUTE
from rlkit.rollout.vllm_requests import as_trainer_tokens, check_server_media

START_HINT = "Start servers with: python -m rlkit.rollout.serve --model TEACHER --port PORT --max-logprobs K"
IMPOSSIBLE = -9999.0  # what vLLM writes instead of -inf

# for each token of a sample's mask: the log-probability of the token itself, and those of the likeliest ones by id
Scores = list[tuple[float, list[tuple[int, float]]]]


class VllmTeacher:
    """Scores samples with vLLM servers.

    Args:
        model: directory or hub id of the teacher. The last part of the path has to be the same for the servers' model.
        urls: URLs of the servers, as a list or as one string with commas.
        top_k: the largest k of `topk_logprobs`; the servers need `--max-logprobs` of at least that.
        suppressed_token_ids: token ids to which the student gives probability 0. The teacher's probabilities are
            divided among the other tokens, as far as its response names the suppressed ones.
        processor, config: of the teacher; only samples without images, videos and audios do without them.
        group: ranks that are given the same samples. Each asks about some, and gets the scores of all.
        max_sequences: limit of concurrent requests per server.
        timeout: seconds to wait for a response.
        connect_timeout: seconds to wait until the servers are up.

    Raises:
        ValueError: a server cannot be reached, has another model or the weights of a trainer, or returns fewer
            log-probabilities.
    """

    def __init__(
        self,
        *,
        model: str,
        urls: str | Sequence[str],
        top_k: int = 0,
        suppressed_token_ids: Sequence[int] = (),
        processor: Any = None,
        config: Any = None,
        group: dist.ProcessGroup | None = None,
        max_sequences: int = 256,
        timeout: float = 1800.0,
        connect_timeout: float = 60.0,
    ) -> None:
        self.model, self.group, self.suppressed = model, group, frozenset(suppressed_token_ids)
        self.processor, self.config = processor, config
        self.pool = ServerPool(
            urls,
            max_sequences=max_sequences,
            timeout=timeout,
            start_hint=START_HINT,
            store=connect_to_store(),
            rank_and_ranks=(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1),
        )
        self.context_lengths = self.pool.run(self._handshake_all(connect_timeout, top_k))  # of each server
        self.max_model_len = min(self.context_lengths)

    def infer_batch(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """`logprobs` [B, T] of the samples' tokens, 0 where their mask is False, as an engine's `infer_batch`."""
        logprobs = torch.zeros(len(samples), max((len(s.token_ids) for s in samples), default=1))
        mask = torch.zeros(logprobs.shape, dtype=torch.bool)
        for row, sample in enumerate(samples):
            mask[row, : len(sample.mask)] = torch.tensor(sample.mask, dtype=torch.bool)
        values = [logprob for scores in self._scores(samples, 0) for logprob, _ in scores]
        logprobs[mask] = torch.tensor(values, dtype=torch.float32)
        return {"logprobs": logprobs}

    def topk_logprobs(self, samples: Sequence[Sample], k: int) -> TopkLogprobs:
        """The K likeliest tokens in place of each token of the samples' masks, as an engine's `topk_logprobs`.

        An entry of a suppressed token, or beyond the vocabulary's size, has log-probability -inf.
        """
        tops = [top for scores in self._scores(samples, k) for _, top in scores]
        logprobs = torch.full((len(tops), k), -torch.inf)
        ids = torch.zeros(len(tops), k, dtype=torch.int32)
        for row, top in enumerate(tops):
            logprobs[row, : len(top)] = torch.tensor([logprob for _, logprob in top])
            ids[row, : len(top)] = torch.tensor([token for token, _ in top], dtype=torch.int32)
        suppressed = torch.isin(ids, torch.tensor(sorted(self.suppressed), dtype=torch.int32))
        left_out = torch.where(suppressed, logprobs, -torch.inf).exp().sum(1, keepdim=True)
        return TopkLogprobs(torch.where(suppressed, -torch.inf, logprobs - torch.log1p(-left_out)), ids)

    def _scores(self, samples: Sequence[Sample], k: int) -> list[Scores]:
        """The scores of each sample; ranks of the group share the work.

        Raises:
            ValueError: a sample is too long for the servers, they compute other inputs of its images or videos than the
                trainer, or they expand them to other tokens.
            RuntimeError: no server is available, or all attempts failed.
        """
        for sample in samples:
            if len(sample.token_ids) >= self.max_model_len:
                raise ValueError(
                    f"{sample_name(sample)}: expected fewer than {self.max_model_len} tokens, the context of the "
                    f"teacher's servers, got {len(sample.token_ids)}; start them with a larger --max-model-len"
                )
            if media := [f"{kind}s" for kind in MEDIA if getattr(sample, f"{kind}s")]:
                self._check_media(sample, media)
        rank, ranks = (0, 1) if self.group is None else (self.group.rank(), self.group.size())
        own_scores = self.pool.run(self._score(samples[rank::ranks], k))
        if self.group is None:
            return own_scores
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, own_scores, group=self.group)
        return [gathered[i % ranks][i // ranks] for i in range(len(samples))]

    def _check_media(self, sample: Sample, media: Sequence[str]) -> None:
        if self.processor is None or self.config is None:
            raise ValueError(
                f"{sample_name(sample)}: expected a VllmTeacher with its processor and config for samples with "
                f"{' and '.join(media)}, got none"
            )
        on_cpu = any(server.device == "cpu" for server in self.pool.servers)
        check_server_media(sample, self.processor, self.config, on_cpu=on_cpu)

    async def _score(self, samples: Sequence[Sample], k: int) -> list[Scores]:
        media = MediaEncoder(samples)

        async def attempt(server: Server, sample: Sample) -> Scores:
            scores = await self._request(server, sample, k, await media.parts(sample))
            media.finished(sample)
            return scores

        return await self.pool.run_jobs(samples, lambda _: 1, attempt)

    async def _request(self, server: Server, sample: Sample, k: int, parts: Sequence[Part]) -> Scores:
        body: dict[str, Any] = {"token_ids": sample.compact_ids, **_request_options(k)}
        if parts:
            body["content_parts"] = parts
        try:
            response = await self.pool.request(server, "POST", "/inference/v1/generate", body)
        except RequestRejected as error:
            raise ValueError(f"{sample_name(sample)}: {error}") from error
        check_prompt_expansion(sample, as_trainer_tokens(response["prompt_token_ids"], self.processor))
        positions = zip(sample.token_ids, sample.mask, response["prompt_logprobs"], strict=True)
        return [_token_scores(token, entries, k) for token, is_response, entries in positions if is_response]

    async def _handshake_all(self, connect_timeout: float, top_k: int) -> list[int]:
        return await asyncio.gather(*(self._handshake(server, connect_timeout, top_k) for server in self.pool.servers))

    async def _handshake(self, server: Server, connect_timeout: float, top_k: int) -> int:
        """Check that a server can score samples; returns its maximum sequence length."""
        request = self.pool.request
        try:
            await self.pool.wait_until_up(server, connect_timeout)
            card = (await request(server, "GET", "/v1/models"))["data"][0]
            version = version_number((await request(server, "GET", "/weight_info"))["weight_version"])
            body = {"token_ids": [0, 0], **_request_options(top_k)}
            response = await request(server, "POST", "/inference/v1/generate", body)
        except (ServerUnavailable, RequestRejected, KeyError, TypeError) as error:
            raise ValueError(f"{server.url}: expected a vLLM server of a teacher, got {error}. {START_HINT}") from error
        if PurePath(card["id"]).name != PurePath(self.model).name:
            raise ValueError(f"{server.url}: expected the teacher {self.model!r}, got {card['id']!r}")
        if version:
            raise ValueError(f"{server.url}: expected the teacher's own weights, got those of a trainer")
        if not response.get("prompt_logprobs"):
            raise ValueError(f"{server.url}: expected prompt_logprobs, got none. {START_HINT}")
        try:
            server.device = (await request(server, "GET", WEIGHT_DTYPE_ROUTE))["device"]
        except RequestRejected:
            pass  # it was not started by rlkit.rollout.serve
        return card["max_model_len"]

    def close(self) -> None:
        """Disconnect from the servers. They continue to run."""
        self.pool.close()


def _request_options(k: int) -> dict[str, Any]:
    """What every request asks for; vLLM generates one token that is not used."""
    params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": k, "detokenize": False}
    return {"sampling_params": params, "return_token_ids": True, "stream": False}


def _token_scores(token: int, entries: dict[str, Any] | None, k: int) -> tuple[float, list[tuple[int, float]]]:
    """The log-probability of a token, and the k likeliest ones in its place; nothing is known of the first token."""
    if entries is None:
        return 0.0, []
    logprobs = {int(name): entry["logprob"] for name, entry in entries.items() if entry["logprob"] > IMPOSSIBLE}
    likeliest = sorted(logprobs.items(), key=lambda x: -x[1])[:k]  # vLLM adds the token itself
    return logprobs.get(token, -torch.inf), likeliest
