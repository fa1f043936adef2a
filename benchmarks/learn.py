"""The five-seed table of the README: the default run of recipes/grpo_vlm.py for each seed, one after the other.

    python benchmarks/learn.py [--seeds 0 1 2 3 4] [--out runs/learn] [recipe options ...]

Writes a Markdown table to benchmarks/results/learn.md and prints it.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

from rlkit.tracking import read_metrics

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "learn")
    parser.add_argument("--table", type=Path, default=ROOT / "benchmarks" / "results" / "learn.md")
    arguments, options = parser.parse_known_args()
    lines = []
    for seed in arguments.seeds:
        out = arguments.out / f"seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
        began = time.perf_counter()
        recipe = [str(ROOT / "recipes" / "grpo_vlm.py"), "--seed", str(seed), "--out", str(out), *options]
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", *recipe], check=True)
        took = time.perf_counter() - began
        found = json.loads((out / "eval.json").read_text())
        rows = read_metrics(out / "metrics.jsonl")
        reward = sum(row["reward/mean"] for row in rows[-10:]) / len(rows[-10:])
        figures = [found["accuracy_before"], found["accuracy_after"], reward]
        lines.append(f"| {seed} | {' | '.join(f'{x:.3f}' for x in figures)} | {took:.0f} |")
        print(lines[-1], flush=True)
    table = "\n".join([
        "| seed | held-out accuracy before | after | reward, last 10 steps | seconds, start to end |",
        "|---|---|---|---|---|",
        *lines,
        "",
        f"{len(rows)} steps, {found['heldout']} held-out images, answered greedily. {os.cpu_count()} CPU cores "
        f"({platform.machine()}), Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}. Command: `make learn`.",
    ])  # fmt: skip
    arguments.table.parent.mkdir(parents=True, exist_ok=True)
    arguments.table.write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    main()
