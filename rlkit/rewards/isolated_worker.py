"""The worker script of `rlkit.rewards.isolated`: computes one reward function for each answer on its input."""

import json
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback

MOST_CHARACTERS = 500  # of a message


def describe(error: BaseException) -> str:
    """The exception with its file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:MOST_CHARACTERS] + where


def limit_memory(more: int) -> None:
    """Limit the address space to its present size plus `more` bytes."""
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + more, taken + more))


def end_with_parent(parent: int) -> None:
    """End this process when its parent has ended; otherwise a reward that hangs would run forever."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def main(questions: int, verdicts: int) -> None:
    def say(x: object) -> None:
        os.write(verdicts, json.dumps(x).encode() + b"\n")

    own_pid = os.getpid()
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    with os.fdopen(questions, "rb") as stream:
        path, pickled, memory = pickle.load(stream)
        sys.path[:] = path
        try:
            reward = pickle.loads(pickled)
            limit_memory(memory)
        except BaseException as error:
            return say(describe(error))
        say("")
        while True:
            try:
                text, row = pickle.load(stream)
            except EOFError:
                return None
            value, problem = None, ""
            try:
                value = reward(text, row)
                value = None if value is None else float(value)
            except BaseException as error:  # SystemExit among them
                problem = describe(error)
            if os.getpid() != own_pid:  # the reward has forked, and this is the child
                os._exit(0)
            say([value, problem])


if __name__ == "__main__":
    own_output, own_input = os.dup(1), os.dup(0)
    os.dup2(2, 1)  # what a reward prints must not be read as a verdict
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    main(own_input, own_output)
