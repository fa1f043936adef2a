"""Builds what a recipe's options describe: the training engine, a reference policy, the sampling back end."""

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
from rlkit.engines.model_files import NotInShardsError
from rlkit.engines.value_head import load_value_model
from rlkit.rollout import make_rollout
from rlkit.rollout.sampling import model_end_token_ids
from rlkit.runs.command_line import option_value
from rlkit.runs.directory import BUILT_MODEL, decided_by_rank_0
from rlkit.runs.image_processor import processor_options
from rlkit.runs.options import AdapterOptions, EngineOptions, OptimizerOptions, TrainingOptions
from rlkit.runs.rollouts import recorded
from rlkit.runs.vllm_options import longest_row, vllm_options
from rlkit.tracking import Run
from rlkit.vlm import (
    audio_tower_pattern,
    disable_dropout,
    freeze,
    load_model,
    load_processor,
    lora,
    model_or_tiny,
    quantize_base,
    suppressed_token_ids,
    trainable_summary,
    vision_tower_pattern,
)
from rlkit.vlm.chat_template import check_template_options, set_chat_template
from rlkit.vlm.checkpoint_weights import adapter_parameters
from rlkit.vlm.loading import load_config, model_path
from rlkit.vlm.long_rope import check_factors_of_samplers, factors_sentence, has_long_factors, original_length
from rlkit.vlm.model_config import is_config_file, write_model
from rlkit.vlm.processors import check_vocabulary

READS_SHARDS = ("fsdp2", "fsdp1", "megatron")  # engines that take a model on the meta device
RECORDS_ROUTING = {"hf": "return_routed_experts", "vllm": "enable_return_routed_experts"}
DEFAULT_UTILIZATION = 0.8  # share of a GPU's memory; for hf, and for vLLM where free memory cannot be measured


def find_model(cfg: Any, run: Run, rows: Sequence[Mapping[str, Any]], **tiny: Any) -> tuple[str, Any]:
    """The directory or hub id of the model, and its processor (a tokenizer for a text model).

    The model "tiny" is built first, in the run's directory, unless it is already there. So is a model that is named by
    a config.json, with random weights, and one whose configuration `--model_config` changes.

    Args:
        rows: rows on which the tiny model is fine-tuned.
        tiny: further arguments of `rlkit.vlm.build_tiny`.
    """
    place = run.out / BUILT_MODEL
    if not cfg.model_config and not is_config_file(cfg.model):
        path = model_or_tiny(cfg.model, place, rows, seed=cfg.seed, **tiny)
        return path, processor_of(cfg, path)
    if cfg.model == "tiny":
        raise ValueError("model_config: expected none with the model tiny, whose sizes are fixed, got some")

    def write() -> None:
        if not place.exists():
            write_model(cfg.model, cfg.model_config, place, seed=cfg.seed)

    decided_by_rank_0(write)
    return str(place), processor_of(cfg, str(place))


def builds_model(cfg: Any) -> bool:
    """Whether a run builds its model in its own directory, as it cannot be loaded as it is."""
    return cfg.model == "tiny" or bool(cfg.model_config) or is_config_file(cfg.model)


def processor_of(cfg: Any, path: str) -> Any:
    """The processor of a model, with the run's options for images and videos, and its chat template if it has one.

    Raises:
        ValueError: as `load_processor` and `rlkit.vlm.processors.check_vocabulary`; the chat template cannot be read,
            or does not have an option that the run asks for.
    """
    options = {name: getattr(cfg, name) for name in ("video_fps", "video_frames", "video_sound")}
    options |= processor_options(cfg)
    processor = load_processor(path, trust_remote_code=cfg.trust_remote_code, **options)
    if cfg.chat_template:
        set_chat_template(processor, cfg.chat_template)
    check_vocabulary(processor, load_config(path, trust_remote_code=cfg.trust_remote_code))
    check_template_options(processor, cfg.chat_template_kwargs)
    return processor


