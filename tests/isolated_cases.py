"""Many cases in one process, or in one set of ranks, because starting one costs seconds: each case fails on its own.

The script that runs the cases wraps each in `case`. A test module starts the script with `run_cases` and calls
`require` before it reads the results of a case. A case that raises, kills its process or hangs gets an error of its
own, and the script is started again with the cases that are left.
"""

import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def case(out: str | Path, name: str) -> Iterator[None]:
    """Run one case. If it raises, record why and end this process, as other ranks may wait for it in a collective.

    Ranks leave a case together, so that none is in the next one when another fails.
    """
    dist = sys.modules.get("torch.distributed")  # importing it takes seconds; a script without ranks need not wait
    ranks = dist is not None and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if ranks else (0, 1)
    folder = _folder(out, name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"started.{rank}").touch()
    try:
        yield
        if ranks:
            dist.barrier()
    except BaseException:
        (folder / f"error.{rank}").write_text(traceback.format_exc())
        os._exit(1)
    (folder / f"done.{rank}.{world}").touch()


def run_cases(command: Sequence[str], out: str | Path, names: Sequence[str], *, timeout: float, **options) -> None:
    """Run `command NAME...` until each case is done or has an error.

    Args:
        command: starts the script; the names of the cases are added to it.
        out: the folder that the script hands to `case`.
        names: of the cases, in their order.
        timeout: seconds of one start of the script.
        options: of `subprocess.Popen`, such as `env` and `cwd`.
    """
    pending = list(names)
    while pending:
        said = _run([*command, *pending], timeout, options)
        for name in pending:
            if _was_started(out, name) and not _is_done(out, name) and not error_of(out, name):
                (_folder(out, name) / "error.process").write_text(said)
        left = [name for name in pending if not _is_done(out, name) and not error_of(out, name)]
        if left == pending:
            raise AssertionError(f"no case was started: {said}")
        pending = left


def require(out: str | Path, name: str) -> None:
    """Fail with the error of this case, if it has one."""
    if error := error_of(out, name):
        raise AssertionError(f"case {name!r}: {error}")
    assert _is_done(out, name), f"case {name!r} was not run"


def error_of(out: str | Path, name: str) -> str:
    """What every rank that failed in this case recorded; empty if none did."""
    return "\n".join(file.read_text() for file in sorted(_folder(out, name).glob("error.*")))


def _run(command: Sequence[str], timeout: float, options: dict) -> str:
    """How the process ended, and the end of what it printed."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, **options
    )
    try:
        printed, _ = process.communicate(timeout=timeout)
        how = f"the process ended with code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        printed, _ = process.communicate()
        how = f"the process was stopped after {timeout:g} s"
    return f"{how}\n{printed[-4000:]}"


def _folder(out: str | Path, name: str) -> Path:
    return Path(out) / "cases" / name.replace("/", "_")


def _was_started(out: str | Path, name: str) -> bool:
    return any(_folder(out, name).glob("started.*"))


def _is_done(out: str | Path, name: str) -> bool:
    done = list(_folder(out, name).glob("done.*"))
    return bool(done) and len(done) == int(done[0].name.rpartition(".")[2])
