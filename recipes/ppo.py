"""PPO with a critic, on text or images: estimate a value per token, take clipped steps.

    torchrun --nproc-per-node=1 recipes/ppo.py  # a tiny Qwen2.5-VL learns to read digits
    torchrun --nproc-per-node=8 recipes/ppo.py --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --task train.jsonl --reward boxed --rollout vllm --prompts_per_step 512 --mini_batches 4 \\
        --max_new_tokens 1024 --lr 1e-6 --critic_lr 1e-5 --kl_coef 0.001

How it differs from the paper (https://arxiv.org/abs/1707.06347) and from InstructGPT (arXiv
2203.02155):
- The critic is a separate model. It starts from the policy's weights with a value head of zeros;
  InstructGPT starts it from the reward model.
- The loss is the mean over all tokens of a mini-batch. Advantages are whitened over all tokens of
  the batch. There is no entropy bonus. The KL to the initial model is subtracted from the reward
  of each token; its weight `kl_coef` is 0 by default.
- An answer is left out if its reward function fails or returns None.
- Image placeholder tokens are masked out of the vocabulary, in sampling and in training.

VAPO (https://arxiv.org/abs/2504.05118) is `--critic_lam 1 --length_adaptive_alpha 0.05
--critic_warmup 50 --clip_high 0.28 --lm_coef 0.1`; during the first 50 steps only its critic is
trained, and `lm_coef` is the weight of a term that imitates right answers. PF-PPO
(arXiv 2409.06957) is `--pf_ppo_best 0.5`; it weights answers, where the paper resamples them.
"""

from dataclasses import dataclass
from functools import partial
from math import inf

import torch

from rlkit import runs
from rlkit.advantages import (
    gae,
    kl_in_reward,
    length_adaptive_lambda,
    masked_whiten,
    pf_ppo_weights,
    rewards_to_tokens,
)
from rlkit.advantages.shaping import RunningMoments, scaled_rewards
from rlkit.data import collate, rows_of_steps
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
    token_sum,
)
from rlkit.rollout import Sampling


@dataclass
class Config(runs.PolicyOptions, runs.TrainingOptions):
    steps: int = 110
    prompts_per_step: int = 64
    mini_batches: int = 2
    """Mini-batches per batch, split by prompt. Each is one step of the policy and of the critic."""
    ppo_epochs: int = 1
    """Passes over each batch."""
    critic_model: str = ""
    """Model that the critic starts from: a language model, or an exported value model. Default:
    --model."""
    critic_lr: float = 7e-4
    """Peak learning rate of the critic. Default for models other than tiny: 1e-5."""
    critic_warmup: int = 0
    """Steps at the start that train only the critic."""
    clip_low: float = 0.2
    """Lower bound of the ratio is 1 - clip_low."""
    clip_high: float = 0.2
    """Upper bound of the ratio is 1 + clip_high."""
    cliprange_value: float = 0.5
    """Clip range of the value loss: how far a value may move from its estimate before the step."""
    gamma: float = 1.0
    """Discount factor per token."""
    lam: float = 0.95
    """Lambda of GAE for the policy's advantages."""
    length_adaptive_alpha: float = 0.0
    """If not 0, the policy's lambda is 1 - 1 / (alpha l) for an answer of l tokens. VAPO: 0.05."""
    critic_lam: float = 0.95
    """Lambda of GAE for the critic's targets. VAPO: 1."""
    lm_coef: float = 0.0
    """Weight of the negative log-likelihood of answers with a reward above 0.5. VAPO: 0.1."""
    normalise_rewards: bool = False
    """Normalise rewards by the running mean and standard deviation (PPO-max, arXiv 2307.04964)."""
    reward_clip: float = 0.0
    """If not 0, clip rewards to [-reward_clip, reward_clip], after normalise_rewards."""
    pf_ppo_best: float = 0.0
    """Share of a group's weight that goes to its best answer. 0, with pf_ppo_worst 0: equal
    weights."""
    pf_ppo_worst: float = 0.0
    """Share of a group's weight that goes to its worst answer."""
    kl_coef: float = 0.0
    """Weight of the KL to the initial model in the reward. 0: there is no reference model."""


