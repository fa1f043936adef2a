"""On-policy distillation: a student answers, and a teacher scores every token of its responses.

    # a tiny Qwen2.5-VL learns digits from another one
    torchrun --nproc-per-node=1 recipes/distill.py
    torchrun --nproc-per-node=8 recipes/distill.py --model Qwen/Qwen2.5-VL-3B-Instruct \\
        --task train.jsonl --teacher Qwen/Qwen2.5-VL-32B-Instruct --max_new_tokens 1024 \\
        --group_size 4 --lr 1e-6 --loss reverse_kl --teacher_top_k 64 --rollout vllm

Teacher and student must have the same tokenizer and image processor. Rewards are not trained on:
the logged reward and the held-out accuracy only show progress.

How it differs from the papers:
- GKD (https://arxiv.org/abs/2306.13649, eq. 2 and algorithm 1) compares the distributions over the
  whole vocabulary. `--loss forward_kl`, `reverse_kl` and `jsd` do so, or with `--teacher_top_k`
  over the teacher's likeliest tokens and one bucket for all others.
- The default, `--loss sampled_token`, needs only the log-probability of the sampled token. The
  reverse KL is minimised by policy gradient, and the advantage of a token is the teacher's
  log-probability minus the student's, as in
  https://thinkingmachines.ai/blog/on-policy-distillation/. In expectation this is the gradient of
  the reverse KL per token (`rlkit.losses.reverse_kl_loss`), with more variance. With
  more than one optimizer step per batch (ppo_epochs, mini_batches) the ratio to the sampling policy
  is clipped, as in PPO.
- The effect of a token on later tokens is ignored (a discount of 0), as in GKD and in that post.
  MiniLLM (arXiv 2306.08543) includes it.
- All responses are sampled from the student (lambda = 1 in GKD); responses in the data are not
  used.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from rlkit import losses, runs
from rlkit.data import collate, rows_of_steps
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.losses import (
    clipped_policy_loss,
    importance_weights,
    mismatch_stats,
    ratio_stats,
    token_mean,
)
from rlkit.rollout import Sampling

DIVERGENCES = {
    "forward_kl": losses.forward_kl_loss,
    "reverse_kl": losses.reverse_kl_loss,
    "jsd": losses.jsd_loss,
}
TOP_K_DIVERGENCES = {
    "forward_kl": losses.topk_forward_kl_loss,
    "reverse_kl": losses.topk_reverse_kl_loss,
    "jsd": losses.topk_jsd_loss,
}


@dataclass
class Config(runs.PolicyOptions, runs.TrainingOptions):
    # shared options, with the numbers for the tiny model; help texts: rlkit/runs/options.py
    steps: runs.PositiveInt = 120
    prompts_per_step: runs.PositiveInt = 64
    group_size: runs.PositiveInt = 4
    max_new_tokens: runs.NonNegativeInt = 4
    temperature: runs.PositiveFloat = 1.0
    tis_cap: runs.PositiveFloat = 2.0
    lr: runs.NonNegativeFloat = 5e-4  # tiny model only; others default to 1e-6, or 1e-5 with LoRA
    teacher: str = "tiny"
    """Directory or hub id of the teacher. "tiny" builds one like the student and fine-tunes it for
    longer."""
    teacher_servers: runs.ChangeableOnResume[tuple[str, ...]] = ()
    """URLs of vLLM servers with the teacher, instead of loading it here. Start them with
    `python -m rlkit.rollout.serve --model TEACHER --max-logprobs K` for --teacher_top_k K."""
    loss: Literal["sampled_token", "forward_kl", "reverse_kl", "jsd"] = "sampled_token"
    """sampled_token: policy gradient with the teacher's log-probability of the sampled token. The
    others compare distributions: KL(teacher || student), KL(student || teacher), or the generalised
    Jensen-Shannon divergence."""
    teacher_top_k: runs.NonNegativeInt = 0
    """Compare the teacher's likeliest tokens and one bucket for all others, which servers need. 0:
    the whole vocabulary, which keeps a copy of the teacher's output layer on every GPU."""
    beta: float = 0.5
    """With --loss jsd: the teacher's share of the mixture, above 0 and below 1."""
    ppo_epochs: runs.PositiveInt = 1
    """Passes over each batch."""
    mini_batches: runs.PositiveInt = 1
    """Mini-batches per batch, split by prompt. Each is one optimizer step. With more than one step
    per batch, --loss sampled_token clips the ratio."""
    max_failed_rewards: float = 1.0
    clip_low: runs.NonNegativeFloat = 0.2
    """With --loss sampled_token: lower bound of the ratio is 1 - clip_low."""
    clip_high: runs.NonNegativeFloat = 0.28
    """Upper bound of the ratio is 1 + clip_high."""


def policy_loss(out, mb, cfg: Config):
    """A token's advantage is how much likelier the teacher finds it than the student that sampled
    it."""
    # with one optimizer step per batch, main adds no old_logprobs: the ratio is 1
    old = mb.fields.get("old_logprobs", out.logprobs.detach())
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


def divergence(logits, teacher, cfg: Config, output_layer):  # [n, V], {name: [n, ...]} -> [n]
    """Divergence from the teacher in place of each of n tokens; the engine calls this in pieces."""
    options = {"temperature": cfg.temperature} | ({"beta": cfg.beta} if cfg.loss == "jsd" else {})
    if cfg.teacher_top_k:
        top = teacher["top_logprobs"], teacher["top_ids"]
        return TOP_K_DIVERGENCES[cfg.loss](logits, *top, **options)
    teacher_logits = output_layer(teacher["hidden"])
    size = min(logits.shape[1], teacher_logits.shape[1])  # tokens beyond the tokenizer's have -inf
    return DIVERGENCES[cfg.loss](logits[:, :size], teacher_logits[:, :size], **options)


