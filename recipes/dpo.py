"""DPO and its variants: learn from pairs of a chosen and a rejected response.

    torchrun --nproc-per-node=1 recipes/dpo.py  # a tiny Qwen2.5-VL learns to read digits
    torchrun --nproc-per-node=8 recipes/dpo.py --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --task pairs.parquet --lora_rank 32 --max_new_tokens 0 --lr 5e-6 --steps 1000

Rows have `question` (or `prompt`), `chosen`, `rejected` and optionally `image`, in the formats of
TRL, UltraFeedback and RLAIF-V. If a task has no pairs, each row's own answer is the chosen one and
another row's answer is the rejected one.

How it differs from the paper (DPO, https://arxiv.org/abs/2305.18290, section 4):
- The paper fine-tunes on the chosen responses first (`sft.py` does that). Without this, DPO can
  separate a pair while both responses become less likely. The loss therefore has a small term for
  the likelihood of the chosen responses (`sft_coef`; the paper's is 0).
- `--loss` selects another loss by TRL's names (`loss_type` and `f_divergence_type`); the docstring
  of its function in rlkit.losses names its paper. TRL's ipo is `--loss ipo --normalise_length`.
- Losses without a reference model are in simpo.py, KTO is in kto.py. BCO and AOT are left out: they
  compare a response with the whole batch, but a loss sees one micro-batch.
- The optimizer is AdamW; the paper uses RMSprop.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

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
    "sigmoid": losses.dpo_loss,
    "sigmoid_norm": losses.dpo_loss,  # of mean log-probabilities
    "robust": losses.robust_dpo_loss,
    "ipo": losses.ipo_loss,
    "hinge": losses.hinge_dpo_loss,
    "apo_zero": losses.apo_zero_loss,
    "apo_down": losses.apo_down_loss,
    "exo_pair": losses.exo_loss,
    "nca_pair": losses.nca_loss,
    "sppo_hard": losses.sppo_loss,
    "discopop": losses.discopop_loss,
    "alpha_divergence": losses.alpha_divergence_dpo_loss,
    "forward_kl": losses.forward_kl_dpo_loss,
    "js_divergence": losses.js_dpo_loss,
}


@dataclass
class Config(runs.GenerationOptions, runs.GivenResponseOptions):
    # shared options, with the numbers for the tiny model; help texts: rlkit/runs/options.py
    steps: runs.PositiveInt = 200
    prompts_per_step: runs.PositiveInt = 32
    lr: runs.NonNegativeFloat = 5e-4  # tiny model only; others default to 1e-6, or 1e-5 with LoRA
    loss: str = "sigmoid"
    """sigmoid (DPO), sigmoid_norm, robust, ipo, hinge, apo_zero, apo_down, exo_pair, nca_pair,
    sppo_hard, discopop, alpha_divergence, forward_kl, js_divergence."""
    beta: float | None = None
    """Beta of the loss: larger keeps the policy closer to the reference. Default: that of the
    loss function."""
    loss_options: dict[str, float] = field(default_factory=dict)
    """Other arguments of the loss function: --loss_options label_smoothing 0.1."""
    normalise_length: bool = False
    """Score a response by the mean log-probability of its tokens instead of the sum."""
    sft_coef: runs.NonNegativeFloat = 0.1
    """Weight of the chosen responses' mean negative log-likelihood (alpha in arXiv 2404.19733)."""


def select_loss(cfg: Config) -> Callable:
    """The function that `--loss` names, with its options."""
    if cfg.loss not in LOSSES:
        raise ValueError(
            f"loss: expected one of {', '.join(LOSSES)} (for simpo, alphapo, orpo and slic see "
            f"recipes/simpo.py), got {cfg.loss!r}"
        )
    options = cfg.loss_options if cfg.beta is None else {"beta": cfg.beta, **cfg.loss_options}
    loss = partial(LOSSES[cfg.loss], **options)
    try:
        loss(*torch.zeros(4, 1))
    except (TypeError, ValueError) as error:  # an option that it does not have, or out of range
        raise ValueError(f"loss {cfg.loss!r}: {error}") from error
    return loss


def pair_loss(out, mb, loss: Callable, cfg: Config):
    """Loss of a micro-batch and its metrics; even rows are chosen responses, odd rows rejected
    ones.

    The logged log-probabilities are the policy's minus the reference's, in nats.
    """
    mean = cfg.normalise_length or cfg.loss == "sigmoid_norm"
    response_logprobs = sequence_mean_logprobs if mean else sequence_logprobs
    logprobs = response_logprobs(out.logprobs, mb.mask)
    ref_logprobs = response_logprobs(mb.ref_logprobs, mb.mask)
    chosen, rejected = logprobs[0::2], logprobs[1::2]
    ref_chosen, ref_rejected = ref_logprobs[0::2], ref_logprobs[1::2]
    chosen_nll = -sequence_mean_logprobs(out.logprobs, mb.mask)[0::2]
    values = loss(chosen, rejected, ref_chosen, ref_rejected) + cfg.sft_coef * chosen_nll
    pairs = mb.total_sequences / 2
    metrics = preference_stats(chosen - ref_chosen, rejected - ref_rejected, pairs)
    return preference_mean(values, pairs), metrics


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
    reference = runs.build_reference(cfg, path, processor, engine)
    rollout = runs.build_rollout(cfg, path, processor, engine)
    start = runs.resume(cfg, run, checkpoints=engine)["step"]

    sampler = runs.PolicySampler(cfg, run, task, processor, engine, rollout)
    encode = runs.response_encoder(cfg, run, path, processor, engine, chosen_and_rejected)
    heldout = encode(enumerate(task.heldout))
    heldout_batch = pair_batch(heldout.sequences)
    heldout_batch.add(ref_logprobs=reference(heldout_batch))

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
        with runs.keep_on_device(engine):
            batch.add(ref_logprobs=reference(batch))
            metrics = engine.train_batch(batch, loss_fn)
        run.log(step, metrics | counts, show={"loss": "loss", "accuracy": "preference/accuracy"})
        runs.save(cfg, run, step, checkpoints=engine)
        runs.evaluate_when_due(cfg, run, evaluate, engine)
        if runs.out_of_patience(cfg, run):
            break

    runs.finish(cfg, run, evaluate("after"), model=engine)


if __name__ == "__main__":
    runs.run_recipe(main)
