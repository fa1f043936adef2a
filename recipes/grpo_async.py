"""GRPO with servers that sample the next batch while the trainer trains on this one.

    # a tiny Qwen2.5-VL and a server, on the CPU
    torchrun --nproc-per-node=1 recipes/grpo_async.py
    # servers on four GPUs, and a trainer on four others
    python -m rlkit.rollout.serve --model Qwen/Qwen2.5-VL-7B-Instruct --count 4
    torchrun --nproc-per-node=4 recipes/grpo_async.py --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --task train.jsonl --reward boxed --max_staleness 2 --max_new_tokens 1024 --lr 1e-6 \\
        --servers http://127.0.0.1:8000 http://127.0.0.1:8001 http://127.0.0.1:8002 \\
        http://127.0.0.1:8003

How it differs from grpo_vlm.py, and from the papers (one step off-policy:
https://arxiv.org/abs/2410.18252; bounded staleness and responses that continue under new weights:
AReaL, https://arxiv.org/abs/2505.24298):
- Batches are requested in advance. The weights that sample a token are at most `max_staleness`
  updates older than those that train on it. Requests are delayed to keep this bound; no response is
  discarded.
- Weights are sent to the servers while they generate. An unfinished response continues under the
  new weights, and its version is that of its oldest token.
- Nothing is clipped: each batch is used for one optimizer step, so PPO's ratio is always 1.
  Importance weights replace the clip. The weight of a token is its probability under the trainer
  divided by that under the older weights that sampled it, at most `tis_cap`. AReaL's decoupled
  objective has these weights, too, without an upper bound.
- There is no KL term.
"""

import math
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from rlkit import runs
from rlkit.advantages import grpo_advantages
from rlkit.data import Failures, collate, rows_of_steps
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.losses import importance_weights, mismatch_stats, reinforce_loss, token_mean
from rlkit.rewards import score_as_written
from rlkit.rollout import Sampling, measure_mismatch


@dataclass
class Config(runs.PolicyOptions, runs.TrainingOptions):
    # shared options, with the numbers for the tiny model; help texts: rlkit/runs/options.py
    steps: runs.PositiveInt = 130
    prompts_per_step: runs.PositiveInt = 32
    group_size: runs.PositiveInt = 16
    max_new_tokens: runs.NonNegativeInt = 4
    temperature: runs.PositiveFloat = 1.0
    tis_cap: runs.PositiveFloat = 2.0
    lr: runs.NonNegativeFloat = 1e-3  # tiny model only; others default to 1e-6, or 1e-5 with LoRA
    max_staleness: runs.NonNegativeInt = 1
    """Maximum number of updates between the weights that sampled a token and those that train on
    it. 0: sample and train in turn."""
    rollout: str = "vllm_server"
    max_mismatch: float = 1.0


def policy_loss(out, mb, cfg: Config):
    """Loss of a micro-batch and its metrics; out.logprobs [B, T], mb.total_tokens counts the
    tokens of all ranks."""
    old = out.logprobs.detach()
    loss = reinforce_loss(out.logprobs, old, mb.advantages, mb.mask)
    loss = loss * importance_weights(old, mb.rollout_logprobs, mb.mask, high=cfg.tis_cap)
    staleness = mb.staleness[:, None].expand(mb.mask.shape)
    metrics = {
        "entropy": token_mean(out.entropy, mb.mask, mb.total_tokens),
        "staleness": token_mean(staleness, mb.mask, mb.total_tokens),
        "staleness/max": mb.staleness.max() if len(mb) else mb.staleness.sum(),
        **mismatch_stats(old, mb.rollout_logprobs, mb.mask, mb.total_tokens),
    }
    return token_mean(loss, mb.mask, mb.total_tokens), metrics


def check_arrival(cfg: Config, run, sampler, engine, prompts):
    """End the run if fresh responses do not have the log-probabilities of the weights just sent."""
    run.phase("weight_sync_check")
    sampling = Sampling(cfg.max_new_tokens, cfg.temperature, (cfg.seed,))
    sampler.stop_if_out_of_sync(measure_mismatch(sampler.rollout, engine, prompts, sampling))


def request(cfg: Config, prompts_of_steps, submit, step: int):
    """Have the servers answer the next prompts; returns these, and a future of their responses."""
    prompts = next(prompts_of_steps)
    sampling = Sampling(cfg.max_new_tokens, cfg.temperature, (cfg.seed, step))
    return prompts, submit(prompts.samples, sampling, cfg.group_size)


