"""Seconds a step and memory of recipes/grpo_vlm.py and of TRL's GRPOTrainer on the same work, in one run. And, apart,
of recipes/dapo.py, which asks more prompts until a step is full of groups that teach; half of those here never do.

    pip install --no-deps --target .benchmarks/trl trl==1.16.0
    PYTHONPATH=.benchmarks/trl OMP_NUM_THREADS=1 pytest benchmarks/test_trl.py --benchmark-enable

The same model from random weights (hidden 128, 4 layers), 8 prompts of 8 answers of up to 32 tokens, one update a
batch, AdamW, no reference, the same loss (a clipped ratio, the mean over all tokens), float32, one thread. Answers end
at random, one token in some 300, so both write nearly the same number of tokens; `tokens` says how many.

Each contestant is a process of its own, one after the other; medians of the steps after two, from the end of one to
the end of the next, by the clock and in CPU seconds, which other work on the machine changes less. `grown by` is the
peak of memory less what was there before the first step.
Writes benchmarks/results/trl.md.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[1]
PROMPTS, GROUP, NEW, WARM = 8, 8, 32, 2
WORK = {"text": (0, 10), "image_56": (56, 8), "image_644": (644, 3)}  # side of the one image of a prompt, timed steps
CONTESTANTS = ("rlkit", "trl", "dapo")
RESULTS: dict[tuple[str, str], dict] = {}


def rows(side):
    from rlkit.data import load_task

    task = load_task("digits" if side else "sorting")
    images = [[image.resize((side, side)) for image in row["images"]] for row in task.train[:PROMPTS]]
    return [{**row, "images": found} for row, found in zip(task.train[:PROMPTS], images, strict=True)]


def reward(text, row):
    return float(len(text) % 2)


def often_settled(text, row):
    """For half of the prompts all answers are right: DAPO's dynamic sampling draws twice."""
    return 1.0 if row["where"][-1] in "0123" else reward(text, row)


def build(path, side):
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2ForCausalLM

    from rlkit.vlm import tiny

    corpus = [row["question"] for row in rows(side)]
    tokenizer = tiny.tiny_tokenizer(corpus) if side else tiny.tiny_text_tokenizer(corpus)
    torch.manual_seed(0)
    if side:
        processor = tiny.tiny_processor(tokenizer)
        processor.image_processor.size = {"shortest_edge": 28 * 28, "longest_edge": 1024 * 1024}
        model = Qwen2_5_VLForConditionalGeneration(tiny.tiny_config(tokenizer, layers=4))
    else:
        processor, model = tokenizer, Qwen2ForCausalLM(tiny.tiny_text_config(tokenizer, layers=4))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(path)
    processor.save_pretrained(path)


