"""LoRA adapters of a sharded model: the model without them, and the check that nothing else is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


def check_only_adapters_train(module: nn.Module) -> None:
    """Raise a ValueError if weights other than the adapters are trained, too."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and ".lora_" not in name:
            raise ValueError(
                f"get_adapter: expected adapters to be all that is trained, got {name}, too; get_per_tensor_param "
                "returns all weights, with the adapters merged"
            )


@contextmanager
def without_adapters(module: Any) -> Iterator[None]:
    """A context in which the module computes without its adapters.

    Args:
        module: of peft, after `fully_shard`, and resharded.
    """
    trains = {parameter: parameter.requires_grad for parameter in module.parameters()}
    try:
        with module.disable_adapter():  # peft freezes the adapters here
            # FSDP's first forward looks up which weights are trained, so they must not be frozen in it
            _set_requires_grad(trains)
            yield
    finally:
        _set_requires_grad(trains)  # peft makes all adapters trainable, also frozen ones


def adapters_are_disabled(module: nn.Module) -> bool:
    """Whether layers of this module of peft compute without their adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(layer, BaseTunerLayer) and layer.disable_adapters for layer in module.modules())


def _set_requires_grad(trains: Mapping[nn.Parameter, bool]) -> None:
    for parameter, train in trains.items():
        parameter.requires_grad_(train)