def check_same_tokens(cfg: Any, name: str, path: str, processor: Any) -> Any:
    """The processor of a second model, a teacher or a critic, which reads the tokens of the policy.

    Args:
        name: of the option that names the model.
        path: its directory or hub id.
        processor: the policy's.

    Raises:
        ValueError: its tokenizer has other tokens.
    """
    other = load_processor(path, trust_remote_code=cfg.trust_remote_code)
    vocabularies = [getattr(x, "tokenizer", x).get_vocab() for x in (other, processor)]
    if vocabularies[0] != vocabularies[1]:
        raise ValueError(f"{name} {path!r}: expected the tokens of the trained model's tokenizer, got others")
    return other


def response_ends(cfg: Any, path: str, processor: Any) -> list[int]:
    """Token ids that end a response, see `rlkit.rollout.sampling.model_end_token_ids`."""
    config = load_config(path, trust_remote_code=cfg.trust_remote_code)
    return model_end_token_ids(model_path(path), config, getattr(processor, "tokenizer", processor))


def build_engine(cfg: TrainingOptions, path: str, processor: Any, *, optimizer_steps: int) -> Any:
    """The engine that trains a language model.

    If the options have a sampling temperature, log-probabilities are those of the sampling distribution: at this
    temperature, and with suppressed image tokens.

    Args:
        path: directory or hub id of the model.
        optimizer_steps: those of the whole run, for the learning-rate schedule.
    """

    def build(model: Any) -> Any:
        options = scoring_options(cfg, model, processor)
        if getattr(cfg, "router_replay", False):
            options["router_replay"] = True
        return training_engine(cfg, "language_model", trained_part(cfg, model), cfg.lr, optimizer_steps, **options)

    return recorded(cfg, _built_from_shards(cfg, load_model, path, getattr(torch, cfg.dtype), build))


def build_value_engine(
    cfg: TrainingOptions, path: str, processor: Any, *, optimizer_steps: int, lr: float | None = None
) -> Any:
    """The engine that trains a model with a scalar head: a critic, or a reward model.

    Args:
        path: an exported value model, or a language model, which gets a zero-initialized value head.
        optimizer_steps: those of the whole run.
        lr: peak learning rate instead of `cfg.lr`.
    """

    def build(model: Any) -> Any:
        model, peak = trained_part(cfg, model, head=True), cfg.lr if lr is None else lr
        options = shared_options(cfg, processor, model.config)
        return training_engine(cfg, "value_model", model, peak, optimizer_steps, **options)

    return recorded(cfg, _built_from_shards(cfg, load_value_model, path, getattr(torch, cfg.dtype), build))


def build_scorer(
    cfg: Any, path: str, processor: Any, *, only_scores: bool = False, frozen_as_policy: bool = False
) -> Any:
    """An engine without an optimizer. It computes log-probabilities of a reference policy or a teacher.

    As in `build_engine`, they are those of the sampling distribution.

    With fsdp2 the weights keep the dtype of their files, and are cast to `compute_dtype` layer by layer. A bfloat16
    model thus takes half the memory, and gives the same results but for rounding (`Fsdp2Engine._shard`).

    Args:
        only_scores: the weights are not sent to a sampler. With fsdp2 they are then cast to `compute_dtype` once, so
            that a float32 model, too, takes half the memory.
        frozen_as_policy: freeze what the policy does, before FSDP wraps it. The layers of a frozen tower are no units,
            so FSDP does not cast their inputs; in a reference it would, and the log-probabilities would differ.
    """

    def build(model: Any) -> Any:
        options = scoring_options(cfg, model, processor)
        if cfg.engine == "fsdp2":
            options["only_scores"] = only_scores
        if frozen_as_policy:
            freeze_parts(cfg, model)
        engine = make_engine(cfg.engine, "language_model", model=model, **options)
        if cfg.engine == "fsdp2":  # which takes weights of several dtypes, as ERNIE's are, if none of them is trained
            engine.module.requires_grad_(False)
        return engine

    dtype = getattr(torch, cfg.dtype)
    if cfg.engine == "fsdp2":
        dtype = load_config(path, trust_remote_code=cfg.trust_remote_code).dtype or dtype
    return _built_from_shards(cfg, load_model, path, dtype, build)


