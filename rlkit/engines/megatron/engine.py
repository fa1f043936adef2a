"""The Megatron-Core engine: tensor, pipeline, sequence, context, expert and data parallelism.

    engine = make_engine("megatron", model=model, tensor=2, pipeline=2, optimizer=lambda params: AdamW(params, lr=1e-6))

It has the methods of the fsdp2 engine. Weights come from a transformers model or from its files, and are returned under
its names. Megatron's pipeline schedule calls the loss closure, on the last stage. Gradients are sums, as in every
engine: Megatron would divide them by micro-batches and ranks, which is switched off. On a GPU the layers are
Transformer Engine's if it is installed; otherwise they are Megatron's own with rlkit's attention.
"""

from __future__ import annotations

import copy
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
    raise ImportError(
        f"megatron engine: expected megatron-core, got none ({error}); pip install -e '.[megatron]'"
    ) from error
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

from rlkit.data.samples import Batch, Sample
from rlkit.engines import checkpoint
from rlkit.engines.distributed import (
    BUCKET_BYTES,
    all_reduce,
    check_same_rows,
    init_distributed,
    make_model_parallel_group,
    reduce_metrics,
    start_copy_to_host,
)
from rlkit.engines.export import export_hf
from rlkit.engines.flops import count_pass
from rlkit.engines.logit_functions import (
    LogitFunction,
    apply_to_hidden_states,
    head_logits,
    topk_of_chunks,
)
from rlkit.engines.loss_closure import LossFn, Outputs, check_output_names, compute_loss, sum_metrics
from rlkit.engines.megatron.attention import context_parallel_inputs
from rlkit.engines.megatron.cpu import HOST, cuda_calls_on_host
from rlkit.engines.megatron.hf_tensors import LM_HEAD, HFTensor, hf_tensors, readable_tensors
from rlkit.engines.megatron.model import (
    build_model,
    check_routed_experts,
    embed_with_media,
    initialize_parallel_state,
    megatron_config,
)
from rlkit.engines.megatron.optimizer import (
    checkpoint_state,
    clip_grad_norm,
    expected_shapes,
    load_param_groups,
    load_tensors,
    param_groups,
    set_values,
    wrap_model,
)
from rlkit.engines.megatron.supported import ParallelDims, check_supported, is_moe, padded_vocabulary
from rlkit.engines.megatron.vocab_parallel import vocab_parallel_linear_logprobs
from rlkit.engines.megatron.weights import (
    TensorInfo,
    copy_local_part,
    embedding_name,
    freeze_parameters,
    full_parameters,
    map_parameters,
    tensors_of_stages,
)
from rlkit.engines.offload import OffloadingEngine, with_weights_on_device, without_memory_of
from rlkit.engines.packing.inputs import ModelInputs, prepare_model_inputs
from rlkit.engines.packing.micro_batches import micro_batches
from rlkit.engines.sampled_copy import sampled_copy
from rlkit.engines.sampler_dtype import sampler_dtype
from rlkit.engines.value_head import check_head_trains, has_value_head
from rlkit.losses.logprobs import TopkLogprobs, suppress_tokens, tokens_per_chunk
from rlkit.vlm.inputs import position_spec

# (loss, number of tokens, what the engine needs of the micro-batch), as Megatron's schedule expects it
Finish = Callable[[list[int], Batch, ModelInputs, Tensor], tuple[Tensor, Tensor, Any]]


