"""Supervised fine-tuning of vision-language and language models on given responses.

    torchrun --nproc-per-node=1 recipes/sft.py  # a tiny Qwen2.5-VL learns to read digits
    torchrun --nproc-per-node=8 recipes/sft.py --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --task train.parquet --lora_rank 32 --max_new_tokens 0 --lr 1e-4 --steps 2000

Rows have `question`, `answer` and optionally `image`; or `messages`, a chat that ends with a
message of the assistant.

How it differs from the paper (InstructGPT, https://arxiv.org/abs/2203.02155, section 3.5):
- The loss is the mean over the response tokens of the whole batch, so a long response has more
  weight than a short one. All have the same weight with
  `return sequence_mean(-out.logprobs, mb.mask, mb.total_sequences), {}` in `loss_fn`.
- The loss covers every message of the assistant, with its end token, and nothing else; with
  `--train_on last` only the last one.
- The length of a run is given in steps (in the paper: 16 epochs). The learning rate decays
  linearly (cosine). There is no dropout (0.2).
- The exported model is that of the last step. The paper selects a checkpoint by reward model.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from rlkit import runs
from rlkit.data import collate, load_chats, rows_of_steps
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.losses import token_mean


@dataclass
class Config(runs.GenerationOptions, runs.GivenResponseOptions):
    # shared options, with the numbers for the tiny model; help texts: rlkit/runs/options.py
    steps: runs.PositiveInt = 200
    prompts_per_step: runs.PositiveInt = 32
    lr: runs.NonNegativeFloat = 5e-4  # tiny model only; others default to 1e-6, or 1e-5 with LoRA
    train_on: Literal["all", "last"] = "all"
    """Messages of the assistant that are trained: all of a chat, or the last one. Templates that
    remove the thinking of earlier messages allow the last one alone."""


def loss_fn(out, mb):
    """Mean negative log-likelihood of the response tokens, over the batch of all ranks."""
    return token_mean(-out.logprobs, mb.mask, mb.total_tokens), {}


def evaluate_chats(when: str, run, engine, sampler, chats):
    """Loss of held-out chats and accuracy of greedy responses; returns these responses."""
    run.phase("evaluate")
    batch = collate(chats.sequences)
    metrics = runs.global_loss(engine, loss_fn, engine.infer_batch(batch), batch)
    return runs.evaluate_heldout(sampler, chats, when, heldout_loss=metrics["loss"])


def main(cfg: Config) -> None:
    task = runs.load_named_task(cfg, cfg.task, load_chats)
    cfg = runs.with_epochs(cfg, task)
    run = runs.start_run(cfg, task.name, task.train, task.heldout)
    path, processor = runs.find_model(cfg, run, task.train)
    engine = runs.build_engine(cfg, path, processor, optimizer_steps=cfg.steps)
    rollout = runs.build_rollout(cfg, path, processor, engine)
    start = runs.resume(cfg, run, checkpoints=engine)["step"]

    sampler = runs.PolicySampler(cfg, run, task, processor, engine, rollout)
    last_only = cfg.train_on == "last"
    encode = runs.chat_encoder(cfg, run, path, processor, engine, last_only=last_only)
    heldout = encode(enumerate(task.heldout))
    evaluate = partial(evaluate_chats, run=run, engine=engine, sampler=sampler, chats=heldout)
    runs.evaluate_at_start(cfg, run, start, evaluate, engine)
    rows = rows_of_steps(task.train, range(start, cfg.steps), cfg.prompts_per_step, cfg.seed)
    chats_of_steps = runs.prefetch(map(encode, rows), run)
    for step in run.steps(start, cfg.steps):
        chats = next(chats_of_steps)
        batch = rebalance_across_ranks(collate(chats.sequences), engine.data_parallel_group)
        counts = runs.totals(engine, tokens=batch.mask.sum(), skipped_rows=len(chats.skipped))
        if not counts["tokens"]:
            run.stop("no row of this batch can be trained on; see the log")

        run.phase("train")
        metrics = engine.train_batch(batch, loss_fn)
        run.log(step, metrics | counts, show={"loss": "loss"})
        runs.save(cfg, run, step, checkpoints=engine)
        runs.evaluate_when_due(cfg, run, evaluate, engine)
        if runs.out_of_patience(cfg, run):
            break

    runs.finish(cfg, run, evaluate("after"), model=engine)


if __name__ == "__main__":
    runs.run_recipe(main)
