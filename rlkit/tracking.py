"""Logging of a run: a directory of plain files, written while it runs, and optional experiment trackers.

run = Run(out, asdict(cfg), trackers=("tensorboard", "wandb"), watchdog=600)
for step in range(steps):
    run.phase("generate")
    ...
    run.phase("train")
    ...
    run.log(step, {"reward/mean": mean, "tokens": tokens, "flops": flops})     # time/generate, time/train, ... too
run.close()
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import platform
import signal
import socket
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

CONFIG, METRICS, EVAL, PHASES = "config.json", "metrics.jsonl", "eval.json", "phases"
BEAT_SECONDS = 5.0  # how often a rank tells the watchdog that it responds
SILENT_SECONDS = 30.0  # the watchdog takes a rank for lost that has not responded for so long
SAMPLES = "samples.jsonl"  # of rlkit.report.answers
PHASES_OUTSIDE_STEPS = ("time/evaluate", "time/checkpoint")  # do not count in tokens per second

# Dense bfloat16 FLOP/s of one GPU, from the vendors' data sheets (V100: float16, as it has no bfloat16).
# The first key whose words are in the device's name (in upper case) counts: "H100 PCIE" before "H100".
PEAK_FLOPS = {
    "H100 PCIE": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "H800 PCIE": 756e12,
    "H800": 989.4e12,
    "GH200": 989.4e12,
    "H200 NVL": 835e12,
    "H200": 989.4e12,
    "H20": 148e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "A10": 125e12,
    "A30": 165e12,
    "A40": 149.7e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "V100": 125e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "MI325X": 1307.4e12,
    "MI300X": 1307.4e12,
    "MI250X": 383e12,
}


class Run:
    """Writes a run's directory: `config.json`, `metrics.jsonl` (one object a step) and `eval.json`.

    Only one process writes; on the others `log` and `log_evaluation` do nothing. A rank is always
    in a named phase, such as "generate": the seconds of each phase are logged, and a watchdog prints where ranks wait.

    Args:
        out: the directory; `rlkit.runs.claim_directory` finds one that no other run is writing to.
        config: the options of this start. The config of an earlier start in the directory is kept as config-1.json, ...
        name: of the run, for titles; the directory's name by default.
        writes: whether this process writes.
        trackers: also log metrics to these trackers of accelerate: tensorboard, wandb, mlflow, trackio, ..., or one
            registered with it. A resumed run starts a new run in the tracker.
        write_page: called in a thread by `log`, at the first step and then every `page_seconds`: it writes the page of
            the run that is going on. A call that fails is reported, and does not end the run.
        page_seconds: 0: `write_page` is never called.
        profiler: e.g. rlkit.profiling.StepProfiler; it is told of steps and phases.
        watchdog: when a rank has been in one phase for this many seconds, print the phases of all ranks, and again
            after the same time; and name a rank that does not respond for half a minute. The run continues. 0: never.
            The watchdog reads files in `out` and contacts no other process; the lowest rank whose process responds
            prints. `kill -USR1 <pid>` prints the stacks of a process.

    Raises:
        ValueError: a tracker that is not known or not installed.
    """

    def __init__(
        self,
        out: str | Path,
        config: Mapping[str, Any],
        *,
        name: str = "",
        writes: bool = True,
        trackers: Sequence[str] = (),
        write_page: Callable[[], Any] | None = None,
        page_seconds: float = 0.0,
        profiler: Any = None,
        watchdog: float = 0.0,
    ) -> None:
        self.out, self.writes, self.name = Path(out), writes, name or Path(out).name
        self.started = time.monotonic()
        self.progress: Any = None
        self.heldout_status = ""  # the newest held-out accuracy or loss, for the line of status
        self.current_step = ""  # for messages
        self.running_step: int | None = None  # None before the first step, and after the last
        config = {**config, "versions": versions()}
        self.trackers = start_trackers(trackers, self.out, config) if writes else []
        if writes:
            self.out.mkdir(parents=True, exist_ok=True)
            keep_earlier_config(self.out)
            self._write(CONFIG, config)
        self.step = 0  # the last step that was logged
        self.skipped_in_a_row = 0  # steps up to the last that was logged
        self.peak = peak_flops_of_all_ranks()
        self.write_page, self.page_seconds, self.profiler = write_page, page_seconds, profiler
        self._page_writer: threading.Thread | None = None
        self._page_due = 0.0
        self._answers: list[Mapping[str, Any]] = []
        self._times: dict[str, float] = defaultdict(float)
        self._memory: dict[str, float] = defaultdict(float)
        self._phase, self._since = "set_up", time.perf_counter()
        self._stop = threading.Event()
        self._file: Path | None = None
        if watchdog:
            self._file = self.out / PHASES / os.environ.get("RANK", "0")
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._write_phase()
            if hasattr(faulthandler, "register"):  # not on Windows
                faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or 2)
            watch = (weakref.ref(self), self._stop, self._file, watchdog)
            threading.Thread(target=_watch, args=watch, daemon=True, name="watchdog").start()

    def drop_metrics_from(self, step: int) -> None:
        """Removes metrics and kept answers of `step` and later ones; a resumed run logs them again.

        Answers to held-out prompts after `step` finished steps are not logged again, and stay.
        """
        if not self.writes:
            return
        for path in (self.out / METRICS, self.out / SAMPLES):
            if path.exists() or path.name == METRICS:
                rows = read_metrics(path) if path.exists() else []
                kept = [row for row in rows if row["step"] < step + (row.get("kind") == "held-out")]
                _replace(path, "".join(json.dumps(row) + "\n" for row in kept))

    def steps(self, start: int, stop: int, *, unit: str = "step") -> Iterator[int]:
        """The numbers from `start` to `stop` - 1, with a progress bar; removes metrics logged for them earlier."""
        self.drop_metrics_from(start)
        self.step = start - 1
        self.progress = progress_bar(start, stop, unit=unit, show=self.writes)
        try:
            for step in range(start, stop):
                self.current_step, self.running_step = f"{unit} {step}: ", step
                with self.profiler.step(step, self._phase) if self.profiler else nullcontext():
                    yield step
                self.progress.update()
        finally:
            self.progress.close()
            self.progress, self.current_step, self.running_step = None, "", None

    def print(self, text: str) -> None:
        """Prints a line, above the progress bar if there is one. Half a character of a surrogate pair is escaped."""
        text = text.encode("utf-8", "backslashreplace").decode()
        if self.progress is None:
            print(text, flush=True)
        else:
            self.progress.write(text)

    def stop(self, reason: str) -> NoReturn:
        """Ends the process with an error message; saved files stay."""
        sys.exit(f"{self.name}: {self.current_step}{reason}")

    def phase(self, name: str) -> None:
        """Enters the phase `name`. The seconds in the previous phase go into the next row, as `time/<phase>`."""
        now, peak = time.perf_counter(), gpu_peak()
        if self._phase != "set_up":
            self._times[f"time/{self._phase}"] += now - self._since
            self._memory[f"memory/{self._phase}"] = max(self._memory[f"memory/{self._phase}"], peak)
        self._phase, self._since = name, now
        if self.profiler:
            self.profiler.phase(name)
        self._write_phase()
        if self.progress is not None:
            show_phase(self.progress, name)

    def keep_answers(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Answers that the next `log` writes to samples.jsonl; see rlkit.report.answers."""
        self._answers += records

    def log(self, step: int, metrics: Mapping[str, Any], *, show: Mapping[str, str] | None = None) -> None:
        """Writes one line of `metrics.jsonl`, with these metrics and timings, and sends it to the trackers.

        `time/<phase>` are the seconds of this rank since the last line. From `tokens` follows `time/tokens_per_second`,
        over all phases but evaluation and checkpoints. From `flops` (of the phase "train", see rlkit.engines.flops)
        follow `time/train_flops_per_second` and, for known GPUs, `time/mfu`, the share of the peak of all ranks. Every
        metric that depends on the clock is named `time/...`; all others are reproducible.

        `memory/<phase>` is the peak in GiB that torch allocated on this rank's GPU; there is none without a GPU.

        `skipped_in_a_row` counts the last steps in which an engine skipped every update: its `skipped_steps`.

        Args:
            step: number of the step.
            metrics: by name.
            show: metrics to show in the line of status, by a short name: {"reward": "reward/mean"}.
        """
        skipped = any(x >= 1 for name, x in metrics.items() if name.rpartition("/")[2] == "skipped_steps")
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self.phase(self._phase)
        times, self._times, self.step = dict(self._times), defaultdict(float), step
        memory, self._memory = {name: x for name, x in self._memory.items() if x}, defaultdict(float)
        row = {**metrics, **times, **memory, **rates(metrics, times, self.peak)}
        if self.writes:
            self._append(METRICS, [{"step": step, **row}])
            self._append(SAMPLES, [{**record, "step": step} for record in self._answers])
            self._write_page_if_due()
        self._log_answers_to_trackers()
        self._answers = []
        if self.progress is not None:
            self.progress.set_postfix_str(self._status(row, show or {}), refresh=False)
        self._log_to_trackers(row)

    def _status(self, row: Mapping[str, Any], show: Mapping[str, str]) -> str:
        """ "reward 0.244, held-out accuracy 0.6, 1,240 tokens/s"."""
        shown = [f"{short} {row[name]:.3g}" for short, name in show.items() if name in row]
        speed = row.get("time/tokens_per_second")
        return ", ".join([*shown, *filter(None, [self.heldout_status]), *([f"{speed:,.0f} tokens/s"] if speed else [])])

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds rows to a .jsonl file. The run ends with one sentence if there is no room for them."""
        text = "".join(json.dumps(row) + "\n" for row in rows)
        try:
            if text:
                with (self.out / name).open("a") as file:
                    file.write(text)
        except OSError as error:
            self.stop(f"{self.out / name}: expected room for {len(text)} bytes, got: {error}")

    def _write_page_if_due(self) -> None:
        """Starts a thread that writes the page, unless one was started less than `page_seconds` ago or still works."""
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
        except Exception as error:  # the run is worth more than its page
            self.print(f"page of the run: could not be written: {type(error).__name__}: {error}")

    def log_evaluation(self, **results: Any) -> dict[str, Any]:
        """Adds results to `eval.json` and returns its whole content.

        Args:
            results: by name. `evaluations` is a list of what was measured, each with its `step`; trackers get the
                newest one as `heldout/...`.
        """
        newest = {"step": 0, **(results.get("evaluations") or [{}])[-1]}
        for name, said in (("heldout_loss", "held-out loss"), ("accuracy", "held-out accuracy")):
            if name in newest:
                self.heldout_status = f"{said} {newest[name]:.3g}"
        path = self.out / EVAL
        merged = {**read_object(path), **results}
        if self.writes:
            self._write(EVAL, merged)
        during = {f"heldout/{name}": x for name, x in newest.items() if name != "step"}
        self._log_to_trackers({f"eval/{name}": x for name, x in results.items()} | during)
        return merged

    def close(self) -> None:
        """Ends the trackers, the watchdog and the writing of pages. All files are complete at any time."""
        if self._page_writer is not None:
            self._page_writer.join()
        for tracker in self.trackers:
            try:
                tracker.finish()
            except Exception as error:  # its server, its disk: the run's own files are complete without it
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
                _replace(self._file, f"{time.time()} {os.getpid()} {socket.gethostname()} {self._phase}")
            except OSError:  # the watchdog is not worth a run
                pass

    def _log_to_trackers(self, values: Mapping[str, Any]) -> None:
        numbers = {name: x for name, x in values.items() if isinstance(x, int | float)}
        for tracker in self.trackers:
            tracker.log(numbers, step=max(self.step, 0))

    def _log_answers_to_trackers(self) -> None:
        """Kept answers as a table, in trackers that have tables: of accelerate's, wandb and clearml."""
        columns = ["step", "question", "expected", "answer", "reward"]
        rows = [
            [self.step, record["question"], record["expected"], answer["text"], answer["reward"]]
            for record in self._answers
            for answer in record["answers"]
        ]
        for tracker in self.trackers if rows else ():
            if hasattr(tracker, "log_table"):
                tracker.log_table("answers", columns=columns, data=rows, step=self.step)

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        _replace(self.out / name, json.dumps(content, indent=1, default=str) + "\n")


