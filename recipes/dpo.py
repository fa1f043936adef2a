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
from inspect import signature

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


def orpo_loss(chosen, rejected, chosen_lengths, rejected_lengths, weight: float = 0.1):
    """ORPO's odds-ratio term, times the lambda of its paper."""
    return weight * losses.orpo_loss(chosen, rejected, chosen_lengths, rejected_lengths)


LOSSES = {
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
    "simpo": losses.simpo_loss,
    "alphapo": losses.alphapo_loss,
    "orpo": orpo_loss,
    "slic": losses.slic_loss,
}


@dataclass
class Config(runs.GenerationOptions, runs.GivenAnswerOptions):
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
    if cfg.normalise_length and "chosen_lengths" in signature(LOSSES[cfg.loss]).parameters:
        raise ValueError(
            f"normalise_length: expected a loss of sums, got {cfg.loss!r}, which divides by the "
            "answers' lengths itself: leave the option out"
        )
    options = {**({} if cfg.beta is None else {"beta": cfg.beta}), **cfg.loss_options}
    try:
        signature(LOSSES[cfg.loss]).bind_partial(**options)
    except TypeError as error:
        raise ValueError(f"loss {cfg.loss!r}: {error}") from error
    return partial(LOSSES[cfg.loss], **options)


def needs_reference(cfg: Config) -> bool:
    """Whether the loss compares the policy with a reference model."""
    return "ref_chosen" in signature(loss_function(cfg)).parameters


def pair_loss(out, mb, loss: Callable, cfg: Config):
    """Loss of a micro-batch and its metrics; even rows are chosen answers, odd rows rejected ones.

    The logged margins are log-probability differences of policy and reference, in nats; per token
    for the losses that divide by the answers' lengths.
    """
    score = sequence_mean_logprobs if cfg.normalise_length else sequence_logprobs
    chosen, rejected = mb.mask[0::2], mb.mask[1::2]
    given = {  # each loss function takes the arguments that its formula needs
        "chosen": score(out.logprobs[0::2], chosen),
        "rejected": score(out.logprobs[1::2], rejected),
        "ref_chosen": score(mb.ref_logprobs[0::2], chosen),
        "ref_rejected": score(mb.ref_logprobs[1::2], rejected),
        "chosen_lengths": chosen.sum(1),
        "rejected_lengths": rejected.sum(1),
    }
    values = loss(**{name: given[name] for name in signature(loss).parameters if name in given})
    default = 1.0 if cfg.loss == "orpo" else 0.1
    sft_coef = default if cfg.sft_coef is None else cfg.sft_coef
    values = values - sft_coef * sequence_mean_logprobs(out.logprobs[0::2], chosen)
    pairs = mb.total_sequences / 2
    margins = given["chosen"] - given["ref_chosen"], given["rejected"] - given["ref_rejected"]
    if "chosen_lengths" in signature(loss).parameters:  # its reward is a mean over tokens
        margins = margins[0] / chosen.sum(1).clamp(1), margins[1] / rejected.sum(1).clamp(1)
    return preference_mean(values, pairs), preference_stats(*margins, pairs)


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
    pairs_of_steps = runs.prefetch(map(encode, rows))
    for step in run.steps(start, cfg.steps):
        run.phase("encode")
        pairs = next(pairs_of_steps)
        batch = rebalance_across_ranks(pair_batch(pairs.sequences), engine.data_parallel_group)
        counts = runs.totals(engine, tokens=batch.mask.sum(), skipped_rows=len(pairs.skipped))
        if not counts["tokens"]:
            run.stop("none of its rows can be trained on; see the log")

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