def _built_from_shards(
    cfg: Any, load: Callable[..., Any], path: str, dtype: torch.dtype, build: Callable[[Any], Any]
) -> Any:
    """Load a model and call `build` on it. Each rank reads only its shard of the weights, if that is possible.

    Otherwise every rank reads the whole model, and rank 0 prints the reason.

    Args:
        load: `load_model` or `load_value_model`.
        build: model -> engine.
    """
    options = {"dtype": dtype, "trust_remote_code": cfg.trust_remote_code}

    def build_and_tell(model: Any) -> Any:
        engine = build(model)
        sentence = factors_sentence(model.config, getattr(engine, "longest_sequence", None))
        if sentence and dist.get_rank() == 0:
            print(f"{path}: {sentence}", flush=True)
        return engine

    if cfg.engine in READS_SHARDS:
        random_state = torch.get_rng_state()
        try:
            return build_and_tell(load(path, on_meta=True, **options))
        except NotInShardsError as error:
            torch.set_rng_state(random_state)  # adapters are initialized as if the first attempt had not happened
            if dist.get_rank() == 0:
                print(f"{error}; each rank reads the whole model", flush=True)
    return build_and_tell(load(path, **options))


def build_reference(cfg: TrainingOptions, path: str, processor: Any, engine: Any) -> Callable[[Batch], Tensor]:
    """The initial policy, as a function from a batch to log-probabilities [B, T].

    With LoRA it is the trained model with its adapters disabled. Otherwise it is a second engine.
    """
    if not cfg.lora_rank:
        scorer = build_scorer(cfg, path, processor, only_scores=True, frozen_as_policy=True)
        return lambda batch: scorer.infer_batch(batch)["logprobs"]

    def without_adapter(batch: Batch) -> Tensor:
        with engine.disable_adapter():
            return engine.infer_batch(batch)["logprobs"]

    return without_adapter


def build_rollout(
    cfg: Any, path: str, processor: Any, engine: Any, *, beside: Sequence[Any] = (), **options: Any
) -> Any:
    """The sampling back end for the policy that this engine trains.

    Args:
        cfg: `GenerationOptions` and `ModelOptions`.
        beside: other training engines on the same GPUs, for which vLLM leaves memory.
        options: options of the rollout class; `--rollout_options` override them.
    """
    defaults = {
        "gpu_memory_utilization": cfg.gpu_memory_utilization or DEFAULT_UTILIZATION,
        "trust_remote_code": cfg.trust_remote_code,
    }
    derived: dict[str, Any] = {}
    if getattr(cfg, "router_replay", False) and cfg.rollout in RECORDS_ROUTING:
        derived[RECORDS_ROUTING[cfg.rollout]] = True
    if cfg.rollout == "vllm":
        if longest := getattr(engine, "longest_sequence", None):
            derived["max_model_len"] = longest
        derived |= vllm_options(cfg, [engine, *beside])
    given = {name: option_value(text) for name, text in cfg.rollout_options.items()}
    rollout = make_rollout(
        cfg.rollout,
        engine.gathered,
        model=path,
        processor=processor,
        urls=cfg.servers,
        model_parallel_group=engine.model_parallel_group,
        **(defaults | options | derived | given),
    )
    check_rollout_takes_adapters(cfg, engine, rollout)
    check_rope_factors(cfg, engine, rollout)
    return rollout


def check_rope_factors(cfg: Any, engine: Any, rollout: Any) -> None:
    """Raise a ValueError unless the sampling back end gives a model with LongRoPE the factors that the trainer does.

    vLLM uses long factors if its longest sequence is longer than the short ones are for. SGLang, which chooses for each
    batch of tokens, uses short factors while all sequences in the batch are short. See rlkit.vlm.long_rope.
    """
    config = getattr(engine, "config", None)
    if config is None or (original := original_length(config)) is None:
        return
    longest = getattr(engine, "longest_sequence", None)
    if cfg.rollout == "sglang":
        if has_long_factors(config, longest):
            raise ValueError(
                f"rollout: expected vllm, vllm_server or hf for sequences of {longest} tokens of {config.model_type}, "
                f"got sglang, whose LongRoPE depends on the batch beyond {original} tokens"
            )
    elif hasattr(rollout, "max_model_len"):
        context_lengths = getattr(rollout, "context_lengths", [rollout.max_model_len])  # of several servers
        check_factors_of_samplers(config, longest, context_lengths)


