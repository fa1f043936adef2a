"""DAPO on text or images: draw prompts until the batch is full of groups that teach something, and clip higher upwards.

    torchrun --nproc-per-node=1 recipes/dapo.py                        # a tiny Qwen2.5-VL learns to read digits
    torchrun --nproc-per-node=8 recipes/dapo.py --model Qwen/Qwen2.5-VL-7B-Instruct --task train.jsonl \\
        --prompts_per_step 512 --prompts_per_draw 1536 --max_num_gen_batches 10 --mini_batches 16 --lr 1e-6 \\
        --max_new_tokens 20480 --overlong_buffer 4096

Its four parts (https://arxiv.org/abs/2503.14476) and where they stand: clip-higher (`clip_high`), dynamic sampling (the
loop over draws), the mean over tokens (`token_mean`), overlong shaping (`overlong_penalty`). There is no KL.

How it differs from the paper:
- sampling stops after `max_num_gen_batches` draws, and the step is then taken on the groups that there are. When not
  one teaches anything the run ends: all that is left is right always, or never.
- a group is judged by its rewards before the penalty for length, which would make groups of equal rewards differ.
- the learning rate falls linearly after its warm-up, where the paper's is constant; truncated answers are trained on.
- an answer that could not be judged is left out of its group instead of counting as wrong.
- tokens that stand for images can be neither sampled nor scored.
"""

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers.utils.logging import disable_progress_bar

from rlkit.advantages import grpo_advantages, informative_groups, overlong_penalty
from rlkit.data import Judge, Task, collate, group_ids, judged, load_task, part_means, reward_stats, step_rows
from rlkit.engines import make_engine
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.engines.checkpoint import checkpoints, keep_newest
from rlkit.engines.distributed import init_distributed
from rlkit.engines.flops import batch_flops
from rlkit.losses import clipped_policy_loss, importance_weights, mismatch_stats, ratio_stats, token_mean
from rlkit.report import write_report
from rlkit.rollout import Canary, Sampling, make_rollout
from rlkit.tracking import Run, new_directory, progress_bar
from rlkit.vlm import VISION_TOWER, freeze, load_model, lora, model_or_tiny, trainable_summary
from rlkit.vlm.processors import encode_rows, load_processor, suppressed_token_ids


