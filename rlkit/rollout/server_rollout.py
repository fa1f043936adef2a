"""What samplers on servers have in common, whatever the servers speak: sharing out, and sending weights."""

from __future__ import annotations

import asyncio
import base64
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from rlkit.data.samples import Sample
from rlkit.rollout.sampling import Sampling, Written, end_tokens, of_each, where
from rlkit.rollout.servers import Lost, Refused, Server, Servers
from rlkit.rollout.threads import in_thread
from rlkit.rollout.vllm_inputs import check_context, finished
from rlkit.rollout.weight_transfer import Group, local_address, send_weights
from rlkit.vlm.loading import load_config
from rlkit.vlm.processors import suppressed_token_ids


@dataclass
class Job:
    """Some of the answers to one request; `first` is the number of the first of them among its group's."""

    request: Sample
    first: int
    count: int
    body: dict[str, Any]

    @property
    def where(self) -> str:
        return where(self.request)


class ServerRollout(ABC):
    """A sampler on servers; a subclass says how they are spoken to.

    Args:
        model: directory or hub id that trainer and servers were given; the last part of its name must agree.
        processor: the trainer's, to decode.
        urls: of the servers; a list, or one string with commas.
        max_sequences: most sequences that one server writes at once; what is more waits here.
        timeout: seconds until a request, or a bucket of weights, is given up.
        connect_timeout: seconds to wait for the servers to come up.
        transfer: "nccl" or "gloo", as the servers can; by default nccl where the trainer has a GPU.
        bucket_bytes: most that is gathered and not yet sent.

    Raises:
        ValueError: a server that cannot be reached, of another version, with another model, or that cannot do what
            training needs.
    """

    groups: ClassVar[dict[str, Callable[[int, str], Group]]]
    join: ClassVar[str]
    advice: ClassVar[str]
    alive: ClassVar[str] = "/health"

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
        trust_remote_code: bool = False,
    ) -> None:
        transfer = transfer or ("nccl" if torch.cuda.is_available() else "gloo")
        if transfer not in self.groups:
            raise ValueError(f"transfer: one of {', '.join(self.groups)} expected, came {transfer!r}")
        self.make_group, self.bucket_bytes, self.model, self.processor = (
            self.groups[transfer], bucket_bytes, model, processor,
        )  # fmt: skip
        self.config = load_config(model, trust_remote_code=trust_remote_code)
        tokenizer = getattr(processor, "tokenizer", processor)
        self.unsampled = suppressed_token_ids(self.config, tokenizer).tolist()
        self.ends = end_tokens(tokenizer, _eos_of(model))
        self.group: Group | None = None
        self.members: list[tuple[Server, int]] = []
        self.asleep = self.torn = False
        self.servers = Servers(urls, max_sequences=max_sequences, timeout=timeout, advice=self.advice, alive=self.alive)
        met = self.servers.run(self._meet_all(connect_timeout))
        self.max_model_len = min(length for length, _ in met)
        self.version = self.coming = max(version for _, version in met)

    # --- what a subclass says

    @abstractmethod
    def _body(self, request: Sample, sampling: Sampling, start: int, count: int) -> dict[str, Any]:
        """What a server is asked for `count` answers, of which the first is number `start` of this call."""

    @abstractmethod
    async def _attempt(self, server: Server, job: Job) -> list[Sample]:
        """Ask one server, once."""

    @abstractmethod
    async def _meet(self, server: Server) -> tuple[int, int]:
        """See whether a server that is up will do: its longest sequence, and the version of its weights."""

    @abstractmethod
    def _begin(self) -> None:
        """Have the servers stop writing and make ready for weights."""

    @abstractmethod
    async def _announce(self, description: dict[str, list[Any]]) -> None:
        """Tell the servers what comes next."""

    @abstractmethod
    def _end(self) -> None:
        """Have the servers use weights of version `self.coming`, forget what they computed with others, and go on."""

    @abstractmethod
    async def _give_up(self, server: Server) -> None:
        """End an update that failed, so that the next one may begin; the server stays paused."""

    # --- generation

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

        Raises:
            ValueError: a prompt that leaves no room for an answer, that the server expands otherwise than the trainer,
                or that it refuses.
            RuntimeError: no server is left, one has other weights, or all attempts failed.
        """
        return self.servers.wait(self.submit(requests, sampling, n, written=written))

    def submit(
        self,
        requests: Sequence[Sample],
        sampling: Sampling | Sequence[Sampling],
        n: int = 1,
        *,
        written: Written | None = None,
    ) -> Future[list[Sample]]:
        """`generate`, without waiting for it; cancelled, the servers are told to stop."""
        if self.torn:
            raise RuntimeError("the last update_weights failed and the servers wait; call it again first")
        how = of_each(sampling, requests)
        check_context(requests, how, self.max_model_len)
        most = self.servers.max_sequences
        jobs = [
            Job(request, request.number * n + start, count, self._body(request, sampling, start, count))
            for request, sampling in zip(requests, how, strict=True)
            for start in range(0, n, most)
            for count in [min(most, n - start)]
        ]
        return self.servers.start(self._answers(jobs, n, written))

    async def _answers(self, jobs: Sequence[Job], n: int, written: Written | None) -> list[Sample]:
        each = len(range(0, n, self.servers.max_sequences))  # jobs of one request, next to each other
        numbers, came = {id(job): k for k, job in enumerate(jobs)}, {}

        async def attempt(server: Server, job: Job) -> list[Sample]:
            k = numbers[id(job)]
            came[k] = await self._attempt(server, job)
            group = range(k // each * each, k // each * each + each)
            if written is not None and came.keys() >= set(group):
                written(k // each, [sample for other in group for sample in came[other]])
            return came[k]

        parts = await self.servers.share(jobs, lambda job: job.count, attempt)
        return [sample for part in parts for sample in part]

    async def _ask(self, server: Server, path: str, job: Job) -> Any:
        try:
            return await self.servers.ask(server, "POST", path, job.body)
        except Refused as error:
            raise ValueError(f"{job.where}: {error}") from error

    def _sample(
        self, server: Server, job: Job, i: int, ids: list[int], logprobs: list[float], reason: str, versions: list[int]
    ) -> Sample:
        """Answer number i of a job."""
        versions = [*job.request.versions, *versions]
        request = replace(job.request, number=job.first + i, versions=versions)
        version = min(versions, default=self.version)
        return finished(request, ids, logprobs, reason, processor=self.processor, version=version)

    def _check_versions(self, server: Server, oldest: int, versions: Iterable[int]) -> None:
        """Raise a RuntimeError unless an answer is by the weights that a server has been given."""
        came = sorted(set(versions))
        if not came or not oldest <= came[0] <= came[-1] <= self.coming:
            raise RuntimeError(
                f"{server.url}: an answer by weights of version {came}, {oldest} expected: was the server started "
                "again, or does another run send it weights?"
            )

    # --- weights

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send (HF name, whole tensor) of every parameter to all servers; all ranks iterate together, rank 0 sends.

        Requests in flight stop where they are and go on with the new weights; what was computed with the old ones goes.
        A server that came up again is taken back.

        Raises:
            RuntimeError: the weights did not arrive everywhere. The servers wait then; call it again.
        """
        self._hand_over("update_weights", weights, self._send)

    def _hand_over(
        self, name: str, weights: Iterable[tuple[str, Tensor]], send: Callable[[Iterable[tuple[str, Tensor]]], None]
    ) -> None:
        agree(None)  # all ranks have sampled what they want to sample with the old weights
        weights, error, self.torn = iter(weights), None, True
        if sends := not dist.is_initialized() or dist.get_rank() == 0:
            try:
                send(weights)
            except (Lost, Refused, RuntimeError, OSError) as caught:
                error = RuntimeError(f"{name}: {caught}")
                error.__cause__ = caught
        for _ in weights:  # gathering is collective: no rank may stop before the others
            pass
        agree(error)
        if not sends:
            self.servers.run(self._look_round())
        self.torn = self.asleep = False
        self.version = self.coming = self.version + 1

    def _send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.servers.run(self._look_round())
        group = self._group()
        self._begin()
        try:
            send_weights(
                weights,
                group,
                lambda description: self.servers.start(self._announce(description)),
                bucket_bytes=self.bucket_bytes,
                timeout=self.servers.timeout,
            )
            self.coming = self.version + 1
            self._end()
        except BaseException:
            self.group = None
            self.servers.run(self._give_up_all())
            raise

    def _group(self) -> Group:
        """The process group with the live servers; another one if others are alive than last time."""
        live = self.servers.live
        members = [(server, server.losses) for server in live]
        if self.group is not None and members == self.members:
            return self.group
        here = sorted({local_address(urlsplit(server.url).hostname or "") for server in live})
        address = next((a for a in here if not a.startswith("127.")), here[0])
        group = self.make_group(1 + sum(server.workers for server in live), address)
        joining = self.servers.start(self._invite(live, group))
        opening = in_thread(group.open)
        done, _ = wait((joining, opening), self.servers.timeout, FIRST_EXCEPTION)
        for future in done:
            future.result()
        if len(done) < 2:
            raise RuntimeError(f"the servers did not join the process group within {self.servers.timeout:g} s")
        self.group, self.members = group, members
        return group

    async def _invite(self, live: Sequence[Server], group: Group) -> None:
        asking, rank = [], 1
        for server in live:
            asking.append(self.servers.ask(server, "POST", self.join, self._invitation(group.invitation(rank))))
            rank += server.workers
        await asyncio.gather(*asking)

    def _invitation(self, invitation: dict[str, Any]) -> dict[str, Any]:
        return invitation

    async def _give_up_all(self) -> None:
        await asyncio.gather(*(self._give_up(server) for server in self.servers.all if not server.fault))

    def _post(self, path: str, body: dict[str, Any] | bytes | None = None) -> list[Any]:
        return self.servers.run(self.servers.ask_all("POST", path, body))

    def _tell(self, path: str, body: dict[str, Any] | None = None) -> None:
        """Tell all servers, from one rank; one that has gone meanwhile is left out."""
        agree(None)
        error: Exception | None = None
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                self.servers.run(self._tell_all(path, body))
            except (Lost, Refused, RuntimeError) as caught:
                error = caught
        agree(error)

    async def _tell_all(self, path: str, body: dict[str, Any] | None) -> None:
        async def tell(server: Server) -> None:
            try:
                await self.servers.ask(server, "POST", path, body)
            except Lost:
                if await self.servers.healthy(server):
                    raise

        await asyncio.gather(*(tell(server) for server in self.servers.live))

    def close(self) -> None:
        """Leave the servers, which go on running."""
        if self.group is not None:
            self.group.close()
            self.group = None
        self.servers.close()

    # --- servers

    async def _look_round(self) -> None:
        await asyncio.gather(*(self.servers.healthy(server) for server in self.servers.all))

    async def _meet_all(self, timeout: float) -> list[tuple[int, int]]:
        async def meet(server: Server) -> tuple[int, int]:
            try:
                await self.servers.wait_for(server, timeout)
            except Lost as error:
                raise ValueError(f"no server at {server.url} after {timeout:g} s: {error}. {self.advice}") from error
            return await self._meet(server)

        return await asyncio.gather(*(meet(server) for server in self.servers.all))


def agree(error: Exception | None) -> None:
    """Wait for all ranks; an error on one is an error on all."""
    failed = torch.tensor(int(error is not None))
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(failed, dist.ReduceOp.MAX)
    if error is not None:
        raise error
    if failed:
        raise RuntimeError("rank 0 could not reach the servers; its own message says why")


def number(weight_version: str) -> int:
    """How often a server's weights had been updated; those that it loaded itself count as never."""
    return int(weight_version) if weight_version.isdecimal() else 0


def data_url(image: Any, name: str) -> str:
    """An image as PNG, pixel for pixel.

    Raises:
        ValueError: it is none; `name` says whose.
    """
    buffer = io.BytesIO()
    try:
        image.save(buffer, "PNG", compress_level=1)
    except (AttributeError, OSError, ValueError) as error:
        raise ValueError(f"{name}: an image that cannot be sent: {error}") from error
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _eos_of(model: str) -> Any:
    """End tokens of the model's generation config, if it has one."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        return None
