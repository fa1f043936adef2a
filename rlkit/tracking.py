"""What a run leaves behind: a directory of plain files, written as the run goes, and what trackers are told beside it.

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
import os
import platform
import signal
import socket
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn, TextIO

CONFIG, METRICS, EVAL, PHASES = "config.json", "metrics.jsonl", "eval.json", "phases"
ASIDE = ("time/evaluate", "time/checkpoint")  # phases that are no part of a step

# Dense bfloat16 FLOP/s of one card, without sparsity, from the makers' data sheets (V100: float16, it has no bfloat16).
# The first whose words a device's name has, in upper case, counts: "H100 PCIE" stands before "H100".
PEAKS = {
    "H100 PCIE": 756e12, "H100 NVL": 835e12, "H100": 989.4e12, "H800 PCIE": 756e12, "H800": 989.4e12,
    "GH200": 989.4e12, "H200 NVL": 835e12, "H200": 989.4e12, "H20": 148e12, "GB200": 2500e12, "B200": 2250e12,
    "A100": 312e12, "A800": 312e12, "A10": 125e12, "A30": 165e12, "A40": 149.7e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12, "V100": 125e12, "RTX 4090": 165.2e12, "RTX 3090": 71e12,
    "MI325X": 1307.4e12, "MI300X": 1307.4e12, "MI250X": 383e12,
}  # fmt: skip


class Run:
    """Writes a run's directory: `config.json`, `metrics.jsonl` (one object a step) and `eval.json`.

    Only one process writes; on the others `log` and `evaluation` do nothing. What a rank is doing has a name, its
    phase: the seconds of each phase are logged, and a watchdog prints who waits where.

    Args:
        out: the directory; `rlkit.runs.claim_directory` finds one that no other run is writing to.
        config: the options of this start. That of an earlier start in the directory is kept, as config-1.json, ...
        name: of the run, for titles; the directory's name by default.
        writes: this is the process that writes.
        trackers: names of accelerate's trackers (tensorboard, wandb, mlflow, trackio, ..., or one registered with
            it) that get the same metrics; a resumed run is a new one in those that keep runs.
        watchdog: once a rank has been in one phase for so many seconds, the phases of all ranks are printed, and again
            after as many; the run goes on. 0: never. It reads files in `out` and asks no other process; the first rank
            that still answers prints. `kill -USR1 <pid>` prints the stacks of a process.

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
        watchdog: float = 0.0,
    ) -> None:
        self.out, self.writes, self.name = Path(out), writes, name or Path(out).name
        self.progress: Any = None
        self.doing = ""  # the step, for messages
        config = {**config, "versions": versions()}
        self.trackers = start_trackers(trackers, self.out, config) if writes else []
        if writes:
            self.out.mkdir(parents=True, exist_ok=True)
            keep_earlier_config(self.out)
            self._write(CONFIG, config)
        self.step = 0
        self.peak = peak_flops_of_all_ranks()
        self._times: dict[str, float] = defaultdict(float)
        self._memory: dict[str, float] = defaultdict(float)
        self._phase, self._since = "set_up", time.perf_counter()
        self._stop = threading.Event()
        self._file: Path | None = None
        if watchdog:
            self._file = self.out / PHASES / os.environ.get("RANK", "0")
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._note()
            if hasattr(faulthandler, "register"):  # not on Windows
                faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or 2)
            watch = (weakref.ref(self), self._stop, self._file, watchdog)
            threading.Thread(target=_watch, args=watch, daemon=True, name="watchdog").start()

    def start_at(self, step: int) -> None:
        """Drop what was logged from `step` on: a resumed run logs it again."""
        path = self.out / METRICS
        if self.writes:
            kept = [row for row in read_metrics(path) if row["step"] < step] if path.exists() else []
            _replace(path, "".join(json.dumps(row) + "\n" for row in kept))

    def steps(self, start: int, stop: int, *, unit: str = "step") -> Iterator[int]:
        """The numbers from `start` on, with a progress bar; what was logged of them before is dropped."""
        self.start_at(start)
        self.progress = progress_bar(start, stop, unit=unit, show=self.writes)
        try:
            for step in self.progress:
                self.doing = f"{unit} {step}: "
                yield step
        finally:
            self.progress.close()
            self.progress, self.doing = None, ""

    def say(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self.progress is None:
            print(text, flush=True)
        else:
            self.progress.write(text)

    def stop(self, reason: str) -> NoReturn:
        """End the process because the run cannot go on; what was saved stays."""
        sys.exit(f"{self.name}: {self.doing}{reason}")

    def phase(self, name: str) -> None:
        """From here on this rank does `name`; what it did until now goes into the next row as `time/<its name>`."""
        now, peak = time.perf_counter(), gpu_peak()
        if self._phase != "set_up":
            self._times[f"time/{self._phase}"] += now - self._since
            self._memory[f"memory/{self._phase}"] = max(self._memory[f"memory/{self._phase}"], peak)
        self._phase, self._since = name, now
        self._note()

    def log(self, step: int, metrics: Mapping[str, Any], *, show: Mapping[str, str] | None = None) -> None:
        """One line of `metrics.jsonl`, on disk when this returns: these metrics and what the clock says.

        `show` has the metrics that stand beside the progress bar, by their short names: {"reward": "reward/mean"}.

        `time/<phase>` are seconds on this rank since the last line. Of `tokens` follows `time/tokens_per_second`, over
        all phases but evaluation and checkpoints; of `flops` (of the phase "train", see rlkit.engines.flops)
        `time/train_flops_per_second`, and `time/mfu`, its share of the peak of all ranks' GPUs where that is known.
        `memory/<phase>` is the most GiB that torch had allocated in it on this rank's GPU; there is none without a GPU.
        All that depends on the clock is named `time/...`; the rest of a run repeats.
        """
        self.phase(self._phase)
        times, self._times, self.step = dict(self._times), defaultdict(float), step
        memory, self._memory = {name: x for name, x in self._memory.items() if x}, defaultdict(float)
        row = {**metrics, **times, **memory, **rates(metrics, times, self.peak)}
        if self.writes:
            with (self.out / METRICS).open("a") as file:
                file.write(json.dumps({"step": step, **row}) + "\n")
        if show and self.progress is not None:
            self.progress.set_postfix({short: f"{row[name]:.3g}" for short, name in show.items() if name in row})
        self._tell(row)

    def evaluation(self, **results: Any) -> dict[str, Any]:
        """Add to `eval.json`; returns all of it."""
        path = self.out / EVAL
        merged = {**(json.loads(path.read_text()) if path.exists() else {}), **results}
        if self.writes:
            self._write(EVAL, merged)
        self._tell({f"eval/{name}": x for name, x in results.items()})
        return merged

    def close(self) -> None:
        """End the trackers and the watchdog; the files are whole at any time."""
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []
        self._stop.set()
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            try:
                self._file.parent.rmdir()  # the last rank's
            except OSError:
                pass
            self._file = None

    def _note(self) -> None:
        if self._file is not None:
            _replace(self._file, f"{time.time()} {os.getpid()} {socket.gethostname()} {self._phase}")

    def _tell(self, values: Mapping[str, Any]) -> None:
        numbers = {name: x for name, x in values.items() if isinstance(x, int | float)}
        for tracker in self.trackers:
            tracker.log(numbers, step=self.step)

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        _replace(self.out / name, json.dumps(content, indent=1, default=str) + "\n")


def rates(metrics: Mapping[str, Any], times: Mapping[str, float], peak: float | None) -> dict[str, float]:
    """Tokens and FLOPs by the second, and the share of the peak (model FLOPs utilisation, MFU).

    tokens / step seconds; flops / train seconds; flops / (train seconds * peak). MFU is that of PaLM
    (https://arxiv.org/abs/2204.02311, appendix B): work that the model asks for, not what recomputation adds.

    Args:
        metrics: of a step; its `tokens` and `flops` are counted over all ranks.
        times: seconds by phase, `time/train` among them.
        peak: FLOP/s of all ranks together; None where it is not known.
    """
    found = {}
    seconds = sum(x for name, x in times.items() if name not in ASIDE)
    if "tokens" in metrics and seconds:
        found["time/tokens_per_second"] = metrics["tokens"] / seconds
    if "flops" in metrics and times.get("time/train"):
        found["time/train_flops_per_second"] = metrics["flops"] / times["time/train"]
        if peak:
            found["time/mfu"] = found["time/train_flops_per_second"] / peak
    return found


def peak_flops(device: str) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU by its name, as `torch.cuda.get_device_name` has it; None for an unknown one."""
    words = f" {device.upper().replace('-', ' ')} "
    return next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)


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
    """accelerate's trackers by name, started and told the config; their project is `rlkit`, their run `out`'s name.

    TensorBoard writes to `out/tensorboard`; the others go where their own environment variables say.

    Raises:
        ValueError: a name that accelerate does not know, or whose package is not installed.
    """
    if not names:
        return []
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    told_by = {
        "tensorboard": {"run_name": "tensorboard", "logging_dir": str(out)},
        "mlflow": {"experiment_name": "rlkit", "run_name": out.name},
        "wandb": {"run_name": "rlkit", "name": out.name},
        "trackio": {"run_name": "rlkit", "name": out.name},
    }
    installed = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ValueError(f"trackers: one of {', '.join(LOGGER_TYPE_TO_CLASS)} expected, came {name!r}")
        if name in LoggerType.list() and name not in installed:
            raise ValueError(f"trackers: {name!r} is not installed")
    PartialState()  # accelerate's trackers log through it, and raise without it
    plain = {name: x if isinstance(x, bool | int | float | str | None) else str(x) for name, x in config.items()}
    trackers = []
    for name in dict.fromkeys(names):
        kind = LOGGER_TYPE_TO_CLASS[name]
        needs = {"logging_dir": str(out)} if kind.requires_logging_directory else {}
        tracker = kind(**told_by.get(name, {"run_name": "rlkit", **needs}))
        tracker.start()
        tracker.store_init_configuration(plain)
        trackers.append(tracker)
    return trackers


def _watch(run: weakref.ref[Run], stop: threading.Event, file: Path, seconds: float) -> None:
    """Say who waits where, for as long as the run lives; the first rank whose own thread still answers does."""
    tick, said = seconds / 4, time.time()
    while not stop.wait(tick) and run() is not None:
        try:
            os.utime(file)  # "I answer": a thread cannot, where its process holds the interpreter in one long call
            now = time.time()
            lower = [file.with_name(str(rank)) for rank in range(int(file.name))]
            if any(path.exists() and now - path.stat().st_mtime < 3 * tick for path in lower):
                continue
            waits = [(now - float(since), rank, phase) for rank, since, _, _, phase in _phases(file.parent)]
            if now - said >= seconds and max(waits)[0] >= seconds:
                said = now
                print(f"\nwatchdog: {where_ranks_wait(waits)}; kill -USR1 prints the stacks of a process, "
                      f"their ids are in {file.parent}", file=sys.stderr, flush=True)  # fmt: skip
        except (OSError, ValueError):  # a file that is just being removed
            continue


def _phases(folder: Path) -> list[tuple[int, str, str, str, str]]:
    """(rank, since, process id, host, phase) of every rank."""
    found = []
    for rank in range(int(os.environ.get("WORLD_SIZE", 1))):
        if (path := folder / str(rank)).exists():
            since, process, host, phase = path.read_text().split(" ", 3)
            found.append((rank, since, process, host, phase))
    return found


def where_ranks_wait(waits: Sequence[tuple[float, int, str]]) -> str:
    """One sentence of (seconds, rank, phase): "rank 1 in reward for 65 s; ranks 0, 2 in train for 63 s".

    The phase with the fewest ranks comes first: the others wait for those.
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
    """A tqdm bar over `range(start, stop)`; where stderr is a file or a pipe, a line every few seconds instead."""
    from tqdm import tqdm

    style: dict[str, Any] = {} if sys.stderr.isatty() else {"file": _Lines(sys.stderr), "mininterval": 5.0}
    bar = tqdm(range(start, stop), initial=start, total=stop, unit=unit, disable=not show, **style)
    bar.set_postfix = partial(bar.set_postfix, refresh=False)  # shown with the next state of the bar, not as its own
    return bar


class _Lines:
    """A stream in which each state of a progress bar is a line, as nothing can be overwritten there."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        if line := text.strip("\r\n "):
            self.stream.write(line + "\n")

    def flush(self) -> None:
        self.stream.flush()


def keep_earlier_config(out: Path) -> None:
    """Rename the config.json of an earlier start to config-1.json, config-2.json, ..."""
    if (out / CONFIG).exists():
        earlier = len(list(out.glob("config-*.json")))
        (out / CONFIG).rename(out / f"config-{earlier + 1}.json")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line that was cut short by a kill is left out."""
    rows = []
    for line in Path(path).read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide what a run does."""
    found = {"python": platform.python_version()}
    for name in ("rlkit-vlm", "torch", "transformers", "vllm", "peft", "flash-attn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)
