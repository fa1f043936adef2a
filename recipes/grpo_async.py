"""GRPO with samplers of their own: servers write the next batch while this one is trained on.

    torchrun --nproc-per-node=1 recipes/grpo_async.py          # a tiny Qwen2.5-VL and one server, all on the CPU
    python -m rlkit.rollout.serve --model Qwen/Qwen2.5-VL-7B-Instruct --count 4 --port 8000         # on 4 GPUs, and
    torchrun --nproc-per-node=4 recipes/grpo_async.py --model Qwen/Qwen2.5-VL-7B-Instruct --task train.jsonl \\
        --servers http://127.0.0.1:8000 http://127.0.0.1:8001 http://127.0.0.1:8002 http://127.0.0.1:8003 \\
        --max_staleness 2 --max_new_tokens 1024 --lr 1e-6                                          # on 4 others

How it differs from grpo_vlm.py, and from the papers (one step off: https://arxiv.org/abs/2410.18252; bounded staleness
and answers that go on under new weights: AReaL, https://arxiv.org/abs/2505.24298):
- a batch is asked for before the weights that it will train are there: its tokens are at most `max_staleness` updates
  old, and the bound is kept by not asking, never by throwing answers away.
- weights go to the servers while they write; an answer goes on under them, and its version is that of its oldest token.
- old log-probabilities are the trainer's of this moment, and truncated importance weights against the sampler's correct
  for the rest (AReaL's decoupled objective has them too, without the cut). There is no KL term.
"""

import sys
from collections import deque
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import tyro
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers.utils.logging import disable_progress_bar

from rlkit.advantages import grpo_advantages
from rlkit.data import Task, collate, group_ids, judged, load_task, part_means, reward_stats, score, step_rows
from rlkit.data.judging import score_as_written
from rlkit.engines import make_engine
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.engines.checkpoint import checkpoints, keep_newest
from rlkit.engines.distributed import init_distributed
from rlkit.engines.flops import batch_flops
from rlkit.losses import clipped_policy_loss, importance_weights, mismatch_stats, ratio_stats, token_mean
from rlkit.report import write_report
from rlkit.rollout import Ahead, Canary, Sampling, fresh_gap, make_rollout
from rlkit.rollout.serve import serving
from rlkit.tracking import Run, new_directory, progress_bar
from rlkit.vlm import VISION_TOWER, freeze, load_model, lora, model_or_tiny, trainable_summary
from rlkit.vlm.processors import encode_rows, load_processor, suppressed_token_ids


@dataclass
class Config:
    model: str = "tiny"
    """Directory or hub id of a model; "tiny" builds one of 0.7M parameters and warms it up for a few seconds."""
    task: str = "digits"
    """A built-in task, a .jsonl or .parquet file with question, answer and image columns, or module:function."""
    rollout: str = "vllm_server"
    """What runs at `servers`: vllm_server or sglang."""
    servers: tuple[str, ...] = ()
    """URLs of servers of this model; without any, one vLLM server is started here."""
    max_staleness: int = 1
    """Most updates between the weights that wrote a token and those that are trained with it; 0 takes turns."""
    out: str = ""
    """The run's directory; runs/grpo_async-<task>-seed<seed> by default, numbered if that holds a run."""
    resume: bool = False
    """Go on from the newest checkpoint in the run's directory."""
    trackers: tuple[str, ...] = ()
    """Told the metrics beside the run's own files: tensorboard, wandb, mlflow, trackio, ...; see rlkit.tracking."""
    watchdog: float = 600.0
    """Seconds in one phase after which the phases of all ranks are printed; 0: never."""
    seed: int = 0
    """Of the data order, the sampling noise and the tiny model."""

    steps: int = 130
    """Batches that are sampled."""
    prompts_per_step: int = 32
    """Prompts in a batch, over all ranks."""
    group_size: int = 16
    """Answers to each prompt."""
    reward_threads: int = 8
    """Prompts whose answers are judged at once, while others are being written and the model trains."""
    max_new_tokens: int = 4
    """Longest answer."""
    max_prompt_tokens: int = 0
    """Longest prompt, images expanded; a longer one is skipped and counted. 0: what the model's context leaves."""
    temperature: float = 1.0
    """Of the sampler, and of the distribution that is trained."""

    lr: float = 1e-3
    """Peak learning rate; LoRA and large models want less, about 1e-5 and 1e-6."""
    warmup_steps: int = 10
    """Linear warm-up; after it the rate falls linearly to a twentieth."""
    clip_low: float = 0.2
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float = 0.28
    """The ratio is clipped at 1 + clip_high."""
    tis_cap: float = 2.0
    """Weights that correct for tokens of older weights are cut here."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""

    freeze_vision_tower: bool = False
    """Train the language model alone."""
    lora_rank: int = 0
    """Rank of LoRA adapters, merged on their way to the servers; 0 trains the weights themselves."""
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
    threads: int = 1
    """CPU threads of a process."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""

    save_every: int = 50
    """Steps between checkpoints; the newest two are kept."""
    max_unjudged: float = 0.2
    """Stop when a larger share of a batch's answers could not be judged."""
    max_mismatch: float = 1.0
    """Stop when sampler and trainer differ by more in mean |dlogp|: staleness explains less. Answers to a few fixed
    prompts, by weights that were just sent, may differ by ten times what rounding makes."""


