"""KTO: learn from single answers that somebody marked good or bad, without pairs and without a reward model.

    torchrun --nproc-per-node=1 recipes/kto.py                        # a tiny Qwen2.5-VL learns to read digits
    torchrun --nproc-per-node=8 recipes/kto.py --model Qwen/Qwen2.5-VL-7B-Instruct --task marked.parquet \\
        --lora_rank 32 --exclude_modules ".*visual.*" --max_new_tokens 0 --lr 5e-6 --steps 1000

Rows have `question` (or `prompt`), `completion`, `label` (true or false) and maybe `image`, as TRL has them. Pairs
(`chosen`, `rejected`) are two rows each. A task of neither kind gets them: its answer is good, another row's bad.

How it differs from the paper (KTO, https://arxiv.org/abs/2402.01306, section 4.1):
- the baseline z_0 is taken once a step, of the prompts of the whole batch, over all ranks, each with the answer of the
  row behind it; the paper shifts answers within a micro-batch. So it does not depend on how a batch is split.
- the two kinds weigh the same however many there are of each; the paper has their weights, times their counts, between
  1 : 1 and 4 : 3: `--desirable_weight`.
- a little of the good answers' likelihood is in the loss, as in `dpo.py` and for its reason (`sft_coef`; 0 is the
  paper's, which has fine-tuned on answers before).
- without the baseline (`--no-baseline`) it is APO-zero for single answers (https://arxiv.org/abs/2408.06266).
- AdamW in place of RMSprop; the reference scores once a batch: a second engine, or the model without its LoRA.
"""

import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import tyro
from torch.optim import AdamW, lr_scheduler
from transformers.utils.logging import disable_progress_bar

from rlkit.data import Sample, Task, collate, score, step_rows
from rlkit.data.pairs import answered, asking, load_marked, marked
from rlkit.engines import make_engine
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.engines.checkpoint import checkpoints, keep_newest
from rlkit.engines.distributed import init_distributed
from rlkit.engines.flops import batch_flops
from rlkit.losses import kto_loss, sequence_logprobs, sequence_mean_logprobs
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
    """A built-in task, a .jsonl or .parquet file (question, completion, label, image), or module:function."""
    out: str = ""
    """The run's directory; runs/kto-<task>-seed<seed> by default, numbered if that holds a run."""
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
    prompts_per_step: int = 64
    """Answers in a batch, over all ranks."""
    max_tokens: int = 0
    """Longest prompt with an answer, images expanded; a longer one is skipped and counted. 0: the model's context."""
    max_new_tokens: int = 4
    """Longest answer to a held-out row. 0: none is asked for, and held-out answers alone are measured."""

    beta: float = 0.1
    """How close to the reference."""
    desirable_weight: float = 1.0
    """Weight of good answers."""
    undesirable_weight: float = 1.0
    """Weight of bad answers."""
    sft_coef: float = 0.1
    """Weight of the good answers' mean negative log-likelihood, as in dpo.py."""
    baseline: bool = True
    """Compare with how far the policy has moved on other answers; off: with 0."""

    lr: float = 7e-4
    """Peak learning rate; LoRA and large models want less, about 1e-5 and 5e-7."""
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


def answer_loss(out, mb, *, kl, good: float, cfg: Config):
    """Mean loss of the batch's answers, `good` of which are good; kl is z_0. The metrics are in nats.

    `marked/accuracy` is the share of the answers that have moved to the side of z_0 on which they belong.
    """
    logprobs, ref_logprobs = (sequence_logprobs(x, mb.mask) for x in (out.logprobs, mb.ref_logprobs))
    label, total = mb.label.bool(), mb.total_sequences.clamp(min=1)
    loss = kto_loss(logprobs, ref_logprobs, label, kl, cfg.beta, cfg.desirable_weight, cfg.undesirable_weight)
    loss = loss - cfg.sft_coef * label * sequence_mean_logprobs(out.logprobs, mb.mask)
    gains = (logprobs - ref_logprobs).detach()
    right = torch.where(label, gains > kl, gains < kl)
    return loss.sum() / total, {
        "marked/accuracy": right.sum() / total,
        "marked/good": (gains * label).sum() / max(good, 1),
        "marked/bad": (gains * ~label).sum() / (total - good).clamp(min=1),
    }


