"""Starts a recipe, and turns unusable options into one-sentence error messages."""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from rlkit.data.samples import Row
from rlkit.engines.distributed import init_distributed
from rlkit.engines.flops import take_flops
from rlkit.profiling import StepProfiler
from rlkit.report import write_page
from rlkit.rollout.servers.claim import claim_servers
from rlkit.runs.allocator import use_expandable_segments
from rlkit.runs.command_line import parse_options
from rlkit.runs.directory import (
    CONTENTS,
    check_resumed_options,
    claim_directory,
    decided_by_rank_0,
    recorded_contents,
)
from rlkit.runs.hub import check_hub
from rlkit.runs.interruption import outside_endings
from rlkit.runs.memory_plan import planned_memory
from rlkit.runs.option_types import check_ranges
from rlkit.runs.options import (
    GenerationOptions,
    RunOptions,
    check_engine_options,
    check_evaluation,
    check_patterns,
    check_processor_options,
    check_quantize_base,
    check_sampling,
    check_servers,
    check_sync_adapters,
)
from rlkit.runs.out_of_memory import explained_out_of_memory, watch_memory
from rlkit.runs.rollouts import check_rollouts
from rlkit.tracking import Run


@record  # shows tracebacks in torchrun's summary
def run_recipe(main: Callable[[Any], None]) -> None:
    """Call `main(cfg)` with the options of the command line. The annotation of `cfg` is the dataclass of options.

    An option that cannot be used ends the process with one sentence, see `one_sentence_set_up_errors`.
    """
    (config,) = inspect.signature(main, eval_str=True).parameters.values()
    module = sys.modules[main.__module__]
    name = Path(module.__file__ or "").stem
    try:
        with outside_endings(name), explained_out_of_memory(), one_sentence_set_up_errors(name):
            cfg = parse_options(config.annotation, module.__doc__ or "")
            use_expandable_segments(cfg)
            main(cfg)
    except SystemExit as end:
        if isinstance(end.code, str):
            _tell_torchrun(end.code)
        raise
    dist.destroy_process_group()


def _tell_torchrun(sentence: str) -> None:
    """Put this rank's error message into torchrun's summary of the failure."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": sentence, "timestamp": int(time.time())}))


@contextmanager
def one_sentence_errors(recipe: str) -> Iterator[None]:
    """Turn ImportError and ValueError into a one-sentence error message that ends the process."""
    try:
        yield
    except (ImportError, ValueError) as error:
        sys.exit(f"{recipe}: {error}")


_started: list[Run] = []  # by the recipe of this process


@contextmanager
def one_sentence_set_up_errors(recipe: str) -> Iterator[None]:
    """`one_sentence_errors` until the run is set up: until its `resume` has returned or its first phase has begun.

    Later errors keep their tracebacks. They are faults of the program, not options that a person can change.
    """
    _started.clear()
    try:
        yield
    except (ImportError, ValueError) as error:
        if any(run.is_set_up for run in _started):
            raise
        sys.exit(f"{recipe}: {error}")


def recipe_name(cfg: Any) -> str:
    """The name of the file that defines the class of these options, without .py: that of the recipe, or of its copy."""
    return Path(inspect.getfile(type(cfg))).stem


def start_run(
    cfg: RunOptions,
    task: str,
    train: Sequence[Row] = (),
    heldout: Sequence[Row] = (),
    *,
    starts_servers: bool = False,
    adds_images: bool = False,
) -> Run:
    """Join the other ranks, claim the run's directory and servers, and open its logs, before anything is loaded.

    Args:
        cfg: options of the recipe; the file that defines their class gives the run's name.
        task: the run's name is RECIPE-TASK-seedSEED.
        train: rows to train on. A resumed run is refused if they are others; the plan of the run's memory looks at
            them, see `planned_memory`.
        heldout: rows to evaluate on, likewise.
        starts_servers: the recipe itself starts sampling servers if the options name none.
        adds_images: episodes may have images that no row has, such as those that a tool returns.

    Raises:
        ValueError: an option is out of range, servers or saved rollouts are missing, the directory or a server is in
            use, a tracker is unknown, a resumed run was started with other options or data, the hub refuses
            --push_to_hub, or the run does not fit on its GPUs.
    """
    from transformers.utils.logging import disable_progress_bar

    check_ranges(cfg)
    check_evaluation(cfg)
    check_sampling(cfg)
    check_sync_adapters(cfg)
    check_quantize_base(cfg)
    check_patterns(cfg)
    check_engine_options(cfg)
    if not starts_servers:
        check_servers(cfg)
    check_processor_options(cfg)
    check_rollouts(cfg, samples_ahead=starts_servers)
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)  # all ranks initialize the same adapters
    init_distributed()
    disable_progress_bar()  # that of transformers; the run has its own
    name = f"{recipe_name(cfg)}-{task}-seed{cfg.seed}"
    out = claim_directory(cfg.out, name, resume=cfg.resume)
    contents = recorded_contents(cfg, train, heldout)
    changes = check_resumed_options(out, cfg, contents)
    check_hub(cfg)
    if isinstance(cfg, GenerationOptions) and cfg.servers:
        decided_by_rank_0(lambda: claim_servers(cfg.servers, f"the run in {out.resolve()}"))
    planned = planned_memory(cfg, out, () if adds_images else train)
    first = dist.get_rank() == 0
    if first:
        for change in changes:
            print(f"resume: {change}", flush=True)
    seconds = cfg.report_seconds
    page = partial(write_page, out / "report.html", [out], title=name, running=True, every=seconds)
    run = Run(
        out,
        {**asdict(cfg), CONTENTS: contents},
        name=name,
        is_main_process=first,
        trackers=cfg.trackers,
        write_page=page,
        page_seconds=seconds,
        profiler=StepProfiler(out / "profile", cfg.profile_steps, dist.get_rank()) if cfg.profile_steps else None,
        watchdog=cfg.watchdog,
        planned_memory=planned,
        take_flops=take_flops,
    )
    _started.append(run)
    watch_memory(run, record=cfg.memory_snapshot)
    return run
