"""The longer edits of grpo_vlm.py that its page shows, each made in a copy and run."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import helpers
from helpers import warm_dir  # noqa: F401  (a fixture)

PAGE = Path(__file__).parents[2] / "docs" / "reading_grpo_vlm.md"
OPTIMIZER, AVERAGE = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.S)
SMALL = [
    "--prompts_per_step",
    8,
    "--group_size",
    4,
    "--max_new_tokens",
    3,
    "--lr",
    1e-2,
    "--warmup_steps",
    1,
    "--min_lr_ratio",
    0,
]


def edited(diff):
    """The recipe after the edit: the lines with + come after those with - or a blank."""
    code = (helpers.RECIPES / "grpo_vlm.py").read_text().replace("\nfrom functools", "\nimport torch\nfrom functools")
    for before, after in re.findall(r"((?:^[- ].*\n)+)((?:^\+.*\n)+)", diff, re.M):
        old, kept = ("".join(re.findall(rf"^{sign}(.*\n)", before, re.M)) for sign in ("[- ]", " "))
        assert code.count(old) == 1, old
        code = code.replace(old, kept + after.replace("\n+", "\n")[1:])
    return code


@pytest.mark.parametrize("diff", [OPTIMIZER, AVERAGE], ids=["optimizer", "average"])
def test_an_edited_recipe_resumes_exactly(diff, warm_dir, tmp_path, monkeypatch):  # noqa: F811
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "grpo_vlm.py").write_text(edited(diff))
    monkeypatch.setattr(helpers, "RECIPES", tmp_path / "recipes")
    helpers.load.cache_clear()
    try:
        steps = helpers.assert_resume_is_exact(tmp_path, "grpo_vlm", "--model", warm_dir, *SMALL)
    finally:
        helpers.load.cache_clear()
    if diff == OPTIMIZER:
        assert [row["lr"] for row in steps] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])
    else:
        assert steps[0]["kl"] == 0 < steps[-1]["kl"] and len(list((tmp_path / "run" / "reference").iterdir())) == 2
