"""Evaluate a model on one or several tasks: accuracy, pass@k and a page of answers.

    torchrun --nproc-per-node=1 recipes/evaluate.py  # a tiny Qwen2.5-VL before any training
    torchrun --nproc-per-node=1 recipes/evaluate.py --group_size 16 \\
        --model runs/grpo_vlm-digits-seed0/model
    torchrun --nproc-per-node=8 recipes/evaluate.py --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --task shapes.jsonl charts.jsonl --group_size 64 --pass_at 1 8 64 --temperature 0.7 \\
        --max_new_tokens 2048

Each held-out row is answered once greedily (`accuracy`) and n = `group_size` times by sampling
(`mean`, `pass@k`). pass@k is the unbiased estimator of the Codex paper
(https://arxiv.org/abs/2107.03374, eq. 1), the probability that at least one of k samples drawn
without replacement from the n is right: 1 - C(n - c, k) / C(n, k), where c of the n are right.

How it differs from the paper:
- The paper takes the best of several temperatures for each k. Here there is one, 1 by default.
- There is no top-p (the paper: 0.95) and no top-k, as in training.
- An answer is left out, and counted as `unjudged`, if its reward function fails or returns None.
- Samples depend on (seed, row, number of the sample) only, not on restarts or the number of ranks.
"""

import json
import math
from dataclasses import dataclass, replace

import torch.distributed as dist

from rlkit import runs
from rlkit.rollout import Sampling
from rlkit.tracking import METRICS, read_metrics
from rlkit.vlm import encode_prompt


@dataclass
class Config(
    runs.SamplingOptions, runs.EngineOptions, runs.TaskOptions, runs.ModelOptions, runs.RunOptions
):
    task: tuple[str, ...] = ("digits",)
    group_size: int = 8
    """Samples per row. 0: only greedy answers."""
    pass_at: tuple[int, ...] = (1, 4, 8)
    """Values of k for pass@k. Those above group_size are left out."""
    right: float = 1.0
    """A sample with at least this reward counts as right in pass@k."""
    rows: int = 0
    """Use only this many held-out rows of each task, the first ones. 0: all."""
    prompts_per_step: int = 64
    """Rows per batch, over all ranks."""


def summary(answers: list[dict], cfg: Config) -> dict[str, float]:
    """The figures of a task, from the answers to its rows; NAME_error is the standard error."""
    values = {"accuracy": [answer["reward"] for answer in answers if answer["reward"] is not None]}
    if cfg.group_size:
        sampled = [[r for r in answer["rewards"] if r is not None] for answer in answers]
        values["mean"] = [math.fsum(rewards) / len(rewards) for rewards in sampled if rewards]
        for k in (k for k in cfg.pass_at if k <= cfg.group_size):
            enough = [rewards for rewards in sampled if len(rewards) >= k]
            right = [sum(reward >= cfg.right for reward in rewards) for rewards in enough]
            values[f"pass@{k}"] = [
                runs.pass_at_k(len(rewards), c, k) for rewards, c in zip(enough, right, strict=True)
            ]
    found = {}
    for name, of_rows in values.items():
        found[name], found[f"{name}_error"] = runs.mean_and_error(of_rows)
    unjudged = sum(r is None for answer in answers for r in [answer["reward"], *answer["rewards"]])
    return {**found, "rows": len(answers), "unjudged": unjudged}


def table(tasks: dict[str, dict[str, float]]) -> str:
    """A line for each task: each figure with its 95 % confidence interval, and counts."""
    lines = []
    for task, found in tasks.items():
        figures = runs.with_intervals(found, found["rows"])
        figures |= {name: f"{found[name]:.4g}" for name in figures if f"{name}_error" not in found}
        lines.append(f"{task}: {', '.join(f'{name} {text}' for name, text in figures.items())}")
    return "\n".join(lines)


