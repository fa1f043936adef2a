"""Where the time of a step goes: a trace and tables of chosen steps, written by every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PHASE = "phase: "


class StepProfiler:
    """Profiles chosen steps with torch's profiler.

    For each it writes `step-N-rank-R.json.gz`, a trace that https://ui.perfetto.dev and chrome://tracing show, and
    `step-N-rank-R.txt`: the seconds of each phase, and the operators that took most time, on the GPU if there is one.

    Args:
        folder: made when the first step is profiled.
        steps: to profile. Profiling makes a step slower, and its `time/...` metrics larger.
        rank: of this process, for the names of the files.
    """

    def __init__(self, folder: Path, steps: Collection[int], rank: int) -> None:
        self.folder, self.steps, self.rank = folder, steps, rank
        self._profile: Any = None
        self._phase: Any = None

    @contextmanager
    def step(self, step: int, phase: str) -> Iterator[None]:
        """Profile what happens inside, if this step is one of those chosen; it begins in this phase."""
        if step not in self.steps:
            yield
            return
        import torch
        from torch.profiler import ProfilerActivity, profile

        on_gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        try:
            with profile(activities=activities) as self._profile:
                self.phase(phase)
                try:
                    yield
                finally:
                    self._end_phase()
            self._write(step, "self_device_time_total" if on_gpu else "self_cpu_time_total")
        finally:
            self._profile = None

    def phase(self, name: str) -> None:
        """Mark in the trace that another phase begins."""
        if self._profile is not None:
            from torch.profiler import record_function

            self._end_phase()
            self._phase = record_function(f"{PHASE}{name}")
            self._phase.__enter__()

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None

    def _write(self, step: int, sort_by: str) -> None:
        """The trace and the tables of the step that has ended."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{step}-rank-{self.rank}"
        self._profile.export_chrome_trace(f"{path}.json.gz")
        averages = self._profile.key_averages()
        phases = [event for event in averages if event.key.startswith(PHASE)]
        lines = [
            f"step {step}, rank {self.rank}: seconds by phase, with what the profiler takes",
            *(f"{event.cpu_time_total / 1e6:10.3f}  {event.key.removeprefix(PHASE)}" for event in phases),
            "",
            averages.table(sort_by=sort_by, row_limit=40, max_name_column_width=80),
        ]
        path.with_suffix(".txt").write_text("\n".join(lines))
