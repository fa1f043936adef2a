"""A case that fails takes no other case with it."""

import sys

import on_failing_cases
import pytest
from isolated_cases import error_of, require, run_cases

SAID = {"raises": "ValueError: wrong on purpose", "dies": "code -11", "hangs": "stopped after 30 s"}


@pytest.mark.parametrize(
    ("how", "names", "timeout"),
    [
        ("alone", ["first", "raises", "second", "dies", "third", "hangs", "last"], 30),
        ("ranks", ["first", "raises", "last"], 100),
    ],
)
def test_each_failure_belongs_to_its_own_case(tmp_path, how, names, timeout):
    run_cases([sys.executable, on_failing_cases.__file__, how, str(tmp_path)], tmp_path, names, timeout=timeout)
    for name in names:
        if name not in SAID:
            require(tmp_path, name)
            assert error_of(tmp_path, name) == ""
            continue
        with pytest.raises(AssertionError, match=f"case '{name}'"):
            require(tmp_path, name)
        assert SAID[name] in error_of(tmp_path, name)


def test_a_script_that_starts_no_case_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match="no case was started: the process ended with code 3"):
        run_cases([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, ["first"], timeout=60)
    with pytest.raises(AssertionError, match="case 'first' was not run"):
        require(tmp_path, "first")
