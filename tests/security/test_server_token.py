"""Requests to a server from clients without its token, and requests that are too large."""

import http.client
import json
import socket
import stat
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from free_ports import free_ports

from rlkit.rollout.serve import environment, serving
from rlkit.rollout.servers.arrays import array_url
from rlkit.rollout.servers.token import MOST_ADAPTER_BYTES, MOST_BYTES, TOKEN_VARIABLE, new_token, server_token
from rlkit.rollout.servers.weight_transfer import GlooGroup, gloo_group
from rlkit.vlm.videos import MAX_PIXELS

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
from guarded_server import TOKEN, guarded_server

ROUTES = """/rlkit/adapter /rlkit/claim /update_weights /init_weight_transfer_engine /start_weight_update /pause /resume
/sleep /wake_up /collective_rpc /server_info /v1/models /v1/load_lora_adapter /inference/v1/generate /metrics /docs
//health /health/ /health/../sleep""".split()


@pytest.fixture
def server(monkeypatch):
    with guarded_server(monkeypatch) as (url, reached):
        yield url.removeprefix("http://"), reached


def ask(address, path, headers, body=b""):
    """Status and error of a request with exactly these headers."""
    connection = http.client.HTTPConnection(address, timeout=100)
    connection.putrequest("POST", path)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    connection.send(body)
    response = connection.getresponse()
    return response.status, json.loads(response.read() or "{}").get("error", "")


def test_without_the_token_nothing_is_answered_but_health(server):
    address, reached = server
    for path in ROUTES:
        for header in (None, "Bearer", "Bearer ", "Bearer other", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN} "[:-2]):
            headers = {} if header is None else {"Authorization": header}
            status, error = ask(address, path, headers)
            assert status == 401 and "expected the token of this server, got " in error and TOKEN not in error
    assert not reached
    assert ask(address, "/health", {})[0] == 200
    assert ask(address, "/update_weights", {"Authorization": f"Bearer {TOKEN}"})[0] == 200
    assert reached == ["/health", "/update_weights"]


def test_too_large_a_request_is_refused_before_it_is_read(server):
    address, reached = server
    known = {"Authorization": f"Bearer {TOKEN}"}
    for path, most in (("/inference/v1/generate", MOST_BYTES), ("/rlkit/adapter", MOST_ADAPTER_BYTES)):
        status, error = ask(address, path, {**known, "Content-Length": str(most + 1)})
        assert (status, error) == (413, f"Content-Length: expected at most {most} bytes, got {most + 1}")
    assert ask(address, "/inference/v1/generate", {**known, "Transfer-Encoding": "chunked"})[0] == 411
    assert not reached
    assert ask(address, "/inference/v1/generate", {**known, "Content-Length": "2"}, b"{}")[0] == 200


def test_every_video_that_is_read_fits_into_a_request():
    frames = np.zeros((2, 30, 40, 3), "uint8")
    beside_frames = len(array_url(frames=frames, fps=1.0)) - frames.nbytes * 4 // 3
    assert 0 < beside_frames < 1000
    assert MAX_PIXELS * 3 * 4 // 3 + beside_frames < MOST_BYTES


def test_the_token_is_in_a_file_of_its_user(monkeypatch, tmp_path):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path))
    urls = ["http://127.0.0.1:8000", "http://localhost:8001", f"http://{socket.gethostname()}:8001"]
    with new_token([8000, 8001]) as token:
        assert len(token) > 30 and {server_token(url) for url in urls} == {token}
        assert server_token("http://127.0.0.1:8002") == server_token("http://elsewhere:8000") == ""
        folder = tmp_path / "server-tokens"
        assert [stat.S_IMODE(file.stat().st_mode) for file in (folder, *folder.iterdir())] == [0o700, 0o600, 0o600]
        with new_token([8001]) as later:  # the first server was killed, say, and another one has its port
            assert server_token(urls[1]) == later != token
        assert server_token(urls[0]) == token
    assert not list(folder.iterdir())
    monkeypatch.setenv(TOKEN_VARIABLE, "mine")
    with new_token([8000]) as token:
        assert token == server_token("http://elsewhere:1") == "mine" and not list(folder.iterdir())


def test_a_server_is_started_with_its_token_and_without_doors_beside(monkeypatch, tmp_path):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path))
    for name in ("VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_API_KEY"):
        monkeypatch.setenv(name, "1")
        assert name not in environment("127.0.0.1", 1, False)  # adapters are named by paths with the second one
    monkeypatch.setattr("rlkit.rollout.serve._check_installed", lambda _: None)
    monkeypatch.setattr("rlkit.rollout.serve._is_up", lambda _: (tmp_path / f"server-{port}.log").read_text())
    port = free_ports()
    code = "import os, sys, time; print(sys.argv[1:], os.environ['RLKIT_SERVER_TOKEN'], flush=True); time.sleep(99)"
    monkeypatch.setattr("rlkit.rollout.serve.command", lambda *_: [sys.executable, "-c", code])
    with serving("model", port=port, logs=tmp_path):
        said = (tmp_path / f"server-{port}.log").read_text()
        assert server_token(f"http://127.0.0.1:{port}") in said and "token.TokenMiddleware'] " in said  # the outermost
    with pytest.raises(ValueError, match="api-key: expected the token in the environment variable RLKIT_SERVER_TOKEN"):
        with serving("model", port=port, options=["--api-key=x"]):
            pass


def test_weights_are_sent_from_the_address_that_was_asked_for():
    """Nothing listens on another address: not the store where ranks meet, and not gloo."""

    def listening():
        found = psutil.Process().net_connections("inet")
        return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}

    before = listening()
    group = GlooGroup(1, "127.0.0.2", timeout=60)
    group.group = gloo_group(group.store, 0, 1, "127.0.0.2", 60)
    assert {address for address, _ in listening() - before} == {"127.0.0.2"}
