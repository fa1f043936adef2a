"""Reward model: a scalar head that scores whole responses, trained on pairs (Bradley-Terry).

    # a tiny Qwen2.5-VL learns to score responses about digits
    torchrun --nproc-per-node=1 recipes/reward_model.py
    torchrun --nproc-per-node=8 recipes/reward_model.py --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --task pairs.parquet --lora_rank 32 --lr 1e-4 --steps 1000

Rows have `question` (or `prompt`), `chosen`, `rejected` and optionally `image` and `margin`, in the
formats of TRL, UltraFeedback and RLAIF-V. If a task has no pairs, each row's own answer is the
chosen one and another row's answer is the rejected one. Load the exported model with
`rlkit.engines.value_head.load_value_model`.

How it differs from the paper (InstructGPT, https://arxiv.org/abs/2203.02155, section 3.5):
- Pairs are shuffled independently; the paper puts all pairs of one prompt into one batch.
- `margin` is a number per row, as in Llama 2 (arXiv 2307.09288 eq. 2).
- `centre_coef` is the weight of a regulariser that keeps rewards around 0 (arXiv 2312.09244),
  because the Bradley-Terry loss only depends on differences. The paper subtracts the mean after
  training.
- The score is read at the end token of the response. The head starts at zero, so the first scores
  are 0.
- The model should already be fine-tuned, for example by `sft.py`. The tiny model is fine-tuned
  when it is built.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import torch

from rlkit import runs
from rlkit.data import collate, load_pairs, rows_of_steps
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.engines.value_head import scoring_batch
from rlkit.losses import bradley_terry_loss, preference_mean, preference_stats, reward_centring_loss


@dataclass
class Config(runs.GivenResponseOptions):
    # shared options, with the numbers for the tiny model; help texts: rlkit/runs/options.py
    steps: runs.PositiveInt = 200
    prompts_per_step: runs.PositiveInt = 32
    lr: runs.NonNegativeFloat = 5e-4  # tiny model only; others default to 1e-6, or 1e-5 with LoRA
    centre_coef: runs.NonNegativeFloat = 0.0
    """Weight of the regulariser that keeps rewards around 0, for example 0.01."""


def pair_loss(out, mb, centre_coef: float):
    """Mean loss of the pairs of all ranks; chosen responses in even rows, rejected ones after."""
    scores = out.values.sum(1)  # a row has one value, its score
    chosen, rejected = scores[0::2], scores[1::2]
    values = bradley_terry_loss(chosen, rejected, mb.margin[0::2])
    values = values + centre_coef * reward_centring_loss(chosen, rejected)
    pairs = mb.total_sequences / 2
    return preference_mean(values, pairs), preference_stats(chosen, rejected, pairs)


def margin_of(row) -> float:
    """The row's margin; 0 if it has none, which is nan in tables of numbers."""
    try:
        margin = float(row.get("margin") or 0.0)
    except (TypeError, ValueError):
        margin = math.inf
    if math.isinf(margin):
        raise ValueError(f"margin: expected a finite number, got {row['margin']!r:.80}")
    return 0.0 if math.isnan(margin) else margin


def chosen_and_rejected(row):
    margin_of(row)  # a row whose margin is no finite number is skipped
    return [row["chosen"], row["rejected"]]


def pair_batch(sequences):
    """Chosen responses in even rows, rejected ones in odd rows; a pair stays in one micro-batch."""
    margins = [margin_of(sequence.row) for sequence in sequences]
    pairs = torch.arange(len(sequences)) // 2
    return scoring_batch(collate(sequences, micro_batch_group=pairs, margin=torch.tensor(margins)))


def main(cfg: Config) -> None:
    task = runs.load_named_task(cfg, cfg.task, load_pairs)
    cfg = runs.with_epochs(cfg, task)
    run = runs.start_run(cfg, task.name, task.train, task.heldout)
    path, processor = runs.find_model(cfg, run, task.train, warm_up_steps=200, label_noise=0.0)
    engine = runs.build_value_engine(cfg, path, processor, optimizer_steps=cfg.steps)
    start = runs.resume(cfg, run, checkpoints=engine)["step"]

    loss_fn = partial(pair_loss, centre_coef=cfg.centre_coef)
    encode = runs.response_encoder(cfg, run, path, processor, engine, chosen_and_rejected)
    heldout = encode(enumerate(task.heldout))
    heldout_batch = pair_batch(heldout.sequences)

    def evaluate(when: str):
        """Loss and preference accuracy on the held-out pairs; returns the scored responses."""
        run.phase("evaluate")
        out = engine.infer_batch(heldout_batch)
        metrics = runs.global_loss(engine, loss_fn, out, heldout_batch)
        results = {"accuracy": metrics["preference/accuracy"], "heldout_loss": metrics["loss"]}
        counts = {"rows": len(heldout.samples), "skipped": len(heldout.skipped)}
        runs.record_evaluation(run, engine, when, results, **counts)
        scored = zip(heldout.sequences, out["values"].sum(1).tolist(), strict=True)
        return [replace(response, reward=score) for response, score in scored]

    runs.evaluate_at_start(cfg, run, start, evaluate, engine)
    rows = rows_of_steps(task.train, range(start, cfg.steps), cfg.prompts_per_step, cfg.seed)
    pairs_of_steps = runs.prefetch(map(encode, rows), run)
    for step in run.steps(start, cfg.steps):
        pairs = next(pairs_of_steps)
        batch = rebalance_across_ranks(pair_batch(pairs.sequences), engine.data_parallel_group)
        tokens, skipped = sum(batch.lengths), len(pairs.skipped)
        counts = runs.totals(engine, tokens=tokens, skipped_rows=skipped)
        if not counts["tokens"]:
            run.stop("no row of this batch can be trained on; see the log")

        run.phase("train")
        metrics = engine.train_batch(batch, loss_fn)
        run.log(step, metrics | counts, show={"loss": "loss", "accuracy": "preference/accuracy"})
        runs.save(cfg, run, step, checkpoints=engine)
        runs.evaluate_when_due(cfg, run, evaluate, engine)
        if runs.out_of_patience(cfg, run):
            break

    runs.finish(cfg, run, evaluate("after"), model=engine)


if __name__ == "__main__":
    runs.run_recipe(main)