def policy_loss(out, mb, cfg: Config):
    """Loss of a micro-batch and its metrics. out.logprobs is [B, T]; mb.total_tokens counts the
    tokens of all ranks."""
    old, mask = mb.old_logprobs, mb.mask
    clip = {"clip_low": cfg.clip_low, "clip_high": cfg.clip_high}
    loss = clipped_policy_loss(out.logprobs, old, mb.advantages, mask, **clip)
    loss = loss * mb.weights[:, None]
    loss = loss * importance_weights(old, mb.rollout_logprobs, mask, high=cfg.tis_cap)
    loss = token_mean(loss, mask, mb.total_tokens)
    imitation = token_sum(-out.logprobs * mb.lm_weights[:, None], mask)
    return loss + cfg.lm_coef * imitation, {
        "entropy": token_mean(out.entropy, mask, mb.total_tokens),
        **ratio_stats(out.logprobs, old, mb.advantages, mask, **clip, total=mb.total_tokens),
    }


def value_loss(out, mb, cfg: Config):  # out.values [B, T]
    loss = clipped_value_loss(out.values, mb.values, mb.returns, mb.mask, cfg.cliprange_value)
    return token_mean(loss * mb.weights[:, None], mb.mask, mb.total_tokens), {}


def token_rewards(batch, moments: RunningMoments, cfg: Config):
    """[B, T]: an answer's reward at its last token, minus the KL to the reference at each token."""
    scaled = scaled_rewards(batch.rewards, moments.mean, moments.std, cfg.reward_clip or inf)
    if not cfg.kl_coef:
        return rewards_to_tokens(scaled, batch.mask)
    kl = kl_k1(batch.old_logprobs, batch.ref_logprobs, batch.mask)
    return kl_in_reward(scaled, kl, batch.mask, cfg.kl_coef)


def policy_lambda(mask, cfg: Config):
    """Lambda of the policy's advantages: a number, or one per answer."""
    alpha = cfg.length_adaptive_alpha
    return length_adaptive_lambda(mask, alpha) if alpha else cfg.lam


def answer_weights(rewards, group_ids, cfg: Config):
    """[B]: 1 for each answer, or with PF-PPO a weight by its reward, with a mean of 1 per group."""
    if not (cfg.pf_ppo_best or cfg.pf_ppo_worst):
        return torch.ones(len(rewards))
    shares = pf_ppo_weights(rewards, group_ids, cfg.pf_ppo_best, cfg.pf_ppo_worst)
    return shares * group_ids.bincount()[group_ids]


def imitation_weights(part, engine):
    """[B]: 1 / tokens of the right answers of all ranks for a right answer, 0 for others."""
    right = (part.rewards > 0.5).float()
    tokens = engine.global_sum((part.mask.sum(1) * right).sum())
    return right / tokens.clamp(min=1)


def batch_metrics(batch, engine):
    """What is measured before the updates, over all ranks."""
    old, values, returns, mask = batch.old_logprobs, batch.values, batch.returns, batch.mask
    tokens = engine.global_sum(mask.sum()).item()
    measured = {
        "value/mean": token_mean(values, mask, tokens),
        "value/squared_error": token_mean((values - returns).square(), mask, tokens),
        **mismatch_stats(old, batch.rollout_logprobs, mask, tokens),
    }
    if "ref_logprobs" in batch.fields:
        measured["kl"] = token_mean(kl_k3(old, batch.ref_logprobs, mask), mask, tokens)
    explained = explained_variance(values, returns, mask, engine.global_sum).item()
    metrics = reduce_metrics(measured, engine.data_parallel_group)
    return metrics | {"value/explained_variance": explained}


def update_critic(batch, cfg: Config, step: int, engine, critic):
    """All optimizer steps of the critic on a batch; mean metrics."""
    loss_fn = partial(value_loss, cfg=cfg)
    with runs.keep_on_device(critic):
        parts = runs.mini_batches(batch, cfg, step, engine)
        means = runs.mean_metrics([critic.train_batch(part, loss_fn) for part in parts])
    kept = ("loss", "grad_norm", "lr", "skipped_steps")
    return {f"critic/{name}": x for name, x in means.items() if name in kept}


def update_policy(batch, cfg: Config, step: int, engine):
    """All optimizer steps of the policy on a batch; mean metrics."""
    loss_fn, updates = partial(policy_loss, cfg=cfg), []
    with runs.keep_on_device(engine):
        for part in runs.mini_batches(batch, cfg, step, engine):
            part.add(lm_weights=imitation_weights(part, engine))
            updates.append(engine.train_batch(part, loss_fn, outputs=("logprobs", "entropy")))
    return runs.mean_metrics(updates)


