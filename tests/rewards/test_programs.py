"""Rewards for programs, and tricks by which a program would pass tests that it does not solve."""

import json
import re

import pytest

from rlkit.rewards import programs
from rlkit.rewards.programs import all_tests_passed, extract_program, share_of_tests_passed
from rlkit.rewards.sandbox import Ran, SandboxError, check_isolation

try:
    check_isolation()
    ISOLATED = True
except SandboxError:
    ISOLATED = False

ADD = {"tests": ["assert add(1, 2) == 3", "assert add(-5, 2) == -3", "assert add('a', 'b') == 'ab'"]}
DOUBLE = {"tests": [{"input": "2\n", "output": "4\n"}, {"input": "-7", "output": "-14"}]}
RIGHT = "def add(a, b):\n    return a + b\n"


def share(text: str, row: dict) -> float | None:
    if ISOLATED:
        return share_of_tests_passed(text, row)
    with pytest.raises(SandboxError):  # not a 0: nothing is known of the response
        share_of_tests_passed(text, row)
    return None


@pytest.mark.parametrize(
    ("text", "row", "expected"),
    [
        (RIGHT, ADD, 1.0),
        (f"<think>\n```python\nbroken(\n```\n</think>Here:\n```python\n{RIGHT}```\nIt adds.", ADD, 1.0),
        ("def add(a, b):\n    return abs(a) + abs(b)\n", ADD, 1 / 3),
        ("def add(a, b):\n    return int(a) + int(b)\n", ADD, 2 / 3),  # one test ends in an exception
        ("def add(a, b):\n    while a == -5: pass\n    return a + b\n", {**ADD, "seconds": 0.5}, 2 / 3),
        ("no program at all", ADD, 0.0),
        ("", ADD, 0.0),
        ("print(2 * int(input()))", DOUBLE, 1.0),
        ("import sys\nfor line in sys.stdin:\n    print(f'{2 * int(line)}  \\n')", DOUBLE, 1.0),
        ("print(2 * int(input()), end='')\nraise SystemExit", DOUBLE, 1.0),
        ("print(2 * int(input()))\nexit()", DOUBLE, 1.0),
        ("print(2 * int(input()))\nquit(0)", {**DOUBLE, "seconds": None}, 1.0),
        ("print(2 * int(input()))\nexit(1)", DOUBLE, 0.0),
        ("print(2 * int(input()))\nraise ValueError", DOUBLE, 0.0),
        ("print(4)", DOUBLE, 0.5),
        ("print('the response:', 2 * int(input()))", DOUBLE, 0.0),
        ("if __name__ == '__main__':\n    print(2 * int(input()))", DOUBLE, 1.0),
        ("print('ab\\n' * int(input()))", {"tests": [{"input": "500000", "output": "ab\n" * 500000}]}, 1.0),
        ("def f():\n    return 'é' * 800000", {"tests": [f"assert f() == '{'é' * 800000}'"]}, 1.0),
        ("def f():\n    return 1.0", {"tests": ["assert f() == 1"]}, 1.0),
        ("def f():\n    return (1, 2)", {"tests": ["assert f() == [1, 2]"]}, 0.0),
        ("def f():\n    return {2: [None]}", {"tests": json.dumps(["assert f() == {2: [None]}"])}, 1.0),
    ],
)
def test_share_of_tests(text, row, expected):
    assert share(text, row) in (None, expected)


def test_all_or_nothing():
    if ISOLATED:
        assert [all_tests_passed(text, ADD) for text in (RIGHT, "def add(a, b): return 3", "")] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "cheat",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit(0)",
        "exit()",
        "def add(a, b):\n    raise SystemExit(0)",
        "def add(a, b):\n    import os\n    os._exit(0)",
        "class Equal:\n    def __eq__(self, other): return True\ndef add(a, b): return Equal()",
        "class Equal(int):\n    def __eq__(self, other): return True\n    def __hash__(self): return 3\n"
        "def add(a, b): return Equal(99)",
        "import builtins\nbuiltins.AssertionError = Exception\ndef add(a, b): return None",
        "import sys\nfor module in list(sys.modules.values()):\n"
        "    if hasattr(module, 'canonical'): module.canonical = lambda value: 'True'\ndef add(a, b): return None",
        "def add(a, b):\n    open('value', 'w').write('passed')\n    import os\n    os._exit(0)",
        "import atexit, os\natexit.register(lambda: open('value', 'w').write('True'))\ndef add(a, b): return None",
        "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame.f_back: frame = frame.f_back\n"
        "    return frame.f_locals.get('expected', frame.f_globals.get('expected'))",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "import os\nos.open('value', os.O_CREAT, 0)\ndef add(a, b): return None",
        "import os\nos.closerange(0, 64)\ndef add(a, b): return None",
        "print('passed', 3, -3, 'ab')",
    ],
)
def test_cheat_is_a_plain_zero(cheat):
    """Neither passed nor "could not be scored", which would spare it the 0."""
    assert share(cheat, ADD) in (None, 0.0)
    assert share(cheat, {"tests": [{"input": "", "output": "41"}]}) in (None, 0.0)


