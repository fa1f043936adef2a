"""PF-PPO on text or images: PPO on responses drawn by their rewards, mostly the best of each
prompt.

    torchrun --nproc-per-node=1 recipes/pf_ppo.py  # a tiny Qwen2.5-VL learns to read digits
    torchrun --nproc-per-node=8 recipes/pf_ppo.py --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --task train.jsonl --reward boxed --rollout vllm --prompts_per_step 512 --mini_batches 4 \\
        --max_new_tokens 1024 --lr 1e-6 --critic_lr 1e-5 --kl_coef 0.001

A reward model is most reliable at its extremes. So a batch is drawn from the responses, with
replacement. The best response to a prompt has probability `pf_ppo_best`, the worst `pf_ppo_worst`,
and the others share the rest. The paper has best-random (0.5 and 0, as here), best-worst (0.5 and
0.5) and best-of-N (1 and 0). The loop is that of ppo.py.

How it differs from the paper (https://arxiv.org/abs/2409.06957):
- Responses that tie for the best or the worst share that probability.
- Each rank draws as many responses as it has, from all of its responses together, as verl does. So
  a prompt may get more draws than another, or none.
- The critic is a separate model, which starts from the policy's weights with a value head of zeros.
- The loss is the mean over all tokens of a mini-batch. Advantages are whitened over all tokens of
  the drawn batch. There is no entropy bonus. The KL to the initial model is subtracted from the
  reward of each token; its weight `kl_coef` is 0 by default.
- A response is left out if its reward function fails or returns None.
- Image placeholder tokens are masked out of the vocabulary, in sampling and in training.
"""

from dataclasses import dataclass
from functools import partial

import torch

from rlkit import runs
from rlkit.advantages import (
    gae,
    kl_in_reward,
    masked_whiten,
    pf_ppo_indices,
    pf_ppo_weights,
    rewards_to_tokens,
)
from rlkit.data import collate, group_ids, rows_of_steps
from rlkit.engines.distributed import reduce_metrics
from rlkit.losses import (
    clipped_policy_loss,
    clipped_value_loss,
    explained_variance,
    importance_weights,
    kl_k1,
    kl_k3,
    mismatch_stats,
    ratio_stats,
    token_mean,
    value_stats,
)
from rlkit.rollout import Sampling


@dataclass
class Config(runs.PolicyOptions, runs.TrainingOptions):
    # shared options, with the numbers for the tiny model; help texts: rlkit/runs/options.py
    steps: runs.PositiveInt = 110
    prompts_per_step: runs.PositiveInt = 64
    group_size: runs.PositiveInt = 16
    max_new_tokens: runs.NonNegativeInt = 4
    temperature: runs.PositiveFloat = 1.0
    tis_cap: runs.PositiveFloat = 2.0
    lr: runs.NonNegativeFloat = 5e-4  # tiny model only; others default to 1e-6, or 1e-5 with LoRA
    mini_batches: runs.PositiveInt = 2
    """Mini-batches per batch, split by prompt. Each is one step of the policy and of the critic."""
    ppo_epochs: runs.PositiveInt = 1
    """Passes over each batch."""
    critic_model: str = ""
    """Model that the critic starts from: a language model, or an exported value model. Default:
    --model."""
    critic_lr: runs.NonNegativeFloat = 7e-4
    """Peak learning rate of the critic. Default for models other than tiny: 1e-5."""
    critic_warmup: runs.NonNegativeInt = 0
    """Steps at the start that train only the critic."""
    clip_low: runs.NonNegativeFloat = 0.2
    """Lower bound of the ratio is 1 - clip_low."""
    clip_high: runs.NonNegativeFloat = 0.2
    """Upper bound of the ratio is 1 + clip_high."""
    cliprange_value: runs.NonNegativeFloat = 0.5
    """Clip range of the value loss: how far a value may move from its estimate before the step."""
    gamma: runs.UnitInterval = 1.0
    """Discount factor per token."""
    lam: runs.UnitInterval = 0.95
    """Lambda of GAE."""
    pf_ppo_best: runs.UnitInterval = 0.5
    """Probability of the best response among the draws from its group."""
    pf_ppo_worst: runs.UnitInterval = 0.0
    """Probability of the worst response among the draws from its group."""
    kl_coef: runs.NonNegativeFloat = 0.0
    """Weight of the KL to the initial model in the reward. 0: there is no reference model."""


