"""Converts the tensors of a model's files, of which each expert has its own, to parameters of the transformers module.

In the module one tensor has all experts of a layer. Names of tensors are those of the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlkit.engines.model_files import check_weights, open_slices
from rlkit.vlm.loading import other_head_message
from rlkit.vlm.weight_files import report_unused

LM_HEAD = "lm_head.weight"
HF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
EXPERTS = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")  # all experts of a layer, in the transformers module


def module_name(name: str) -> str:
    """The parameter of the transformers module that a tensor of the files belongs to: a layer's experts are one."""
    expert = HF_EXPERT.fullmatch(name)
    if expert is None:
        return name
    return f"{expert[1]}.{'down_proj' if expert[3] == 'down' else 'gate_up_proj'}"


def files_to_module(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their names in files -> by names of the transformers module; all experts of a layer must be there."""
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}  # module name -> expert -> projection -> tensor
    merged = {}
    for name, tensor in tensors.items():
        if (expert := HF_EXPERT.fullmatch(name)) is None:
            merged[name] = tensor
        else:
            experts.setdefault(module_name(name), {}).setdefault(int(expert[2]), {})[expert[3]] = tensor
    for name, by_expert in experts.items():
        merged[name] = torch.stack([torch.cat(list(by_expert[number].values())) for number in sorted(by_expert)])
    return merged


def module_to_file(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """The tensor of a name in files, from tensors by names of the transformers module."""
    tensor, expert = tensors[module_name(name)], HF_EXPERT.fullmatch(name)
    if expert is None:
        return tensor
    expert_tensor = tensor[int(expert[2])]
    return expert_tensor if expert[3] == "down" else expert_tensor.chunk(2)[expert[3] == "up"]


def module_to_files(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensors by names in files that a parameter of the transformers module consists of; views of it."""
    experts = EXPERTS.fullmatch(name)
    if experts is None:
        return {name: tensor}
    file_tensors: dict[str, Tensor] = {}
    for number, matrix in enumerate(tensor):
        parts = {"down": matrix} if experts[2] == "down" else dict(zip(("gate", "up"), matrix.chunk(2), strict=True))
        file_tensors |= {f"{experts[1]}.{number}.{part}_proj.weight": x for part, x in parts.items()}
    return file_tensors


class HFTensor(NamedTuple):
    """A tensor of the transformers model, perhaps on the meta device, and whether it is trained."""

    tensor: Tensor
    trains: bool


def hf_tensors(model: Any) -> dict[str, HFTensor]:
    """All tensors of a transformers model, by their names in its files, where experts are separate tensors; views."""
    return {
        hf_name: HFTensor(tensor, parameter.requires_grad)
        for name, parameter in model.named_parameters()
        for hf_name, tensor in module_to_files(name, parameter.detach()).items()
    }


@contextmanager
def readable_tensors(model: Any, tensors: Mapping[str, HFTensor]) -> Iterator[dict[str, Any]]:
    """The tensors by name, or for those on the meta device objects that read slices of them from the model's files.

    Args:
        model: from transformers.
        tensors: all of the model, from `hf_tensors`.

    Raises:
        ValueError: files that are missing, cut short, or of another model.
        NotInShardsError: as `open_slices`.
    """
    if not any(x.tensor.is_meta for x in tensors.values()):
        yield {name: x.tensor for name, x in tensors.items()}
        return
    with open_slices(model) as slices:
        renamed = _with_names_of_model(model, slices, tensors)
        found = {name: x for stored, tensor in renamed.items() for name, x in _separate_experts(stored, tensor).items()}
        fits = {name for name, x in tensors.items() if name in found and shape_of(found[name]) == shape_of(x.tensor)}
        check_weights(model.config.name_or_path, {name for name, x in tensors.items() if x.tensor.is_meta} - fits)
        if dist.get_rank() == 0:
            report_unused(model.config.name_or_path, model, found.keys() - tensors.keys() - model.state_dict().keys())
        _check_tied_weights(model, found)
        # a value head keeps its values if the files have an output layer for the vocabulary
        yield {name: found[name] if name in fits else x.tensor for name, x in tensors.items()}


def _check_tied_weights(model: Any, found: Mapping[str, Any]) -> None:
    """Raise a ValueError if the files hold an output layer that is tied to the embedding, and differs from it."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if LM_HEAD not in found or head.weight is not embedding.weight:
        return
    name = next(name for name, parameter in model.named_parameters() if parameter is embedding.weight)
    rows = range(0, len(embedding.weight), 1024)  # at a time, to hold little
    if any(not torch.equal(found[LM_HEAD][row : row + 1024], found[name][row : row + 1024]) for row in rows):
        raise ValueError(other_head_message(model.config.name_or_path))


def _with_names_of_model(model: Any, slices: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of files by `names` of the model: as transformers renames them, but with separate experts."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    mapping: list[Any] = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    found, wanted = {}, {**model.state_dict(), **names}  # with experts in one tensor, and separate
    for old_name, x in slices.items():
        name, _ = rename_source_key(old_name, renamings, [], model.base_model_prefix, wanted)
        found[old_name if name not in names and old_name in names else name] = x
    return found


@dataclass
class _ExpertMatrix:
    """The matrix of one expert in a tensor of all experts of a layer, read from the files when it is indexed."""

    experts: Any
    number: int
    rows: slice

    def get_shape(self) -> list[int]:
        return [self.rows.stop - self.rows.start, *shape_of(self.experts)[2:]]

    def __getitem__(self, _: Any) -> Tensor:
        """The whole matrix: ranks share whole experts."""
        tensor: Tensor = self.experts[self.number, self.rows]
        return tensor


def _separate_experts(name: str, tensor: Any) -> dict[str, Any]:
    """Matrices by names with separate experts, if a tensor of the files has all experts of a layer."""
    if (match := EXPERTS.fullmatch(name)) is None:
        return {name: tensor}
    experts, rows = shape_of(tensor)[:2]
    half = rows // 2
    parts = {"down": slice(0, rows)} if match[2] == "down" else {"gate": slice(0, half), "up": slice(half, rows)}
    return {
        f"{match[1]}.{number}.{part}_proj.weight": _ExpertMatrix(tensor, number, part_rows)
        for number in range(experts)
        for part, part_rows in parts.items()
    }


def shape_of(tensor: Any) -> tuple[int, ...]:
    """The shape of a tensor, or of an object that reads slices of one."""
    return tuple(tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape())