def step_totals(batch, cfg: Config, engine, critic):
    """Tokens, and FLOPs of both models: one pass for the estimates, and those of the updates."""
    flops = runs.engine_flops(critic, batch, head=False)
    flops *= 1 + runs.training_passes(cfg, cfg.ppo_epochs)
    forwards = 1 + bool(cfg.kl_coef)
    return runs.batch_totals(
        cfg, engine, batch, updates=cfg.ppo_epochs, forwards=forwards, flops=flops
    )


def build_critic(cfg: Config, path: str, processor, optimizer_steps: int):
    model, lr = cfg.critic_model or path, cfg.critic_lr
    if cfg.critic_model:
        runs.check_same_tokens(cfg, "critic_model", model, processor)
    return runs.build_value_engine(cfg, model, processor, optimizer_steps=optimizer_steps, lr=lr)


def main(cfg: Config) -> None:
    with runs.one_sentence_errors("ppo"):
        runs.check_range("mini_batches", cfg.mini_batches, 1, cfg.prompts_per_step)
        task = runs.load_named_task(cfg, cfg.task)
        cfg = runs.with_epochs(cfg, task)
        run = runs.start_run("ppo", cfg, task.name, task.train, task.heldout)
        path, processor = runs.find_model(cfg, run, task.train)
        per_step = cfg.ppo_epochs * cfg.mini_batches  # optimizer steps
        policy_steps = (cfg.steps - cfg.critic_warmup) * per_step
        engine = runs.build_engine(cfg, path, processor, optimizer_steps=policy_steps)
        critic = build_critic(cfg, path, processor, cfg.steps * per_step)
        reference = runs.build_reference(cfg, path, processor, engine) if cfg.kl_coef else None
        rollout = runs.build_rollout(cfg, path, processor, engine, beside=[critic])
        state = runs.resume(cfg, run, checkpoints=engine, critic_checkpoints=critic)
    sampler = runs.PolicySampler(cfg, run, task, processor, engine, rollout)
    evaluate = partial(runs.evaluate_heldout, sampler, sampler.encode(enumerate(task.heldout)))
    runs.evaluate_at_start(cfg, run, state["step"], evaluate, engine)

    moments = RunningMoments(**state.get("moments", {}))  # of all rewards so far
    rows = rows_of_steps(
        task.train, range(state["step"], cfg.steps), cfg.prompts_per_step, cfg.seed
    )
    prompts_of_steps = runs.prefetch(map(sampler.encode, rows))
    for step in run.steps(state["step"], cfg.steps):
        prompts = next(prompts_of_steps)
        sampling = Sampling(cfg.max_new_tokens, cfg.temperature, seed=(cfg.seed, step))
        answers = sampler.sync_and_sample(prompts, sampling, n=cfg.group_size)
        sampler.stop_if_rewards_failed(answers)

        run.phase("train")
        batch = collate(answers.scored)
        mask = batch.mask
        with runs.keep_on_device(engine):  # with LoRA it is also the reference
            if reference:
                batch.add(ref_logprobs=reference(batch))
            batch.add(old_logprobs=engine.infer_batch(batch)["logprobs"])  # [B, T]
        values = critic.infer_batch(batch)["values"]  # [B, T], of the prefix before each token
        if cfg.normalise_rewards:
            moments = moments.update(batch.rewards, engine.global_sum)
        rewards = token_rewards(batch, moments, cfg)  # [B, T]
        returns = gae(rewards, values, mask, cfg.gamma, cfg.critic_lam).returns
        advantages = gae(rewards, values, mask, cfg.gamma, policy_lambda(mask, cfg)).advantages
        advantages = masked_whiten(advantages, mask, global_sum=engine.global_sum)
        batch.add(values=values, returns=returns, advantages=advantages)
        batch.add(weights=answer_weights(batch.rewards, batch.group_ids, cfg))
        metrics = batch_metrics(batch, engine)
        sampler.stop_if_out_of_sync(metrics["mismatch/abs_dlogp"])
        metrics |= update_critic(batch, cfg, step, engine, critic)
        if step >= cfg.critic_warmup:
            metrics |= update_policy(batch, cfg, step, engine)

        metrics |= sampler.metrics(answers) | step_totals(batch, cfg, engine, critic)
        run.log(step, metrics, show={"reward": "reward/mean", "value": "value/mean"})
        state = {"moments": vars(moments)}
        runs.save(cfg, run, step, state, checkpoints=engine, critic_checkpoints=critic)
        if runs.evaluate_every(cfg, run, step, evaluate, engine):
            break

    runs.finish(cfg, run, evaluate("after"), model=engine, critic=critic)


if __name__ == "__main__":
    runs.run_recipe(main)
