"""Access tokens of servers.

`rlkit.rollout.serve` creates a token, stores it in a file that only its user can read, and starts each server with
`TokenMiddleware`. Clients of the same user on the same machine read the file. For other clients, set RLKIT_SERVER_TOKEN
for server and client before the server is started.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlkit.rollout.adapters import ADAPTER_ROUTE
from rlkit.vlm.pretrained import cache_directory
from rlkit.vlm.videos import MAX_PIXELS

TOKEN_VARIABLE = "RLKIT_SERVER_TOKEN"
OPEN_ROUTE = "/health"
# limit of a request's size: a prompt with the largest video that is read, 4 characters of base64 per pixel, or images
MOST_BYTES = 4 * MAX_PIXELS + (256 << 20)
MOST_ADAPTER_BYTES = 8 << 30
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def server_token(url: str) -> str:
    """The token for a server, from the environment or else from the server's token file; "" if there is none."""
    if token := os.environ.get(TOKEN_VARIABLE, ""):
        return token
    host, port = urlsplit(url).hostname or "", urlsplit(url).port
    try:
        return _token_file(socket.gethostname() if host in LOOPBACK else host, port or 0).read_text()
    except OSError:
        return ""


@contextmanager
def new_token(ports: Sequence[int]) -> Iterator[str]:
    """Create a token for servers on these ports of this machine, with token files until the `with` block ends.

    If RLKIT_SERVER_TOKEN is set, its value is the token, and no files are written.

    Raises:
        ValueError: a file cannot be written.
    """
    if token := os.environ.get(TOKEN_VARIABLE, ""):
        yield token
        return
    token, files = secrets.token_urlsafe(32), [_token_file(socket.gethostname(), port) for port in ports]
    try:
        for file in files:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.unlink(missing_ok=True)  # left by a server that was killed
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
                opened.write(token)
    except OSError as error:
        raise ValueError(
            f"{TOKEN_VARIABLE}: expected a token, as none can be kept in {files[0].parent}, got none: {error}"
        ) from error
    try:
        yield token
    finally:
        for file in files:
            if file.exists() and file.read_text() == token:
                file.unlink()


def _token_file(host: str, port: int) -> Path:
    """Path of a server's token file. Several machines may share the home directory, so it contains the host name."""
    return cache_directory() / "server-tokens" / f"{Path(host).name}-{port}"


class TokenMiddleware:
    """ASGI middleware of a vLLM server: every route except /health needs `Authorization: Bearer TOKEN`.

    The token is RLKIT_SERVER_TOKEN in the server's environment. vLLM's own `--api-key` does not protect the routes that
    replace weights, pause the server and call its workers. Requests need a Content-Length, which is limited.
    """

    def __init__(self, app: Any) -> None:
        self.app, self.token = app, os.environ.get(TOKEN_VARIABLE, "")
        if not self.token:
            raise ValueError(f"{TOKEN_VARIABLE}: expected a token in the environment of the server, got none")

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] == OPEN_ROUTE:
            return await self.app(scope, receive, send)
        status, problem = self._problem(scope)
        if not problem:
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008, "reason": problem})
        from starlette.responses import JSONResponse

        await JSONResponse({"error": problem}, status, headers={"Connection": "close"})(scope, receive, send)

    def _problem(self, scope: dict[str, Any]) -> tuple[int, str]:
        """Status and error message for a request to refuse before its body is read; (200, "") to accept it."""
        headers = dict(scope["headers"])
        if not hmac.compare_digest(headers.get(b"authorization", b""), f"Bearer {self.token}".encode()):
            got = "another one" if b"authorization" in headers else "none"
            return 401, (
                f"Authorization: expected the token of this server, got {got}; the user who started it finds it on "
                f"the same machine, others set {TOKEN_VARIABLE}"
            )
        most = MOST_ADAPTER_BYTES if scope["path"] == ADAPTER_ROUTE else MOST_BYTES
        if b"transfer-encoding" in headers:
            return 411, "Content-Length: expected the size of the request, got none"
        if (size := int(headers.get(b"content-length", 0))) > most:
            return 413, f"Content-Length: expected at most {most} bytes, got {size}"
        return 200, ""
