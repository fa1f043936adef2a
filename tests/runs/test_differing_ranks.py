"""Ranks that differ from each other: in their rows, and in the names and values of their metrics."""

import json
import re
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


def test_other_rows_on_another_rank_are_refused_on_all_ranks(ranks):
    """Rank 0 alone looked at its rows, so ranks trained on rows that others held out, or waited for each other."""
    (same, fewer, reordered), of_rank_1 = (rank["contents"] for rank in ranks)
    assert of_rank_1 == [same, fewer, reordered] and same["train"].startswith("7 rows, fingerprint ")
    expected = (
        r"train: expected the same contents on all ranks, got 7 rows, fingerprint \w+ on rank 0 and 4 rows, "
        r"fingerprint \w+ on rank 1; a task that shuffles needs a fixed seed, and files must be the same on all nodes; "
        r"to start all the same, add --allow_changes task"
    )
    assert re.fullmatch(expected, fewer)
    assert re.match(r"heldout: .*, got 2 rows, fingerprint (\w+) on rank 0 and 2 rows, fingerprint (?!\1)", reordered)


def test_metrics_of_a_heldout_loss_are_reduced_as_in_training(ranks):
    """Maxima of ranks were added."""
    expected = {"loss": (1 + 1 + 4 + 4) / 4, "response/max": 2, "of_rank_0": 1 / 3, "of_rank_1": 1 / 3}
    for rank in ranks:
        assert rank["heldout_loss"] == pytest.approx(expected)