def main(cfg: Config) -> None:
    torch.set_num_threads(cfg.threads)
    init_distributed()
    disable_progress_bar()  # of loading and saving; the run has its own
    rank = dist.get_rank()
    try:
        task = load_marked(cfg.task)
        name = f"kto-{task.name}-seed{cfg.seed}"
        out = Path(cfg.out) if cfg.out else new_directory("runs", name, resume=cfg.resume)
        run = Run(out, asdict(cfg), resume=cfg.resume, writes=rank == 0, trackers=cfg.trackers, watchdog=cfg.watchdog)
        engine, reference, rollout, processor, ends = set_up(cfg, task, out)
        saved = checkpoints(out / "checkpoints") if cfg.resume else []
        start = engine.load_checkpoint(saved[-1])["step"] if saved else 0
    except ValueError as error:
        sys.exit(f"kto: {error}")
    run.start_at(start)
    mine = slice(engine.data_parallel_rank, None, engine.data_parallel_size)  # this rank's share of rows
    max_tokens = cfg.max_tokens or engine.config.get_text_config().max_position_embeddings

    def encode_marked(rows) -> tuple[list[Sample], list[Sample], list[Sample], list[bool], list[str]]:
        """Of this rank's share of the rows: prompts, their answers, the answers of the rows behind them, whether theirs
        are good, and a message for each row that was skipped."""
        prompts, samples, others, labels, skipped, read = [], [], [], [], [], []
        share = range(len(rows))[mine]
        for i, (number, row) in enumerate(rows):
            try:
                read.append((i, number, row, *marked(row)))
            except ValueError as error:
                skipped += [str(error)] * (i in share)
        for (i, number, row, messages, answer, good), behind in zip(read, read[1:] + read[:1], strict=True):
            try:
                if i in share:
                    prompt = encode(processor, asking(row, messages), group_id=number)
                    sample, other = answered(prompt, processor, [answer, behind[4]], ends, max_tokens)
                    prompts, samples, others = [*prompts, prompt], [*samples, sample], [*others, other]
                    labels.append(good)
            except ValueError as error:
                skipped.append(str(error))
        return prompts, samples, others, labels, skipped

    def referred(batch):
        """The reference scores its tokens."""
        with engine.disable_adapter() if cfg.lora_rank else nullcontext():
            return batch.add(ref_logprobs=(reference or engine).infer_batch(batch)["logprobs"])

    def baseline(others) -> torch.Tensor:
        """z_0: by how much the policy finds answers to other prompts likelier than the reference does; at least 0."""
        gains = sequence_logprobs(engine.infer_batch(others)["logprobs"] - others.ref_logprobs, others.mask)
        total, count = engine.global_sum(torch.stack([gains.sum(), torch.tensor(float(len(others)))]))
        return (total / count.clamp(min=1)).clamp(min=0)

    asked, shown, others, labels, bad = encode_marked(list(enumerate(task.heldout)))
    heldout = referred(collate(shown, label=torch.tensor(labels, dtype=torch.float32)))
    strangers = referred(collate(others)) if cfg.baseline else None
    count, good, lost = engine.global_sum(torch.tensor([len(asked), sum(labels), len(bad)])).tolist()

    def evaluate() -> tuple[dict[str, float], list[Sample]]:
        """Loss of the held-out answers; greedy answers to their prompts, shared among the ranks."""
        run.phase("evaluate")
        kl = baseline(strangers) if cfg.baseline else torch.tensor(0.0)
        loss, stats = answer_loss(SimpleNamespace(**engine.infer_batch(heldout)), heldout, kl=kl, good=good, cfg=cfg)
        answers, rewards = [], torch.zeros(0)
        if cfg.max_new_tokens:
            answers = rollout.generate(asked, Sampling(cfg.max_new_tokens, temperature=0.0))
            rewards = score(task.reward, answers)
        means = torch.stack([loss, stats["marked/accuracy"]]) * heldout.total_sequences / max(count, 1)
        sums = torch.stack([*means, rewards.nansum(), (~rewards.isnan()).sum()])
        loss, told, right, judged = engine.global_sum(sums).tolist()
        found = {"accuracy": right / count} if judged else {}
        answers = [replace(a, reward=r) for a, r in zip(answers, rewards.tolist(), strict=True)]
        return {**found, "heldout_loss": loss, "marked_accuracy": told}, answers

    if start == 0:
        before, _ = evaluate()
        run.evaluation(heldout=count, heldout_skipped=lost, **{f"{name}_before": x for name, x in before.items()})
        if rank == 0:
            print("before:", *(f"{name} {x:.4f}" for name, x in before.items()), flush=True)

    progress = progress_bar(start, cfg.steps, show=rank == 0)
    for step in progress:
        run.phase("encode")
        _, samples, others, labels, skipped = encode_marked(step_rows(task.train, step, cfg.prompts_per_step, cfg.seed))
        for message in skipped:
            progress.write(f"skipped: {message}")
        run.phase("train")
        batch = collate(samples, label=torch.tensor(labels, dtype=torch.float32))
        batch = referred(rebalance_across_ranks(batch, engine.data_parallel_group))
        counts = [len(samples), sum(labels), len(skipped), batch.mask.sum(), batch_flops(engine.config, batch)]
        known, good, lost, tokens, flops = engine.global_sum(torch.tensor(counts)).tolist()
        if not known:
            sys.exit(f"kto: step {step}: none of its {lost} rows can be trained on; see the log")
        kl = baseline(referred(collate(others))) if cfg.baseline else torch.tensor(0.0)
        metrics = engine.train_batch(batch, partial(answer_loss, kl=kl, good=good, cfg=cfg))
        flops *= (2 if cfg.lora_rank else 3) + 1 + 2 * cfg.baseline
        run.log(step, {**metrics, "kl": kl.item(), "tokens": tokens, "flops": flops, "skipped_rows": lost})
        progress.set_postfix(loss=f"{metrics['loss']:.3f}", told_apart=f"{metrics['marked/accuracy']:.2f}")
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
    """The trained engine, the reference policy, what answers, the processor, and the tokens that end an answer."""
    path = model_or_tiny(cfg.model, out / "init", task.train, seed=cfg.seed)
    processor = load_processor(path, trust_remote_code=cfg.trust_remote_code)
    model = load_model(path, trust_remote_code=cfg.trust_remote_code)
    ends = end_tokens(getattr(processor, "tokenizer", processor), model.generation_config.eos_token_id)
    shared = {
        "processor": processor, "micro_batch_tokens": cfg.micro_batch_tokens,
        "use_remove_padding": cfg.use_remove_padding, "use_fused_kernels": cfg.use_fused_kernels, **cfg.parallel,
    }  # fmt: skip
    if cfg.freeze_vision_tower:
        freeze(model, VISION_TOWER)
    if cfg.lora_rank:
        model = lora(model, cfg.lora_rank, cfg.lora_alpha, cfg.target_modules, cfg.exclude_modules)
    if dist.get_rank() == 0:
        print(trainable_summary(model), flush=True)
    warm, steps = max(1, cfg.warmup_steps), max(1, cfg.steps)
    engine = make_engine(
        cfg.engine, "language_model", model=model, max_grad_norm=cfg.max_grad_norm,
        enable_gradient_checkpointing=cfg.enable_gradient_checkpointing,
        optimizer=lambda params: AdamW(params, lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0),
        scheduler=lambda opt: lr_scheduler.LambdaLR(opt, lambda i: min((i + 1) / warm, max(0.05, 1 - i / steps))),
        **shared,
    )  # fmt: skip
    reference = None
    if not cfg.lora_rank:
        start = load_model(path, trust_remote_code=cfg.trust_remote_code)
        reference = make_engine(cfg.engine, "language_model", model=start, **shared)
    memory = cfg.gpu_memory_utilization
    rollout = make_rollout("hf", engine.gathered, processor=processor, gpu_memory_utilization=memory)
    return engine, reference, rollout, processor, ends


if __name__ == "__main__":
    main(tyro.cli(Config, use_underscores=True, description=__doc__))
    dist.destroy_process_group()
