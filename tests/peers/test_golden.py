"""Our functions against what verl 0.9.1 and TRL 1.16 returned for the same inputs (made by make_golden.py)."""

import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from case import compare  # noqa: E402
from cases_trl import CASES as TRL  # noqa: E402
from cases_verl import CASES as VERL  # noqa: E402

GOLDEN = {"verl": load_file(HERE / "golden_verl.safetensors"), "trl": load_file(HERE / "golden_trl.safetensors")}
CASES = [("verl", case) for case in VERL] + [("trl", case) for case in TRL]


def part(peer: str, name: str, what: str) -> dict:
    prefix = f"{name}/{what}/"
    return {key.removeprefix(prefix): x for key, x in GOLDEN[peer].items() if key.startswith(prefix)}


@pytest.mark.parametrize(("peer", "case"), CASES, ids=[f"{peer}-{case.name}" for peer, case in CASES])
def test_equals_the_peer(peer, case):
    theirs = part(peer, case.name, "out")
    assert theirs, f"{case.name}: nothing recorded; run make_golden.py"
    compare(case, theirs, part(peer, case.name, "in"))


@pytest.mark.parametrize("peer", GOLDEN)
def test_every_recorded_case_is_compared(peer):
    recorded = {key.rsplit("/", 2)[0] for key in GOLDEN[peer]}
    assert recorded == {case.name for name, case in CASES if name == peer}
