"""docs/formula_and_code.md: up to date, twenty functions, each with its equation, its body and its loop."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def maker():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)  # it imports make_reference
        spec = importlib.util.spec_from_file_location("make_formula_and_code", DOCS / "make_formula_and_code.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def page(maker):
    return maker.page()


def test_the_page_is_up_to_date(maker, page):
    assert maker.PAGE.read_text() == page, "run python docs/make_formula_and_code.py"


def test_check_says_what_is_out_of_date(maker, page, monkeypatch, tmp_path, capsys):
    old = tmp_path / "page.md"
    old.write_text(page.replace("return", "yield", 1))
    monkeypatch.setattr(maker, "PAGE", old)
    monkeypatch.setattr(sys, "argv", ["make_formula_and_code.py", "--check"])
    assert maker.main() == 1 and "page.md" in capsys.readouterr().out and old.read_text() != page
    monkeypatch.setattr(sys, "argv", ["make_formula_and_code.py"])
    assert maker.main() == 0 and old.read_text() == page
    monkeypatch.setattr(sys, "argv", ["make_formula_and_code.py", "--check"])
    assert maker.main() == 0


def test_twenty_functions_have_equation_body_and_loop(page):
    sections = re.split(r"^### ", page[: page.index("## Called by the functions")], flags=re.M)[1:]
    assert len(sections) == 20
    for section in sections:
        name = re.match(r"\[`(\w+)`\]", section)[1]
        assert "```math\n" in section or "$`" in section, name
        assert "http" in section, name
        body, loop = re.findall(r"```python\n(.*?)\n```", section, re.S)
        assert body != loop and '"""' not in body + loop
        for code in (body, loop):
            assert f"def {name}(" in code
            compile(code, name, "exec")


def test_what_is_called_is_on_the_page(page):
    """Every name that code on the page calls and that rlkit keeps to itself is defined on it."""
    shown = "\n".join(re.findall(r"```python\n(.*?)\n```", page, re.S))
    defined = set(re.findall(r"^def (\w+)\(", shown, re.M))
    private = {
        *re.findall(r"(?<![.\w])(_\w+)\(", shown),
        "masked_ratio",
        "rewards_and_groups",
        "group_mean",
        "group_std",
        "zero_unscored",
        "recurrence",
        "trained",
        "sequences",
    }
    assert private - defined == set()
