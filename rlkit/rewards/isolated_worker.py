"""The worker script of `rlkit.rewards.isolated`: computes one reward function for each response on its input.

For `sandboxed`, each response has a child process of its own, under the restrictions of `sandbox_inside`. The child has
imported what the reward needs, as its parent has, so it starts within milliseconds.
"""

import functools
import importlib.util
import json
import math
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

MOST_CHARACTERS = 500  # of a message
MOST_BYTES = 4 * MOST_CHARACTERS
RESTRICTED = b"restricted\n"  # what a child says before it scores its response


def describe(error: BaseException) -> str:
    """The exception with its file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:MOST_CHARACTERS] + where


def memory_limit(more: int) -> int:
    """This process's present address space plus `more` bytes, or its present limit if that is lower."""
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + more
    present = resource.getrlimit(resource.RLIMIT_AS)[1]
    return limit if present == resource.RLIM_INFINITY else min(limit, present)


def end_with_parent(parent: int) -> None:
    """End this process when its parent has ended; otherwise a reward that hangs would run forever."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def compute(reward: Callable, text: str, row: object) -> list:
    """[the reward, what went wrong]."""
    try:
        value = reward(text, row)
        return [None if value is None else float(value), ""]
    except BaseException as error:  # SystemExit among them
        return [None, describe(error)]


def compute_in_child(reward: Callable, text: str, row: object, restrict: Callable[[], None]) -> list:
    """[the reward, what went wrong], computed by a restricted child process.

    A child that ends without a verdict after its restrictions was ended by the response that it executes: a reward of
    0.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        score_and_exit(reward, text, row, restrict, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        first, verdict = pipe.readline(MOST_BYTES), pipe.readline(MOST_BYTES).decode(errors="replace")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if first != RESTRICTED:
        reason = first.decode(errors="replace") or "no reason given"
        return [None, f"cannot isolate responses on this machine: {reason}"]
    if verdict.startswith("problem "):
        return [None, verdict.removeprefix("problem ")]
    if verdict == "none":
        return [None, ""]
    try:
        return [float(verdict), ""]
    except ValueError:
        return [0.0, ""]


def score_and_exit(reward: Callable, text: str, row: object, restrict: Callable[[], None], writing: int) -> NoReturn:
    """The child: restricts itself, scores the response, writes the reward or the problem, and ends."""
    try:
        os.closerange(3, writing)
        os.closerange(writing + 1, os.sysconf("SC_OPEN_MAX"))
        restrict()
        os.write(writing, RESTRICTED)
        value = reward(text, row)
        os.write(writing, b"none" if value is None else repr(float(value)).encode())
    except MemoryError:
        pass
    except Exception as error:
        os.write(writing, f"problem {describe(error)}".encode())
    finally:
        os._exit(0)


def imported_packages() -> list[str]:
    """The folders of the packages that have been imported; they may import more of their modules later."""
    paths = [getattr(module, "__path__", None) for name, module in list(sys.modules.items()) if "." not in name]
    return [folder for path in paths if path for folder in path]


def load_restrict() -> Callable:
    """`rlkit.rewards.sandbox_inside.restrict`, without the imports of `rlkit.rewards`."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sandbox_inside.py")
    spec = importlib.util.spec_from_file_location("sandbox_inside", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.restrict


def main(questions: int, verdicts: int) -> None:
    def say(x: object) -> None:
        os.write(verdicts, json.dumps(x).encode() + b"\n")

    own_pid = os.getpid()
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    with os.fdopen(questions, "rb") as stream:
        path, pickled, memory, sandbox = pickle.load(stream)
        sys.path[:] = path
        try:
            reward = pickle.loads(pickled)
            if sandbox is None:
                limit = memory_limit(memory)
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            else:
                seconds, readable = sandbox
                readable = [*readable, *imported_packages()]
                limits = math.ceil(seconds), memory_limit(memory), 0
                restrict = functools.partial(load_restrict(), *limits, readable, None)
        except BaseException as error:
            return say(describe(error))
        say("")
        while True:
            try:
                text, row = pickle.load(stream)
            except EOFError:
                return None
            if sandbox is None:
                verdict = compute(reward, text, row)
            else:
                verdict = compute_in_child(reward, text, row, restrict)
            if os.getpid() != own_pid:  # the reward has forked, and this is the child
                os._exit(0)
            say(verdict)


if __name__ == "__main__":
    own_output, own_input = os.dup(1), os.dup(0)
    os.dup2(2, 1)  # what a reward prints must not be read as a verdict
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    main(own_input, own_output)
