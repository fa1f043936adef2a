"""Ensures that only one trainer uses a server. A trainer claims the server, and the claim of a second one is refused.

A claim is an HTTP request whose response never ends, so the connection stays open while the trainer's process lives.
When the process ends, for whatever reason, the kernel closes the connection, and the server is free. A stopped process
keeps its claim. If a machine is switched off, TCP tells the server within half an hour.

Servers started by `rlkit.rollout.serve` have `ClaimMiddleware`. Other servers lack the route, and are not protected.
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
SECONDS_BETWEEN_BYTES = 60.0  # without traffic, TCP would not notice that the other machine is gone
SECRET = secrets.token_hex(16)
_held: dict[str, http.client.HTTPConnection] = {}
os.register_at_fork(after_in_child=_held.clear)  # a forked child must not keep the claims after this process ends


def claim_servers(urls: Sequence[str], purpose: str = "") -> None:
    """Claim servers for this process, until it ends or releases them. Existing claims of this process stay.

    Servers that cannot be reached or do not support claims are left out.

    Args:
        purpose: what the servers are used for; another trainer sees it in its error message.

    Raises:
        RequestRejected: another process has claimed one of the servers, or a server rejects the token.
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
                raise RequestRejected(f"servers: {url}: {_reason(response.read(4096))}")
        except (OSError, http.client.HTTPException):
            continue
        if response.status == 200:
            _held[url] = connection


def _reason(body: bytes) -> str:
    """The error in a server's response; a proxy's page is shown as it is."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip()[:200]


def release_servers(urls: Sequence[str]) -> None:
    """Release the claims on these servers. The end of this process releases them, too."""
    for url in urls:
        if connection := _held.pop(url, None):
            connection.close()


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=10)


def _is_open(connection: http.client.HTTPConnection) -> bool:
    """Whether the connection is still open. Keep-alive bytes from the server are discarded."""
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
    """ASGI middleware of a vLLM server. POST /rlkit/claim with `id` and `owner` claims the server while it is open.

    A request with another id gets status 409 and the name of the owner. The holder itself may claim again.
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
        self.claims += 1  # the holder may reconnect before its old connection is known to be closed
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
            await self._until_closed(getattr(scope["app"].state, "server", None), receive, send)
        finally:
            self.claims -= 1

    async def _until_closed(self, server: Any, receive: Any, send: Any) -> None:
        """Send a byte every minute until the client closes the connection or the server shuts down."""
        closed = asyncio.ensure_future(receive())  # the body was read, so the next message is the disconnect
        loop = asyncio.get_running_loop()
        next_byte = 0.0
        while not closed.done() and not getattr(server, "should_exit", False):
            if loop.time() >= next_byte:
                await send({"type": "http.response.body", "body": b"\n", "more_body": True})
                next_byte = loop.time() + SECONDS_BETWEEN_BYTES
            await asyncio.wait({closed}, timeout=1.0)
        closed.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
