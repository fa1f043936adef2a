"""KTO: learn from single responses marked good or bad, without pairs or a reward model.

    torchrun --nproc-per-node=1 recipes/kto.py  # a tiny Qwen2.5-VL learns to read digits
    torchrun --nproc-per-node=8 recipes/kto.py --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --task marked.parquet --lora_rank 32 --max_new_tokens 0 --lr 5e-6 --steps 1000

Rows have `question` (or `prompt`), `completion`, `label` (true or false) and optionally `image`, as
in TRL. A pair (`chosen`, `rejected`) counts as two rows. In other tasks, each row's own answer is
good, and the answer of another row is bad.

How it differs from the paper (KTO, https://arxiv.org/abs/2402.01306, section 4.1):
- The baseline z_0 is estimated once per step, from all prompts of the batch over all ranks, each
  with the response of the next row, if it fits. The paper pairs them within a micro-batch, so its
  z_0 depends on how the batch is split.
- A good and a bad response have the same weight by default, however many there are of each. The
  paper chooses weights such that (weight x count) of good and bad are between 1 : 1 and 4 : 3: see
  `--desirable_weight`.
- The loss has a small term for the likelihood of good responses, for the reason given in `dpo.py`
  (`sft_coef`; the paper fine-tunes first and has 0).
- Without the baseline (`--no_baseline`) the loss is APO-zero for single responses
  (https://arxiv.org/abs/2408.06266).
- The optimizer is AdamW; the paper uses RMSprop.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch

from rlkit import runs
from rlkit.data import collate, first_of_sources, load_unpaired, rows_of_steps
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.losses import (
    kto_kl_estimate,
    kto_loss,
    preference_mean,
    sequence_logprobs,
    sequence_mean_logprobs,
)


@dataclass
class Config(runs.GenerationOptions, runs.GivenResponseOptions):
    # shared options, with the numbers for the tiny model; help texts: rlkit/runs/options.py
    steps: runs.PositiveInt = 200
    prompts_per_step: runs.PositiveInt = 64
    lr: runs.NonNegativeFloat = 5e-4  # tiny model only; others default to 1e-6, or 1e-5 with LoRA
    beta: runs.PositiveFloat = 0.1
    """Beta of the loss: larger keeps the policy closer to the reference."""
    desirable_weight: runs.NonNegativeFloat = 1.0
    """Weight of good responses."""
    undesirable_weight: runs.NonNegativeFloat = 1.0
    """Weight of bad responses."""
    sft_coef: runs.NonNegativeFloat = 0.1
    """Weight of the good responses' negative log-likelihood per token."""
    baseline: bool = True
    """Subtract z_0, an estimate of the KL to the reference from responses to other prompts."""


def response_loss(out, mb, z0, desirable_count, cfg: Config):
    """Loss of a micro-batch and its metrics. desirable_count counts the good responses of all
    ranks.

    `unpaired/accuracy` is the share of responses on their side of z_0; the other two are mean
    log-ratios of policy and reference, in nats.
    """
    logprobs = sequence_logprobs(out.logprobs, mb.mask)
    ref_logprobs = sequence_logprobs(mb.ref_logprobs, mb.mask)
    label, total = mb.label.bool(), mb.total_sequences
    weights = cfg.desirable_weight, cfg.undesirable_weight
    loss = kto_loss(logprobs, ref_logprobs, label, z0, cfg.beta, *weights)
    loss = loss - cfg.sft_coef * label * sequence_mean_logprobs(out.logprobs, mb.mask)
    log_ratio = (logprobs - ref_logprobs).detach()
    right = torch.where(label, log_ratio > z0, log_ratio < z0)
    metrics = {
        "unpaired/accuracy": preference_mean(right.float(), total),
        "unpaired/desirable": preference_mean(log_ratio * label, desirable_count),
        "unpaired/undesirable": preference_mean(log_ratio * ~label, total - desirable_count),
    }
    return preference_mean(loss, total), metrics


def with_other_responses(rows):
    """Pair each prompt with the next row's completion, to estimate the KL (z_0).

    Args:
        rows: (group id, row) pairs. A row without a completion is passed over; if no other row has
            one, `other_response` is None.
    """
    rows = list(rows)
    with_others = []
    for i, (group_id, row) in enumerate(rows):
        following = (rows[j % len(rows)][1].get("completion") for j in range(i + 1, i + len(rows)))
        other = next((response for response in following if response is not None), None)
        with_others.append((group_id, {**row, "other_response": other}))
    return with_others


def apart(rows, prompt_ids):
    """(number, row) of all rows; a pair's two rows are apart, as z_0 needs mismatched responses."""
    first = [(i, row) for i, row in enumerate(rows) if i in prompt_ids]
    rest = [(i, row) for i, row in enumerate(rows) if i not in prompt_ids]
    return first + rest