def rates(metrics: Mapping[str, Any], times: Mapping[str, float], peak: float | None) -> dict[str, float]:
    """Tokens per second, FLOP/s, and model FLOPs utilisation (MFU).

    tokens / step seconds; flops / train seconds; flops / (train seconds * peak). MFU is defined as in PaLM
    (https://arxiv.org/abs/2204.02311, appendix B), without the FLOPs of recomputation.

    Args:
        metrics: of a step; `tokens` and `flops` are sums over all ranks; `flops` is nan if unknown.
        times: seconds by phase, `time/train` among them.
        peak: FLOP/s of all ranks together; None if unknown.
    """
    found = {}
    seconds = sum(x for name, x in times.items() if name not in PHASES_OUTSIDE_STEPS)
    if "tokens" in metrics and seconds:
        found["time/tokens_per_second"] = metrics["tokens"] / seconds
    if times.get("time/train") and math.isfinite(metrics.get("flops", math.nan)):
        found["time/train_flops_per_second"] = metrics["flops"] / times["time/train"]
        if peak:
            found["time/mfu"] = found["time/train_flops_per_second"] / peak
    return found


def peak_flops(device: str) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU, by its name from `torch.cuda.get_device_name`; None for an unknown GPU."""
    words = f" {device.upper().replace('-', ' ')} "
    return next((peak for name, peak in PEAK_FLOPS.items() if f" {name} " in words), None)


def peak_flops_of_all_ranks() -> float | None:
    """`peak_flops` of this rank's GPU times the number of ranks; None without a GPU, or with an unknown one."""
    import torch

    if not torch.cuda.is_available():
        return None
    peak = peak_flops(torch.cuda.get_device_name())
    return None if peak is None else peak * int(os.environ.get("WORLD_SIZE", 1))


