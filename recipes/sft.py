"""Supervised fine-tuning of vision-language and language models: imitate the answers that a file shows.

    torchrun --nproc-per-node=1 recipes/sft.py                        # a tiny Qwen2.5-VL learns to read digits
    torchrun --nproc-per-node=8 recipes/sft.py --model Qwen/Qwen2.5-VL-7B-Instruct --task train.parquet \\
        --lora_rank 32 --exclude_modules ".*visual.*" --max_new_tokens 0 --lr 1e-4 --steps 2000

Rows have `question`, `answer` and maybe `image`, or `messages`, a chat whose last message is the assistant's.

How it differs from the paper (InstructGPT, https://arxiv.org/abs/2203.02155, section 3.5):
- the loss is the mean over the answers' tokens of the whole batch, so that a long answer counts for more than a short
  one; `sequence_mean` instead of `token_mean` below weighs answers alike.
- only what the assistant says is trained, in each of its turns and with the token that ends it; never the user's words.
- steps are counted instead of epochs (the paper has 16), the rate falls linearly (a cosine), and there is no dropout
  (0.2).
- the model is kept at its last step, not at the one that a reward model likes best.
"""

import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
import tyro
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers.utils.logging import disable_progress_bar

from rlkit.data import Sample, Task, collate, score, step_rows
from rlkit.data.pairs import asking, chat, chat_sample, load_chats
from rlkit.engines import make_engine
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.engines.checkpoint import checkpoints, keep_newest
from rlkit.engines.distributed import init_distributed
from rlkit.engines.flops import batch_flops
from rlkit.losses import token_mean, token_sum
from rlkit.report import write_report
from rlkit.rollout import Sampling, make_rollout
from rlkit.rollout.sampling import end_tokens
from rlkit.tracking import Run, new_directory, progress_bar
from rlkit.vlm import VISION_TOWER, encode, freeze, load_model, load_processor, lora, model_or_tiny, trainable_summary


@dataclass
class Config:
    model: str = "tiny"
    """Directory or hub id of a model; "tiny" builds one of 0.7M parameters and warms it up for a few seconds."""
    task: str = "digits"
    """A built-in task, a .jsonl or .parquet file (question, answer, image; or messages), or module:function."""
    out: str = ""
    """The run's directory; runs/sft-<task>-seed<seed> by default, numbered if that holds a run."""
    resume: bool = False
    """Go on from the newest checkpoint in the run's directory."""
    trackers: tuple[str, ...] = ()
    """Told the metrics beside the run's own files: tensorboard, wandb, mlflow, trackio, ...; see rlkit.tracking."""
    watchdog: float = 600.0
    """Seconds in one phase after which the phases of all ranks are printed; 0: never."""
    seed: int = 0
    """Of the data order and the tiny model."""

    steps: int = 200
    """Optimizer steps."""
    prompts_per_step: int = 32
    """Rows in a batch, over all ranks."""
    max_tokens: int = 0
    """Longest row, images expanded; a longer one is skipped and counted. 0: what the model's context holds."""
    max_new_tokens: int = 4
    """Longest answer to a held-out row. 0: none is asked for, and the held-out loss alone is measured."""

    lr: float = 7e-4
    """Peak learning rate; LoRA and large models want less, about 1e-4 and 1e-5."""
    warmup_steps: int = 10
    """Linear warm-up; after it the rate falls linearly to a twentieth."""
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
    """Share of a GPU's memory up to which the cache may fill it when held-out rows are answered."""
    threads: int = 1
    """CPU threads of a process. With more, sums round differently from run to run, and no run repeats exactly."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""

    save_every: int = 50
    """Steps between checkpoints; the newest two are kept."""


def loss_fn(out, mb):
    """Mean negative log-likelihood of the answers' tokens, over the whole batch on all ranks."""
    return token_mean(-out.logprobs, mb.mask, mb.total_tokens), {}


