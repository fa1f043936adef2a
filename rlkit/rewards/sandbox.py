"""Running code that a model wrote.

    ran = run_python(program, stdin="3 4")          # ran.stdout, ran.code, ...

Each program runs as **one process with one thread**, under restrictions that the kernel enforces (Linux, x86-64):

- files: it reads the standard library and the system's shared libraries, and writes only new files in an empty folder
  of its own (Landlock), none of which can be set-user-id or set-group-id. It may still learn that another path exists,
  and its size and times.
- system calls: about seventy are allowed, and all others are refused (seccomp): no socket, no new process, thread or
  program, no signal to others, no change of modes, owners, links, limits or mounts. So threads, subprocess,
  multiprocessing, asyncio and tempfile do not work in it.
- it has no capabilities and can gain none, an empty environment, and no open file except its input and output.
- limits: processor and wall time, address space, and the bytes and number of the files in its folder, which include
  its output.

On first use, a test program attempts everything that has to be impossible. If an attempt succeeds, or the kernel lacks
a feature, no program is run: `SandboxError`. The sandbox is not a virtual machine: a hole in the kernel opens it too.

A program could print a false verdict. Therefore `rlkit.rewards.programs` compares its output with the expected values
outside, and these never enter its process.
"""

from __future__ import annotations

import functools
import os
import platform
import select
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

INSIDE = str(Path(__file__).with_name("sandbox_inside.py"))
MOST_FILES = 100
POLL_SECONDS = 0.02
START_SECONDS = 60.0  # to start an interpreter, even on a busy machine
WALL = 4  # wall time allowed for each second of processor time


class SandboxError(RuntimeError):
    """The machine cannot isolate a program, or could not start it; the program has not run."""


class Ran(NamedTuple):
    """What a program did.

    Attributes:
        stdout, stderr: text, at most `output` bytes each.
        value: what `call` returned, in the form of `canonical`; None without a call, or if it did not return.
        code: the exit code; -n when signal n ended it.
        stopped: "time" or "output" when it was stopped for that; else empty.
    """

    stdout: str
    stderr: str
    value: str | None
    code: int
    stopped: str


# --- outside


def run_python(
    program: str,
    *,
    stdin: str = "",
    call: str = "",
    seconds: float = 10.0,
    memory: int = 512 << 20,
    output: int = 1 << 20,
) -> Ran:
    """Run a program that is not trusted.

    Args:
        program: Python source; it runs as `__main__`, or as `program` if there is a call.
        stdin: its standard input.
        call: an expression, evaluated after the program in its namespace; its value is `Ran.value`.
        seconds: limit of processor time, so that other processes do not use it up. The limit of wall time is four times
            as long.
        memory: limit of address space in bytes, including the interpreter's own (about 30 MB).
        output: limit of bytes in its folder, including standard output and error, but not the program and its standard
            input. No single file can grow larger; the sum is measured every 20 ms.

    Raises:
        SandboxError: the machine cannot enforce these restrictions, or could not start the program, which has not run.
    """
    check_isolation()
    return _run(program, stdin, call, seconds, memory, output)


@functools.cache
def check_isolation() -> None:
    """Run a test program that attempts everything that has to be impossible, once per process.

    Raises:
        SandboxError: an attempt succeeded, or the kernel lacks a feature.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SandboxError(
            f"cannot isolate programs: expected Linux on x86-64, got {sys.platform} {platform.machine()}"
        )
    with tempfile.TemporaryDirectory() as outside:
        secret = Path(outside) / "secret"
        secret.write_text("secret")
        mode = secret.stat().st_mode
        probe = f"outside, secret = {outside!r}, {str(secret)!r}\n" + _PROBE
        ran = _run(probe, "", "", 20.0, 256 << 20, 1 << 16)
        holes = ran.stdout.split() if ran.code == 0 and ran.stdout else [f"the probe ended with {ran}"]
        if os.listdir(outside) != ["secret"] or secret.read_text() != "secret" or secret.stat().st_mode != mode:
            holes.append("outside_changed")
    if holes != ["done"]:
        raise SandboxError(
            f"cannot isolate programs on this machine: expected every attempt of a test program to fail, got {holes}"
        )


_PROBE = """
import _thread, os, resource, socket
def kill(): os.kill(os.getppid(), 0)
def raise_limit(): resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
def much_memory(): bytearray(300 << 20)
def set_user_id(): os.open("set_user_id", os.O_CREAT, 0o4755)
def set_group_id(): os.open("set_group_id", os.O_CREAT, 0o2755)
def large_file(): open("large", "wb", 0).write(bytes(2 << 16)) > 1 << 16 or 1 / 0
attempts = dict(
    read=lambda: open(secret).read(), write=lambda: open(secret, "a"), create=lambda: open(outside + "/new", "w"),
    truncate=lambda: os.truncate(secret, 0), chmod=lambda: os.chmod(secret, 0o777),
    symlink=lambda: os.symlink(secret, "a"), link=lambda: os.link(secret, "b"), remove=lambda: os.remove(secret),
    move=lambda: os.rename(secret, "c"), directory=lambda: os.mkdir("d"), proc=lambda: open("/proc/self/status"),
    tcp=lambda: socket.socket(), unix=lambda: socket.socket(socket.AF_UNIX), pair=lambda: socket.socketpair(),
    fork=os.fork, thread=lambda: _thread.start_new_thread(print, ()), kill=kill, setsid=os.setsid,
    exec=lambda: os.execv("/bin/sh", ["sh", "-c", "echo exec"]), raise_limit=raise_limit, memory=much_memory,
    file_size=large_file, set_user_id=set_user_id, set_group_id=set_group_id,
    environment=lambda: os.environ["PATH"], descriptor=lambda: os.fstat(3),
)
for name, attempt in attempts.items():
    try:
        attempt()
    except (OSError, RuntimeError, ValueError, MemoryError, KeyError, ArithmeticError):
        continue
    print(name)
