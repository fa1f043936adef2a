"""The base class of rollouts on vLLM and SGLang servers: distributes requests and sends weights."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from rlkit.data.messages import MEDIA
from rlkit.data.samples import Sample
from rlkit.rollout.background import in_daemon_thread
from rlkit.rollout.inference_requests import check_context_length, finished_sample
from rlkit.rollout.sampling import OnFinished, Sampling, model_end_token_ids, sample_name, sampling_per_request
from rlkit.rollout.servers.claim import claim_servers, release_servers
from rlkit.rollout.servers.media import MediaEncoder, Part
from rlkit.rollout.servers.pool import RequestRejected, Server, ServerPool, ServerUnavailable
from rlkit.rollout.servers.shared_load import connect_to_store
from rlkit.rollout.servers.weight_dtype import common_dtype, dtype_by_name
from rlkit.rollout.servers.weight_transfer import TransferGroup, local_address, send_weights
from rlkit.vlm.loading import load_config
from rlkit.vlm.processors import suppressed_token_ids

Weights = Iterable[tuple[str, Tensor]]


@dataclass
class Job:
    """A request to one server, for some of the n samples of a prompt.

    Attributes:
        index: number of the job in a call of `generate`; the jobs of a prompt are adjacent.
        request: the prompt, or the sample to continue.
        first_number: number of the job's first sample within its group.
        count: number of samples.
        body: body of the HTTP request, without media until it is sent.
    """

    index: int
    request: Sample
    first_number: int
    count: int
    body: dict[str, Any]


class ServerRollout(ABC):
    """A rollout on inference servers. A subclass implements the protocol of one kind of server.

    Args:
        model: directory or hub id of the model. The last part of the path has to be the same for the servers' model.
        processor: the trainer's processor or tokenizer, for decoding.
        urls: URLs of the servers, as a list or as one string with commas.
        max_sequences: limit of concurrent sequences per server; further ones wait in the client.
        timeout: seconds to wait for a response, or for a bucket of weights.
        connect_timeout: seconds to wait until the servers are up.
        transfer: "nccl" or "gloo", as the servers were started; by default nccl if the trainer has a GPU.
        bucket_bytes: size limit of a bucket of gathered weights. While one is sent, the next is gathered.
        weight_dtype: dtype that the trainer casts matrices to before it gathers and sends them, if it is smaller than
            their own: "bfloat16", "float16" or "float32". By default that of the servers, or the weights' own if a
            server does not say. It is the attribute `weight_dtype`, for `engine.get_per_tensor_param(dtype=...)`.
        trust_remote_code: allow code from the model's repository to run.

    Raises:
        ValueError: a server cannot be reached, is used by another trainer, has an unsupported version or another model,
            or lacks a feature that training needs.
    """

    transfer_groups: ClassVar[dict[str, Callable[[int, str], TransferGroup]]]
    join_path: ClassVar[str]
    start_hint: ClassVar[str]
    health_path: ClassVar[str] = "/health"
    version_path: ClassVar[str] = "/weight_info"  # its response has the `weight_version`
    accepted_media: ClassVar[tuple[str, ...]] = ("image",)  # kinds of rlkit.data.messages.MEDIA that the servers take

    def __init__(
        self,
        *,
        model: str,
        processor: Any,
        urls: str | Sequence[str],
        max_sequences: int = 256,
        timeout: float = 1800.0,
        connect_timeout: float = 60.0,
        transfer: str | None = None,
        bucket_bytes: int = 256 << 20,
        weight_dtype: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        transfer = transfer or ("nccl" if torch.cuda.is_available() else "gloo")
        if transfer not in self.transfer_groups:
            raise ValueError(f"transfer: expected one of {', '.join(self.transfer_groups)}, got {transfer!r}")
        self.make_group = self.transfer_groups[transfer]
        self.bucket_bytes, self.model, self.processor = bucket_bytes, model, processor
        self.weight_dtype = dtype_by_name(weight_dtype) if weight_dtype else None
        self.config = load_config(model, trust_remote_code=trust_remote_code)
        tokenizer = getattr(processor, "tokenizer", processor)
        self.suppressed_token_ids = suppressed_token_ids(self.config, tokenizer).tolist()
        self.end_token_ids = model_end_token_ids(model, self.config, tokenizer)
        self.group: TransferGroup | None = None
        self.group_members: list[tuple[Server, int]] = []
        self.in_flight: set[Future[list[Sample]]] = set()
        self.submission = threading.Lock()  # held while requests are submitted, or what they name changes
        self.asleep = self.update_failed = False
        self.pool = ServerPool(
            urls,
            max_sequences=max_sequences,
            timeout=timeout,
            start_hint=self.start_hint,
            health_path=self.health_path,
            store=connect_to_store(),
            rank_and_ranks=(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1),
        )
        self.receivers = self.pool.servers  # the servers of a weight update, from its beginning to its end
        self.pool.run(self._wait_until_up(connect_timeout))
        error = None
        try:
            self._claim()  # before any request that changes the servers' state
        except RequestRejected as caught:
            error = caught
        _raise_on_all_ranks(error)
        handshakes = self.pool.run(self._handshake_all())
        self.context_lengths = [max_model_len for max_model_len, _ in handshakes]  # of each server
        self.max_model_len = min(self.context_lengths)
        limits = [server.max_num_seqs for server in self.pool.servers if server.max_num_seqs]
        self.max_samples = min([max_sequences, *limits])  # of one request
        self.weight_dtype = self.weight_dtype or common_dtype(server.dtype for server in self.pool.servers)
        # version of the weights that all servers sample with, and of those that were sent last
        self.version = self.sent_version = max(version for _, version in handshakes)

    # --- the protocol of a kind of server

    @abstractmethod
    def _request_body(self, request: Sample, sampling: Sampling, start: int, count: int) -> dict[str, Any]:
        """Body of a request for `count` of the n samples of a prompt, from number `start` on, without its media."""

    @abstractmethod
    def _media_body(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The media in the body of a request. It is called in a thread, for requests with media only."""

    @abstractmethod
    async def _request_samples(self, server: Server, job: Job) -> list[Sample]:
        """Send a job to a server once, and convert its response to samples."""

    @abstractmethod
    async def _handshake(self, server: Server) -> tuple[int, int]:
        """Check that a server supports training. Returns its maximum sequence length, and its weight version.

        It also sets what the server says of itself: `server.workers`, and if it does, `server.dtype` and others.
        """

    @abstractmethod
    def _begin_update(self) -> None:
        """Make the servers pause generation and prepare for new weights."""

    @abstractmethod
    async def _announce_bucket(self, description: dict[str, list[Any]]) -> None:
        """Send the description of the next bucket to the servers, and wait until they have loaded it."""

    @abstractmethod
    def _finish_update(self) -> None:
        """Make the servers switch to weight version `self.sent_version`, empty their caches, and resume generation."""

    @abstractmethod
    async def _abort_update(self, server: Server) -> None:
        """End a failed update, so that the next one can begin; the server stays paused."""

    # --- generation

    def generate(
        self,
        requests: Sequence[Sample],
        sampling: Sampling | Sequence[Sampling],
        n: int = 1,
        *,
        on_finished: OnFinished | None = None,
    ) -> list[Sample]:
        """Generate n samples for each request, in the order of the requests. Samples of one request are adjacent.

        Args:
            sampling: for all requests, or one for each.
            on_finished: called with (i, samples) as soon as the n samples of request i are finished; see
                `rlkit.rollout.sampling.OnFinished`.

        Raises:
            ValueError: a prompt leaves no room for a response, the server rejects it, or the server expands its images
                to other tokens than the trainer.
            RuntimeError: no server is available, one has unexpected weights, or all attempts failed.
        """
        return self.pool.wait(self.submit(requests, sampling, n, on_finished=on_finished))

    def submit(
        self,
        requests: Sequence[Sample],
        sampling: Sampling | Sequence[Sampling],
        n: int = 1,
        *,
        on_finished: OnFinished | None = None,
    ) -> Future[list[Sample]]:
        """Start `generate` without waiting for its result. Cancelling the future aborts the requests on the servers."""
        params = sampling_per_request(sampling, requests)
        check_context_length(requests, params, self.max_model_len)
        self._check_media(requests)
        jobs: list[Job] = []
        in_callback = threading.current_thread() is self.pool.thread  # of samples in flight, which an update waits for
        with nullcontext() if in_callback else self.submission:
            if self.update_failed:
                raise RuntimeError(
                    "generate: expected servers with the trainer's weights, got servers whose last weight update "
                    "failed; call update_weights again first"
                )
            for request, request_sampling in zip(requests, params, strict=True):
                for start in range(0, n, self.max_samples):
                    count = min(self.max_samples, n - start)
                    body = self._request_body(request, request_sampling, start, count)
                    jobs.append(Job(len(jobs), request, request.number * n + start, count, body))
            samples = self.pool.start(self._run(jobs, n, on_finished))
            self.in_flight.add(samples)
        samples.add_done_callback(self.in_flight.discard)
        return samples

    def _check_media(self, requests: Sequence[Sample]) -> None:
        for request in requests:
            for kind in MEDIA:
                if getattr(request, f"{kind}s") and kind not in self.accepted_media:
                    raise ValueError(
                        f"{sample_name(request)}: expected text and images for servers of this kind, got {kind}s; use "
                        "rollout 'vllm_server', 'vllm' or 'hf'"
                    )

    async def _run(self, jobs: Sequence[Job], n: int, on_finished: OnFinished | None) -> list[Sample]:
        jobs_per_request = len(range(0, n, self.max_samples))
        results: dict[int, list[Sample]] = {}
        media = MediaEncoder(job.request for job in jobs)

        async def attempt(server: Server, job: Job) -> list[Sample]:
            if parts := await media.parts(job.request):
                job = replace(job, body=job.body | await asyncio.to_thread(self._media_body, parts))
            results[job.index] = await self._request_samples(server, job)
            media.finished(job.request)
            i = job.index // jobs_per_request
            same_request = range(i * jobs_per_request, (i + 1) * jobs_per_request)
            if on_finished is not None and results.keys() >= set(same_request):
                on_finished(i, [sample for other in same_request for sample in results[other]])
            return results[job.index]

        samples_of_jobs = await self.pool.run_jobs(jobs, lambda job: job.count, attempt)
        return [sample for samples in samples_of_jobs for sample in samples]

    async def _post_job(self, server: Server, path: str, job: Job) -> Any:
        try:
            return await self.pool.request(server, "POST", path, job.body)
        except RequestRejected as error:
            raise ValueError(f"{sample_name(job.request)}: {error}") from error

    def _make_sample(
        self,
        server: Server,
        job: Job,
        i: int,
        oldest: int,
        *,
        token_ids: list[int],
        logprobs: list[float],
        finish_reason: str,
        versions: list[int],
    ) -> Sample:
        """Make sample i of a job.

        Args:
            oldest: weight version at the time of the request.
            versions: weight version of each generated token.
        """
        self._check_versions(server, oldest, versions)
        versions = [*job.request.versions, *versions]
        request = replace(job.request, number=job.first_number + i, versions=versions)
        return finished_sample(
            request,
            token_ids,
            logprobs,
            finish_reason,
            processor=self.processor,
            version=min(versions, default=self.version),
        )

    def _check_versions(self, server: Server, oldest: int, versions: Iterable[int]) -> None:
        """Raise a RuntimeError unless all tokens were generated with weight versions that this rollout has sent."""
        token_versions = sorted(set(versions))
        if not token_versions or not oldest <= token_versions[0] <= token_versions[-1] <= self.sent_version:
            raise RuntimeError(
                f"{server.url}: expected tokens of weight version {oldest}, got {token_versions}: was the server "
                "restarted, or does another run send it weights?"
            )

    # --- weights

    def update_weights(self, weights: Weights) -> None:
        """Send (HF name, full tensor) of every parameter to all servers. All ranks iterate together, and rank 0 sends.

        Requests in flight are paused and continue with the new weights. KV caches of the old weights are discarded. A
        restarted server becomes available again when it has the weights.

        Raises:
            RuntimeError: a server did not receive the weights. The servers stay paused until another call succeeds.
        """
        self._update("update_weights", weights, self._send_weights)

    def _update(self, name: str, weights: Weights, send: Callable[[Weights], None]) -> None:
        _raise_on_all_ranks(None)  # a barrier: all ranks have finished sampling with the old weights
        weights, error, self.update_failed = iter(weights), None, True
        self._choose_receivers()
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                send(weights)
            except (ServerUnavailable, RequestRejected, RuntimeError, OSError) as caught:
                error = RuntimeError(f"{name}: {caught}")
                error.__cause__ = caught
        else:  # the servers resume with the new weights before this rank knows of it
            self.sent_version = self.version + 1
        for _ in weights:  # gathering is a collective, so every rank iterates to the end
            pass
        _raise_on_all_ranks(error)
        self.update_failed = self.asleep = False
        self.version = self.sent_version = self.version + 1
        for server in self.receivers:
            self.pool.readmit(server)

    def _send_weights(self, weights: Weights) -> None:
        group = self._connected_group()
        self._begin_update()
        try:
            send_weights(
                weights,
                group,
                lambda description: self.pool.start(self._announce_bucket(description)),
                bucket_bytes=self.bucket_bytes,
                timeout=self.pool.timeout,
            )
            self.sent_version = self.version + 1
            self._finish_update()
        except BaseException:
            group.close()  # a bucket may be on its way
            self.group = None
            self.pool.run(self._abort_update_everywhere())
            raise

    def _connected_group(self) -> TransferGroup:
        """The process group with the receivers. A new one is made if they have changed since the last call."""
        servers = self.receivers
        members = [(server, server.failure_count) for server in servers]
        if self.group is not None and members == self.group_members:
            return self.group
        self._claim()  # a restarted server has lost the claim
        addresses = sorted({local_address(urlsplit(server.url).hostname or "") for server in servers})
        address = next((a for a in addresses if not a.startswith("127.")), addresses[0])
        group = self.make_group(1 + sum(server.workers for server in servers), address)
        joining = self.pool.start(self._join_group(servers, group))
        connecting = in_daemon_thread(group.connect)
        done, _ = wait((joining, connecting), self.pool.timeout, FIRST_EXCEPTION)
        for future in done:
            future.result()
        if len(done) < 2:
            raise RuntimeError(f"servers: expected all to join within {self.pool.timeout:g} s, got no process group")
        self.group, self.group_members = group, members
        return group

    async def _join_group(self, servers: Sequence[Server], group: TransferGroup) -> None:
        joins, rank = [], 1
        for server in servers:
            joins.append(self.pool.request(server, "POST", self.join_path, self._join_body(group.join_info(rank))))
            rank += server.workers
        await asyncio.gather(*joins)

    def _join_body(self, join_info: dict[str, Any]) -> dict[str, Any]:
        return join_info

    async def _abort_update_everywhere(self) -> None:
        await asyncio.gather(*(self._abort_update(server) for server in self.receivers))

    def _post_all(self, path: str, body: dict[str, Any] | bytes | None = None) -> list[Any]:
        return self.pool.run(self.pool.request_all(self.receivers, "POST", path, body))

    def _post_from_rank_0(self, path: str, body: dict[str, Any] | None = None) -> None:
        """Post to all available servers, from rank 0 only. Servers that no longer respond are excluded."""
        _raise_on_all_ranks(None)
        error: Exception | None = None
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                self.pool.run(self._post_or_exclude(path, body))
            except (ServerUnavailable, RequestRejected, RuntimeError) as caught:
                error = caught
        _raise_on_all_ranks(error)

    async def _post_or_exclude(self, path: str, body: dict[str, Any] | None) -> None:
        async def post(server: Server) -> None:
            try:
                await self.pool.request(server, "POST", path, body)
            except ServerUnavailable:
                if await self.pool.check_health(server):
                    raise

        await asyncio.gather(*(post(server) for server in self.pool.available))

    def close(self) -> None:
        """Disconnect from the servers. They continue to run."""
        if self.group is not None:
            self.group.close()
            self.group = None
        release_servers([server.url for server in self.pool.servers])
        self.pool.close()

    # --- servers

    def _choose_receivers(self) -> None:
        """Choose the servers of a weight update: all that respond to rank 0, also those that were excluded before.

        Until the update has succeeded, all ranks exclude every server that rank 0 excludes.
        """
        responds = torch.zeros(len(self.pool.servers), dtype=torch.bool)
        available = torch.zeros(len(self.pool.servers), dtype=torch.bool)
        if not dist.is_initialized() or dist.get_rank() == 0:
            responds = torch.tensor(self.pool.run(self._check_all()))
            available = torch.tensor([not server.failure for server in self.pool.servers])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(responds, 0)
            dist.broadcast(available, 0)
        for server, ok in zip(self.pool.servers, available.tolist(), strict=True):
            if not ok and not server.failure:
                self.pool.exclude(server, "rank 0 excluded it from a weight update")
        self.receivers = [server for server, ok in zip(self.pool.servers, responds.tolist(), strict=True) if ok]
        if not self.receivers:
            raise self.pool.none_responds()

    async def _check_all(self) -> list[bool]:
        """Whether each server responds. Those that do not, or that have lost their weights, are excluded."""

        async def check(server: Server) -> bool:
            if not await self.pool.check_health(server):
                return False
            if not server.failure:
                await self._check_weight_version(server)
            return True

        return await asyncio.gather(*(check(server) for server in self.pool.servers))

    async def _check_weight_version(self, server: Server) -> None:
        try:
            info = await self.pool.request(server, "GET", self.version_path)
        except (ServerUnavailable, RequestRejected) as error:
            self.pool.exclude(server, str(error))
            return
        version = version_number(info["weight_version"])
        if version not in (self.version, self.sent_version):  # the latter if the last update failed
            failure = f"expected weight version {self.version}, got {version}: was the server restarted?"
            self.pool.exclude(server, failure)

    async def _wait_until_up(self, timeout: float) -> None:
        async def wait_for(server: Server) -> None:
            try:
                await self.pool.wait_until_up(server, timeout)
            except ServerUnavailable as error:
                raise ValueError(
                    f"urls: expected a server at {server.url} within {timeout:g} s, got none: {error}. "
                    f"{self.start_hint}"
                ) from error

        await asyncio.gather(*(wait_for(server) for server in self.pool.servers))

    async def _handshake_all(self) -> list[tuple[int, int]]:
        return await asyncio.gather(*(self._handshake(server) for server in self.pool.servers))

    async def _sample_one_token(self, server: Server, path: str, body: dict[str, Any]) -> Any:
        """The response to a first request, for one token.

        Raises:
            ValueError: the server fails, or is one of another kind.
        """
        try:
            return await self.pool.request(server, "POST", path, body)
        except ServerUnavailable as error:
            raise ValueError(
                f"{server.url}: expected one sampled token, got {error}; see the output of the server"
            ) from error
        except RequestRejected as error:
            raise ValueError(
                f"{server.url}: expected a server that takes token ids, got {error}. {self.start_hint}"
            ) from error

    def _claim(self) -> None:
        """Claim the receivers on rank 0, which sends the weights."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            claim_servers([server.url for server in self.receivers])


def _raise_on_all_ranks(error: Exception | None) -> None:
    """A barrier that raises on all ranks if there is an error on any of them."""
    failed = torch.tensor(int(error is not None))
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(failed, dist.ReduceOp.MAX)
    if error is not None:
        raise error
    if failed:
        raise RuntimeError("rank 0: expected a reply from the servers, got an error; see the message of rank 0")


def version_number(weight_version: str) -> int:
    """A server's weight version as a number: how often weights were updated; 0 for those it loaded itself."""
    return int(weight_version) if weight_version.isdecimal() else 0
