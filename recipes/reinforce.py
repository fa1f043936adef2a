"""REINFORCE on text or images, one step a batch, with the baseline of your choice: RLOO, ReMax, REINFORCE++ or OPO.

    torchrun --nproc-per-node=1 recipes/reinforce.py                   # a tiny Qwen2.5-VL learns to read digits
    torchrun --nproc-per-node=8 recipes/reinforce.py --model Qwen/Qwen2.5-VL-7B-Instruct --task train.jsonl \\
        --advantage opo --prompts_per_step 256 --group_size 16 --max_new_tokens 1024 --lr 1e-6

`advantage` is one of ADVANTAGES below: rloo (https://arxiv.org/abs/2402.14740), remax (arXiv 2310.10505; use it with
--group_size 1), reinforce_plus_plus and reinforce_plus_plus_baseline (arXiv 2501.03262), opo (arXiv 2505.23585).

How it differs from the papers:
- the loss is the mean over all tokens of the batch. RLOO, ReMax and OPO sum over an answer and take the mean over
  answers: `sequence_sum_mean` instead of `token_mean` below.
- a batch is used for one step, so the ratio is 1 and REINFORCE++ has nothing to clip.
- with `kl_coef` the KL to the model at the start is taken off the reward: by token for REINFORCE++, in sum for the
  others, OPO among them, which has none; ReMax's greedy answer pays none.
- an answer that could not be judged is left out of its group instead of counting as wrong.
- tokens that stand for images can be neither sampled nor scored.
"""

import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import tyro
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers.utils.logging import disable_progress_bar

from rlkit.advantages import (
    kl_in_reward,
    opo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rewards_to_tokens,
    rloo_advantages,
)
from rlkit.data import Judge, Task, collate, judged, load_task, part_means, reward_stats, step_rows
from rlkit.engines import make_engine
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.engines.checkpoint import checkpoints, keep_newest
from rlkit.engines.distributed import init_distributed
from rlkit.engines.flops import batch_flops
from rlkit.losses import importance_weights, kl_k1, kl_k3, mismatch_stats, reinforce_loss, token_mean
from rlkit.report import write_report
from rlkit.rollout import Canary, Sampling, make_rollout
from rlkit.tracking import Run, new_directory, progress_bar
from rlkit.vlm import VISION_TOWER, freeze, load_model, lora, model_or_tiny, trainable_summary
from rlkit.vlm.processors import encode_rows, load_processor, suppressed_token_ids

# rewards [B, T] (those of a row on its tokens), the batch, and the sum over ranks -> advantages [B] or [B, T]
ADVANTAGES = {
    "rloo": lambda r, batch, total: rloo_advantages(r.sum(1), batch.group_ids),
    "remax": lambda r, batch, total: remax_advantages(r.sum(1), batch.greedy_rewards),
    "reinforce_plus_plus": lambda r, batch, total: reinforce_plus_plus_advantages(r, batch.mask, global_sum=total),
    "reinforce_plus_plus_baseline": lambda r, batch, total: reinforce_plus_plus_baseline_advantages(
        r.sum(1), batch.group_ids, global_sum=total
    ),
    "opo": lambda r, batch, total: opo_advantages(r.sum(1), batch.mask.sum(1), batch.group_ids),
}


