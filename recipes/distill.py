"""On-policy distillation: a student answers, and a teacher says of every token how likely it finds it.

    torchrun --nproc-per-node=1 recipes/distill.py                    # a tiny Qwen2.5-VL learns digits from another one
    torchrun --nproc-per-node=8 recipes/distill.py --model Qwen/Qwen2.5-VL-3B-Instruct --task train.jsonl \\
        --teacher Qwen/Qwen2.5-VL-32B-Instruct --max_new_tokens 1024 --group_size 4 --lr 1e-6

Teacher and student share tokenizer and image processor. Answers are not judged in training: the reward that is logged
and the held-out accuracy only tell how far it has come.

How it differs from the papers:
- GKD (https://arxiv.org/abs/2306.13649, eq. 2 and algorithm 1) compares whole distributions. Engines give the sampled
  token's log-probability alone, so the reverse KL is followed by policy gradient, with an advantage for each token: the
  teacher's log-probability less the student's, as in https://thinkingmachines.ai/blog/on-policy-distillation/.
  Its expectation is the gradient of each token's reverse KL (`rlkit.losses.reverse_kl_loss`), its variance is larger.
- what a token does to later ones is left out (a discount of 0), as in both; MiniLLM (arXiv 2306.08543) has it.
- all answers are the student's, none the data's, and the data's own answers are not trained on (lambda 1 of GKD).
- with updates_per_batch > 1 the ratio to the policy that sampled is clipped, as in PPO.
"""

import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import tyro
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers.utils.logging import disable_progress_bar

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
    """Directory or hub id of the student; "tiny" builds one of 0.7M parameters and warms it up for a few seconds."""
    teacher: str = "tiny"
    """Directory or hub id of the teacher; "tiny" builds one as large and trains it on the task's answers."""
    task: str = "digits"
    """A built-in task, a .jsonl or .parquet file with question, answer and image columns, or module:function."""
    rollout: str = "hf"
    """What samples: hf (the trained model itself), vllm (in this process), vllm_server or sglang (at `servers`)."""
    servers: tuple[str, ...] = ()
    """URLs of the servers; python -m rlkit.rollout.serve starts some."""
    out: str = ""
    """The run's directory; runs/distill-<task>-seed<seed> by default, numbered if that holds a run."""
    resume: bool = False
    """Go on from the newest checkpoint in the run's directory."""
    trackers: tuple[str, ...] = ()
    """Told the metrics beside the run's own files: tensorboard, wandb, mlflow, trackio, ...; see rlkit.tracking."""
    watchdog: float = 600.0
    """Seconds in one phase after which the phases of all ranks are printed; 0: never."""
    seed: int = 0
    """Of the data order, the sampling noise and the tiny model."""

    steps: int = 120
    """Batches that are sampled."""
    prompts_per_step: int = 64
    """Prompts in a batch, over all ranks."""
    group_size: int = 4
    """Answers to each prompt."""
    updates_per_batch: int = 1
    """Optimizer steps on each batch."""
    reward_threads: int = 8
    """Prompts whose answers are judged at once, while others are written. 0: behind them, in the main thread."""
    max_new_tokens: int = 4
    """Longest answer."""
    max_prompt_tokens: int = 0
    """Longest prompt, images expanded; a longer one is skipped and counted. 0: what the model's context leaves."""
    temperature: float = 1.0
    """Of the sampler, and of the distributions that are compared."""

    lr: float = 7e-4
    """Peak learning rate; LoRA and large models want less, about 1e-5 and 1e-6."""
    warmup_steps: int = 10
    """Linear warm-up; after it the rate falls linearly to a twentieth."""
    clip_low: float = 0.2
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float = 0.28
    """The ratio is clipped at 1 + clip_high."""
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
    max_mismatch: float = 0.3
    """Stop when sampler and trainer differ by more in mean |dlogp|, or by ten times what they did at first."""