def policy_loss(out, mb, cfg: Config):
    """Loss of a micro-batch and its metrics. out.logprobs is [B, T]; mb.total_tokens counts the
    tokens of all ranks."""
    old, mask = mb.old_logprobs, mb.mask
    clip = {"clip_low": cfg.clip_low, "clip_high": cfg.clip_high}
    loss = clipped_policy_loss(out.logprobs, old, mb.advantages, mask, **clip)
    loss = loss * importance_weights(old, mb.rollout_logprobs, mask, high=cfg.tis_cap)
    metrics = {
        "entropy": token_mean(out.entropy, mask, mb.total_tokens),
        **ratio_stats(out.logprobs, old, mb.advantages, mask, **clip, total=mb.total_tokens),
    }
    return token_mean(loss, mask, mb.total_tokens), metrics


def value_loss(out, mb, cfg: Config):
    """Loss of a micro-batch and its metrics. out.values is [B, T]."""
    values = out.values, mb.values, mb.returns, mb.mask, cfg.cliprange_value
    loss = token_mean(clipped_value_loss(*values), mb.mask, mb.total_tokens)
    return loss, value_stats(*values, total=mb.total_tokens)


def draw_by_reward(samples, cfg: Config, step: int, engine):
    """As many samples, drawn with replacement by reward; a group in proportion to its responses."""
    rewards, groups = torch.tensor([sample.reward for sample in samples]), group_ids(samples)
    weights = pf_ppo_weights(rewards, groups, cfg.pf_ppo_best, cfg.pf_ppo_worst)
    _, group, sizes = groups.unique(return_inverse=True, return_counts=True)
    weights = weights * sizes[group]  # those of a group added up to 1
    generator = runs.generator(cfg.seed, step, engine.data_parallel_rank)
    drawn = pf_ppo_indices(weights, len(samples), generator)
    return [samples[i] for i in drawn.tolist()]


def token_rewards(batch, cfg: Config):
    """[B, T]: a response's reward at its last token, minus the KL to the reference at each
    token."""
    if not cfg.kl_coef:
        return rewards_to_tokens(batch.rewards, batch.mask)
    kl = kl_k1(batch.old_logprobs, batch.ref_logprobs, batch.mask)
    return kl_in_reward(batch.rewards, kl, batch.mask, cfg.kl_coef)


def batch_metrics(batch, engine):
    """What is measured before the updates, over all ranks."""
    old, mask = batch.old_logprobs, batch.mask
    tokens = engine.global_sum(mask.sum()).item()
    measured = mismatch_stats(old, batch.rollout_logprobs, mask, tokens)
    if "ref_logprobs" in batch.fields:
        measured["kl"] = token_mean(kl_k3(old, batch.ref_logprobs, mask), mask, tokens)
    metrics = reduce_metrics(measured, engine.data_parallel_group)
    explained = explained_variance(batch.values, batch.returns, mask, engine.global_sum)
    return metrics | {"value/explained_variance": explained.item()}


def update_critic(batch, cfg: Config, step: int, engine, critic):
    """All optimizer steps of the critic on a batch; mean metrics."""
    loss_fn = partial(value_loss, cfg=cfg)
    with runs.keep_on_device(critic):
        parts = runs.mini_batches(batch, cfg, step, engine)
        means = runs.mean_metrics([critic.train_batch(part, loss_fn) for part in parts])
    return {x if x.startswith("value/") else f"critic/{x}": mean for x, mean in means.items()}


def update_policy(batch, cfg: Config, step: int, engine):
    """All optimizer steps of the policy on a batch; mean metrics."""
    loss_fn, outputs = partial(policy_loss, cfg=cfg), ("logprobs", "entropy")
    with runs.keep_on_device(engine):
        parts = runs.mini_batches(batch, cfg, step, engine)
        return runs.mean_metrics([engine.train_batch(part, loss_fn, outputs) for part in parts])


