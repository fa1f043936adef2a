"""VAPO on text or images: PPO with a critic, made for long chains of thought.

    torchrun --nproc-per-node=1 recipes/vapo.py  # a tiny Qwen2.5-VL learns to read digits
    torchrun --nproc-per-node=8 recipes/vapo.py --model Qwen/Qwen2.5-7B-Instruct \\
        --task train.jsonl --reward maths --rollout vllm --prompts_per_step 512 --group_size 16 \\
        --mini_batches 16 --critic_warmup 50 --length_adaptive_alpha 0.05 --lr 1e-6 \\
        --critic_lr 2e-6 --lr_schedule constant --max_new_tokens 20480

The seven parts of the paper (https://arxiv.org/abs/2504.05118) and where they are: value
pre-training (`critic_warmup`), decoupled GAE (two calls of `gae`, the critic's with lambda 1),
length-adaptive GAE (`length_adaptive_lambda`), the mean over tokens (`token_mean`), clip-higher
(`clip_high`), the language-modelling loss on correct responses (`lm_coef`), and several responses
per prompt (`group_size`).

How it differs from the paper:
- The critic starts from the policy's weights with a value head of zeros; the paper's starts from a
  reward model. `--critic_model` starts it from an exported value model.
- Advantages are whitened over all tokens of the batch.
- A response is correct if its reward is above 0.5. There is no KL term.
- By default the learning rate decays linearly after the warm-up, `length_adaptive_alpha` is 10
  (the paper's is 0.05, for long responses) and `critic_warmup` is 10 steps (50).
- Token losses have importance weights for the mismatch of sampler and trainer (`tis_cap`).
- A response is left out if its reward function fails or returns None.
- Image placeholder tokens are masked out of the vocabulary, in sampling and in training.
"""

from dataclasses import dataclass
from functools import partial

from rlkit import runs
from rlkit.advantages import gae, length_adaptive_lambda, masked_whiten
from rlkit.data import collate, rows_of_steps
from rlkit.engines.distributed import reduce_metrics
from rlkit.losses import (
    clipped_policy_loss,
    clipped_value_loss,
    explained_variance,
    importance_weights,
    mismatch_stats,
    ratio_stats,
    token_mean,
    value_stats,
)
from rlkit.rollout import Sampling


@dataclass
class Config(runs.PolicyOptions, runs.TrainingOptions):
    # shared options, with the numbers for the tiny model; help texts: rlkit/runs/options.py
    steps: runs.PositiveInt = 120
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
    critic_warmup: runs.NonNegativeInt = 10
    """Value pre-training: steps at the start that train only the critic. The paper's: 50."""
    clip_low: runs.NonNegativeFloat = 0.2
    """Lower bound of the ratio is 1 - clip_low."""
    clip_high: runs.NonNegativeFloat = 0.28
    """Upper bound of the ratio is 1 + clip_high."""
    cliprange_value: runs.NonNegativeFloat = 0.5
    """Clip range of the value loss: how far a value may move from its estimate before the step."""
    gamma: runs.UnitInterval = 1.0
    """Discount factor per token."""
    length_adaptive_alpha: runs.PositiveFloat = 10.0
    """Lambda of the policy's advantages is 1 - 1 / (alpha l) for a response of l tokens. Set the
    paper's 0.05 for long responses; up to 20 tokens it gives a lambda of 0."""
    critic_lam: runs.UnitInterval = 1.0
    """Lambda of the critic's targets; 1: the rewards alone."""
    lm_coef: runs.NonNegativeFloat = 0.1
    """Weight of the negative log-likelihood of correct responses (mu in the paper)."""


def right_tokens(batch):
    """bool [B, T]: the tokens of correct responses."""
    return batch.mask & (batch.rewards > 0.5)[:, None]


