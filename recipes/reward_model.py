"""Reward model: a scalar head that scores whole answers, trained on pairs of which one is better (Bradley-Terry).

    torchrun --nproc-per-node=1 recipes/reward_model.py               # a tiny Qwen2.5-VL learns to judge read digits
    torchrun --nproc-per-node=8 recipes/reward_model.py --model Qwen/Qwen2.5-VL-7B-Instruct --task pairs.parquet \\
        --lora_rank 32 --exclude_modules ".*visual.*" --lr 1e-4 --steps 1000

Rows have `question` (or `prompt`), `chosen`, `rejected` and maybe `image` and `margin`, in the formats of TRL,
UltraFeedback and RLAIF-V. A task without pairs gets them: its answer is chosen, another row's answer rejected.
`rlkit.engines.value_head.load_value_model` reads the model that comes out.

How it differs from the paper (InstructGPT, https://arxiv.org/abs/2203.02155, section 3.5):
- pairs come alone; the paper puts all pairs of a prompt's answers in one batch.
- `margin`, a number a row, is Llama 2's (arXiv 2307.09288 eq. 2), and `centre_coef` a regulariser of the rewards' level
  (arXiv 2312.09244), which Bradley-Terry leaves free; the paper subtracts the mean afterwards.
- the head is zero at first, so that all scores are; it is read behind the token that ends the answer.
- fine-tuning comes before: `--model` may be what `sft.py` made, and the tiny one is fine-tuned when it is built.
"""

import sys
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import tyro
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers.utils.logging import disable_progress_bar

from rlkit.data import Sample, Task, collate, step_rows
from rlkit.data.pairs import answered, asking, load_pairs, pair
from rlkit.engines import make_engine
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.engines.checkpoint import checkpoints, keep_newest
from rlkit.engines.distributed import init_distributed
from rlkit.engines.flops import batch_flops
from rlkit.engines.value_head import load_value_model, scoring_batch, with_value_head
from rlkit.losses import bradley_terry_loss, preference_stats, reward_centring_loss
from rlkit.report import write_report
from rlkit.rollout.sampling import end_tokens
from rlkit.tracking import Run, new_directory, progress_bar
from rlkit.vlm import VISION_TOWER, encode, freeze, load_model, load_processor, lora, model_or_tiny, trainable_summary


@dataclass
class Config:
    model: str = "tiny"
    """Directory or hub id of a model; "tiny" builds one of 0.7M parameters and fine-tunes it for 15 seconds."""
    task: str = "digits"
    """A built-in task, a .jsonl or .parquet file (question, chosen, rejected, image), or module:function."""
    out: str = ""
    """The run's directory; runs/reward_model-<task>-seed<seed> by default, numbered if that holds a run."""
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
    """Pairs in a batch, over all ranks."""
    max_tokens: int = 0
    """Longest prompt with an answer, images expanded; a longer one is skipped and counted. 0: the model's context."""
    centre_coef: float = 0.0
    """Weight of the regulariser that holds rewards around 0, e.g. 0.01."""

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
    enable_gradient_checkpointing: bool = False
    """Recompute activations in backward."""
    micro_batch_tokens: int = 16384
    """Most tokens in one forward."""
    threads: int = 1
    """CPU threads of a process. With more, sums round differently from run to run, and no run repeats exactly."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""

    save_every: int = 50
    """Steps between checkpoints; the newest two are kept."""


def pair_loss(out, mb, *, centre_coef: float = 0.0):
    """Mean loss of the batch's pairs, whose chosen answers are in the even rows and their rejected ones behind them."""
    chosen, rejected = out.values.sum(1)[0::2], out.values.sum(1)[1::2]  # a row's one value is its score
    pairs = (mb.total_sequences / 2).clamp(min=1)
    values = bradley_terry_loss(chosen, rejected, mb.margin[0::2]) + centre_coef * reward_centring_loss(
        chosen, rejected
    )
    return values.sum() / pairs, preference_stats(chosen, rejected, pairs)