@dataclass
class Config:
    model: str = "tiny"
    """Directory or hub id of a model; "tiny" builds one of 0.7M parameters and warms it up for a few seconds."""
    task: str = "digits"
    """A built-in task, a .jsonl or .parquet file with question, answer and image columns, or module:function."""
    rollout: str = "hf"
    """What samples: hf (the trained model itself), vllm (in this process), vllm_server or sglang (at `servers`)."""
    servers: tuple[str, ...] = ()
    """URLs of the servers; python -m rlkit.rollout.serve starts some."""
    out: str = ""
    """The run's directory; runs/dapo-<task>-seed<seed> by default, numbered if that holds a run."""
    resume: bool = False
    """Go on from the newest checkpoint in the run's directory."""
    trackers: tuple[str, ...] = ()
    """Told the metrics beside the run's own files: tensorboard, wandb, mlflow, trackio, ...; see rlkit.tracking."""
    watchdog: float = 600.0
    """Seconds in one phase after which the phases of all ranks are printed; 0: never."""
    seed: int = 0
    """Of the data order, the sampling noise and the tiny model."""

    steps: int = 150
    """Batches that are trained on."""
    prompts_per_step: int = 32
    """Prompts in a batch, over all ranks: groups whose rewards differ."""
    prompts_per_draw: int = 48
    """Prompts that are asked at once until there are enough such groups."""
    max_num_gen_batches: int = 3
    """Most draws for one batch."""
    group_size: int = 16
    """Answers to each prompt."""
    mini_batches: int = 2
    """Pieces of a batch, by prompts; each is an optimizer step."""
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
    """Linear warm-up, in optimizer steps; after it the rate falls linearly to a twentieth."""
    clip_low: float = 0.2
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float = 0.28
    """The ratio is clipped at 1 + clip_high."""
    overlong_buffer: int = 2
    """The last tokens before max_new_tokens over which an answer's penalty grows. 0: no penalty."""
    overlong_penalty_factor: float = 1.0
    """The penalty of an answer of max_new_tokens."""
    tis_cap: float = 2.0
    """Weights that correct for a sampler which differs from the trainer are cut here; they are 1 with hf."""
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
        if not 1 <= cfg.mini_batches <= cfg.prompts_per_step:
            raise ValueError(f"mini_batches: from 1 to the {cfg.prompts_per_step} prompts, came {cfg.mini_batches}")
        task = load_task(cfg.task)
        name = f"dapo-{task.name}-seed{cfg.seed}"
        out = Path(cfg.out) if cfg.out else new_directory("runs", name, resume=cfg.resume)
        judge = Judge(task.reward, threads=cfg.reward_threads)
        run = Run(out, asdict(cfg), resume=cfg.resume, writes=rank == 0, trackers=cfg.trackers, watchdog=cfg.watchdog)
        engine, rollout, processor = set_up(cfg, task, out)
        saved = checkpoints(out / "checkpoints") if cfg.resume else []
        state = engine.load_checkpoint(saved[-1]) if saved else {"step": 0, "draws": 0}
    except ValueError as error:
        sys.exit(f"dapo: {error}")
    start, draws = state["step"], state["draws"]  # draws of all steps: where in the data the run is
    run.start_at(start)
    mine = slice(engine.data_parallel_rank, None, engine.data_parallel_size)  # this rank's share of rows
    max_tokens = cfg.max_prompt_tokens or engine.config.get_text_config().max_position_embeddings - cfg.max_new_tokens
    heldout, bad = encode_rows(processor, list(enumerate(task.heldout))[mine], max_tokens=max_tokens)

    def evaluate(when: str) -> list:
        """Greedy answers to the held-out rows, shared among the ranks; a row that cannot be judged counts as wrong."""
        run.phase("evaluate")
        rollout.wake_up()
        rollout.update_weights(engine.get_per_tensor_param())
        samples = rollout.generate(heldout, Sampling(cfg.max_new_tokens, temperature=0.0), written=judge.take)
        rollout.sleep()
        rewards, *_ = judge.result()
        right, count, lost = engine.global_sum(torch.tensor([rewards.nansum(), len(rewards), len(bad)])).tolist()
        accuracy = right / max(count, 1)
        run.evaluation(**{f"accuracy_{when}": accuracy}, heldout=int(count), heldout_skipped=int(lost))
        if rank == 0:
            print(f"held-out accuracy {when}: {accuracy:.3f} ({count:.0f} rows)", flush=True)
        return judged(samples, rewards)

    if start == 0:
        evaluate("before")

    def loss_fn(out, mb):  # out.logprobs [B, T]; mb.total_tokens counts the whole mini-batch, on all ranks
        old = mb.old_logprobs if cfg.mini_batches > 1 else out.logprobs.detach()
        loss = clipped_policy_loss(out.logprobs, old, mb.advantages, mb.mask, cfg.clip_low, cfg.clip_high)
        loss = loss * importance_weights(old, mb.rollout_logprobs, mb.mask, cap=cfg.tis_cap)
        metrics = {
            "entropy": token_mean(out.entropy, mb.mask, mb.total_tokens),
            **ratio_stats(out.logprobs, old, mb.mask, mb.advantages, cfg.clip_low, cfg.clip_high, mb.total_tokens),
            **mismatch_stats(old, mb.rollout_logprobs, mb.mask, mb.total_tokens),
        }
        return token_mean(loss, mb.mask, mb.total_tokens), metrics

    canary = Canary(cfg.max_mismatch)
    progress = progress_bar(start, cfg.steps, show=rank == 0)
    for step in progress:
        run.phase("hand_over")
        rollout.wake_up()
        rollout.update_weights(engine.get_per_tensor_param())
        samples, drawn, lost, asked, judging = [], [], 0, 0, 0.0
        for draw in range(cfg.max_num_gen_batches):
            run.phase("generate")
            rows = step_rows(task.train, draws, cfg.prompts_per_draw, cfg.seed)[mine]
            rows = [(draw * cfg.prompts_per_draw + i, row) for i, row in rows]
            prompts, skipped = encode_rows(processor, rows, max_tokens=max_tokens)
            for message in skipped:
                progress.write(f"skipped: {message}")
            sampling = Sampling(cfg.max_new_tokens, cfg.temperature, seed=(cfg.seed, draws))
            answers = rollout.generate(prompts, sampling, n=cfg.group_size, written=judge.take)
            draws, asked, lost = draws + 1, asked + len(answers), lost + len(skipped)
            run.phase("reward")  # what was not judged while others were written
            rewards, parts, seconds = judge.result()  # [B]; nan = could not be judged
            samples, drawn, judging = samples + judged(answers, rewards), [*drawn, parts], judging + seconds
            rewards, ids = torch.tensor([s.reward for s in samples]), group_ids(samples)
            teaches = torch.zeros((draw + 1) * cfg.prompts_per_draw, dtype=torch.long)
            teaches[ids[informative_groups(rewards, ids)]] = 1
            groups = engine.global_sum(teaches).nonzero()[:, 0].tolist()  # of all ranks
            if len(groups) >= cfg.prompts_per_step:
                break
        rollout.sleep()
        parts = {name: torch.cat([part[name] for part in drawn]) for name in drawn[0]}
        stats = reward_stats(rewards, ids, engine.global_sum)  # of all that was drawn, to compare with other recipes
        asked, known, lost = engine.global_sum(torch.tensor([asked, len(samples), lost])).tolist()
        if known < max(1.0, (1 - cfg.max_unjudged) * asked):
            sys.exit(f"dapo: step {step}: only {known:.0f} of {asked:.0f} answers could be judged; see the log")
        if not groups:
            progress.write(f"step {step}: all groups of {asked:.0f} answers have equal rewards: the run ends here")
            break
        chosen = np.array(groups[: cfg.prompts_per_step])
        batch = collate([sample for sample in samples if sample.group_id in chosen])
        lengths = batch.mask.sum(1)
        penalty = overlong_penalty(lengths, cfg.max_new_tokens, cfg.overlong_buffer, cfg.overlong_penalty_factor)
        batch.add(advantages=grpo_advantages(batch.rewards + penalty, batch.group_ids))  # [B]
        counts = [lengths.sum(), penalty.sum(), len(batch), batch_flops(engine.config, batch)]
        tokens, penalties, trained, flops = engine.global_sum(torch.tensor(counts, dtype=torch.float64)).tolist()
        run.phase("train")
        if cfg.mini_batches > 1:
            batch.add(old_logprobs=engine.infer_batch(batch)["logprobs"])
        updates, order = [], np.random.default_rng((cfg.seed, step)).permutation(chosen)
        for i in range(min(cfg.mini_batches, len(order))):  # the same prompts in each, whatever the number of ranks
            part = order[i :: cfg.mini_batches]
            rows = [row for row, group in enumerate(batch.group_ids.tolist()) if group in part]
            part = rebalance_across_ranks(batch.select(rows), engine.data_parallel_group)
            updates.append(engine.train_batch(part, loss_fn, outputs=("logprobs", "entropy")))
        metrics = {n: (max if n.endswith("/max") else fmean)([u[n] for u in updates]) for n in updates[0]}
        if wrong := canary(metrics["mismatch/abs_dlogp"]):
            sys.exit(f"dapo: step {step}: {wrong}")

        run.log(step, {
            **stats, "reward/overlong": penalties / trained, **metrics, "tokens": tokens, "unjudged": asked - known,
            "skipped_rows": lost, "groups/drawn": (draw + 1) * cfg.prompts_per_draw, "groups/differ": len(groups),
            "groups/trained": len(chosen), "flops": flops * ((2 if cfg.lora_rank else 3) + (cfg.mini_batches > 1)),
            **part_means(parts, engine.global_sum), "time/judging": judging,
        })  # fmt: skip
        progress.set_postfix(reward=f"{stats['reward/mean']:.2f}", entropy=f"{metrics['entropy']:.2f}", draws=draw + 1)
        if (step + 1) % cfg.save_every == 0 or step + 1 == cfg.steps:
            run.phase("checkpoint")
            engine.save_checkpoint(out / "checkpoints" / f"step_{step + 1}", {"step": step + 1, "draws": draws})
            keep_newest(out / "checkpoints", 2)
    shown = evaluate("after")
    engine.export_hf(out / "model")
    run.close()
    if rank == 0:
        page = write_report(out, sorted(shown, key=lambda s: s.reward)[:40], title=name)
        print(f"results: {page}, {out / 'metrics.jsonl'}; model: {out / 'model'}")


