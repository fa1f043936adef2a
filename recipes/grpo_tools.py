"""GRPO over several turns: ask, let the policy call a tool that shows it an image, reward what it makes of that.

    torchrun --nproc-per-node=1 recipes/grpo_tools.py         # a tiny Qwen2.5-VL learns where to zoom
    torchrun --nproc-per-node=8 recipes/grpo_tools.py --model Qwen/Qwen2.5-VL-7B-Instruct --task my_tasks:charts \\
        --tool my_tasks:crop --max_turns 4 --max_new_tokens 512 --max_response_tokens 4096 --lora_rank 32 --lr 1e-5

A tool, or an environment with a reward of its own, is a plain function; rlkit.rollout.agent shows three.

How it differs from the paper (DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1),
beside what grpo_vlm.py says:
- an answer is an episode of turns; all of its turns share its advantage, and what the tool said is masked.
- an episode whose tool failed is left out of its group, as is one that could not be judged.
- no KL term unless `kl_coef` is given.
"""

import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers.utils.logging import disable_progress_bar

from rlkit.advantages import grpo_advantages
from rlkit.data import Judge, Task, collate, group_ids, judged, load_task, part_means, reward_stats, step_rows
from rlkit.engines import make_engine
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.engines.checkpoint import checkpoints, keep_newest
from rlkit.engines.distributed import init_distributed
from rlkit.engines.flops import batch_flops
from rlkit.losses import clipped_policy_loss, kl_k3, mismatch_stats, ratio_stats, token_mean
from rlkit.report import write_report
from rlkit.rollout import Canary, Sampling, make_rollout
from rlkit.rollout.agent import Observation, Scripted, run_episodes
from rlkit.rollout.image_tools import CALLS, careless_turn
from rlkit.tracking import Run, new_directory, progress_bar
from rlkit.vlm import VISION_TOWER, build_tiny, freeze, load_model, lora, trainable_summary
from rlkit.vlm.processors import encode_rows, load_processor, suppressed_token_ids


@dataclass
class Config:
    model: str = "tiny"  # directory or hub id; "tiny" builds one of 0.7M parameters and warms it up on the default task
    task: str = "rlkit.rollout.image_tools:zoomed_digits"  # module:function, a built-in, a .jsonl or .parquet file
    tool: str = "rlkit.rollout.image_tools:zoom"  # module:function, a step of rlkit.rollout.agent
    rollout: str = "hf"  # what samples: hf (the trained model itself), vllm (in this process), vllm_server or sglang
    servers: tuple[str, ...] = ()  # URLs of the servers; python -m rlkit.rollout.serve starts some
    out: str = ""  # the run's directory; runs/grpo_tools-<task>-seed<seed> by default, numbered if that holds a run
    resume: bool = False  # go on from the newest checkpoint in the run's directory
    trackers: tuple[str, ...] = ()  # told the metrics beside the run's own files: tensorboard, wandb, mlflow, trackio
    watchdog: float = 600.0  # seconds in one phase after which the phases of all ranks are printed; 0: never
    seed: int = 0  # of the data order, the sampling noise and the tiny model

    steps: int = 30  # batches that are sampled
    prompts_per_step: int = 32  # prompts in a batch, over all ranks
    group_size: int = 8  # episodes of each prompt
    updates_per_batch: int = 1  # optimizer steps on each batch
    reward_threads: int = 8  # prompts judged at once, while other episodes go on; 0: behind them, in the main thread
    max_turns: int = 2  # most turns that the policy writes
    max_new_tokens: int = 12  # longest turn
    max_response_tokens: int = 0  # longest episode behind its prompt, what the tool says included; 0: the context
    max_prompt_tokens: int = 0  # longest prompt, a longer one is skipped and counted; 0: what the context leaves
    tool_timeout: float = 60.0  # seconds for one call of the tool
    show_failures: bool = False  # show the policy that its tool failed; else the episode is left out
    role: str = "user"  # of what the tool says, in the chat template
    temperature: float = 1.0  # of the sampler, and of the distribution that is trained

    lr: float = 7e-4  # peak learning rate; LoRA and large models want less, about 1e-5 and 1e-6
    warmup_steps: int = 5  # linear warm-up; after it the rate falls linearly to a twentieth
    clip_low: float = 0.2  # the ratio is clipped at 1 - clip_low
    clip_high: float = 0.28  # the ratio is clipped at 1 + clip_high
    kl_coef: float = 0.0  # weight of the KL to the start; 0: it is not kept, and `kl` is measured from the sampler
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm

    freeze_vision_tower: bool = False  # train the language model alone
    lora_rank: int = 0  # of LoRA adapters; 0 trains the weights themselves
    lora_alpha: int = 32  # scale of the adapters, over their rank
    target_modules: str = "all-linear"  # modules that get adapters: all-linear, or a regular expression
    exclude_modules: str | None = ".*visual.*"  # regular expression of modules that get none
    engine: str = "fsdp2"  # what trains: fsdp2, megatron, or one of another package; see docs/engines.md
    parallel: dict[str, int] = field(default_factory=dict)  # ranks that share a model: tensor 2 pipeline 2
    use_remove_padding: bool = True  # pack rows without padding
    use_fused_kernels: bool = False  # logprobs from hidden states, without the logits tensor
    enable_gradient_checkpointing: bool = False  # recompute activations in backward
    micro_batch_tokens: int = 16384  # most tokens in one forward
    gpu_memory_utilization: float = 0.8  # share of a GPU's memory up to which the sampler's cache may fill it
    threads: int = 1  # CPU threads of a process; with more, sums round differently and no run repeats exactly
    trust_remote_code: bool = False  # run code that comes with the model

    save_every: int = 50  # steps between checkpoints; the newest two are kept
    max_unjudged: float = 0.2  # stop when a larger share of a batch's episodes could not be judged
    max_mismatch: float = 0.3  # stop where sampler and trainer differ by more in mean |dlogp|, or ten times the first


