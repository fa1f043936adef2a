"""Rewards for mathematical answers, by math-verify (https://github.com/huggingface/Math-Verify).

    Task(..., reward=maths_reward)

math-verify implements its time limits with `signal.alarm`, which works only in the main thread and reports a time-out
as a wrong answer. Here it runs in worker processes that do not import torch. A worker that takes too long is killed, so
the limit holds in any thread, after fork and after spawn. A response that exceeds the limit or ends its worker is None:
not scored.

Workers are started when needed, at most one per processor, and are kept. To score a batch quickly, call the reward from
several threads (`ThreadPoolExecutor.map`).
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlkit.data.lookup import requires_extra
from rlkit.data.thinking_tags import THINKING_TAGS, thinking_tags_of
from rlkit.rewards.rules import ANSWER_HEADING, ANSWER_IS, accepted_answers, best_match, join_thousands
from rlkit.rewards.workers import Worker, WorkerPool, end_worker, exit_code, read_line

WORKER = str(Path(__file__).with_name("maths_worker.py"))
START_SECONDS = 120.0  # to import sympy, even on a busy machine
SECONDS = 5.0

MARKERS = re.compile(rf"(?P<heading>{ANSWER_HEADING})|####|{ANSWER_IS}|(?i:\banswer\s*=)(?:\*\*)?:?")
FRACTION = r"\\[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}"
BOX = re.compile(
    rf"\\(?:boxed|fbox)\s*(?:\{{|(?P<content>{FRACTION}|-?\d+(?:[.,/]\d+)*(?![\d^_a-zA-Z{{]|\\[a-zA-Z])|[A-Za-z](?=\$)))"
)
BLOCK = re.compile(r"\\\[|\$\$|\\begin\{(\w+\*?)\}")


class FinalAnswer(NamedTuple):
    """The result of a solution.

    Attributes:
        text: LaTeX or plain text.
        boxed: it was in a box.
        marked: it followed a marker, such as `answer is`.
    """

    text: str
    boxed: bool
    marked: bool


def maths_reward(text: str, row: Mapping[str, Any]) -> float | None:
    """1 if the response's final answer is the row's, 0 if it is another one or if there is none, None if not scored.

    Compares `final_answer(text)` with the row's answer by math-verify's rules, which a table of tests pins down: equal
    expressions match in any form; decimals are compared to six places; 25% matches both 0.25 and 25; units and degrees
    are ignored; sets and lists have no order, tuples and intervals do; an equation such as `x = 5`,
    `m + n = 5`, `f(-1) = 5` or `R^2 = 5` is its value, but `x + 1 = 5` or `x^2 = 5` is not. If the row's answer is a
    solution with a box or a marker, its `final_answer` counts; otherwise all of its lines do. It may be a list of
    answers, one of which is enough.

    Raises:
        ImportError: math-verify is not installed.
        ValueError: the row has no answer.
    """
    right = row.get("answer")
    golds = [] if right is None else [_right_answer(str(one)) for one in accepted_answers(right)]
    if not golds or not all(golds):
        raise ValueError(f"{row.get('where', 'row')}: answer: expected text or a number, got {right!r}")
    answer = final_answer(text, thinking_tags_of(row)[1])
    if answer is None:
        return 0.0
    same = [same_answer(answer.text, gold, boxed=answer.boxed, marked=answer.marked, seconds=SECONDS) for gold in golds]
    return 1.0 if any(same) else None if None in same else 0.0


def boxed_match(text: str, row: Mapping[str, Any]) -> float | None:
    r"""1 if the content of the response's last `\boxed{}` is the row's answer as text, else 0; None without an answer.

    Case, white space, the commas or LaTeX's spaces of 2,005, and dollars or `\text{}` around it are ignored. If the
    row's answer is a solution with a box or a marker such as `####`, its `final_answer` counts. It may be a list of
    answers, one of which is enough.
    """
    answer = final_answer(text, thinking_tags_of(row)[1])

    def is_same(right: str) -> float:
        return float(answer is not None and answer.boxed and _words(answer.text) == _words(result(right) or right))

    return best_match(is_same, row.get("answer"))


def _words(text: str) -> str:
    text = text.strip().strip("$").strip()
    inner = re.fullmatch(r"\\text(?:bf|it|rm)?\{([^{}]*)\}", text)
    text = inner[1] if inner else text
    text = join_thousands(text) if re.match(r"[-−$\\ ]*\d", text) else text  # (1,234) is a pair
    return " ".join(text.lower().split())


def final_answer(text: str, closing_tag: str = THINKING_TAGS[1]) -> FinalAnswer | None:
    r"""The result of a solution.

    Only the text after the last `closing_tag` counts. The result is the content of the last `\boxed{}` or `\fbox{}`, or
    a number, a fraction or the letter of `$\boxed B$` after `\boxed` without braces; None if braces are not closed.
    Without a box it is the rest of the line after the last `####`, `answer is` or `answer:`, or else the next line. A
    heading `### Answer` counts likewise if it is above a number or a formula without `=`, and text follows. Without
    these it is the last line. Empty lines, the fences of code and, after a marker, the `> ` of quotes do not count; a
    display formula or a LaTeX environment over several lines is one line.
    """
    text = text.rpartition(closing_tag)[2]
    if boxes := list(BOX.finditer(text)):
        if content := boxes[-1]["content"]:
            return FinalAnswer(content, boxed=True, marked=False)
        start = boxes[-1].end()
        closed = _closing(text, start)
        return None if closed is None else FinalAnswer(text[start:closed].strip(), boxed=True, marked=False)
    marks = list(MARKERS.finditer(text))
    if marks and marks[-1]["heading"] and not _result_comes_first(_lines(_after(marks[-1]))):
        marks = [mark for mark in marks if not mark["heading"]]
    lines = _lines(_after(marks[-1]) if marks else text)
    return FinalAnswer(lines[0 if marks else -1], boxed=False, marked=bool(marks)) if lines else None


def _after(mark: re.Match[str]) -> str:
    """The text after a marker, without the signs of Markdown's quotes in its further lines."""
    return re.sub(r"\n[ \t]*>(?=\s)", "\n", mark.string[mark.end() :])