def set_up(cfg: Config, task: Task, out: Path):
    """The trained engine, the sampler and the processor."""
    path = model_or_tiny(cfg.model, out / "init", task.train, seed=cfg.seed)
    processor = load_processor(path, trust_remote_code=cfg.trust_remote_code)
    model = load_model(path, trust_remote_code=cfg.trust_remote_code)
    suppressed = suppressed_token_ids(model.config, getattr(processor, "tokenizer", processor))
    if cfg.freeze_vision_tower:
        freeze(model, VISION_TOWER)
    if cfg.lora_rank:
        model = lora(model, cfg.lora_rank, cfg.lora_alpha, cfg.target_modules, cfg.exclude_modules)
    if dist.get_rank() == 0:
        print(trainable_summary(model), flush=True)
    updates, warm = max(1, cfg.steps * cfg.mini_batches), max(1, cfg.warmup_steps)
    engine = make_engine(
        cfg.engine, "language_model", model=model, processor=processor, suppressed_token_ids=suppressed,
        optimizer=lambda params: AdamW(params, lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0),
        scheduler=lambda opt: LambdaLR(opt, lambda i: min((i + 1) / warm, max(0.05, 1 - i / updates))),
        max_grad_norm=cfg.max_grad_norm, enable_gradient_checkpointing=cfg.enable_gradient_checkpointing,
        micro_batch_tokens=cfg.micro_batch_tokens, use_remove_padding=cfg.use_remove_padding,
        temperature=cfg.temperature, use_fused_kernels=cfg.use_fused_kernels, **cfg.parallel,
    )  # fmt: skip
    rollout = make_rollout(
        cfg.rollout, engine.gathered, model=path, processor=processor, urls=cfg.servers,
        gpu_memory_utilization=cfg.gpu_memory_utilization, model_parallel_group=engine.model_parallel_group,
    )  # fmt: skip
    return engine, rollout, processor


if __name__ == "__main__":
    main(tyro.cli(Config, use_underscores=True, description=__doc__))
    dist.destroy_process_group()
