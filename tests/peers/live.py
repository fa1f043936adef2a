"""Our functions against the peers themselves, with fresh inputs; `make peers` runs it in the peers' environment.

Not collected by `pytest` on its own, as verl and TRL cannot share an environment with rlkit's models.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from case import compare, run  # noqa: E402
from cases_trl import CASES as TRL  # noqa: E402
from cases_verl import CASES as VERL  # noqa: E402


@pytest.mark.parametrize("seed", [1000, 1001, 1002])
@pytest.mark.parametrize("case", [*VERL, *TRL], ids=lambda case: case.name)
def test_equals_the_peer(case, seed):
    inputs = case.inputs(torch.Generator().manual_seed(seed))
    compare(case, run(case.peer, inputs, case.grad), inputs)
