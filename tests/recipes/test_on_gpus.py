"""Every recipe for two steps in bfloat16 on one GPU: `pytest -m gpu`. Not run yet."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from helpers import RECIPES, rows, run
from test_two_ranks import CASES

from rlkit.runs import RunOptions, run_recipe, start_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
OWN = {  # recipes that the test on two ranks does not have
    "grpo_tools": ["--prompts_per_step", 8, "--group_size", 4],
    "grpo_async": ["--prompts_per_step", 8, "--group_size", 4],
}
TRAINED = sorted({path.stem for path in RECIPES.glob("*.py")} - {"evaluate"})


@pytest.mark.parametrize("recipe", TRAINED)
def test_two_steps(recipe, tiny_dir, tmp_path):
    options = CASES[recipe][1] if recipe in CASES else OWN[recipe]
    model = [] if recipe in OWN else ["--model", tiny_dir]  # those two build a tiny model of their own
    teacher = ["--teacher", tiny_dir] if recipe == "distill" else []
    chosen = ["--steps", 2, "--compute_dtype", "bfloat16", "--out", tmp_path / "out"]
    run(recipe, *options, *model, *teacher, *chosen, ranks=1)
    logged = rows(tmp_path / "out")
    assert len(logged) == 2 and all(row["memory/train"] > 0 for row in logged)
    losses = [x for row in logged for name, x in row.items() if name.rpartition("/")[2] in ("loss", "grad_norm")]
    assert losses and all(map(math.isfinite, losses))


def test_an_out_of_memory_error_leaves_a_snapshot(tmp_path, monkeypatch):
    def main(cfg: RunOptions):
        start_run("recipe", cfg, "task")
        torch.empty(2**50, dtype=torch.uint8, device="cuda")

    monkeypatch.setattr(sys, "argv", ["recipe", "--out", str(tmp_path / "run"), "--memory_snapshot"])
    with pytest.raises(torch.OutOfMemoryError) as error:
        run_recipe(main)
    assert "ran out of memory in the phase set_up" in error.value.__notes__[0]
    assert (tmp_path / "run" / "memory-rank-0.pickle").stat().st_size
