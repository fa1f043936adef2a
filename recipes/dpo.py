"""DPO and its variants: learn from pairs of a chosen and a rejected answer.

    torchrun --nproc-per-node=1 recipes/dpo.py  # a tiny Qwen2.5-VL learns to read digits
    torchrun --nproc-per-node=8 recipes/dpo.py --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --task pairs.parquet --lora_rank 32 --max_new_tokens 0 --lr 5e-6 --steps 1000

Rows have `question` (or `prompt`), `chosen`, `rejected` and optionally `image`, in the formats of
TRL, UltraFeedback and RLAIF-V. If a task has no pairs, each row's own answer is the chosen one and
another row's answer is the rejected one.

How it differs from the paper (DPO, https://arxiv.org/abs/2305.18290, section 4):
- The paper fine-tunes on the chosen answers first (`sft.py` does that). Without this, DPO can
  separate a pair while both answers become less likely. The loss therefore has a small term for
  the likelihood of the chosen answers (`sft_coef`; the paper's is 0). With `--loss orpo` it is as
  in the paper of ORPO (https://arxiv.org/abs/2403.07691, eq. 6): this term, plus 0.1 times the
  odds-ratio term.
- `--loss` selects another loss function of rlkit.losses; its docstring names its paper. With
  `--normalise_length`, ipo and dpo are TRL's ipo and sigmoid_norm. KTO is in kto.py. BCO and AOT
  are left out: they compare an answer with the whole batch, but a loss sees one micro-batch.
- The optimizer is AdamW; the paper uses RMSprop.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rlkit import losses, runs
from rlkit.data import collate, load_pairs, rows_of_steps
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.losses import (
    preference_mean,
    preference_stats,
    sequence_logprobs,
    sequence_mean_logprobs,
)


def orpo_loss(chosen, rejected, chosen_lengths, rejected_lengths, weight: float = 0.1):
    """ORPO's odds-ratio term, times the lambda of its paper."""
    return weight * losses.orpo_loss(chosen, rejected, chosen_lengths, rejected_lengths)


REFERENCE_LOSSES = {  # loss(chosen, rejected, ref_chosen, ref_rejected)
    "dpo": losses.dpo_loss,
    "robust": losses.robust_dpo_loss,
    "ipo": losses.ipo_loss,
    "hinge": losses.hinge_dpo_loss,
    "apo_zero": losses.apo_zero_loss,
    "apo_down": losses.apo_down_loss,
    "exo": losses.exo_loss,
    "nca": losses.nca_loss,
    "sppo": losses.sppo_loss,
    "discopop": losses.discopop_loss,
    "alpha_divergence": losses.alpha_divergence_dpo_loss,
    "forward_kl": losses.forward_kl_dpo_loss,
    "js": losses.js_dpo_loss,
}
PER_TOKEN_LOSSES = {  # loss(chosen, rejected, chosen_lengths, rejected_lengths): no reference
    "simpo": losses.simpo_loss,
    "alphapo": losses.alphapo_loss,
    "orpo": orpo_loss,
}
OTHER_LOSSES = {"slic": losses.slic_loss}  # loss(chosen, rejected): no reference
LOSSES = REFERENCE_LOSSES | PER_TOKEN_LOSSES | OTHER_LOSSES


@dataclass
class Config(runs.GenerationOptions, runs.GivenAnswerOptions):
    # shared options, with the numbers for the tiny model; help texts: rlkit/runs/options.py
    steps: runs.PositiveInt = 200
    prompts_per_step: runs.PositiveInt = 32
    lr: runs.NonNegativeFloat = 5e-4  # tiny model only; others default to 1e-6, or 1e-5 with LoRA
    loss: str = "dpo"
    """dpo, robust, ipo, hinge, apo_zero, apo_down, exo, nca, sppo, discopop, alpha_divergence,
    forward_kl, js; without a reference model: simpo, alphapo, orpo, slic."""
    beta: float | None = None
    """Beta of the loss: larger keeps the policy closer to the reference. Default: that of the
    loss function."""
    loss_options: dict[str, float] = field(default_factory=dict)
    """Other arguments of the loss function: --loss_options gamma 0.5 label_smoothing 0.1."""
    normalise_length: bool = False
    """Score an answer by the mean log-probability of its tokens instead of the sum."""
    sft_coef: runs.NonNegativeFloat | None = None
    """Weight of the chosen answers' mean negative log-likelihood (alpha in arXiv 2404.19733).
    Default: 0.1, or 1 for orpo."""


def loss_function(cfg: Config) -> Callable:
    """The function that `--loss` names, with its options."""
    if cfg.loss not in LOSSES:
        raise ValueError(f"loss: expected one of {', '.join(LOSSES)}, got {cfg.loss!r}")
    if cfg.normalise_length and cfg.loss in PER_TOKEN_LOSSES:
        raise ValueError(
            f"normalise_length: expected a loss of sums, got {cfg.loss!r}, which divides by the "
            "answers' lengths itself: leave the option out"
        )
    options = cfg.loss_options if cfg.beta is None else {"beta": cfg.beta, **cfg.loss_options}
    loss = partial(LOSSES[cfg.loss], **options)
    try:
        loss_per_pair(loss, ONE_EMPTY_PAIR, cfg)
    except (TypeError, ValueError) as error:
        raise ValueError(f"loss {cfg.loss!r}: {error}") from error
    return loss