def scored_responses(sampler, prompts, future, failures: Failures) -> runs.Responses:
    """Wait for the responses to a step's prompts, and for their rewards."""
    generated, rewards, parts, seconds = future.result()
    sampler.check_routing(generated)
    return runs.Responses(generated, rewards, parts, prompts.skipped, failures.take(), seconds)


def updates_since_sampling(samples, version: int):
    """[B]: weight updates since the oldest weights that sampled a response."""
    return torch.tensor([float(version - sample.version) for sample in samples])


def stop_if_apart(cfg: Config, run, mismatch: float) -> None:
    if math.isnan(mismatch) or mismatch > cfg.max_mismatch:
        run.stop(f"sampler and trainer differ by {mismatch:.2f} in mean |dlogp|")


def cancel(requested) -> None:
    """Have the servers stop work on batches that will not be trained on."""
    for _, future in requested:
        future.cancel()


def main(cfg: Config) -> None:
    runs.check_range("group_size", cfg.group_size, 2)  # responses are compared with each other
    runs.check_range("reward_threads", cfg.reward_threads, 1)  # the main thread trains
    task = runs.load_named_task(cfg, cfg.task)
    cfg = runs.with_epochs(cfg, task)
    run = runs.start_run(cfg, task.name, task.train, task.heldout, starts_servers=True)
    path, processor = runs.find_model(cfg, run, task.train)
    engine = runs.build_engine(cfg, path, processor, optimizer_steps=cfg.steps)
    with ExitStack() as stack:  # a server that is started here ends with the run
        rollout = runs.build_server_rollout(cfg, run, path, processor, engine, stack)
        start = runs.resume(cfg, run, checkpoints=engine)["step"]

        sampler = runs.PolicySampler(
            cfg, run, task, processor, engine, rollout, sends_weights=False
        )
        heldout = sampler.encode(enumerate(task.heldout))
        evaluate = partial(runs.evaluate_heldout, sampler, heldout)
        check_weights = partial(check_arrival, cfg, run, sampler, engine, heldout.samples[:4])
        sampler.send_weights(rollout)
        check_weights()
        runs.evaluate_at_start(cfg, run, start, evaluate, engine)

        rows = rows_of_steps(task.train, range(start, cfg.steps), cfg.prompts_per_step, cfg.seed)
        prompts_of_steps = runs.prefetch(map(sampler.encode, rows), run)
        failures, threads = Failures("reward"), cfg.reward_threads
        submit = score_as_written(rollout.submit, task.reward, threads=threads, failures=failures)
        request_step = partial(request, cfg, prompts_of_steps, submit)
        ahead = cfg.max_staleness + 1  # steps whose responses are requested
        requested = deque(map(request_step, range(start, cfg.steps)[:ahead]))
        stack.callback(cancel, requested)
        loss_fn = partial(policy_loss, cfg=cfg)
        for step in run.steps(start, cfg.steps):
            run.phase("generate")  # the wait for responses
            responses = scored_responses(sampler, *requested.popleft(), failures)
            sampler.stop_if_rewards_failed(responses)

            run.phase("train")
            batch = collate(responses.scored)
            batch.add(staleness=updates_since_sampling(responses.scored, rollout.version))  # [B]
            batch.add(advantages=grpo_advantages(batch.rewards, batch.group_ids))  # [B]
            batch = rebalance_across_ranks(batch, engine.data_parallel_group)
            metrics = engine.train_batch(batch, loss_fn, outputs=("logprobs", "entropy"))
            stop_if_apart(cfg, run, metrics["mismatch/abs_dlogp"])
            run.phase("weight_sync")
            sampler.send_weights(rollout)
            if step + ahead < cfg.steps:
                requested.append(request_step(step + ahead))

            metrics |= sampler.metrics(responses) | runs.totals(engine, tokens=batch.mask.sum())
            sampler.report(responses, metrics)
            run.log(step, metrics, show={"reward": "reward/mean", "staleness": "staleness"})
            runs.save(cfg, run, step, checkpoints=engine)
            runs.evaluate_when_due(cfg, run, evaluate, engine)
            if runs.out_of_patience(cfg, run):
                break
            if step == start or (step + 1) % cfg.save_every == 0:  # waits until servers are free
                check_weights()

        cancel(requested)
        runs.finish(cfg, run, evaluate("after"), model=engine)


if __name__ == "__main__":
    runs.run_recipe(main)
