"""The Megatron-Core engine: tensor, pipeline, sequence, context and data parallelism behind the contract of fsdp2.

    engine = make_engine("megatron", model=model, tensor=2, pipeline=2, optimizer=lambda params: AdamW(params, lr=1e-6))

Weights come from a transformers model and go back under its names. Megatron's pipeline calls the loss closure, on its
last stage. Gradients are sums, as in every engine: its divisions by micro-batches and by ranks are switched off. On a
GPU the layers are Transformer Engine's where it is installed; without one, Megatron's with rlkit's own attention.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

try:
    from megatron.core import parallel_state
except ModuleNotFoundError as error:
    raise ImportError(f"the megatron engine needs megatron-core ({error}): pip install 'rlkit[megatron]'") from error
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

from rlkit.data.samples import Batch, Sample
from rlkit.engines import checkpoint
from rlkit.engines.distributed import all_reduce, init_distributed, make_model_parallel_group, reduce_metrics
from rlkit.engines.fsdp.sharded_loading import on_meta
from rlkit.engines.megatron.attention import share_of_row
from rlkit.engines.megatron.cpu import cuda_calls_on_host
from rlkit.engines.megatron.model import (
    Split,
    build,
    check,
    check_routing,
    embed,
    has_transformer_engine,
    is_moe,
    padded_vocabulary,
    transformer_config,
    use_split,
)
from rlkit.engines.megatron.optimizer import place, saved_state, shard_optimizer, take_state, wanted_state
from rlkit.engines.megatron.vocab_parallel import vocab_parallel_linear_logprobs, vocab_parallel_logprobs
from rlkit.engines.megatron.weights import (
    HEAD,
    Source,
    embedding_name,
    facts_of_stages,
    fuse,
    named,
    sources,
    whole_parameters,
)
from rlkit.engines.packing.inputs import ModelInputs, pack
from rlkit.engines.packing.micro_batches import LossFn, Outputs, add_up, check_same_rows, micro_batches, run_closure
from rlkit.engines.value_head import has_value_head
from rlkit.vlm.inputs import position_spec
from rlkit.vlm.loading import copy_with


class MegatronEngine:
    """Trains and scores a model of the families Qwen2, Qwen2.5, Qwen3, Qwen3-MoE, Llama or Qwen2.5-VL (with images).

    Ranks that share a tensor, a pipeline or a context are given the same rows.

    Args:
        model: from transformers, in float32 on the host; its weights are copied.
        processor: written beside the weights by `export_hf`.
        device: "cpu" or "cuda"; the GPU if there is one.
        optimizer: parameters -> torch.optim.AdamW; its state is sharded over data-parallel ranks. An engine without one
            only scores.
        scheduler: optimizer -> learning-rate scheduler, stepped once each `train_batch`.
        tensor: ranks that share each layer's matrices and the vocabulary.
        pipeline: stages of layers.
        context: ranks that share each sequence.
        sequence_parallel: tensor ranks share the tokens where they do not share a matrix: less memory.
        expert: ranks that share the experts of each layer, each expert whole on one of them. They are given rows of
            their own, except where they share a tensor too.
        micro_batch_tokens: most tokens in one forward; a longer row goes alone.
        temperature: of the distribution that is scored; the sampler's.
        suppressed_token_ids: [K] token ids that have probability 0 in the sampler, and so here.
        max_grad_norm: gradients are scaled down to this norm.
        use_fused_kernels: logprobs and entropy from hidden states, without the [N, V / tensor] logits.
        router_replay: where a batch has `routed_experts`, its tokens go to those experts, see rlkit.vlm.routers.
        use_remove_padding, ulysses_sequence_parallel_size: as in fsdp2, so that one list of options serves both; rows
            are always packed here, and long ones shared by `context`.
        enable_gradient_checkpointing: recompute each layer's activations in backward.
        compute_dtype: of activations and weights; the optimizer keeps float32 weights. bfloat16 on a GPU, float32 on a
            CPU.

    Attributes:
        data_parallel_rank, data_parallel_size: this rank's rows of a batch are
            `rows[engine.data_parallel_rank :: engine.data_parallel_size]`.
        data_parallel_group: one rank of each of them, for `rlkit.engines.distributed.reduce_metrics`.
        model_parallel_group: the ranks of one of them, which `make_rollout` is told of; None where each rank is one.

    Raises:
        ValueError: a model or a split that is not supported.
    """

    known_outputs: tuple[str, ...] = ("logprobs", "entropy")
    scalar = False

    def __init__(
        self,
        *,
        model: Any,
        processor: Any = None,
        device: str | None = None,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        tensor: int = 1,
        pipeline: int = 1,
        context: int = 1,
        sequence_parallel: bool = False,
        expert: int = 1,
        micro_batch_tokens: int = 16384,
        temperature: float = 1.0,
        suppressed_token_ids: Tensor | None = None,
        max_grad_norm: float = 1.0,
        use_fused_kernels: bool = False,
        router_replay: bool = False,
        use_remove_padding: bool = True,
        ulysses_sequence_parallel_size: int = 1,
        enable_gradient_checkpointing: bool = False,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.device = init_distributed(device)
        self.split = Split(tensor, pipeline, context, sequence_parallel, expert)
        if not use_remove_padding:
            raise ValueError("use_remove_padding: the megatron engine packs its rows; leave it on, or use fsdp2")
        if (size := ulysses_sequence_parallel_size) != 1:
            raise ValueError(f"ulysses_sequence_parallel_size: the megatron engine has context={size} instead")
        if hasattr(model, "get_base_model"):
            raise ValueError("model: adapters are not supported by the megatron engine; use the fsdp2 engine")
        if on_meta(model):
            raise ValueError("model: its weights are on the meta device, read ones expected: load_model(path)")
        if has_value_head(model) != self.scalar:
            raise ValueError(f"model: {'a' if self.scalar else 'no'} value head expected; see rlkit.engines.value_head")
        check(model.config, self.split, dist.get_world_size())
        self.processor, self.config, self.spec = processor, model.config, position_spec(model.config)
        self.micro_batch_tokens, self.temperature, self.max_grad_norm = micro_batch_tokens, temperature, max_grad_norm
        if router_replay and not is_moe(model.config):
            raise ValueError(f"router_replay: a model with experts expected, came {model.config.model_type}")
        self.use_fused_kernels, self.router_replay = use_fused_kernels, router_replay
        filling = range(model.config.get_text_config().vocab_size, padded_vocabulary(model.config, self.split))
        never = [*([] if suppressed_token_ids is None else suppressed_token_ids.tolist()), *filling]
        self.suppressed_token_ids = torch.tensor(never, device=self.device) if never else None
        dtype = compute_dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        with cuda_calls_on_host(self.device):
            use_split(self.split, self.device)
            self.data_parallel_group = parallel_state.get_data_parallel_group()
            self.data_parallel_rank = self.data_parallel_group.rank()
            self.data_parallel_size = self.data_parallel_group.size()
            self.model_parallel_group = make_model_parallel_group(self.data_parallel_rank, self.data_parallel_size)
            text = model.config.get_text_config()
            self.megatron_config = transformer_config(text, self.split, dtype, recompute=enable_gradient_checkpointing)
            self.model = build(
                model, self.megatron_config, self.device, scalar=self.scalar, without_logits=use_fused_kernels
            )
            self.parameters = named(self.model, self.megatron_config)
            tensors = sources(model)
            self._freeze(tensors)
            self._optimizer(optimizer)
            for parameter, names in self.parameters:
                whole = fuse([tensors[name].tensor for name in names], parameter, self.megatron_config)
                place(parameter, self.sharded, {"param": whole})
        self.scheduler = scheduler(self.optimizer) if scheduler and self.optimizer else None
        self.shapes = {name: source.tensor.shape for name, source in tensors.items()}
        self.stages = facts_of_stages(self.parameters, self.shapes)
        self.skeleton = _without_weights(model)
        self.saved_shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    # --- the closure and its micro-batches

    def train_batch(self, batch: Batch, loss_fn: LossFn, outputs: Sequence[str] = ("logprobs",)) -> dict[str, float]:
        """One optimizer step on this data-parallel rank's rows; see `Fsdp2Engine.train_batch`."""
        if self.sharded is None or self.optimizer is None:
            raise ValueError("train_batch: this engine was made without an optimizer")
        counts = torch.stack([batch.mask.sum(), batch.mask.any(1).sum()])
        batch.total_tokens, batch.total_sequences = self.global_sum(counts).unbind()
        self.module.train()
        self.module.zero_grad_buffer()
        self.optimizer.zero_grad()

        def finish(rows: list[int], part: Batch, inputs: ModelInputs, result: Tensor) -> tuple[Tensor, Tensor, Any]:
            loss, report = run_closure(loss_fn, self._outputs(inputs, result, outputs), part.to(self.device))
            return loss, torch.zeros((), dtype=torch.int), report

        with cuda_calls_on_host(self.device):
            reports = self._run(batch, outputs, finish, train=True)
            self.sharded.prepare_grads()
            grad_norm = float(self.sharded.clip_grad_norm(self.max_grad_norm))
            finite = grad_norm < float("inf")
            lr = self.optimizer.param_groups[0]["lr"]
            if finite:
                self.sharded.step_with_ready_grads()
        if self.scheduler is not None:
            self.scheduler.step()
        metrics = self._metrics(reports)
        return {**metrics, "grad_norm": grad_norm, "lr": lr, "skipped_steps": float(not finite)}

    @torch.no_grad()
    def infer_batch(self, batch: Batch, outputs: Sequence[str] = ("logprobs",)) -> dict[str, Tensor]:
        """[B, T] outputs for this rank's rows, in their order, on the host; 0 where the mask is False."""
        self.module.eval()

        def finish(rows: list[int], part: Batch, inputs: ModelInputs, result: Tensor) -> tuple[Tensor, Tensor, Any]:
            found = self._outputs(inputs, result, outputs).tensors
            return result.new_zeros(()), torch.zeros((), dtype=torch.int), (rows, found)

        with cuda_calls_on_host(self.device):
            reports = self._run(batch, outputs, finish, train=False)
        group = parallel_state.get_pipeline_model_parallel_group()
        results = {name: torch.zeros(batch.tokens.shape, dtype=torch.float32) for name in outputs}
        for name, result in results.items():
            for rows, found in reports:
                values = found[name].float().cpu()
                result[torch.tensor(rows, dtype=torch.long), : values.shape[1]] = values
            if group.size() > 1:
                dist.broadcast(result, group=group, group_src=group.size() - 1)
        return results

    def _run(self, batch: Batch, outputs: Sequence[str], finish: Callable[..., Any], *, train: bool) -> list[Any]:
        """Megatron's schedule over the micro-batches; what `finish` reports of each, on the last stage alone."""
        if unknown := set(outputs) - set(self.known_outputs):
            raise ValueError(f"outputs: {sorted(unknown)} not known; there are {', '.join(self.known_outputs)}")
        check_same_rows(batch, self.data_parallel_rank, self.data_parallel_size)
        if self.router_replay and "routed_experts" in batch.fields:
            check_routing(batch.routed_experts, self.megatron_config)
        pieces = list(micro_batches(batch, self.micro_batch_tokens, self.config))
        if not pieces:
            raise ValueError("batch: no rank has rows")

        def step(waiting: Iterator[tuple[list[int], Sample | None]], model: nn.Module) -> tuple[Tensor, Any]:
            rows, blank = next(waiting)
            part = batch.select(rows)
            replay = self.router_replay
            whole = pack(part, self.spec, self.device, share_prompts=False, blank=blank, router_replay=replay)
            inputs = share_of_row(
                whole,
                ranks=self.split.context,
                rank=parallel_state.get_context_parallel_rank(),
                multiple=self.split.tensor if self.split.sequence_parallel else 1,
                on_host=not has_transformer_engine(self.device),
            )
            source = inputs.kwargs["packed_seq_params"].source
            embedded = embed(self.model, inputs.kwargs["input_ids"], source, whole.kwargs, self.config)
            return model(**inputs.kwargs, decoder_input=embedded), partial(finish, rows, part, inputs)

        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(pieces),
            model=[self.module],
            num_microbatches=len(pieces),
            seq_length=1,  # the lengths of packed rows are sent along
            micro_batch_size=1,
            forward_only=not train,
        )

    def _outputs(self, inputs: ModelInputs, result: Tensor, outputs: Sequence[str]) -> Outputs:
        """[1, n, ...] of the last stage's output layer -> [B, T] of whole rows."""
        kept = self._results(result[0][inputs.keep], inputs)
        tensors = {name: inputs.scatter(kept[name]) for name in outputs}
        if self.split.context > 1:  # each token is one rank's; backward leaves each rank its own
            group = parallel_state.get_context_parallel_group()
            tensors = {n: reduce_from_tensor_model_parallel_region(x.clone(), group) for n, x in tensors.items()}
        return Outputs(tensors, 0.0 * next(iter(kept.values()))[len(inputs.slots) :].sum())

    def _results(self, kept: Tensor, inputs: ModelInputs) -> dict[str, Tensor]:
        options = {"suppress": self.suppressed_token_ids, "group": parallel_state.get_tensor_model_parallel_group()}
        if self.use_fused_kernels:
            weight = self.model.output_layer.weight
            if weight is None:  # tied, and on the same stage
                weight = self.model.embedding.word_embeddings.weight
            found = vocab_parallel_linear_logprobs(kept, weight, inputs.targets, self.temperature, **options)
        else:
            found = vocab_parallel_logprobs(kept, inputs.targets, self.temperature, **options)
        logprobs, entropy = found
        return {"logprobs": logprobs, "entropy": entropy}

    def global_sum(self, x: Tensor | float) -> Tensor:
        """Sum over data-parallel ranks, on the host."""
        return all_reduce(torch.as_tensor(x), group=self.data_parallel_group)

    def _metrics(self, reports: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """Metrics of all micro-batches and data-parallel ranks; the last stage has them, the others are told."""
        group = parallel_state.get_pipeline_model_parallel_group()
        totals: list[Any] = [None]
        if parallel_state.is_pipeline_last_stage():
            totals = [reduce_metrics(add_up(reports), self.data_parallel_group)]
        if group.size() > 1:
            dist.broadcast_object_list(totals, group=group, group_src=group.size() - 1)
        return totals[0]

    def disable_adapter(self) -> AbstractContextManager[Any]:
        """Raises a ValueError: this engine has no adapters."""
        raise ValueError("disable_adapter: the megatron engine has no adapters; keep a second engine as the reference")

    # --- weights and checkpoints

    def get_per_tensor_param(self, bucket_bytes: int = 0) -> Iterator[tuple[str, Tensor]]:
        """(HF name, whole tensor) of every parameter; all ranks iterate together.

        Args:
            bucket_bytes: as many as fit in this are gathered at once, which is most of the memory it takes; those of
                one matrix at a time by default.
        """
        stages = self.stages
        yield from whole_parameters(self.parameters, stages, self.megatron_config, self.device, bucket_bytes)

    @contextmanager
    def gathered(self) -> Iterator[Any]:
        """The transformers model with whole weights, a copy on every rank that is gone when the context ends: sampling
        gathers them once."""
        yield copy_with(self.skeleton, dict(self.get_per_tensor_param())).to(self.device)

    def export_hf(self, path: str | Path) -> None:
        """Write a Hugging Face model directory: config, safetensors, processor. Complete or absent."""
        path = Path(path)
        first = dist.get_rank() == 0
        tensors = {name: tensor.cpu() for name, tensor in self.get_per_tensor_param() if first}
        if first:
            part = path.with_name(path.name + ".part")
            shutil.rmtree(part, ignore_errors=True)
            self.skeleton.save_pretrained(part, state_dict=tensors)
            if self.processor is not None:
                self.processor.save_pretrained(part)
            checkpoint.replace_directory(part, path)
        dist.barrier()

    def save_checkpoint(self, path: str | Path, extra: Mapping[str, Any] | None = None, *, wait: bool = True) -> None:
        """Weights that train, optimizer, scheduler and RNG, with `extra` (JSON); complete or absent.

        The form is that of the fsdp2 engine: any split, and either engine, loads it.
        """
        state = saved_state(self.parameters, self.sharded, self.groups, self.megatron_config)
        embedding = embedding_name(self.megatron_config)
        if self.model.share_embeddings_and_output_weights and embedding in state["model"]:
            state["model"][HEAD] = state["model"][embedding]
        state |= checkpoint.random_states(self.device)
        schedule = self.scheduler.state_dict() if self.scheduler is not None else None
        checkpoint.save(path, state, {"scheduler": schedule, "extra": dict(extra or {})}, wait=wait)

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Take up a checkpoint, see `save_checkpoint`; returns its `extra`.

        Raises:
            ValueError: names the file that is missing or cut short, or says that the checkpoint is of another model.
        """
        saved = checkpoint.read_manifest(path)
        state = wanted_state(self.parameters, self.sharded, self.groups, self.saved_shapes)
        there = checkpoint.saved_names(path)
        state |= {name: x for name, x in checkpoint.random_states(self.device).items() if name in there}
        checkpoint.load(path, state)
        take_state(self.parameters, self.sharded, self.megatron_config, state)
        if self.scheduler is not None and saved["scheduler"] is not None:
            self.scheduler.load_state_dict(saved["scheduler"])
        checkpoint.set_random_states(state, self.device)
        return saved["extra"]

    def to(self, device: torch.device | str, *, model: bool = True, optimizer: bool = True) -> None:
        """Move weights, gradients' room and optimizer state off the GPU, e.g. while a sampler needs it, or back."""
        if self.device.type == "cpu":
            return
        away = torch.device(device).type == "cpu"
        if model and self.sharded is None:
            self.model.to(device)
        elif model:
            for buffer in self.module.buffers + self.module.expert_parallel_buffers:
                buffer.offload_to_cpu() if away else buffer.reload_from_cpu()
        if optimizer and self.sharded is not None:
            self.sharded.offload_to_cpu() if away else self.sharded.restore_from_cpu()

    def _freeze(self, tensors: Mapping[str, Source]) -> None:
        """What does not train in the transformers model does not train here."""
        for parameter, names in self.parameters:
            if len({tensors[name].trains for name in names}) > 1:
                raise ValueError(f"model: {', '.join(names)} lie in one matrix; freeze all of them or none")
            parameter.requires_grad_(tensors[names[0]].trains)

    def _optimizer(self, make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None) -> None:
        """Megatron's data parallelism and its sharded optimizer around the model; without one, the model alone."""
        self.module: Any = self.model
        self.sharded = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.groups: dict[nn.Parameter, int] = {}
        if make is not None:
            trains = torch.tensor(sum(p.requires_grad for p in self.model.parameters()))
            if not all_reduce(trains, dist.ReduceOp.MIN):
                raise ValueError("model: a pipeline stage has no parameter that trains; use fewer stages")
            options = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
            self.module = DistributedDataParallel(self.megatron_config, options, self.model)
            self.sharded, self.groups = shard_optimizer(make, self.module)
            self.optimizer = self.sharded.optimizer


def _without_weights(model: Any) -> Any:
    """The module on the meta device, for what it knows beside its weights."""
    empty = {id(x): torch.empty_like(x, device="meta") for x in [*model.parameters(), *model.buffers()]}
    kept = {id(x): nn.Parameter(empty[id(x)]) for x in model.parameters()}
    return copy.deepcopy(model, {**empty, **kept})


class MegatronValueEngine(MegatronEngine):
    """Trains and scores a value or reward model, see `Fsdp2ValueEngine` and rlkit.engines.value_head."""

    known_outputs = ("values",)
    scalar = True

    def train_batch(self, batch: Batch, loss_fn: LossFn, outputs: Sequence[str] = ("values",)) -> dict[str, float]:
        """As `MegatronEngine.train_batch`, of values."""
        return super().train_batch(batch, loss_fn, outputs)

    def infer_batch(self, batch: Batch, outputs: Sequence[str] = ("values",)) -> dict[str, Tensor]:
        """As `MegatronEngine.infer_batch`, of values."""
        return super().infer_batch(batch, outputs)

    def _results(self, kept: Tensor, inputs: ModelInputs) -> dict[str, Tensor]:
        return {"values": kept[:, 0]}
