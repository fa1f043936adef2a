"""Ranks that differ from each other: in the names of their metrics."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of each rank."""
    out = tmp_path_factory.mktemp("differing_ranks")
    command = [sys.executable, str(Path(__file__).with_name("on_differing_ranks.py")), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


def test_metrics_are_reduced_by_name(ranks):
    """They were added by their place in the sorted names of each rank."""
    for rank in ranks:
        differing, same = rank["reduced"]
        assert differing == {"a": 1, "b": 10, "both": 22, "c": 5, "a/max": -3}
        assert same == {"x/max": 1, "y": 2}
