"""Rehearses a training step at full size on simulated ranks: real engines, with tensors that take no memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rlkit.data.samples import Batch
from rlkit.engines import make_engine
from rlkit.engines.distributed import BUCKET_BYTES, local_part
from rlkit.engines.fsdp.sharded_loading import fully_read_parameters
from rlkit.engines.packing.vision_attention import use_packed_vision_attention
from rlkit.engines.value_head import with_value_head
from rlkit.losses import jsd_loss, token_mean
from rlkit.plan.cache import HALF
from rlkit.plan.fake_ranks import fake_ranks
from rlkit.plan.kernels import planned_recurrence, use_own_attention, use_planned_attention
from rlkit.plan.ledger import GATHERED, Ledger
from rlkit.plan.workload import (
    PackedRows,
    Workload,
    largest_micro_batches,
    longest_batch,
    optimizer_steps,
    packed_rows,
)
from rlkit.rollout.servers.weight_transfer import buckets
from rlkit.runs.models import freeze_parts, shared_options, trained_part, training_engine
from rlkit.runs.options import generates, sends_adapters
from rlkit.vlm import adapt
from rlkit.vlm.loading import empty_model, has_vision
from rlkit.vlm.nf4 import weight_counts


@dataclass(frozen=True)
class Roles:
    """Configurations of a recipe's models.

    Attributes:
        policy: the trained language model; None for a recipe that only trains a reward model.
        critic: the trained model with a scalar head: a critic or a reward model.
        reference: a frozen language model that computes log-probabilities: a reference policy or a teacher.
        adapter_reference: the reference is the policy with its LoRA adapters disabled, not a second model.
        whole_vocabulary: the policy's distributions are compared with the reference's over the whole vocabulary, for
            which each rank has a copy of the reference's output layer.
        kl_in_reward: the rewards contain the KL to the reference, for which the policy scores all rows before training.
        rows_together: 2 for a recipe that trains on pairs, whose responses are in one micro-batch; otherwise 1.
    """

    policy: Any = None
    critic: Any = None
    reference: Any = None
    adapter_reference: bool = False
    whole_vocabulary: bool = False
    kl_in_reward: bool = False
    rows_together: int = 1


class ModelSize(NamedTuple):
    """Sizes of a model, with which `rlkit.plan.roofline` counts operations and bytes of a rank.

    Attributes:
        parameters: number of parameters of the whole model.
        weights: bytes of the weights that a rank reads in a pass over a micro-batch: 16 bits each, or NF4 codes with
            their scales. fsdp2 gathers all of them; in Megatron they are those of a stage.
        root: bytes of these that fsdp2 gathers once for forward and backward: all outside of the layers.
        trained: how many of these weights are trained.
        owned: how many trained weights the rank has the optimizer's state of.
        experts, trained_experts: how many of the weights, and of the trained ones, are experts in Megatron.
    """

    parameters: int
    weights: int
    root: int = 0
    trained: int = 0
    owned: float = 0
    experts: int = 0
    trained_experts: int = 0


@dataclass
class Rehearsal:
    """Memory of rank 0 in a rehearsed step, and the sizes that it depends on.

    Attributes:
        peaks: bytes by phase and kind.
        resident: bytes by kind between steps, while responses are sampled.
        host: bytes that the engines keep in host memory between phases.
        parameters: number of parameters of the policy, or of the critic if there is no policy.
        trainable: how many of them are trained.
        largest_tensor: number of elements of the largest parameter.
        workload: rows of this rank.
        data_parallel_size: number of ranks with different rows.
        fully_read: number of elements of the parameters that each rank makes of full tensors on the host.
        micro_batches: all rows of this rank.
        models: sizes of the models by role: policy, critic, reference.
        copied_back: bytes of `host` that training changes, so that they are copied back: no frozen weights.
    """

    peaks: dict[str, dict[str, int]]
    resident: dict[str, int]
    host: int
    parameters: int
    trainable: int
    largest_tensor: int
    workload: Workload
    data_parallel_size: int
    micro_batches: Sequence[PackedRows] = ()
    models: Mapping[str, ModelSize] = field(default_factory=dict)
    fully_read: int = 0
    copied_back: int = 0


def rehearse(cfg: Any, roles: Roles, world: int, image_tokens: int | None) -> Rehearsal:
    """Take one step of a recipe as rank 0 of `world` ranks would.

    Args:
        cfg: options of the recipe.
        roles: models of the recipe.
        world: number of ranks.
        image_tokens: image tokens of each prompt; see `longest_batch`.

    Raises:
        ValueError: the engine or the model refuses an option.
    """
    models = _models(cfg, roles)
    use_planned_attention()
    try:
        with fake_ranks(world) as ledger, planned_recurrence(models.values()):
            return _rehearse(cfg, roles, models, ledger, image_tokens)
    finally:
        use_own_attention()


def _models(cfg: Any, roles: Roles) -> dict[str, Any]:
    """The models by role, on the meta device, with their adapters."""
    dtype, models = getattr(torch, cfg.dtype), dict[str, Any]()
    if roles.reference is not None:
        models["reference"] = empty(roles.reference, roles.reference.dtype or dtype)
        if roles.reference is roles.policy:  # not a teacher: frozen as in `build_reference`
            freeze_parts(cfg, models["reference"])
    if roles.policy is not None:
        models["policy"] = empty_trained_part(cfg, empty(roles.policy, dtype))
    if roles.critic is not None:
        models["critic"] = empty_trained_part(cfg, with_value_head(empty(roles.critic, dtype)), head=True)
    return models


def _rehearse(cfg: Any, roles: Roles, models: dict[str, Any], ledger: Ledger, image_tokens: int | None) -> Rehearsal:
    config, counts = roles.policy or roles.critic, _counts(models.get("policy") or models["critic"])
    ledger.logits_width = config.get_text_config().vocab_size
    engines = _build_engines(cfg, models, ledger)
    first = engines.get("policy") or engines["critic"]
    size, rows_together = first.data_parallel_size, roles.rows_together
    workload = longest_batch(cfg, config, size, image_tokens, rows_together=rows_together)
    batch = largest_micro_batches(workload, config, cfg.micro_batch_tokens, share_prompts=first.share_prompts)
    sizes = {name: _model_size(engine.module) for name, engine in engines.items()}
    resident = _run_phases(cfg, roles, engines, batch, ledger)
    return Rehearsal(
        peaks=_of_later_steps(ledger.peaks, resident, several_updates=optimizer_steps(cfg) > 1),
        resident=resident,
        host=sum(getattr(engine, "host_bytes", 0) for engine in engines.values()),
        parameters=counts.parameters,
        trainable=counts.trainable,
        largest_tensor=counts.largest_tensor,
        workload=workload,
        data_parallel_size=size,
        fully_read=counts.fully_read,
        micro_batches=packed_rows(workload, cfg.micro_batch_tokens, share_prompts=first.share_prompts),
        models=sizes,
        copied_back=sum(map(_copied_back, engines.values())) if cfg.offload_between_phases else 0,
    )


def _copied_back(engine: Any) -> int:
    """Bytes of an offloaded engine without those of frozen weights, whose copies on the host stay valid."""
    if engine.optimizer is None:
        return 0
    frozen = local(p for p in engine.module.parameters() if not p.requires_grad)
    return engine.host_bytes - sum(x.numel() * x.element_size() for x in frozen)


def _build_engines(cfg: Any, models: dict[str, Any], ledger: Ledger) -> dict[str, Any]:
    """The engines by role. Their weights are marked in the ledger."""
    engines: dict[str, Any] = {}
    for name, model in models.items():
        without_memory(model)
        kind = "value_model" if name == "critic" else "language_model"
        options = {**_options(cfg, model.config), "model": model}
        if name == "reference":
            only_scores: dict[str, Any] = {"only_scores": True} if cfg.engine == "fsdp2" else {}
            engines[name] = make_engine(cfg.engine, kind, **options, **only_scores)
        else:
            engines[name] = training_engine(cfg, kind, lr=0.0, optimizer_steps=1, fused=True, **options)
        kept = "reference" if name == "reference" else "parameters"
        ledger.mark(kept, local(engines[name].module.parameters()))
    for engine in engines.values():
        use_packed_vision_attention(engine.base, engine.config)
        use_planned_attention()
    return engines


def _run_phases(cfg: Any, roles: Roles, engines: dict[str, Any], batch: Batch, ledger: Ledger) -> dict[str, int]:
    """One step: the reference's log-probabilities, training, and weights for the sampler.

    Returns:
        Bytes by kind that are kept between steps, among them the copy of the teacher's output layer in `functions`.
    """
    first = engines.get("policy") or engines["critic"]
    functions = {}
    if roles.whole_vocabulary:
        functions["divergence"] = _divergence(engines["reference"], batch, ledger)
    elif roles.reference is not None:
        ledger.begin("reference")
        engines["reference"].infer_batch(batch)
    if roles.adapter_reference:
        ledger.begin("reference")
        with first.disable_adapter():
            first.infer_batch(batch)
    for name in ("critic", "policy"):
        if name in engines:
            prefix = "" if name == "policy" or len(engines) == 1 else f"{name}: "
            _train(engines[name], batch, ledger, prefix, functions if name == "policy" else {})
    if generates(cfg):
        _send_weights(first, cfg, ledger)
    return ledger.bytes


def _divergence(reference: Any, batch: Batch, ledger: Ledger) -> Callable[[Tensor, Mapping[str, Tensor]], Tensor]:
    """A function of the policy's logits that compares them with the reference's, as recipes/distill.py does.

    The reference's hidden states are kept on the host, so those in the batch take no memory here.
    """
    output_layer = reference.output_layer()
    ledger.mark("reference", [x for x in output_layer.keywords.values() if isinstance(x, Tensor)])
    ledger.begin("reference")
    hidden = reference.hidden_states(batch)
    batch.add_token_fields(hidden=hidden.new_zeros(1, 1).expand(hidden.shape))

    def function(logits: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        return jsd_loss(logits, output_layer(fields["hidden"])[:, : logits.shape[1]])

    return function


def _of_later_steps(
    peaks: dict[str, dict[str, int]], resident: dict[str, int], *, several_updates: bool
) -> dict[str, dict[str, int]]:
    """Peaks by phase in later steps, when the optimizer state exists from the start.

    With several updates on a batch, state that is offloaded between phases is there from the second forward on.
    """
    later_peaks = {}
    for phase, kinds in peaks.items():
        optimizer = max(kinds.get("optimizer", 0), resident.get("optimizer", 0))
        if several_updates and phase.endswith("forward and backward"):
            step = peaks[phase.replace("forward and backward", "optimizer step")]
            optimizer = max(optimizer, step["optimizer"])
        later_peaks[phase] = {**kinds, "optimizer": optimizer} if optimizer else kinds
    return later_peaks


def _options(cfg: Any, config: Any) -> dict[str, Any]:
    """Engine options as on a GPU, but not compiled. Any suppressed token id will do: only shapes matter."""
    cfg = replace(cfg, use_torch_compile=False)
    suppressed = {"suppressed_token_ids": torch.tensor([0])} if has_vision(config) else {}
    return {"device": "cpu", "compute_dtype": torch.bfloat16, **shared_options(cfg, None, config), **suppressed}


def _model_size(module: torch.nn.Module) -> ModelSize:
    """The sizes of a model after `fully_shard`; of matrices that tensor-parallel ranks share, a rank's part."""
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule) and unit is not module]
    in_units = {id(p) for unit in units for p in unit.parameters()}
    weights = {id(p): _gathered_numel(p) * (1 if p.dtype == torch.uint8 else HALF) for p in module.parameters()}
    return ModelSize(
        parameters=sum(weight_counts(module)),
        weights=sum(weights.values()),
        root=sum(size for key, size in weights.items() if key not in in_units),
        trained=sum(_gathered_numel(p) for p in module.parameters() if p.requires_grad),
        owned=sum(x.numel() for x in local(p for p in module.parameters() if p.requires_grad)),
    )


