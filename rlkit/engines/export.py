"""Directories that transformers, peft and vLLM read. Each is either complete or absent."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch import Tensor

from rlkit.engines.checkpoint import first_problem, replace_directory
from rlkit.engines.value_head import as_classifier, has_value_head
from rlkit.vlm.checkpoint_weights import as_in_files, checkpoint_buffers, converted_together
from rlkit.vlm.families import WHOLE_MODELS
from rlkit.vlm.loading import whole_config

FILE_BYTES = 2 << 30  # most in one file of weights, and most that rank 0 holds on the host


class ExportNotWritten(OSError):
    """A directory could not be written. The one that was there before is intact."""


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
        weights: (name, full tensor) of every parameter; all ranks iterate together. Files get the names of the
            family's published checkpoints, and the model's buffers in their own dtype. Rank 0 writes a file as soon as
            its tensors are there, and holds one file's at most on the host; the other ranks hold none.
        processor: saved beside the weights; None for none.
        dtype: of the floating-point tensors in the files; by default their own.

    Raises:
        ExportNotWritten: on all ranks; the directory that was there before is intact.
    """
    saved, renamed = (_empty_copy(model, dtype) if dtype else model), dict[str, str]()
    if has_value_head(model):
        saved, renamed = as_classifier(saved, getattr(processor, "tokenizer", processor))

    def write(part: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
        _save_settings(saved, part)
        if saved.config.model_type in WHOLE_MODELS:
            whole_config(saved).save_pretrained(part)
        if processor is not None:
            processor.save_pretrained(part)
        groups = converted_together(model, weights)
        pieces = (piece for group in groups for piece in as_in_files(model, group))
        named = ((renamed.get(name, name), x) for name, x in pieces)
        on_host = ((name, x.to("cpu", dtype if x.is_floating_point() else None)) for name, x in named)
        buffers = ((name, x.cpu()) for name, x in checkpoint_buffers(model))
        _write_weights(part, chain(on_host, buffers))

    _write_directory(path, write, weights)


def export_adapter(path: str | Path, config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write LoRA adapters as peft does, for `PeftModel.from_pretrained` and vLLM's `LoRARequest`.

    Args:
        path: of the directory.
        config: peft's, with the name of the base model.
        weights: (name in peft's files, full tensor), see `engine.get_adapter()`; all ranks iterate together.

    Raises:
        ExportNotWritten: as `export_hf`.
    """

    def write(part: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
        part.mkdir(parents=True)
        config.save_pretrained(part)
        tensors = {name: x.cpu().contiguous() for name, x in weights}
        save_file(tensors, part / "adapter_model.safetensors")

    _write_directory(path, write, weights)


def _save_settings(model: Any, part: Path) -> None:
    """Write config, generation config and code.

    transformers reads a generation config that has a temperature without `do_sample`, as published ones do, but refuses
    to write it.
    """
    from transformers import GenerationConfig

    generation_config = getattr(model, "generation_config", None)
    if generation_config is None:  # a classifier
        model.save_pretrained(part, state_dict={})
        return
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(part, state_dict={})
    finally:
        model.generation_config = generation_config
    generation_config.to_json_file(part / "generation_config.json")


def _write_weights(part: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors to model.safetensors, or to several such files with an index, in their order."""
    files: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        save_file(held, part / f"{len(files)}.part", {"format": "pt"})
        files.append(list(held))
        held.clear()

    size = 0
    for name, tensor in weights:
        if held and size + tensor.nbytes > FILE_BYTES:
            flush()
            size = 0
        held[name] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
        del tensor
    flush()
    if len(files) == 1:
        (part / "0.part").rename(part / "model.safetensors")
        return
    index: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (part / f"{number}.part").rename(part / file)
        index |= dict.fromkeys(names, file)
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (part / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")


def _write_directory(
    path: str | Path,
    write: Callable[[Path, Iterable[tuple[str, Tensor]]], None],
    weights: Iterable[tuple[str, Tensor]],
) -> None:
    """Have rank 0 write a directory beside its final path, and rename it when it is complete.

    Args:
        write: writes (path, weights). The other ranks iterate over the weights meanwhile, since all gather them
            together; if rank 0 cannot write, it does the same.
    """
    path, size, error = Path(path), 0, None
    part = path.with_name(path.name + ".part")

    def counted() -> Iterator[tuple[str, Tensor]]:
        nonlocal size
        for name, x in weights:
            size += x.nbytes
            yield name, x

    remaining = counted()
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)
        try:
            write(part, remaining)
            replace_directory(part, path)
        except Exception as caught:  # raised below, when all ranks have gathered all weights
            error = caught
            shutil.rmtree(part, ignore_errors=True)
    for _ in remaining:
        pass
    problem = first_problem(_disk_problem(error))
    if error is not None and not problem:
        raise error
    if problem:
        existing = next(folder for folder in path.parents if folder.exists())
        free = shutil.disk_usage(existing).free
        raise ExportNotWritten(
            f"{path}: expected room for about {size} bytes, got {free} bytes free: {problem}"
        ) from error


def _disk_problem(error: Exception | None) -> str:
    """What the disk did, if an export failed by it; the libraries in Rust have errors of their own for that."""
    from_rust = error is not None and "(os error " in str(error)
    return str(error).strip().partition("\n")[0] if isinstance(error, OSError) or from_rust else ""


def _empty_copy(model: Any, dtype: torch.dtype) -> Any:
    """A model of the same class and configuration, without weights, whose dtype is another."""
    with init_empty_weights():
        empty = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    empty.generation_config = model.generation_config
    return empty