print("done")
"""


def _run(program: str, stdin: str, call: str, seconds: float, memory: int, output: int) -> Ran:
    process = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="sandbox-"))
    except OSError as error:
        raise SandboxError(f"could not start a program: {error}") from error
    try:
        process = _start(folder, program, stdin, [call, seconds, memory, output])
        given = len((program + stdin).encode(errors="replace"))  # bytes that are in the folder before it starts
        stopped = _wait(process, folder, seconds, given + output)
        value = _text(folder / "value", output) if call else ""
        texts = _text(folder / "stdout", output), _text(folder / "stderr", output)
        return Ran(*texts, value or None, process.returncode, stopped)
    finally:
        if process is not None:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, program: str, stdin: str, settings: list[Any]) -> subprocess.Popen[bytes]:
    """A process that has been restricted and now starts the program."""
    ready, said_ready = os.pipe()
    try:
        for name, text in {"program.py": program, "stdin": stdin, "stdout": "", "stderr": ""}.items():
            (folder / name).write_text(text, errors="replace")
        with open(folder / "stdin") as file, open(folder / "stdout", "w") as out, open(folder / "stderr", "w") as err:
            arguments = [*map(str, settings), str(said_ready), *readable_paths()]
            process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-B", INSIDE, *arguments],
                stdin=file,
                stdout=out,
                stderr=err,
                cwd=folder,
                env={"PYTHONHASHSEED": "0"},
                pass_fds=[said_ready],
                start_new_session=True,
            )
        os.close(said_ready)
        said_ready = -1
        if _readable_within(ready, START_SECONDS) and os.read(ready, 1):
            return process
        process.kill()
        code = process.wait()
        reason = _text(folder / "stderr", 1 << 16).strip()[-500:] or f"the process reported nothing, exit code {code}"
        raise SandboxError(f"cannot isolate programs on this machine: {reason}")
    except OSError as error:
        raise SandboxError(f"could not start a program: {error}") from error
    finally:
        os.close(ready)
        if said_ready >= 0:
            os.close(said_ready)


def processor_seconds(pid: int) -> float:
    """Processor time of a process, over all of its threads."""
    return time.clock_gettime(~pid << 3 | 2)  # the kernel's number for that clock


def readable_paths() -> list[str]:
    """What a restricted process may read: the standard library, and the shared libraries that it loads."""
    python_folders = [
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        os.path.join(sys.base_prefix, "lib"),
    ]
    return sorted({*python_folders, "/lib", "/lib64", "/usr/lib", "/etc/ld.so.cache"})


def _readable_within(descriptor: int, seconds: float) -> bool:
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))


def _wait(process: subprocess.Popen[bytes], folder: Path, seconds: float, output: int) -> str:
    """Wait until the process has ended, or stop it at a limit. Returns the reason, see `Ran.stopped`."""
    deadline = time.monotonic() + WALL * seconds
    descriptor = os.pidfd_open(process.pid)
    stopped = ""
    try:
        while not stopped and not _readable_within(descriptor, POLL_SECONDS):
            files = [entry.stat(follow_symlinks=False) for entry in os.scandir(folder)]  # none can be taken away
            if len(files) > MOST_FILES or sum(512 * file.st_blocks for file in files) > output + (64 << 10):
                stopped = "output"
            elif processor_seconds(process.pid) > seconds or time.monotonic() > deadline:
                stopped = "time"
    finally:
        os.close(descriptor)
        process.kill()
        process.wait()
    return stopped


def _text(path: Path, most: int) -> str:
    """The text of a file, empty if it cannot be read: the program may have created it without read permission."""
    try:
        with path.open("rb") as file:
            return file.read(most).decode(errors="replace")
    except OSError:
        return ""
