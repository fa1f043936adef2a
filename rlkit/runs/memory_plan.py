"""Plans the memory of a run before anything is loaded, on a GPU, and refuses a run that does not fit."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist

import rlkit
from rlkit.data.messages import prompt_of
from rlkit.data.samples import Row
from rlkit.runs.command_line import changed_arguments
from rlkit.runs.directory import decided_by_rank_0
from rlkit.runs.options import RUN_ONLY_OPTIONS
from rlkit.runs.rollouts import is_replay
from rlkit.runs.vllm_options import OWN_SERVER_SHARE, own_server_shares_gpu
from rlkit.tracking.files import replace_file, versions
from rlkit.vlm.tiny import is_tiny

FILE = "plan.json"
CGROUP = Path("/sys/fs/cgroup")
OF_PROCESS = Path("/proc/self/cgroup")
SEEN_ROWS = 100  # rows that are looked at for images
PHASES = {"weight sync": "weight_sync", "generate": "generate"}  # of the plan, in a run; all others are its "train"


class _NotPlannedError(Exception):
    """The memory of this run cannot be planned."""


def planned_memory(cfg: Any, out: Path, rows: Sequence[Row] = ()) -> dict[str, float]:
    """GiB of each phase on a GPU of the run, as `rlkit.plan` predicts them. All ranks call this together.

    Rank 0 plans in a process of its own, for at most `cfg.plan_seconds`, and keeps the plan in `out`, for when the run
    is resumed. Without a GPU, or for a tiny model, there is no plan. If it fails, rank 0 says so in one line, and only
    weights, gradients and optimizer state are counted.

    Args:
        rows: rows to train on. If there are none, or one of `SEEN_ROWS` of them has images or videos, prompts of a
            vision-language model are assumed to be full of images.

    Raises:
        ValueError: the run does not fit.
    """
    seconds = getattr(cfg, "plan_seconds", 0)
    if not seconds or not torch.cuda.is_available() or is_tiny(cfg.model) or is_replay():
        return {}
    return decided_by_rank_0(lambda: _phases_or_refusal(cfg, out, seconds, rows))


def _phases_or_refusal(cfg: Any, out: Path, seconds: float, rows: Sequence[Row]) -> dict[str, float]:
    arguments: list[str] = []
    try:
        arguments = _arguments(cfg, rows)
        plan = _plan(cfg, arguments, out, seconds)
    except _NotPlannedError as error:
        print(f"memory is not planned: {error}", flush=True)
        if arguments:
            _check_weights(arguments, seconds)
        return {}
    if not plan["fits"]:
        raise ValueError(
            f"the run {plan['verdict']}, with {plan['rows']}; --plan_seconds 0 starts the run all the same; options "
            f"that take less are named by: {shlex.join(['python', '-m', 'rlkit.plan', *arguments])}"
        )
    print(f"memory: {plan['verdict']}, with {plan['rows']}", flush=True)
    return _by_phase_of_run(plan["phases"], with_vllm=getattr(cfg, "rollout", "") == "vllm")


def _check_weights(arguments: list[str], seconds: float) -> None:
    """Refuse a run whose step could not be planned, if weights, gradients and optimizer state alone do not fit."""
    try:
        least = _planned_by_command([*arguments, "--weights_only"], seconds)
    except (_NotPlannedError, OSError):  # this model or engine is none of which the least is known
        return
    if not least["fits"]:
        raise ValueError(f"the run {least['verdict']}; --plan_seconds 0 starts the run all the same")
    print(f"memory: {least['verdict']}", flush=True)


def _by_phase_of_run(phases: Mapping[str, Mapping[str, int]], *, with_vllm: bool) -> dict[str, float]:
    """GiB of each phase of a run, without vLLM's weights and cache, as `rlkit.tracking.throughput.gpu_peak` measures.

    What vLLM takes for a while beside these, its workspace, is measured and counted.
    """
    left_out = ("sampler's weights", "sampler's cache") if with_vllm else ()
    peaks: dict[str, float] = {}
    for phase, kinds in phases.items():
        sizes = [size for kind, size in kinds.items() if kind not in left_out]
        name = PHASES.get(phase, "train")
        if phase != "load":
            peaks[name] = max(peaks.get(name, 0.0), sum(sizes) / 2**30)
    return peaks


def _have_images(rows: Sequence[Row]) -> bool:
    """Whether one of these rows, of many only `SEEN_ROWS`, has images or videos; True if no row is known."""
    count = min(SEEN_ROWS, len(rows))
    prompts = (prompt_of(rows[i * len(rows) // count]) for i in range(count))
    try:
        return not count or any(prompt.images or prompt.videos for prompt in prompts)
    except Exception:  # of a row that cannot be read, or of the task's own code; training names it
        return True


def _arguments(cfg: Any, rows: Sequence[Row]) -> list[str]:
    """What follows `python -m rlkit.plan`: the recipe, this run's ranks, GPU, machine and rows, and its options."""
    gpu, machine = torch.cuda.get_device_properties(torch.cuda.current_device()), os.environ.get("LOCAL_WORLD_SIZE")
    world = dist.get_world_size() if dist.is_initialized() else 1
    arguments = [str(_recipe(cfg)), "--nproc", str(world), "--gpus_per_node", machine or str(world)]
    share = OWN_SERVER_SHARE if own_server_shares_gpu(cfg, world) else 0.0
    arguments += ["--gpu", gpu.name, "--gpu_memory", str((1 - share) * gpu.total_memory / 2**30)]
    arguments += ["--host_memory", str(host_memory() / 2**30), "--fill_micro_batch"]
    if not _have_images(rows):
        arguments += ["--image_tokens", "0"]
    return [*arguments, *changed_arguments(cfg, without=RUN_ONLY_OPTIONS)]


