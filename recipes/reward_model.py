"""Reward model: a scalar head that scores whole answers, trained on pairs (Bradley-Terry).

    # a tiny Qwen2.5-VL learns to score answers about digits
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
- The score is read at the end token of the answer. The head starts at zero, so the first scores
  are 0.
- The model should already be fine-tuned, for example by `sft.py`. The tiny model is fine-tuned
  when it is built.
"""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import torch

from rlkit import runs
from rlkit.data import collate, load_pairs, step_rows
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.engines.flops import batch_flops
from rlkit.engines.value_head import scoring_batch
from rlkit.losses import bradley_terry_loss, pair_mean, preference_stats, reward_centring_loss
from rlkit.vlm import encode_answers, encode_prompt


@dataclass
class Config(runs.TrainingOptions):
    steps: int = 200
    """Optimizer steps."""
    prompts_per_step: int = 32
    """Rows per step, over all ranks."""
    max_tokens: int = 0
    """Most tokens in a prompt and an answer, image tokens included; longer rows are skipped. 0: the
    model's context."""
    centre_coef: float = 0.0
    """Weight of the regulariser that keeps rewards around 0, for example 0.01."""


def pair_loss(out, mb, centre_coef: float):
    """Mean loss of the pairs of all ranks; chosen answers in even rows, rejected ones after."""
    scores = out.values.sum(1)  # a row has one value, its score
    chosen, rejected = scores[0::2], scores[1::2]
    values = bradley_terry_loss(chosen, rejected, mb.margin[0::2])
    values = values + centre_coef * reward_centring_loss(chosen, rejected)
    pairs = mb.total_sequences / 2
    return pair_mean(values, pairs), preference_stats(chosen, rejected, pairs)


def main(cfg: Config) -> None:
    with runs.one_sentence_errors("reward_model"):
        task = runs.load_named_task(cfg, cfg.task, load_pairs)
        cfg = runs.with_epochs(cfg, task)
        run = runs.start_run("reward_model", cfg, task.name)
        path, processor = runs.find_model(cfg, run, task.train, warm_up_steps=200, label_noise=0.0)
        engine = runs.build_value_engine(cfg, path, processor, updates=cfg.steps)
        start = runs.resume(cfg, run, checkpoints=engine)["step"]
    ends = runs.answer_ends(cfg, path, processor)
    max_tokens = cfg.max_tokens or engine.config.get_text_config().max_position_embeddings
    loss_fn = partial(pair_loss, centre_coef=cfg.centre_coef)

    def encode_row(group_id, row):
        """The chosen and the rejected answer of a row, each behind its prompt."""
        row = {**row, "margin": float(row.get("margin") or 0.0)}
        prompt = encode_prompt(processor, row, group_id=group_id)
        answers = [row["chosen"], row["rejected"]]
        return encode_answers(prompt, processor, answers, ends, max_tokens)

    def collate_pairs(rows):
        samples = [sample for two in rows for sample in two]
        margins = torch.tensor([sample.row["margin"] for sample in samples])
        pairs = torch.arange(len(samples)) // 2  # a pair stays in one micro-batch
        return scoring_batch(collate(samples, micro_batch_group=pairs, margin=margins))

    shown, skipped_rows = runs.encode_share(enumerate(task.heldout), encode_row, run, engine)
    heldout = collate_pairs(shown)

    def evaluate(when: str):
        """Loss and preference accuracy on the held-out pairs."""
        run.phase("evaluate")
        values = engine.infer_batch(heldout)["values"]
        loss, stats = loss_fn(SimpleNamespace(values=values), heldout)
        pairs = len(shown)
        sums = runs.totals(
            engine, pairs=pairs, loss=loss * pairs, right=stats["preference/accuracy"] * pairs
        )
        found = {
            "accuracy": sums["right"] / max(sums["pairs"], 1),
            "heldout_loss": sums["loss"] / max(sums["pairs"], 1),
        }
        answers = [sample for two in shown for sample in two]
        runs.record_evaluation(run, engine, when, found, rows=len(shown), skipped=len(skipped_rows))
        return [
            replace(answer, reward=score)
            for answer, score in zip(answers, values.sum(1).tolist(), strict=True)
        ]

    if start == 0:
        evaluate("before")
    for step in run.steps(start, cfg.steps):
        run.phase("encode")
        rows = step_rows(task.train, step, cfg.prompts_per_step, cfg.seed)
        rows, skipped = runs.encode_share(rows, encode_row, run, engine)
        batch = rebalance_across_ranks(collate_pairs(rows), engine.data_parallel_group)
        flops = runs.training_passes(cfg) * batch_flops(engine.config, batch, head=False)
        counts = runs.totals(
            engine, tokens=batch.mask.sum(), flops=flops, skipped_rows=len(skipped)
        )
        if not counts["tokens"]:
            run.stop("none of its rows can be trained on; see the log")

        run.phase("train")
        metrics = engine.train_batch(batch, loss_fn)
        run.log(step, metrics | counts, show={"loss": "loss", "accuracy": "preference/accuracy"})
        runs.save(cfg, run, step, checkpoints=engine)

    runs.finish(cfg, run, evaluate("after"), model=engine)


if __name__ == "__main__":
    runs.run_recipe(main)