def main(cfg: Config) -> None:
    torch.set_num_threads(cfg.threads)
    init_distributed()
    disable_progress_bar()  # of loading and saving; the run has its own
    rank = dist.get_rank()
    try:
        task, tool = load_task(cfg.task), resolve_name(cfg.tool)
        judge = Judge(task.reward, threads=cfg.reward_threads)
        name = f"grpo_tools-{task.name}-seed{cfg.seed}"
        out = Path(cfg.out) if cfg.out else new_directory("runs", name, resume=cfg.resume)
        run = Run(out, asdict(cfg), resume=cfg.resume, writes=rank == 0, trackers=cfg.trackers, watchdog=cfg.watchdog)
        engine, reference, rollout, processor = set_up(cfg, task, tool, out)
        saved = checkpoints(out / "checkpoints") if cfg.resume else []
        start = engine.load_checkpoint(saved[-1])["step"] if saved else 0
    except (ImportError, AttributeError, ValueError) as error:
        sys.exit(f"grpo_tools: {error}")
    run.start_at(start)
    mine = slice(engine.data_parallel_rank, None, engine.data_parallel_size)  # this rank's share of rows
    context = engine.config.get_text_config().max_position_embeddings
    max_tokens = cfg.max_prompt_tokens or context - cfg.max_new_tokens

    def episodes(prompts, sampling, n=1, phase="generate"):
        run.phase("hand_over")
        rollout.wake_up()
        rollout.update_weights(engine.get_per_tensor_param())
        run.phase(phase)
        found = run_episodes(
            rollout, prompts, sampling, tool, processor=processor, n=n, max_turns=cfg.max_turns, max_tokens=context,
            max_response_tokens=cfg.max_response_tokens or None, timeout=cfg.tool_timeout, role=cfg.role,
            on_failure=(lambda error: Observation(str(error))) if cfg.show_failures else None,
            global_sum=engine.global_sum, written=judge.take,
        )  # fmt: skip
        rollout.sleep()
        run.phase("reward" if phase == "generate" else phase)  # what was not judged while others were written
        return found, *judge.result()

    heldout, bad = encode_rows(processor, list(enumerate(task.heldout))[mine], max_tokens=max_tokens)

    def evaluate(when: str) -> list:
        """Greedy episodes on the held-out rows, shared among the ranks; one that cannot be judged counts as wrong."""
        samples, rewards, *_ = episodes(heldout, Sampling(cfg.max_new_tokens, temperature=0.0), phase="evaluate")
        right, count, lost = engine.global_sum(torch.tensor([rewards.nansum(), len(rewards), len(bad)])).tolist()
        accuracy = right / max(count, 1)
        run.evaluation(**{f"accuracy_{when}": accuracy}, heldout=int(count), heldout_skipped=int(lost))
        if rank == 0:
            print(f"held-out accuracy {when}: {accuracy:.3f} ({count:.0f} rows)", flush=True)
        return judged(samples, rewards)

    if start == 0:
        evaluate("before")

    def loss_fn(out, mb):  # out.logprobs [B, T]; mb.total_tokens counts the policy's tokens in the batch, on all ranks
        old = mb.old_logprobs if cfg.updates_per_batch > 1 else out.logprobs.detach()
        policy = clipped_policy_loss(out.logprobs, old, mb.advantages, mb.mask, cfg.clip_low, cfg.clip_high)
        kl = kl_k3(out.logprobs, mb.ref_logprobs, mb.mask)
        metrics = {
            "kl": token_mean(kl, mb.mask, mb.total_tokens),
            "entropy": token_mean(out.entropy, mb.mask, mb.total_tokens),
            **ratio_stats(out.logprobs, old, mb.mask, mb.advantages, cfg.clip_low, cfg.clip_high, mb.total_tokens),
            **mismatch_stats(old, mb.rollout_logprobs, mb.mask, mb.total_tokens),
        }
        return token_mean(policy + cfg.kl_coef * kl, mb.mask, mb.total_tokens), metrics

    passes = cfg.updates_per_batch * (2 if cfg.lora_rank else 3) + (cfg.updates_per_batch > 1) + bool(cfg.kl_coef)
    canary = Canary(cfg.max_mismatch)
    progress = progress_bar(start, cfg.steps, show=rank == 0)
    for step in progress:
        rows = step_rows(task.train, step, cfg.prompts_per_step, cfg.seed)[mine]
        prompts, skipped = encode_rows(processor, rows, max_tokens=max_tokens)
        for message in skipped:
            progress.write(f"skipped: {message}")
        sampling = Sampling(cfg.max_new_tokens, cfg.temperature, seed=(cfg.seed, step))
        answers, rewards, parts, judging = episodes(prompts, sampling, n=cfg.group_size)  # [B]; nan: not judged

        samples = judged(answers, rewards)
        rewards = rewards[~rewards.isnan()]
        advantages = grpo_advantages(rewards, group_ids(samples))  # [B]
        batch = rebalance_across_ranks(collate(samples, advantages=advantages), engine.data_parallel_group)
        turns = sum(message["role"] == "assistant" for sample in samples for message in sample.row["messages"])
        aborted = sum(sample.finish_reason == "aborted" for sample in answers)  # by their tool; nobody judges them
        counts = [len(answers), aborted, len(samples), len(skipped), turns, batch.mask.sum()]
        counts = engine.global_sum(torch.tensor([*counts, batch_flops(engine.config, batch)], dtype=torch.float64))
        asked, aborted, known, lost, turns, tokens, flops = counts.tolist()
        if known < max(1.0, (1 - cfg.max_unjudged) * asked):
            sys.exit(f"grpo_tools: step {step}: only {known:.0f} of {asked:.0f} episodes could be judged, "
                     f"{aborted:.0f} were aborted by their tool; see the log")  # fmt: skip

        run.phase("train")
        batch.add(ref_logprobs=batch.rollout_logprobs)
        if cfg.kl_coef and cfg.lora_rank:
            with engine.disable_adapter():
                batch.add(ref_logprobs=engine.infer_batch(batch)["logprobs"])
        elif cfg.kl_coef:
            batch.add(ref_logprobs=reference.infer_batch(batch)["logprobs"])
        if cfg.updates_per_batch > 1:
            batch.add(old_logprobs=engine.infer_batch(batch)["logprobs"])
        for _ in range(cfg.updates_per_batch):
            metrics = engine.train_batch(batch, loss_fn, outputs=("logprobs", "entropy"))
        if wrong := canary(metrics["mismatch/abs_dlogp"]):
            sys.exit(f"grpo_tools: step {step}: {wrong}")

        stats = reward_stats(batch.rewards, batch.group_ids, engine.global_sum)
        run.log(step, {
            **stats, **part_means(parts, engine.global_sum), **metrics, "tokens": tokens, "flops": flops * passes,
            "time/judging": judging,
            "turns": turns / known, "aborted": aborted, "unjudged": asked - known, "skipped_rows": lost,
        })  # fmt: skip
        progress.set_postfix(reward=f"{stats['reward/mean']:.2f}", entropy=f"{metrics['entropy']:.2f}")
        if (step + 1) % cfg.save_every == 0 or step + 1 == cfg.steps:
            run.phase("checkpoint")
            engine.save_checkpoint(out / "checkpoints" / f"step_{step + 1}", {"step": step + 1})
            keep_newest(out / "checkpoints", 2)

    shown = sorted(evaluate("after"), key=lambda s: s.reward)[:40]
    engine.export_hf(out / "model")
    run.close()
    if rank == 0:
        page = write_report(out, [replace(sample, text=transcript(sample)) for sample in shown], title=name)
        print(f"results: {page}, {out / 'metrics.jsonl'}; model: {out / 'model'}")