def policy_loss(out, mb, total_right, cfg: Config):
    """Loss of a micro-batch and its metrics. out.logprobs is [B, T]; mb.total_tokens and
    total_right count the tokens of all ranks."""
    old, mask = mb.old_logprobs, mb.mask
    clip = {"clip_low": cfg.clip_low, "clip_high": cfg.clip_high}
    loss = clipped_policy_loss(out.logprobs, old, mb.advantages, mask, **clip)
    loss = loss * importance_weights(old, mb.rollout_logprobs, mask, high=cfg.tis_cap)
    lm_loss = token_mean(-out.logprobs, right_tokens(mb), total_right)
    loss = token_mean(loss, mask, mb.total_tokens) + cfg.lm_coef * lm_loss
    metrics = {
        "lm_loss": lm_loss.detach(),
        "entropy": token_mean(out.entropy, mask, mb.total_tokens),
        **ratio_stats(out.logprobs, old, mb.advantages, mask, **clip, total=mb.total_tokens),
    }
    return loss, metrics


def value_loss(out, mb, cfg: Config):
    """Loss of a micro-batch and its metrics. out.values is [B, T]."""
    values = out.values, mb.values, mb.returns, mb.mask, cfg.cliprange_value
    loss = token_mean(clipped_value_loss(*values), mb.mask, mb.total_tokens)
    return loss, value_stats(*values, total=mb.total_tokens)


def batch_metrics(batch, engine):
    """What is measured before the updates, over all ranks."""
    tokens = engine.global_sum(batch.mask.sum()).item()
    measured = mismatch_stats(batch.old_logprobs, batch.rollout_logprobs, batch.mask, tokens)
    metrics = reduce_metrics(measured, engine.data_parallel_group)
    explained = explained_variance(batch.values, batch.returns, batch.mask, engine.global_sum)
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
    updates, outputs = [], ("logprobs", "entropy")
    with runs.keep_on_device(engine):
        for part in runs.mini_batches(batch, cfg, step, engine):
            total_right = engine.global_sum(right_tokens(part).sum())
            loss_fn = partial(policy_loss, total_right=total_right, cfg=cfg)
            updates.append(engine.train_batch(part, loss_fn, outputs))
    return runs.mean_metrics(updates)


def build_critic(cfg: Config, path: str, processor, optimizer_steps: int):
    model, lr = cfg.critic_model or path, cfg.critic_lr
    if cfg.critic_model:
        runs.check_same_tokens(cfg, "critic_model", model, processor)
    return runs.build_value_engine(cfg, model, processor, optimizer_steps=optimizer_steps, lr=lr)


def main(cfg: Config) -> None:
    runs.check_range("mini_batches", cfg.mini_batches, 1, cfg.prompts_per_step)
    task = runs.load_named_task(cfg, cfg.task)
    cfg = runs.with_epochs(cfg, task)
    runs.check_range("critic_warmup", cfg.critic_warmup, 0, cfg.steps - 1, "less than --steps")
    run = runs.start_run(cfg, task.name, task.train, task.heldout)
    path, processor = runs.find_model(cfg, run, task.train)
    updates_per_batch = cfg.ppo_epochs * cfg.mini_batches  # optimizer steps
    policy_steps = (cfg.steps - cfg.critic_warmup) * updates_per_batch
    engine = runs.build_engine(cfg, path, processor, optimizer_steps=policy_steps)
    critic = build_critic(cfg, path, processor, cfg.steps * updates_per_batch)
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
        batch = collate(responses.scored)
        rewards, mask = batch.rewards, batch.mask
        batch.add(old_logprobs=engine.infer_batch(batch)["logprobs"])  # [B, T]
        values = critic.infer_batch(batch)["values"]  # [B, T], of the prefix before each token
        returns = gae(rewards, values, mask, cfg.gamma, cfg.critic_lam).returns
        lam = length_adaptive_lambda(mask, cfg.length_adaptive_alpha)  # [B]
        advantages = gae(rewards, values, mask, cfg.gamma, lam).advantages
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
