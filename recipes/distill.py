"""On-policy distillation: a student answers, and a teacher scores every token of its answers.

    # a tiny Qwen2.5-VL learns digits from another one
    torchrun --nproc-per-node=1 recipes/distill.py
    torchrun --nproc-per-node=8 recipes/distill.py --model Qwen/Qwen2.5-VL-3B-Instruct \\
        --task train.jsonl --teacher Qwen/Qwen2.5-VL-32B-Instruct --max_new_tokens 1024 \\
        --group_size 4 --lr 1e-6

Teacher and student must have the same tokenizer and image processor. Rewards are not trained on:
the logged reward and the held-out accuracy only show progress.

How it differs from the papers:
- GKD (https://arxiv.org/abs/2306.13649, eq. 2 and algorithm 1) compares the distributions over the
  whole vocabulary. Here only the log-probability of the sampled token is used. The reverse KL is
  minimised by policy gradient, and the advantage of a token is the teacher's log-probability minus
  the student's, as in https://thinkingmachines.ai/blog/on-policy-distillation/. In expectation this
  is the gradient of the reverse KL per token (`rlkit.losses.reverse_kl_loss`), with more variance.
- The effect of a token on later tokens is ignored (a discount of 0), as in GKD and in that post.
  MiniLLM (arXiv 2306.08543) includes it.
- All answers are sampled from the student (lambda = 1 in GKD); answers in the data are not used.
- With updates_per_batch > 1 the ratio to the sampling policy is clipped, as in PPO.
"""

from dataclasses import dataclass
from functools import partial

from rlkit import runs
from rlkit.data import collate, rows_of_steps
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.engines.flops import batch_flops
from rlkit.losses import (
    clipped_policy_loss,
    importance_weights,
    mismatch_stats,
    ratio_stats,
    token_mean,
)
from rlkit.rollout import Sampling
from rlkit.vlm import load_processor, model_or_tiny


@dataclass
class Config(runs.PolicyOptions, runs.TrainingOptions):
    teacher: str = "tiny"
    """Directory or hub id of the teacher. "tiny" builds one like the student and fine-tunes it for
    longer."""
    steps: int = 120
    prompts_per_step: int = 64
    group_size: int = 4
    updates_per_batch: int = 1
    """Optimizer steps on each batch. Above 1, the clipped ratio matters."""
    max_failed_rewards: float = 1.0
    clip_low: float = 0.2
    """Lower bound of the ratio is 1 - clip_low."""
    clip_high: float = 0.28
    """Upper bound of the ratio is 1 + clip_high."""


def policy_loss(out, mb, cfg: Config):
    """A token's advantage is how much likelier the teacher finds it than the student that sampled
    it."""
    old = mb.old_logprobs if cfg.updates_per_batch > 1 else out.logprobs.detach()
    advantages = mb.teacher_logprobs - old
    clip = {"clip_low": cfg.clip_low, "clip_high": cfg.clip_high}
    policy = clipped_policy_loss(out.logprobs, old, advantages, mb.mask, **clip)
    policy = policy * importance_weights(old, mb.rollout_logprobs, mb.mask, high=cfg.tis_cap)
    metrics = {
        "kl": token_mean(-advantages, mb.mask, mb.total_tokens),
        "entropy": token_mean(out.entropy, mb.mask, mb.total_tokens),
        **ratio_stats(out.logprobs, old, advantages, mb.mask, **clip, total=mb.total_tokens),
        **mismatch_stats(old, mb.rollout_logprobs, mb.mask, mb.total_tokens),
    }
    return token_mean(policy, mb.mask, mb.total_tokens), metrics


def build_teacher(cfg: Config, run, rows, processor):
    """The engine that scores with the teacher; "tiny" is fine-tuned on right answers."""
    options = {"seed": cfg.seed + 1, "warm_up_steps": 300, "label_noise": 0.0}
    path = model_or_tiny(cfg.teacher, run.out / "teacher", rows, **options)
    theirs = load_processor(path, trust_remote_code=cfg.trust_remote_code)
    vocabularies = [getattr(one, "tokenizer", one).get_vocab() for one in (theirs, processor)]
    if vocabularies[0] != vocabularies[1]:
        raise ValueError(f"teacher {path!r}: expected the student's tokens, got others")
    return runs.build_scorer(cfg, path, processor)


def main(cfg: Config) -> None:
    with runs.one_sentence_errors("distill"):
        task = runs.load_named_task(cfg, cfg.task)
        cfg = runs.with_epochs(cfg, task)
        run = runs.start_run("distill", cfg, task.name)
        path, processor = runs.find_model(cfg, run, task.train)
        teacher = build_teacher(cfg, run, task.train, processor)
        updates = cfg.steps * cfg.updates_per_batch
        engine = runs.build_engine(cfg, path, processor, updates=updates)
        rollout = runs.build_rollout(cfg, path, processor, engine)
        start = runs.resume(cfg, run, checkpoints=engine)["step"]
    sampler = runs.PolicySampler(cfg, run, task, processor, engine, rollout)
    evaluate = partial(sampler.evaluate, sampler.encode(enumerate(task.heldout)))
    if start == 0:
        evaluate("before")

    loss_fn, updates = partial(policy_loss, cfg=cfg), cfg.updates_per_batch
    rows = rows_of_steps(task.train, range(start, cfg.steps), cfg.prompts_per_step, cfg.seed)
    prompts_of_steps = runs.one_ahead(map(sampler.encode, rows))
    for step in run.steps(start, cfg.steps):
        prompts = next(prompts_of_steps)
        sampling = Sampling(cfg.max_new_tokens, cfg.temperature, seed=(cfg.seed, step))
        answers = sampler.answer(prompts, sampling, n=cfg.group_size)

        run.phase("train")
        batch = rebalance_across_ranks(collate(answers.generated), engine.data_parallel_group)
        flops = batch_flops(teacher.config, batch)
        counts = runs.batch_totals(
            cfg, engine, batch, updates=updates, forwards=updates > 1, flops=flops
        )
        if not counts["tokens"]:
            run.stop("none of its rows can be asked about; see the log")
        batch.add(teacher_logprobs=teacher.infer_batch(batch)["logprobs"])
        if updates > 1:
            batch.add(old_logprobs=engine.infer_batch(batch)["logprobs"])
        for _ in range(updates):
            metrics = engine.train_batch(batch, loss_fn, outputs=("logprobs", "entropy"))
        sampler.stop_if_out_of_sync(metrics["mismatch/abs_dlogp"])

        metrics |= sampler.metrics(answers) | counts
        run.log(step, metrics, show={"kl": "kl", "entropy": "entropy", "reward": "reward/mean"})
        runs.save(cfg, run, step, checkpoints=engine)
        if runs.evaluate_every(cfg, run, step, evaluate, engine):
            break

    runs.finish(cfg, run, evaluate("after"), model=engine)


if __name__ == "__main__":
    runs.run_recipe(main)
