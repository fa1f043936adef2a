"""A judge's server that is busy, broken, slow, endless or an impostor: nothing is scored, and the key stays secret."""

import gzip
import json
import logging
import ssl
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlkit.rewards import judge_client
from rlkit.rewards.judge import chat_judge

ROW = {"question": "2 + 2?", "answer": "4", "where": "row 7"}
KEY = "sk-the-secret-key-of-the-judge"


def completion(text="Score: 7"):
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return json.dumps(
        {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    ).encode()


def reply(handler, body, status=200, **headers):
    handler.send_response(status)
    for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


class Server:
    """On the loopback: `plan(handler, number of the request)` responses."""

    def __init__(self, plan, context=None):
        self.seen = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                server.seen.append((self.path, self.headers["Authorization"], time.monotonic()))
                try:
                    plan(self, len(server.seen) - 1)
                except (BrokenPipeError, ConnectionResetError, ssl.SSLError):
                    pass  # the client has had enough

            do_GET = do_POST

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        if context is not None:
            self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture(autouse=True)
def _environment(monkeypatch, caplog):
    """A key, no proxy, and everything that any library logs."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    yield
    assert not [record for record in caplog.get_records("call") if KEY in record.getMessage()]


def scored(server, **options):
    return chat_judge(server.url, "m", **{"retries": 1, "seconds": 60.0, **options})("It is 4.", ROW)


def test_a_busy_server_is_asked_again_when_it_says(caplog):
    def plan(handler, number):
        reply(handler, completion()) if number else reply(handler, b"{}", 429, Retry_After="1")

    with Server(plan) as server:
        assert scored(server) == 0.7
        (*_, first), (*_, second) = server.seen
    assert 1.0 <= second - first < 50.0


def test_a_pause_of_a_day_is_not_made():
    with Server(lambda handler, _: reply(handler, b"{}", 429, Retry_After="86400")) as server:
        start = time.monotonic()
        assert scored(server) is None and len(server.seen) <= 2
    assert time.monotonic() - start < 100


GARBAGE = {
    "500": lambda h, _: reply(h, b"oops", 500),
    "500 and a page": lambda h, _: reply(h, b"<html>" * 99, 503, Content_Type="text/html"),
    "no JSON": lambda h, _: reply(h, b"\xff\x00garbage"),
    "JSON of another kind": lambda h, _: reply(h, b'{"choices": [{"message": {"content": {"a": 1}}}]}'),
    "a number": lambda h, _: reply(h, b"7"),
    "a list": lambda h, _: reply(h, b"[[[]]]"),
    "nested": lambda h, _: reply(h, b"[" * 100_000),
    "nothing": lambda h, _: reply(h, b""),
    "cut": lambda h, _: reply(h, completion()[:20], Content_Length="500"),
    "no HTTP": lambda h, _: h.wfile.write(b"hello\r\n\r\n"),
    "a status alone": lambda h, _: h.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n"),
    "closed": lambda h, _: h.connection.close(),
    "a wrong key": lambda h, _: reply(h, json.dumps({"error": {"message": f"bad key {KEY}"}}).encode(), 401),
    "the key as a response": lambda h, _: reply(h, completion(f"your key is {KEY}")),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_not_scored(name, caplog):
    with Server(GARBAGE[name]) as server:
        assert scored(server, retries=0) is None
    assert "judge m on row 7: " in caplog.text


def test_a_server_that_hangs():
    replies = threading.Event()
    with Server(lambda handler, _: replies.wait(100)) as server:
        start = time.monotonic()
        assert scored(server, retries=1, seconds=0.5) is None
        assert time.monotonic() - start < 50
        replies.set()


def test_a_server_that_drips(caplog):
    """A byte now and then, each within the time of one read."""
    enough = threading.Event()

    def drip(handler, _):
        handler.send_response(200)
        handler.end_headers()
        for _ in range(1000):
            if enough.wait(0.1):
                break
            handler.wfile.write(b" ")
            handler.wfile.flush()

    with Server(drip) as server:
        start = time.monotonic()
        assert scored(server, retries=0, seconds=0.5) is None
        assert time.monotonic() - start < 50
        enough.set()
    assert "Timeout" in caplog.text


def test_a_response_of_500_mb_is_not_read(caplog):
    sent = []

    def flood(handler, _):
        handler.send_response(200)
        handler.end_headers()
        for _ in range(500):  # more than any machine's buffers hold
            handler.wfile.write(bytes(1 << 20))
            sent.append(1)

    with Server(flood) as server:
        assert scored(server, retries=0) is None
    assert len(sent) < 300
    assert f"expected at most {judge_client.MOST_BYTES} bytes" in caplog.text
    with Server(lambda h, _: reply(h, completion("Score: 7" + " " * (1 << 20)))) as server:
        assert scored(server) == 0.7  # a long one is


def test_a_response_that_unpacks_to_a_gigabyte_is_not_unpacked(caplog):
    packed = gzip.compress(bytes(64 << 20))
    with Server(lambda h, _: reply(h, packed, Content_Encoding="gzip")) as server:
        assert scored(server, retries=0) is None
    assert "expected a response without compression, got gzip" in caplog.text


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(status):
    """Neither the key nor the question is for another server."""
    with Server(lambda h, _: reply(h, completion())) as other:
        away = {"Location": f"{other.url}/chat/completions"}
        with Server(lambda h, _: reply(h, b"", status, **away)) as server:
            assert scored(server, retries=0) is None and len(server.seen) == 1
        assert other.seen == []


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate that nobody has signed, for 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("certificate")
    files = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]]
    subprocess.run(command, check=True, capture_output=True)
    return files


def test_a_wrong_certificate_gets_neither_key_nor_question(certificate, monkeypatch, caplog):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with Server(lambda h, _: reply(h, completion()), context) as server:
        assert scored(server, retries=0) is None and server.seen == []
        assert "APIConnectionError" in caplog.text
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        assert scored(server, retries=0) == 0.7 and server.seen[0][1] == f"Bearer {KEY}"


def test_the_key_is_in_no_file_of_a_run(tmp_path):
    """Nor in a cache; the run's options have the name of the variable at most."""
    from dataclasses import asdict

    from rlkit.runs.options import TrainingOptions
    from rlkit.tracking import Run

    logged = []
    run = Run(tmp_path / "run", asdict(TrainingOptions()))
    run.trackers = [type("Tracker", (), {"log": lambda self, values, step: logged.append(values)})()]
    with Server(lambda h, _: reply(h, completion())) as server:
        reward = chat_judge(server.url, "m", cache=tmp_path / "cache")
        run.log(0, {"reward/mean": reward("It is 4.", ROW)})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 3 and all(KEY not in path.read_text() for path in files)
    assert logged and KEY not in str(logged) and KEY not in repr(reward)