def token_loss(out, mb, cfg: Config):
    """The advantage of a token is by how much the teacher finds it likelier than the student that sampled it."""
    old = mb.old_logprobs if cfg.updates_per_batch > 1 else out.logprobs.detach()
    advantages = mb.teacher_logprobs - old
    policy = clipped_policy_loss(out.logprobs, old, advantages, mb.mask, cfg.clip_low, cfg.clip_high)
    policy = policy * importance_weights(old, mb.rollout_logprobs, mb.mask, cap=cfg.tis_cap)
    metrics = {
        "kl": token_mean(-advantages, mb.mask, mb.total_tokens),
        "entropy": token_mean(out.entropy, mb.mask, mb.total_tokens),
        **ratio_stats(out.logprobs, old, mb.mask, advantages, cfg.clip_low, cfg.clip_high, mb.total_tokens),
        **mismatch_stats(old, mb.rollout_logprobs, mb.mask, mb.total_tokens),
    }
    return token_mean(policy, mb.mask, mb.total_tokens), metrics


def main(cfg: Config) -> None:
    torch.set_num_threads(cfg.threads)
    init_distributed()
    disable_progress_bar()  # of loading and saving; the run has its own
    rank = dist.get_rank()
    try:
        task = load_task(cfg.task)
        name = f"distill-{task.name}-seed{cfg.seed}"
        out = Path(cfg.out) if cfg.out else new_directory("runs", name, resume=cfg.resume)
        judge = Judge(task.reward, threads=cfg.reward_threads)
        run = Run(out, asdict(cfg), resume=cfg.resume, writes=rank == 0, trackers=cfg.trackers, watchdog=cfg.watchdog)
        engine, teacher, rollout, processor = set_up(cfg, task, out)
        saved = checkpoints(out / "checkpoints") if cfg.resume else []
        start = engine.load_checkpoint(saved[-1])["step"] if saved else 0
    except ValueError as error:
        sys.exit(f"distill: {error}")
    run.start_at(start)
    mine = slice(engine.data_parallel_rank, None, engine.data_parallel_size)  # this rank's share of rows
    config = engine.config.get_text_config()
    max_tokens = cfg.max_prompt_tokens or config.max_position_embeddings - cfg.max_new_tokens

    heldout, bad = encode_rows(processor, list(enumerate(task.heldout))[mine], max_tokens=max_tokens)

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

    def evaluate() -> tuple[dict, list]:
        """Greedy answers to the held-out rows, shared among the ranks; a row that cannot be judged counts as wrong."""
        samples, rewards, *_ = generate(heldout, Sampling(cfg.max_new_tokens, temperature=0.0), phase="evaluate")
        right, count, lost = engine.global_sum(torch.tensor([rewards.nansum(), len(rewards), len(bad)])).tolist()
        found = {"accuracy": right / max(count, 1), "heldout": int(count), "skipped": int(lost)}
        return found, judged(samples, rewards)

    if start == 0:
        before, _ = evaluate()
        run.evaluation(accuracy_before=before["accuracy"], heldout=before["heldout"], heldout_skipped=before["skipped"])
        if rank == 0:
            print(f"held-out accuracy before: {before['accuracy']:.3f} ({before['heldout']} rows)", flush=True)

    loss_fn = partial(token_loss, cfg=cfg)
    canary = Canary(cfg.max_mismatch)
    progress = progress_bar(start, cfg.steps, show=rank == 0)
    for step in progress:
        rows = step_rows(task.train, step, cfg.prompts_per_step, cfg.seed)[mine]
        prompts, skipped = encode_rows(processor, rows, max_tokens=max_tokens)
        for message in skipped:
            progress.write(f"skipped: {message}")
        sampling = Sampling(cfg.max_new_tokens, cfg.temperature, seed=(cfg.seed, step))
        answers, rewards, parts, judging = generate(prompts, sampling, n=cfg.group_size)  # [B]; only looked at

        batch = rebalance_across_ranks(collate(answers), engine.data_parallel_group)
        passes = cfg.updates_per_batch * (2 if cfg.lora_rank else 3) + (cfg.updates_per_batch > 1)
        flops = passes * batch_flops(engine.config, batch) + batch_flops(teacher.config, batch)
        counts = [len(answers), len(skipped), batch.mask.sum(), flops]
        asked, lost, tokens, flops = engine.global_sum(torch.tensor(counts, dtype=torch.float64)).tolist()
        if not asked:
            sys.exit(f"distill: step {step}: none of its {lost:.0f} rows can be asked about; see the log")
        run.phase("train")
        batch.add(teacher_logprobs=teacher.infer_batch(batch)["logprobs"])
        if cfg.updates_per_batch > 1:
            batch.add(old_logprobs=engine.infer_batch(batch)["logprobs"])
        for _ in range(cfg.updates_per_batch):
            metrics = engine.train_batch(batch, loss_fn, outputs=("logprobs", "entropy"))
        if wrong := canary(metrics["mismatch/abs_dlogp"]):
            sys.exit(f"distill: step {step}: {wrong}")

        run.log(step, {
            **reward_stats(rewards, group_ids(answers), engine.global_sum), **part_means(parts, engine.global_sum),
            **metrics, "tokens": tokens, "flops": flops, "skipped_rows": lost, "time/judging": judging,
        })  # fmt: skip
        progress.set_postfix(kl=f"{metrics['kl']:.3f}", entropy=f"{metrics['entropy']:.2f}")
        if (step + 1) % cfg.save_every == 0 or step + 1 == cfg.steps:
            run.phase("checkpoint")
            engine.save_checkpoint(out / "checkpoints" / f"step_{step + 1}", {"step": step + 1})
            keep_newest(out / "checkpoints", 2)

    after, shown = evaluate()
    results = run.evaluation(accuracy_after=after["accuracy"], steps=cfg.steps)
    engine.export_hf(out / "model")
    run.close()
    if rank == 0:
        page = write_report(out, sorted(shown, key=lambda s: s.reward)[:40], title=name)
        print(f"held-out accuracy after: {after['accuracy']:.3f} (before: {results.get('accuracy_before', 0.0):.3f})")
        print(f"results: {page}, {out / 'metrics.jsonl'}; model: {out / 'model'}")


