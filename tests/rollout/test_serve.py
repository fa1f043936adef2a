"""Starting and stopping servers; what stands in for vLLM here only sleeps."""

import signal
import subprocess
import sys
import threading

import pytest
import torch
from free_ports import free_ports
from waiting import is_running, until

from rlkit.rollout.serve import serving


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Token files of servers are written to a directory of the test, not to the user's."""
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path / "cache"))


def test_a_server_that_does_not_start_is_named(tiny_dir, tmp_path, monkeypatch):
    port = free_ports()
    code = "import sys; print('no memory'); sys.exit(3)"
    monkeypatch.setattr("rlkit.rollout.serve.command", lambda *_: [sys.executable, "-c", code])
    monkeypatch.setattr("rlkit.rollout.serve._check_installed", lambda _: None)
    with pytest.raises(
        RuntimeError,
        match=f"http://127.0.0.1:{port}: expected a running server, got exit code 3: see .*server-{port}.log",
    ):
        with serving(tiny_dir, port=port, logs=tmp_path):
            pass
    assert "no memory" in (tmp_path / f"server-{port}.log").read_text()
    monkeypatch.setattr("rlkit.rollout.serve.command", lambda *_: [sys.executable, "-c", "import time; time.sleep(99)"])
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match=f"http://127.0.0.1:{port}: expected a server within 0.3 s, got no response"):
        with serving(tiny_dir, port=port, logs=tmp_path, timeout=0.3):
            pass
    assert set(threading.enumerate()) <= before  # a thread of an earlier test may end meanwhile


TRAINER = """
import signal, sys
from rlkit.rollout import serve
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background of a shell ignores it
serve._check_installed, serve._is_up = lambda _: None, lambda _: True
serve.command = lambda *_: [sys.executable, "-c", "import time; time.sleep(99)"]
with serve.serving("model", port=int(sys.argv[1])) as servers:
    (process,) = servers.values()
    print(process.pid, flush=True)
    process.wait()
"""


def test_servers_end_with_their_trainer():
    """Whether the trainer is killed, terminated or interrupted: no server is left behind."""
    ways = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    first = free_ports(len(ways))
    commands = [[sys.executable, "-c", TRAINER, str(first + i)] for i in range(len(ways))]
    trainers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    servers = [int(trainer.stdout.readline()) for trainer in trainers]
    assert all(map(is_running, servers))
    for trainer, way in zip(trainers, ways, strict=True):
        trainer.send_signal(way)
        trainer.wait(100)
    until(lambda: not any(map(is_running, servers)), 60)  # without a signal they sleep longer


def test_servers_take_the_last_gpus(tiny_dir, tmp_path, monkeypatch):
    """Ranks of a trainer on the same machine take the first GPUs."""
    code = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(99)"
    monkeypatch.setattr("rlkit.rollout.serve.command", lambda *_: [sys.executable, "-c", code])
    monkeypatch.setattr("rlkit.rollout.serve._check_installed", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    port = free_ports(2)
    logs = [tmp_path / f"server-{port + i}.log" for i in range(2)]
    monkeypatch.setattr("rlkit.rollout.serve._is_up", lambda _: all(log.read_text().endswith("\n") for log in logs))
    for visible, expected in ((None, ["1,2\n", "3,4\n"]), ("9,8,7,6", ["9,8\n", "7,6\n"])):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with serving(tiny_dir, count=2, tensor_parallel_size=2, port=port, logs=tmp_path):
            assert [log.read_text() for log in logs] == expected


@pytest.mark.parametrize(("options", "trusted"), [([], False), (["--trust-remote-code"], True)])
def test_a_server_reads_the_config_with_code_of_its_repository_if_vllm_does(monkeypatch, options, trusted):
    def read(model, *, trust_remote_code=False):
        raise ValueError(f"trusted: {trust_remote_code}")

    monkeypatch.setattr("rlkit.rollout.serve.config_or_empty", read)
    with pytest.raises(ValueError, match=f"^trusted: {trusted}$"), serving("model", options=options):
        pass
