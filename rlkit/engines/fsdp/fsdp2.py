"""The FSDP2 engine: a transformers model sharded by `fully_shard`, on one process or many, on CPUs or GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlkit.data.samples import Batch, Sample
from rlkit.engines import checkpoint
from rlkit.engines.distributed import (
    BUCKET_BYTES,
    all_reduce,
    check_same_rows,
    full_tensor,
    full_tensors,
    init_distributed,
    make_model_parallel_group,
    reduce_metrics,
    shard_like,
    start_copy_to_host,
)
from rlkit.engines.export import export_adapter, export_hf
from rlkit.engines.flops import count_pass
from rlkit.engines.fsdp.adapters import adapters_are_disabled, check_only_adapters_train, without_adapters
from rlkit.engines.fsdp.liger import use_liger_kernels
from rlkit.engines.fsdp.outputs import (
    chunks_from_hidden,
    chunks_of_logits,
    gather_over_ulysses,
    last_hidden_states,
    model_logits,
    outputs_from_hidden,
    outputs_from_logits,
    token_functions,
)
from rlkit.engines.fsdp.sharded_loading import load_sharded_weights
from rlkit.engines.fsdp.sharding import (
    apply_fsdp2,
    cast_to_units,
    check_uniform_dtypes,
    fsdp_units,
    gathered_weights,
    is_whole,
    make_device_mesh,
    reduce_unused_experts,
    reshard,
    unsplit_modules,
)
from rlkit.engines.fsdp.tensor_parallel import all_reduce_gradients, apply_tensor_parallel, clip_grad_norm
from rlkit.engines.fsdp.training_state import load_training_state, training_state
from rlkit.engines.logit_functions import LogitFunction, head_logits, topk_of_chunks
from rlkit.engines.loss_closure import LossFn, Outputs, check_output_names, compute_loss, sum_metrics
from rlkit.engines.model_files import has_meta_weights
from rlkit.engines.offload import OffloadingEngine, with_weights_on_device
from rlkit.engines.packing.attention import use_packed_attention
from rlkit.engines.packing.inputs import ModelInputs, prepare_model_inputs
from rlkit.engines.packing.micro_batches import micro_batches
from rlkit.engines.packing.ulysses import UlyssesGroup, apply_ulysses
from rlkit.engines.packing.vision_attention import use_packed_vision_attention
from rlkit.engines.sampler_dtype import sampler_dtype
from rlkit.engines.value_head import has_value_head
from rlkit.losses.logprobs import TopkLogprobs
from rlkit.vlm.checkpoint_weights import (
    adapter_parameters,
    check_adapters,
    checkpoint_buffers,
    checkpoint_parameters,
    merged_parameters,
)
from rlkit.vlm.families import head_obstacle
from rlkit.vlm.inputs import position_spec
from rlkit.vlm.loading import compute_as_published
from rlkit.vlm.routers import check_expert_ids, use_router_replay


class Fsdp2Engine(OffloadingEngine):
    """Trains and scores a causal language or vision-language model.

    Args:
        model: from transformers, in float32, perhaps with frozen weights or wrapped by `rlkit.vlm.lora`. With
            `rlkit.vlm.load_model(..., on_meta=True)` each rank reads only its part of the weights.
        processor: saved beside the weights by `export_hf`.
        device: "cpu" or "cuda"; by default the GPU if there is one.
        optimizer: parameters -> optimizer; an engine without one can only score.
        scheduler: optimizer -> learning-rate scheduler, stepped once per `train_batch`.
        micro_batch_tokens: most tokens in one forward; a longer row is a micro-batch by itself, and so is a longer
            group of rows with equal `micro_batch_group`.
        temperature: sampling temperature; log-probabilities are computed at the same temperature.
        suppressed_token_ids: [K] token ids that the sampler never samples; their probability is 0 here, too.
        max_grad_norm: gradients are scaled down to this norm.
        use_remove_padding: concatenate the rows of a micro-batch without padding.
        share_prompts: compute the tokens and images of a prompt once for all of its responses in a micro-batch, in
            forward and backward. Needs `use_remove_padding`.
        use_fused_kernels: compute logprobs and entropy from hidden states, without the [N, V] logits. On a GPU also
            Liger's kernels in the model, if liger-kernel is installed.
        enable_gradient_checkpointing: recompute activations in backward.
        use_torch_compile: compile each layer with `torch.compile`, except its attention. The first steps take longer.
        compute_dtype: of activations and gathered weights; by default bfloat16 on a GPU and float32 on a CPU.
        fsdp_size: hybrid sharding: this many neighbouring ranks, e.g. those of one machine, shard one replica of the
            weights and the optimizer. By default all ranks shard one replica.
        tensor: tensor parallelism: this many neighbouring ranks share the matrices of each layer, by the plan that
            transformers has for the model. They are given the same rows. Not with `fsdp_size`, Ulysses or adapters.
        ulysses_sequence_parallel_size: this many neighbouring ranks share the tokens of each micro-batch, whose size
            does not change. They are given the same rows. Needs `use_remove_padding`.
        longest_sequence: most tokens of a sequence in the run. It decides the factors of a model with LongRoPE (Phi-3,
            MiniCPM), which have to be those of the sampler, see rlkit.vlm.long_rope; other models ignore it. None: such
            a model has short factors, and longer sequences than those are for are refused.
        router_replay: tokens of a batch with `routed_experts` go to those experts, see rlkit.vlm.routers.
        offload_between_phases: weights and optimizer state are in (pinned) host memory while no method of the engine
            needs them. They are copied to the device and back in each call, or once in `keep_on_device`.
        only_scores: hold weights in `compute_dtype` if that is smaller, for an engine whose weights are not trained,
            saved, exported or sent. Results equal, bit for bit, those of float32 weights that are cast in every
            forward.
        keep_gradients: keep gradients after `train_batch`, for inspection. By default they are freed, which leaves
            memory for a sampler.

    Attributes:
        data_parallel_rank, data_parallel_size: this rank's rows of a batch are
            `rows[engine.data_parallel_rank :: engine.data_parallel_size]`.
        data_parallel_group: one rank of each model-parallel group; None for all ranks.
        model_parallel_group: the ranks that are given the same rows (tensor, Ulysses); None if each has its own.
        compute_dtype: of activations and gathered weights.
        liger: whether the model has Liger's kernels.
    """

    known_outputs: tuple[str, ...] = ("logprobs", "entropy")

    def __init__(
        self,
        *,
        model: Any,
        processor: Any = None,
        device: str | None = None,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        micro_batch_tokens: int = 16384,
        temperature: float = 1.0,
        suppressed_token_ids: Tensor | None = None,
        max_grad_norm: float = 1.0,
        use_remove_padding: bool = True,
        share_prompts: bool = True,
        use_fused_kernels: bool = False,
        enable_gradient_checkpointing: bool = False,
        use_torch_compile: bool = False,
        compute_dtype: torch.dtype | None = None,
        fsdp_size: int | None = None,
        tensor: int = 1,
        ulysses_sequence_parallel_size: int = 1,
        longest_sequence: int | None = None,
        router_replay: bool = False,
        offload_between_phases: bool = False,
        only_scores: bool = False,
        keep_gradients: bool = False,
    ) -> None:
        if only_scores and optimizer is not None:
            raise ValueError("only_scores: expected False in an engine with an optimizer, got True")
        self.device = init_distributed(device)
        self.compute_dtype = compute_dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.processor = processor
        self.base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.has_adapters = self.base is not model
        self.config = self.base.config
        self.spec = position_spec(self.config)
        self.longest_sequence = longest_sequence
        self.router_replay = router_replay
        self.micro_batch_tokens = micro_batch_tokens
        self.use_remove_padding = use_remove_padding
        self.share_prompts = share_prompts and use_remove_padding
        self.temperature = temperature
        self.suppressed_token_ids = None if suppressed_token_ids is None else suppressed_token_ids.to(self.device)
        self.use_fused_kernels = use_fused_kernels
        self.only_scores = only_scores
        self.max_grad_norm = max_grad_norm
        self.keep_gradients = keep_gradients
        self._renamed: dict[str, str] = {}  # see `checkpoint_parameters`
        self._sampler_dtypes: dict[tuple[str, torch.dtype | None], torch.dtype] = {}  # by name and the sampler's dtype
        check_adapters(model)
        self._check_head(trains=optimizer is not None)
        self._make_groups(fsdp_size, tensor, ulysses_sequence_parallel_size)
        self._prepare_model(gradient_checkpointing=enable_gradient_checkpointing, compiled=use_torch_compile)
        self.module = self._sharded(model)
        self.optimizer = optimizer([p for p in self.module.parameters() if p.requires_grad]) if optimizer else None
        self.scheduler = scheduler(self.optimizer) if scheduler and self.optimizer else None
        self._trained: set[str] = set()  # names of parameters, see `_check_trained`
        if optimizer:
            self._check_trained()
        self._set_up_offloading(self._sharded_weights, self._optimizer_state, enabled=offload_between_phases)

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
        """One optimizer step on this rank's rows: all micro-batches, gradient clipping, step, scheduler.

        Args:
            batch: on the host; its totals, which the loss divides by, are counted over all ranks here.
            loss_fn: (out, mb) -> (loss, metrics). Metrics are 0-d tensors already divided by global totals. They are
                summed over micro-batches and ranks; for names that end in "/max" the maximum is taken.
            outputs: any of `known_outputs`, with gradient.
            logit_functions: further outputs by name, with gradient: functions of the logits and of
                `batch.token_fields`, which are called for some tokens at a time, see rlkit.engines.logit_functions.

        Returns:
            The metrics, and `loss`, `grad_norm` (before clipping), `lr`, and `skipped_steps`: 1 if the gradient was not
            finite, in which case neither weights nor optimizer changed. If no rank has a token in its mask, they do not
            change either.
        """
        if self.optimizer is None:
            raise ValueError("optimizer: expected one for train_batch, got None")
        if self.has_adapters and adapters_are_disabled(self.module):
            raise ValueError(
                "train_batch: expected enabled adapters, got disabled ones, which are not trained; call it outside of "
                "`with engine.disable_adapter()`"
            )
        self._check_trained()
        self._count_totals(batch)
        count_pass(self, batch, backward=True)
        self._start_loading_state()
        self.module.train()
        self.optimizer.zero_grad(set_to_none=True)
        metrics = []
        for rows, dummy in self._micro_batches(batch):
            micro_batch = batch.select(rows)
            on_device = micro_batch.to(self.device)
            out = self._forward(micro_batch, outputs, dummy, logit_functions)
            loss, micro_batch_metrics = compute_loss(loss_fn, out, on_device)
            if loss.requires_grad:
                loss.backward()
            metrics.append(micro_batch_metrics)
        if self.replicated:  # FSDP does not sum these over tensor-parallel ranks
            all_reduce_gradients(self.replicated, self.mesh["tp"].get_group())
        grad_norm = self._clip_gradients().item()
        lr = self.optimizer.param_groups[0]["lr"]
        is_finite = math.isfinite(grad_norm)
        if is_finite and batch.total_tokens:
            with self._changing_weights():
                self.optimizer.step()
        if not self.keep_gradients:
            self._free_gradients()
        if self.scheduler is not None:
            self.scheduler.step()
        reduced = reduce_metrics(sum_metrics(metrics), self.data_parallel_group)
        return {**reduced, "grad_norm": grad_norm, "lr": lr, "skipped_steps": float(not is_finite)}

    @with_weights_on_device
    @torch.no_grad()
    def infer_batch(self, batch: Batch, outputs: Sequence[str] = ("logprobs",)) -> dict[str, Tensor]:
        """[B, T] outputs of this rank's rows, in their order, on the host; 0 where the mask is False."""
        count_pass(self, batch)
        self.module.eval()
        results = {name: torch.zeros(batch.tokens.shape, device=self.device) for name in outputs}
        for rows, dummy in self._micro_batches(batch):
            micro_batch = batch.select(rows)
            out = self._forward(micro_batch, outputs, dummy)
            width = micro_batch.tokens.shape[1]
            # an index on the host would make the host wait for the device, in every micro-batch
            index = torch.tensor(rows, dtype=torch.long).to(self.device, non_blocking=True)
            for name, result in results.items():
                result[index, :width] = getattr(out, name).float()
        self._reshard()  # the root unit stays gathered after a forward, embeddings and output layer
        return {name: result.cpu() for name, result in results.items()}

    def _count_totals(self, batch: Batch) -> None:
        """Set `batch.total_tokens` and `batch.total_sequences` to the sums over data-parallel ranks."""
        counts = torch.stack([batch.mask.sum(), batch.mask.any(1).sum()])
        batch.total_tokens, batch.total_sequences = self.global_sum(counts).unbind()

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[list[int], Sample | None]]:
        """The rows of each micro-batch, and a dummy sequence if this rank needs one to join every collective."""
        if self.model_parallel_group is not None:
            check_same_rows(batch, self.data_parallel_rank, self.data_parallel_size)
        if self.router_replay and "routed_experts" in batch.fields:
            check_expert_ids(batch.routed_experts, self.experts)
        return micro_batches(batch, self.micro_batch_tokens, self.config, share_prompts=self.share_prompts)

    def _forward(
        self,
        batch: Batch,
        outputs: Sequence[str],
        dummy: Sample | None,
        logit_functions: Mapping[str, LogitFunction] | None = None,
    ) -> Outputs:
        """[B, T] outputs of a micro-batch: one forward of the model."""
        check_output_names(outputs, self.known_outputs)
        inputs = self._inputs(batch, dummy)
        results = self._results(batch, inputs, outputs, logit_functions or {})
        results = gather_over_ulysses(results, inputs, self.ulysses)
        # outputs of the dummy sequence come last; times 0, they give this rank a backward pass like the others
        dummy_loss = 0.0 * next(iter(results.values()))[len(inputs.output_indices) :].sum()
        return Outputs({name: inputs.scatter(result) for name, result in results.items()}, dummy_loss)

    def _inputs(self, batch: Batch, dummy: Sample | None) -> ModelInputs:
        return prepare_model_inputs(
            batch,
            self.spec,
            self.device,
            remove_padding=self.use_remove_padding,
            share_prompts=self.share_prompts,
            dummy=dummy,
            ulysses=self.ulysses,
            router_replay=self.router_replay,
            config=self.config,
        )

    def _results(
        self, batch: Batch, inputs: ModelInputs, outputs: Sequence[str], logit_functions: Mapping[str, LogitFunction]
    ) -> dict[str, Tensor]:
        """[K] of each output, at the positions `logits_to_keep`; those of `logit_functions` come first."""
        functions = token_functions(logit_functions, batch, inputs, self.ulysses, self.device)
        options: dict[str, Any] = {"temperature": self.temperature, "suppress": self.suppressed_token_ids}
        if self.use_fused_kernels:
            hidden = last_hidden_states(self.module, self._head, inputs)
            return outputs_from_hidden(hidden, self._head, inputs.targets, outputs, functions, **options)
        logits = model_logits(self.module, inputs)
        return outputs_from_logits(logits, inputs.targets, outputs, functions, **options)

    def _check_trained(self) -> None:
        """Check optimizer and parameters, which a recipe may have replaced, frozen or unfrozen since the last step.

        Raises:
            ValueError: one is in no group of the optimizer, so it would not be trained; the optimizer has one of
                another module, whose gradients are not summed over ranks; or the scheduler is of another optimizer.
        """
        assert self.optimizer is not None
        in_groups = {p for group in self.optimizer.param_groups for p in group["params"]}
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if missing := [name for name, p in trained.items() if p not in in_groups]:
            raise ValueError(
                f"optimizer: expected all parameters that require gradients, got none of {len(missing)} such as "
                f"{missing[0]}; add them with engine.optimizer.add_param_group({{'params': [...]}}), or freeze them"
            )
        if others := in_groups.difference(self.module.parameters()):
            raise ValueError(
                f"optimizer: expected parameters of engine.module, got {len(others)} others, whose gradients are not "
                "summed over ranks, and which are in no checkpoint; train them with an optimizer of their own"
            )
        if getattr(self.scheduler, "optimizer", self.optimizer) is not self.optimizer:
            raise ValueError(
                "scheduler: expected one of engine.optimizer, got one of another optimizer; set engine.scheduler, too, "
                "for instance to None"
            )
        if self._trained != set(trained):
            check_uniform_dtypes(self.module)
            reduce_unused_experts(self.module)
            self._trained = set(trained)

    def _free_gradients(self) -> None:
        self.module.zero_grad(set_to_none=True)

    def _clip_gradients(self) -> Tensor:
        """Scale gradients down to `max_grad_norm`; returns the norm before that."""
        return clip_grad_norm(self.module.parameters(), self.max_grad_norm)

    @property
    def _head(self) -> Any:
        """The output layer."""
        return self.base.get_output_embeddings()

    # --- for teachers

    def topk_logprobs(self, batch: Batch, k: int) -> TopkLogprobs:
        """The K likeliest tokens in place of each token of the mask, as tensors [N, K] for `Batch.add_token_fields`.

        Their log-probabilities are over the whole vocabulary, at the engine's temperature.

        Args:
            batch: this rank's rows; N is the number of tokens in their mask.
            k: how many tokens.
        """

        def topk(inputs: ModelInputs) -> dict[str, Tensor]:
            if self.use_fused_kernels:
                hidden = last_hidden_states(self.module, self._head, inputs)
                chunks = chunks_from_hidden(hidden, self._head, self.suppressed_token_ids)
            else:
                chunks = chunks_of_logits(model_logits(self.module, inputs), self.suppressed_token_ids)
            return topk_of_chunks(chunks, k, self.temperature)._asdict()

        return TopkLogprobs(**self._infer_packed(batch, topk))

    def hidden_states(self, batch: Batch) -> Tensor:
        """The input of the output layer at the position before each token of the mask, [N, H], see `output_layer`.

        Raises:
            ValueError: the logits of this model family are not those of its output layer.
        """
        self._check_plain_head()

        def hidden(inputs: ModelInputs) -> dict[str, Tensor]:
            return {"hidden": last_hidden_states(self.module, self._head, inputs)}

        return self._infer_packed(batch, hidden)["hidden"]

    @with_weights_on_device
    @torch.no_grad()
    def output_layer(self) -> Callable[[Tensor], Tensor]:
        """A function from `hidden_states` [n, H] to logits [n, V], -inf at suppressed tokens; on all ranks together.

        It has a copy of the output layer's weight [V, H] in `compute_dtype`, not sharded. So the logits of a teacher
        over the whole vocabulary can be computed where and when a few of them are needed.

        Raises:
            ValueError: as `hidden_states`.
        """
        self._check_plain_head()
        self._reshard()

        def copied(x: Tensor) -> Tensor:
            return full_tensor(x.detach()).to(self.compute_dtype, copy=True)

        bias = None if self._head.bias is None else copied(self._head.bias)
        return partial(head_logits, weight=copied(self._head.weight), bias=bias, suppress=self.suppressed_token_ids)

    def _check_plain_head(self) -> None:
        family = self.base.config.model_type
        if why := head_obstacle(self.base.config, self._head):
            raise ValueError(f"model: expected logits that are the output layer's, got {family}: {why}")

    @with_weights_on_device
    @torch.no_grad()
    def _infer_packed(self, batch: Batch, compute: Callable[[ModelInputs], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Results [N, ...] on the host, for the N tokens of this rank's mask; 0 for a token without one before it.

        Args:
            compute: inputs of a micro-batch -> tensors [K, ...] by name, at the positions `logits_to_keep`.
        """
        count_pass(self, batch)
        self.module.eval()
        results: dict[str, Tensor] = {}

        def store(tokens: Tensor, wait: Callable[[], dict[str, Tensor]]) -> None:
            for name, x in wait().items():
                result = results.setdefault(name, torch.zeros(int(batch.mask.sum()), *x.shape[1:], dtype=x.dtype))
                result[tokens] = x

        earlier: list[Any] = []  # the micro-batch whose results are still being computed and copied
        for rows, dummy in self._micro_batches(batch):
            micro_batch = batch.select(rows)
            inputs = self._inputs(micro_batch, dummy)
            tokens = batch.trained_tokens_of_rows(rows)[micro_batch.trained_token_index(inputs.output_indices)]
            found = gather_over_ulysses(compute(inputs), inputs, self.ulysses)
            wait = start_copy_to_host({name: x[: len(tokens)] for name, x in found.items()})
            if earlier:
                store(*earlier)
            earlier = [tokens, wait]
        if earlier:
            store(*earlier)
        self._reshard()
        return results

    # --- for samplers, references and other ranks

    def get_per_tensor_param(
        self, bucket_bytes: int = BUCKET_BYTES, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """(HF name, full tensor) of every parameter and every saved buffer, with adapters merged.

        Buffers, such as the correction bias of a router, are not trained. They are sent because some are parameters in
        vLLM, which drops the values of its parameters when it sleeps. All ranks iterate together.

        Args:
            bucket_bytes: gather tensors of up to this many bytes at once; with 0 one tensor at a time. The bucket is
                most of the memory that this takes.
            dtype: that the sampler computes in, see `rlkit.engines.sampler_dtype`; by default the weights' own. Weights
                are cast before they are gathered. Adapters are merged before that, by each rank into its part of the
                weights; into NF4 weights, which are gathered in 4 bits, after it.
        """
        self._check_exact_weights("get_per_tensor_param")
        parameters = checkpoint_parameters(self.base, self._weights(bucket_bytes, dtype), self._renamed)
        return chain(parameters, checkpoint_buffers(self.base))

    def get_adapter(
        self, bucket_bytes: int = BUCKET_BYTES, dtype: torch.dtype | None = None
    ) -> tuple[Any, Iterator[tuple[str, Tensor]]]:
        """The LoRA adapters alone: peft's config, and (name in peft's files, full tensor) of each.

        All ranks iterate together. The arguments are those of `get_per_tensor_param`.

        Raises:
            ValueError: the model has no adapters, or weights other than the adapters are trained, too.
        """
        self._check_exact_weights("get_adapter")
        if not self.has_adapters:
            raise ValueError(
                "get_adapter: expected a model with adapters, got none; get_per_tensor_param returns its weights"
            )
        check_only_adapters_train(self.module)

        def gather(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
            return full_tensors(tensors if dtype is None else [x.to(dtype) for x in tensors])

        adapters = adapter_parameters(self.module, gather, bucket_bytes)
        return self.module.peft_config["default"], self._iterate_on_device(adapters)

    def _check_exact_weights(self, caller: str) -> None:
        if self.only_scores:
            raise ValueError(f"{caller}: expected an engine without only_scores, which rounds weights, got one with it")

    def _weights(self, bucket_bytes: int, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of every parameter, under the names of the module without adapters."""
        cast = partial(self._cast_for_sampler, dtype)
        merged = merged_parameters(self.module, full_tensors, bucket_bytes, cast, _shard_like)
        yield from self._iterate_on_device(merged)

    def _cast_for_sampler(self, dtype: torch.dtype | None, name: str, tensor: Tensor) -> Tensor:
        if (name, dtype) not in self._sampler_dtypes:
            self._sampler_dtypes[name, dtype] = sampler_dtype(self.base, name, tensor, dtype)
        return tensor.to(self._sampler_dtypes[name, dtype])

    def _iterate_on_device(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        with self._offloaded_weights.on_device():
            self._reshard()
            yield from super()._iterate_on_device(weights)

    @contextmanager
    def gathered(self) -> Iterator[Any]:
        """Yield the module with full weights on every rank, so that sampling gathers them only once."""
        self._check_exact_weights("gathered")
        with self._offloaded_weights.on_device(), gathered_weights(self.module):
            yield self.module

    def disable_adapter(self) -> AbstractContextManager[None]:
        """The model without its LoRA adapters: the reference policy, without more memory."""
        if not self.has_adapters:
            raise ValueError(
                "disable_adapter: expected a model with adapters, got none; use a second engine as the reference"
            )
        self._reshard()
        return without_adapters(self.module)

    def global_sum(self, x: Tensor | float) -> Tensor:
        """Sum over data-parallel ranks, on the host."""
        return all_reduce(torch.as_tensor(x), group=self.data_parallel_group)

    # --- checkpoints and exports

    @with_weights_on_device
    def save_checkpoint(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Save sharded trainable weights, optimizer, scheduler and random states, and `extra` (JSON).

        Args:
            path: a directory, which is either complete or absent.
            extra: returned by `load_checkpoint`.
        """
        self._check_exact_weights("save_checkpoint")
        self._reshard()
        with self._offloaded_state.on_device():
            state = training_state(self.module, self.optimizer, self.scheduler, self.device)
            checkpoint.save(path, state, {"extra": dict(extra or {})})

    @with_weights_on_device
    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Load a checkpoint that was saved at any world size; returns its `extra`.

        Raises:
            ValueError: names a file that is missing or cut short, or says that the checkpoint is of another model.
        """
        self._reshard()
        with self._changing_weights():
            return load_training_state(path, self.module, self.optimizer, self.scheduler, self.device)

    def export_hf(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write a Hugging Face model directory, with adapters merged; see `rlkit.engines.export.export_hf`."""
        self._check_exact_weights("export_hf")
        export_hf(path, self.base, self._weights(0, dtype), self.processor, dtype)

    def export_adapter(self, path: str | Path) -> None:
        """Write the LoRA adapters alone, as peft does."""
        export_adapter(path, *self.get_adapter())

    # --- where weights and optimizer state are

    def to(self, device: torch.device | str, *, model: bool = True, optimizer: bool = True) -> None:
        """Move sharded weights and optimizer state, e.g. to the host while a sampler needs the GPU.

        Raises:
            ValueError: the engine does so by itself, with `offload_between_phases`.
        """
        self._check_not_offloading(device)
        if model:
            self._reshard()
            self.module.to(device)
        if optimizer and self.optimizer is not None:
            for state in self.optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.ndim:  # AdamW keeps its step counter on the host
                        state[name] = value.to(device)

    def _sharded_weights(self) -> Iterator[Tensor]:
        self._reshard()
        return self.module.parameters()

    def _optimizer_state(self) -> Iterator[Tensor]:
        states = {} if self.optimizer is None else self.optimizer.state
        values = (x for state in states.values() for x in state.values())
        return (x for x in values if isinstance(x, Tensor) and x.ndim)  # AdamW keeps its step counter on the host

    def _reshard(self) -> None:
        """Shard all parameters, to read or write them: FSDP2 leaves those of the root unit gathered after a forward."""
        reshard(self.module)

    # --- set-up

    def _check_head(self, *, trains: bool) -> None:
        if has_value_head(self.base):
            raise ValueError(
                'model: expected a language model, got a value head; use make_engine(..., "value_model", ...)'
            )
        if self.use_fused_kernels and (why := head_obstacle(self.base.config, self._head)):
            raise ValueError(f"use_fused_kernels: expected False for {self.base.config.model_type}, got True: {why}")

    def _make_groups(self, fsdp_size: int | None, tensor: int, ulysses_size: int) -> None:
        """The device mesh and process groups; shards the model's matrices or tokens over the model-parallel group."""
        self.ulysses: UlyssesGroup | None = None
        self.data_parallel_group: dist.ProcessGroup | None = None
        self.replicated: list[nn.Module] = []  # modules whose gradients are summed over tensor-parallel ranks
        if ulysses_size != 1:
            self.ulysses = apply_ulysses(self.base, ulysses_size, self.device, packed=self.use_remove_padding)
            self.data_parallel_group = self.ulysses.data_parallel_group
        self.mesh = make_device_mesh(self.device, fsdp_size, tensor)
        self.fsdp_mesh = self.mesh["dp_replicate", "dp_shard"] if fsdp_size else self.mesh["dp_shard"]
        if tensor > 1:
            if self.has_adapters or self.ulysses is not None:
                raise ValueError(f"tensor: expected 1 with adapters and with Ulysses, got {tensor}")
            self.replicated = apply_tensor_parallel(self.base, self.mesh["tp"])
            self.data_parallel_group = self.mesh["dp_shard"].get_group()
        size = max(tensor, ulysses_size)
        self.data_parallel_rank, self.data_parallel_size = dist.get_rank() // size, dist.get_world_size() // size
        self.model_parallel_group = make_model_parallel_group(self.data_parallel_rank, self.data_parallel_size)

    def _prepare_model(self, *, gradient_checkpointing: bool, compiled: bool) -> None:
        """Set up the model before it is sharded: attention, router replay, kernels, checkpointing, compilation."""
        self.base.get_input_embeddings().padding_idx = None  # gradients: a token that pads may also be text
        use_packed_attention(self.base, packed=self.use_remove_padding, longest_sequence=self.longest_sequence)
        compute_as_published(self.base)
        if self.device.type == "cuda":
            use_packed_vision_attention(self.base, self.config)
        if self.router_replay:
            self.experts = use_router_replay(self.base)
        self.liger = self.use_fused_kernels and use_liger_kernels(self.base, self.device)
        if gradient_checkpointing:
            self.base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if compiled:
            for layer in unsplit_modules(self.base):
                layer.compile(dynamic=True)  # the number of tokens differs in every micro-batch

    def _sharded(self, model: Any) -> Any:
        """The model with this rank's shards of the weights, on the device."""
        if has_meta_weights(model):
            return self._shard_and_read(model)
        return self._shard(_on_device(model, self.device))

    def _shard(self, model: Any) -> Any:
        """Apply `fully_shard` to each layer and to the rest of the model.

        On a single rank, a float32 model that computes in float32 is returned as it is: FSDP would change nothing, and
        take a tenth of a short step. In other dtypes FSDP is needed, since it also casts the inputs of each layer.
        Without it, a reference with weights in bfloat16 would have other results than a policy in float32, in families
        that compute in float32 between layers (Qwen2.5-VL, ERNIE 4.5, OLMo), and Llama 4 would refuse float32 pixels.
        """
        dtypes = {self.compute_dtype, *(p.dtype for p in model.parameters())}
        if is_whole(model, self.fsdp_mesh) and dtypes == {torch.float32}:
            return model
        units = fsdp_units(model, self.base, self.compute_dtype)
        if self.only_scores:
            cast_to_units(model, units, self.compute_dtype)
        return apply_fsdp2(model, units, self.compute_dtype, self.fsdp_mesh)

    def _shard_and_read(self, model: Any) -> Any:
        """Shard a model on the meta device, and read this rank's part of its weights."""
        module = self._shard(model)
        load_sharded_weights(self.base, self.device)
        return _on_device(module, self.device)  # buffers, adapters and a value head


def _shard_like(full: Tensor, parameter: Tensor) -> Tensor:
    """`shard_like`, on the parameter's device, which is not the mesh's after `engine.to("cpu")`."""
    return shard_like(full, parameter).to(parameter.device)


def _on_device(model: Any, device: torch.device) -> Any:
    """The model on a device. A model that is there already is not touched, since fake tensors cannot be moved."""
    tensors = [*model.parameters(), *model.buffers()]
    return model if all(x.device == device for x in tensors) else model.to(device)