def evaluate_rows(rows, cfg: Config, task_number: int, sampler):
    """This rank's answers to its share of some rows, as JSON objects, and what it counted."""
    prompts = sampler.encode(rows)
    greedy = sampler.sample(prompts, Sampling(cfg.max_new_tokens, temperature=0.0))
    sampled = runs.Answers()
    if cfg.group_size:
        sampling = Sampling(cfg.max_new_tokens, cfg.temperature, seed=(cfg.seed, task_number))
        sampled = sampler.sample(prompts, sampling, n=cfg.group_size)
    rewards = [
        [None if math.isnan(r) else r for r in x.rewards.tolist()] for x in (greedy, sampled)
    ]
    answers = []
    for i, prompt in enumerate(prompts.samples):
        group = slice(i * cfg.group_size, (i + 1) * cfg.group_size)
        answers.append(
            {
                "task": cfg.task[task_number],
                "row": prompt.group_id,
                "text": greedy.generated[i].text,
                "reward": rewards[0][i],
                "samples": [sample.text for sample in sampled.generated[group]],
                "rewards": rewards[1][group],
            }
        )
    counts = {
        "skipped_rows": len(prompts.skipped),
        "tokens": sum(len(s.response_ids) for s in greedy.generated + sampled.generated),
    }
    return answers, counts


def gathered(answers: list[dict]) -> list[dict]:
    """The answers of all ranks, by row."""
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, answers)
    return sorted((answer for part in ranks for answer in part), key=lambda answer: answer["row"])


def main(cfg: Config) -> None:
    with runs.one_sentence_errors("evaluate"):
        if cfg.group_size and cfg.group_size < min(cfg.pass_at, default=1):
            raise ValueError(
                f"pass_at: expected a k of at most group_size = {cfg.group_size}, got {cfg.pass_at}"
            )
        tasks = [runs.load_named_task(cfg, name) for name in cfg.task]
        run = runs.start_run("evaluate", cfg, "-".join(task.name for task in tasks))
        path, processor = runs.find_model(cfg, run, tasks[0].train)
        engine = runs.build_scorer(cfg, path, processor)
        rollout = runs.build_rollout(cfg, path, processor, engine)
    samplers = [runs.PolicySampler(cfg, run, task, processor, engine, rollout) for task in tasks]
    heldout = [
        list(enumerate(task.heldout[: cfg.rows] if cfg.rows else task.heldout)) for task in tasks
    ]
    batches = [
        (number, rows[first : first + cfg.prompts_per_step])
        for number, rows in enumerate(heldout)
        for first in range(0, len(rows), cfg.prompts_per_step)
    ]

    # a row is a line, written before its batch is logged; a resumed run repeats what is not logged
    path, log = run.out / "answers.jsonl", run.out / METRICS
    start = len(read_metrics(log)) if cfg.resume and log.exists() else 0
    answers = [answer for answer in read_metrics(path) if answer["step"] < start] if start else []
    if run.writes:
        path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))

    with samplers[0].current_weights():
        for step in run.steps(start, len(batches), unit="batch"):
            number, rows = batches[step]
            found, counts = evaluate_rows(rows, cfg, number, samplers[number])
            new = [{"step": step, **answer} for answer in gathered(found)]
            answers += new
            if run.writes:
                with path.open("a") as file:
                    file.writelines(json.dumps(answer) + "\n" for answer in new)
            metrics = summary(new, cfg) | runs.totals(engine, **counts)
            run.log(step, metrics | {"reward/mean": metrics.get("mean", metrics["accuracy"])})

    run.phase("evaluate")
    if run.writes:
        skipped_rows = [row["skipped_rows"] for row in read_metrics(log)]
        found = {}
        for number, task in enumerate(cfg.task):
            found[task] = summary([a for a in answers if a["task"] == task], cfg)
            found[task]["skipped"] = sum(
                skipped
                for skipped, (of, _) in zip(skipped_rows, batches, strict=True)
                if of == number
            )
        run.print(table(found))
        run.log_evaluation(tasks=found, heldout=len(answers))
    worst = sorted(answers, key=lambda answer: answer["reward"] or 0.0)[:40] if run.writes else []
    shown = []
    for answer in worst:
        row = tasks[cfg.task.index(answer["task"])].heldout[answer["row"]]
        reward = math.nan if answer["reward"] is None else answer["reward"]
        shown.append(replace(encode_prompt(processor, row), text=answer["text"], reward=reward))
    runs.finish(cfg, run, shown)


if __name__ == "__main__":
    runs.run_recipe(main)
