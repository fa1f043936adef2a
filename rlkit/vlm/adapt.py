"""What trains and what does not: freezing by pattern, and LoRA."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.data.lookup import extra
from rlkit.vlm.families import NAMED_AS_IN_FILES, TRANSPOSED_EXPERTS


def vision_tower(model: Any) -> str:
    """A pattern that matches the names of the parameters of a model's vision tower, for `freeze`.

    The tower is the part of the model whose own configuration is the model's `vision_config`. What stands between it
    and the language model (a projector, a connector) is no part of it, unless the family builds it into the tower, as
    Qwen does.

    Raises:
        ValueError: the model has none.
    """
    kind = type(getattr(model.config, "vision_config", None))
    names = [name for name in towers(model) if type(model.get_submodule(name).config) is kind]
    if not names:
        raise ValueError(f"vision tower: expected a model that has one, got {model.config.model_type}")
    return _inside(names)


def towers(model: Any) -> list[str]:
    """The names of the modules that encode images, videos and audio: of the outermost that have a configuration of
    their own, which is neither the model's nor its text model's."""
    own = {type(model.config), type(model.config.get_text_config())}
    found: list[str] = []
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        apart = hasattr(config, "model_type") and type(config) not in own
        if apart and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found


def _inside(names: Sequence[str]) -> str:
    """A pattern for what is inside of modules, also of a model that peft or an engine has wrapped."""
    return rf"(^|\.)({'|'.join(map(re.escape, names))})\."


def freeze(model: nn.Module, pattern: str) -> list[str]:
    """Switch gradients off for every parameter whose name matches.

    Args:
        model: any module, not yet wrapped by an engine.
        pattern: regular expression, searched for in each name; `vision_tower(model)` for its vision tower.

    Returns:
        The names frozen.

    Raises:
        ValueError: nothing matches: a tower that trains in silence is worse than a stop.
    """
    frozen = [name for name, _ in model.named_parameters() if re.search(pattern, name)]
    if not frozen:
        raise ValueError(f"pattern {pattern!r} matches no parameter; the top modules are {sorted(_tops(model))}")
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return frozen


def _tops(model: nn.Module) -> set[str]:
    return {".".join(name.split(".")[:2]) for name, _ in model.named_parameters()}


def lora(
    model: Any,
    rank: int,
    alpha: int,
    target_modules: str = "all-linear",
    exclude_modules: str | None = None,
    *,
    adapt_towers: bool = False,
) -> Any:
    """Wrap a transformers model with LoRA adapters (arXiv 2106.09685): W + alpha / rank * B A, B zero at first.

    Args:
        model: from transformers.
        rank, alpha: r and alpha of the paper, eq. 3.
        target_modules: "all-linear", or a regular expression that module names match whole.
        exclude_modules: regular expression that names of further modules without adapters match whole.
        adapt_towers: adapters in the modules that encode images, videos and audio too, see `towers`.

    Returns:
        A peft model: only adapters train, and `disable_adapter()` gives the reference policy back.
    """
    with extra("vlm"):
        import peft
    if rank < 1:
        raise ValueError(f"rank: expected at least 1, got {rank}")
    left_out = [exclude_modules] if exclude_modules else []
    if not adapt_towers and (encoders := towers(model)):
        left_out.append(f".*{_inside(encoders)}.*")
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=target_modules,
        exclude_modules="|".join(f"({pattern})" for pattern in left_out) or None,
    )
    random_state = torch.get_rng_state()
    model = peft.get_peft_model(model, config)
    adapted = [layer for layer in model.modules() if "default" in getattr(layer, "lora_A", ())]
    if any(layer.lora_A["default"].weight.is_meta for layer in adapted):
        torch.set_rng_state(random_state)
        for layer in adapted:
            _initialise(layer)
    return model


def _initialise(layer: Any) -> None:
    """Give values to adapters that peft has put beside weights which are still to be read, on the meta device.

    The random numbers are drawn as for other adapters, so that a run does not depend on how its weights are read.
    """
    for part in (layer.lora_A, layer.lora_B):
        part.to_empty(device="cpu")
        part["default"].reset_parameters()  # what making an nn.Linear does; peft then overwrites it
    layer.reset_lora_parameters("default", True)


def trainable_summary(model: nn.Module) -> str:
    """One line that says what trains."""
    train = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    parts = sorted({_part(name) for name, p in model.named_parameters() if p.requires_grad})
    return f"{train:,} of {total:,} parameters train ({train / max(total, 1):.1%}): {', '.join(parts) or 'none'}"


def _part(name: str) -> str:
    kind = "LoRA in " if ".lora_" in name else ""
    name = re.sub(r"^base_model\.model\.", "", name)
    return kind + ".".join(name.split(".")[:2])


def merged_parameters(
    model: nn.Module, full: Callable[[Sequence[Tensor]], Iterable[Tensor]] = iter, bucket_bytes: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every parameter of the model under its adapters, LoRA merged on the way.

    None is held here once the next is asked for; who asks lets go of it before, or holds two.

    Args:
        model: plain, or wrapped by `lora`.
        full: makes whole tensors of sharded parameters, one after the other; called for each bucket, in the same order
            everywhere.
        bucket_bytes: most that one call is asked for, whole tensors and adapters; what is larger goes alone, and so
            does each by default.
    """
    adapted = [module for module in model.modules() if "default" in getattr(module, "lora_A", ())]
    adapters = {id(_adapted(module)): module for module in adapted}
    bucket: list[tuple[str, Any, list[Tensor]]] = []
    held = 0
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        adapter = adapters.get(id(parameter))
        parts = [parameter, *([] if adapter is None else _pair(adapter))]
        size = sum(part.numel() * part.element_size() for part in parts)
        if bucket and held + size > bucket_bytes:
            yield from _merged(bucket, full)
            bucket, held = [], 0
        name = re.sub(r"^base_model\.model\.", "", name).replace(".base_layer", "")
        bucket.append((name, adapter, [part.detach() for part in parts]))
        held += size
    yield from _merged(bucket, full)