def gpu_peak() -> float:
    """GiB that torch had allocated at most on this rank's GPU since the last call; 0 without a GPU.

    What others allocate is not counted: NCCL, CUDA itself, and a sampler with an allocator of its own.
    """
    import torch

    if not torch.cuda.is_available():
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return peak


def start_trackers(names: Sequence[str], out: Path, config: Mapping[str, Any]) -> list[Any]:
    """Starts trackers of accelerate and sends them the config. The project is `rlkit`, the run the name of `out`.

    TensorBoard writes to `out/tensorboard`; other trackers are configured by their own environment variables.

    Args:
        names: of trackers.
        out: the run's directory.
        config: the run's options.

    Raises:
        ValueError: a name that accelerate does not know, or whose package is not installed.
    """
    if not names:
        return []
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    tracker_options = {
        "tensorboard": {"run_name": "tensorboard", "logging_dir": str(out)},
        "mlflow": {"experiment_name": "rlkit", "run_name": out.name},
        "wandb": {"run_name": "rlkit", "name": out.name},
        "trackio": {"run_name": "rlkit", "name": out.name},
    }
    installed = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ValueError(f"trackers: expected some of {', '.join(LOGGER_TYPE_TO_CLASS)}, got {name!r}")
        if name in LoggerType.list() and name not in installed:
            raise ValueError(f"trackers: expected installed ones, got {name!r}, whose package is not installed")
    PartialState()  # accelerate's trackers need it
    plain = {name: x if isinstance(x, bool | int | float | str | None) else str(x) for name, x in config.items()}
    trackers = []
    for name in dict.fromkeys(names):
        kind = LOGGER_TYPE_TO_CLASS[name]
        directory = {"logging_dir": str(out)} if kind.requires_logging_directory else {}
        tracker = kind(**tracker_options.get(name, {"run_name": "rlkit", **directory}))
        tracker.start()
        tracker.store_init_configuration(plain)
        trackers.append(tracker)
    return trackers


