"""From a recipe's options to what it works with: the engine that trains, a reference policy, the sampling back end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rlkit.data.samples import Batch
from rlkit.engines import make_engine
from rlkit.engines.fsdp.sharded_loading import NotInShardsError
from rlkit.engines.value_head import load_value_model
from rlkit.rollout import make_rollout
from rlkit.rollout.sampling import end_token_ids
from rlkit.runs.options import (
    AdapterOptions,
    EngineOptions,
    GenerationOptions,
    OptimizerOptions,
    TrainingOptions,
    option_value,
)
from rlkit.runs.rollouts import recorded
from rlkit.runs.vllm_options import vllm_options
from rlkit.tracking import Run
from rlkit.vlm import (
    freeze,
    load_model,
    load_processor,
    lora,
    model_or_tiny,
    suppressed_token_ids,
    trainable_summary,
    vision_tower_pattern,
)
from rlkit.vlm.loading import load_config, model_path

DEFAULT_UTILIZATION = 0.8  # of a GPU's memory; for hf, and where vLLM cannot ask how much is free


def find_model(cfg: Any, run: Run, rows: Sequence[Mapping[str, Any]], **tiny: Any) -> tuple[str, Any]:
    """The directory or hub id of the model, and its processor (a tokenizer for text). "tiny" is built once, in the run.

    Args:
        rows: what the tiny model is fine-tuned on.
        tiny: of `rlkit.vlm.build_tiny`.
    """
    path = model_or_tiny(cfg.model, run.out / "init", rows, seed=cfg.seed, **tiny)
    return path, load_processor(path, trust_remote_code=cfg.trust_remote_code)


def answer_ends(cfg: Any, path: str, processor: Any) -> list[int]:
    """Token ids that end an answer: those of the model's generation config, and the tokenizer's."""
    from transformers import GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(model_path(path))
    except OSError:
        config = GenerationConfig.from_model_config(load_config(path, trust_remote_code=cfg.trust_remote_code))
    return end_token_ids(getattr(processor, "tokenizer", processor), config.eos_token_id)


def build_engine(cfg: TrainingOptions, path: str, processor: Any, *, updates: int) -> Any:
    """The engine that trains a language model.

    If the options have a sampling temperature, log-probabilities are those of the distribution that answers are sampled
    from: at this temperature, and without the tokens that stand for images.

    Args:
        path: directory or hub id of the model.
        updates: optimizer steps of the whole run, over which the learning rate decays.
    """

    def build(model: Any) -> Any:
        options = scoring_options(cfg, model, processor)
        return training_engine(cfg, "language_model", trained_part(cfg, model), cfg.lr, updates, **options)

    return recorded(cfg, _built_from_shards(cfg, load_model, path, getattr(torch, cfg.dtype), build))


def build_value_engine(
    cfg: TrainingOptions, path: str, processor: Any, *, updates: int, lr: float | None = None
) -> Any:
    """The engine that trains a model with a scalar head: a critic, or a reward model.

    Args:
        path: of an exported value model, or of a language model, which gets a head of zeros.
        updates: optimizer steps of the whole run.
        lr: peak learning rate in place of `cfg.lr`.
    """

    def build(model: Any) -> Any:
        model, peak = trained_part(cfg, model, head=True), cfg.lr if lr is None else lr
        return training_engine(cfg, "value_model", model, peak, updates, **shared_options(cfg, processor))

    return recorded(cfg, _built_from_shards(cfg, load_value_model, path, getattr(torch, cfg.dtype), build))


def build_scorer(cfg: Any, path: str, processor: Any) -> Any:
    """An engine that trains nothing: it computes log-probabilities of a reference policy or a teacher.

    As in `build_engine`, they are those of the distribution that answers are sampled from.

    With fsdp2 its weights stay in the dtype of their files. They are cast to `compute_dtype` layer by layer, so a
    bfloat16 model takes half the memory, and gives the same numbers.
    """

    def build(model: Any) -> Any:
        options = scoring_options(cfg, model, processor)
        return make_engine(cfg.engine, "language_model", model=model, **options)

    dtype = getattr(torch, cfg.dtype)
    if cfg.engine == "fsdp2":
        dtype = load_config(path, trust_remote_code=cfg.trust_remote_code).dtype or dtype
    return _built_from_shards(cfg, load_model, path, dtype, build)


def _built_from_shards(
    cfg: Any, load: Callable[..., Any], path: str, dtype: torch.dtype, build: Callable[[Any], Any]
) -> Any:
    """The engine that `build` makes of a model; each rank reads only its part of the weights, where that is possible.

    Otherwise every rank reads the whole model, and rank 0 says why.

    Args:
        load: `load_model` or `load_value_model`.
        build: model -> engine.
    """
    options = {"dtype": dtype, "trust_remote_code": cfg.trust_remote_code}
    if cfg.engine == "fsdp2" and "tensor" not in cfg.parallel:
        random_state = torch.get_rng_state()
        try:
            return build(load(path, on_meta=True, **options))
        except NotInShardsError as error:
            torch.set_rng_state(random_state)  # the same adapters as without the attempt
            if dist.get_rank() == 0:
                print(f"{error}; each rank reads the whole model", flush=True)
    return build(load(path, **options))


def build_reference(cfg: TrainingOptions, path: str, processor: Any, engine: Any) -> Callable[[Batch], Tensor]:
    """The policy that training starts from, as a function from a batch to log-probabilities [B, T].

    With LoRA it is the trained model without its adapters. Otherwise it is a second engine.
    """
    if not cfg.lora_rank:
        scorer = build_scorer(cfg, path, processor)
        return lambda batch: scorer.infer_batch(batch)["logprobs"]

    def without_adapter(batch: Batch) -> Tensor:
        with engine.disable_adapter():
            return engine.infer_batch(batch)["logprobs"]

    return without_adapter


def build_rollout(
    cfg: GenerationOptions, path: str, processor: Any, engine: Any, *, beside: Sequence[Any] = (), **options: Any
) -> Any:
    """The sampling back end, on the weights of this engine.

    Args:
        beside: other engines that train on the same GPUs, for which vLLM has to leave room.
        options: of the rollout's class; `--rollout_options` come on top.
    """
    if cfg.rollout == "vllm":
        options |= vllm_options(cfg, [engine, *beside])
    utilization = cfg.gpu_memory_utilization or DEFAULT_UTILIZATION
    options = {
        "gpu_memory_utilization": utilization,
        **options,
        **{name: option_value(text) for name, text in cfg.rollout_options.items()},
    }
    return make_rollout(
        cfg.rollout,
        engine.gathered,
        model=path,
        processor=processor,
        urls=cfg.servers,
        model_parallel_group=engine.model_parallel_group,
        **options,
    )


def roughest_dtype(cfg: EngineOptions) -> torch.dtype | None:
    """The dtype for `rlkit.rollout.WeightSyncCheck`: bfloat16 if the options name it.

    None, the default of the device, if they do not: a trainer in float32 may sample with a back end in bfloat16.
    """
    return torch.bfloat16 if "bfloat16" in (cfg.dtype, cfg.compute_dtype) else None


def learning_rate_schedule(optimizer: Optimizer, cfg: OptimizerOptions, updates: int) -> LambdaLR:
    """Linear warm-up to the peak, then decay over all `updates` optimizer steps, as the options say."""
    warmup, updates = max(1, cfg.warmup_steps), max(1, updates)
    decay = DECAYS[cfg.lr_schedule]

    def share_of_peak(step: int) -> float:
        return min((step + 1) / warmup, max(cfg.min_lr_ratio, decay(min(1.0, step / updates))))

    return LambdaLR(optimizer, share_of_peak)


DECAYS: dict[str, Callable[[float], float]] = {  # share of the peak after a share of all steps
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "constant": lambda done: 1.0,
}


def training_engine(
    cfg: TrainingOptions,
    model_type: str,
    model: Any,
    lr: float,
    updates: int,
    *,
    fused: bool | None = None,
    **options: Any,
) -> Any:
    """An engine that trains a model, with AdamW and a learning-rate schedule, as the options say.

    Args:
        model_type: "language_model" or "value_model".
        model: from `trained_part`.
        lr: peak learning rate.
        updates: optimizer steps of the whole run.
        fused: AdamW as one kernel; by default on a GPU.
        options: of the engine.
    """
    fused = torch.cuda.is_available() if fused is None else fused
    if dist.get_rank() == 0:
        print(f"{model_type}: {trainable_summary(model)}", flush=True)
    return make_engine(
        cfg.engine,
        model_type,
        model=model,
        optimizer=lambda parameters: AdamW(
            parameters, lr=lr, betas=(0.9, 0.95), weight_decay=cfg.weight_decay, fused=fused
        ),
        scheduler=lambda optimizer: learning_rate_schedule(optimizer, cfg, updates),
        max_grad_norm=cfg.max_grad_norm,
        enable_gradient_checkpointing=cfg.enable_gradient_checkpointing,
        **options,
    )


def trained_part(cfg: AdapterOptions, model: Any, *, head: bool = False) -> Any:
    """The model with its adapters added and its vision tower frozen, as the options say; a value head trains."""
    if cfg.lora_rank:
        model = lora(model, cfg.lora_rank, cfg.lora_alpha, cfg.target_modules, cfg.exclude_modules)
        if head:  # adapters freeze all other weights
            model.get_output_embeddings().requires_grad_(True)
    if cfg.freeze_vision_tower:
        freeze(model, vision_tower_pattern(model))
    return model


def shared_options(cfg: EngineOptions, processor: Any) -> dict[str, Any]:
    """What every engine of a run has in common."""
    sequence_parallel = cfg.ulysses_sequence_parallel_size
    return {
        "processor": processor,
        "micro_batch_tokens": cfg.micro_batch_tokens,
        "use_remove_padding": cfg.use_remove_padding,
        "use_fused_kernels": cfg.use_fused_kernels,
        **({} if cfg.compute_dtype == "auto" else {"compute_dtype": getattr(torch, cfg.compute_dtype)}),
        **({} if cfg.share_prompts else {"share_prompts": False}),  # not an option of every engine
        **({"offload_between_phases": True} if cfg.offload_between_phases else {}),
        **({"ulysses_sequence_parallel_size": sequence_parallel} if sequence_parallel > 1 else {}),
        **cfg.parallel,
    }


def scoring_options(cfg: EngineOptions, model: Any, processor: Any) -> dict[str, Any]:
    """`shared_options`, and the distribution that answers are sampled from if the options have a temperature."""
    options = shared_options(cfg, processor)
    if not hasattr(cfg, "temperature"):
        return options
    suppressed = suppressed_token_ids(model.config, getattr(processor, "tokenizer", processor))
    return {**options, "temperature": cfg.temperature, "suppressed_token_ids": suppressed}