def _gathered_numel(p: Tensor) -> int:
    """Number of elements of a parameter that FSDP gathers: all, or those of a tensor-parallel rank."""
    mesh: Any = getattr(p, "device_mesh", None)
    is_shared = mesh is not None and "tp" in (mesh.mesh_dim_names or ())
    return p.numel() // mesh["tp"].size() if is_shared else p.numel()


class Counts(NamedTuple):
    """Numbers of elements of a model's parameters: of all, of those that are trained, of the largest one, and of those
    that are made of full tensors."""

    parameters: int
    trainable: int
    largest_tensor: int
    fully_read: int


def _counts(model: Any) -> Counts:
    sizes, base = weight_counts(model), model.get_base_model() if hasattr(model, "get_base_model") else model
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    names = fully_read_parameters(base)
    fully_read = sum(p.numel() for name, p in base.named_parameters() if name in names)
    return Counts(sum(sizes), trainable, max(sizes), fully_read)


def _train(engine: Any, batch: Batch, ledger: Ledger, prefix: str, functions: Mapping[str, Any]) -> None:
    """A training step in two phases: forward and backward, optimizer step."""
    kept = set(engine.module.parameters())
    parameters: Sequence[Tensor] = [p for p in kept if p.requires_grad]
    outputs = engine.known_outputs

    def mark_gradients(*_: Any) -> None:
        ledger.mark("gradients", local(p.grad for p in parameters if p.grad is not None))

    def loss(out: Any, mb: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        mark_gradients()
        ledger.mark(GATHERED, set(engine.module.parameters()) - kept)
        return token_mean(sum(out.tensors.values()), mb.mask, mb.total_tokens), {}

    def before(*_: Any) -> None:
        mark_gradients()
        ledger.begin(f"{prefix}optimizer step")

    def after(*_: Any) -> None:
        ledger.mark("optimizer", local(_optimizer_state(engine.optimizer)), at_peak=True)

    engine.optimizer.register_step_pre_hook(before)
    engine.optimizer.register_step_post_hook(after)
    ledger.begin(f"{prefix}forward and backward")
    engine.train_batch(batch, loss, outputs, **({"logit_functions": functions} if functions else {}))
    ledger.end()


def _send_weights(engine: Any, cfg: Any, ledger: Ledger) -> None:
    """Gather weights, or adapters alone, in the way that the sampling back end needs.

    hf is sent none: it samples with the gathered modules.
    """
    ledger.begin("weight sync")
    if cfg.rollout == "hf":
        with engine.gathered():
            pass
    elif sends_adapters(cfg):
        weights = list(engine.get_adapter(dtype=torch.bfloat16)[1])  # a file of them all is made
        del weights
    elif cfg.rollout in ("vllm_server", "sglang"):
        for bucket in buckets(engine.get_per_tensor_param(dtype=torch.bfloat16), BUCKET_BYTES):
            sent = bucket  # by rank 0, while the next one is filled
            del bucket
        del sent
    else:
        for weight in engine.get_per_tensor_param(dtype=torch.bfloat16):
            del weight  # free it before the next one is gathered
    ledger.end()


def _optimizer_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]


def local(tensors: Iterable[Any]) -> list[Tensor]:
    """This rank's shards of DTensors; other tensors as they are."""
    return [local_part(x) for x in tensors]


def empty(config: Any, dtype: torch.dtype) -> Any:
    """A model of this configuration: parameters on the meta device, buffers with real values."""
    return empty_model(config.name_or_path, copy.deepcopy(config), dtype=dtype)


def empty_trained_part(cfg: Any, model: Any, *, head: bool = False) -> Any:
    """As `trained_part`; the adapters of a model on the meta device stay there. Those of experts may be many GiB."""
    with mock.patch.object(adapt, "_initialise", lambda layer: None):
        return trained_part(cfg, model, head=head)


def without_memory(model: torch.nn.Module) -> None:
    """Replace each parameter by a new one. Inside `fake_ranks` it takes no memory. Tied parameters stay tied."""
    replaced: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, old in module.named_parameters(recurse=False):
            if id(old) not in replaced:
                tensor = torch.empty(old.shape, dtype=old.dtype)
                replaced[id(old)] = torch.nn.Parameter(tensor, requires_grad=old.requires_grad)
            setattr(module, name, replaced[id(old)])