def check_rollout_takes_adapters(cfg: Any, engine: Any, rollout: Any) -> None:
    """With `--sync_adapters`, raise a ValueError unless the sampling back end can use this model's adapters."""
    if not getattr(cfg, "sync_adapters", False):
        return
    if cfg.rollout == "hf":
        if dist.get_rank() == 0:
            print("sync_adapters: nothing to send, because hf samples with the trained model itself", flush=True)
        return
    if not hasattr(rollout, "update_adapter"):
        raise ValueError(f"sync_adapters: expected --rollout vllm or vllm_server, got {cfg.rollout}")
    local_parts = adapter_parameters(engine.module)
    rollout.check_adapter([name for name, _ in local_parts], cfg.lora_rank)


def sync_check_dtype(cfg: EngineOptions, rollout: Any = None) -> torch.dtype | None:
    """The dtype for `rlkit.rollout.WeightSyncCheck`: the 16-bit dtype that trainer or sampler computes in.

    None if neither states one. The check then assumes the default of the device, as not every sampler says its dtype.
    """
    if "bfloat16" in (cfg.dtype, cfg.compute_dtype):
        return torch.bfloat16
    sampler_dtype = getattr(rollout, "weight_dtype", None)
    return sampler_dtype if sampler_dtype in (torch.bfloat16, torch.float16) else None


