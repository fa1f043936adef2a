"""DAPO on text or images: dynamic sampling, a higher upper clip, overlong reward shaping.

    torchrun --nproc-per-node=1 recipes/dapo.py  # a tiny Qwen2.5-VL learns to read digits
    torchrun --nproc-per-node=8 recipes/dapo.py --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --task train.jsonl --reward maths --rollout vllm --prompts_per_step 512 \\
        --gen_batch_size 1536 --max_num_gen_batches 10 --mini_batches 16 --lr 1e-6 \\
        --max_new_tokens 20480 --overlong_buffer 4096

The four parts of the paper (https://arxiv.org/abs/2503.14476) and where they are: clip-higher
(`clip_high`), dynamic sampling (`sample_groups`), the mean over tokens (`token_mean`), overlong
reward shaping (`overlong_penalty`). No KL term.

How it differs from the paper:
- A step samples at most `max_num_gen_batches` batches of prompts, and trains on the groups found in
  them. The run ends if none of these groups has differing rewards.
- Groups are filtered by rewards without the length penalty. With it, groups of equal rewards would
  pass the filter.
- By default the learning rate decays linearly after the warm-up; the paper's is constant.
- Truncated responses are trained on.
- A response is left out of its group if its reward function fails or returns None. It does not
  count as wrong.
- Image placeholder tokens are masked out of the vocabulary, in sampling and in training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import NamedTuple

from rlkit import runs
from rlkit.advantages import grpo_advantages, informative_groups, overlong_penalty
from rlkit.data import collate, group_ids, rows_of_steps
from rlkit.losses import (
    clipped_policy_loss,
    importance_weights,
    mismatch_stats,
    ratio_stats,
    token_mean,
)
from rlkit.rollout import Sampling


@dataclass
class Config(runs.PolicyOptions, runs.TrainingOptions):
    # shared options, with the numbers for the tiny model; help texts: rlkit/runs/options.py
    steps: runs.PositiveInt = 150
    prompts_per_step: runs.PositiveInt = 32
    group_size: runs.PositiveInt = 16
    max_new_tokens: runs.NonNegativeInt = 4
    temperature: runs.PositiveFloat = 1.0
    tis_cap: runs.PositiveFloat = 2.0
    lr: runs.NonNegativeFloat = 5e-4  # tiny model only; others default to 1e-6, or 1e-5 with LoRA
    gen_batch_size: runs.PositiveInt = 48
    """Prompts per generation batch. A step samples such batches until --prompts_per_step prompts
    have responses with different rewards."""
    max_num_gen_batches: runs.PositiveInt = 3
    """Maximum number of generation batches per step."""
    ppo_epochs: runs.PositiveInt = 1
    """Passes over each batch."""
    mini_batches: runs.PositiveInt = 2
    """Mini-batches per batch, split by prompt. Each is one optimizer step."""
    overlong_buffer: runs.NonNegativeInt = 2
    """Number of tokens before max_new_tokens over which the length penalty grows. 0: no penalty."""
    overlong_penalty_factor: runs.NonNegativeFloat = 1.0
    """The length penalty at max_new_tokens."""
    clip_low: runs.NonNegativeFloat = 0.2
    """Lower bound of the ratio is 1 - clip_low."""
    clip_high: runs.NonNegativeFloat = 0.28
    """Upper bound of the ratio is 1 + clip_high."""


def policy_loss(out, mb, cfg: Config):
    """Loss of a micro-batch and its metrics; out.logprobs [B, T], mb.total_tokens counts the
    tokens of all ranks."""
    # with one optimizer step per batch, main adds no old_logprobs: the ratio is 1
    old = mb.fields.get("old_logprobs", out.logprobs.detach())
    clip = {"clip_low": cfg.clip_low, "clip_high": cfg.clip_high}
    loss = clipped_policy_loss(out.logprobs, old, mb.advantages, mb.mask, **clip)
    loss = loss * importance_weights(old, mb.rollout_logprobs, mb.mask, high=cfg.tis_cap)
    metrics = {
        "entropy": token_mean(out.entropy, mb.mask, mb.total_tokens),
        **ratio_stats(out.logprobs, old, mb.advantages, mb.mask, **clip, total=mb.total_tokens),
        **mismatch_stats(old, mb.rollout_logprobs, mb.mask, mb.total_tokens),
    }
    return token_mean(loss, mb.mask, mb.total_tokens), metrics


class SampledGroups(NamedTuple):
    """What a step sampled, in one generation batch or several."""

    responses: runs.Responses
    """All responses of this rank."""
    informative: Sequence[int]
    """Ids of the groups of all ranks whose responses have different rewards."""
    num_gen_batches: int


def sample_groups(gen_batches, first: int, cfg: Config, sampler, engine) -> SampledGroups:
    """Dynamic sampling: sample until enough groups have responses with different rewards.

    Args:
        gen_batches: iterator over generation batches of prompts.
        first: number of its next batch, counted from the start of the run.
    """
    responses = None
    with sampler.current_weights():
        for i in range(cfg.max_num_gen_batches):
            prompts = renumbered(next(gen_batches), i * cfg.gen_batch_size)
            sampling = Sampling(cfg.max_new_tokens, cfg.temperature, seed=(cfg.seed, first + i))
            more = sampler.sample(prompts, sampling, n=cfg.group_size)
            responses = more if responses is None else responses + more
            groups = group_ids(responses.generated)
            differ = informative_groups(responses.rewards, groups)
            informative = runs.group_ids_of_all_ranks(groups[differ], engine)
            if len(informative) >= cfg.prompts_per_step:
                break
    return SampledGroups(responses, informative, i + 1)


def renumbered(prompts, first: int):
    """A generation batch with group ids from `first` on, so that they are unique within a step."""
    samples = [replace(sample, group_id=first + sample.group_id) for sample in prompts.samples]
    return replace(prompts, samples=samples)


def group_metrics(sampled: SampledGroups, chosen, penalty, cfg: Config, engine):
    """The mean length penalty, and how many groups were sampled, have different rewards, and were
    trained on."""
    counts = runs.totals(engine, penalty=penalty.sum(), responses=len(penalty))
    return {
        "reward/overlong": counts["penalty"] / counts["responses"],
        "groups/sampled": sampled.num_gen_batches * cfg.gen_batch_size,
        "groups/differ": len(sampled.informative),
        "groups/trained": len(chosen),
    }


def scored_share(responses, engine) -> str:
    total = runs.totals(engine, scored=len(responses.scored), responses=len(responses.rewards))
    return f"{total['scored']:.0f} of {total['responses']:.0f} responses were scored"


def main(cfg: Config) -> None:
    runs.check_range("mini_batches", cfg.mini_batches, 1, cfg.prompts_per_step)
    runs.check_range("group_size", cfg.group_size, 2)  # responses are compared with each other
    runs.check_range("overlong_buffer", cfg.overlong_buffer, 0, cfg.max_new_tokens)
    if cfg.epochs:
        raise ValueError(f"epochs: expected --steps, as steps vary in size, got {cfg.epochs}")
    task = runs.load_named_task(cfg, cfg.task)
    run = runs.start_run(cfg, task.name, task.train, task.heldout)
    path, processor = runs.find_model(cfg, run, task.train)
    updates_per_batch = cfg.ppo_epochs * cfg.mini_batches  # optimizer steps
    engine = runs.build_engine(cfg, path, processor, optimizer_steps=cfg.steps * updates_per_batch)
    rollout = runs.build_rollout(cfg, path, processor, engine)
    state = runs.resume(cfg, run, checkpoints=engine)

    sampler = runs.PolicySampler(cfg, run, task, processor, engine, rollout)
    heldout = sampler.encode(enumerate(task.heldout))
    evaluate = partial(runs.evaluate_heldout, sampler, heldout)
    runs.evaluate_at_start(cfg, run, state["step"], evaluate, engine)

    gen_batches_done = state["gen_batches_done"] if state["step"] else 0  # position in the data
    rows = rows_of_steps(task.train, count(gen_batches_done), cfg.gen_batch_size, cfg.seed)
    gen_batches = runs.prefetch(map(sampler.encode, rows), run)
    loss_fn = partial(policy_loss, cfg=cfg)
    for step in run.steps(state["step"], cfg.steps):
        sampled = sample_groups(gen_batches, gen_batches_done, cfg, sampler, engine)
        gen_batches_done += sampled.num_gen_batches
        responses = sampled.responses
        sampler.stop_if_rewards_failed(responses)
        if not len(sampled.informative):
            what = "no sampled group has different rewards, so the run ends here"
            run.print(f"step {step}: {what}; {scored_share(responses, engine)}")
            break

        run.phase("train")
        chosen = sampled.informative[: cfg.prompts_per_step]
        batch = collate([sample for sample in responses.scored if sample.group_id in chosen])
        lengths, limit = batch.mask.sum(1), cfg.max_new_tokens
        penalty = overlong_penalty(lengths, limit, cfg.overlong_buffer, cfg.overlong_penalty_factor)
        batch.add(advantages=grpo_advantages(batch.rewards + penalty, batch.group_ids))  # [B]
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
        metrics |= group_metrics(sampled, chosen, penalty, cfg, engine)
        show = {"reward": "reward/mean", "entropy": "entropy", "groups": "groups/differ"}
        run.log(step, metrics, show=show)
        runs.save(cfg, run, step, {"gen_batches_done": gen_batches_done}, checkpoints=engine)
        runs.evaluate_when_due(cfg, run, evaluate, engine)
        if runs.out_of_patience(cfg, run):
            break

    runs.finish(cfg, run, evaluate("after"), model=engine)


if __name__ == "__main__":
    runs.run_recipe(main)