class MegatronEngine(OffloadingEngine):
    """Trains and scores a model of the families Qwen2, Qwen2.5, Qwen3, Qwen3-MoE, Llama or Qwen2.5-VL (images, videos).

    Ranks that share a tensor, a pipeline or a context are given the same rows.

    Args:
        model: from transformers; its weights are copied. If they are on the meta device, see
            `rlkit.vlm.load_model(..., on_meta=True)`, each rank reads only its part of them from the model's files.
        processor: saved beside the weights by `export_hf`.
        device: "cpu" or "cuda"; by default the GPU if there is one.
        optimizer: parameters -> torch.optim.AdamW; its state is sharded over data-parallel ranks. An engine without one
            can only score.
        scheduler: optimizer -> learning-rate scheduler, stepped once per `train_batch`.
        tensor: tensor parallelism: ranks that share each layer's matrices and the vocabulary.
        pipeline: pipeline parallelism: number of stages.
        context: context parallelism: ranks that share each sequence.
        sequence_parallel: tensor ranks share the tokens in layers that are not tensor-parallel, which saves memory.
        expert: expert parallelism: ranks that share the experts of each layer; an expert is not split. These ranks have
            rows of their own unless they also share a tensor.
        micro_batch_tokens: most tokens in one forward; a longer row is a micro-batch by itself.
        temperature: sampling temperature; log-probabilities are computed at the same temperature.
        suppressed_token_ids: [K] token ids that the sampler never samples; their probability is 0 here, too.
        max_grad_norm: gradients are scaled down to this norm.
        share_prompts: rows that answer the same prompt contain its tokens and images once, see `Fsdp2Engine`.
        use_fused_kernels: no effect; logprobs and entropy are always computed from the hidden states of scored tokens,
            in chunks, without the [N, V / tensor] logits.
        router_replay: tokens of a batch with `routed_experts` go to those experts, see rlkit.vlm.routers.
        use_remove_padding, ulysses_sequence_parallel_size: accepted at their defaults only, so that both engines take
            the same options: rows are always packed, and `context` shares long sequences.
        enable_gradient_checkpointing: recompute each layer's activations in backward.
        compute_dtype: of activations and weights; the optimizer keeps float32 weights. By default bfloat16 on a GPU and
            float32 on a CPU.
        offload_between_phases: weights and optimizer state are in (pinned) host memory while no method of the engine
            needs them, see `Fsdp2Engine`.
        keep_gradients: gradients stay after `train_batch`, to be looked at. By default their buffers are freed, which
            leaves room for a sampler.

    Attributes:
        data_parallel_rank, data_parallel_size: this rank's rows of a batch are
            `rows[engine.data_parallel_rank :: engine.data_parallel_size]`.
        data_parallel_group: one rank of each model-parallel group.
        model_parallel_group: the ranks that are given the same rows; None if each rank has its own.

    Raises:
        ValueError: a model or degrees of parallelism that are not supported.
    """

    known_outputs: tuple[str, ...] = ("logprobs", "entropy")
    value_head = False

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
        share_prompts: bool = True,
        use_fused_kernels: bool = False,
        router_replay: bool = False,
        use_remove_padding: bool = True,
        ulysses_sequence_parallel_size: int = 1,
        enable_gradient_checkpointing: bool = False,
        compute_dtype: torch.dtype | None = None,
        offload_between_phases: bool = False,
        keep_gradients: bool = False,
    ) -> None:
        self.device = init_distributed(device)
        self.dims = ParallelDims(tensor, pipeline, context, sequence_parallel, expert)
        if not use_remove_padding:
            raise ValueError(
                "use_remove_padding: expected True in the megatron engine, got False; use the fsdp2 engine"
            )
        if (size := ulysses_sequence_parallel_size) != 1:
            raise ValueError(
                f"ulysses_sequence_parallel_size: expected 1 in the megatron engine, got {size}; use context={size}"
            )
        self._check_model(model, trains=optimizer is not None, router_replay=router_replay)
        self.processor, self.config, self.spec = processor, model.config, position_spec(model.config)
        self.micro_batch_tokens, self.temperature, self.max_grad_norm = micro_batch_tokens, temperature, max_grad_norm
        self.share_prompts, self.router_replay, self.keep_gradients = share_prompts, router_replay, keep_gradients
        self.suppressed_token_ids = self._suppressed_with_padding(suppressed_token_ids)
        dtype = compute_dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        with cuda_calls_on_host(self.device):
            self._make_groups()
            recompute = enable_gradient_checkpointing
            self.megatron_config = megatron_config(self.config, self.dims, dtype, recompute=recompute)
            self._build(model, optimizer)
            if optimizer is not None:
                self._free_gradients()
        self.scheduler = scheduler(self.optimizer) if scheduler and self.optimizer else None
        self._set_up_offloading(self.model.parameters, self._optimizer_state, enabled=offload_between_phases)

    def _check_model(self, model: Any, *, trains: bool, router_replay: bool) -> None:
        if hasattr(model, "get_base_model"):
            raise ValueError("model: expected no adapters in the megatron engine, got some; use the fsdp2 engine")
        if has_value_head(model) != self.value_head:
            wanted, found = ("a", "no") if self.value_head else ("no", "a")
            raise ValueError(
                f"model: expected {wanted} value head, got {found} value head; see rlkit.engines.value_head"
            )
        if self.value_head and trains:
            check_head_trains(model)
        check_supported(model.config, self.dims, dist.get_world_size())
        if router_replay and not is_moe(model.config):
            raise ValueError(f"router_replay: expected a mixture of experts, got {model.config.model_type}")

    def _suppressed_with_padding(self, token_ids: Tensor | None) -> Tensor | None:
        """The suppressed token ids and those beyond the vocabulary, which only make it divisible by tensor ranks."""
        padding = range(self.config.get_text_config().vocab_size, padded_vocabulary(self.config, self.dims))
        all_ids = [*([] if token_ids is None else token_ids.tolist()), *padding]
        return torch.tensor(all_ids, device=self.device) if all_ids else None

    def _make_groups(self) -> None:
        initialize_parallel_state(self.dims, self.device)
        self.data_parallel_group = parallel_state.get_data_parallel_group()
        self.data_parallel_rank = self.data_parallel_group.rank()
        self.data_parallel_size = self.data_parallel_group.size()
        self.model_parallel_group = make_model_parallel_group(self.data_parallel_rank, self.data_parallel_size)

    def _build(self, model: Any, make_optimizer: Callable[..., torch.optim.Optimizer] | None) -> None:
        """Make this rank's part of the model and the optimizer, and set the weights."""
        self.model = build_model(model, self.megatron_config, self.device, value_head=self.value_head)
        self.parameters = map_parameters(self.model, self.megatron_config)
        tensors = hf_tensors(model)
        freeze_parameters(self.parameters, tensors)
        self.module: Any = self.model
        self.distributed_optimizer, self.groups = None, dict[nn.Parameter, int]()
        if make_optimizer is not None:
            wrapped = wrap_model(self.model, self.megatron_config, make_optimizer)
            self.module, self.distributed_optimizer, self.groups = wrapped
        self.optimizer = None if self.distributed_optimizer is None else self.distributed_optimizer.optimizer
        self._set_weights(model, tensors)
        self.stages = tensors_of_stages(self.parameters, {name: x.tensor.shape for name, x in tensors.items()})
        self._stages_in: dict[torch.dtype | None, list[list[TensorInfo]]] = {}  # with the dtypes of a sampler's dtype
        self.hf_model = _without_weights(model)
        self.hf_shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.trained_names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def _set_weights(self, model: Any, tensors: Mapping[str, HFTensor]) -> None:
        """Set this rank's weights from the transformers model, or from its files if it is on the meta device."""
        with readable_tensors(model, tensors) as sources:
            for parameter, names in self.parameters:
                dtype = tensors[names[0]].tensor.dtype  # that the caller of `load_model` asked for
                holds_all = torch.promote_types(dtype, parameter.dtype) == parameter.dtype
                # the optimizer's float32 weights may be more exact than the parameter
                part = parameter.data if holds_all else torch.empty(parameter.shape, dtype=dtype)
                copy_local_part(part, [sources[name] for name in names], parameter, self.megatron_config, dtype)
                set_values(parameter, self.distributed_optimizer, {"param": part})

    # --- training and scoring

    @with_weights_on_device
    def train_batch(
        self,
        batch: Batch,
        loss_fn: LossFn,
        outputs: Sequence[str] = ("logprobs",),
        *,
        logit_functions: Mapping[str, LogitFunction] | None = None,
    ) -> dict[str, float]:
        """One optimizer step on this data-parallel rank's rows; see `Fsdp2Engine.train_batch`."""
        if self.distributed_optimizer is None or self.optimizer is None:
            raise ValueError("optimizer: expected one for train_batch, got None")
        self._check_trained()
        counts = torch.stack([batch.mask.sum(), batch.mask.any(1).sum()])
        batch.total_tokens, batch.total_sequences = self.global_sum(counts).unbind()
        self._start_loading_state()
        self.module.train()

        def finish(rows: list[int], mb: Batch, inputs: ModelInputs, result: Tensor) -> tuple[Tensor, Tensor, Any]:
            out = self._outputs(mb, inputs, result, outputs, logit_functions or {})
            loss, metrics = compute_loss(loss_fn, out, mb.to(self.device))
            return loss, torch.zeros((), dtype=torch.int), metrics

        with cuda_calls_on_host(self.device):
            self.module.restore_grad_buffers()
            self.module.zero_grad_buffer()
            self.optimizer.zero_grad()
            metrics = self._run(batch, outputs, finish, train=True)
            self.distributed_optimizer.prepare_grads()
            grad_norm = clip_grad_norm(self.distributed_optimizer, self.max_grad_norm)
            is_finite = grad_norm < float("inf")
            lr = self.optimizer.param_groups[0]["lr"]
            if is_finite and batch.total_tokens:
                with self._changing_weights():
                    self.distributed_optimizer.step_with_ready_grads()
            self._free_gradients()
        if self.scheduler is not None:
            self.scheduler.step()
        reduced = self._reduce_metrics(metrics)
        return {**reduced, "grad_norm": grad_norm, "lr": lr, "skipped_steps": float(not is_finite)}

    def _check_trained(self) -> None:
        """Refuse what a recipe may have changed since the engine was built, and what would not be used.

        Raises:
            ValueError: another optimizer, or parameters that were frozen or unfrozen. Megatron's buffers have the
                gradients of those that were trained at first, and its optimizer their weights.
        """
        assert self.distributed_optimizer is not None
        if self.optimizer is not self.distributed_optimizer.optimizer:
            raise ValueError(
                "optimizer: expected that of the built engine in the megatron engine, got another; use fsdp2"
            )
        if changed := [n for n, p in self.module.named_parameters() if p.requires_grad != (p in self.groups)]:
            raise ValueError(
                "model: expected the same trained parameters in all steps of the megatron engine, got "
                f"{len(changed)} frozen or unfrozen later, such as {changed[0]}; use fsdp2"
            )

    def _free_gradients(self) -> None:
        """Free the gradients' memory until the next step, unless they are to be kept."""
        if not self.keep_gradients:
            assert self.optimizer is not None
            self.optimizer.zero_grad()
            self.module.offload_grad_buffers(empty_cache=False)

    @with_weights_on_device
    @torch.no_grad()
    def infer_batch(self, batch: Batch, outputs: Sequence[str] = ("logprobs",)) -> dict[str, Tensor]:
        """[B, T] outputs of this rank's rows, in their order, on the host; 0 where the mask is False."""
        self.module.eval()
        on_device = {name: torch.zeros(batch.tokens.shape, device=self.device) for name in outputs}

        def finish(rows: list[int], mb: Batch, inputs: ModelInputs, result: Tensor) -> tuple[Tensor, Tensor, Any]:
            tensors = self._outputs(mb, inputs, result, outputs, {}).tensors
            index = torch.tensor(rows, dtype=torch.long).to(self.device, non_blocking=True)
            for name, x in on_device.items():
                x[index, : mb.tokens.shape[1]] = tensors[name].float()
            return result.new_zeros(()), torch.zeros((), dtype=torch.int), None

        with cuda_calls_on_host(self.device):
            self._run(batch, outputs, finish, train=False)
        results = {name: x.cpu() for name, x in on_device.items()}
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() > 1:
            for result in results.values():
                dist.broadcast(result, group=group, group_src=group.size() - 1)
        return results

    def _run(self, batch: Batch, outputs: Sequence[str], finish: Finish, *, train: bool) -> list[Any]:
        """Run Megatron's schedule over the micro-batches; the third result of each `finish`, on the last stage."""
        check_output_names(outputs, self.known_outputs)
        check_same_rows(batch, self.data_parallel_rank, self.data_parallel_size)
        if self.router_replay and "routed_experts" in batch.fields:
            check_routed_experts(batch.routed_experts, self.megatron_config)
        count_pass(self, batch, backward=train)
        pieces = list(micro_batches(batch, self.micro_batch_tokens, self.config, share_prompts=self.share_prompts))
        return get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, batch, finish),
            data_iterator=iter(pieces),
            model=[self.module],
            num_microbatches=len(pieces),
            seq_length=1,  # the pipeline sends the length of each packed row
            micro_batch_size=1,
            forward_only=not train,
        )

    def _forward_step(
        self, batch: Batch, finish: Finish, pieces: Iterator[tuple[list[int], Sample | None]], model: nn.Module
    ) -> tuple[Tensor, Any]:
        """The forward of one micro-batch, and the function that the last stage calls with the result."""
        rows, dummy = next(pieces)
        mb = batch.select(rows)
        row = prepare_model_inputs(
            mb, self.spec, HOST, share_prompts=self.share_prompts, dummy=dummy, router_replay=self.router_replay
        )
        inputs = context_parallel_inputs(
            row,
            ranks=self.dims.context,
            rank=parallel_state.get_context_parallel_rank(),
            multiple=self.dims.tensor if self.dims.sequence_parallel else 1,
            device=self.device,
        )
        embedded = embed_with_media(self.model, inputs.kwargs, row.kwargs, self.config)
        return model(**inputs.kwargs, decoder_input=embedded), partial(finish, rows, mb, inputs)

    def _outputs(
        self,
        mb: Batch,
        inputs: ModelInputs,
        result: Tensor,
        outputs: Sequence[str],
        logit_functions: Mapping[str, LogitFunction],
    ) -> Outputs:
        """[1, n, H] hidden states, or [1, n, 1] values, of the last stage -> [B, T] of whole rows."""
        selected = result[0][inputs.logits_to_keep]
        results = self._logit_function_results(logit_functions, mb, inputs, selected) if logit_functions else {}
        known = self._results(selected, inputs)
        results |= {name: known[name] for name in outputs}
        tensors = {name: inputs.scatter(x) for name, x in results.items()}
        if self.dims.context > 1:  # each token is on one rank; backward gives each rank the gradient of its own
            group = parallel_state.get_context_parallel_group()
            tensors = {n: reduce_from_tensor_model_parallel_region(x.clone(), group) for n, x in tensors.items()}
        dummy_loss = 0.0 * next(iter(results.values()))[len(inputs.output_indices) :].sum()
        return Outputs(tensors, dummy_loss)

    def _results(self, selected: Tensor, inputs: ModelInputs) -> dict[str, Tensor]:
        """[K] of each output, from the hidden states at `logits_to_keep`."""
        logprobs, entropy = vocab_parallel_linear_logprobs(
            selected,
            self._head_weight(),
            inputs.targets,
            self.temperature,
            suppress=self.suppressed_token_ids,
            group=parallel_state.get_tensor_model_parallel_group(),
        )
        return {"logprobs": logprobs, "entropy": entropy}

    def _head_weight(self) -> Tensor:
        """[V / tensor, H] weight of the output layer."""
        weight = self.model.output_layer.weight
        return self.model.embedding.word_embeddings.weight if weight is None else weight  # tied, on the same stage

    def _logit_function_results(
        self, functions: Mapping[str, LogitFunction], mb: Batch, inputs: ModelInputs, selected: Tensor
    ) -> dict[str, Tensor]:
        """[K'] values of `logit_functions`; each piece of logits is gathered over the tensor ranks."""
        tokens = mb.trained_token_index(inputs.output_indices)
        fields = {name: x[tokens].to(self.device) for name, x in mb.token_fields.items()}
        hidden = selected[: len(tokens)]
        results = {}
        for name, function in functions.items():
            apply_to_slice = partial(_apply_to_full_logits, function, self.suppressed_token_ids)
            results[name] = apply_to_hidden_states(apply_to_slice, hidden, self._head_weight(), fields)
        return results

    @with_weights_on_device
    @torch.no_grad()
    def topk_logprobs(self, batch: Batch, k: int) -> TopkLogprobs:
        """The K likeliest tokens in place of each token of the mask; see `Fsdp2Engine.topk_logprobs`."""
        self.module.eval()

        def finish(rows: list[int], mb: Batch, inputs: ModelInputs, result: Tensor) -> tuple[Tensor, Tensor, Any]:
            top = topk_of_chunks(self._logit_chunks(result[0][inputs.logits_to_keep]), k, self.temperature)
            tokens = batch.trained_tokens_of_rows(rows)[mb.trained_token_index(inputs.output_indices)]
            wait = start_copy_to_host({name: x[: len(tokens)] for name, x in top._asdict().items()})
            return result.new_zeros(()), torch.zeros((), dtype=torch.int), (tokens, wait)

        with cuda_calls_on_host(self.device):
            pieces = self._run(batch, (), finish, train=False)
        count = int(batch.mask.sum())
        top = TopkLogprobs(torch.zeros(count, k), torch.zeros(count, k, dtype=torch.int32))
        for tokens, wait in pieces:
            copies = wait()
            top.logprobs[tokens], top.ids[tokens] = copies["logprobs"], copies["ids"]
        group = parallel_state.get_pipeline_model_parallel_group()
        for x in top:
            dist.all_reduce(x, group=parallel_state.get_context_parallel_group())  # each token is on one rank
            dist.broadcast(x, group=group, group_src=group.size() - 1)
        return top

    def _logit_chunks(self, selected: Tensor) -> Iterator[Tensor]:
        """The logits [N, V] in chunks of tokens, -inf at suppressed tokens, without gradient."""
        for piece in selected.split(tokens_per_chunk(selected, padded_vocabulary(self.config, self.dims))):
            logits = head_logits(piece, self._head_weight(), None, None)
            yield _apply_to_full_logits(lambda full, _: full, self.suppressed_token_ids, logits, {})

    def output_layer(self) -> Callable[[Tensor], Tensor]:
        """Raises a ValueError: its parts are on several ranks."""
        raise ValueError(
            "output_layer: expected the fsdp2 engine, got megatron; compare with a teacher's top-k (topk_logprobs)"
        )

    def global_sum(self, x: Tensor | float) -> Tensor:
        """Sum over data-parallel ranks, on the host."""
        return all_reduce(torch.as_tensor(x), group=self.data_parallel_group)

    def _reduce_metrics(self, metrics: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """Metrics of all micro-batches and data-parallel ranks, which the last stage sends to the other stages."""
        group = parallel_state.get_pipeline_model_parallel_group()
        reduced: list[Any] = [None]
        if parallel_state.is_pipeline_last_stage():
            reduced = [reduce_metrics(sum_metrics(metrics), self.data_parallel_group)]
        if group.size() > 1:
            dist.broadcast_object_list(reduced, group=group, group_src=group.size() - 1)
        return reduced[0]

    def disable_adapter(self) -> AbstractContextManager[Any]:
        """Raises a ValueError: this engine has no adapters."""
        raise ValueError(
            "disable_adapter: expected a model with adapters, got the megatron engine, which has none; use a second "
            "engine as the reference"
        )

    # --- weights and checkpoints

    def get_per_tensor_param(
        self, bucket_bytes: int = BUCKET_BYTES, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """(HF name, full tensor) of every parameter. All ranks iterate together.

        Args:
            bucket_bytes: gather tensors of up to this many bytes at once; with 0 those of one matrix at a time. The
                bucket is most of the memory that this takes.
            dtype: that the sampler computes in, see `rlkit.engines.sampler_dtype`; by default the weights' own. They
                are cast before they are gathered.
        """
        if dtype not in self._stages_in:
            self._stages_in[dtype] = [
                [x._replace(dtype=sampler_dtype(self.hf_model, x.name, x.as_meta(), dtype)) for x in infos]
                for infos in self.stages
            ]
        full = full_parameters(self.parameters, self._stages_in[dtype], self.megatron_config, self.device, bucket_bytes)
        return self._iterate_on_device(full)

    @contextmanager
    def gathered(self) -> Iterator[Any]:
        """Yield a transformers model with full weights in `compute_dtype` on every rank, freed after the context."""
        dtype = self.megatron_config.params_dtype
        yield sampled_copy(self.hf_model, dict(self.get_per_tensor_param(dtype=dtype)), self.device, dtype)

    def export_hf(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write a Hugging Face model directory, see `rlkit.engines.export.export_hf`."""
        export_hf(path, self.hf_model, self.get_per_tensor_param(0), self.processor, dtype)

    @with_weights_on_device
    def save_checkpoint(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Save trainable weights, optimizer, scheduler and random states, and `extra` (JSON).

        The form is that of the fsdp2 engine: either engine loads it, with any degrees of parallelism.

        Args:
            path: a directory, which is either complete or absent.
            extra: returned by `load_checkpoint`.
        """
        with self._offloaded_state.on_device():
            state = checkpoint_state(self.parameters, self.distributed_optimizer, self.groups, self.megatron_config)
        embedding = embedding_name(self.megatron_config)
        if self.model.share_embeddings_and_output_weights and embedding in state["model"]:
            state["model"][LM_HEAD] = state["model"][embedding]
        state |= checkpoint.scheduler_state(self.scheduler) | checkpoint.random_states(self.device)
        checkpoint.save(path, state, {"extra": dict(extra or {})})

    @with_weights_on_device
    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Load a checkpoint, see `save_checkpoint`; returns its `extra`.

        Raises:
            ValueError: names a file that is missing or cut short, or says that the checkpoint is of another model.
        """
        reader, optimizer = checkpoint.TensorReader(path), self.distributed_optimizer
        copies = {LM_HEAD} if self.model.share_embeddings_and_output_weights else set()
        reader.check(expected_shapes(reader, self.parameters, optimizer, self.hf_shapes), self.trained_names | copies)
        own = checkpoint.scheduler_state(self.scheduler) | checkpoint.random_states(self.device)
        state: dict[str, Any] = {name: x for name, x in own.items() if name in reader.names}
        if optimizer is not None:
            trained = [one for one in self.parameters if one.parameter.requires_grad]
            state["optimizer"] = {"param_groups": param_groups(trained, optimizer, self.groups)}
        checkpoint.load(path, state)
        with self._changing_weights():
            load_tensors(reader, self.parameters, optimizer, self.megatron_config, self.hf_shapes)
        if optimizer is not None:
            load_param_groups(optimizer, state["optimizer"]["param_groups"])
        checkpoint.set_scheduler_state(state, reader.saved, self.scheduler)
        checkpoint.set_random_states(state, self.device)
        return reader.saved["extra"]

    def to(self, device: torch.device | str, *, model: bool = True, optimizer: bool = True) -> None:
        """Move weights and optimizer state to the host, e.g. while a sampler needs the GPU, or back.

        A method that needs them brings them back itself, and they stay on the device.

        Raises:
            ValueError: the engine does so by itself, with `offload_between_phases`.
        """
        self._check_not_offloading(device)
        if self.device.type != "cpu":
            self._move(to_host=torch.device(device).type == "cpu", model=model, optimizer=optimizer)

    def _move(self, *, to_host: bool, model: bool, optimizer: bool) -> None:
        """Megatron's own functions are not used: they separate a float32 weight from the optimizer's view of it."""
        if model:
            weights = self._offloaded_weights.on_host
            weights.unload(self.model.parameters()) if to_host else weights.load()
        if optimizer:
            state = self._offloaded_state.on_host
            state.unload(self._optimizer_state()) if to_host else state.load()

    def _optimizer_state(self) -> list[Tensor]:
        """Moments and float32 weights of the optimizer, without those that are parts of the model's weights."""
        if self.optimizer is None:
            return []
        moments = [x for state in self.optimizer.state.values() for x in state.values() if x.ndim]
        copies = [p for group in self.optimizer.param_groups for p in group["params"]]
        return without_memory_of([*moments, *copies], self.model.parameters())


def _apply_to_full_logits(
    function: LogitFunction, suppressed: Tensor | None, logits: Tensor, fields: Mapping[str, Tensor]
) -> Tensor:
    """A function of the whole vocabulary, of which each tensor rank has the logits of a slice."""
    logits = gather_from_tensor_model_parallel_region(logits)
    return function(logits if suppressed is None else suppress_tokens(logits, suppressed), fields)


def _without_weights(model: Any) -> Any:
    """A copy of a module on the meta device, for its config and class."""
    empty = {id(x): torch.empty_like(x, device="meta") for x in [*model.parameters(), *model.buffers()]}
    parameters = {id(x): nn.Parameter(empty[id(x)]) for x in model.parameters()}
    return copy.deepcopy(model, {**empty, **parameters})


class MegatronValueEngine(MegatronEngine):
    """Trains and scores a value or reward model, see `Fsdp2ValueEngine` and rlkit.engines.value_head."""

    known_outputs = ("values",)
    value_head = True

    def train_batch(
        self, batch: Batch, loss_fn: LossFn, outputs: Sequence[str] = ("values",), **options: Any
    ) -> dict[str, float]:
        """`MegatronEngine.train_batch` with values as outputs; there are no logits, so no `logit_functions`."""
        if options.get("logit_functions"):
            raise ValueError(f"logit_functions: expected none for a value head, got {options['logit_functions']}")
        return super().train_batch(batch, loss_fn, outputs)

    def infer_batch(self, batch: Batch, outputs: Sequence[str] = ("values",)) -> dict[str, Tensor]:
        """`MegatronEngine.infer_batch` with values as outputs."""
        return super().infer_batch(batch, outputs)

    def _results(self, selected: Tensor, inputs: ModelInputs) -> dict[str, Tensor]:
        return {"values": selected[:, 0]}
