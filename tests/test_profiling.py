"""Profiles of chosen steps of a run."""

import gzip
import json

import pytest
import torch

from rlkit.profiling import StepProfiler
from rlkit.tracking import Run


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """torch's profiler writes down all process groups, and fails at those that other tests of this process left."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)


def test_chosen_steps_leave_a_trace_and_tables(tmp_path):
    """Each phase is in both, also the one that a step begins in; other steps leave nothing."""
    run = Run(tmp_path, {}, profiler=StepProfiler(tmp_path / "profile", (1,), 3))
    for step in run.steps(0, 3):
        run.phase("generate")
        torch.ones(64, 64) @ torch.ones(64, 64)
        run.phase("train")
        run.log(step, {"loss": 1.0})
    run.close()
    names = {"step-1-rank-3.json.gz", "step-1-rank-3.txt"}
    assert {path.name for path in (tmp_path / "profile").iterdir()} == names
    lines = (tmp_path / "profile" / "step-1-rank-3.txt").read_text()
    phases, operators = lines.split("\n\n", 1)
    assert {line.split()[-1] for line in phases.splitlines()[1:]} >= {"generate", "train"}
    assert "aten::mm" in operators
    with gzip.open(tmp_path / "profile" / "step-1-rank-3.json.gz", "rt") as file:
        found = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"phase: generate", "phase: train", "aten::mm"} <= found


def test_a_step_that_fails_ends_its_profile(tmp_path):
    profiler = StepProfiler(tmp_path / "profile", (0,), 0)
    run = Run(tmp_path, {}, profiler=profiler)
    steps = run.steps(0, 1)
    next(steps)
    run.phase("train")
    steps.close()  # as after an error in the loop
    run.phase("checkpoint")
    assert not (tmp_path / "profile").exists()
    with profiler.step(0, "again"):  # another profile can start
        pass
    run.close()
    assert "again" in (tmp_path / "profile" / "step-0-rank-0.txt").read_text()
