"""The FSDP2 engine: a transformers model sharded by `fully_shard`, on one process or many, on CPUs or GPUs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from rlkit.data.samples import Batch, Sample
from rlkit.engines import checkpoint
from rlkit.engines.distributed import (
    all_reduce,
    full_tensors,
    init_distributed,
    layout,
    make_model_parallel_group,
    reduce_metrics,
)
from rlkit.engines.fsdp.liger import use_liger
from rlkit.engines.fsdp.sharded_loading import on_meta, read_shards
from rlkit.engines.fsdp.sharding import shard, units
from rlkit.engines.fsdp.tensor_parallel import add_up_copies, clip_gradients, share_matrices
from rlkit.engines.packing.attention import use_packed_attention, use_packed_tower
from rlkit.engines.packing.inputs import ModelInputs, pack
from rlkit.engines.packing.micro_batches import LossFn, Outputs, add_up, check_same_rows, micro_batches, run_closure
from rlkit.engines.packing.ulysses import gather, share_rows
from rlkit.engines.value_head import has_value_head
from rlkit.losses.logprobs import linear_logprobs, suppress_tokens, target_logprobs, token_entropy
from rlkit.vlm.adapt import adapter_parameters, checkpoint_parameters, merged_parameters
from rlkit.vlm.families import head_obstacle
from rlkit.vlm.inputs import position_spec
from rlkit.vlm.routers import use_router_replay


class Fsdp2Engine:
    """Trains and scores a causal language or vision-language model.

    Args:
        model: from transformers, in float32, perhaps frozen in part or wrapped by `rlkit.vlm.lora`, or without memory
            yet, from `rlkit.vlm.load_model(..., on_meta=True)`: then each rank reads its part of the weights.
        processor: written beside the weights by `export_hf`.
        device: "cpu" or "cuda"; the GPU if there is one.
        optimizer: parameters -> optimizer; an engine without one only scores.
        scheduler: optimizer -> learning-rate scheduler, stepped once each `train_batch`.
        micro_batch_tokens: most tokens in one forward; a longer row goes alone.
        temperature: of the distribution that is scored; the sampler's.
        suppressed_token_ids: [K] token ids that have probability 0 in the sampler, and so here.
        max_grad_norm: gradients are scaled down to this norm.
        use_remove_padding: packed rows without padding, else padded ones.
        share_prompts: rows that answer one prompt hold its tokens and images once, forward and backward; needs
            `use_remove_padding`.
        use_fused_kernels: logprobs and entropy from hidden states, without the [N, V] logits; and on a GPU Liger's
            kernels in the model, where liger-kernel is installed.
        enable_gradient_checkpointing: recompute activations in backward.
        compute_dtype: of activations and gathered weights; bfloat16 on a GPU, float32 on a CPU.
        fsdp_size: ranks next to each other that share one copy of weights and optimizer, e.g. those of a machine; each
            such group holds a copy. All ranks share one by default.
        tensor: ranks next to each other that share the matrices of each layer, by the plan that transformers has for a
            model; they must be given the same rows. Not together with `fsdp_size`, Ulysses or adapters.
        router_replay: where a batch has `routed_experts`, its tokens go to those experts, see rlkit.vlm.routers.
        ulysses_sequence_parallel_size: ranks next to each other that share the tokens of a micro-batch, which holds as
            many as without; they must be given the same rows. Needs `use_remove_padding`.

    Attributes:
        data_parallel_rank, data_parallel_size: this rank's rows of a batch are
            `rows[engine.data_parallel_rank :: engine.data_parallel_size]`.
        liger: whether the model has Liger's kernels, see rlkit.engines.fsdp.liger.
        data_parallel_group: one rank of each of them, for `rlkit.engines.distributed.reduce_metrics`.
        model_parallel_group: the ranks of one of them, which `make_rollout` is told of; None where each rank is one.
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
        compute_dtype: torch.dtype | None = None,
        fsdp_size: int | None = None,
        tensor: int = 1,
        ulysses_sequence_parallel_size: int = 1,
        router_replay: bool = False,
    ) -> None:
        self.device = init_distributed(device)
        self.processor = processor
        self.micro_batch_tokens, self.temperature, self.max_grad_norm = micro_batch_tokens, temperature, max_grad_norm
        self.use_remove_padding, self.use_fused_kernels = use_remove_padding, use_fused_kernels
        self.share_prompts = share_prompts and use_remove_padding
        self.suppressed_token_ids = None if suppressed_token_ids is None else suppressed_token_ids.to(self.device)
        self.base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._check_head(trains=optimizer is not None)
        self.config = self.base.config
        self.spec = position_spec(self.config)
        size = ulysses_sequence_parallel_size
        self.ulysses = None if size == 1 else share_rows(self.base, size, self.device, packed=use_remove_padding)
        self.data_parallel_group = None if self.ulysses is None else self.ulysses.data
        self.mesh = layout(self.device, fsdp_size, tensor)
        self.copied: list[nn.Module] = []
        if tensor > 1:
            if self.base is not model or self.ulysses is not None:
                raise ValueError(f"tensor={tensor}: it goes neither with adapters nor with Ulysses")
            self.copied = share_matrices(self.base, self.mesh["tensor"])
            self.data_parallel_group, size = self.mesh["shard"].get_group(), tensor
        self.data_parallel_rank, self.data_parallel_size = dist.get_rank() // size, dist.get_world_size() // size
        self.model_parallel_group = make_model_parallel_group(self.data_parallel_rank, self.data_parallel_size)
        use_packed_attention(self.base, packed=use_remove_padding)
        if self.device.type == "cuda":
            use_packed_tower(self.base, self.config)
        if router_replay:
            use_router_replay(self.base)
        self.router_replay = router_replay
        self.liger = use_fused_kernels and use_liger(self.base, self.device)
        if enable_gradient_checkpointing:
            self.base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        dtype = compute_dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        to_be_read = on_meta(model)
        dims = ("copy", "shard") if fsdp_size else ("shard",)
        self.adapted = self.base is not model
        self.module = self._shard(model if to_be_read else model.to(self.device), dtype, self.mesh[dims])
        if to_be_read:
            read_shards(self.base, self.device)
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = optimizer(trainable) if optimizer else None
        self.scheduler = scheduler(self.optimizer) if scheduler and self.optimizer else None

    def train_batch(self, batch: Batch, loss_fn: LossFn, outputs: Sequence[str] = ("logprobs",)) -> dict[str, float]:
        """One optimizer step on this rank's rows: all micro-batches, clip, step, scheduler.

        Args:
            batch: on the host; the totals that the closure divides by are counted over all ranks here.
            loss_fn: (out, mb) -> (loss, metrics). Metrics are 0-d tensors already divided by global totals: they are
                summed over micro-batches and ranks, or maximised where their name ends in "/max".
            outputs: any of `known_outputs`, with gradient.

        Returns:
            The metrics, and `loss`, `grad_norm` (before clipping), `lr`, and `skipped_steps`: 1 if the gradient was not
            finite, in which case neither weights nor optimizer moved.
        """
        if self.optimizer is None:
            raise ValueError("train_batch: this engine was made without an optimizer")
        counts = self.global_sum(torch.stack([batch.mask.sum(), batch.mask.any(1).sum()]))
        batch.total_tokens, batch.total_sequences = counts.unbind()
        self.module.train()
        self.optimizer.zero_grad(set_to_none=True)
        reports = []
        for rows, blank in self._micro_batches(batch):
            part = batch.select(rows)
            out = self._forward(part, outputs, blank)
            loss, report = run_closure(loss_fn, out, part.to(self.device))
            loss.backward()
            reports.append(report)
        if self.copied:
            add_up_copies(self.copied, self.mesh["tensor"].get_group())
        grad_norm = self._clip().item()
        lr = self.optimizer.param_groups[0]["lr"]
        finite = grad_norm < float("inf")
        if finite:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        reduced = reduce_metrics(add_up(reports), self.data_parallel_group)
        return {**reduced, "grad_norm": grad_norm, "lr": lr, "skipped_steps": float(not finite)}

    @torch.no_grad()
    def infer_batch(self, batch: Batch, outputs: Sequence[str] = ("logprobs",)) -> dict[str, Tensor]:
        """[B, T] outputs for this rank's rows, in their order, on the host; 0 where the mask is False."""
        self.module.eval()
        results = {name: torch.zeros(batch.tokens.shape, dtype=torch.float32) for name in outputs}
        for rows, blank in self._micro_batches(batch):
            part = batch.select(rows)
            out = self._forward(part, outputs, blank)
            for name, result in results.items():
                result[torch.tensor(rows, dtype=torch.long), : part.tokens.shape[1]] = getattr(out, name).float().cpu()
        return results

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[list[int], Sample | None]]:
        if self.data_parallel_size < dist.get_world_size():
            check_same_rows(batch, self.data_parallel_rank, self.data_parallel_size)
        return micro_batches(batch, self.micro_batch_tokens, self.config, share_prompts=self.share_prompts)

    def _forward(self, batch: Batch, outputs: Sequence[str], blank: Sample | None) -> Outputs:
        if unknown := set(outputs) - set(self.known_outputs):
            raise ValueError(f"outputs: {sorted(unknown)} not known; there are {', '.join(self.known_outputs)}")
        inputs = pack(
            batch,
            self.spec,
            self.device,
            packed=self.use_remove_padding,
            share_prompts=self.share_prompts,
            blank=blank,
            ulysses=self.ulysses,
            router_replay=self.router_replay,
        )
        results = self._results(inputs, outputs)
        if self.ulysses is not None:
            results = {name: gather(x, inputs.counts, self.ulysses) for name, x in results.items()}
        anchor = 0.0 * next(iter(results.values()))[len(inputs.slots) :].sum()
        return Outputs({name: inputs.scatter(result) for name, result in results.items()}, anchor)

    def _check_head(self, *, trains: bool) -> None:
        if has_value_head(self.base):
            raise ValueError('model: it has a value head, a language model expected; make_engine(..., "value_model")')
        if self.use_fused_kernels and (why := head_obstacle(self.base.config)):
            raise ValueError(f"{self.base.config.model_type}: use_fused_kernels: {why}; leave it off")

    def _results(self, inputs: ModelInputs, outputs: Sequence[str]) -> dict[str, Tensor]:
        """[K] of each output, at the positions that are kept."""
        if self.use_fused_kernels:
            with self._before_head() as seen:
                self.module(**inputs.kwargs, use_cache=False)
            hidden = inputs.kept(seen[0])
            head = self.base.get_output_embeddings()
            options = {"bias": head.bias, "suppress": self.suppressed_token_ids}
            logprobs, entropy = linear_logprobs(hidden, head.weight, inputs.targets, self.temperature, **options)
        else:
            logits = self._logits(inputs)
            if self.suppressed_token_ids is not None:
                logits = suppress_tokens(logits, self.suppressed_token_ids)
            logprobs = target_logprobs(logits, inputs.targets, self.temperature)
            entropy = token_entropy(logits, self.temperature) if "entropy" in outputs else logprobs
        return {"logprobs": logprobs, **({"entropy": entropy} if "entropy" in outputs else {})}

    def _logits(self, inputs: ModelInputs) -> Tensor:
        return inputs.kept(self.module(**inputs.kwargs, use_cache=False).logits)

    @contextmanager
    def _before_head(self) -> Iterator[list[Tensor]]:
        """Catch the hidden states on their way into the output layer, and hand it an empty piece of them."""
        seen: list[Tensor] = []

        def catch(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            seen.append(args[0])
            return (args[0][:, :0],)

        hook = self.base.get_output_embeddings().register_forward_pre_hook(catch)
        try:
            yield seen
        finally:
            hook.remove()

    @contextmanager
    def gathered(self) -> Iterator[Any]:
        """The module with whole weights on every rank for as long as the context lasts: sampling gathers them once."""
        units = [m for m in self.module.modules() if isinstance(m, FSDPModule)]
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        try:
            yield self.module
        finally:
            for unit in units:
                unit.set_reshard_after_forward(unit is not self.module, recurse=False)
                unit.reshard()

    def disable_adapter(self) -> AbstractContextManager[Any]:
        """The model without its LoRA adapters: the reference policy, at no memory."""
        if not self.adapted:
            raise ValueError("disable_adapter: the model has no adapters; keep a second engine as the reference")
        return self.module.disable_adapter()

    def global_sum(self, x: Tensor | float) -> Tensor:
        """Sum over data-parallel ranks, on the host."""
        return all_reduce(torch.as_tensor(x), group=self.data_parallel_group)

    def to(self, device: torch.device | str, *, model: bool = True, optimizer: bool = True) -> None:
        """Move sharded weights and optimizer state, e.g. to the host while a sampler needs the GPU."""
        if model:
            self._reshard()
            self.module.to(device)
        if optimizer and self.optimizer is not None:
            for state in self.optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.ndim:  # AdamW keeps its step counter on the host
                        state[name] = value.to(device)

    def get_per_tensor_param(self, bucket_bytes: int = 0) -> Iterator[tuple[str, Tensor]]:
        """(HF name, whole tensor) of every parameter, as in a checkpoint's files, adapters merged; all ranks iterate
        together.

        Args:
            bucket_bytes: as many as fit in this are gathered at once, which is most of the memory it takes; one at a
                time by default.
        """
        yield from checkpoint_parameters(self.base, self._weights(bucket_bytes))

    def _weights(self, bucket_bytes: int = 0) -> Iterator[tuple[str, Tensor]]:
        """The same under the names of the module without adapters."""
        self._reshard()
        yield from merged_parameters(self.module, full_tensors, bucket_bytes)

    def get_adapter(self) -> tuple[Any, Iterator[tuple[str, Tensor]]]:
        """The LoRA adapters alone: peft's config, and (name in its files, whole tensor) of each, one at a time."""
        if not self.adapted:
            raise ValueError("get_adapter: the model has no adapters; get_per_tensor_param hands over its weights")
        self._reshard()
        return self.module.peft_config["default"], adapter_parameters(self.module, full_tensors)

    def save_checkpoint(self, path: str | Path, extra: Mapping[str, Any] | None = None, *, wait: bool = True) -> None:
        """Sharded weights that train, optimizer, scheduler and RNG, with `extra` (JSON); complete or absent.

        Args:
            wait: until it is written; if not, a thread writes a copy of it, see rlkit.engines.checkpoint.
        """
        self._reshard()
        schedule = self.scheduler.state_dict() if self.scheduler is not None else None
        checkpoint.save(path, self._state(), {"scheduler": schedule, "extra": dict(extra or {})}, wait=wait)

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Take up a checkpoint, saved at any world size; returns its `extra`.

        Raises:
            ValueError: names the file that is missing or cut short, or says that the checkpoint is of another model.
        """
        saved = checkpoint.read_manifest(path)
        self._reshard()
        state = self._state()
        checkpoint.check_names(path, state["model"])
        there = checkpoint.saved_names(path)
        state = {name: x for name, x in state.items() if not name.startswith("rng.") or name in there}
        checkpoint.load(path, state)
        optimizers = [] if self.optimizer is None else [self.optimizer]
        set_state_dict(
            self.module,
            optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=False),
        )
        if self.scheduler is not None and saved["scheduler"] is not None:
            self.scheduler.load_state_dict(saved["scheduler"])
        checkpoint.set_random_states(state, self.device)
        return saved["extra"]

    def _state(self) -> dict[str, Any]:
        optimizers = [] if self.optimizer is None else [self.optimizer]
        model, optim = get_state_dict(self.module, optimizers, options=StateDictOptions(ignore_frozen_params=True))
        return {"model": model, "optimizer": optim, **checkpoint.random_states(self.device)}

    def export_hf(self, path: str | Path) -> None:
        """Write a Hugging Face model directory: config, safetensors, processor; adapters merged. Complete or absent."""
        path = Path(path)
        tensors = {name: tensor.cpu() for name, tensor in self._weights()}
        if dist.get_rank() == 0:
            part = path.with_name(path.name + ".part")
            shutil.rmtree(part, ignore_errors=True)
            self.base.save_pretrained(part, state_dict=tensors)
            if self.processor is not None:
                self.processor.save_pretrained(part)
            checkpoint.replace_directory(part, path)
        dist.barrier()

    def _shard(self, model: Any, dtype: torch.dtype, mesh: DeviceMesh) -> Any:
        return shard(model, units(model, self.base, dtype), dtype, mesh)

    def _clip(self) -> Tensor:
        """Scale gradients down to `max_grad_norm`; the norm they had."""
        return clip_gradients(self.module.parameters(), self.max_grad_norm)

    def _reshard(self) -> None:
        """The root unit stays whole after a forward; parameters are read and written in their shards."""
        for unit in self.module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()


class Fsdp2ValueEngine(Fsdp2Engine):
    """Trains and scores a value or reward model, see rlkit.engines.value_head: `values[b, t]` is the value of the
    prefix before `tokens[b, t]`.

    Takes the arguments of `Fsdp2Engine`; `temperature`, `suppressed_token_ids` and `use_fused_kernels` have no effect.
    The head works in float32 whatever `compute_dtype` is: bfloat16 would round a return of 100 to 0.5.
    """

    known_outputs = ("values",)

    def train_batch(self, batch: Batch, loss_fn: LossFn, outputs: Sequence[str] = ("values",)) -> dict[str, float]:
        """As `Fsdp2Engine.train_batch`, of values."""
        return super().train_batch(batch, loss_fn, outputs)

    def infer_batch(self, batch: Batch, outputs: Sequence[str] = ("values",)) -> dict[str, Tensor]:
        """As `Fsdp2Engine.infer_batch`, of values."""
        return super().infer_batch(batch, outputs)

    def _check_head(self, *, trains: bool) -> None:
        if not has_value_head(self.base):
            raise ValueError("model: no value head; rlkit.engines.value_head.with_value_head(model) puts one on it")
        if trains and not self.base.get_output_embeddings().weight.requires_grad:
            raise ValueError("model: its value head is frozen; put it on after lora(...), or switch its gradient on")

    def _results(self, inputs: ModelInputs, outputs: Sequence[str]) -> dict[str, Tensor]:
        return {"values": self._logits(inputs)[:, 0]}
