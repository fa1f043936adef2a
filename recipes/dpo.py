"""DPO and its family: make the chosen of two answers likelier than the rejected one, without a reward model.

    torchrun --nproc-per-node=1 recipes/dpo.py                        # a tiny Qwen2.5-VL learns to read digits
    torchrun --nproc-per-node=8 recipes/dpo.py --model Qwen/Qwen2.5-VL-7B-Instruct --task pairs.parquet \\
        --lora_rank 32 --exclude_modules ".*visual.*" --max_new_tokens 0 --lr 5e-6 --steps 1000

Rows have `question` (or `prompt`), `chosen`, `rejected` and maybe `image`, in the formats of TRL, UltraFeedback and
RLAIF-V. A task without pairs gets them: its answer is chosen, another row's answer rejected.

How it differs from the paper (DPO, https://arxiv.org/abs/2305.18290, section 4):
- the paper first fine-tunes on the chosen answers (that is `sft.py`). Without it DPO alone tells pairs apart by making
  both answers less likely than a third, so a little of their likelihood is in the loss (`sft_coef`; 0 is the paper's).
- `--loss` names another function of rlkit.losses, each with its own paper. With `--normalise_length` ipo and dpo are
  what TRL calls ipo and sigmoid_norm. KTO and BCO, for single answers that are marked good or bad, are not here: they
  compare each with the mean of a whole batch, which a loss of micro-batches does not see; nor is AOT, which sorts it.
- AdamW in place of RMSprop; the reference scores once a batch: a second engine, or the model without its LoRA.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import tyro
from torch.optim import AdamW, lr_scheduler
from transformers.utils.logging import disable_progress_bar

from rlkit import losses
from rlkit.data import Sample, Task, collate, score, step_rows
from rlkit.data.pairs import answered, asking, load_pairs, pair
from rlkit.engines import make_engine
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.engines.checkpoint import checkpoints, keep_newest
from rlkit.engines.distributed import init_distributed
from rlkit.engines.flops import batch_flops
from rlkit.losses import preference_stats, sequence_logprobs, sequence_mean_logprobs
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
    """A built-in task, a .jsonl or .parquet file (question, chosen, rejected, image), or module:function."""
    out: str = ""
    """The run's directory; runs/dpo-<task>-seed<seed> by default, numbered if that holds a run."""
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
    max_new_tokens: int = 4
    """Longest answer to a held-out row. 0: none is asked for, and held-out pairs alone are measured."""

    loss: str = "dpo"
    """dpo, robust, ipo, hinge, apo_zero, apo_down, exo, nca, sppo, discopop, alpha_divergence, forward_kl, js; without
    a reference simpo, alphapo, orpo, slic."""
    beta: float | None = None
    """How close to the reference; the loss function's own default if it is not given."""
    loss_options: dict[str, float] = field(default_factory=dict)
    """The loss function's other arguments by name, e.g. gamma 0.5, alpha 0.1, label_smoothing 0.1."""
    normalise_length: bool = False
    """Mean log-probability of an answer's tokens in place of their sum."""
    sft_coef: float = 0.1
    """Weight of the chosen answers' mean negative log-likelihood; RPO's alpha (arXiv 2404.19733)."""

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


LOSSES = {
    "dpo": losses.dpo_loss, "robust": losses.robust_dpo_loss, "ipo": losses.ipo_loss, "hinge": losses.hinge_dpo_loss,
    "apo_zero": losses.apo_zero_loss, "apo_down": losses.apo_down_loss, "exo": losses.exo_loss,
    "nca": losses.nca_loss, "sppo": losses.sppo_loss, "discopop": losses.discopop_loss,
    "alpha_divergence": losses.alpha_divergence_dpo_loss, "forward_kl": losses.forward_kl_dpo_loss,
    "js": losses.js_dpo_loss, "simpo": losses.simpo_loss, "alphapo": losses.alphapo_loss, "orpo": losses.orpo_loss,
    "slic": losses.slic_loss,
}  # fmt: skip


def chosen_loss(cfg: Config) -> Callable:
    """The loss function with its options; the answers it takes by the names of its arguments, see `pair_loss`."""
    if cfg.loss not in LOSSES:
        raise ValueError(f"loss {cfg.loss!r}: expected one of {', '.join(LOSSES)}")
    options = {**({} if cfg.beta is None else {"beta": cfg.beta}), **cfg.loss_options}
    try:
        signature(LOSSES[cfg.loss]).bind_partial(**options)
    except TypeError as error:
        raise ValueError(f"loss {cfg.loss!r}: {error}") from error
    return partial(LOSSES[cfg.loss], **options)


def pair_loss(out, mb, *, loss: Callable, normalise_length: bool = False, sft_coef: float = 0.0):
    """Mean loss of the batch's pairs, whose chosen answers are in the even rows and their rejected ones behind them.

    The metrics tell in nats by how much the policy finds answers likelier than the reference does.
    """
    score_of = sequence_mean_logprobs if normalise_length else sequence_logprobs
    pairs, given = (mb.total_sequences / 2).clamp(min=1), {}
    for side, first in ("chosen", 0), ("rejected", 1):
        mask = mb.mask[first::2]
        given[side] = score_of(out.logprobs[first::2], mask)
        given[f"ref_{side}"] = score_of(mb.ref_logprobs[first::2], mask)
        given[f"{side}_lengths"] = mask.sum(1)
    values = loss(**{name: given[name] for name in signature(loss).parameters if name in given})
    values = values - sft_coef * sequence_mean_logprobs(out.logprobs[0::2], mb.mask[0::2])
    gains = [given[side] - given[f"ref_{side}"] for side in ("chosen", "rejected")]
    return values.sum() / pairs, preference_stats(*gains, pairs)


