"""Supervised fine-tuning of vision-language and language models on given answers.

    torchrun --nproc-per-node=1 recipes/sft.py  # a tiny Qwen2.5-VL learns to read digits
    torchrun --nproc-per-node=8 recipes/sft.py --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --task train.parquet --lora_rank 32 --max_new_tokens 0 --lr 1e-4 --steps 2000

Rows have `question`, `answer` and optionally `image`; or `messages`, a chat that ends with a
message of the assistant.

How it differs from the paper (InstructGPT, https://arxiv.org/abs/2203.02155, section 3.5):
- The loss is the mean over the answer tokens of the whole batch, so a long answer has more weight
  than a short one. With `sequence_mean` in place of `token_mean` below, all answers have the same.
- The loss covers every message of the assistant, with its end token, and nothing else.
- The length of a run is given in steps (in the paper: 16 epochs). The learning rate decays
  linearly (cosine). There is no dropout (0.2).
- The exported model is that of the last step. The paper selects a checkpoint by reward model.
"""

from dataclasses import dataclass

from rlkit import runs
from rlkit.data import collate, load_chats, step_rows
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.engines.flops import batch_flops
from rlkit.losses import token_mean, token_sum
from rlkit.vlm import encode_chat, encode_prompt


@dataclass
class Config(runs.GenerationOptions, runs.TrainingOptions):
    steps: int = 200
    """Optimizer steps."""
    prompts_per_step: int = 32
    """Rows per step, over all ranks."""
    max_tokens: int = 0
    """Most tokens in a chat, image tokens included; longer ones are skipped. 0: the model's
    context."""


def loss_fn(out, mb):
    """Mean negative log-likelihood of the answer tokens, over the batch of all ranks."""
    return token_mean(-out.logprobs, mb.mask, mb.total_tokens), {}


def main(cfg: Config) -> None:
    with runs.one_sentence_errors("sft"):
        task = runs.load_named_task(cfg, cfg.task, load_chats)
        cfg = runs.with_epochs(cfg, task)
        run = runs.start_run("sft", cfg, task.name)
        path, processor = runs.find_model(cfg, run, task.train)
        engine = runs.build_engine(cfg, path, processor, updates=cfg.steps)
        rollout = runs.build_rollout(cfg, path, processor, engine)
        start = runs.resume(cfg, run, checkpoints=engine)["step"]
    ends = runs.answer_ends(cfg, path, processor)
    max_tokens = cfg.max_tokens or engine.config.get_text_config().max_position_embeddings

    def encode_row(group_id, row):
        """A prompt for evaluation, and the whole chat with its answers in the mask."""
        prompt = encode_prompt(processor, row, group_id=group_id)
        return prompt, encode_chat(prompt, processor, ends, max_tokens)

    rows, skipped = runs.encode_share(enumerate(task.heldout), encode_row, run, engine)
    heldout = collate([sample for _, sample in rows])
    prompts = runs.Prompts([prompt for prompt, _ in rows if prompt.token_ids], skipped)
    sampler = runs.PolicySampler(cfg, run, task.reward, engine, rollout)

    def evaluate(when: str):
        """Loss of the held-out answers, and accuracy of greedy ones."""
        answers = sampler.answer_heldout(prompts)
        run.phase("evaluate")
        loss = token_sum(-engine.infer_batch(heldout)["logprobs"], heldout.mask)
        sums = runs.totals(engine, loss=loss, tokens=heldout.mask.sum())
        found = {"heldout_loss": sums["loss"] / max(sums["tokens"], 1)}
        found = runs.accuracy(answers, engine.global_sum) | found
        counts = {"rows": len(heldout.tokens), "skipped": len(prompts.skipped)}
        runs.record_evaluation(run, engine, when, found, **counts)
        return answers.judged

    if start == 0:
        evaluate("before")
    for step in run.steps(start, cfg.steps):
        run.phase("encode")
        rows, skipped = runs.encode_share(
            step_rows(task.train, step, cfg.prompts_per_step, cfg.seed), encode_row, run, engine
        )
        batch = collate([sample for _, sample in rows])
        batch = rebalance_across_ranks(batch, engine.data_parallel_group)
        flops = runs.training_passes(cfg) * batch_flops(engine.config, batch)
        counts = runs.totals(
            engine, tokens=batch.mask.sum(), flops=flops, skipped_rows=len(skipped)
        )
        if not counts["tokens"]:
            run.stop("none of its rows can be trained on; see the log")

        run.phase("train")
        metrics = engine.train_batch(batch, loss_fn)
        run.log(step, metrics | counts, show={"loss": "loss"})
        runs.save(cfg, run, step, checkpoints=engine)

    runs.finish(cfg, run, evaluate("after"), model=engine)


if __name__ == "__main__":
    runs.run_recipe(main)