def build_critic(cfg: Config, path: str, processor, optimizer_steps: int):
    model, lr = cfg.critic_model or path, cfg.critic_lr
    if cfg.critic_model:
        runs.check_same_tokens(cfg, "critic_model", model, processor)
    return runs.build_value_engine(cfg, model, processor, optimizer_steps=optimizer_steps, lr=lr)


def main(cfg: Config) -> None:
    runs.check_range("mini_batches", cfg.mini_batches, 1, cfg.prompts_per_step)
    runs.check_range("pf_ppo_best + pf_ppo_worst", cfg.pf_ppo_best + cfg.pf_ppo_worst, 0, 1)
    runs.check_range("group_size", cfg.group_size, 2)  # responses are compared with each other
    task = runs.load_named_task(cfg, cfg.task)
    cfg = runs.with_epochs(cfg, task)
    runs.check_range("critic_warmup", cfg.critic_warmup, 0, cfg.steps - 1, "less than --steps")
    run = runs.start_run(cfg, task.name, task.train, task.heldout)
    path, processor = runs.find_model(cfg, run, task.train)
    updates_per_batch = cfg.ppo_epochs * cfg.mini_batches  # optimizer steps
    policy_steps = (cfg.steps - cfg.critic_warmup) * updates_per_batch
    engine = runs.build_engine(cfg, path, processor, optimizer_steps=policy_steps)
    critic = build_critic(cfg, path, processor, cfg.steps * updates_per_batch)
    reference = runs.build_reference(cfg, path, processor, engine) if cfg.kl_coef else None
    rollout = runs.build_rollout(cfg, path, processor, engine, beside=[critic])
    start = runs.resume(cfg, run, checkpoints=engine, critic_checkpoints=critic)["step"]

    sampler = runs.PolicySampler(cfg, run, task, processor, engine, rollout, compares="batch")
    heldout = sampler.encode(enumerate(task.heldout))
    evaluate = partial(runs.evaluate_heldout, sampler, heldout)
    runs.evaluate_at_start(cfg, run, start, evaluate, engine)

    rows = rows_of_steps(task.train, range(start, cfg.steps), cfg.prompts_per_step, cfg.seed)
    prompts_of_steps = runs.prefetch(map(sampler.encode, rows), run)
    for step in run.steps(start, cfg.steps):
        prompts = next(prompts_of_steps)
        sampling = Sampling(cfg.max_new_tokens, cfg.temperature, seed=(cfg.seed, step))
        responses = sampler.sync_and_sample(prompts, sampling, n=cfg.group_size)
        sampler.stop_if_rewards_failed(responses)

        run.phase("train")
        batch = collate(draw_by_reward(responses.scored, cfg, step, engine))
        mask = batch.mask
        with runs.keep_on_device(engine):  # with LoRA it is also the reference
            if reference:
                batch.add(ref_logprobs=reference(batch))
            batch.add(old_logprobs=engine.infer_batch(batch)["logprobs"])  # [B, T]
        values = critic.infer_batch(batch)["values"]  # [B, T], of the prefix before each token
        rewards = token_rewards(batch, cfg)  # [B, T]
        advantages, returns = gae(rewards, values, mask, cfg.gamma, cfg.lam)
        advantages = masked_whiten(advantages, mask, global_sum=engine.global_sum)
        batch.add(values=values, returns=returns, advantages=advantages)
        metrics = batch_metrics(batch, engine)
        sampler.stop_if_out_of_sync(metrics["mismatch/abs_dlogp"])
        metrics |= update_critic(batch, cfg, step, engine, critic)
        if step >= cfg.critic_warmup:
            metrics |= update_policy(batch, cfg, step, engine)

        metrics |= sampler.metrics(responses) | runs.totals(engine, tokens=mask.sum())
        sampler.report(responses, metrics)
        run.log(step, metrics, show={"reward": "reward/mean", "value": "value/mean"})
        runs.save(cfg, run, step, checkpoints=engine, critic_checkpoints=critic)
        runs.evaluate_when_due(cfg, run, evaluate, engine)
        if runs.out_of_patience(cfg, run):
            break

    runs.finish(cfg, run, evaluate("after"), model=engine, critic=critic)


if __name__ == "__main__":
    runs.run_recipe(main)
