"""Evaluate a model: accuracy, pass@k and a page of answers, on one task or several.

    torchrun --nproc-per-node=1 recipes/evaluate.py                   # a tiny Qwen2.5-VL before any training
    torchrun --nproc-per-node=1 recipes/evaluate.py --model runs/grpo_vlm-digits-seed0/model --group_size 16
    torchrun --nproc-per-node=8 recipes/evaluate.py --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --task shapes.jsonl charts.jsonl --group_size 64 --pass_at 1 8 64 --temperature 0.7 --max_new_tokens 2048

Each held-out row is answered once greedily (`accuracy`) and n = `group_size` times by sampling (`mean`, `pass@k`).
pass@k is the unbiased estimator of the Codex paper (https://arxiv.org/abs/2107.03374, eq. 1), the chance that at least
one of k samples drawn without replacement from the n is right: 1 - C(n - c, k) / C(n, k), c of n being right.

How it differs from the paper:
- the paper takes the best of several temperatures for each k; here there is one, 1 unless another is asked for.
- there is neither top-p (0.95 there) nor top-k: the model is scored as the trainers here sample it.
- an answer that could not be judged counts as wrong, and is counted (`unjudged`).
- what is sampled depends on (seed, row, sample) alone: neither a restart nor the number of ranks changes it.
"""

import json
import math
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import tyro
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from rlkit.data import Task, load_task
from rlkit.engines import make_engine
from rlkit.engines.distributed import init_distributed
from rlkit.report import write_report
from rlkit.rewards import Judge
from rlkit.rollout import Sampling, make_rollout
from rlkit.tracking import Run, new_directory, read_metrics
from rlkit.vlm import build_tiny, encode, encode_rows, load_model, load_processor


