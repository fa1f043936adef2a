"""Functions that a user names: where they are looked for, and what is said when they are not there."""

import os
import sys

import pytest

from rlkit.data import load_function, load_task

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