def _merged(bucket: Sequence[tuple[str, Any, list[Tensor]]], full: Any) -> Iterator[tuple[str, Tensor]]:
    whole = iter(full([part for *_, parts in bucket for part in parts]))
    for name, adapter, _ in bucket:
        tensor = next(whole)
        if adapter is not None:
            tensor = tensor + _delta(adapter, next(whole), next(whole)).to(tensor.dtype)
        yield name, tensor
        del tensor  # or it is there while the next is made


def adapter_parameters(
    model: nn.Module, full: Callable[[Sequence[Tensor]], Iterable[Tensor]] = iter
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every LoRA parameter, under the names of peft's adapter files, one at a time.

    Args:
        model: wrapped by `lora`.
        full: as for `merged_parameters`.
    """
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            yield from ((name.replace(".default.", "."), tensor) for tensor in full([parameter.detach()]))


def _adapted(adapter: Any) -> Tensor:
    """The parameter that an adapter adds to; peft wraps experts, which are no linear layers, parameter by parameter."""
    return adapter.get_param() if hasattr(adapter, "parameter_name") else adapter.get_base_layer().weight


def _pair(adapter: Any) -> list[Tensor]:
    """A and B."""
    return [adapter.lora_A["default"].weight, adapter.lora_B["default"].weight]


def _delta(adapter: Any, down: Tensor, up: Tensor) -> Tensor:
    """What an adapter adds, float32: scale * B A, for each expert where the parameter holds several."""
    down, up = down.float(), up.float()
    scale, experts = adapter.scaling["default"], getattr(adapter, "num_experts", 1)
    if experts == 1:
        delta = scale * (up @ down)
        return delta.T if adapter.fan_in_fan_out else delta  # GPT-2 holds its weights transposed
    down, up = down.view(experts, -1, down.shape[1]), up.view(len(up), -1, experts)
    delta = scale * torch.einsum("ore,eri->eoi", up, down)
    return delta.transpose(1, 2) if getattr(adapter.get_base_layer(), "is_transposed", False) else delta


def checkpoint_parameters(model: Any, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The (name, tensor) pairs of a transformers model in the pieces of its checkpoint files.

    transformers holds the experts of a layer in one tensor, for example; files, and those who read weights as files
    have them, know each expert's own. What is the same tensor there too keeps its name, but in `NAMED_AS_IN_FILES`.
    """
    from transformers.core_model_loading import revert_weight_conversion

    family = model.config.model_type
    for name, tensor in parameters:
        pieces = list(revert_weight_conversion(model, {name: tensor}).items())
        if family in TRANSPOSED_EXPERTS and ".mlp.experts." in name:  # transformers reads both and writes its own
            pieces = [(name, tensor.transpose(1, 2).contiguous())]
        elif len(pieces) == 1 and pieces[0][1] is tensor and family not in NAMED_AS_IN_FILES:
            pieces = [(name, tensor)]
        del tensor
        while pieces:
            yield pieces.pop(0)