def _result_comes_first(lines: list[str]) -> bool:
    """Whether the first line is a number, with a unit or without, or a formula without `=`, and text follows."""
    if len(lines) < 2:
        return False
    first = re.sub(r"\\[a-zA-Z]+|(?<=[\s{])[a-z]+\W*$", "", lines[0])  # without commands of LaTeX and a unit
    is_value = re.search(r"\w", first) and not re.search(r"[=|]|[^\W\d_]{2}", first)
    return bool(is_value and re.match(r"[^\w$\\]*[^\W\d_]{2}", lines[1]))


def _right_answer(text: str) -> str:
    """The answer of a row: the result of a solution, or all lines of another text."""
    found = result(text)
    return ", ".join(_lines(text)) if found is None else found


def result(text: str) -> str | None:
    """The `final_answer` of a solution with a box or a marker; None for other texts."""
    found = final_answer(text)
    return found.text if found and (found.boxed or found.marked) else None


def _lines(text: str) -> list[str]:
    """The lines of a text, see `final_answer`."""
    lines: list[list[str]] = []
    end = ""  # of a formula that goes on
    for line in text.splitlines():
        line = re.sub(r"^\s*```\w*\s*$|`", "", line).strip(" *\t")
        if not line:
            continue
        if end:
            lines[-1].append(line)
            end = "" if end in line else end
        else:
            lines.append([line])
            if begun := BLOCK.search(line):
                end = {r"\[": r"\]", "$$": "$$"}.get(begun[0], rf"\end{{{begun[1]}}}")
                end = "" if end in line[begun.end() :] else end
    return [" ".join(line) for line in lines]


def _closing(text: str, start: int) -> int | None:
    """Where the brace that was opened before `start` is closed; escaped braces do not count."""
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return start + match.start()
    return None


def same_answer(
    answer: str, gold: str, *, boxed: bool = True, marked: bool = False, seconds: float = SECONDS
) -> bool | None:
    """Whether two final answers are equal; None if this could not be decided in time.

    Args:
        answer: LaTeX or plain text, e.g. `\\frac{1}{2}` or `0.5`.
        gold: the right answer; the comparison is not symmetric.
        boxed: the whole answer is a formula. Otherwise it may be a sentence: then a number in it, or a formula between
            dollars, counts too.
        marked: of a sentence that begins with a number or a formula, this one counts (of an equation, its last side),
            otherwise the last one.
        seconds: limit of processor time, so that other processes do not use it up. The limit of wall time is four times
            as long.

    Raises:
        ImportError: math-verify is not installed.
    """
    reply, _ = _POOL.ask(json.dumps([answer, gold, boxed, marked, seconds]).encode() + b"\n", seconds)
    return None if reply is None else json.loads(reply)


def _start() -> Worker:
    with requires_extra("rewards"):
        if importlib.util.find_spec("math_verify") is None:  # only the worker imports it
            raise ModuleNotFoundError(name="math_verify")
    command = [sys.executable, "-P", WORKER]  # in a session of its own, which Ctrl-C does not reach
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    worker = subprocess.Popen(command, bufsize=0, start_new_session=True, **pipes)
    if not read_line(worker, START_SECONDS):
        code = exit_code(worker)
        end_worker(worker)
        raise RuntimeError(f"maths rewards: a worker did not start, exit code {code}")
    return worker


_POOL = WorkerPool(lambda: _start())
