"""CISPO on images or text: GRPO with clipped importance weights in place of PPO's clip.

    torchrun --nproc-per-node=1 recipes/cispo.py  # a tiny Qwen2.5-VL learns to read digits
    torchrun --nproc-per-node=8 recipes/cispo.py --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --task train.jsonl --reward boxed --rollout vllm --lora_rank 32 --max_new_tokens 1024

In PPO and GRPO, a token whose ratio leaves the clip range loses its gradient. In CISPO the ratio is
the weight of the token's gradient. Clipping bounds this weight, and every token keeps its gradient.
There is no KL term.

How it differs from the paper (MiniMax-M1, https://arxiv.org/abs/2506.13585, section 3.1):
- The paper does not state its upper bound. Here weights are at most 5 (clip_high 4), as in TRL. As
  in the paper, there is no lower bound (clip_low 1).
- There are 4 optimizer steps per batch; the paper has 16.
- Dynamic sampling and the length penalty are left out; dapo.py has both.
- Importance weights correct for the mismatch of sampler and trainer (`tis_cap`).
- A response is left out of its group if its reward function fails or returns None. It does not
  count as wrong.
- Image placeholder tokens are masked out of the vocabulary, in sampling and in training.
"""

from dataclasses import dataclass
from functools import partial

from rlkit import runs
from rlkit.advantages import grpo_advantages
from rlkit.data import collate, rows_of_steps
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.losses import (
    cispo_loss,
    importance_weights,
    mismatch_stats,
    ratio_stats,
    token_mean,
)
from rlkit.rollout import Sampling


@dataclass
class Config(runs.PolicyOptions, runs.TrainingOptions):
    # shared options, with the numbers for the tiny model; help texts: rlkit/runs/options.py
    steps: runs.PositiveInt = 100
    prompts_per_step: runs.PositiveInt = 64
    group_size: runs.PositiveInt = 16
    max_new_tokens: runs.NonNegativeInt = 4
    temperature: runs.PositiveFloat = 1.0
    tis_cap: runs.PositiveFloat = 2.0
    lr: runs.NonNegativeFloat = 5e-4  # tiny model only; others default to 1e-6, or 1e-5 with LoRA
    ppo_epochs: runs.PositiveInt = 1
    """Passes over each batch."""
    mini_batches: runs.PositiveInt = 4
    """Mini-batches per batch, split by prompt. Each is one optimizer step."""
    clip_low: runs.NonNegativeFloat = 1.0
    """Lower bound of a token's importance weight is 1 - clip_low."""
    clip_high: runs.NonNegativeFloat = 4.0
    """Upper bound of a token's importance weight is 1 + clip_high."""


def policy_loss(out, mb, cfg: Config):
    """Loss of a micro-batch and its metrics. out.logprobs is [B, T]; mb.total_tokens counts the
    tokens of the whole batch, over all ranks."""
    # with one optimizer step per batch, main adds no old_logprobs: the ratio is 1
    old = mb.fields.get("old_logprobs", out.logprobs.detach())
    clip = {"clip_low": cfg.clip_low, "clip_high": cfg.clip_high}
    loss = cispo_loss(out.logprobs, old, mb.advantages, mb.mask, **clip)
    loss = loss * importance_weights(old, mb.rollout_logprobs, mb.mask, high=cfg.tis_cap)
    metrics = {
        "entropy": token_mean(out.entropy, mb.mask, mb.total_tokens),
        **ratio_stats(out.logprobs, old, None, mb.mask, **clip, total=mb.total_tokens),
        **mismatch_stats(old, mb.rollout_logprobs, mb.mask, mb.total_tokens),
    }
    return token_mean(loss, mb.mask, mb.total_tokens), metrics


def main(cfg: Config) -> None:
    runs.check_range("group_size", cfg.group_size, 2)  # responses are compared with each other
    runs.check_range("mini_batches", cfg.mini_batches, 1, cfg.prompts_per_step)
    task = runs.load_named_task(cfg, cfg.task)
    cfg = runs.with_epochs(cfg, task)
    run = runs.start_run(cfg, task.name, task.train, task.heldout)
    path, processor = runs.find_model(cfg, run, task.train)
    updates_per_batch = cfg.ppo_epochs * cfg.mini_batches  # optimizer steps
    engine = runs.build_engine(cfg, path, processor, optimizer_steps=cfg.steps * updates_per_batch)
    rollout = runs.build_rollout(cfg, path, processor, engine)
    start = runs.resume(cfg, run, checkpoints=engine)["step"]

    sampler = runs.PolicySampler(cfg, run, task, processor, engine, rollout)
    heldout = sampler.encode(enumerate(task.heldout))
    evaluate = partial(runs.evaluate_heldout, sampler, heldout)
    runs.evaluate_at_start(cfg, run, start, evaluate, engine)

    rows = rows_of_steps(task.train, range(start, cfg.steps), cfg.prompts_per_step, cfg.seed)
    prompts_of_steps = runs.prefetch(map(sampler.encode, rows), run)
    loss_fn = partial(policy_loss, cfg=cfg)
    for step in run.steps(start, cfg.steps):
        prompts = next(prompts_of_steps)
        sampling = Sampling(cfg.max_new_tokens, cfg.temperature, seed=(cfg.seed, step))
        responses = sampler.sync_and_sample(prompts, sampling, n=cfg.group_size)
        sampler.stop_if_rewards_failed(responses)

        run.phase("train")
        batch = collate(responses.scored)
        batch.add(advantages=grpo_advantages(batch.rewards, batch.group_ids))  # [B]
        # for the inference below; mini-batches are rebalanced again
        batch = rebalance_across_ranks(batch, engine.data_parallel_group)
        with runs.keep_on_device(engine):
            if updates_per_batch > 1:
                batch.add(old_logprobs=engine.infer_batch(batch)["logprobs"])
            updates = [
                engine.train_batch(mini_batch, loss_fn, outputs=("logprobs", "entropy"))
                for mini_batch in runs.mini_batches(batch, cfg, step, engine)
            ]
        metrics = runs.mean_metrics(updates)
        sampler.stop_if_out_of_sync(metrics["mismatch/abs_dlogp"])

        metrics |= sampler.metrics(responses) | runs.totals(engine, tokens=batch.mask.sum())
        sampler.report(responses, metrics)
        run.log(step, metrics, show={"reward": "reward/mean", "entropy": "entropy"})
        runs.save(cfg, run, step, checkpoints=engine)
        runs.evaluate_when_due(cfg, run, evaluate, engine)
        if runs.out_of_patience(cfg, run):
            break

    runs.finish(cfg, run, evaluate("after"), model=engine)


if __name__ == "__main__":
    runs.run_recipe(main)
