"""Command lines of Python, each in a process of its own, forked from one that has imported transformers and the engine.

A process of its own start takes four CPU seconds before it does anything.
"""

import gc
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def run_commands(
    commands: Sequence[Sequence[object]], folder: Path, *, at_once: bool = False, timeout: float = 600, **options
) -> list[Done]:
    """Run `python COMMAND...` for each command, until one fails.

    Args:
        commands: what follows `python`: a script, `-m MODULE` or `-c CODE`, and arguments.
        folder: for what they print.
        at_once: start all together, instead of one after the other.
        timeout: seconds for all of them.
        options: of `subprocess.run`, such as `cwd` and `env`.
    """
    folder.mkdir(exist_ok=True)
    order = json.dumps([str(folder), at_once, [[str(part) for part in command] for command in commands]])
    ended = subprocess.run(
        [sys.executable, __file__], input=order, capture_output=True, text=True, timeout=timeout, **options
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    codes = json.loads((folder / "codes").read_text())
    return [
        Done(code, (folder / f"{i}.out").read_text(), (folder / f"{i}.err").read_text()) for i, code in enumerate(codes)
    ]


def start(command: Sequence[str], folder: Path, i: int) -> int:
    """The id of a process that runs the command; returns 0 in that process, when it is through."""
    if pid := os.fork():
        return pid
    for name, place in (("out", 1), ("err", 2)):
        file = os.open(folder / f"{i}.{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, place)
    kind, *rest = command
    if kind == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = list(command), str(Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")
    return 0


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    folder, at_once, commands = json.load(sys.stdin)
    import matplotlib.backends.backend_agg  # noqa: F401
    import peft  # noqa: F401
    import tyro  # noqa: F401
    from transformers import GenerationMixin, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor  # noqa: F401

    import rlkit.runs  # noqa: F401
    from rlkit.engines.fsdp import fsdp2  # noqa: F401

    gc.freeze()
    pids, codes = [], []
    for i, command in enumerate(commands):
        pid = start(command, Path(folder), i)
        if not pid:
            return
        pids.append(pid)
        if not at_once:
            codes.append(exit_code(pid))
            if codes[-1]:
                break
    codes = codes or [exit_code(pid) for pid in pids]
    (Path(folder) / "codes").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