def divergence_loss(out, mb, cfg: Config):
    """Mean divergence over all tokens."""
    # with one optimizer step per batch, main adds no old_logprobs: the policy has not changed
    old = mb.fields.get("old_logprobs", out.logprobs.detach())
    loss = token_mean(out.divergence, mb.mask, mb.total_tokens)
    metrics = {
        "divergence": loss,
        "entropy": token_mean(out.entropy, mb.mask, mb.total_tokens),
        **mismatch_stats(old, mb.rollout_logprobs, mb.mask, mb.total_tokens),
    }
    return loss, metrics


def select_loss(teacher, cfg: Config):
    """The loss, and the functions of the student's logits that it needs."""
    if cfg.loss == "sampled_token":
        return partial(policy_loss, cfg=cfg), {}
    output_layer = None if cfg.teacher_top_k else teacher.output_layer()
    function = partial(divergence, cfg=cfg, output_layer=output_layer)
    return partial(divergence_loss, cfg=cfg), {"divergence": function}


def add_teacher_logprobs(batch, teacher, scored, cfg: Config):
    """Add what the loss compares with. Servers score the batch's samples, an engine the batch."""
    if cfg.loss == "sampled_token":
        batch.add(teacher_logprobs=teacher.infer_batch(scored)["logprobs"])  # [B, T]
    elif cfg.teacher_top_k:
        logprobs, ids = teacher.topk_logprobs(scored, cfg.teacher_top_k)  # [N, K], N tokens
        batch.add_token_fields(top_logprobs=logprobs, top_ids=ids)
    else:  # the output layer makes logits of them for a piece of the batch at a time
        batch.add_token_fields(hidden=teacher.hidden_states(scored))


def check_options(cfg: Config) -> None:
    runs.check_range("mini_batches", cfg.mini_batches, 1, cfg.prompts_per_step)
    if cfg.loss == "sampled_token" and cfg.teacher_top_k:
        raise ValueError(f"teacher_top_k: expected 0 with {cfg.loss}, got {cfg.teacher_top_k}")
    if cfg.loss != "sampled_token" and cfg.teacher_servers and not cfg.teacher_top_k:
        raise ValueError("teacher_top_k: expected at least 1 with --teacher_servers, got 0")
    if cfg.loss == "jsd" and not 0 < cfg.beta < 1:
        raise ValueError(f"beta: expected a number above 0 and below 1, got {cfg.beta:g}")


def main(cfg: Config) -> None:
    check_options(cfg)
    task = runs.load_named_task(cfg, cfg.task)
    cfg = runs.with_epochs(cfg, task)
    run = runs.start_run(cfg, task.name, task.train, task.heldout)
    path, processor = runs.find_model(cfg, run, task.train)
    updates_per_batch = cfg.ppo_epochs * cfg.mini_batches  # optimizer steps
    engine = runs.build_engine(cfg, path, processor, optimizer_steps=cfg.steps * updates_per_batch)
    teacher = runs.build_teacher(cfg, run, task.train, processor, engine)
    loss_fn, logit_functions = select_loss(teacher, cfg)
    rollout = runs.build_rollout(cfg, path, processor, engine)
    start = runs.resume(cfg, run, checkpoints=engine)["step"]

    sampler = runs.PolicySampler(cfg, run, task, processor, engine, rollout, compares="nothing")
    heldout = sampler.encode(enumerate(task.heldout))
    evaluate = partial(runs.evaluate_heldout, sampler, heldout)
    runs.evaluate_at_start(cfg, run, start, evaluate, engine)

    rows = rows_of_steps(task.train, range(start, cfg.steps), cfg.prompts_per_step, cfg.seed)
    prompts_of_steps = runs.prefetch(map(sampler.encode, rows), run)
    needed = {"outputs": ("logprobs", "entropy"), "logit_functions": logit_functions}
    for step in run.steps(start, cfg.steps):
        prompts = next(prompts_of_steps)
        sampling = Sampling(cfg.max_new_tokens, cfg.temperature, seed=(cfg.seed, step))
        responses = sampler.sync_and_sample(prompts, sampling, n=cfg.group_size)

        run.phase("train")
        batch = collate(responses.generated)
        if cfg.teacher_servers:
            add_teacher_logprobs(batch, teacher, responses.generated, cfg)
        batch = rebalance_across_ranks(batch, engine.data_parallel_group)
        counts = runs.totals(engine, tokens=batch.mask.sum())
        if not counts["tokens"]:
            run.stop("no response of this batch can be scored by the teacher; see the log")
        if not cfg.teacher_servers:
            add_teacher_logprobs(batch, teacher, batch, cfg)
        with runs.keep_on_device(engine):
            if updates_per_batch > 1:
                batch.add(old_logprobs=engine.infer_batch(batch)["logprobs"])
            updates = [
                engine.train_batch(mini_batch, loss_fn, **needed)
                for mini_batch in runs.mini_batches(batch, cfg, step, engine)
            ]
        metrics = runs.mean_metrics(updates)
        sampler.stop_if_out_of_sync(metrics["mismatch/abs_dlogp"])

        metrics |= sampler.metrics(responses) | counts
        sampler.report(responses, metrics)
        shown = "kl" if cfg.loss == "sampled_token" else "divergence"
        run.log(step, metrics, show={shown: shown, "entropy": "entropy", "reward": "reward/mean"})
        runs.save(cfg, run, step, checkpoints=engine)
        runs.evaluate_when_due(cfg, run, evaluate, engine)
        if runs.out_of_patience(cfg, run):
            break

    runs.finish(cfg, run, evaluate("after"), model=engine)


if __name__ == "__main__":
    runs.run_recipe(main)
