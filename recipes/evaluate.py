"""Evaluate a model on one or several tasks: accuracy, pass@k and a page of responses.

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
- A response is left out, and counted as `unscored`, if its reward function fails or returns None.
- Samples depend on (seed, row, number of the sample) only, not on restarts or the number of ranks.
"""

import math
from dataclasses import dataclass, replace

from rlkit import runs
from rlkit.data import concatenate
from rlkit.rollout import Sampling
from rlkit.vlm import encode_prompt


@dataclass
class Config(
    runs.SamplingOptions, runs.EngineOptions, runs.TaskOptions, runs.ModelOptions, runs.RunOptions
):
    task: tuple[str, ...] = ("digits",)
    group_size: runs.NonNegativeInt = 8
    """Samples per row. 0: only greedy responses."""
    pass_at: tuple[int, ...] = (1, 4, 8)
    """Values of k for pass@k. Those above group_size are left out."""
    right: float = 1.0
    """A sample with at least this reward counts as right in pass@k."""
    rows: runs.NonNegativeInt = 0
    """Use only this many held-out rows of each task, the first ones. 0: all."""
    prompts_per_step: runs.PositiveInt = 64
    """Rows per batch, summed over all ranks."""


def summary(responses: list[dict], cfg: Config) -> dict[str, float]:
    """The figures of a task, from the responses to its rows; see `runs.means_of_rows`."""
    rewards = [response["reward"] for response in responses]
    values = {"accuracy": [reward for reward in rewards if reward is not None]}
    if cfg.group_size:
        sampled = [[r for r in response["rewards"] if r is not None] for response in responses]
        values["mean"] = [math.fsum(rewards) / len(rewards) for rewards in sampled if rewards]
        for k in (k for k in cfg.pass_at if k <= cfg.group_size):
            enough = [rewards for rewards in sampled if len(rewards) >= k]
            right = [sum(reward >= cfg.right for reward in rewards) for rewards in enough]
            values[f"pass@{k}"] = [
                runs.pass_at_k(len(rewards), c, k) for rewards, c in zip(enough, right, strict=True)
            ]
    rewards = [r for response in responses for r in (response["reward"], *response["rewards"])]
    counts = {"rows": len(responses), "unscored": rewards.count(None)}
    return {**runs.means_of_rows(values), **counts}


def table(tasks: dict[str, dict[str, float]]) -> str:
    """A line for each task: each figure with its 95 % confidence interval, and counts."""
    lines = []
    for task, figures in tasks.items():
        texts = runs.with_intervals(figures, figures["rows"])
        texts |= {name: f"{figures[name]:.4g}" for name in texts if f"{name}_error" not in figures}
        lines.append(f"{task}: {', '.join(f'{name} {text}' for name, text in texts.items())}")
    return "\n".join(lines)


def as_json(rewards):
    """A list; None for a response that was not scored."""
    return [None if math.isnan(reward) else reward for reward in rewards.tolist()]


def evaluate_rows(rows, cfg: Config, task_number: int, sampler):
    """This rank's responses to its share of some rows, as JSON objects, and what it counted."""
    sampler.run.phase("encode")
    prompts = sampler.encode(rows)
    greedy = sampler.sample(prompts, Sampling(cfg.max_new_tokens, temperature=0.0))
    sampled = runs.Responses()
    if cfg.group_size:
        sampling = Sampling(cfg.max_new_tokens, cfg.temperature, seed=(cfg.seed, task_number))
        sampled = sampler.sample(prompts, sampling, n=cfg.group_size)
    greedy_rewards, sampled_rewards = as_json(greedy.rewards), as_json(sampled.rewards)
    responses = []
    for i, prompt in enumerate(prompts.samples):
        group = slice(i * cfg.group_size, (i + 1) * cfg.group_size)
        responses.append(
            {
                "task": cfg.task[task_number],
                "row": prompt.group_id,
                "text": greedy.generated[i].text,
                "reward": greedy_rewards[i],
                "samples": [sample.text for sample in sampled.generated[group]],
                "rewards": sampled_rewards[group],
            }
        )
    counts = {
        "skipped_rows": len(prompts.skipped),
        "tokens": sum(len(s.response_ids) for s in greedy.generated + sampled.generated),
    }
    return responses, counts


