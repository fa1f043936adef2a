"""A recipe whose prompts are encoded in worker processes does what it does without."""

import gc
import multiprocessing
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from helpers import evaluation, numbers, run_here

SMALL = ["--steps", 2, "--prompts_per_step", 6, "--group_size", 4, "--max_new_tokens", 2, "--lr", 1e-3]


def left():
    """Workers that still run after the last reference to a run has gone."""
    gc.collect()
    return [one for one in multiprocessing.active_children() if one.name == "prompt_worker"]


def test_numbers_are_those_of_a_run_without(tiny_dir, tmp_path, capfd):
    said, options = [], ["--task", "helpers:with_a_bad_image", "--model", tiny_dir, *SMALL]
    for count in (0, 1):
        run_here("grpo_vlm", *options, "--out", tmp_path / str(count), "--dataloader_num_workers", count)
        said.append([line for line in capfd.readouterr().out.splitlines() if "skipped:" in line])
    alone, with_worker = tmp_path / "0", tmp_path / "1"
    assert numbers(alone) == numbers(with_worker) and evaluation(alone) == evaluation(with_worker)
    assert said[0] == said[1] and "row 3: image of type bytes: cannot be read" in said[0][0]
    assert not left()


def test_a_row_that_cannot_be_sent_to_a_worker_ends_the_run(tiny_dir, tmp_path):
    options = ["--model", tiny_dir, "--out", tmp_path, "--task", "helpers:with_a_function", *SMALL]
    with pytest.raises(
        SystemExit, match="^grpo_vlm-.*: dataloader_num_workers: expected rows that can be pickled, got "
    ):
        run_here("grpo_vlm", *options, "--dataloader_num_workers", 1)
    assert not left()