def main(cfg: Config, stack: ExitStack) -> None:
    torch.set_num_threads(cfg.threads)
    init_distributed()
    disable_progress_bar()  # of loading and saving; the run has its own
    rank = dist.get_rank()
    try:
        task = load_task(cfg.task)
        name = f"grpo_async-{task.name}-seed{cfg.seed}"
        out = Path(cfg.out) if cfg.out else new_directory("runs", name, resume=cfg.resume)
        run = Run(out, asdict(cfg), resume=cfg.resume, writes=rank == 0, trackers=cfg.trackers, watchdog=cfg.watchdog)
        engine, rollout, processor = set_up(cfg, task, out, stack)
        saved = checkpoints(out / "checkpoints") if cfg.resume else []
        start = engine.load_checkpoint(saved[-1])["step"] if saved else 0
    except (RuntimeError, ValueError) as error:
        sys.exit(f"grpo_async: {error}")
    run.start_at(start)
    mine = slice(engine.data_parallel_rank, None, engine.data_parallel_size)  # this rank's share of rows
    max_tokens = cfg.max_prompt_tokens or engine.config.get_text_config().max_position_embeddings - cfg.max_new_tokens
    heldout, bad = encode_rows(processor, list(enumerate(task.heldout))[mine], max_tokens=max_tokens)

    def evaluate(when: str) -> list:
        """Greedy answers to the held-out rows, shared among the ranks; a row that cannot be judged counts as wrong."""
        run.phase("evaluate")
        samples = rollout.generate(heldout, Sampling(cfg.max_new_tokens, temperature=0.0))
        rewards = score(task.reward, samples, threads=cfg.reward_threads)
        right, count, lost = engine.global_sum(torch.tensor([rewards.nansum(), len(rewards), len(bad)])).tolist()
        accuracy = right / max(count, 1)
        run.evaluation(**{f"accuracy_{when}": accuracy}, heldout=int(count), heldout_skipped=int(lost))
        if rank == 0:
            print(f"held-out accuracy {when}: {accuracy:.3f} ({count:.0f} rows)", flush=True)
        return judged(samples, rewards)

    canary = Canary(cfg.max_mismatch)

    def see_that_weights_arrived(step: int) -> None:
        run.phase("canary")
        sampling = Sampling(cfg.max_new_tokens, cfg.temperature, (cfg.seed,))
        if wrong := canary(fresh_gap(rollout, engine, heldout[:4], sampling)):
            sys.exit(f"grpo_async: step {step}: {wrong}")

    rollout.update_weights(engine.get_per_tensor_param())
    see_that_weights_arrived(start)
    if start == 0:
        evaluate("before")
    progress = progress_bar(start, cfg.steps, show=rank == 0)
    skipped_rows: deque[int] = deque()  # of each batch that was asked for and is not trained on yet

    def batches():
        """Prompts of each step, and how to sample them; read on when it is time to ask for the next."""
        for step in range(start, cfg.steps):
            rows = step_rows(task.train, step, cfg.prompts_per_step, cfg.seed)[mine]
            prompts, skipped = encode_rows(processor, rows, max_tokens=max_tokens)
            for message in skipped:
                progress.write(f"skipped: {message}")
            skipped_rows.append(len(skipped))
            yield prompts, Sampling(cfg.max_new_tokens, cfg.temperature, (cfg.seed, step))

    def loss_fn(out, mb):  # out.logprobs [B, T]; mb.total_tokens counts the whole batch, on all ranks
        old = out.logprobs.detach()
        loss = clipped_policy_loss(out.logprobs, old, mb.advantages, mb.mask, cfg.clip_low, cfg.clip_high)
        loss = loss * importance_weights(old, mb.rollout_logprobs, mb.mask, cap=cfg.tis_cap)
        metrics = {
            "entropy": token_mean(out.entropy, mb.mask, mb.total_tokens),
            "staleness": token_mean(mb.staleness[:, None].expand(mb.mask.shape), mb.mask, mb.total_tokens),
            "staleness/max": mb.staleness.max() if len(mb) else mb.staleness.sum(),
            **ratio_stats(out.logprobs, old, mb.mask, mb.advantages, cfg.clip_low, cfg.clip_high, mb.total_tokens),
            **mismatch_stats(old, mb.rollout_logprobs, mb.mask, mb.total_tokens),
        }
        return token_mean(loss, mb.mask, mb.total_tokens), metrics

    submit = score_as_written(rollout.submit, task.reward, threads=cfg.reward_threads)
    sampler = SimpleNamespace(submit=submit, update_weights=rollout.update_weights)
    ahead = Ahead(sampler, batches(), n=cfg.group_size, max_staleness=cfg.max_staleness)
    run.phase("generate")  # what is waited for, and rewards that are not there yet
    for step, (answers, rewards, parts, judging) in enumerate(ahead, start):  # rewards [B]; nan = not judged
        run.phase("train")
        samples = judged(answers, rewards)
        rewards = rewards[~rewards.isnan()]
        age = torch.tensor([float(rollout.version - sample.version) for sample in samples])
        batch = collate(samples, advantages=grpo_advantages(rewards, group_ids(samples)), staleness=age)
        batch = rebalance_across_ranks(batch, engine.data_parallel_group)
        lost = skipped_rows.popleft()
        counts = [len(answers), len(samples), lost, batch.mask.sum(), batch_flops(engine.config, batch)]
        asked, known, lost, tokens, flops = engine.global_sum(torch.tensor(counts, dtype=torch.float64)).tolist()
        if known < max(1.0, (1 - cfg.max_unjudged) * asked):
            sys.exit(f"grpo_async: step {step}: only {known:.0f} of {asked:.0f} answers could be judged; see the log")
        metrics = engine.train_batch(batch, loss_fn, outputs=("logprobs", "entropy"))
        if metrics["mismatch/abs_dlogp"] > cfg.max_mismatch:
            sys.exit(f"grpo_async: step {step}: the sampler's logprobs differ from the trainer's by "
                     f"{metrics['mismatch/abs_dlogp']:.2f} a token: its weights are not the trainer's")  # fmt: skip
        run.phase("hand_over")
        ahead.update_weights(engine.get_per_tensor_param())

        stats = reward_stats(batch.rewards, batch.group_ids, engine.global_sum)
        run.log(step, {
            **stats, **part_means(parts, engine.global_sum), **metrics, "tokens": tokens,
            "flops": flops * (2 if cfg.lora_rank else 3), "unjudged": asked - known, "skipped_rows": lost,
            "time/judging": judging,
        })  # fmt: skip
        progress.update()
        progress.set_postfix(reward=f"{stats['reward/mean']:.2f}", staleness=f"{metrics['staleness']:.1f}")
        if (step + 1) % cfg.save_every == 0 or step + 1 == cfg.steps:
            run.phase("checkpoint")
            engine.save_checkpoint(out / "checkpoints" / f"step_{step + 1}", {"step": step + 1})
            keep_newest(out / "checkpoints", 2)
        if step == start or (step + 1) % cfg.save_every == 0:  # it waits for a turn among the answers under way
            see_that_weights_arrived(step)
        run.phase("generate")

    progress.close()
    shown = evaluate("after")
    engine.export_hf(out / "model")
    run.close()
    if rank == 0:
        page = write_report(out, sorted(shown, key=lambda s: s.reward)[:40], title=name)
        print(f"results: {page}, {out / 'metrics.jsonl'}; model: {out / 'model'}")


