"""KTO: learn from single answers marked good or bad, without pairs or a reward model.

    torchrun --nproc-per-node=1 recipes/kto.py  # a tiny Qwen2.5-VL learns to read digits
    torchrun --nproc-per-node=8 recipes/kto.py --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --task marked.parquet --lora_rank 32 --max_new_tokens 0 --lr 5e-6 --steps 1000

Rows have `question` (or `prompt`), `completion`, `label` (true or false) and optionally `image`, as
in TRL. A pair (`chosen`, `rejected`) counts as two rows. In other tasks, each row's own answer is
good, and the answer of another row is bad.

How it differs from the paper (KTO, https://arxiv.org/abs/2402.01306, section 4.1):
- The baseline z_0 is estimated once per step, from all prompts of the batch over all ranks, each
  with the answer of the next row. The paper pairs them within a micro-batch, so its z_0 depends on
  how the batch is split.
- A good and a bad answer have the same weight by default, however many there are of each. The
  paper chooses weights such that (weight x count) of good and bad are between 1 : 1 and 4 : 3: see
  `--desirable_weight`.
- The loss has a small term for the likelihood of good answers, for the reason given in `dpo.py`
  (`sft_coef`; the paper fine-tunes first and has 0).
- Without the baseline (`--no_baseline`) the loss is APO-zero for single answers
  (https://arxiv.org/abs/2408.06266).
- The optimizer is AdamW; the paper uses RMSprop.
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch

from rlkit import runs
from rlkit.data import collate, load_unpaired, step_rows
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.engines.flops import batch_flops
from rlkit.losses import (
    kto_kl_estimate,
    kto_loss,
    pair_mean,
    sequence_logprobs,
    sequence_mean_logprobs,
)
from rlkit.vlm import encode_answers, encode_prompt


@dataclass
class Config(runs.GenerationOptions, runs.TrainingOptions):
    steps: int = 200
    """Optimizer steps."""
    prompts_per_step: int = 64
    """Rows per step, over all ranks."""
    max_tokens: int = 0
    """Most tokens in a prompt and an answer, image tokens included; longer rows are skipped. 0: the
    model's context."""
    beta: float = 0.1
    """Beta of the loss: larger keeps the policy closer to the reference."""
    desirable_weight: float = 1.0
    """Weight of good answers."""
    undesirable_weight: float = 1.0
    """Weight of bad answers."""
    sft_coef: float = 0.1
    """Weight of the good answers' negative log-likelihood per token."""
    baseline: bool = True
    """Subtract z_0, an estimate of the KL to the reference from answers to other prompts."""


def answer_loss(out, mb, z0, good: float, cfg: Config):
    """Mean loss of the answers of all ranks, `good` of which are good.

    `marked/accuracy` is the share of answers on their side of z_0; the other metrics are in nats.
    """
    logprobs = sequence_logprobs(out.logprobs, mb.mask)
    ref_logprobs = sequence_logprobs(mb.ref_logprobs, mb.mask)
    label, total = mb.label.bool(), mb.total_sequences
    weights = cfg.desirable_weight, cfg.undesirable_weight
    loss = kto_loss(logprobs, ref_logprobs, label, z0, cfg.beta, *weights)
    loss = loss - cfg.sft_coef * label * sequence_mean_logprobs(out.logprobs, mb.mask)
    log_ratio = (logprobs - ref_logprobs).detach()
    right = torch.where(label, log_ratio > z0, log_ratio < z0)
    return pair_mean(loss, total), {
        "marked/accuracy": pair_mean(right.float(), total),
        "marked/good": pair_mean(log_ratio * label, good),
        "marked/bad": pair_mean(log_ratio * ~label, total - good),
    }


def with_other_answers(rows):
    """The (group id, row) pairs, each row with the answer of the next one that can be read: z_0 is
    taken of these."""

    answers = [row.get("completion") for _, row in rows]  # None where a row cannot be read
    found = []
    for i, (group_id, row) in enumerate(rows):
        others = [answer for answer in answers[i + 1 :] + answers[: i + 1] if answer is not None]
        found.append((group_id, {**row, "other_answer": others[0] if others else None}))
    return found