def main(cfg: Config) -> None:
    torch.set_num_threads(cfg.threads)
    init_distributed()
    disable_progress_bar()  # of loading and saving; the run has its own
    rank = dist.get_rank()
    try:
        task = load_pairs(cfg.task)
        name = f"dpo-{task.name}-seed{cfg.seed}"
        out = Path(cfg.out) if cfg.out else new_directory("runs", name, resume=cfg.resume)
        loss = chosen_loss(cfg)
        run = Run(out, asdict(cfg), resume=cfg.resume, writes=rank == 0, trackers=cfg.trackers, watchdog=cfg.watchdog)
        refers = "ref_chosen" in signature(loss).parameters
        engine, reference, rollout, processor, ends = set_up(cfg, task, out, refers)
        saved = checkpoints(out / "checkpoints") if cfg.resume else []
        start = engine.load_checkpoint(saved[-1])["step"] if saved else 0
    except ValueError as error:
        sys.exit(f"dpo: {error}")
    run.start_at(start)
    mine = slice(engine.data_parallel_rank, None, engine.data_parallel_size)  # this rank's share of rows
    max_tokens = cfg.max_tokens or engine.config.get_text_config().max_position_embeddings
    loss_fn = partial(pair_loss, loss=loss, normalise_length=cfg.normalise_length, sft_coef=cfg.sft_coef)

    def encode_pairs(rows) -> tuple[list[Sample], list[Sample], list[str]]:
        """The rows' prompts, two samples for each (chosen, rejected), and a message for each row that was skipped."""
        prompts, samples, skipped = [], [], []
        for number, row in rows:
            try:
                messages, *answers = pair(row)
                prompt = encode(processor, asking(row, messages), group_id=number)
                samples += answered(prompt, processor, answers, ends, max_tokens)
                prompts.append(prompt)
            except ValueError as error:
                skipped.append(str(error))
        return prompts, samples, skipped

    def referred(batch):
        """The same with what the reference makes of its tokens."""
        if not refers:
            return batch.add(ref_logprobs=torch.zeros(batch.tokens.shape))
        with engine.disable_adapter() if cfg.lora_rank else nullcontext():
            return batch.add(ref_logprobs=(reference or engine).infer_batch(batch)["logprobs"])

    asked, shown, bad = encode_pairs(list(enumerate(task.heldout))[mine])
    heldout = referred(collate(shown, micro_batch_group=torch.arange(len(shown)) // 2))
    pairs, lost = engine.global_sum(torch.tensor([len(asked), len(bad)])).tolist()

    def evaluate() -> tuple[dict[str, float], list[Sample]]:
        """Loss of the held-out pairs; greedy answers to their prompts, shared among the ranks."""
        run.phase("evaluate")
        loss, stats = loss_fn(SimpleNamespace(**engine.infer_batch(heldout)), heldout)
        answers, rewards = [], torch.zeros(0)
        if cfg.max_new_tokens:
            answers = rollout.generate(asked, Sampling(cfg.max_new_tokens, temperature=0.0))
            rewards = score(task.reward, answers)
        means = torch.stack([loss, stats["preference/accuracy"]]) * len(asked)
        sums = torch.stack([*means, rewards.nansum(), (~rewards.isnan()).sum()])
        loss, told, right, judged = engine.global_sum(sums).tolist()
        found = {"accuracy": right / pairs} if judged else {}
        answers = [replace(a, reward=r) for a, r in zip(answers, rewards.tolist(), strict=True)]
        return {**found, "heldout_loss": loss / max(pairs, 1), "preference_accuracy": told / max(pairs, 1)}, answers

    if start == 0:
        before, _ = evaluate()
        run.evaluation(heldout=pairs, heldout_skipped=lost, **{f"{name}_before": x for name, x in before.items()})
        if rank == 0:
            print("before:", *(f"{name} {x:.4f}" for name, x in before.items()), flush=True)

    progress = progress_bar(start, cfg.steps, show=rank == 0)
    for step in progress:
        run.phase("encode")
        _, samples, skipped = encode_pairs(step_rows(task.train, step, cfg.prompts_per_step, cfg.seed)[mine])
        for message in skipped:
            progress.write(f"skipped: {message}")
        run.phase("train")
        batch = collate(samples, micro_batch_group=torch.arange(len(samples)) // 2)  # pairs stay in one micro-batch
        batch = referred(rebalance_across_ranks(batch, engine.data_parallel_group))
        counts = [len(samples) // 2, len(skipped), batch.mask.sum(), batch_flops(engine.config, batch)]
        known, lost, tokens, flops = engine.global_sum(torch.tensor(counts)).tolist()
        if not known:
            sys.exit(f"dpo: step {step}: none of its {lost} rows can be trained on; see the log")
        metrics = engine.train_batch(batch, loss_fn)
        flops *= (2 if cfg.lora_rank else 3) + refers
        run.log(step, {**metrics, "tokens": tokens, "flops": flops, "skipped_rows": lost})
        progress.set_postfix(loss=f"{metrics['loss']:.3f}", told_apart=f"{metrics['preference/accuracy']:.2f}")
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


def set_up(cfg: Config, task: Task, out: Path, refers: bool):
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
    if refers and not cfg.lora_rank:
        start = load_model(path, trust_remote_code=cfg.trust_remote_code)
        reference = make_engine(cfg.engine, "language_model", model=start, **shared)
    memory = cfg.gpu_memory_utilization
    rollout = make_rollout("hf", engine.gathered, processor=processor, gpu_memory_utilization=memory)
    return engine, reference, rollout, processor, ends


if __name__ == "__main__":
    main(tyro.cli(Config, use_underscores=True, description=__doc__))
    dist.destroy_process_group()
