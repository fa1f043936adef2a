"""What each recipe learns: its default run for each seed, one after the other, some two minutes each.

    python benchmarks/learn.py [--recipes grpo_vlm ppo ...] [--seeds 0 1 2 3 4] [--out runs/learn] [recipe options ...]

Writes a Markdown table to benchmarks/results/learn.md, anew after each run, and prints its lines: whatever a run's
eval.json has before and after training, and the reward of the last ten steps where there is one.
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
TRAINING = [path.stem for path in sorted((ROOT / "recipes").glob("*.py")) if path.stem != "evaluate"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=TRAINING, default=TRAINING, metavar="RECIPE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "learn")
    parser.add_argument("--table", type=Path, default=ROOT / "benchmarks" / "results" / "learn.md")
    arguments, options = parser.parse_known_args()
    arguments.table.parent.mkdir(parents=True, exist_ok=True)
    lines, failed = [], []
    for recipe in arguments.recipes:
        for seed in arguments.seeds:
            out = arguments.out / f"{recipe}-seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
            command = [str(ROOT / "recipes" / f"{recipe}.py"), "--seed", str(seed), "--out", str(out), *options]
            began = time.perf_counter()
            done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", *command])
            if done.returncode:
                failed.append(f"{recipe}, seed {seed}")
                continue
            new = measured(out, f"| {recipe} | {seed}", f"{time.perf_counter() - began:.0f} |")
            print("\n".join(new), flush=True)
            lines += new
            arguments.table.write_text(table(lines))
    if failed:
        sys.exit(f"learn: no result of {'; '.join(failed)}: see above")


def measured(out: Path, begin: str, end: str) -> list[str]:
    """A line for each number that eval.json has before and after."""
    found, rows = json.loads((out / "eval.json").read_text()), read_metrics(out / "metrics.jsonl")
    names = [key.removesuffix("_before") for key in found if key.endswith("_before")]
    rewards = [row["reward/mean"] for row in rows[-10:] if "reward/mean" in row]
    reward = f"{sum(rewards) / len(rewards):.3f}" if rewards else ""
    lines = []
    for name in names:
        before, after = found[f"{name}_before"], found[f"{name}_after"]
        lines.append(f"{begin} | {name} | {before:.3f} | {after:.3f} | {reward} | {len(rows)} | {end}")
    return lines


def table(lines: list[str]) -> str:
    head = ["recipe", "seed", "held out", "before", "after", "reward, last 10 steps", "steps", "seconds, start to end"]
    made = [
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *lines,
        "",
        f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}. Command: `make learn`.",
    ]
    return "\n".join(made) + "\n"


if __name__ == "__main__":
    main()
