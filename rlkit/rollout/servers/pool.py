"""A client for several HTTP servers, with load balancing, retries and failover.

Requests run on an event loop in a separate thread, so synchronous code can start them from any thread, also during a
weight transfer. Bodies are JSON or bytes; nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from rlkit.rollout.background import start_event_loop
from rlkit.rollout.servers.shared_load import SharedLoad
from rlkit.rollout.servers.token import server_token

T = TypeVar("T")
Json = Mapping[str, Any]
log = logging.getLogger(__name__)

RETRYABLE_STATUS = (408, 425, 429, 500, 502, 503, 504)
CONNECT_SECONDS = 10.0
POLL_SECONDS = 0.05  # interval for polling the load of other ranks, while all servers are full
KEEPALIVE_SECONDS = 2.0  # servers close idle connections after 5 s; a request at that moment would be lost


class ServerUnavailable(Exception):
    """A server could not be reached, did not respond in time, or failed; a retry, or another server, may help."""


class RequestRejected(ValueError):
    """A server understood a request and rejected it; a retry does not help."""


@dataclass(eq=False)
class Server:
    """One server.

    Attributes:
        url: URL without a path, e.g. http://127.0.0.1:8000.
        failure: why the server is excluded; empty while it is available.
        failure_count: how often the server has been excluded so far.
        workers: number of processes with a copy or a shard of the weights.
        dtype: name of the dtype that the server computes in; None if it does not say.
        device: type of the device that it computes on, "cpu" or "cuda"; None if it does not say.
        max_num_seqs: the most samples that it takes in one request; None if it does not say.
        v2_model_runner: whether it has vLLM's runner V2, which limits logit biases; True if it does not say.
        returns_routed_experts: whether the server can return the experts that its routers chose.
    """

    url: str
    failure: str = ""
    failure_count: int = 0
    workers: int = 1
    dtype: str | None = None
    device: str | None = None
    max_num_seqs: int | None = None
    v2_model_runner: bool = True
    returns_routed_experts: bool = False


class ServerPool:
    """Sends requests to several servers.

    Args:
        urls: one URL per server, or all in one string, separated by commas.
        max_sequences: limit of concurrent sequences per server, over all ranks. Further sequences wait in this client
            for the first server with room, so that long responses on one server do not leave the others idle.
        timeout: seconds to wait for a response.
        attempts: how often a job is tried, over all servers.
        backoff: seconds before the first retry of a job, doubled for each further retry.
        start_hint: how to start servers; part of the error when none is available.
        health_path: a path that a running server responds to, even while it is paused or asleep.
        store: a store shared by all ranks that use these servers, for sharing their load; None for one rank.
        rank_and_ranks: this process's rank, and the number of ranks. Ranks try the servers in a different order, so
            that ranks with few requests use different servers.

    Raises:
        ValueError: malformed or repeated URLs, or a limit below 1.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        max_sequences: int = 256,
        timeout: float = 1800.0,
        attempts: int = 4,
        backoff: float = 0.5,
        start_hint: str = "",
        health_path: str = "/health",
        store: dist.Store | None = None,
        rank_and_ranks: tuple[int, int] = (0, 1),
    ) -> None:
        names = [url.strip().rstrip("/") for url in (urls.split(",") if isinstance(urls, str) else urls)]
        if not names or not all(name.startswith(("http://", "https://")) for name in names):
            raise ValueError(f"urls: expected http://host:port of each server, got {urls!r}")
        if len(set(names)) != len(names):
            raise ValueError(f"urls: expected each server once, got {urls!r}")
        if max_sequences < 1 or attempts < 1:
            raise ValueError(f"max_sequences, attempts: expected at least 1, got {max_sequences} and {attempts}")
        self.servers = [Server(name) for name in names]
        self.max_sequences, self.timeout, self.attempts, self.backoff = max_sequences, timeout, attempts, backoff
        self.start_hint, self.health_path = start_hint, health_path
        rank, ranks = rank_and_ranks
        first = rank * len(self.servers) // ranks
        self.in_turn = self.servers[first:] + self.servers[:first]
        self.load = SharedLoad(names, store)
        self._loop, self.thread = start_event_loop("rlkit-servers")
        self._sequences_finished, self._session = self.run(self._open_session())
        self.close = weakref.finalize(self, _close, self._loop, self.thread, self._session)

    @staticmethod
    async def _open_session() -> tuple[asyncio.Condition, Any]:
        import aiohttp

        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
        return asyncio.Condition(), aiohttp.ClientSession(connector=connector)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop, and wait for its result."""
        return self.wait(self.start(work))

    def wait(self, future: Future[T]) -> T:
        """Wait for the result of a started coroutine, and cancel it when interrupted."""
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def available(self) -> list[Server]:
        """The servers that are not excluded.

        Raises:
            RuntimeError: all are.
        """
        if available := [server for server in self.servers if not server.failure]:
            return available
        raise self.none_responds()

    def none_responds(self) -> RuntimeError:
        """The error if all servers are excluded."""
        failures = "; ".join(f"{server.url}: {server.failure}" for server in self.servers)
        message = f"servers: expected at least one that responds, got none ({failures}). {self.start_hint}"
        return RuntimeError(message.strip())

    def exclude(self, server: Server, failure: str) -> None:
        """Send no more jobs to a server."""
        if not server.failure:
            log.warning("%s is excluded: %s", server.url, failure)
            server.failure_count += 1
        server.failure = failure

    def readmit(self, server: Server) -> None:
        """Send jobs to a server again. An excluded one may have missed weights, so it has to receive them before."""
        if server.failure:
            log.warning("%s is available again", server.url)
            server.failure = ""

    async def request(
        self, server: Server, method: str, path: str, body: Json | bytes | None = None, *, timeout: float | None = None
    ) -> Any:
        """Send one HTTP request, and return the body of the response, decoded if it is JSON.

        Raises:
            ServerUnavailable, RequestRejected: see there; the message names the server.
        """
        import aiohttp

        seconds = self.timeout if timeout is None else timeout
        limits = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        content: dict[str, Any] = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
        if token := server_token(server.url):
            content["headers"] = {"Authorization": f"Bearer {token}"}
        try:
            async with self._session.request(method, server.url + path, **content, timeout=limits) as response:
                if response.status != 200:
                    message = _error_message(await response.text())
                    response.close()  # a server may close the connection after an error, and lose the next request
                    error = f"{server.url}{path}: expected status 200, got {response.status}: {message}"
                    raise (ServerUnavailable if response.status in RETRYABLE_STATUS else RequestRejected)(error)
                return await (response.json() if response.content_type == "application/json" else response.text())
        except aiohttp.ConnectionTimeoutError as error:
            raise ServerUnavailable(
                f"{server.url}{path}: expected a connection within {CONNECT_SECONDS:g} s, got none"
            ) from error
        except TimeoutError as error:
            raise ServerUnavailable(
                f"{server.url}{path}: expected a response within {seconds:g} s, got none"
            ) from error
        except RequestRejected:
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ServerUnavailable(f"{server.url}{path}: {error or type(error).__name__}") from error

    async def request_all(
        self, servers: Iterable[Server], method: str, path: str, body: Json | bytes | None = None
    ) -> list[Any]:
        """Send the same request to these servers at once; the first error is raised."""
        return await asyncio.gather(*(self.request(server, method, path, body) for server in servers))

    async def check_health(self, server: Server) -> bool:
        """Whether a server responds. One that does not is excluded from now on."""
        try:
            await self.request(server, "GET", self.health_path, timeout=10)
        except (ServerUnavailable, RequestRejected) as error:
            self.exclude(server, str(error))
            return False
        return True

    async def wait_until_up(self, server: Server, timeout: float) -> None:
        """Wait until a server responds.

        Raises:
            ServerUnavailable: it does not.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            try:
                await self.request(server, "GET", self.health_path, timeout=10)
                return
            except (ServerUnavailable, RequestRejected) as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise ServerUnavailable(str(error)) from error
            await asyncio.sleep(0.2)

    async def run_jobs(
        self,
        jobs: Sequence[T],
        sequences: Callable[[T], int],
        attempt: Callable[[Server, T], Coroutine[Any, Any, Any]],
    ) -> list[Any]:
        """Distribute jobs over the available servers.

        Args:
            sequences: how many sequences a job generates.
            attempt: sends a job to a server. If it raises `ServerUnavailable`, the job is retried, preferably on
                another server. Any other exception cancels all jobs.

        Returns:
            Results in the order of the jobs, each from exactly one successful attempt.
        """
        tasks = [asyncio.ensure_future(self._run_job(job, sequences(job), attempt)) for job in jobs]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_job(self, job: T, size: int, attempt: Callable[[Server, T], Coroutine[Any, Any, Any]]) -> Any:
        failed_on: Server | None = None
        for i in range(self.attempts):
            server = await self._acquire_least_loaded(size, failed_on)
            try:
                return await attempt(server, job)
            except ServerUnavailable as error:
                failure, failed_on = str(error), server
            finally:
                async with self._sequences_finished:
                    self.load.add(server.url, -size)
                    self._sequences_finished.notify_all()
            if await self.check_health(server) and not server.failure:
                log.warning("%s; attempt %d of %d", failure, i + 1, self.attempts)
                await asyncio.sleep(self.backoff * 2**i)
        message = f"servers: expected a response within {self.attempts} attempts, got none; the last: {failure}."
        raise RuntimeError(f"{message} {self.start_hint}".strip())

    async def _acquire_least_loaded(self, size: int, failed_on: Server | None) -> Server:
        """Wait for a server with room for `size` sequences and reserve it: the least loaded one, `failed_on` last."""
        async with self._sequences_finished:
            while True:
                load, available = self.load.read(), self.available
                with_room = [
                    server
                    for server in self.in_turn
                    if server in available and (load[server.url] <= 0 or load[server.url] + size <= self.max_sequences)
                ]
                if with_room:
                    server = min(with_room, key=lambda server: (server is failed_on, load[server.url]))
                    if self.load.reserve(server.url, size, load[server.url]):
                        return server
                    continue
                waiting = self._sequences_finished.wait()
                try:
                    await asyncio.wait_for(waiting, POLL_SECONDS if self.load.is_shared else None)
                except TimeoutError:
                    pass  # sequences of other ranks may have finished


def _error_message(body: str) -> str:
    """The message in the body of an error response, in one line."""
    try:
        content = json.loads(body)
        content = content.get("error", content.get("detail", content))
        content = content.get("message", content) if isinstance(content, dict) else content
    except (ValueError, AttributeError):
        content = body
    return " ".join(str(content).split())[:500]


def _close(loop: asyncio.AbstractEventLoop, thread: threading.Thread, session: Any) -> None:
    asyncio.run_coroutine_threadsafe(session.close(), loop).result(5)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()  # later requests raise instead of waiting for ever