@dataclass
class Config:
    advantage: Literal["rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo"] = "rloo"
    """What an answer's reward is compared with."""
    model: str = "tiny"
    """Directory or hub id of a model; "tiny" builds one of 0.7M parameters and warms it up for a few seconds."""
    task: str = "digits"
    """A built-in task, a .jsonl or .parquet file with question, answer and image columns, or module:function."""
    rollout: str = "hf"
    """What samples: hf (the trained model itself), vllm (in this process), vllm_server or sglang (at `servers`)."""
    servers: tuple[str, ...] = ()
    """URLs of the servers; python -m rlkit.rollout.serve starts some."""
    out: str = ""
    """The run's directory; runs/reinforce-<task>-seed<seed> by default, numbered if that holds a run."""
    resume: bool = False
    """Go on from the newest checkpoint in the run's directory."""
    trackers: tuple[str, ...] = ()
    """Told the metrics beside the run's own files: tensorboard, wandb, mlflow, trackio, ...; see rlkit.tracking."""
    watchdog: float = 600.0
    """Seconds in one phase after which the phases of all ranks are printed; 0: never."""
    seed: int = 0
    """Of the data order, the sampling noise and the tiny model."""

    steps: int = 220
    """Batches that are sampled."""
    prompts_per_step: int = 64
    """Prompts in a batch, over all ranks."""
    group_size: int = 16
    """Answers to each prompt."""
    reward_threads: int = 8
    """Prompts whose answers are judged at once, while others are written. 0: behind them, in the main thread."""
    max_new_tokens: int = 4
    """Longest answer."""
    max_prompt_tokens: int = 0
    """Longest prompt, images expanded; a longer one is skipped and counted. 0: what the model's context leaves."""
    temperature: float = 1.0
    """Of the sampler, and of the distribution that is trained."""

    lr: float = 7e-4
    """Peak learning rate; LoRA and large models want less, about 1e-5 and 1e-6."""
    warmup_steps: int = 10
    """Linear warm-up; after it the rate falls linearly to a twentieth."""
    tis_cap: float = 2.0
    """Weights that correct for a sampler which differs from the trainer are cut here; they are 1 with hf."""
    kl_coef: float = 0.0
    """Weight in the reward of the KL to the model at the start. 0: that is not kept, and `kl` is from the sampler."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""

    freeze_vision_tower: bool = False
    """Train the language model alone."""
    lora_rank: int = 0
    """Rank of LoRA adapters; 0 trains the weights themselves."""
    lora_alpha: int = 32
    """Scale of the adapters, over their rank."""
    target_modules: str = "all-linear"
    """Modules that get adapters: all-linear, or a regular expression."""
    exclude_modules: str | None = ".*visual.*"
    """Regular expression of modules that get none."""
    engine: str = "fsdp2"
    """What trains: fsdp2, megatron, or one of another package; see docs/engines.md."""
    parallel: dict[str, int] = field(default_factory=dict)
    """Ranks that share a model, by the engine's own names: `--parallel tensor 2 pipeline 2`."""
    use_remove_padding: bool = True
    """Pack rows without padding."""
    use_fused_kernels: bool = False
    """Logprobs from hidden states, without the logits tensor."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in backward."""
    micro_batch_tokens: int = 16384
    """Most tokens in one forward."""
    gpu_memory_utilization: float = 0.8
    """Share of a GPU's memory up to which the sampler's cache may fill it."""
    threads: int = 1
    """CPU threads of a process. With more, sums round differently from run to run, and no run repeats exactly."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""

    save_every: int = 50
    """Steps between checkpoints; the newest two are kept."""
    max_unjudged: float = 0.2
    """Stop when a larger share of a batch's answers could not be judged."""
    max_mismatch: float = 0.3
    """Stop when sampler and trainer differ by more in mean |dlogp|, or by ten times what they did at first."""


