"""GRPO over several turns: the policy calls a tool that shows it an image, then answers.

    torchrun --nproc-per-node=1 recipes/grpo_tools.py  # a tiny Qwen2.5-VL learns where to zoom
    torchrun --nproc-per-node=8 recipes/grpo_tools.py --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --task my_tasks:charts --tool my_tasks:crop --max_turns 4 --max_new_tokens 512 \\
        --max_response_tokens 4096 --lora_rank 32 --lr 1e-5 --rollout vllm

A tool or an environment is a plain function. docs/environments.md has a complete example, and
rlkit.rollout.agent has more.

How it differs from the paper (DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1), in
addition to what grpo_vlm.py lists:
- A response is an episode of several turns. All turns have the episode's advantage. Tool output is
  masked out of the loss.
- An episode is left out of its group if its tool or its reward function fails.
- There is no KL term by default (`kl_coef` 0).
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rlkit import runs
from rlkit.advantages import grpo_advantages
from rlkit.data import Failures, collate, load_function, rows_of_steps
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.losses import (
    clipped_policy_loss,
    importance_weights,
    kl_k3,
    mismatch_stats,
    ratio_stats,
    token_mean,
)
from rlkit.rollout import Sampling
from rlkit.rollout.agent import Observation, run_episodes
from rlkit.runs.tiny_tool_user import build_tiny_tool_user


@dataclass
class Config(runs.PolicyOptions, runs.TrainingOptions):
    # shared options, with the numbers for the tiny model; help texts: rlkit/runs/options.py
    steps: runs.PositiveInt = 30
    prompts_per_step: runs.PositiveInt = 32
    group_size: runs.PositiveInt = 8
    max_new_tokens: runs.NonNegativeInt = 12
    temperature: runs.PositiveFloat = 1.0
    tis_cap: runs.PositiveFloat = 2.0
    lr: runs.NonNegativeFloat = 5e-4  # tiny model only; others default to 1e-6, or 1e-5 with LoRA
    warmup_steps: runs.NonNegativeInt = 5
    task: str = "rlkit.rollout.image_tools:zoomed_digits"
    tool: str = "rlkit.rollout.image_tools:zoom"
    """The tool or environment: module:function or file.py:function. See docs/environments.md."""
    ppo_epochs: runs.PositiveInt = 1
    """Passes over each batch."""
    mini_batches: runs.PositiveInt = 1
    """Mini-batches per batch, split by prompt. Each is one optimizer step. Clipping only has
    an effect with more than one step per batch."""
    max_turns: runs.PositiveInt = 2
    """Maximum number of turns of the policy per episode."""
    max_response_tokens: runs.NonNegativeInt = 0
    """Maximum number of tokens per episode after the prompt, with tool output. 0: the rest of the
    context."""
    tool_timeout: runs.PositiveFloat = 60.0
    """Time limit of one call of the tool, in seconds."""
    show_failures: bool = False
    """Show the policy the error of a failed tool and go on. Otherwise the episode is left out."""
    role: str = "user"
    """Role of tool output in the chat template."""
    clip_low: runs.NonNegativeFloat = 0.2
    """Lower bound of the ratio is 1 - clip_low."""
    clip_high: runs.NonNegativeFloat = 0.28
    """Upper bound of the ratio is 1 + clip_high."""
    kl_coef: runs.NonNegativeFloat = 0.0
    """Weight of the KL to the initial model in the loss. 0: there is no reference model."""


def policy_loss(out, mb, cfg: Config):
    """Loss of a micro-batch and its metrics; out.logprobs [B, T], mb.total_tokens counts the
    policy's tokens of all ranks."""
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
    if cfg.kl_coef:
        kl = kl_k3(out.logprobs, mb.ref_logprobs, mb.mask)
        loss = loss + cfg.kl_coef * kl
        metrics["kl"] = token_mean(kl, mb.mask, mb.total_tokens)
    return token_mean(loss, mb.mask, mb.total_tokens), metrics


def episodes(cfg: Config, rollout, tool, processor, engine):
    """A function that plays n episodes of each prompt."""
    return partial(
        run_episodes,
        rollout,
        step=tool,
        processor=processor,
        max_turns=cfg.max_turns,
        max_tokens=runs.context_length(engine, rollout),
        max_response_tokens=cfg.max_response_tokens or None,
        timeout=cfg.tool_timeout,
        role=cfg.role,
        on_failure=(lambda error: Observation(str(error))) if cfg.show_failures else None,
        global_sum=engine.global_sum,
        failures=Failures("tool"),  # prints the traceback of each distinct failure once
    )


