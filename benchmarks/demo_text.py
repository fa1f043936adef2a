"""What pays in `make demo-text`, GRPO on SmolLM2-135M-Instruct: its step with one thing changed at a time.

    python benchmarks/demo_text.py [--steps 4] [--only NAME ...]

The ways run one after the other in one process, with the prompts, groups and lengths of `make demo-text`. The first of
their --steps steps is not counted. A step lasts from the end of the one before to its own end; its CPU seconds are
those of all threads, and change less with other work on the machine, unless there are two, which wait for each other.
Prints a table of medians.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
DEMO = """
    --model smollm2 --task addition --heldout 0.0003 --lr 3e-4 --prompts_per_step 8 --group_size 8 --max_new_tokens 16
    --kl_coef 0 --save_every 1000 --report_seconds 0 --watchdog 0
"""
FIRST = "--lora_rank 16 --compute_dtype bfloat16 --threads 1"
WAYS = {
    "bfloat16, LoRA, 1 thread": FIRST,
    "float32": f"{FIRST} --compute_dtype float32",
    "without activation checkpointing": f"{FIRST} --no_enable_gradient_checkpointing",
    "a prompt once for each of its responses": f"{FIRST} --no_share_prompts",
    "the same, padded": f"{FIRST} --no_share_prompts --no_use_remove_padding",
    "all weights": f"{FIRST} --lora_rank 0 --lr 1e-5",
    "2 threads": f"{FIRST} --threads 2",
    "2 threads, without activation checkpointing": f"{FIRST} --threads 2 --no_enable_gradient_checkpointing",
    "2 threads, float32": f"{FIRST} --threads 2 --compute_dtype float32",
}


def measure(options: str, steps: int) -> tuple[float, float, float]:
    """Seconds and CPU seconds of a step, and the tokens that it trained on."""
    import grpo_vlm

    from rlkit.runs import parse_options
    from rlkit.tracking import Run, read_metrics

    ends, log = [], Run.log

    def clocked_log(*args: Any, **named: Any) -> None:
        log(*args, **named)
        ends.append((time.perf_counter(), time.process_time()))

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(Run, "log", clocked_log):
        given = [*DEMO.split(), *options.split(), "--steps", str(steps), "--out", f"{folder}/run"]
        grpo_vlm.main(parse_options(grpo_vlm.Config, "", given))
        tokens = median(row["tokens"] for row in read_metrics(Path(folder) / "run" / "metrics.jsonl")[1:])
    seconds, cpu = (median(b[i] - a[i] for a, b in pairwise(ends)) for i in (0, 1))
    return seconds, cpu, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=WAYS, metavar="NAME", default=list(WAYS))
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT / "recipes"))
    lines = ["| way | seconds a step | CPU seconds | tokens trained |", "|---|---|---|---|"]
    for way in given.only:
        seconds, cpu, tokens = measure(WAYS[way], given.steps)
        lines.append(f"| {way} | {seconds:.1f} | {cpu:.1f} | {tokens:.0f} |")
        print(lines[-1], flush=True)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    print("\n".join([*lines, "", f"{os.cpu_count()} CPU cores ({platform.machine()}), {versions}."]))


if __name__ == "__main__":
    main()