def main(cfg: Config) -> None:
    torch.set_num_threads(cfg.threads)
    init_distributed()
    disable_progress_bar()  # of loading and saving; the run has its own
    rank = dist.get_rank()
    try:
        task = load_task(cfg.task)
        name = f"reinforce-{task.name}-seed{cfg.seed}"
        out = Path(cfg.out) if cfg.out else new_directory("runs", name, resume=cfg.resume)
        judge = Judge(task.reward, threads=cfg.reward_threads)
        run = Run(out, asdict(cfg), resume=cfg.resume, writes=rank == 0, trackers=cfg.trackers, watchdog=cfg.watchdog)
        engine, reference, rollout, processor = set_up(cfg, task, out)
        saved = checkpoints(out / "checkpoints") if cfg.resume else []
        start = engine.load_checkpoint(saved[-1])["step"] if saved else 0
    except ValueError as error:
        sys.exit(f"reinforce: {error}")
    run.start_at(start)
    mine = slice(engine.data_parallel_rank, None, engine.data_parallel_size)  # this rank's share of rows
    max_tokens = cfg.max_prompt_tokens or engine.config.get_text_config().max_position_embeddings - cfg.max_new_tokens
    heldout, bad = encode_rows(processor, list(enumerate(task.heldout))[mine], max_tokens=max_tokens)
    greedy = Sampling(cfg.max_new_tokens, temperature=0.0)

    def generate(prompts, sampling, n=1, phase="generate"):
        """Answers under the weights of this moment, each judged while others are written: as of `Judge.result`."""
        run.phase("hand_over")
        rollout.wake_up()
        rollout.update_weights(engine.get_per_tensor_param())
        run.phase(phase)
        answers = rollout.generate(prompts, sampling, n, written=judge.take)
        rollout.sleep()  # between times the sampler leaves a GPU to the trainer
        run.phase("reward" if phase == "generate" else phase)  # what of it is not done yet
        return answers, *judge.result()

    def evaluate(when: str) -> list:
        """Greedy answers to the held-out rows, shared among the ranks; a row that cannot be judged counts as wrong."""
        samples, rewards, *_ = generate(heldout, greedy, phase="evaluate")
        right, count, lost = engine.global_sum(torch.tensor([rewards.nansum(), len(rewards), len(bad)])).tolist()
        accuracy = right / max(count, 1)
        run.evaluation(**{f"accuracy_{when}": accuracy}, heldout=int(count), heldout_skipped=int(lost))
        if rank == 0:
            print(f"held-out accuracy {when}: {accuracy:.3f} ({count:.0f} rows)", flush=True)
        return judged(samples, rewards)

    if start == 0:
        evaluate("before")

    def loss_fn(out, mb):  # out.logprobs [B, T]; mb.total_tokens counts the whole batch, on all ranks
        now = out.logprobs.detach()
        loss = reinforce_loss(out.logprobs, now, mb.advantages, mb.mask)
        loss = loss * importance_weights(now, mb.rollout_logprobs, mb.mask, cap=cfg.tis_cap)
        metrics = {
            "kl": token_mean(kl_k3(now, mb.ref_logprobs, mb.mask), mb.mask, mb.total_tokens),
            "entropy": token_mean(out.entropy, mb.mask, mb.total_tokens),
            **mismatch_stats(now, mb.rollout_logprobs, mb.mask, mb.total_tokens),
        }
        return token_mean(loss, mb.mask, mb.total_tokens), metrics

    canary = Canary(cfg.max_mismatch)
    progress = progress_bar(start, cfg.steps, show=rank == 0)
    for step in progress:
        rows = step_rows(task.train, step, cfg.prompts_per_step, cfg.seed)[mine]
        prompts, skipped = encode_rows(processor, rows, max_tokens=max_tokens)
        for message in skipped:
            progress.write(f"skipped: {message}")
        sampling = Sampling(cfg.max_new_tokens, cfg.temperature, seed=(cfg.seed, step))
        answers, rewards, parts, judging = generate(prompts, sampling, cfg.group_size)  # [B]; nan: not judged
        batch = collate(judged(answers, rewards))
        if cfg.advantage == "remax":
            guesses, guessed, *_ = generate(prompts, greedy)
            found = dict(zip([s.group_id for s in guesses], guessed.tolist(), strict=True))
            batch.add(greedy_rewards=torch.tensor([found[g] for g in batch.group_ids.tolist()], dtype=torch.float32))
        batch = rebalance_across_ranks(batch, engine.data_parallel_group)
        rewards, mask = batch.rewards, batch.mask
        counts = [len(answers), len(batch), len(skipped), mask.sum(), batch_flops(engine.config, batch)]
        asked, known, lost, tokens, flops = engine.global_sum(torch.tensor(counts, dtype=torch.float64)).tolist()
        if known < max(1.0, (1 - cfg.max_unjudged) * asked):
            sys.exit(f"reinforce: step {step}: only {known:.0f} of {asked:.0f} answers could be judged; see the log")

        run.phase("train")
        rewards = rewards_to_tokens(rewards, mask)  # [B, T]
        batch.add(ref_logprobs=batch.rollout_logprobs)
        if cfg.kl_coef:
            with engine.disable_adapter() if cfg.lora_rank else nullcontext():
                batch.add(ref_logprobs=reference.infer_batch(batch)["logprobs"])
            kl = kl_k1(batch.rollout_logprobs, batch.ref_logprobs, mask)
            rewards = kl_in_reward(rewards, kl, cfg.kl_coef, mask)
        batch.add(advantages=ADVANTAGES[cfg.advantage](rewards, batch, engine.global_sum))
        metrics = engine.train_batch(batch, loss_fn, outputs=("logprobs", "entropy"))
        if wrong := canary(metrics["mismatch/abs_dlogp"]):
            sys.exit(f"reinforce: step {step}: {wrong}")

        stats = reward_stats(batch.rewards, batch.group_ids, engine.global_sum)
        run.log(step, {
            **stats, **part_means(parts, engine.global_sum), **metrics, "tokens": tokens, "skipped_rows": lost,
            "unjudged": asked - known, "time/judging": judging,
            "flops": flops * ((2 if cfg.lora_rank else 3) + bool(cfg.kl_coef)),
        })  # fmt: skip
        progress.set_postfix(reward=f"{stats['reward/mean']:.2f}", entropy=f"{metrics['entropy']:.2f}")
        if (step + 1) % cfg.save_every == 0 or step + 1 == cfg.steps:
            run.phase("checkpoint")
            engine.save_checkpoint(out / "checkpoints" / f"step_{step + 1}", {"step": step + 1})
            keep_newest(out / "checkpoints", 2)

    shown = evaluate("after")
    engine.export_hf(out / "model")
    run.close()
    if rank == 0:
        page = write_report(out, sorted(shown, key=lambda s: s.reward)[:40], title=name)
        print(f"results: {page}, {out / 'metrics.jsonl'}; model: {out / 'model'}")


