"""Two trainers on one server: the second is told who has it, before it starts. A server's port that is taken."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from free_ports import free_ports

from rlkit.rollout.serve import serving
from rlkit.rollout.servers import claim
from rlkit.rollout.servers.claim import claim_servers, release_servers
from rlkit.runs import PolicyOptions, RunOptions, start_run

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
from guarded_server import guarded_server

OTHER = """
import http.client, json, os, sys, time
connection = http.client.HTTPConnection(sys.argv[1])
body = json.dumps({"id": "other", "owner": f"the run in /runs/first, process {os.getpid()}"})
connection.request("POST", "/rlkit/claim", body, {"Authorization": "Bearer " + os.environ["RLKIT_SERVER_TOKEN"]})
print(connection.getresponse().status, flush=True)
time.sleep(100)
"""


@contextmanager
def other_trainer(url):
    """Another process that has claimed the server, as `claim_servers` does; yields its id."""
    command = [sys.executable, "-c", OTHER, url.removeprefix("http://")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "200\n"
            yield process.pid
        finally:
            process.kill()


def claims_within(url, seconds):
    """Whether this process can claim the server, if it tries for so long."""
    end = time.monotonic() + seconds
    while True:
        try:
            claim_servers([url])
            return url in claim._held
        except ValueError:
            if time.monotonic() > end:
                return False
            time.sleep(0.1)


def test_the_second_is_told_who_has_the_server_until_that_one_ends(monkeypatch, tmp_path):
    @dataclass
    class Config(PolicyOptions, RunOptions):
        pass

    with guarded_server(monkeypatch) as (url, _):
        with other_trainer(url) as first:
            taken = (
                f"servers: {url}: expected a server that no other trainer uses, got one that is taken by the run in "
                f"/runs/first, process {first}"
            )
            with pytest.raises(ValueError) as caught:
                start_run(Config(out=str(tmp_path), rollout="vllm_server", servers=(url,)), "task")
            assert str(caught.value) == taken
            os.kill(first, signal.SIGSTOP)  # it may go on
            assert not claims_within(url, 0.5)
        assert claims_within(url, 100)  # it was killed
        claim_servers([url])  # this process has it already
        release_servers([url])
        with other_trainer(url):
            assert not claims_within(url, 0.1)


def test_a_server_that_was_restarted_is_claimed_again(monkeypatch):
    with guarded_server(monkeypatch) as (url, _):
        claim_servers([url])  # which does not hold up the end of the server
    with guarded_server(monkeypatch, port=int(url.rpartition(":")[2])) as (again, _):
        assert again == url and not claim._is_open(claim._held[url])
        claim_servers([url])
        assert claim._is_open(claim._held[url])
        release_servers([url])


def test_a_port_that_is_taken_is_one_sentence(monkeypatch):
    """The server that has it is up, and would be taken for the one that could not start."""
    monkeypatch.setattr("rlkit.rollout.serve._check_installed", lambda _: None)
    monkeypatch.setattr("rlkit.rollout.serve._is_up", lambda _: True)
    monkeypatch.setattr("rlkit.rollout.serve.command", lambda *_: [sys.executable, "-c", "import time; time.sleep(9)"])
    port = free_ports(2) + 1
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(ValueError, match=f"port {port}: expected one that is free on 127.0.0.1, got Address alrea"):
            with serving("model", port=port - 1, count=2):
                pass
