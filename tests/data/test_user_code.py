"""Functions that a user brings: where they are looked for, and what is said when they are not there or fail."""

import json
import logging
import os
import sys

import pytest

from rlkit.data import Failures, load_function, load_task

TASK = """
from rlkit.data import Task
from neighbour_of_mine import reward

def f():
    return Task("mine", [1], [2], reward)

def g():
    return {}.nothing
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "tasks_of_mine.py").write_text(TASK)
    (tmp_path / "neighbour_of_mine.py").write_text("def reward(text, row):\n    return 0.5\n")
    (tmp_path / "broken_of_mine.py").write_text("import no_such_package_anywhere\n")
    before = [*sys.path], {*sys.modules}
    yield tmp_path
    sys.path[:] = before[0]
    for name in {*sys.modules} - before[1]:
        if "_of_mine" in name:
            del sys.modules[name]


def test_a_module_in_the_working_directory(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])  # as a script has it
    assert load_task("tasks_of_mine:f").reward("", {}) == 0.5
    assert sys.path[-1] == str(folder)  # behind what is installed


@pytest.mark.parametrize("path", ["tasks_of_mine.py", "./tasks_of_mine.py", "{}/tasks_of_mine.py"])
def test_a_file(folder, monkeypatch, path):
    monkeypatch.chdir(folder)
    function = load_function(f"{path.format(folder)}:f", "task")
    assert function().reward("", {}) == 0.5 and load_function("tasks_of_mine.py:f", "task") is function


def test_a_file_with_the_name_of_an_installed_module(tmp_path):
    (tmp_path / "json.py").write_text("def reward(text, row):\n    return 1.0\n")
    assert load_function(f"{tmp_path / 'json.py'}:reward", "reward")("", {}) == 1
    import json

    assert json.loads("1") == 1


def test_a_bug_of_the_user_keeps_its_traceback(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(AttributeError, match="nothing"):
        load_task("tasks_of_mine:g")


def test_what_is_not_there_is_one_sentence(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for name, error in {
        "mine": "expected module:function or path/to/file.py:function",
        "tasks_of_mine.py": "expected module:function or path/to/file.py:function",
        "gone_of_mine:f": f"expected an installed module or one in {folder}, got none of the name 'gone_of_mine'",
        "json.gone:f": f"expected an installed module or one in {folder}, got none of the name 'json.gone'",
        "gone.py:f": f"expected a file gone.py, got none in {folder}",
        "tasks_of_mine:h": "expected a function of tasks_of_mine (Task, f, g, reward), got 'h'",
        "tasks_of_mine.py:h": "expected a function of tasks_of_mine.py (Task, f, g, reward), got 'h'",
        "broken_of_mine:f": "broken_of_mine cannot be imported: No module named 'no_such_package_anywhere'",
    }.items():
        with pytest.raises(ValueError) as caught:
            load_function(name, "reward")
        assert str(caught.value) == f"reward {name!r}: {error}"


# --- what fails


def misses(row):
    return row["anwser"]


def divides(row):
    return 1 / row["zero"]


def reads(row):
    return json.loads("{")  # raises in Python's own code


def fail(failures, function, row, where="row 1"):
    try:
        function(row)
    except Exception as error:
        failures.add(error, where)


def test_one_traceback_for_each_distinct_error_and_then_counts(caplog):
    failures = Failures("reward")
    with caplog.at_level(logging.WARNING):
        for i in range(5):
            fail(failures, misses, {}, f"row {i}")
            fail(failures, divides, {"zero": 0})
        fail(failures, reads, {})
        failures.count("a reward of None")
        failures.log_repeated()
        failures.log_repeated()  # nothing more to say
    assert caplog.text.count("Traceback") == 3 and caplog.text.count('return row["anwser"]') == 1
    lines = {function: function.__code__.co_firstlineno + 1 for function in (misses, divides, reads)}
    names = [
        f"KeyError: 'anwser' (test_user_code.py, line {lines[misses]})",
        f"ZeroDivisionError: division by zero (test_user_code.py, line {lines[divides]})",
    ]
    logged = [record.getMessage() for record in caplog.records]
    assert logged[0] == f"reward failed on row 0: {names[0]}" and logged[1] == f"reward failed on row 1: {names[1]}"
    assert f"(test_user_code.py, line {lines[reads]})" in logged[2]  # not in json/decoder.py
    assert logged[3:] == [f"reward failed again: 4 x {names[0]}; 4 x {names[1]}"]
    assert failures.take().startswith(f"5 x {names[0]}; 5 x {names[1]}; 1 x ") and failures.take() == ""


def test_an_error_without_a_traceback():
    failures = Failures("tool")
    failures.add(TimeoutError("no result within 2 seconds"), "row 1")
    assert failures.take() == "1 x TimeoutError: no result within 2 seconds (no traceback)"