def set_up(cfg: Config, task: Task, out: Path, stack: ExitStack):
    """The trained engine, the sampler on its servers, and the processor."""
    rank = dist.get_rank()
    path = model_or_tiny(cfg.model, out / "init", task.train, seed=cfg.seed)
    urls = [list(cfg.servers)]
    gpus = torch.cuda.device_count()
    shared = not cfg.servers and 0 < gpus <= dist.get_world_size()  # a GPU, between a server and a rank: not by NCCL
    if not cfg.servers and rank == 0:
        print(f"starting a server, its log is in {out}", flush=True)
        options = [] if gpus else ["--kv-cache-memory-bytes", str(256 << 20)]
        if shared:
            options = ["--gpu-memory-utilization", "0.4", "--weight-transfer-config", '{"backend": "rlkit_gloo"}']
        urls = [list(stack.enter_context(serving(path, logs=out, options=options)))]
    dist.broadcast_object_list(urls, 0)
    processor = load_processor(path, trust_remote_code=cfg.trust_remote_code)
    model = load_model(path, trust_remote_code=cfg.trust_remote_code)
    suppressed = suppressed_token_ids(model.config, getattr(processor, "tokenizer", processor))
    if cfg.freeze_vision_tower:
        freeze(model, VISION_TOWER)
    if cfg.lora_rank:
        model = lora(model, cfg.lora_rank, cfg.lora_alpha, cfg.target_modules, cfg.exclude_modules)
    if rank == 0:
        print(trainable_summary(model), flush=True)
    warm = max(1, cfg.warmup_steps)
    engine = make_engine(
        cfg.engine, "language_model", model=model, processor=processor, suppressed_token_ids=suppressed,
        optimizer=lambda params: AdamW(params, lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0),
        scheduler=lambda opt: LambdaLR(opt, lambda i: min((i + 1) / warm, max(0.05, 1 - i / cfg.steps))),
        max_grad_norm=cfg.max_grad_norm, micro_batch_tokens=cfg.micro_batch_tokens, temperature=cfg.temperature,
        use_remove_padding=cfg.use_remove_padding, use_fused_kernels=cfg.use_fused_kernels,
        enable_gradient_checkpointing=cfg.enable_gradient_checkpointing, **cfg.parallel,
    )  # fmt: skip
    if engine.model_parallel_group is not None:
        raise ValueError("parallel: ranks that share rows would be sent different answers; grpo_vlm.py takes turns")
    transfer = "gloo" if shared else None
    rollout = make_rollout(cfg.rollout, model=path, processor=processor, urls=urls[0], transfer=transfer)
    stack.callback(rollout.close)
    return engine, rollout, processor


if __name__ == "__main__":
    with ExitStack() as stack:  # a server that was started here ends with the run
        main(tyro.cli(Config, use_underscores=True, description=__doc__), stack)
    dist.destroy_process_group()