def main(cfg: Config) -> None:
    with runs.one_sentence_errors("kto"):
        task = runs.load_named_task(cfg, cfg.task, load_unpaired)
        cfg = runs.with_epochs(cfg, task)
        run = runs.start_run("kto", cfg, task.name)
        path, processor = runs.find_model(cfg, run, task.train)
        engine = runs.build_engine(cfg, path, processor, updates=cfg.steps)
        reference = runs.build_reference(cfg, path, processor, engine)
        rollout = runs.build_rollout(cfg, path, processor, engine)
        start = runs.resume(cfg, run, checkpoints=engine)["step"]
    ends = runs.answer_ends(cfg, path, processor)
    max_tokens = cfg.max_tokens or engine.config.get_text_config().max_position_embeddings

    def encode_row(group_id, row):
        """A prompt, its answer, an answer to another prompt, and whether its own is good."""
        prompt = encode_prompt(processor, row, group_id=group_id)
        answers = [row["completion"], row["other_answer"]]
        return prompt, *encode_answers(prompt, processor, answers, ends, max_tokens), row["label"]

    def batches(rows):
        """The answers with their labels, and the answers to other prompts."""
        _, samples, others, good = zip(*rows, strict=True) if rows else [()] * 4
        return collate(samples, label=torch.tensor(good, dtype=torch.float32)), collate(others)

    def add_reference(batch):
        return batch.add(ref_logprobs=reference(batch))

    def estimate_z0(others):
        """Mean log-ratio of policy and reference on answers to other prompts, at least 0."""
        if not cfg.baseline:
            return torch.tensor(0.0)
        others = add_reference(others)
        logprobs = sequence_logprobs(engine.infer_batch(others)["logprobs"], others.mask)
        ref_logprobs = sequence_logprobs(others.ref_logprobs, others.mask)
        return kto_kl_estimate(logprobs, ref_logprobs, engine.global_sum)

    rows = with_other_answers(list(enumerate(task.heldout)))
    rows, skipped = runs.encode_share(rows, encode_row, run, engine)
    prompts = runs.Prompts([prompt for prompt, *_ in rows], skipped)
    heldout, heldout_others = batches(rows)
    heldout = add_reference(heldout)
    good = engine.global_sum(heldout.label.sum()).item()
    sampler = runs.PolicySampler(cfg, run, task.reward, engine, rollout)

    def evaluate(when: str):
        """Loss of the held-out answers, share of them on their side of z_0, and accuracy of greedy
        ones."""
        answers = sampler.answer_heldout(prompts)
        run.phase("evaluate")
        out, z0 = SimpleNamespace(**engine.infer_batch(heldout)), estimate_z0(heldout_others)
        loss, stats = answer_loss(out, heldout, z0, good, cfg)
        count = len(heldout)
        sums = runs.totals(
            engine, count=count, loss=loss * count, right=stats["marked/accuracy"] * count
        )
        found = {name: sums[name] / max(sums["count"], 1) for name in ("loss", "right")}
        found = {"heldout_loss": found["loss"], "marked_accuracy": found["right"]}
        found = runs.accuracy(answers, engine.global_sum) | found
        counts = {"rows": len(prompts.samples), "skipped": len(prompts.skipped)}
        runs.record_evaluation(run, engine, when, found, **counts)
        return answers.judged

    if start == 0:
        evaluate("before")
    for step in run.steps(start, cfg.steps):
        run.phase("encode")
        rows = with_other_answers(step_rows(task.train, step, cfg.prompts_per_step, cfg.seed))
        rows, skipped = runs.encode_share(rows, encode_row, run, engine)
        batch, others = batches(rows)

        run.phase("train")
        batch = add_reference(
            rebalance_across_ranks(batch, engine.data_parallel_group)
        )  # each rank has about as many tokens
        passes = runs.training_passes(cfg) + 1 + 2 * cfg.baseline
        flops = passes * batch_flops(engine.config, batch)
        counts = {
            "tokens": batch.mask.sum(),
            "flops": flops,
            "skipped_rows": len(skipped),
            "good": batch.label.sum(),
        }
        counts = runs.totals(engine, **counts)
        if not counts["tokens"]:
            run.stop("none of its rows can be trained on; see the log")
        z0 = estimate_z0(others)
        loss_fn = partial(answer_loss, z0=z0, good=counts.pop("good"), cfg=cfg)
        metrics = engine.train_batch(batch, loss_fn) | counts | {"kl": z0.item()}
        run.log(step, metrics, show={"loss": "loss", "accuracy": "marked/accuracy"})
        runs.save(cfg, run, step, checkpoints=engine)

    runs.finish(cfg, run, evaluate("after"), model=engine)


if __name__ == "__main__":
    runs.run_recipe(main)