@dataclass
class Config:
    model: str = "tiny"
    """Directory or hub id of a model; "tiny" builds one of 0.7M parameters and warms it up for a few seconds."""
    task: tuple[str, ...] = ("digits",)
    """Built-in tasks, .jsonl or .parquet files with question, answer and image columns, or module:function."""
    rollout: str = "hf"
    """What samples: hf (the model itself), vllm (in this process), vllm_server or sglang (at `servers`)."""
    servers: tuple[str, ...] = ()
    """URLs of the servers; python -m rlkit.rollout.serve starts some."""
    out: str = ""
    """The run's directory; runs/evaluate-<tasks>-seed<seed> by default, numbered if that holds a run."""
    resume: bool = False
    """Go on behind the last batch in the run's directory."""
    trackers: tuple[str, ...] = ()
    """Told the metrics beside the run's own files: tensorboard, wandb, mlflow, trackio, ...; see rlkit.tracking."""
    watchdog: float = 600.0
    """Seconds in one phase after which the phases of all ranks are printed; 0: never."""
    seed: int = 0
    """Of the sampling noise and the tiny model."""

    group_size: int = 8
    """Samples of each row. 0: it is answered greedily alone."""
    pass_at: tuple[int, ...] = (1, 4, 8)
    """The k of pass@k, at most group_size; larger ones are left out."""
    right: float = 1.0
    """A sample whose reward is at least this counts as right in pass@k."""
    rows: int = 0
    """Held-out rows of each task, from its first. 0: all."""
    prompts_per_step: int = 64
    """Rows in a batch, over all ranks."""
    reward_threads: int = 8
    """Prompts whose answers are judged at once, while others are written. 0: behind them, in the main thread."""
    max_new_tokens: int = 4
    """Longest answer."""
    max_prompt_tokens: int = 0
    """Longest prompt, images expanded; a longer one is skipped and counted. 0: what the model's context leaves."""
    temperature: float = 1.0
    """Of the samples."""

    micro_batch_tokens: int = 16384
    """Most tokens in one forward."""
    gpu_memory_utilization: float = 0.8
    """Share of a GPU's memory up to which the sampler's cache may fill it."""
    threads: int = 1
    """CPU threads of a process. With more, sums round differently from run to run, and no run repeats exactly."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""


def pass_at_k(n: int, right: int, k: int) -> float:
    """1 - C(n - right, k) / C(n, k): the chance that k of n samples, drawn without replacement, have a right one."""
    if not 1 <= k <= n or not 0 <= right <= n:
        raise ValueError(f"pass_at_k: 1 <= k <= n and 0 <= right <= n expected, came n={n}, right={right}, k={k}")
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def summary(answers: list[dict], cfg: Config) -> dict[str, float]:
    """The figures of one task, of the answers to its rows; the error is that of a mean over rows."""
    found: dict[str, list[float]] = {"accuracy": [a["reward"] or 0.0 for a in answers]}
    if cfg.group_size:
        found["mean"] = [sum(r or 0.0 for r in a["rewards"]) / cfg.group_size for a in answers]
        right = [sum(r is not None and r >= cfg.right for r in a["rewards"]) for a in answers]
        sizes = [k for k in cfg.pass_at if k <= cfg.group_size]
        found |= {f"pass@{k}": [pass_at_k(cfg.group_size, c, k) for c in right] for k in sizes}
    means = {name: math.fsum(x) / max(len(x), 1) for name, x in found.items()}
    spread = math.fsum((x - means["accuracy"]) ** 2 for x in found["accuracy"])
    error = math.sqrt(spread / max(len(answers) - 1, 1) / max(len(answers), 1))
    unjudged = sum(r is None for a in answers for r in [a["reward"], *a["rewards"]])
    return {**means, "accuracy_error": error, "rows": len(answers), "unjudged": unjudged}


def main(cfg: Config) -> None:
    torch.set_num_threads(cfg.threads)
    init_distributed()
    disable_progress_bar()  # of loading and saving; the run has its own
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        if cfg.group_size and cfg.group_size < min(cfg.pass_at, default=1):
            raise ValueError(f"pass_at: a k of at most group_size = {cfg.group_size} expected, came {cfg.pass_at}")
        tasks = [load_task(task) for task in cfg.task]
        name = f"evaluate-{'-'.join(task.name for task in tasks)}-seed{cfg.seed}"
        out = Path(cfg.out) if cfg.out else new_directory("runs", name, resume=cfg.resume)
        judges = [[Judge(task.reward, threads=cfg.reward_threads) for _ in range(2)] for task in tasks]
        run = Run(out, asdict(cfg), resume=cfg.resume, writes=rank == 0, trackers=cfg.trackers, watchdog=cfg.watchdog)
        engine, rollout, processor = set_up(cfg, tasks[0], out)
    except ValueError as error:
        sys.exit(f"evaluate: {error}")
    config = engine.config.get_text_config()
    max_tokens = cfg.max_prompt_tokens or config.max_position_embeddings - cfg.max_new_tokens
    batches = [  # (task, its rows from, to)
        (i, first, min(first + cfg.prompts_per_step, count))
        for i, task in enumerate(tasks)
        for count in [min(len(task.heldout), cfg.rows or len(task.heldout))]
        for first in range(0, count, cfg.prompts_per_step)
    ]
    path = out / "answers.jsonl"  # a row a line, written before the batch is logged
    start = len(read_metrics(out / "metrics.jsonl")) if cfg.resume and (out / "metrics.jsonl").exists() else 0
    answers = [a for a in read_metrics(path) if a["step"] < start] if start else []
    run.start_at(start)
    if rank == 0:
        path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))

    rollout.update_weights(engine.get_per_tensor_param())
    progress = tqdm(range(start, len(batches)), initial=start, total=len(batches), unit="batch", disable=rank != 0)
    for step in progress:
        run.phase("generate")
        i, first, end = batches[step]
        rows = [(number, tasks[i].heldout[number]) for number in range(first, end)][rank::world]
        prompts, skipped = encode_rows(processor, rows, max_tokens=max_tokens)
        for message in skipped:
            progress.write(f"skipped: {message}")
        best, drawn = judges[i]
        greedy = rollout.generate(prompts, Sampling(cfg.max_new_tokens, temperature=0.0), written=best.take)
        sampling = Sampling(cfg.max_new_tokens, cfg.temperature, seed=(cfg.seed, i))
        samples = rollout.generate(prompts, sampling, cfg.group_size, written=drawn.take) if cfg.group_size else []
        run.phase("reward")  # what was not judged while others were written
        (first, _, seconds), (others, _, more) = best.result(), drawn.result()
        rewards = [None if math.isnan(r) else r for r in first.tolist() + others.tolist()]
        mine = [
            {
                "step": step, "task": cfg.task[i], "row": prompt.group_id, "text": greedy[j].text, "reward": rewards[j],
                "samples": [sample.text for sample in samples[cfg.group_size * j : cfg.group_size * (j + 1)]],
                "rewards": rewards[len(greedy) :][cfg.group_size * j : cfg.group_size * (j + 1)],
            }
            for j, prompt in enumerate(prompts)
        ]  # fmt: skip
        everyone = [None] * world
        dist.all_gather_object(everyone, (mine, len(skipped), sum(len(s.response_ids) for s in greedy + samples)))
        new = sorted((a for part, *_ in everyone for a in part), key=lambda a: a["row"])
        answers += new
        if rank == 0:
            with path.open("a") as file:
                file.writelines(json.dumps(answer) + "\n" for answer in new)
        judged = [r for a in new for r in (a["rewards"] or [a["reward"]]) if r is not None]
        run.log(step, {
            "reward/mean": sum(judged) / max(len(judged), 1),
            **{name: x for name, x in summary(new, cfg).items() if name != "accuracy_error"},
            "skipped_rows": sum(lost for _, lost, _ in everyone), "tokens": sum(tokens for *_, tokens in everyone),
            "time/judging": seconds + more,
        })  # fmt: skip

    run.phase("evaluate")
    if rank == 0:
        lost = [row["skipped_rows"] for row in read_metrics(out / "metrics.jsonl")]
        found = {}
        for i, task in enumerate(cfg.task):
            found[task] = summary([a for a in answers if a["task"] == task], cfg)
            found[task]["skipped"] = sum(x for x, (number, *_) in zip(lost, batches, strict=True) if number == i)
            print(f"{task}:", ", ".join(f"{name} {x:.4g}" for name, x in found[task].items()))
        run.evaluation(tasks=found, heldout=len(answers))
        shown = sorted(answers, key=lambda a: a["reward"] or 0.0)[:40]
        rows = [tasks[cfg.task.index(a["task"])].heldout[a["row"]] for a in shown]
        page = [
            replace(encode(processor, row), text=a["text"], reward=math.nan if a["reward"] is None else a["reward"])
            for row, a in zip(rows, shown, strict=True)
        ]
        print(f"results: {write_report(out, page, title=name)}, {out / 'eval.json'}, {path}")
    run.close()


def set_up(cfg: Config, task: Task, out: Path):
    """The engine that scores, the sampler and the processor."""
    path = cfg.model
    if path == "tiny":
        path = str(out / "init")
        if dist.get_rank() == 0 and not Path(path).exists():
            print(f"building a tiny model and warming it up: {path}", flush=True)
            build_tiny(path, task.train, seed=cfg.seed)
        dist.barrier()
    processor = load_processor(path, trust_remote_code=cfg.trust_remote_code)
    model = load_model(path, trust_remote_code=cfg.trust_remote_code)
    engine = make_engine(
        "fsdp2", "language_model", model=model, processor=processor, micro_batch_tokens=cfg.micro_batch_tokens
    )
    rollout = make_rollout(
        cfg.rollout, engine.gathered, model=path, processor=processor, urls=cfg.servers,
        gpu_memory_utilization=cfg.gpu_memory_utilization,
    )  # fmt: skip
    return engine, rollout, processor


if __name__ == "__main__":
    main(tyro.cli(Config, use_underscores=True, description=__doc__))
    dist.destroy_process_group()
