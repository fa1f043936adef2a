"""Directories that transformers, peft and vLLM read. Each is either complete or absent."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch import Tensor

from rlkit.engines.checkpoint import replace_directory
from rlkit.engines.value_head import as_classifier, has_value_head


def export_hf(
    path: str | Path,
    model: Any,
    weights: Iterable[tuple[str, Tensor]],
    processor: Any = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a Hugging Face model directory: config, safetensors, processor.

    A model with a value head is written for `AutoModelForSequenceClassification`, with one label, if its family has
    such a class. All other models are written for the class they have.

    Args:
        path: of the directory.
        model: from transformers; its config and class are saved.
        weights: (name, full tensor) of every parameter; all ranks iterate together, rank 0 keeps copies on the host.
        processor: saved beside the weights; None for none.
        dtype: of the floating-point tensors in the files; by default their own.
    """

    def converted(tensor: Tensor) -> Tensor:
        return tensor.to("cpu", dtype if tensor.is_floating_point() else None)

    tensors = _gather(weights, converted)

    def write(part: Path) -> None:
        saved, state = (_empty_copy(model, dtype) if dtype else model), tensors
        if has_value_head(model):
            saved, state = as_classifier(saved, state, getattr(processor, "tokenizer", processor))
        saved.save_pretrained(part, state_dict=state)
        if processor is not None:
            processor.save_pretrained(part)

    _write_directory(path, write)


def export_adapter(path: str | Path, config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write LoRA adapters as peft does, for `PeftModel.from_pretrained` and vLLM's `LoRARequest`.

    Args:
        path: of the directory.
        config: peft's, with the name of the base model.
        weights: (name in peft's files, full tensor), see `engine.get_adapter()`; all ranks iterate together.
    """
    tensors = _gather(weights, Tensor.cpu)

    def write(part: Path) -> None:
        part.mkdir(parents=True)
        config.save_pretrained(part)
        save_file({name: x.contiguous() for name, x in tensors.items()}, part / "adapter_model.safetensors")

    _write_directory(path, write)


def _gather(weights: Iterable[tuple[str, Tensor]], keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The tensors that rank 0 keeps; the other ranks take part and keep none."""
    writes = dist.get_rank() == 0
    return {name: keep(tensor) for name, tensor in weights if writes}


def _write_directory(path: str | Path, write: Callable[[Path], None]) -> None:
    """Have rank 0 write a directory beside its final path, and rename it when it is complete."""
    path = Path(path)
    if dist.get_rank() == 0:
        part = path.with_name(path.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        write(part)
        replace_directory(part, path)
    dist.barrier()


def _empty_copy(model: Any, dtype: torch.dtype) -> Any:
    """A model of the same class and configuration, without weights, whose dtype is another."""
    with init_empty_weights():
        empty = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    empty.generation_config = model.generation_config
    return empty