def test_what_is_expected_never_enters_the_sandbox(monkeypatch):
    given = []

    def spy(program, **options):
        given.append(f"{program} {options}")
        return Ran("", "", None, 0, "")

    monkeypatch.setattr(programs, "run_python", spy)
    row = {"tests": ["assert f(1) == 'expected-a'", {"input": "2", "output": "expected-b"}], "answer": "expected-c"}
    assert share_of_tests_passed("the program", row) == 0.0
    assert len(given) == 2 and "f(1)" in given[0] and not any("expected" in text for text in given)


def test_the_first_failure_ends_all_or_nothing(monkeypatch):
    ran = []
    monkeypatch.setattr(programs, "run_python", lambda *a, **k: ran.append(k) or Ran("", "", None, 0, ""))
    assert all_tests_passed("", ADD) == 0.0 and len(ran) == 1
    assert share_of_tests_passed("", ADD) == 0.0 and len(ran) == 4


def test_a_sandbox_that_fails_is_no_zero(monkeypatch):
    def fails(*args, **options):
        raise SandboxError("no processes left")

    monkeypatch.setattr(programs, "run_python", fails)
    for reward in (all_tests_passed, share_of_tests_passed):
        with pytest.raises(SandboxError):  # `score` makes nan of it
            reward(RIGHT, ADD)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1", "x = 1"),
        ("```python\na\n```\ntext\n```python\nb\nc\n```", "b\nc\n"),
        ("```py\na\n```\n```\noutput\n```", "a\n"),
        ("```\na\n```\n```bash\nls\n```", "a\n"),
        ("```Python title\na\n```", "a\n"),
        ("```python\na\n```\n```python\nunfinished", "a\n"),
        ("```python\nprint('```')\n```", "print('```')\n"),
        ("1. So:\n   ```python\n   if a:\n\n       b\n   ```\n2. Done", "if a:\n\n    b\n"),
        ("~~~python\na\n```\n~~~", "a\n```\n"),
        ("```python\na\n    ```\nb ```\n```", "a\n    ```\nb ```\n"),  # fences in a docstring
        ("```python\na\nb```\nIt works.", "a\nb"),
        ("```python\nprint('```')", "```python\nprint('```')"),
        ("<think>```python\na\n```</think>\n```\nb\n```", "b\n"),
        ("<think>\n```python\na\n```\n</think>done", "done"),
    ],
)
def test_extract_program(text, expected):
    assert extract_program(text) == expected


def test_the_thinking_of_other_tags_is_no_program(monkeypatch):
    monkeypatch.setattr(programs, "run_python", lambda program, **_: Ran(program, "", None, 0, ""))
    row = {"tests": [{"input": "", "output": "b"}], "thinking_tags": ["[THINK]", "[/THINK]"]}
    assert all_tests_passed("[THINK]\n```python\na\n```\n[/THINK]b", row) == 1


def test_fields_without_a_value_change_no_test(monkeypatch):
    """Tables give all tests the same fields."""
    monkeypatch.setattr(programs, "run_python", lambda program, **_: Ran("3", "", None, 0, ""))
    test = {"input": "1", "output": "3", "testtype": None, "fn_name": None}
    assert all_tests_passed(RIGHT, {"tests": [test]}) == 1


@pytest.mark.parametrize(
    "tests",
    [
        None, [], "[]", "[1", "{}", 3, [1],
        ["f(1) == 2"], ["assert f(1)"], ["assert f(1) != 2"], ["assert f(1) == g(2)"],
        ["assert f(1) == 2 == 3"], ["assert f(1) == 2\nassert f(2) == 3"], ["assert f(1 == 2"], [{"input": "1"}],
        [{"input": 1, "output": 2}], ["assert f() == 1", "check(f)"],
        [{"input": "1", "output": "2", "testtype": "functional"}], [{"input": "1", "output": "2", "fn_name": "f"}],
    ],
)  # fmt: skip
def test_bad_tests_are_named(tests, monkeypatch):
    monkeypatch.setattr(programs, "run_python", lambda *a, **k: pytest.fail("run before all tests were read"))
    with pytest.raises(ValueError, match=re.escape("data.jsonl row 3: tests: ")):
        all_tests_passed(RIGHT, {"tests": tests, "where": "data.jsonl row 3"})