def memory():
    """Most that this process has held so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


DAPO = {"prompts_per_draw": PROMPTS, "max_num_gen_batches": 3, "mini_batches": 1, "overlong_buffer": 0}


def run_rlkit(path, side, steps, recipe="grpo_vlm", reward=reward, **more):
    """The recipe as it is; what it logs says how long each of its phases took."""
    sys.path.insert(0, str(ROOT / "recipes"))
    recipe = import_module(recipe)

    from rlkit.data import Task, loading

    loading.BUILT_IN["work"] = lambda: Task("work", train=rows(side), heldout=rows(side)[:1], reward=reward)
    loaded, ends, set_up, log = [], [], recipe.set_up, recipe.Run.log

    def noted(*args):
        found = set_up(*args)
        loaded.append(memory())
        return found

    def clocked(*args):
        log(*args)
        ends.append((time.perf_counter(), time.process_time()))

    recipe.set_up, recipe.Run.log = noted, clocked
    out = Path(path) / "run"
    config = recipe.Config(
        model=path, task="work", out=str(out), steps=steps, prompts_per_step=PROMPTS, group_size=GROUP,
        max_new_tokens=NEW, lr=1e-6, warmup_steps=0, save_every=10**9, watchdog=0, **more,
    )  # fmt: skip
    recipe.main(config)
    from rlkit.tracking import read_metrics

    logged = read_metrics(out / "metrics.jsonl")
    phases = {name: median(row[f"time/{name}"] for row in logged[WARM:]) for name in ("generate", "reward", "train")}
    phases["prompts"] = median(row.get("groups/drawn", PROMPTS) for row in logged[WARM:])
    return ends, [row["tokens"] for row in logged], loaded[0], phases


def run_trl(path, side, steps):
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rlkit.vlm import load_processor

    torch.set_num_threads(1)
    training_rows = rows(side)
    table = {"prompt": [[{"role": "user", "content": row["question"]}] for row in training_rows]}
    if side:
        table["image"] = [row["images"][0] for row in training_rows]

    def rewards(completions, **_):
        return [reward(answer[0]["content"], {}) for answer in completions]

    class Clock(TrainerCallback):
        ends, loaded = [], 0.0

        def on_train_begin(self, *_, **__):
            self.loaded = memory()

        def on_step_end(self, *_, **__):
            self.ends.append((time.perf_counter(), time.process_time()))

    clock = Clock()
    options = GRPOConfig(
        output_dir=f"{path}/trl", per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
        gradient_accumulation_steps=1, max_completion_length=NEW, max_steps=steps, learning_rate=1e-6, warmup_steps=0,
        beta=0.0, loss_type="dapo", epsilon=0.2, epsilon_high=0.28, gradient_checkpointing=False, bf16=False,
        use_cpu=True, save_strategy="no", report_to=[], logging_steps=1, disable_tqdm=True, adam_beta2=0.95,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        path, rewards, options, Dataset.from_dict(table), processing_class=load_processor(path), callbacks=[clock]
    )
    trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    return clock.ends, [length * PROMPTS * GROUP for length in lengths], clock.loaded, {}


def worker(name, what, path):
    side, steps = WORK[what]
    run, options = {
        "rlkit": (run_rlkit, {"kl_coef": 0.0}), "trl": (run_trl, {}),
        "dapo": (run_rlkit, {"recipe": "dapo", "reward": often_settled, **DAPO}),
    }[name]  # fmt: skip
    ends, tokens, loaded, phases = run(path, side, WARM + steps, **options)
    assert len(ends) == len(tokens) == WARM + steps, (len(ends), len(tokens))
    steps_took = [[b - a for a, b in zip(two, after, strict=True)] for two, after in pairwise(ends[WARM - 1 :])]
    (seconds, cpu), peak = map(median, zip(*steps_took, strict=True)), memory()
    print(json.dumps({
        "seconds": seconds, "cpu": cpu, "tokens": sum(tokens[WARM:]) / steps, "loaded_mb": loaded, "peak_mb": peak,
        "grown_mb": peak - loaded, **phases,
    }))  # fmt: skip


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.parametrize("name", CONTESTANTS)
@pytest.mark.parametrize("what", WORK)
def test_step(benchmark, name, what):
    if benchmark.disabled:
        pytest.skip("--benchmark-enable runs it")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as path:
        command = [sys.executable, __file__, name, what, f"{path}/model"]

        def run():
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-3000:]
            return json.loads(done.stdout.strip().splitlines()[-1])

        found = benchmark.pedantic(run, rounds=1)
    benchmark.extra_info.update(found)
    RESULTS[what, name] = found
    (ROOT / "benchmarks" / "results" / "trl.md").write_text(table())


def table():
    head = ["work", "", "seconds a step", "CPU seconds", "generate", "reward", "train", "prompts asked"]
    head += ["tokens trained", "MB before", "MB at most", "grown by"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for (what, name), run in RESULTS.items():
        phases = [f"{run[phase]:.3f}" if phase in run else "" for phase in ("generate", "reward", "train")]
        phases.append(f"{run.get('prompts', PROMPTS):.0f}")
        sizes = [f"{run[key]:.0f}" for key in ("tokens", "loaded_mb", "peak_mb", "grown_mb")]
        lines.append(f"| {what} | {name} | {run['seconds']:.3f} | {run['cpu']:.3f} | {' | '.join([*phases, *sizes])} |")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl"))
    return "\n".join([*lines, "", f"{platform.machine()}, {os.cpu_count()} cores, one thread, {versions}."]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=CONTESTANTS)
    parser.add_argument("what", choices=WORK)
    parser.add_argument("path")
    given = parser.parse_args()
    build(given.path, WORK[given.what][0])
    worker(given.name, given.what, given.path)
