"""A small HTTP server behind the middleware of `rlkit.rollout.serve`, in a thread of the test."""

import threading
import time
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from rlkit.rollout.servers.claim import ClaimMiddleware
from rlkit.rollout.servers.token import TOKEN_VARIABLE, TokenMiddleware

TOKEN = "the token of this test"


@contextmanager
def guarded_server(monkeypatch, port=0):
    """Yields the URL, and the paths of the requests that reached the server."""
    reached = []

    async def response(request):
        await request.body()
        reached.append(request.url.path)
        return JSONResponse({"success": True})

    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    app = Starlette(routes=[Route("/{path:path}", response, methods=["GET", "POST"])])
    app.add_middleware(ClaimMiddleware)
    app.add_middleware(TokenMiddleware)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
    app.state.server = server  # as vLLM has it
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", reached
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