def set_up(cfg: Config, task: Task, out: Path):
    """The trained engine, the teacher, the sampler and the processor."""
    path = model_or_tiny(cfg.model, out / "init", task.train, seed=cfg.seed)
    better = {"seed": cfg.seed + 1, "warm_up_steps": 300, "label_noise": 0.0}
    source = model_or_tiny(cfg.teacher, out / "teacher", task.train, **better)
    processor = load_processor(path, trust_remote_code=cfg.trust_remote_code)
    model, knows = (load_model(name, trust_remote_code=cfg.trust_remote_code) for name in (path, source))
    theirs = load_processor(source, trust_remote_code=cfg.trust_remote_code)
    tokenizer = getattr(processor, "tokenizer", processor)
    if getattr(theirs, "tokenizer", theirs).get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"teacher {source!r}: its tokens are not the student's, so it cannot score its answers")
    shared = {
        "processor": processor, "temperature": cfg.temperature, "micro_batch_tokens": cfg.micro_batch_tokens,
        "use_remove_padding": cfg.use_remove_padding, "use_fused_kernels": cfg.use_fused_kernels, **cfg.parallel,
    }  # fmt: skip
    # the output layers may differ in size
    suppressed, teacher_suppressed = (suppressed_token_ids(m.config, tokenizer) for m in (model, knows))
    if cfg.freeze_vision_tower:
        freeze(model, VISION_TOWER)
    if cfg.lora_rank:
        model = lora(model, cfg.lora_rank, cfg.lora_alpha, cfg.target_modules, cfg.exclude_modules)
    if dist.get_rank() == 0:
        print(trainable_summary(model), flush=True)
    updates, warm = max(1, cfg.steps * cfg.updates_per_batch), max(1, cfg.warmup_steps)
    engine = make_engine(
        cfg.engine,
        "language_model",
        model=model,
        suppressed_token_ids=suppressed,
        optimizer=lambda params: AdamW(params, lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0),
        scheduler=lambda opt: LambdaLR(opt, lambda i: min((i + 1) / warm, max(0.05, 1 - i / updates))),
        max_grad_norm=cfg.max_grad_norm,
        enable_gradient_checkpointing=cfg.enable_gradient_checkpointing,
        **shared,
    )
    teacher = make_engine(cfg.engine, "language_model", model=knows, suppressed_token_ids=teacher_suppressed, **shared)
    rollout = make_rollout(
        cfg.rollout, engine.gathered, model=path, processor=processor, urls=cfg.servers,
        gpu_memory_utilization=cfg.gpu_memory_utilization, model_parallel_group=engine.model_parallel_group,
    )  # fmt: skip
    return engine, teacher, rollout, processor


if __name__ == "__main__":
    main(tyro.cli(Config, use_underscores=True, description=__doc__))
    dist.destroy_process_group()
