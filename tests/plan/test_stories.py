"""The plans of docs/scaling.md: all fit, the page has them as they are in docs/plans, and the first is made again."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "tests")]
import make_scaling  # noqa: E402
from published_configs import write  # noqa: E402

PLANS = {path.stem: path.read_text() for path in sorted((ROOT / "docs" / "plans").glob("*.txt"))}
VERSIONS = re.compile("planned without a GPU, with (torch .*)")


def test_each_story_has_its_plan():
    assert set(PLANS) == set(make_scaling.STORIES)


@pytest.mark.parametrize("name", PLANS)
def test_each_story_fits(name):
    _, gpus, kind, *_ = make_scaling.STORIES[name]
    assert PLANS[name].splitlines()[-1].startswith("fits: ")
    assert f"trained, on {gpus} x {kind}; planned without a GPU" in PLANS[name]
    assert "nan" not in PLANS[name]


def test_the_page_has_the_plans():
    text = (ROOT / "docs" / "scaling.md").read_text()
    shown = text.partition(make_scaling.BEGIN)[2].partition(make_scaling.END)[0]
    assert shown == f"\n\n{make_scaling.page()}\n"


def test_the_first_plan_is_still_what_the_command_prints(tmp_path):
    if find_spec("triton") is None:
        pytest.skip("needs triton, whose kernels are counted where it is installed")
    write(tmp_path)
    shown = make_scaling.plan("3b", tmp_path)
    if VERSIONS.search(shown)[1] != (made_with := VERSIONS.search(PLANS["3b"])[1]):
        pytest.skip(f"needs {made_with}")
    assert shown == PLANS["3b"]
