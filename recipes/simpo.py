"""SimPO and other preference losses without a reference model: AlphaPO, ORPO, SLiC-HF.

    torchrun --nproc-per-node=1 recipes/simpo.py  # a tiny Qwen2.5-VL learns to read digits
    torchrun --nproc-per-node=8 recipes/simpo.py --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --task pairs.parquet --lora_rank 32 --max_new_tokens 0 --lr 5e-6 --steps 1000

Rows have `question` (or `prompt`), `chosen`, `rejected` and optionally `image`, in the formats of
TRL, UltraFeedback and RLAIF-V. If a task has no pairs, each row's own answer is the chosen one and
another row's answer is the rejected one.

`--loss` is one of simpo (https://arxiv.org/abs/2405.14734), alphapo (arXiv 2501.03884), orpo (arXiv
2403.07691) and slic (arXiv 2305.10425). Losses that compare with a reference model are in dpo.py.

How it differs from the papers:
- The loss has a small term for the likelihood of the chosen responses (`sft_coef`). Without it,
  both responses of a pair can become less likely. The papers of SimPO and AlphaPO have no such
  term. ORPO is as in its paper (eq. 6): this term with weight 1, plus 0.1 times the odds-ratio
  term.
- SLiC-HF's paper sums that term over the tokens of a response; here it is the mean, for all losses.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from rlkit import losses, runs
from rlkit.data import collate, load_pairs, rows_of_steps
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.losses import (
    preference_mean,
    preference_stats,
    sequence_logprobs,
    sequence_mean_logprobs,
)

LOSSES = {
    "simpo": losses.simpo_loss,
    "alphapo": losses.alphapo_loss,
    "orpo": losses.orpo_loss,
    "slic": losses.slic_loss,
}


@dataclass
class Config(runs.GenerationOptions, runs.GivenResponseOptions):
    # shared options, with the numbers for the tiny model; help texts: rlkit/runs/options.py
    steps: runs.PositiveInt = 200
    prompts_per_step: runs.PositiveInt = 32
    lr: runs.NonNegativeFloat = 5e-4  # tiny model only; others default to 1e-6, or 1e-5 with LoRA
    loss: Literal["simpo", "alphapo", "orpo", "slic"] = "simpo"
    """simpo: mean log-probabilities with a target margin. alphapo: powers of the likelihood in
    their place. orpo: odds ratio. slic: hinge loss on the log-probabilities of whole responses."""
    beta: float | None = None
    """Scale of the log-probabilities, with --loss simpo (default: 2) or alphapo (2.5)."""
    loss_options: dict[str, float] = field(default_factory=dict)
    """Other arguments of the loss function: --loss_options gamma 0.5."""
    loss_coef: runs.NonNegativeFloat | None = None
    """Weight of the preference loss. Default: 1, or 0.1 for orpo (lambda in its paper)."""
    sft_coef: runs.NonNegativeFloat | None = None
    """Weight of the chosen responses' mean negative log-likelihood. Default: 0.1, or 1 for orpo."""


def preference_loss(loss: Callable, logprobs, lengths, cfg: Config):
    """[P], of P pairs; even rows are chosen responses, odd rows rejected ones."""
    if cfg.loss == "slic":
        return loss(logprobs[0::2], logprobs[1::2])
    return loss(logprobs[0::2], logprobs[1::2], lengths[0::2], lengths[1::2])


def select_loss(cfg: Config) -> Callable:
    """The function that `--loss` names, with its options."""
    options = cfg.loss_options if cfg.beta is None else {"beta": cfg.beta, **cfg.loss_options}
    loss = partial(LOSSES[cfg.loss], **options)
    try:
        preference_loss(loss, torch.zeros(2), torch.ones(2, dtype=torch.long), cfg)
    except (TypeError, ValueError) as error:  # an option that it does not have, or out of range
        raise ValueError(f"loss {cfg.loss!r}: {error}") from error
    return loss


def coefficients(cfg: Config) -> tuple[float, float]:
    """Weights of the preference loss and of the likelihood; by default those of the loss."""
    loss_coef, sft_coef = (0.1, 1.0) if cfg.loss == "orpo" else (1.0, 0.1)
    return (
        loss_coef if cfg.loss_coef is None else cfg.loss_coef,
        sft_coef if cfg.sft_coef is None else cfg.sft_coef,
    )


def pair_loss(out, mb, loss: Callable, cfg: Config):
    """Loss of a micro-batch and its metrics; even rows are chosen responses, odd rows rejected
    ones.

    The logged log-probabilities are means per token, or with slic sums, in nats.
    """
    logprobs, lengths = sequence_logprobs(out.logprobs, mb.mask), mb.mask.sum(1)
    means = sequence_mean_logprobs(out.logprobs, mb.mask)
    loss_coef, sft_coef = coefficients(cfg)
    values = loss_coef * preference_loss(loss, logprobs, lengths, cfg) - sft_coef * means[0::2]
    compared = logprobs if cfg.loss == "slic" else means
    pairs = mb.total_sequences / 2
    return preference_mean(values, pairs), preference_stats(compared[0::2], compared[1::2], pairs)


def chosen_and_rejected(row):
    return [row["chosen"], row["rejected"]]


def pair_batch(sequences):
    """Chosen responses in even rows, rejected ones in odd rows; a pair stays in one micro-batch."""
    return collate(sequences, micro_batch_group=torch.arange(len(sequences)) // 2)


def main(cfg: Config) -> None:
    loss_fn = partial(pair_loss, loss=select_loss(cfg), cfg=cfg)
    task = runs.load_named_task(cfg, cfg.task, load_pairs)
    cfg = runs.with_epochs(cfg, task)
    run = runs.start_run(cfg, task.name, task.train, task.heldout)
    path, processor = runs.find_model(cfg, run, task.train)
    engine = runs.build_engine(cfg, path, processor, optimizer_steps=cfg.steps)
    rollout = runs.build_rollout(cfg, path, processor, engine)
    start = runs.resume(cfg, run, checkpoints=engine)["step"]

    sampler = runs.PolicySampler(cfg, run, task, processor, engine, rollout)
    encode = runs.response_encoder(cfg, run, path, processor, engine, chosen_and_rejected)
    heldout = encode(enumerate(task.heldout))
    heldout_batch = pair_batch(heldout.sequences)

    def evaluate(when: str):
        """Loss and preference accuracy on the held-out pairs, and accuracy of greedy responses."""
        run.phase("evaluate")
        out = engine.infer_batch(heldout_batch)
        metrics = runs.global_loss(engine, loss_fn, out, heldout_batch)
        measured = {
            "heldout_loss": metrics["loss"],
            "preference_accuracy": metrics["preference/accuracy"],
        }
        return runs.evaluate_heldout(sampler, heldout, when, **measured)

    runs.evaluate_at_start(cfg, run, start, evaluate, engine)
    rows = rows_of_steps(task.train, range(start, cfg.steps), cfg.prompts_per_step, cfg.seed)
    pairs_of_steps = runs.prefetch(map(encode, rows), run)
    for step in run.steps(start, cfg.steps):
        pairs = next(pairs_of_steps)
        batch = rebalance_across_ranks(pair_batch(pairs.sequences), engine.data_parallel_group)
        counts = runs.totals(engine, tokens=batch.mask.sum(), skipped_rows=len(pairs.skipped))
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
