"""Our functions against the peers themselves, with fresh inputs; `make peers` runs it in the peers' environment.

Not collected by `pytest` on its own, as verl and TRL cannot share an environment with rlkit's models.
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from case import compare, run  # noqa: E402
from cases_trl import CASES as TRL  # noqa: E402
from cases_verl import CASES as VERL  # noqa: E402


@pytest.mark.parametrize("seed", [1000, 1001, 1002])
@pytest.mark.parametrize("case", [*VERL, *TRL], ids=lambda case: case.name)
def test_equals_the_peer(case, seed):
    inputs = case.inputs(torch.Generator().manual_seed(seed))
    compare(case, run(case.peer, inputs, case.grad), inputs)


def options(tree, prefix=""):
    for name, x in tree.items():
        yield prefix + name
        if isinstance(x, dict):
            yield from options(x, f"{prefix}{name}.")


def test_options_on_the_page_for_those_who_come_from_verl_are_verls():
    """In the left column a name without dots is a sibling of the one before it."""
    folder = Path(find_spec("verl").submodule_search_locations[0]) / "trainer" / "config"
    trees = [yaml.safe_load((folder / f"_generated_ppo_{kind}trainer.yaml").read_text()) for kind in ("", "megatron_")]
    known, missing, looked_up = {name for tree in trees for name in options(tree)}, [], 0
    page = (Path(__file__).parents[2] / "docs" / "coming_from_verl.md").read_text()
    sections = "actor_rollout_ref|algorithm|critic|data|reward|trainer"
    for cell in re.findall(rf"^\| `((?:{sections})\..*?) \|", page, re.MULTILINE):
        parent = ""
        for name in re.findall(r"[\w.]+", re.sub(r"=\w+", "", cell)):
            parent = name.rpartition(".")[0] or parent
            full = name if "." in name else f"{parent}.{name}"
            looked_up += 1
            missing += [full] if full not in known else []
    assert not missing and looked_up > 50, (missing, looked_up)