def own_response(row):
    return [row["completion"]]


def other_response(row):
    return [] if row["other_response"] is None else [row["other_response"]]


def own_batch(sequences):
    """The rows' own responses, with their labels."""
    label = torch.tensor([float(sequence.row["label"]) for sequence in sequences])
    return collate(sequences, label=label)


def estimate_z0(others, cfg: Config, engine, reference):
    """Mean log-ratio of policy and reference on the responses to other prompts, at least 0."""
    if not cfg.baseline:
        return torch.tensor(0.0)
    others = collate(others)
    ref_logprobs = sequence_logprobs(reference(others), others.mask)
    logprobs = sequence_logprobs(engine.infer_batch(others)["logprobs"], others.mask)
    return kto_kl_estimate(logprobs, ref_logprobs, engine.global_sum)


def main(cfg: Config) -> None:
    if cfg.baseline and cfg.prompts_per_step == 1:
        raise ValueError("prompts_per_step: expected at least 2 without --no_baseline, got 1")
    task = runs.load_named_task(cfg, cfg.task, load_unpaired)
    cfg = runs.with_epochs(cfg, task)
    run = runs.start_run(cfg, task.name, task.train, task.heldout)
    path, processor = runs.find_model(cfg, run, task.train)
    engine = runs.build_engine(cfg, path, processor, optimizer_steps=cfg.steps)
    reference = runs.build_reference(cfg, path, processor, engine)
    rollout = runs.build_rollout(cfg, path, processor, engine)
    start = runs.resume(cfg, run, checkpoints=engine)["step"]

    sampler = runs.PolicySampler(cfg, run, task, processor, engine, rollout)
    others = other_response if cfg.baseline else None
    encode = runs.response_encoder(cfg, run, path, processor, engine, own_response, others)
    prompt_ids = set(first_of_sources(task.heldout))  # each prompt once: one row of each pair
    heldout = encode(with_other_responses(apart(task.heldout, prompt_ids)))
    prompts = [prompt for prompt in heldout.samples if prompt.group_id in prompt_ids]
    heldout_batch = own_batch(heldout.sequences)
    heldout_batch.add(ref_logprobs=reference(heldout_batch))
    heldout_desirable = engine.global_sum(heldout_batch.label.sum()).item()

    def evaluate(when: str):
        """Held-out loss, share of responses on their side of z_0, and accuracy of greedy
        responses."""
        run.phase("evaluate")
        z0 = estimate_z0(heldout.others, cfg, engine, reference)
        loss_fn = partial(response_loss, z0=z0, desirable_count=heldout_desirable, cfg=cfg)
        out = engine.infer_batch(heldout_batch)
        metrics = runs.global_loss(engine, loss_fn, out, heldout_batch)
        measured = {
            "heldout_loss": metrics["loss"],
            "unpaired_accuracy": metrics["unpaired/accuracy"],
        }
        return runs.evaluate_heldout(sampler, replace(heldout, samples=prompts), when, **measured)

    runs.evaluate_at_start(cfg, run, start, evaluate, engine)
    rows = rows_of_steps(task.train, range(start, cfg.steps), cfg.prompts_per_step, cfg.seed)
    responses_of_steps = runs.prefetch(map(encode, map(with_other_responses, rows)), run)
    for step in run.steps(start, cfg.steps):
        responses = next(responses_of_steps)
        batch = rebalance_across_ranks(own_batch(responses.sequences), engine.data_parallel_group)
        desirable_count = engine.global_sum(batch.label.sum()).item()
        counts = runs.totals(engine, tokens=batch.mask.sum(), skipped_rows=len(responses.skipped))
        if not counts["tokens"]:
            run.stop("no row of this batch can be trained on; see the log")

        run.phase("train")
        with runs.keep_on_device(engine):
            batch.add(ref_logprobs=reference(batch))
            z0 = estimate_z0(responses.others, cfg, engine, reference)
            loss_fn = partial(response_loss, z0=z0, desirable_count=desirable_count, cfg=cfg)
            metrics = engine.train_batch(batch, loss_fn) | counts | {"kl": z0.item()}
        run.log(step, metrics, show={"loss": "loss", "accuracy": "unpaired/accuracy"})
        runs.save(cfg, run, step, checkpoints=engine)
        runs.evaluate_when_due(cfg, run, evaluate, engine)
        if runs.out_of_patience(cfg, run):
            break

    runs.finish(cfg, run, evaluate("after"), model=engine)


if __name__ == "__main__":
    runs.run_recipe(main)
