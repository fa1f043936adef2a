"""Estimates the memory of the megatron engine; rlkit.plan.megatron_links has its communication.

The fsdp2 engine is rehearsed (rlkit.plan.rehearsal); Megatron cannot be, so its memory is computed by formulas:

- Parameters, gradients and optimizer state: exact, from the model's parameters and the degrees of parallelism.
- Activations: the sum of the tensors that each layer saves for its backward pass, with flash attention, the Triton
  kernels for the output layer, and equally many tokens for each expert.

tests/plan/test_plan.py compares the formulas with torch's allocator on a CPU, where stand-ins replace these kernels.
Activations are within 15 %. Pipelines and vision towers are not compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlkit.engines.distributed import BUCKET_BYTES
from rlkit.engines.megatron.supported import ParallelDims, check_supported, is_moe, padded_vocabulary
from rlkit.engines.value_head import with_value_head
from rlkit.losses._kernels import CHUNK_BYTES
from rlkit.plan.rehearsal import ModelSize, Rehearsal, Roles, empty
from rlkit.plan.workload import PackedRows, Workload, longest_batch, optimizer_steps, packed_rows
from rlkit.runs.models import trained_part
from rlkit.runs.options import generates
from rlkit.vlm.loading import has_vision

WEIGHT, MASTER, MOMENTS, GRADIENT = 2, 4, 8, 4  # bytes of a parameter: bfloat16; float32 copy; AdamW's; float32


@dataclass(frozen=True)
class StageParameters:
    """Numbers of parameters on one rank of a pipeline stage.

    Attributes:
        dense, experts: all of them; experts are sharded over other ranks than the rest.
        trained_dense, trained_experts: those that are trained.
    """

    dense: int = 0
    experts: int = 0
    trained_dense: int = 0
    trained_experts: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """The largest micro-batch of a rank.

    Attributes:
        tokens: in its packed row; a prompt counts once for its responses.
        scored: tokens whose log-probability is computed.
        keys: tokens that the row's segments attend to; a prompt counts once for each of its responses.
        prompts: prompts that are computed in it, with their images.
        count: number of micro-batches.
    """

    tokens: int
    scored: int
    keys: int
    prompts: int
    count: int


def estimate(cfg: Any, roles: Roles, world: int, image_tokens: int | None) -> Rehearsal:
    """The memory of a training step, as `rlkit.plan.rehearsal.rehearse` returns it for fsdp2.

    It is that of a rank in the pipeline stage that needs the most memory.

    Args:
        cfg: options of the recipe.
        roles: models of the recipe.
        world: number of ranks.
        image_tokens: image tokens of each prompt; see `longest_batch`.

    Raises:
        ValueError: the engine refuses the model or an option.
    """
    if roles.whole_vocabulary:
        got = f"{cfg.loss} over the whole vocabulary"
        raise ValueError(f"loss: expected sampled_token, or --teacher_top_k, in the megatron engine, got {got}")
    dims = _dims(cfg, roles, world)
    config = roles.policy or roles.critic
    data_parallel_size = world // (dims.tensor * dims.pipeline * dims.context)
    workload = longest_batch(cfg, config, data_parallel_size, image_tokens, rows_together=roles.rows_together)
    packed = packed_rows(workload, cfg.micro_batch_tokens, share_prompts=cfg.share_prompts)
    micro_batch = largest_micro_batch(workload, packed)
    trained = {name: _model(cfg, getattr(roles, name), name) for name in ("critic", "policy") if getattr(roles, name)}
    stages = []
    for stage in range(dims.pipeline):
        held = _held(roles, trained, dims, world, stage)
        phases = _phases(cfg, roles, trained, dims, workload, micro_batch, stage, held)
        changing = sum(_changing(stage_parameters(model, dims)[stage], dims, world) for model in trained.values())
        stages.append((phases, held, changing))
    peaks, held, changing = max(stages, key=lambda stage: max(sum(kinds.values()) for kinds in stage[0].values()))
    sizes = [(p.numel(), p.requires_grad) for p in (trained.get("policy") or trained["critic"]).parameters()]
    return Rehearsal(
        peaks=peaks,
        resident={} if cfg.offload_between_phases else _summed(held),
        host=sum(_summed(held).values()) if cfg.offload_between_phases else 0,
        parameters=sum(size for size, _ in sizes),
        trainable=sum(size for size, trains in sizes if trains),
        largest_tensor=max(size for size, _ in sizes),
        workload=workload,
        data_parallel_size=data_parallel_size,
        micro_batches=packed,
        models=_model_sizes(roles, trained, dims, world),
        copied_back=changing if cfg.offload_between_phases else 0,
    )


def _model_sizes(roles: Roles, trained: dict[str, Any], dims: ParallelDims, world: int) -> dict[str, ModelSize]:
    """The sizes of all models, by role."""
    models = dict(trained)
    if roles.reference is not None:
        models["reference"] = empty(roles.reference, torch.bfloat16).requires_grad_(False)
    return {name: model_size(model, dims, world) for name, model in models.items()}


def model_size(model: Any, dims: ParallelDims, world: int) -> ModelSize:
    """The sizes of a model on a rank of the stage that has the most weights."""
    stage = max(stage_parameters(model, dims), key=lambda one: one.dense + one.experts)
    return ModelSize(
        parameters=sum(p.numel() for p in model.parameters()),
        weights=WEIGHT * (stage.dense + stage.experts),
        trained=stage.trained_dense + stage.trained_experts,
        owned=owned_weights(stage, dims, world),
        experts=stage.experts,
        trained_experts=stage.trained_experts,
    )


def _held(
    roles: Roles, trained: dict[str, Any], dims: ParallelDims, world: int, stage: int
) -> dict[str, dict[str, int]]:
    """Bytes by model and kind that a rank of this pipeline stage has: all but gradients."""
    held: dict[str, dict[str, int]] = {}
    for name, model in trained.items():
        sizes = state_bytes(stage_parameters(model, dims)[stage], dims, world)
        held[name] = {kind: sizes[kind] for kind in ("parameters", "optimizer")}
    if roles.reference is not None:
        reference = stage_parameters(empty(roles.reference, torch.bfloat16), dims)[stage]
        held["reference"] = {"reference": WEIGHT * (reference.dense + reference.experts)}
    return held


def _changing(stage: StageParameters, dims: ParallelDims, world: int) -> int:
    """Bytes that training changes: trained parameters and the optimizer's state."""
    return WEIGHT * (stage.trained_dense + stage.trained_experts) + state_bytes(stage, dims, world)["optimizer"]