def main(cfg: Config) -> None:
    torch.set_num_threads(cfg.threads)
    init_distributed()
    disable_progress_bar()  # of loading and saving; the run has its own
    rank = dist.get_rank()
    try:
        task = load_chats(cfg.task)
        name = f"sft-{task.name}-seed{cfg.seed}"
        out = Path(cfg.out) if cfg.out else new_directory("runs", name, resume=cfg.resume)
        run = Run(out, asdict(cfg), resume=cfg.resume, writes=rank == 0, trackers=cfg.trackers, watchdog=cfg.watchdog)
        engine, rollout, processor, ends = set_up(cfg, task, out)
        saved = checkpoints(out / "checkpoints") if cfg.resume else []
        start = engine.load_checkpoint(saved[-1])["step"] if saved else 0
    except ValueError as error:
        sys.exit(f"sft: {error}")
    run.start_at(start)
    mine = slice(engine.data_parallel_rank, None, engine.data_parallel_size)  # this rank's share of rows
    max_tokens = cfg.max_tokens or engine.config.get_text_config().max_position_embeddings

    def encode_chats(rows) -> tuple[list[Sample], list[Sample], list[str]]:
        """The rows' prompts, the same with their answers, and one message for each row that had to be skipped."""
        prompts, samples, skipped = [], [], []
        for number, row in rows:
            try:
                messages = chat(row)
                prompt = encode(processor, asking(row, messages[:-1]), group_id=number)
                samples.append(chat_sample(prompt, processor, messages, ends, max_tokens))
                prompts.append(prompt)
            except ValueError as error:
                skipped.append(str(error))
        return prompts, samples, skipped

    asked, shown, bad = encode_chats(list(enumerate(task.heldout))[mine])
    heldout = collate(shown)
    rows, lost = engine.global_sum(torch.tensor([len(asked), len(bad)])).tolist()

    def evaluate() -> tuple[dict[str, float], list[Sample]]:
        """Loss of the held-out answers; greedy answers to their prompts, shared among the ranks."""
        run.phase("evaluate")
        loss = token_sum(-engine.infer_batch(heldout)["logprobs"], heldout.mask)
        answers, rewards = [], torch.zeros(0)
        if cfg.max_new_tokens:
            answers = rollout.generate(asked, Sampling(cfg.max_new_tokens, temperature=0.0))
            rewards = score(task.reward, answers)
        counts = torch.stack([loss, heldout.mask.sum(), rewards.nansum()])
        loss, tokens, right = engine.global_sum(counts).tolist()
        found = {"accuracy": right / max(rows, 1)} if cfg.max_new_tokens else {}
        answers = [replace(a, reward=r) for a, r in zip(answers, rewards.tolist(), strict=True)]
        return {**found, "heldout_loss": loss / max(tokens, 1)}, answers

    if start == 0:
        before, _ = evaluate()
        run.evaluation(heldout=rows, heldout_skipped=lost, **{f"{name}_before": x for name, x in before.items()})
        if rank == 0:
            print("before:", *(f"{name} {x:.4f}" for name, x in before.items()), f"({rows} held-out rows)", flush=True)

    progress = progress_bar(start, cfg.steps, show=rank == 0)
    for step in progress:
        run.phase("encode")
        _, samples, skipped = encode_chats(step_rows(task.train, step, cfg.prompts_per_step, cfg.seed)[mine])
        for message in skipped:
            progress.write(f"skipped: {message}")
        batch = rebalance_across_ranks(collate(samples), engine.data_parallel_group)
        counts = [len(samples), len(skipped), batch.mask.sum(), batch_flops(engine.config, batch)]
        known, lost, tokens, flops = engine.global_sum(torch.tensor(counts)).tolist()
        if not known:
            sys.exit(f"sft: step {step}: none of its {lost} rows can be trained on; see the log")
        run.phase("train")
        metrics = engine.train_batch(batch, loss_fn)
        flops *= 2 if cfg.lora_rank else 3  # frozen weights have no gradient
        run.log(step, {**metrics, "tokens": tokens, "flops": flops, "skipped_rows": lost})
        progress.set_postfix(loss=f"{metrics['loss']:.3f}")
        if (step + 1) % cfg.save_every == 0 or step + 1 == cfg.steps:
            run.phase("checkpoint")
            engine.save_checkpoint(out / "checkpoints" / f"step_{step + 1}", {"step": step + 1})
            keep_newest(out / "checkpoints", 2)

    after, answers = evaluate()
    run.evaluation(steps=cfg.steps, **{f"{name}_after": x for name, x in after.items()})
    engine.export_hf(out / "model")
    run.close()
    if rank == 0:
        page = write_report(out, sorted(answers, key=lambda s: s.reward)[:40], title=name)
        print("after:", *(f"{name} {x:.4f}" for name, x in after.items()))
        print(f"results: {page}, {out / 'metrics.jsonl'}; model: {out / 'model'}")


def set_up(cfg: Config, task: Task, out: Path):
    """The trained engine, what answers, the processor, and the tokens that end an answer."""
    path = model_or_tiny(cfg.model, out / "init", task.train, seed=cfg.seed)
    processor = load_processor(path, trust_remote_code=cfg.trust_remote_code)
    model = load_model(path, trust_remote_code=cfg.trust_remote_code)
    ends = end_tokens(getattr(processor, "tokenizer", processor), model.generation_config.eos_token_id)
    if cfg.freeze_vision_tower:
        freeze(model, VISION_TOWER)
    if cfg.lora_rank:
        model = lora(model, cfg.lora_rank, cfg.lora_alpha, cfg.target_modules, cfg.exclude_modules)
    if dist.get_rank() == 0:
        print(trainable_summary(model), flush=True)
    warm, steps = max(1, cfg.warmup_steps), max(1, cfg.steps)
    engine = make_engine(
        cfg.engine,
        "language_model",
        model=model,
        processor=processor,
        optimizer=lambda params: AdamW(params, lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0),
        scheduler=lambda opt: LambdaLR(opt, lambda i: min((i + 1) / warm, max(0.05, 1 - i / steps))),
        max_grad_norm=cfg.max_grad_norm,
        micro_batch_tokens=cfg.micro_batch_tokens,
        use_remove_padding=cfg.use_remove_padding,
        use_fused_kernels=cfg.use_fused_kernels,
        enable_gradient_checkpointing=cfg.enable_gradient_checkpointing,
        **cfg.parallel,
    )
    memory = cfg.gpu_memory_utilization
    rollout = make_rollout("hf", engine.gathered, processor=processor, gpu_memory_utilization=memory)
    return engine, rollout, processor, ends


if __name__ == "__main__":
    main(tyro.cli(Config, use_underscores=True, description=__doc__))
    dist.destroy_process_group()