def _watch(run: weakref.ref[Run], stop: threading.Event, file: Path, seconds: float) -> None:
    """Prints which rank waits in which phase, and which does not respond, while the run exists.

    Each rank touches its file now and then. Only the lowest rank that responds prints.
    """
    beat, patience = min(BEAT_SECONDS, seconds / 4), min(SILENT_SECONDS, 0.75 * seconds)
    printed, own = time.time(), int(file.name)
    touched: dict[int, tuple[float, float]] = {}  # rank -> when it says that it touched its file; when that was seen
    named: set[int] = set()
    while not stop.wait(beat) and run() is not None:
        try:
            os.utime(file)  # a rank that is stopped cannot, nor one in which a long call holds the interpreter lock
            now, phases = time.time(), {phase.rank: phase for phase in _phases(file.parent)}
            for rank, phase in phases.items():
                if touched.get(rank, (0.0, 0.0))[0] != phase.touched:
                    touched[rank] = phase.touched, now  # by this machine's clock, as the other's may be wrong
            silent = {rank: now - touched[rank][1] for rank in phases if now - touched[rank][1] >= patience}
            if own != min(phases.keys() - silent.keys(), default=own):
                continue
            for rank in sorted(silent.keys() - named):
                _warn(f"rank {rank} {_how_silent(phases[rank], silent[rank])}")
            named = set(silent)
            waits = [(now - phase.since, rank, phase.name) for rank, phase in phases.items()]
            if now - printed >= seconds and max(waits)[0] >= seconds:
                printed = now
                _warn(
                    f"{describe_waits(waits)}; kill -USR1 prints the stacks of a process, their ids are in "
                    f"{file.parent}"
                )
        except (OSError, ValueError):  # a file is being removed
            continue


