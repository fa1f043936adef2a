"""Writes the directory of a run while it is running."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

from rlkit.tracking.files import (
    CONFIG,
    EVAL,
    METRICS,
    PHASES,
    SAMPLES,
    drop_last_rows,
    keep_earlier_config,
    read_object,
    replace_file,
    versions,
)
from rlkit.tracking.responses import log_responses
from rlkit.tracking.status import progress_bar, show_phase
from rlkit.tracking.throughput import (
    gpu_peak,
    highest_of_all_ranks,
    peak_flops_of_all_ranks,
    rates,
    sum_of_all_ranks,
)
from rlkit.tracking.trackers import start_trackers
from rlkit.tracking.watchdog import watch


class Run:
    """Writes a run's directory: `config.json`, `metrics.jsonl` (one object per step) and `eval.json`.

    Only the main process writes; on the others `log` and `log_evaluation` write no files. Each rank is always in a
    named phase, such as "generate". The seconds of each phase are logged, and a watchdog prints in which phases ranks
    wait.

    Args:
        out: the directory; `rlkit.runs.directory.claim_directory` finds one that no other run is writing to.
        config: the options. When a run is resumed, the config.json of the earlier start is kept as config-1.json, ...
        name: name of the run, for titles; by default the directory's name.
        is_main_process: whether this process writes the files.
        trackers: also log metrics to these trackers of accelerate: tensorboard, wandb, mlflow, trackio, ..., or one
            registered with it. A resumed run starts a new run in the tracker.
        write_page: writes the page of the running run. `log` calls it in a thread, at the first step and then every
            `page_seconds`. A failed call is reported, and does not end the run.
        page_seconds: seconds between two calls of `write_page`. 0: never call it.
        profiler: e.g. rlkit.profiling.StepProfiler; its `step` and `phase` are called.
        watchdog: when a rank has been in one phase for this many seconds, print the phases of all ranks, and repeat
            after the same time. A rank that has not responded for half a minute is named, too. The run continues. 0: no
            watchdog. It only reads files in `out`; the lowest responsive rank prints. `kill -USR1 <pid>` prints the
            stacks of a process.
        planned_memory: GiB that are expected in a phase, logged as `planned_memory/<phase>`.
        take_flops: returns the FLOPs that this rank has computed since the last call, see rlkit.engines.flops. Those of
            the phase "train" are logged as `flops`, summed over all ranks.

    Raises:
        ValueError: a tracker is unknown or not installed.
    """

    def __init__(
        self,
        out: str | Path,
        config: Mapping[str, Any],
        *,
        name: str = "",
        is_main_process: bool = True,
        trackers: Sequence[str] = (),
        write_page: Callable[[], Any] | None = None,
        page_seconds: float = 0.0,
        profiler: Any = None,
        watchdog: float = 0.0,
        planned_memory: Mapping[str, float] | None = None,
        take_flops: Callable[[], float] | None = None,
    ) -> None:
        self.out, self.is_main_process, self.name = Path(out), is_main_process, name or Path(out).name
        self.started = time.monotonic()
        self.progress: Any = None
        self.heldout_status = ""  # the newest held-out accuracy or loss, for the status line
        self.current_step = ""  # prefix of error messages
        self.running_step: int | None = None  # None before the first step, and after the last
        config = {**config, "versions": versions()}
        self.trackers = start_trackers(trackers, self.out, config) if is_main_process else []
        if is_main_process:
            self.out.mkdir(parents=True, exist_ok=True)
            keep_earlier_config(self.out)
            self._write(CONFIG, config)
        self.is_set_up = False  # whether errors are faults of the program, not unusable options; see rlkit.runs.start
        self.step = 0  # the last step that was logged
        self.ended = False  # whether no step is left; see rlkit.runs.evaluation.evaluate_at_start
        self.save_last_step: Callable[[], None] | None = None  # until it is saved; see rlkit.runs.checkpoints.save
        self.skipped_in_a_row = 0  # skipped steps at the end of the log
        self.first_mismatch: float | None = None  # of sampler and trainer; see PolicySampler.stop_if_out_of_sync
        self.sampler_bytes = 0  # that vLLM in this process holds, which are not in `memory/<phase>`
        self.peak, self.planned_memory = peak_flops_of_all_ranks(), planned_memory or {}
        self.write_page, self.page_seconds, self.profiler = write_page, page_seconds, profiler
        self._page_writer: threading.Thread | None = None
        self._page_due = 0.0
        self._responses: list[Mapping[str, Any]] = []
        self._without_responses: set[str] = set()  # trackers that could not take responses
        self._times: dict[str, float] = defaultdict(float)
        self._memory: dict[str, float] = defaultdict(float)
        self._take_flops, self._train_flops = take_flops, 0.0
        self.current_phase, self._since = "set_up", time.perf_counter()
        self._stop = threading.Event()
        self._file: Path | None = None
        if watchdog:
            self._file = self.out / PHASES / os.environ.get("RANK", "0")
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._write_phase()
            if hasattr(faulthandler, "register"):  # not on Windows
                faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or 2)
            arguments = (weakref.ref(self), self._stop, self._file, watchdog)
            threading.Thread(target=watch, args=arguments, daemon=True, name="watchdog").start()

    def drop_metrics_from(self, step: int) -> None:
        """Removes metrics and responses of `step` and later steps, which a resumed run logs again.

        Held-out responses after `step` finished steps stay, because they are not logged again.
        """
        if not self.is_main_process:
            return
        (self.out / METRICS).touch()
        for path in (self.out / METRICS, self.out / SAMPLES):
            if path.exists():
                drop_last_rows(path, lambda row: row["step"] >= step + (row.get("kind") == "held-out"))

    def steps(self, start: int, stop: int, *, unit: str = "step") -> Iterator[int]:
        """Yields the steps from `start` to `stop` - 1, with a progress bar, or none if the run has `ended`.

        Removes earlier metrics of these steps.
        """
        self.drop_metrics_from(start)
        self.step = start - 1
        self.progress = progress_bar(start, stop, unit=unit, show=self.is_main_process)
        try:
            for step in range(start, start if self.ended else stop):
                self.current_step, self.running_step = f"{unit} {step}: ", step
                with self.profiler.step(step, self.current_phase) if self.profiler else nullcontext():
                    yield step
                self.progress.update()
        finally:
            self.progress.close()
            self.progress, self.current_step, self.running_step = None, "", None

    def print(self, text: str) -> None:
        """Prints a line, above the progress bar if there is one. Lone surrogates are escaped."""
        text = text.encode("utf-8", "backslashreplace").decode()
        if self.progress is None:
            print(text, flush=True)
        else:
            self.progress.write(text)

    def stop(self, reason: str) -> NoReturn:
        """Ends the process with an error message. All files stay."""
        sys.exit(f"{self.name}: {self.current_step}{reason}")

    def phase(self, name: str) -> None:
        """Enters the phase `name`. The next `log` writes the seconds of the previous phase as `time/<phase>`."""
        now, peak = time.perf_counter(), gpu_peak(self.sampler_bytes)
        flops = self._take_flops() if self._take_flops else 0.0
        if self.current_phase == "train":
            self._train_flops += flops
        if self.current_phase != "set_up":
            self._times[f"time/{self.current_phase}"] += now - self._since
            self._memory[f"memory/{self.current_phase}"] = max(self._memory[f"memory/{self.current_phase}"], peak)
        self.current_phase, self._since, self.is_set_up = name, now, True
        if self.profiler:
            self.profiler.phase(name)
        self._write_phase()
        if self.progress is not None:
            show_phase(self.progress, name)

    def keep_responses(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Keeps records of responses, which the next `log` writes to samples.jsonl; see rlkit.report.responses."""
        self._responses += records

    def log(self, step: int, metrics: Mapping[str, Any], *, show: Mapping[str, str] | None = None) -> None:
        """Writes one line of `metrics.jsonl`, with these metrics and timings, and sends it to the trackers.

        `time/<phase>` is the time of this rank in a phase since the last line, in seconds. `time/tokens_per_second` is
        computed from `tokens`, over all phases but evaluation and checkpoints. `time/train_flops_per_second` and, for
        known GPUs, `time/mfu` are computed from `flops`, those of the phase "train", unless `metrics` has others.
        Metrics that depend on the clock are named `time/...`. All others are reproducible.

        `memory/<phase>` is the peak of torch's allocations on a GPU without the weights and the cache of vLLM, in GiB,
        the highest of all ranks, which call this together. `planned_memory/<phase>` beside it is what was planned.
        Without a GPU both are missing.

        The attribute `skipped_in_a_row` counts how many of the last steps skipped all updates (`skipped_steps`).

        Args:
            step: number of the step.
            metrics: values by name.
            show: metrics to show in the status line, by short name: {"reward": "reward/mean"}.
        """
        skipped = any(x >= 1 for name, x in metrics.items() if name.rpartition("/")[2] == "skipped_steps")
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self.phase(self.current_phase)
        times, self._times, self.step = dict(self._times), defaultdict(float), step
        measured, self._memory = {name: x for name, x in self._memory.items() if x}, defaultdict(float)
        memory = highest_of_all_ranks(measured)
        planned = {f"planned_memory/{name}": x for name, x in self.planned_memory.items() if f"memory/{name}" in memory}
        metrics = {**self._flops(times), **metrics}
        row = {**metrics, **times, **memory, **planned, **rates(metrics, times, self.peak)}
        if self.is_main_process:
            self.append(METRICS, [{"step": step, **row}])
            self.append(SAMPLES, [{**record, "step": step} for record in self._responses])
            self._write_page_if_due()
        self._log_responses_to_trackers()
        self._responses = []
        if self.progress is not None:
            self.progress.set_postfix_str(self._status(row, show or {}), refresh=False)
        self._log_to_trackers(row, step)

    def _flops(self, times: Mapping[str, float]) -> dict[str, float]:
        """`flops` of all ranks in the phase "train" since the last line, if there was such a phase."""
        if self._take_flops is None or "time/train" not in times:
            return {}
        flops, self._train_flops = self._train_flops, 0.0
        return {"flops": sum_of_all_ranks(flops)}

    def _status(self, row: Mapping[str, Any], show: Mapping[str, str]) -> str:
        """ "reward 0.244, held-out accuracy 0.6, 1,240 tokens/s"."""
        shown = [f"{short} {row[name]:.3g}" for short, name in show.items() if name in row]
        speed = row.get("time/tokens_per_second")
        return ", ".join([*shown, *filter(None, [self.heldout_status]), *([f"{speed:,.0f} tokens/s"] if speed else [])])

    def append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends rows to a .jsonl file. Ends the run with an error message if that fails, as on a full disk."""
        text = "".join(json.dumps(row) + "\n" for row in rows)
        try:
            if text:
                with (self.out / name).open("a") as file:
                    file.write(text)
        except OSError as error:
            self.stop(f"{self.out / name}: expected room for {len(text)} bytes, got: {error}")

    def _write_page_if_due(self) -> None:
        """Starts a thread that writes the page, if `page_seconds` have passed and the last thread has finished."""
        writing = self._page_writer is not None and self._page_writer.is_alive()
        if self.write_page is None or not self.page_seconds or writing or time.monotonic() < self._page_due:
            return
        self._page_due = time.monotonic() + self.page_seconds
        self._page_writer = threading.Thread(target=self._write_page_in_thread, daemon=True, name="page")
        self._page_writer.start()

    def _write_page_in_thread(self) -> None:
        assert self.write_page is not None
        try:
            self.write_page()
        except Exception as error:  # a page that cannot be written must not end the run
            self.print(f"page of the run: could not be written: {type(error).__name__}: {error}")

    def log_evaluation(self, **results: Any) -> dict[str, Any]:
        """Adds results to `eval.json` and returns its whole content.

        Args:
            results: values by name. `evaluations` is the list of all evaluations, each with its `step`, the number of
                finished steps. The newest one is sent to trackers as `heldout/...`, at its step.
        """
        merged = self.write_evaluation(**results)
        newest = (results.get("evaluations") or [{}])[-1]
        for name, title in (("heldout_loss", "held-out loss"), ("accuracy", "held-out accuracy")):
            if name in newest:
                self.heldout_status = f"{title} {newest[name]:.3g}"
        during = {f"heldout/{name}": x for name, x in newest.items() if name != "step"}
        evaluated = [one["step"] for one in merged.get("evaluations", ()) if "step" in one]
        step = evaluated[-1] if evaluated else self.step
        self._log_to_trackers({f"eval/{name}": x for name, x in results.items()} | during, step)
        return merged

    def write_evaluation(self, **results: Any) -> dict[str, Any]:
        """Adds results to `eval.json` and returns its whole content. Trackers do not get them."""
        merged = {**read_object(self.out / EVAL), **results}
        if self.is_main_process:
            self._write(EVAL, merged)
        return merged

    def close(self) -> None:
        """Closes the trackers, and stops the watchdog and the page writer. All files are always complete."""
        if self._page_writer is not None:
            self._page_writer.join()
        for tracker in self.trackers:
            try:
                tracker.finish()
            except Exception as error:  # the run's own files are complete without the tracker
                self.print(f"tracker {tracker.name}: could not be closed: {type(error).__name__}: {error}")
        self.trackers = []
        self._stop.set()
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            try:
                self._file.parent.rmdir()  # succeeds on the last rank
            except OSError:
                pass
            self._file = None

    def _write_phase(self) -> None:
        if self._file is not None:
            try:
                replace_file(self._file, f"{time.time()} {os.getpid()} {socket.gethostname()} {self.current_phase}")
            except OSError:  # a failure of the watchdog must not end the run
                pass

    def _log_to_trackers(self, values: Mapping[str, Any], step: int) -> None:
        numbers = {name: x for name, x in values.items() if isinstance(x, int | float)}
        for tracker in self.trackers:
            try:
                tracker.log(numbers, step=max(step, 0))
            except Exception as error:  # the run's own files have the metrics
                self.print(f"tracker {tracker.name}: metrics could not be logged: {type(error).__name__}: {error}")

    def _log_responses_to_trackers(self) -> None:
        """Sends the kept responses to the trackers. One that cannot take them gets no further responses."""
        for tracker in self.trackers if self._responses else ():
            if tracker.name not in self._without_responses:
                try:
                    log_responses(tracker, self.out, self.step, self._responses)
                except Exception as error:  # samples.jsonl has the responses
                    self._without_responses.add(tracker.name)
                    problem = f"{type(error).__name__}: {error}"
                    self.print(f"tracker {tracker.name}: responses could not be logged: {problem}")

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps(content, indent=1, default=str) + "\n"
        try:
            replace_file(self.out / name, text)
        except OSError as error:
            self.stop(f"{self.out / name}: expected room for {len(text)} bytes, got: {error}")