def _summed(held: dict[str, dict[str, int]]) -> dict[str, int]:
    """Bytes by kind of all models."""
    kinds = dict.fromkeys(kind for sizes in held.values() for kind in sizes)
    return {kind: sum(sizes.get(kind, 0) for sizes in held.values()) for kind in kinds}


def _phases(
    cfg: Any,
    roles: Roles,
    trained: dict[str, Any],
    dims: ParallelDims,
    workload: Workload,
    micro_batch: MicroBatch,
    stage: int,
    held: dict[str, dict[str, int]],
) -> dict[str, dict[str, int]]:
    """Bytes by kind at the peak of each phase, on a rank of this pipeline stage.

    Offloaded models are on the GPU while they are used; from the first of several updates on, with optimizer state.
    """

    def on_gpu(name: str, *kinds: str) -> dict[str, int]:
        return {kind: held[name][kind] for kind in kinds} if cfg.offload_between_phases else _summed(held)

    phases = {}
    in_forward = ("parameters", "optimizer") if optimizer_steps(cfg) > 1 else ("parameters",)
    if roles.reference is not None:
        phases["reference"] = {
            **on_gpu("reference", "reference"),
            "activations": layer_bytes(roles.reference, dims, micro_batch),
        }
    for name, model in trained.items():
        prefix = "" if name == "policy" or len(trained) == 1 else f"{name}: "
        activations = activation_bytes(cfg, model.config, dims, micro_batch, stage, workload)
        has_logits = stage == dims.pipeline - 1 and name == "policy"
        logits = head_bytes(model.config, dims, micro_batch) if has_logits else 0
        gradients = {"gradients": gradient_bytes(stage_parameters(model, dims)[stage])}
        working = {"activations": activations, "logits": logits}
        phases[f"{prefix}forward and backward"] = {**on_gpu(name, *in_forward), **gradients, **working}
        phases[f"{prefix}optimizer step"] = {**on_gpu(name, "parameters", "optimizer"), **gradients}
    if generates(cfg):
        sent = "policy" if "policy" in trained else "critic"
        phases["weight sync"] = {**on_gpu(sent, "parameters"), **_gathered(cfg, trained)}
    return phases


def _dims(cfg: Any, roles: Roles, world: int) -> ParallelDims:
    """The degrees of parallelism among the options, checked."""
    if cfg.lora_rank:
        raise ValueError(f"lora_rank: expected 0 in the megatron engine, got {cfg.lora_rank}; use --engine fsdp2")
    if unknown := sorted(set(cfg.parallel) - set(ParallelDims._fields)):
        raise ValueError(f"parallel: expected {', '.join(ParallelDims._fields)}, got {', '.join(unknown)}")
    dims = ParallelDims(**cfg.parallel)
    for config in (roles.policy, roles.critic, roles.reference):
        if config is not None:
            check_supported(config, dims, world)
    return dims