def set_up(cfg: Config, task: Task, out: Path):
    """The trained engine, the reference policy, the sampler and the processor."""
    path = model_or_tiny(cfg.model, out / "init", task.train, seed=cfg.seed)
    processor = load_processor(path, trust_remote_code=cfg.trust_remote_code)
    model = load_model(path, trust_remote_code=cfg.trust_remote_code)
    shared = {
        "processor": processor,
        "suppressed_token_ids": suppressed_token_ids(model.config, getattr(processor, "tokenizer", processor)),
        "temperature": cfg.temperature, "micro_batch_tokens": cfg.micro_batch_tokens,
        "use_remove_padding": cfg.use_remove_padding, "use_fused_kernels": cfg.use_fused_kernels, **cfg.parallel,
    }  # fmt: skip
    if cfg.freeze_vision_tower:
        freeze(model, VISION_TOWER)
    if cfg.lora_rank:
        model = lora(model, cfg.lora_rank, cfg.lora_alpha, cfg.target_modules, cfg.exclude_modules)
    if dist.get_rank() == 0:
        print(trainable_summary(model), flush=True)
    steps, warm = max(1, cfg.steps), max(1, cfg.warmup_steps)
    engine = reference = make_engine(
        cfg.engine, "language_model", model=model,
        optimizer=lambda params: AdamW(params, lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0),
        scheduler=lambda opt: LambdaLR(opt, lambda i: min((i + 1) / warm, max(0.05, 1 - i / steps))),
        max_grad_norm=cfg.max_grad_norm, enable_gradient_checkpointing=cfg.enable_gradient_checkpointing, **shared,
    )  # fmt: skip
    if cfg.kl_coef and not cfg.lora_rank:
        start = load_model(path, trust_remote_code=cfg.trust_remote_code)
        reference = make_engine(cfg.engine, "language_model", model=start, **shared)
    rollout = make_rollout(
        cfg.rollout, engine.gathered, model=path, processor=processor, urls=cfg.servers,
        gpu_memory_utilization=cfg.gpu_memory_utilization, model_parallel_group=engine.model_parallel_group,
    )  # fmt: skip
    return engine, reference, rollout, processor


if __name__ == "__main__":
    main(tyro.cli(Config, use_underscores=True, description=__doc__))
    dist.destroy_process_group()