def batches_of_tasks(tasks, cfg: Config) -> list[tuple[int, list]]:
    """The number of a task and some of its held-out rows, with their ids, for each batch."""
    batches = []
    for number, task in enumerate(tasks):
        rows = list(enumerate(task.heldout[: cfg.rows] if cfg.rows else task.heldout))
        for first in range(0, len(rows), cfg.prompts_per_step):
            batches.append((number, rows[first : first + cfg.prompts_per_step]))
    return batches


def summaries(responses: list[dict], batches, cfg: Config) -> dict[str, dict[str, float]]:
    """`summary` of each task, and the number of its rows that were skipped (no response)."""
    tasks = {}
    for number, task in enumerate(cfg.task):
        answered = [response for response in responses if response["task"] == task]
        rows = sum(len(rows) for task_number, rows in batches if task_number == number)
        tasks[task] = {**summary(answered, cfg), "skipped": rows - len(answered)}
    return tasks


def worst_responses(responses: list[dict], tasks, cfg: Config, processor) -> list:
    """The 40 greedy responses with the lowest rewards, for the page."""
    shown = []
    scored = [response for response in responses if response["reward"] is not None]
    unscored = [response for response in responses if response["reward"] is None]
    for response in (sorted(scored, key=lambda response: response["reward"]) + unscored)[:40]:
        row = tasks[cfg.task.index(response["task"])].heldout[response["row"]]
        reward = math.nan if response["reward"] is None else response["reward"]
        prompt = encode_prompt(processor, row, group_id=len(shown))
        shown.append(replace(prompt, text=response["text"], reward=reward))
    return shown


def main(cfg: Config) -> None:
    for k in cfg.pass_at:
        runs.check_range("pass_at", k, 1)
    if cfg.group_size and cfg.group_size < min(cfg.pass_at, default=1):
        raise ValueError(
            f"pass_at: expected a k of at most group_size = {cfg.group_size}, got {cfg.pass_at}"
        )
    if len(set(cfg.task)) < len(cfg.task):
        raise ValueError(f"task: expected each task once, got {', '.join(cfg.task)}")
    if fixed := {"task", "rows", "prompts_per_step"} & {*cfg.allow_changes}:
        raise ValueError(
            "allow_changes: expected no option that decides which rows are in a batch, got "
            f"{', '.join(sorted(fixed))}; start a new evaluation"
        )
    tasks = [runs.load_named_task(cfg, name) for name in cfg.task]
    name, heldout = "-".join(task.name for task in tasks), [task.heldout for task in tasks]
    run = runs.start_run(cfg, name, heldout=concatenate(heldout))
    path, processor = runs.find_model(cfg, run, tasks[0].train)
    engine = runs.build_scorer(cfg, path, processor)
    rollout = runs.build_rollout(cfg, path, processor, engine)

    samplers = [runs.PolicySampler(cfg, run, task, processor, engine, rollout) for task in tasks]
    batches = batches_of_tasks(tasks, cfg)
    responses, start = runs.resume_responses(cfg, run)
    with samplers[0].current_weights():
        for step in run.steps(start, len(batches), unit="batch"):
            number, rows = batches[step]
            local_responses, counts = evaluate_rows(rows, cfg, number, samplers[number])
            new_responses = runs.append_responses(run, step, local_responses)
            responses += new_responses
            metrics = summary(new_responses, cfg) | runs.totals(engine, **counts)
            run.log(step, metrics | {"reward/mean": metrics.get("mean", metrics["accuracy"])})

    run.phase("evaluate")
    shown = []
    if run.is_main_process:
        figures = summaries(responses, batches, cfg)
        run.print(table(figures))
        run.log_evaluation(tasks=figures, heldout=len(responses))
        shown = worst_responses(responses, tasks, cfg, processor)
    runs.finish(cfg, run, shown)


if __name__ == "__main__":
    runs.run_recipe(main)