def main(cfg: Config) -> None:
    torch.set_num_threads(cfg.threads)
    init_distributed()
    disable_progress_bar()  # of loading and saving; the run has its own
    rank = dist.get_rank()
    try:
        task = load_pairs(cfg.task)
        name = f"reward_model-{task.name}-seed{cfg.seed}"
        out = Path(cfg.out) if cfg.out else new_directory("runs", name, resume=cfg.resume)
        run = Run(out, asdict(cfg), resume=cfg.resume, writes=rank == 0, trackers=cfg.trackers, watchdog=cfg.watchdog)
        engine, processor, ends = set_up(cfg, task, out)
        saved = checkpoints(out / "checkpoints") if cfg.resume else []
        start = engine.load_checkpoint(saved[-1])["step"] if saved else 0
    except ValueError as error:
        sys.exit(f"reward_model: {error}")
    run.start_at(start)
    mine = slice(engine.data_parallel_rank, None, engine.data_parallel_size)  # this rank's share of rows
    max_tokens = cfg.max_tokens or engine.config.get_text_config().max_position_embeddings
    loss_fn = partial(pair_loss, centre_coef=cfg.centre_coef)

    def encode_pairs(rows) -> tuple[list[Sample], list[str]]:
        """Two samples a row, chosen and rejected, and a message for each row that was skipped."""
        samples, skipped = [], []
        for number, row in rows:
            try:
                messages, *answers = pair(row)
                row = {**row, "margin": float(row.get("margin") or 0.0)}
                prompt = encode(processor, asking(row, messages), group_id=number)
                samples += answered(prompt, processor, answers, ends, max_tokens)
            except ValueError as error:
                skipped.append(str(error))
        return samples, skipped

    def collate_pairs(samples):
        """Whole rows are scored; pairs stay in one micro-batch."""
        margins = torch.tensor([sample.row["margin"] for sample in samples])
        return scoring_batch(collate(samples, micro_batch_group=torch.arange(len(samples)) // 2, margin=margins))

    shown, bad = encode_pairs(list(enumerate(task.heldout))[mine])
    heldout = collate_pairs(shown)
    pairs, lost = engine.global_sum(torch.tensor([len(shown) // 2, len(bad)])).tolist()

    def evaluate() -> tuple[dict[str, float], list[Sample]]:
        """Loss of the held-out pairs, the share that is told apart, and this rank's answers with their scores."""
        run.phase("evaluate")
        values = engine.infer_batch(heldout)["values"]
        loss, stats = loss_fn(SimpleNamespace(values=values), heldout)
        sums = torch.stack([loss, stats["preference/accuracy"]]) * (len(shown) // 2)
        loss, right = engine.global_sum(sums).tolist()
        scored = [replace(s, reward=r) for s, r in zip(shown, values.sum(1).tolist(), strict=True)]
        return {"accuracy": right / max(pairs, 1), "heldout_loss": loss / max(pairs, 1)}, scored

    if start == 0:
        before, _ = evaluate()
        run.evaluation(heldout=pairs, heldout_skipped=lost, **{f"{name}_before": x for name, x in before.items()})
        if rank == 0:
            print("before:", *(f"{name} {x:.4f}" for name, x in before.items()), flush=True)

    progress = progress_bar(start, cfg.steps, show=rank == 0)
    for step in progress:
        run.phase("encode")
        samples, skipped = encode_pairs(step_rows(task.train, step, cfg.prompts_per_step, cfg.seed)[mine])
        for message in skipped:
            progress.write(f"skipped: {message}")
        batch = rebalance_across_ranks(collate_pairs(samples), engine.data_parallel_group)
        counts = [len(samples) // 2, len(skipped), batch.mask.sum(), batch_flops(engine.config, batch, head=False)]
        known, lost, tokens, flops = engine.global_sum(torch.tensor(counts)).tolist()
        if not known:
            sys.exit(f"reward_model: step {step}: none of its {lost} rows can be trained on; see the log")
        run.phase("train")
        metrics = engine.train_batch(batch, loss_fn)
        flops *= 2 if cfg.lora_rank else 3  # frozen weights have no gradient
        run.log(step, {**metrics, "tokens": tokens, "flops": flops, "skipped_rows": lost})
        progress.set_postfix(loss=f"{metrics['loss']:.3f}", right=f"{metrics['preference/accuracy']:.2f}")
        if (step + 1) % cfg.save_every == 0 or step + 1 == cfg.steps:
            run.phase("checkpoint")
            engine.save_checkpoint(out / "checkpoints" / f"step_{step + 1}", {"step": step + 1})
            keep_newest(out / "checkpoints", 2)

    after, answers = evaluate()
    run.evaluation(steps=cfg.steps, **{f"{name}_after": x for name, x in after.items()})
    engine.export_hf(out / "model")
    run.close()
    if rank == 0:
        page = write_report(out, answers[:40], title=name)
        print("after:", *(f"{name} {x:.4f}" for name, x in after.items()))
        print(f"results: {page}, {out / 'metrics.jsonl'}; model: {out / 'model'}")


def set_up(cfg: Config, task: Task, out: Path):
    """The engine with a scalar head, the processor, and the tokens that end an answer."""
    path = model_or_tiny(cfg.model, out / "init", task.train, seed=cfg.seed, warm_up_steps=200, label_noise=0.0)
    processor = load_processor(path, trust_remote_code=cfg.trust_remote_code)
    if cfg.lora_rank:  # which freezes all there is, so the head comes after
        model = load_model(path, trust_remote_code=cfg.trust_remote_code)
        model = lora(model, cfg.lora_rank, cfg.lora_alpha, cfg.target_modules, cfg.exclude_modules)
        model = with_value_head(model)
    else:
        model = load_value_model(path, trust_remote_code=cfg.trust_remote_code)
    if cfg.freeze_vision_tower:
        freeze(model, VISION_TOWER)
    if dist.get_rank() == 0:
        print(trainable_summary(model), flush=True)
    warm, steps = max(1, cfg.warmup_steps), max(1, cfg.steps)
    engine = make_engine(
        cfg.engine,
        "value_model",
        model=model,
        processor=processor,
        optimizer=lambda params: AdamW(params, lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0),
        scheduler=lambda opt: LambdaLR(opt, lambda i: min((i + 1) / warm, max(0.05, 1 - i / steps))),
        max_grad_norm=cfg.max_grad_norm,
        micro_batch_tokens=cfg.micro_batch_tokens,
        use_remove_padding=cfg.use_remove_padding,
        enable_gradient_checkpointing=cfg.enable_gradient_checkpointing,
        **cfg.parallel,
    )
    ends = end_tokens(getattr(processor, "tokenizer", processor), model.generation_config.eos_token_id)
    return engine, processor, ends


if __name__ == "__main__":
    main(tyro.cli(Config, use_underscores=True, description=__doc__))
    dist.destroy_process_group()
