"""Rewards for programs: the response's code runs on the row's tests, in `rlkit.rewards.sandbox`.

    Task(..., reward=all_tests_passed)            # or share_of_tests_passed

A program could report a false result, so it never sees the expected values. Its output, or the value of a call, is
returned as text and compared here. A program gains nothing by ending early, overloading `==` or breaking `assert`. For
the same reason a test cannot be an arbitrary assertion.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlkit.data.thinking_tags import THINKING_TAGS, thinking_tags_of
from rlkit.rewards.sandbox import Ran, run_python
from rlkit.rewards.sandbox_inside import canonical


def all_tests_passed(text: str, row: Mapping[str, Any]) -> float:
    """1 if the response's program passes all of the row's tests, else 0; tests after the first failure are not run.

    The program is `extract_program(text)`. The row's `tests` is a list, or its JSON text, of

    - `{"input": ..., "output": ...}`: the program, run as `__main__` with that standard input, has to end with exit
      code 0 and print that output, up to white space at the ends of lines and of the whole;
    - `"assert f(2) == 3"`: a call, and a literal as its expected value, equal in type and value (1, 1.0 and True are
      the same, as in Python). The program is run first, not as `__main__`.

    Each test has a process of its own, and `row["seconds"]` (10 if missing) as in `run_python`.

    Raises:
        SandboxError: as `run_python`.
        ValueError: no tests, or a test of another form. Other assertions would be scored by the program's own process.
    """
    return float(all(_passes(text, row)))


def share_of_tests_passed(text: str, row: Mapping[str, Any]) -> float:
    """The share of the row's tests that the response's program passes; see `all_tests_passed`."""
    passed = list(_passes(text, row))
    return sum(passed) / len(passed)


def _passes(text: str, row: Mapping[str, Any]) -> Iterator[bool]:
    tests, where = row.get("tests"), row.get("where", "row")
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
    except ValueError:
        tests = None
    if not tests or not isinstance(tests, list):
        raise ValueError(f"{where}: tests: expected a list of at least one test, got {row.get('tests')!r}")
    parsed = [_parse_test(test, where) for test in tests]  # all tests are parsed before the first is run
    program, seconds = extract_program(text, thinking_tags_of(row)[1]), float(row.get("seconds") or 10)
    return (passed(run_python(program, seconds=seconds, **given)) for given, passed in parsed)


def _parse_test(test: Any, where: str) -> tuple[dict[str, Any], Callable[[Ran], bool]]:
    """Arguments of `run_python` for a test, and the function that decides whether the program has passed."""
    if isinstance(test, Mapping) and (test.get("testtype") not in (None, "stdin") or test.get("fn_name") is not None):
        raise ValueError(
            f"{where}: tests: expected programs that read standard input, got a call of a function: {test!r}"
        )
    if isinstance(test, Mapping) and isinstance(test.get("input"), str) and isinstance(test.get("output"), str):
        given = {"stdin": test["input"], "output": _output_limit(test["output"])}
        return given, lambda ran: ran.code == 0 and _lines(ran.stdout) == _lines(test["output"])
    try:
        match ast.parse(test).body:
            case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
                call, value = ast.unparse(left), canonical(ast.literal_eval(right))
            case _:
                raise ValueError("no such statement")
    except (SyntaxError, TypeError, ValueError) as error:
        forms = 'expected {"input": text, "output": text} or "assert <call> == <literal>"'
        raise ValueError(f"{where}: tests: {forms}, got {test!r}") from error
    return {"call": call, "output": _output_limit(value)}, lambda ran: ran.value == value


def _output_limit(expected: str) -> int:
    return max(1 << 20, 2 * len(expected.encode(errors="replace")))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def extract_program(text: str, closing_tag: str = THINKING_TAGS[1]) -> str:
    """The last complete fenced block marked python or py; else the last one without a mark; else the whole text.

    Only the text after the last `closing_tag` counts. A fence may be indented, as in a list, and so is the fence that
    closes it. If there is no complete block, a fence at the end of a line of code closes one too.
    """
    text = text.rpartition(closing_tag)[2]
    begun = r"^([ \t]*+)(```|~~~)[ \t]*+(\w*+)[^\n]*+\n(.*?)"
    blocks = re.findall(begun + r"^\1\2", text, re.DOTALL | re.MULTILINE)
    blocks = blocks or re.findall(begun + r"(?<=[^\s`~])\2[ \t]*+$", text, re.DOTALL | re.MULTILINE)
    for marks in (("python", "py", "python3"), ("",)):
        if found := [(indent, code) for indent, _, mark, code in blocks if mark.lower() in marks]:
            indent, code = found[-1]
            return re.sub(f"^{indent}", "", code, flags=re.MULTILINE)
    return text
