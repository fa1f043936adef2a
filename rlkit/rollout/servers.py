"""Several HTTP servers behind one door: least loaded first, retries, and a server that died is left out and named.

All of it runs on an event loop in a thread of its own, so that callers stay plain functions, from any thread, also
while weights are on their way. Bodies are JSON; nothing that comes back is unpickled.
"""

from __future__ import annotations

import asyncio
import io
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Json = Mapping[str, Any]
log = logging.getLogger(__name__)

TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
IDLE = 2.0  # seconds after which a connection is not used again: servers hang up after 5, and would lose a request


class Lost(Exception):
    """A server could not be reached, did not answer in time, or failed; asking again, or another one, may help."""


class Refused(ValueError):
    """A server understood the question and says no: asking again is no use."""


@dataclass(eq=False)
class Server:
    """One server.

    Attributes:
        url: without a path, e.g. http://127.0.0.1:8000.
        load: sequences that it is writing for us.
        fault: why it is left out; empty while it is not.
        losses: how often it has been left out so far.
        workers: processes that hold a copy or a part of the weights.
    """

    url: str
    load: int = 0
    fault: str = ""
    losses: int = 0
    workers: int = 1


class Servers:
    """Questions to servers.

    Args:
        urls: one for each server, or all in one string, separated by commas.
        max_sequences: most sequences that one server writes at once; what is more waits here.
        timeout: seconds until an answer is given up.
        attempts: how often one job is tried, on whichever servers.
        backoff: seconds before a job is tried again, doubled each time.
        advice: what to do when no server is left, for the error.
        alive: a path that a server answers as long as it runs, also while it is paused or asleep.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        max_sequences: int = 256,
        timeout: float = 1800.0,
        attempts: int = 4,
        backoff: float = 0.5,
        advice: str = "",
        alive: str = "/health",
    ) -> None:
        names = [url.strip().rstrip("/") for url in (urls.split(",") if isinstance(urls, str) else urls)]
        if not names or not all(name.startswith(("http://", "https://")) for name in names):
            raise ValueError(f"urls: http://host:port of each server expected, came {urls!r}")
        if len(set(names)) != len(names):
            raise ValueError(f"urls: each server once, came {urls!r}")
        if max_sequences < 1 or attempts < 1:
            raise ValueError(f"max_sequences, attempts: at least 1 expected, came {max_sequences} and {attempts}")
        self.all = [Server(name) for name in names]
        self.max_sequences, self.timeout, self.attempts, self.backoff = max_sequences, timeout, attempts, backoff
        self.advice, self.alive = advice, alive
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="rlkit-servers", daemon=True)
        thread.start()
        self._freed, self._session = self.run(self._open())
        self.close = weakref.finalize(self, _close, self._loop, thread, self._session)

    @staticmethod
    async def _open() -> tuple[asyncio.Condition, Any]:
        import aiohttp

        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE)
        return asyncio.Condition(), aiohttp.ClientSession(connector=connector)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin some work on the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do some work on the event loop, and wait for it."""
        return self.wait(self.start(work))

    def wait(self, future: Future[T]) -> T:
        """The result of work that was begun; interrupted, it is called off."""
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def live(self) -> list[Server]:
        """The servers that are not left out.

        Raises:
            RuntimeError: there is none.
        """
        if live := [server for server in self.all if not server.fault]:
            return live
        faults = "; ".join(f"{server.url}: {server.fault}" for server in self.all)
        raise RuntimeError(f"no server is left ({faults}). {self.advice}".strip())

    async def ask(
        self, server: Server, method: str, path: str, body: Json | bytes | None = None, *, timeout: float | None = None
    ) -> Any:
        """One question, of JSON or bytes, and its answer, decoded if it is JSON.

        Raises:
            Lost, Refused: see there; the message names the server.
        """
        import aiohttp

        limit = aiohttp.ClientTimeout(total=self.timeout if timeout is None else timeout, sock_connect=10)
        try:
            said = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
            async with self._session.request(method, server.url + path, **said, timeout=limit) as response:
                if response.status != 200:
                    told = f"{server.url}{path} answered {response.status}: {_message(await response.text())}"
                    response.close()  # a server may hang up after an error, and would lose the next request
                    raise Lost(told) if response.status in TRANSIENT else Refused(told)
                return await (response.json() if response.content_type == "application/json" else response.text())
        except TimeoutError as error:
            raise Lost(f"{server.url}{path} did not answer within {limit.total:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, Refused):
                raise
            raise Lost(f"{server.url}{path}: {error or type(error).__name__}") from error

    async def ask_all(
        self, method: str, path: str, body: Json | bytes | None = None, *, timeout: float | None = None
    ) -> Any:
        """The same question to all live servers at once, and their answers; the first that fails raises."""
        return await asyncio.gather(*(self.ask(server, method, path, body, timeout=timeout) for server in self.live))

    async def healthy(self, server: Server) -> bool:
        """Whether a server answers; one that does not is left out from now on, one that does is taken back."""
        try:
            await self.ask(server, "GET", self.alive, timeout=10)
        except (Lost, Refused) as error:
            if not server.fault:
                log.warning("%s is left out: %s", server.url, error)
                server.losses += 1
            server.fault = str(error)
        else:
            if server.fault:
                log.warning("%s is back", server.url)
            server.fault = ""
        return not server.fault

    async def wait_for(self, server: Server, timeout: float) -> None:
        """Wait until a server is up.

        Raises:
            Lost: it is not.
        """
        end = asyncio.get_running_loop().time() + timeout
        while True:
            try:
                await self.ask(server, "GET", self.alive, timeout=10)
                return
            except (Lost, Refused) as error:
                if asyncio.get_running_loop().time() > end:
                    raise Lost(str(error)) from error
            await asyncio.sleep(0.2)

    async def share(
        self, jobs: Sequence[T], size: Callable[[T], int], do: Callable[[Server, T], Coroutine[Any, Any, Any]]
    ) -> list[Any]:
        """Share jobs among the live servers; results in the order of the jobs, each of exactly one attempt.

        Args:
            size: sequences that a job is.
            do: one attempt; `Lost` has the job done again, on another server if there is one. Anything else that it
                raises calls off all jobs.
        """
        tasks = [asyncio.ensure_future(self._do(job, size(job), do)) for job in jobs]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _do(self, job: T, size: int, do: Callable[[Server, T], Coroutine[Any, Any, Any]]) -> Any:
        last: Server | None = None
        for attempt in range(self.attempts):
            server = await self._least_loaded(size, last)
            try:
                return await do(server, job)
            except Lost as error:
                fault, last = str(error), server
            finally:
                async with self._freed:
                    server.load -= size
                    self._freed.notify_all()
            if await self.healthy(server):
                log.warning("%s; attempt %d of %d", fault, attempt + 1, self.attempts)
                await asyncio.sleep(self.backoff * 2**attempt)
        raise RuntimeError(f"given up after {self.attempts} attempts; the last: {fault}. {self.advice}".strip())

    async def _least_loaded(self, size: int, failed: Server | None) -> Server:
        """Wait for a server with room, rather not the one that has just failed, and take the room."""
        async with self._freed:
            while True:
                room = [s for s in self.live if not s.load or s.load + size <= self.max_sequences]
                if room:
                    server = min(room, key=lambda s: (s is failed, s.load))
                    server.load += size
                    return server
                await self._freed.wait()


def _message(text: str) -> str:
    """What an error answer says, in a line."""
    import json

    try:
        found = json.loads(text)
        found = found.get("error", found.get("detail", found))
        found = found.get("message", found) if isinstance(found, dict) else found
    except (ValueError, AttributeError):
        found = text
    return " ".join(str(found).split())[:500]


def _close(loop: asyncio.AbstractEventLoop, thread: threading.Thread, session: Any) -> None:
    asyncio.run_coroutine_threadsafe(session.close(), loop).result(5)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()  # what is asked after this raises instead of waiting