def host_memory(cgroup: Path | None = None, of_process: Path | None = None) -> int:
    """Bytes of this machine's memory, or of the lowest limit of this process's cgroups (docker --memory, a SLURM job).

    Args:
        cgroup: the directory with the limits; by default `CGROUP`.
        of_process: a file that names the cgroups of this process; by default `OF_PROCESS`.
    """
    cgroup, sizes = cgroup or CGROUP, [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    of_process = of_process or OF_PROCESS
    lines = of_process.read_text().splitlines() if of_process.exists() else []
    for line in [*lines, "::/", ":memory:/"]:  # a sandbox may have limits and not say so in that file
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            root, name = cgroup, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroup / "memory", "memory.limit_in_bytes"
        else:
            continue
        within = PurePosixPath(path.lstrip("/"))
        for part in (within, *within.parents):  # a limit also holds for the cgroups below it
            with suppress(OSError, ValueError):  # no such file; "max", for no limit
                sizes.append(int((root / part / name).read_text()))
    return min(sizes)


def _plan(cfg: Any, arguments: list[str], out: Path, seconds: float) -> dict[str, Any]:
    """What `python -m rlkit.plan --json` prints, or the plan of an earlier start with the same arguments."""
    made_of = _made_of(_recipe(cfg), cfg.model)
    try:
        saved = json.loads((out / FILE).read_text())
        if (saved["arguments"], saved["made_of"]) == (arguments, made_of):
            return saved["plan"]
    except (OSError, ValueError, KeyError, TypeError):  # there is none
        pass
    try:
        plan = _planned_by_command(arguments, seconds)
        saved = {"arguments": arguments, "made_of": made_of, "plan": plan}
        replace_file(out / FILE, json.dumps(saved, indent=1) + "\n")
    except OSError as error:
        raise _NotPlannedError(str(error)) from error
    return plan


def _made_of(recipe: Path, model: str) -> dict[str, Any]:
    """What a plan depends on beside the options: versions, and the contents of the recipe and the model's config."""
    config = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    files = [path for path in (recipe, config) if path.suffix in (".py", ".json") and path.is_file()]
    return {"versions": versions(), "files": [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]}


def _recipe(cfg: Any) -> Path:
    """The file of the recipe, which may be a copy that a person has changed."""
    try:
        return Path(inspect.getfile(type(cfg))).resolve()
    except (TypeError, OSError) as error:
        raise _NotPlannedError(f"recipe: expected options that are declared in a file, got {error}") from error


def _planned_by_command(arguments: list[str], seconds: float) -> dict[str, Any]:
    """The plan, from a process that does not see the ranks of this run or their GPUs."""
    env = {name: x for name, x in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    folders = [str(Path(rlkit.__path__[0]).parent), os.environ.get("PYTHONPATH", "")]
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    command = [sys.executable, "-m", "rlkit.plan", *arguments, "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise _NotPlannedError(f"it took more than {seconds:g} seconds (--plan_seconds)") from error
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise _NotPlannedError(reason) from error