def needs_reference(cfg: Config) -> bool:
    """Whether the loss compares the policy with a reference model."""
    loss_function(cfg)  # raises if the loss or its options are wrong
    return cfg.loss in REFERENCE_LOSSES


class Pairs(NamedTuple):
    """Log-probabilities of P pairs of answers, and the answers' lengths in tokens; [P] each."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor


ONE_EMPTY_PAIR = Pairs(*torch.zeros(4, 1), *torch.zeros(2, 1, dtype=torch.long))


def loss_per_pair(loss: Callable, x: Pairs, cfg: Config) -> Tensor:
    """[P]; each loss function takes what its formula needs."""
    if cfg.loss in REFERENCE_LOSSES:
        return loss(x.chosen, x.rejected, x.ref_chosen, x.ref_rejected)
    if cfg.loss in PER_TOKEN_LOSSES:
        return loss(x.chosen, x.rejected, x.chosen_lengths, x.rejected_lengths)
    return loss(x.chosen, x.rejected)


def pair_loss(out, mb, loss: Callable, cfg: Config):
    """Loss of a micro-batch and its metrics; even rows are chosen answers, odd rows rejected ones.

    The logged margins are log-probability differences of policy and reference, in nats; per token
    for the losses that divide by the answers' lengths.
    """
    answer_logprobs = sequence_mean_logprobs if cfg.normalise_length else sequence_logprobs
    logprobs = answer_logprobs(out.logprobs, mb.mask)
    ref_logprobs = answer_logprobs(mb.ref_logprobs, mb.mask)
    lengths, total = mb.mask.sum(1), mb.total_sequences / 2
    pairs = Pairs(
        chosen=logprobs[0::2],
        rejected=logprobs[1::2],
        ref_chosen=ref_logprobs[0::2],
        ref_rejected=ref_logprobs[1::2],
        chosen_lengths=lengths[0::2],
        rejected_lengths=lengths[1::2],
    )
    default = 1.0 if cfg.loss == "orpo" else 0.1
    sft_coef = default if cfg.sft_coef is None else cfg.sft_coef
    chosen_nll = -sequence_mean_logprobs(out.logprobs[0::2], mb.mask[0::2])
    values = loss_per_pair(loss, pairs, cfg) + sft_coef * chosen_nll
    chosen, rejected = pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected
    if cfg.loss in PER_TOKEN_LOSSES:
        chosen = chosen / pairs.chosen_lengths.clamp(min=1)
        rejected = rejected / pairs.rejected_lengths.clamp(min=1)
    return preference_mean(values, total), preference_stats(chosen, rejected, total)


def chosen_and_rejected(row):
    return [row["chosen"], row["rejected"]]


def pair_batch(sequences):
    """Chosen answers in even rows, rejected ones in odd rows; a pair stays in one micro-batch."""
    return collate(sequences, micro_batch_group=torch.arange(len(sequences)) // 2)


def add_reference(batch, reference):
    """Log-probabilities of the reference policy, 0 for a loss that needs none."""
    zeros = torch.zeros(batch.tokens.shape)
    return batch.add(ref_logprobs=reference(batch) if reference else zeros)


def main(cfg: Config) -> None:
    loss = loss_function(cfg)
    task = runs.load_named_task(cfg, cfg.task, load_pairs)
    cfg = runs.with_epochs(cfg, task)
    run = runs.start_run(cfg, task.name, task.train, task.heldout)
    path, processor = runs.find_model(cfg, run, task.train)
    engine = runs.build_engine(cfg, path, processor, optimizer_steps=cfg.steps)
    reference = None
    if needs_reference(cfg):
        reference = runs.build_reference(cfg, path, processor, engine)
    rollout = runs.build_rollout(cfg, path, processor, engine)
    start = runs.resume(cfg, run, checkpoints=engine)["step"]

    sampler = runs.PolicySampler(cfg, run, task, processor, engine, rollout)
    encode = runs.answer_encoder(cfg, run, path, processor, engine, chosen_and_rejected)
    loss_fn = partial(pair_loss, loss=loss, cfg=cfg)
    heldout = encode(enumerate(task.heldout))
    heldout_batch = add_reference(pair_batch(heldout.sequences), reference)

    def evaluate(when: str):
        """Loss and preference accuracy on the held-out pairs, and accuracy of greedy answers."""
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
            batch = add_reference(batch, reference)
            metrics = engine.train_batch(batch, loss_fn)
        run.log(step, metrics | counts, show={"loss": "loss", "accuracy": "preference/accuracy"})
        runs.save(cfg, run, step, checkpoints=engine)
        runs.evaluate_when_due(cfg, run, evaluate, engine)
        if runs.out_of_patience(cfg, run):
            break

    runs.finish(cfg, run, evaluate("after"), model=engine)


if __name__ == "__main__":
    runs.run_recipe(main)