class RunSchedule(LambdaLR):
    """A learning-rate schedule that keeps the options of this run when a checkpoint is loaded.

    A checkpoint holds the options of AdamW of the run that wrote it. A resumed run may have others (`--allow_changes
    lr`, more `--steps`), so it takes over only the number of finished updates.

    Groups that `optimizer.add_param_group` adds during the run have the same schedule, each with its own peak.

    Args:
        optimizer: has this run's learning rates, and the weight decay and betas of an AdamW.
        share_of_peak: finished updates -> learning rate of the next update, as a share of the optimizer's.
    """

    def __init__(self, optimizer: Optimizer, share_of_peak: Callable[[int], float]) -> None:
        self.options = [_own_options(group) for group in optimizer.param_groups]
        super().__init__(optimizer, share_of_peak)
        add_to_optimizer = optimizer.add_param_group

        def add_param_group(group: dict[str, Any]) -> None:
            add_to_optimizer(group)
            self._schedule(optimizer.param_groups[-1])

        optimizer.add_param_group = add_param_group  # type: ignore[assignment, method-assign]

    def _schedule(self, group: dict[str, Any]) -> None:
        """Give a group that was added to the optimizer the learning rate of the next update."""
        share_of_peak = self.lr_lambdas[0]
        self.base_lrs.append(group["lr"])
        self.lr_lambdas.append(share_of_peak)
        self.options.append(_own_options(group))
        group.update(initial_lr=group["lr"], lr=group["lr"] * share_of_peak(self.last_epoch))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved update. The optimizer's state has to be loaded before."""
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["_step_count"]
        groups = zip(self.optimizer.param_groups, self.base_lrs, self.options, self.lr_lambdas, strict=True)
        for group, peak, options, share_of_peak in groups:
            group.update(initial_lr=peak, lr=peak * share_of_peak(self.last_epoch), **options)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def _own_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of AdamW in a group of an optimizer; others do not have all of them."""
    return {name: group[name] for name in ("weight_decay", "betas") if name in group}


def learning_rate_schedule(optimizer: Optimizer, cfg: OptimizerOptions, optimizer_steps: int) -> RunSchedule:
    """Linear warm-up to the peak, then decay to `cfg.min_lr_ratio` of it, reached after the last update."""
    warmup = max(1, cfg.warmup_steps)
    decay = DECAYS[cfg.lr_schedule]

    def share_of_peak(step: int) -> float:
        if step + 1 < warmup:
            return (step + 1) / warmup
        decayed = min(1.0, (step + 1 - warmup) / max(1, optimizer_steps + 1 - warmup))
        return cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * decay(decayed)

    return RunSchedule(optimizer, share_of_peak)


DECAYS: dict[str, Callable[[float], float]] = {  # fraction of the decay's steps -> 1 at the peak, 0 at the end
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "constant": lambda done: 1.0,
}


def training_engine(
    cfg: TrainingOptions,
    model_type: str,
    model: Any,
    lr: float,
    optimizer_steps: int,
    *,
    fused: bool | None = None,
    **options: Any,
) -> Any:
    """An engine that trains a model with AdamW and a learning-rate schedule.

    Args:
        model_type: "language_model" or "value_model".
        model: the result of `trained_part`.
        lr: peak learning rate.
        optimizer_steps: those of the whole run.
        fused: use fused AdamW; by default only on a GPU.
        options: further options of the engine.
    """
    fused = torch.cuda.is_available() if fused is None else fused
    if dist.get_rank() == 0:
        print(f"{model_type}: {trainable_summary(model)}", flush=True)
    return make_engine(
        cfg.engine,
        model_type,
        model=model,
        optimizer=lambda parameters: AdamW(
            parameters, lr=lr, betas=(cfg.adam_beta1, cfg.adam_beta2), weight_decay=cfg.weight_decay, fused=fused
        ),
        scheduler=lambda optimizer: learning_rate_schedule(optimizer, cfg, optimizer_steps),
        max_grad_norm=cfg.max_grad_norm,
        enable_gradient_checkpointing=cfg.enable_gradient_checkpointing,
        **options,
    )


def trained_part(cfg: AdapterOptions, model: Any, *, head: bool = False) -> Any:
    """Turn dropout off, add adapters, quantize the weights below them and freeze others, as the options say.

    A value head is trained, whatever adapters and `freeze` say.

    Raises:
        ValueError: nothing is left to train.
    """
    if cfg.disable_dropout:
        disable_dropout(model)
    if cfg.lora_rank:
        model = lora(model, cfg.lora_rank, cfg.lora_alpha, cfg.target_modules, cfg.exclude_modules)
        if cfg.quantize_base:
            quantize_base(model)
    freeze_parts(cfg, model)
    if head:
        model.get_output_embeddings().requires_grad_(True)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"freeze: expected some weights to train, got none left by {cfg.freeze!r}")
    return model


def freeze_parts(cfg: AdapterOptions, model: Any) -> None:
    """Freeze the towers and weights that the options name."""
    if cfg.freeze_vision_tower:
        freeze(model, vision_tower_pattern(model))
    if cfg.freeze_audio_tower:
        freeze(model, audio_tower_pattern(model))
    if cfg.freeze:
        freeze(model, cfg.freeze)


def shared_options(cfg: EngineOptions, processor: Any, config: Any) -> dict[str, Any]:
    """Options that all engines of a run share.

    Args:
        config: of the model.
    """
    options = {
        "processor": processor,
        "micro_batch_tokens": cfg.micro_batch_tokens,
        "use_remove_padding": cfg.use_remove_padding,
        "use_fused_kernels": cfg.use_fused_kernels,
    }
    # the others are not options of every engine: given where they differ from the default
    if cfg.compute_dtype != "auto":
        options["compute_dtype"] = getattr(torch, cfg.compute_dtype)
    if not cfg.share_prompts:
        options["share_prompts"] = False
    if cfg.use_torch_compile:
        options["use_torch_compile"] = True
    if cfg.offload_between_phases:
        options["offload_between_phases"] = True
    if cfg.ulysses_sequence_parallel_size > 1:
        options["ulysses_sequence_parallel_size"] = cfg.ulysses_sequence_parallel_size
    if original_length(config) is not None and cfg.engine != "megatron":  # which refuses a model with LongRoPE by name
        options["longest_sequence"] = longest_row(cfg)
    return options | cfg.parallel


def scoring_options(cfg: EngineOptions, model: Any, processor: Any) -> dict[str, Any]:
    """`shared_options`, plus those of the sampling distribution if the options have a temperature."""
    options = shared_options(cfg, processor, model.config)
    if not hasattr(cfg, "temperature"):
        return options
    suppressed = suppressed_token_ids(model.config, getattr(processor, "tokenizer", processor))
    return {**options, "temperature": cfg.temperature, "suppressed_token_ids": suppressed}
