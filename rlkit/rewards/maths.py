"""Rewards for mathematical answers, by math-verify (https://github.com/huggingface/Math-Verify).

    Task(..., reward=maths_reward)

math-verify keeps its time limits by `signal.alarm`, which works in the main thread alone and makes a time-out a wrong
answer. Here it runs in worker processes that import no torch and that are killed when an answer takes too long, so that
a limit is a limit in any thread, after fork as after spawn. An answer that ran out of time, or that ended its worker,
is None: not judged.

Workers are started when they are needed, as many as there are threads that ask at once, at most one a processor, and
stay. To judge a batch quickly, ask from several threads (`ThreadPoolExecutor.map`).
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlkit.data.lookup import requires_extra
from rlkit.rewards.workers import Worker, WorkerPool, end_worker, read_line

WORKER = str(Path(__file__).with_name("maths_worker.py"))
START_SECONDS = 120.0  # to import sympy, on a machine however busy
SECONDS = 5.0

MARKERS = re.compile(r"####|\banswer\s*(?:is|:|=)(?:\*\*)?:?", re.IGNORECASE)


def maths_reward(text: str, row: Mapping[str, Any]) -> float | None:
    """1 if the answer's final result is the row's, 0 if it is another one or if there is none, None if not judged.

    What counts is `final_answer(text)` against `final_answer(row["answer"])`. By math-verify's rules, and tested on a
    table: equal expressions are the same in any form; decimals are compared to six places; 25% is 0.25, and 25; units
    and degrees do not count; sets and lists have no order, tuples and intervals do; an equation `x = 5` is its value.

    Raises:
        ImportError: math-verify is not installed.
        ValueError: the row has no answer.
    """
    gold = final_answer(str(row["answer"])) if row.get("answer") is not None else None
    if gold is None:
        raise ValueError(f"{row.get('where', 'row')}: answer: expected text or a number, got {row.get('answer')!r}")
    found = final_answer(text)
    if found is None:
        return 0.0
    same = same_answer(found[0], gold[0], boxed=found[1], seconds=SECONDS)
    return None if same is None else float(same)


def boxed_match(text: str, row: Mapping[str, Any]) -> float | None:
    r"""1 if what stands in the answer's last `\boxed{}` is the row's answer as text, 0 if not; None without an answer.

    Case, white space, dollars and `\text{}` around it do not count. The row's answer may stand in a box itself.
    """
    if row.get("answer") is None:
        return None
    found, gold = final_answer(text), final_answer(str(row["answer"]))
    right = gold[0] if gold is not None and gold[1] else str(row["answer"])
    return float(found is not None and found[1] and _words(found[0]) == _words(right))


def _words(text: str) -> str:
    text = text.strip().strip("$").strip()
    inner = re.fullmatch(r"\\text(?:bf|it|rm)?\{([^{}]*)\}", text)
    return " ".join((inner[1] if inner else text).lower().split())


def final_answer(text: str) -> tuple[str, bool] | None:
    r"""The part of a solution that is its result, and whether it stood in a box.

    Of what follows the last `</think>`: the content of the last `\boxed{}` or `\fbox{}`, and nothing if that is not
    closed; without one, the rest of the line behind the last `####`, `answer is` or `answer:`; without that, the last
    line that is not empty.
    """
    text = text.rpartition("</think>")[2]
    if boxes := list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text)):
        start = boxes[-1].end()
        end = _closing(text, start)
        return None if end is None else (text[start:end].strip(), True)
    marks = list(MARKERS.finditer(text))
    lines = (text[marks[-1].end() :] if marks else text).strip().splitlines()
    if not lines:
        return None
    line = (lines[0] if marks else lines[-1]).strip(" *")
    return (line, False) if line else None


def _closing(text: str, start: int) -> int | None:
    """Where the brace that was opened before `start` is closed; escaped braces do not count."""
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return start + match.start()
    return None


def same_answer(answer: str, gold: str, *, boxed: bool = True, seconds: float = SECONDS) -> bool | None:
    """Whether two final answers are the same; None if that could not be told within the time.

    Args:
        answer: LaTeX or plain text, e.g. `\\frac{1}{2}` or `0.5`.
        gold: what it should be; the comparison is not symmetric.
        boxed: the answer is a formula as a whole; otherwise formulas between dollars and numbers in it count too.
        seconds: most processor time, which a busy machine does not use up; wall time is held to four times that.

    Raises:
        ImportError: math-verify is not installed.
    """
    reply, _ = _POOL.ask(json.dumps([answer, gold, boxed, seconds]).encode() + b"\n", seconds)
    return None if reply is None else json.loads(reply)


def _start() -> Worker:
    with requires_extra("rewards"):
        if importlib.util.find_spec("math_verify") is None:  # only the worker imports it
            raise ModuleNotFoundError(name="math_verify")
    command = [sys.executable, "-P", WORKER]  # a session of its own: Ctrl-C is not for it
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    worker = subprocess.Popen(command, bufsize=0, start_new_session=True, **pipes)
    if read_line(worker, START_SECONDS) is None:
        end_worker(worker)
        raise RuntimeError(f"maths rewards: a worker did not start, exit code {worker.returncode}")
    return worker


_POOL = WorkerPool(lambda: _start())