def episode(sample) -> list:
    """Messages after the prompt: turns of the policy, and what the tool returned."""
    return sample.row["messages"][sample.row["prompt_messages"] :]


def turns_and_aborted(responses, engine):
    """Mean turns of the policy per episode, and number of episodes that their tool ended."""
    messages = [message for sample in responses.scored for message in episode(sample)]
    counts = {
        "turns": sum(message["role"] == "assistant" for message in messages),
        "scored": len(responses.scored),
        "aborted": sum(sample.finish_reason == "aborted" for sample in responses.generated),
    }
    counts = runs.totals(engine, **counts)
    return {"turns": counts["turns"] / max(counts["scored"], 1), "aborted": counts["aborted"]}


def transcript(sample) -> str:
    """An episode, with [image] for an image."""
    contents = [message["content"] for message in episode(sample)]
    return " | ".join(
        x if isinstance(x, str) else "".join(y.get("text", "[image]") for y in x) for x in contents
    )


def with_tiny_model(cfg: Config, path: Path, task, tool) -> Config:
    """For `--model tiny`: the options with a model built at this path that writes tool calls."""
    if cfg.model != "tiny":
        return cfg
    if (cfg.task, cfg.tool) != (Config.task, Config.tool):
        raise ValueError('model: expected a model that can use this task and tool, got "tiny"')
    build_tiny_tool_user(path, task.train, tool, max_new_tokens=cfg.max_new_tokens, seed=cfg.seed)
    return replace(cfg, model=str(path))


def main(cfg: Config) -> None:
    runs.check_range("group_size", cfg.group_size, 2)  # responses are compared with each other
    runs.check_range("mini_batches", cfg.mini_batches, 1, cfg.prompts_per_step)
    if cfg.max_response_tokens:
        runs.check_range("max_response_tokens", cfg.max_response_tokens, cfg.max_new_tokens)
    task = runs.load_named_task(cfg, cfg.task)
    cfg = runs.with_epochs(cfg, task)
    tool = load_function(cfg.tool, "tool")
    run = runs.start_run(cfg, task.name, task.train, task.heldout, adds_images=True)
    cfg = with_tiny_model(cfg, run.out / "init", task, tool)
    path, processor = runs.find_model(cfg, run, task.train)
    updates_per_batch = cfg.ppo_epochs * cfg.mini_batches  # optimizer steps
    engine = runs.build_engine(cfg, path, processor, optimizer_steps=cfg.steps * updates_per_batch)
    reference = runs.build_reference(cfg, path, processor, engine) if cfg.kl_coef else None
    rollout = runs.build_rollout(cfg, path, processor, engine)
    start = runs.resume(cfg, run, checkpoints=engine)["step"]

    play = episodes(cfg, rollout, tool, processor, engine)
    sampler = runs.PolicySampler(cfg, run, task, processor, engine, rollout, generate=play)
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
        batch = rebalance_across_ranks(batch, engine.data_parallel_group)  # for the inference below
        with runs.keep_on_device(engine):
            if reference:
                batch.add(ref_logprobs=reference(batch))
            if updates_per_batch > 1:
                batch.add(old_logprobs=engine.infer_batch(batch)["logprobs"])
            updates = [
                engine.train_batch(mini_batch, loss_fn, outputs=("logprobs", "entropy"))
                for mini_batch in runs.mini_batches(batch, cfg, step, engine)
            ]
        metrics = runs.mean_metrics(updates)
        sampler.stop_if_out_of_sync(metrics["mismatch/abs_dlogp"])

        metrics |= sampler.metrics(responses) | runs.totals(engine, tokens=batch.mask.sum())
        metrics |= turns_and_aborted(responses, engine)
        sampler.report(responses, metrics)
        show = {"reward": "reward/mean", "entropy": "entropy", "turns": "turns"}
        run.log(step, metrics, show=show)
        runs.save(cfg, run, step, checkpoints=engine)
        runs.evaluate_when_due(cfg, run, evaluate, engine)
        if runs.out_of_patience(cfg, run):
            break

    shown = [replace(sample, text=transcript(sample)) for sample in evaluate("after")]
    runs.finish(cfg, run, shown, model=engine)


if __name__ == "__main__":
    runs.run_recipe(main)