def _warn(text: str) -> None:
    print(f"\nwatchdog: {text}", file=sys.stderr, flush=True)


def _how_silent(phase: _Phase, seconds: float) -> str:
    """What is known of a rank that does not respond, and what to do."""
    where = f"(process {phase.process} on {phase.host}, in {phase.name})"
    state = _process_state(phase.process) if phase.host == socket.gethostname() else "unknown"
    if state == "T":
        return f"{where} was stopped {seconds:.0f} s ago: continue it with kill -CONT {phase.process}, or end the run"
    if not state:
        return f"{where} has ended: end the run, and continue it with --resume"
    return (
        f"{where} has not responded for {seconds:.0f} s: it is in one long call, or its machine hangs or cannot be "
        "reached; if it stays so, end the run, and continue it with --resume"
    )


def _process_state(process: int) -> str:
    """The letter by which Linux names the state of a process of this machine: T is stopped; "" if there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "" if Path("/proc/self/stat").exists() else "unknown"


class _Phase(NamedTuple):
    """What a rank's file says, and when it was touched by the clock of the rank's machine."""

    rank: int
    since: float
    process: int
    host: str
    name: str
    touched: float


def _phases(folder: Path) -> list[_Phase]:
    """The files of all ranks."""
    found = []
    for rank in range(int(os.environ.get("WORLD_SIZE", 1))):
        if (path := folder / str(rank)).exists():
            since, process, host, name = path.read_text().split(" ", 3)
            found.append(_Phase(rank, float(since), int(process), host, name, path.stat().st_mtime))
    return found


def describe_waits(waits: Sequence[tuple[float, int, str]]) -> str:
    """A sentence about (seconds, rank, phase): "rank 1 in reward for 65 s; ranks 0, 2 in train for 63 s".

    The phase with the fewest ranks comes first, as the other ranks probably wait for these.
    """
    by_phase: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for seconds, rank, phase in waits:
        by_phase[phase].append((seconds, rank))
    parts = []
    for phase, members in sorted(by_phase.items(), key=lambda item: len(item[1])):
        ranks = ", ".join(str(rank) for _, rank in sorted(members, key=lambda member: member[1]))
        parts.append(f"rank{'s' * (len(members) > 1)} {ranks} in {phase} for {max(members)[0]:.0f} s")
    return "; ".join(parts)


def progress_bar(start: int, stop: int, *, unit: str = "step", show: bool = True) -> Any:
    """A tqdm bar from `start` to `stop`: "step 37/220 |###   | reward 0.244, ... | 01:27, 07:10 left | train".

    If stderr is a file or a pipe, it writes a line every few seconds instead.
    """
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    style: dict[str, Any] = {} if terminal else {"file": _LinePerState(sys.stderr), "mininterval": 5.0}
    bar = "|{bar:12}| " if terminal else ""
    form = (
        f"{unit} {{n_fmt}}/{{total_fmt}} {bar}{{percentage:.0f}}%{{postfix}} | {{elapsed}}, {{remaining}} left{{desc}}"
    )
    return tqdm(initial=start, total=stop, unit=unit, disable=not show, bar_format=form, **style)


def show_phase(bar: Any, phase: str) -> None:
    """Name the phase at the end of a progress bar's line; the line is written anew if the last one is old enough."""
    if bar.disable:
        return
    bar.set_description_str(f" | {phase}", refresh=False)
    now = time.time()
    if now - bar.last_print_t >= max(bar.mininterval, 1.0):
        bar.last_print_t = now
        bar.refresh()


class _LinePerState:
    """A stream that writes each state of a progress bar as a line, for outputs where nothing can be overwritten."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        if line := text.strip("\r\n "):
            self.stream.write(line + "\n")

    def flush(self) -> None:
        self.stream.flush()


def keep_earlier_config(out: Path) -> None:
    """Renames the config.json of an earlier start to config-1.json, config-2.json, ..."""
    if (out / CONFIG).exists():
        earlier = len(list(out.glob("config-*.json")))
        (out / CONFIG).rename(out / f"config-{earlier + 1}.json")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl. Lines that are no object with a whole number as `step` are left out: one that was
    cut short by a kill, say."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no such file, or it holds something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that influence a run."""
    found = {"python": platform.python_version()}
    for name in ("rlkit-vlm", "torch", "transformers", "vllm", "peft", "flash-attn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _replace(path: Path, text: str) -> None:
    """Writes a file atomically."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)