def transcript(sample) -> str:
    """The episode behind its prompt, an image as [image]."""
    first = next(i for i, message in enumerate(sample.row["messages"]) if message["role"] == "assistant")
    parts = [message["content"] for message in sample.row["messages"][first:]]
    return " | ".join(p if isinstance(p, str) else "".join(x.get("text", "[image]") for x in p) for p in parts)


def warm_up(path: Path, task: Task, tool, cfg: Config, steps: int = 160) -> None:
    """A tiny Qwen2.5-VL that has imitated one who knows the tool and the digits, but mostly looks anywhere."""
    rank, world, raw = dist.get_rank(), dist.get_world_size(), path.with_name("raw")
    if rank == 0 and not raw.exists():
        print(f"building a tiny Qwen2.5-VL and warming it up: {path}", flush=True)
        words = [{**task.train[0], "answer": call} for call in CALLS]  # for the tokenizer
        build_tiny(raw, [*task.train, *words], seed=cfg.seed, warm_up_steps=0)
    dist.barrier()
    processor = load_processor(str(raw))
    engine = make_engine(
        "fsdp2", "language_model", model=load_model(str(raw)), processor=processor,
        optimizer=lambda params: AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0),
        scheduler=lambda opt: LambdaLR(opt, lambda i: min(1.0, (i + 1) / 10)),
    )  # fmt: skip
    rng = np.random.default_rng(cfg.seed)
    prompts, _ = encode_rows(processor, enumerate(task.train))
    scripted = Scripted(processor, lambda sample: careless_turn(sample, rng))
    shown = run_episodes(scripted, prompts, Sampling(cfg.max_new_tokens), tool, processor=processor)

    def loss_fn(out, mb):  # a call is ten tokens and soon learned, an answer one that is not: it weighs ten times
        answers = (mb.tokens == processor.image_token_id).cumsum(1) > 1  # behind the second image
        return -token_mean(out.logprobs * (1 + 9 * answers), mb.mask, mb.total_tokens), {}

    for _ in range(steps):
        chosen = rng.choice(len(shown), 32, replace=False)[rank::world]
        engine.train_batch(collate([shown[i] for i in chosen]), loss_fn)
    engine.export_hf(path)


def set_up(cfg: Config, task: Task, tool, out: Path):
    """The trained engine, the reference policy, the sampler and the processor."""
    path = cfg.model
    if path == "tiny":
        if cfg.task != Config.task or cfg.tool != Config.tool:
            raise ValueError('model "tiny": it knows the default task and tool alone; name a model for others')
        path = str(out / "init")
        if not Path(path).exists():
            warm_up(Path(path), task, tool, cfg)
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
    updates, warm = max(1, cfg.steps * cfg.updates_per_batch), max(1, cfg.warmup_steps)
    engine = make_engine(
        cfg.engine, "language_model", model=model,
        optimizer=lambda params: AdamW(params, lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0),
        scheduler=lambda opt: LambdaLR(opt, lambda i: min((i + 1) / warm, max(0.05, 1 - i / updates))),
        max_grad_norm=cfg.max_grad_norm, enable_gradient_checkpointing=cfg.enable_gradient_checkpointing, **shared,
    )  # fmt: skip
    reference = None
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
