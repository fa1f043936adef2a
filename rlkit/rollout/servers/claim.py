"""One trainer for a server: who sends it weights claims it first, and a second trainer is refused.

A claim is an HTTP request that the server answers at once and never ends: the connection stays open for as long as the
trainer's process lives. However that ends, the kernel closes the connection, and the server is free. A process that is
stopped keeps its claim. Of a machine that is switched off, the server learns within half an hour, from TCP.

Servers that `rlkit.rollout.serve` starts have `ClaimMiddleware`. Others have no such route, and are not protected.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from rlkit.rollout.servers.pool import RequestRejected
from rlkit.rollout.servers.token import server_token

CLAIM_ROUTE = "/rlkit/claim"
SECONDS_BETWEEN_BYTES = 60.0  # without any, nothing would tell the server that a machine is gone
SECRET = secrets.token_hex(16)
_held: dict[str, http.client.HTTPConnection] = {}
os.register_at_fork(after_in_child=_held.clear)  # a child that outlives this process would keep its servers


def claim_servers(urls: Sequence[str], purpose: str = "") -> None:
    """Claim servers for this process, until it ends or releases them. A server that it has already stays claimed.

    Servers that cannot be reached, or take no claims, are left out.

    Args:
        purpose: what they are used for, in the message for another trainer.

    Raises:
        RequestRejected: another process has one of the servers, or the token for one is not known.
    """
    owner = f"{purpose + ', ' if purpose else ''}process {os.getpid()} on {socket.gethostname()}"
    for url in urls:
        if url in _held and _is_open(_held[url]):
            continue
        connection = _connect(url)
        body = json.dumps({"id": f"{SECRET}-{os.getpid()}", "owner": owner})
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server_token(url)}"}
        try:
            connection.request("POST", CLAIM_ROUTE, body, headers)
            response = connection.getresponse()
            if response.status in (401, 409):
                raise RequestRejected(f"servers: {url}: {json.loads(response.read(4096))['error']}")
        except (OSError, http.client.HTTPException):
            continue
        if response.status == 200:
            _held[url] = connection


def release_servers(urls: Sequence[str]) -> None:
    """Let another trainer claim these servers; the end of this process does the same."""
    for url in urls:
        if connection := _held.pop(url, None):
            connection.close()


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=10)


def _is_open(connection: http.client.HTTPConnection) -> bool:
    """Whether the server still holds the connection; what it has sent to keep it open is thrown away."""
    try:
        connection.sock.setblocking(False)
        while connection.sock.recv(4096):
            pass
    except BlockingIOError:
        return True
    except (OSError, AttributeError):
        pass
    return False


class ClaimMiddleware:
    """ASGI middleware of a vLLM server: POST /rlkit/claim with `id` and `owner` claims it for as long as it is open.

    Another id is refused with status 409, and told the owner. The same id again takes its own place.
    """

    def __init__(self, app: Any) -> None:
        self.app, self.holder, self.claims = app, {"id": "", "owner": ""}, 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope.get("path", "") != CLAIM_ROUTE or scope["type"] != "http":
            return await self.app(scope, receive, send)
        from starlette.requests import Request
        from starlette.responses import JSONResponse

        claim = await Request(scope, receive).json()
        if self.claims and self.holder["id"] != claim["id"]:
            taken = f"expected a server that no other trainer uses, got one that is taken by {self.holder['owner']}"
            return await JSONResponse({"error": taken}, 409)(scope, receive, send)
        self.holder = {"id": claim["id"], "owner": str(claim["owner"])[:500]}
        self.claims += 1  # connections of the holder: a second one may come before the end of the first is known
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
            await self._until_closed(getattr(scope["app"].state, "server", None), receive, send)
        finally:
            self.claims -= 1

    async def _until_closed(self, server: Any, receive: Any, send: Any) -> None:
        """Send a byte now and then until the client closes the connection, or the server is told to end."""
        closed = asyncio.ensure_future(receive())  # the body was read: what comes next is the end
        loop = asyncio.get_running_loop()
        next_byte = 0.0
        while not closed.done() and not getattr(server, "should_exit", False):
            if loop.time() >= next_byte:
                await send({"type": "http.response.body", "body": b"\n", "more_body": True})
                next_byte = loop.time() + SECONDS_BETWEEN_BYTES
            await asyncio.wait({closed}, timeout=1.0)
        closed.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