def _model(cfg: Any, config: Any, name: str) -> Any:
    """A trained model, on the meta device."""
    model = empty(config, getattr(torch, cfg.dtype))
    return trained_part(cfg, with_value_head(model) if name == "critic" else model, head=name == "critic")


def largest_micro_batch(workload: Workload, packed: Sequence[PackedRows]) -> MicroBatch:
    """The largest of a rank's micro-batches."""
    largest = max(packed, key=lambda one: one.tokens(workload))
    tokens = largest.tokens(workload)
    repeated = sum(n for n in largest.responses if n > 1)  # a single response continues its prompt
    return MicroBatch(
        tokens=tokens,
        scored=largest.rows * workload.response,
        keys=tokens + repeated * workload.prompt,
        prompts=largest.prompts,
        count=len(packed),
    )


# --- parameters, gradients, optimizer


def stage_parameters(model: Any, dims: ParallelDims) -> list[StageParameters]:
    """Numbers of parameters on one rank of each pipeline stage.

    Args:
        model: from transformers; its weights may be on the meta device.
        dims: degrees of parallelism.
    """
    layers_per_stage = model.config.get_text_config().num_hidden_layers // dims.pipeline
    counts = [dict.fromkeys(("dense", "experts", "trained_dense", "trained_experts"), 0) for _ in range(dims.pipeline)]
    for name, parameter, size in _sharded(model, dims):
        layer = re.search(r"(?<!visual\.)\blayers\.(\d+)\.", name)
        if layer is not None:
            stages = [int(layer[1]) // layers_per_stage]
        elif name.endswith("embed_tokens.weight"):  # tied weights have a copy on the last stage
            is_tied = model.get_output_embeddings().weight is parameter
            stages = sorted({0, dims.pipeline - 1}) if is_tied else [0]
        else:
            stages = [0] if "visual." in name else [dims.pipeline - 1]
        kind = "experts" if ".experts." in name else "dense"
        for stage in stages:
            counts[stage][kind] += size
            counts[stage][f"trained_{kind}"] += size * parameter.requires_grad
    return [StageParameters(**count) for count in counts]


def _sharded(model: Any, dims: ParallelDims) -> Iterator[tuple[str, Any, int]]:
    """(name, parameter, number of its elements on one rank)."""
    config = model.config
    for name, parameter in model.named_parameters():
        size = parameter.numel()
        if ".experts." in name:
            yield name, parameter, size // dims.expert
        elif re.search(r"\.(embed_tokens|lm_head)\.weight$", f".{name}") and len(parameter) > 1:  # no value head
            yield name, parameter, padded_vocabulary(config, dims) * parameter.shape[1] // dims.tensor
        elif "visual." not in name and re.search(r"\.([qkvo]|gate|up|down)_proj\.", name):
            yield name, parameter, size // dims.tensor
        else:
            yield name, parameter, size


def state_bytes(stage: StageParameters, dims: ParallelDims, world: int) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state on one rank during a training step."""
    return {
        "parameters": WEIGHT * (stage.dense + stage.experts),
        "gradients": gradient_bytes(stage),
        "optimizer": round((MASTER + MOMENTS) * owned_weights(stage, dims, world)),
    }


def owned_weights(stage: StageParameters, dims: ParallelDims, world: int) -> float:
    """How many trained weights a rank has the optimizer's state of, as float32 weights and moments.

    Data-parallel ranks share it; for experts these are the ranks that have the same experts.
    """
    data_parallel = world // (dims.tensor * dims.pipeline)  # context ranks included
    expert_data_parallel = world // (dims.expert * dims.pipeline)
    return stage.trained_dense / data_parallel + stage.trained_experts / expert_data_parallel


def gradient_bytes(stage: StageParameters) -> int:
    """Bytes of the float32 gradients on one rank, which are freed after each step."""
    return GRADIENT * (stage.trained_dense + stage.trained_experts)


# --- activations


def layer_bytes(config: Any, dims: ParallelDims, micro_batch: MicroBatch) -> int:
    """Bytes that one layer saves for its backward pass on one rank, without recomputation.

    The saved numbers per token of this rank, in a layer with H hidden units, Q query units (heads times head size D), K
    key units, I units of the MLP, T tensor ranks, and S = T with sequence parallelism, otherwise 1:

    - 4 H / S: the inputs and outputs of both norms
    - 3 Q / T + 3 K / T: queries, keys and values as projected; queries and keys after rotation; the attention's output
    - (Q + K) / T: queries and keys before their norms, if the family has them (Qwen3)
    - 4 D: cosines and sines
    - 5 I / T: the outputs of the gate and up projections, both again as factors, and their product

    In a mixture of experts, 8 bytes per expert (the router's float32 logits and probabilities) and H + 6 I numbers for
    each expert that the token is routed to, both divided by S, replace the line 5 I / T.

    If a shared prompt is repeated for its responses, or context ranks gather keys and values, these copies are saved,
    too: 2 K / T numbers for each of `micro_batch.keys`.

    Args:
        config: of the transformers model.
        dims: degrees of parallelism.
        micro_batch: the largest of a rank.
    """
    text = config.get_text_config()
    hidden, heads, tensor = text.hidden_size, text.num_attention_heads, dims.tensor
    head_size = getattr(text, "head_dim", None) or hidden // heads
    queries, keys = heads * head_size // tensor, text.num_key_value_heads * head_size // tensor
    tokens = micro_batch.tokens / dims.context
    sequence_shards = tensor if dims.sequence_parallel else 1
    numbers = tokens * (4 * hidden / sequence_shards + 3 * queries + 3 * keys + 4 * head_size)
    if text.model_type.startswith("qwen3"):  # norms of queries and keys
        numbers += tokens * (queries + keys)
    if dims.context > 1:
        numbers += 2 * keys * (micro_batch.keys + tokens)
    elif micro_batch.keys > micro_batch.tokens:
        numbers += 2 * keys * micro_batch.keys
    if is_moe(text):
        routed = tokens / sequence_shards * text.num_experts_per_tok
        numbers += routed * (hidden + 6 * text.moe_intermediate_size)
        router = tokens / sequence_shards * 8 * text.num_experts  # float32 logits and probabilities
        return round(WEIGHT * numbers + router)
    return round(WEIGHT * (numbers + tokens * 5 * text.intermediate_size / tensor))


def activation_bytes(
    cfg: Any, config: Any, dims: ParallelDims, micro_batch: MicroBatch, stage: int, workload: Workload
) -> int:
    """Bytes of the activations of one stage at the start of its backward pass.

    A stage works on several micro-batches at once: the first on as many as there are stages. With recomputation each
    layer keeps its input only, and one layer at a time has all of its activations.
    """
    text = config.get_text_config()
    layers, per_layer = text.num_hidden_layers // dims.pipeline, layer_bytes(config, dims, micro_batch)
    sequence_shards = dims.tensor if dims.sequence_parallel else 1
    hidden = WEIGHT * micro_batch.tokens // dims.context * text.hidden_size
    kept = layers * hidden // sequence_shards if cfg.enable_gradient_checkpointing else layers * per_layer
    in_flight = min(dims.pipeline - stage, micro_batch.count)
    total = in_flight * kept + (per_layer if cfg.enable_gradient_checkpointing else 0)
    if has_vision(config) and stage == 0 and not cfg.freeze_vision_tower:
        total += in_flight * micro_batch.prompts * tower_bytes(config, workload.image_patches(config))
    return total


def tower_bytes(config: Any, patches: int) -> int:
    """Bytes that the vision tower saves for the images of one prompt; its blocks are not recomputed.

    Per patch and block, with C units and I of the MLP: 20 C bytes for two norms in float32 and their outputs, 32 C for
    queries, keys and values, which are rotated in float32, and for the attention's output, and 8 I for the MLP.
    """
    vision = config.vision_config
    return patches * vision.depth * (52 * vision.hidden_size + 8 * vision.intermediate_size)


def head_bytes(config: Any, dims: ParallelDims, micro_batch: MicroBatch) -> int:
    """Bytes of the output layer's backward pass: the logit gradients of one chunk, the weight's gradient in float32 and
    that of one chunk, and hidden states with their gradient, of all tokens and of those that are scored.
    """
    text = config.get_text_config()
    vocabulary, hidden = padded_vocabulary(config, dims) // dims.tensor, text.hidden_size
    chunk = min(micro_batch.scored, max(1, CHUNK_BYTES // (4 * vocabulary)))
    rows = micro_batch.tokens // dims.context + 2 * micro_batch.scored
    return WEIGHT * chunk * vocabulary + (MASTER + WEIGHT) * vocabulary * hidden + WEIGHT * rows * hidden


def _gathered(cfg: Any, trained: dict[str, Any]) -> dict[str, int]:
    """Bytes of the weight sync: one bucket of matrices with their parts; the whole model if transformers samples.

    A matrix that is larger than a bucket is gathered alone.
    """
    model = trained.get("policy") or trained["critic"]
    sizes = [WEIGHT * p.numel() for p in model.parameters()]
    bucket = max(max(sizes), min(BUCKET_BYTES, sum(sizes)))
    return {"largest tensor": 2 * bucket, **({"sampler's weights": sum(sizes)} if cfg.rollout == "hf" else {})}
