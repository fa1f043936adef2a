"""REINFORCE on text or images, with a baseline of your choice: RLOO, ReMax, REINFORCE++ or OPO.

    torchrun --nproc-per-node=1 recipes/reinforce.py  # a tiny Qwen2.5-VL learns to read digits
    torchrun --nproc-per-node=8 recipes/reinforce.py --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --task train.jsonl --reward boxed --rollout vllm --advantage opo --prompts_per_step 256 \\
        --group_size 16 --max_new_tokens 1024 --lr 1e-6

`--advantage` is one of rloo (https://arxiv.org/abs/2402.14740), remax (arXiv 2310.10505, with
--group_size 1), reinforce_plus_plus and reinforce_plus_plus_baseline (arXiv 2501.03262), and opo
(arXiv 2505.23585).

How it differs from the papers:
- The loss is the mean over all tokens of the batch. The papers of RLOO, ReMax and OPO sum over the
  tokens of a response and average over responses. For that, let `policy_loss` end with
  `return sequence_sum_mean(loss, mb.mask, mb.total_sequences), metrics`.
- Each batch is used for one step, so the ratio is 1 and the clip of REINFORCE++ has no effect.
- `kl_coef` subtracts the KL to the initial model from the reward: per token for REINFORCE++,
  summed over the response for the others (OPO's paper has none). The greedy response that is
  ReMax's baseline has no KL subtracted.
- A response is left out of its group if its reward function fails or returns None. It does not
  count as wrong.
- Image placeholder tokens are masked out of the vocabulary, in sampling and in training.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from rlkit import runs
from rlkit.advantages import (
    kl_in_reward,
    opo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rewards_to_tokens,
    rloo_advantages,
)
from rlkit.data import collate, rows_of_steps
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.losses import (
    importance_weights,
    kl_k1,
    kl_k3,
    mismatch_stats,
    reinforce_loss,
    token_mean,
)
from rlkit.rollout import Sampling


@dataclass
class Config(runs.PolicyOptions, runs.TrainingOptions):
    # shared options, with the numbers for the tiny model; help texts: rlkit/runs/options.py
    steps: runs.PositiveInt = 220
    prompts_per_step: runs.PositiveInt = 64
    group_size: runs.PositiveInt = 16
    max_new_tokens: runs.NonNegativeInt = 4
    temperature: runs.PositiveFloat = 1.0
    tis_cap: runs.PositiveFloat = 2.0
    lr: runs.NonNegativeFloat = 5e-4  # tiny model only; others default to 1e-6, or 1e-5 with LoRA
    advantage: Literal[
        "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo"
    ] = "rloo"
    """Advantage estimator, which sets the baseline."""
    kl_coef: runs.NonNegativeFloat = 0.0
    """Weight of the KL to the initial model in the reward. 0: there is no reference model."""


def compute_advantages(rewards, batch, cfg: Config, global_sum):
    """[B] or [B, T], from rewards [B, T] of each token."""
    if cfg.advantage == "reinforce_plus_plus":
        return reinforce_plus_plus_advantages(rewards, batch.mask, global_sum=global_sum)
    response_rewards, groups = rewards.sum(1), batch.group_ids  # [B], KL included
    if cfg.advantage == "rloo":
        return rloo_advantages(response_rewards, groups)
    if cfg.advantage == "remax":
        return remax_advantages(response_rewards, batch.greedy_rewards)
    if cfg.advantage == "reinforce_plus_plus_baseline":
        return reinforce_plus_plus_baseline_advantages(
            response_rewards, groups, global_sum=global_sum
        )
    return opo_advantages(response_rewards, groups, batch.mask.sum(1))


def policy_loss(out, mb, cfg: Config):
    """Loss of a micro-batch and its metrics; out.logprobs [B, T], mb.total_tokens counts the
    tokens of all ranks."""
    old = out.logprobs.detach()
    loss = reinforce_loss(out.logprobs, old, mb.advantages, mb.mask)
    loss = loss * importance_weights(old, mb.rollout_logprobs, mb.mask, high=cfg.tis_cap)
    metrics = {
        "entropy": token_mean(out.entropy, mb.mask, mb.total_tokens),
        **mismatch_stats(old, mb.rollout_logprobs, mb.mask, mb.total_tokens),
    }
    if cfg.kl_coef:
        kl = kl_k3(old, mb.ref_logprobs, mb.mask)
        metrics["kl"] = token_mean(kl, mb.mask, mb.total_tokens)
    return token_mean(loss, mb.mask, mb.total_tokens), metrics


def greedy_rewards(sampler, prompts, group_ids):
    """[B]: the reward of the greedy response to the prompt of each row, with the current
    weights."""
    greedy = sampler.greedy(prompts)
    rewards = {
        response.group_id: x
        for response, x in zip(greedy.generated, greedy.rewards.tolist(), strict=True)
    }
    return torch.tensor([rewards[group] for group in group_ids.tolist()], dtype=torch.float32)


def main(cfg: Config) -> None:
    uses_groups = cfg.advantage not in ("remax", "reinforce_plus_plus")
    if uses_groups:
        runs.check_range("group_size", cfg.group_size, 2)  # responses are compared with each other
    task = runs.load_named_task(cfg, cfg.task)
    cfg = runs.with_epochs(cfg, task)
    run = runs.start_run(cfg, task.name, task.train, task.heldout)
    path, processor = runs.find_model(cfg, run, task.train)
    engine = runs.build_engine(cfg, path, processor, optimizer_steps=cfg.steps)
    reference = runs.build_reference(cfg, path, processor, engine) if cfg.kl_coef else None
    rollout = runs.build_rollout(cfg, path, processor, engine)
    start = runs.resume(cfg, run, checkpoints=engine)["step"]

    compares = "group" if uses_groups else "batch"
    sampler = runs.PolicySampler(cfg, run, task, processor, engine, rollout, compares=compares)
    heldout = sampler.encode(enumerate(task.heldout))
    evaluate = partial(runs.evaluate_heldout, sampler, heldout)
    runs.evaluate_at_start(cfg, run, start, evaluate, engine)

    loss_fn = partial(policy_loss, cfg=cfg)
    rows = rows_of_steps(task.train, range(start, cfg.steps), cfg.prompts_per_step, cfg.seed)
    prompts_of_steps = runs.prefetch(map(sampler.encode, rows), run)
    for step in run.steps(start, cfg.steps):
        prompts = next(prompts_of_steps)
        sampling = Sampling(cfg.max_new_tokens, cfg.temperature, seed=(cfg.seed, step))
        responses = sampler.sync_and_sample(prompts, sampling, n=cfg.group_size)
        sampler.stop_if_rewards_failed(responses)
        batch = collate(responses.scored)
        if cfg.advantage == "remax":
            batch.add(greedy_rewards=greedy_rewards(sampler, prompts, batch.group_ids))

        run.phase("train")
        batch = rebalance_across_ranks(batch, engine.data_parallel_group)
        rewards = rewards_to_tokens(batch.rewards, batch.mask)  # [B, T]
        with runs.keep_on_device(engine):
            if reference:
                batch.add(ref_logprobs=reference(batch))
                logprobs = engine.infer_batch(batch)["logprobs"]
                kl = kl_k1(logprobs, batch.ref_logprobs, batch.mask)
                rewards = kl_in_reward(rewards, kl, batch.mask, cfg.kl_coef)
            batch.add(advantages=compute_advantages(rewards, batch, cfg, engine.global_sum))
            metrics = engine.train_batch(batch, loss_fn, outputs=("logprobs", "entropy"))
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
