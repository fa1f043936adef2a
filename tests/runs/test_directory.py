"""Directories of runs, claimed by processes of their own."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlkit.runs.directory import claim_directory, release_directory
from rlkit.tracking import Run

HERE = Path(__file__).parent


class Process:
    """A process that claims directories when it is asked to."""

    def __init__(self, folder):
        command = [sys.executable, str(HERE / "on_claims.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=folder, **pipes)
        self.pid = self.process.pid

    def ask(self, out="", name="x", *, resume=False):
        self.send([out, name, resume])

    def send(self, line):
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()

    def response(self):
        return json.loads(self.process.stdout.readline())

    def kill(self):
        self.process.kill()
        self.process.communicate()


@contextmanager
def started(folder):
    process = Process(folder)
    try:
        yield process
    finally:
        process.kill()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two processes and the directory that they work in."""
    folder = tmp_path_factory.mktemp("claims")
    with started(folder) as first, started(folder) as second:
        yield first, second, folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory of this process, which claims nothing any more when the test is over."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for lock in tmp_path.rglob("run.lock"):
        release_directory(lock.parent)


def finish_a_run(path):
    Run(path, {}).log(0, {})


# --- two processes


def test_processes_that_start_at_once_get_directories_of_their_own(two):
    first, second, _ = two
    for i in range(20):
        first.ask(name=f"sweep{i}")
        second.ask(name=f"sweep{i}")
        assert sorted([first.response()["out"], second.response()["out"]]) == [f"runs/sweep{i}", f"runs/sweep{i}-2"]


def test_only_one_of_those_that_start_at_once_gets_the_directory_that_both_name(two):
    first, second, folder = two
    for i in range(20):
        out = str(folder / f"named{i}")
        first.ask(out)
        second.ask(out)
        (refused,) = [response for response in (first.response(), second.response()) if response != {"out": out}]
        assert refused["error"].endswith(" is writing a run to it; choose another --out")


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_is_told_which_process_has_the_directory(two, resume):
    first, second, folder = two
    out = str(folder / f"taken-{resume}")
    first.ask(out)
    assert first.response() == {"out": out}
    second.ask(out, resume=resume)
    error = f"out {out!r}: process {first.pid} on {socket.gethostname()} is writing a run to it; choose another --out"
    assert second.response() == {"error": error}


def test_a_run_that_another_process_writes_is_not_resumed(two):
    first, second, folder = two
    first.ask(name="live")
    assert first.response() == {"out": "runs/live"}
    finish_a_run(folder / "runs" / "live")
    second.ask(name="live", resume=True)
    assert f"process {first.pid} on " in second.response()["error"]


def test_a_killed_process_holds_nothing(two):
    """Not even by a child that outlives it."""
    first, _, folder = two
    out = str(folder / "killed")
    with started(folder) as killed:
        killed.ask(out)
        assert killed.response() == {"out": out}
        killed.send("fork")
        child = killed.response()["child"]
        try:
            killed.process.kill()
            killed.process.wait()
            first.ask(out)
            assert first.response() == {"out": out}
        finally:
            os.kill(child, signal.SIGKILL)


# --- which directory


def test_numbers_and_what_resume_continues(here):
    assert claim_directory("", "x", resume=False) == claim_directory("", "x", resume=True) == Path("runs/x")
    for name in ("x", "x-2", "x-3"):
        path = claim_directory("", "x", resume=False)
        assert path == Path("runs") / name
        finish_a_run(path)
        assert claim_directory("", "x", resume=True) == path
    (here / "runs" / "x-4").mkdir()  # a directory without a run is free
    assert claim_directory("", "x", resume=True) == Path("runs/x-3")
    assert claim_directory("", "x", resume=False) == Path("runs/x-4")


def test_resume_finds_a_run_behind_a_directory_without_one(here):
    """A job takes x, another x-2; the first fails during set-up, the second is killed and resumed."""
    for name in ("x", "x-1", "x-2", "x-10", "x-a", "xx-99"):
        (here / "runs" / name).mkdir(parents=True)
    finish_a_run(here / "runs" / "x-1")  # of a user
    assert claim_directory("", "x", resume=True) == Path("runs/x")
    finish_a_run(here / "runs" / "x-2")
    assert claim_directory("", "x", resume=True) == Path("runs/x-2")
    finish_a_run(here / "runs" / "x-10")
    for name in ("x-a", "xx-99"):
        finish_a_run(here / "runs" / name)
    assert claim_directory("", "x", resume=True) == Path("runs/x-10")


def test_a_run_is_not_overwritten(here):
    path = claim_directory("a", "x", resume=False)
    finish_a_run(path)
    release_directory(path)
    before = {file: file.stat().st_mtime_ns for file in (here / "a").iterdir()}
    with pytest.raises(ValueError, match="out 'a': holds a run already; continue it with --resume, or choose another"):
        claim_directory("a", "x", resume=False)
    assert before == {file: file.stat().st_mtime_ns for file in (here / "a").iterdir()}
    assert claim_directory("a", "x", resume=True) == path


def test_a_start_that_failed_may_be_repeated(here):
    """It wrote its options and then found no model, say, or no row to train on in its first step."""
    run = Run(claim_directory("a", "x", resume=False), {"model": "nowhere"})
    assert claim_directory("a", "x", resume=False) == Path("a")
    run.drop_metrics_from(0)
    run.log_evaluation(accuracy_before=0.5)
    (here / "a" / "init").mkdir()  # a model that it built; the next start may name another one
    assert claim_directory("a", "x", resume=False) == Path("a")
    assert [path.name for path in (here / "a").iterdir()] == ["run.lock"]
    run.log(0, {})
    with pytest.raises(ValueError, match="out 'a': holds a run already"):
        claim_directory("a", "x", resume=False)


def test_files_of_others_are_left_alone(here):
    """No run has been started there, so config.json belongs to a model, say."""
    (here / "a").mkdir()
    (here / "a" / "config.json").write_text("{}")
    claim_directory("a", "x", resume=False)
    assert (here / "a" / "config.json").read_text() == "{}"


def test_what_is_no_directory(here):
    (here / "file").write_text("")
    with pytest.raises(ValueError, match="out 'file': expected a directory, got a file$"):
        claim_directory("file", "x", resume=False)
    with pytest.raises(ValueError, match="out 'file/run': expected a directory that can be written to, got: .*file"):
        claim_directory("file/run", "x", resume=False)
