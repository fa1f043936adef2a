"""What a checkpoint of an FSDP engine has: trained weights, optimizer, scheduler and random states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from rlkit.engines import checkpoint


def training_state(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: Any, device: torch.device
) -> dict[str, Any]:
    """The state to save, with sharded tensors. An optimizer that has made no step has no moments in it.

    Args:
        module: after `fully_shard`.
        optimizer, scheduler: None for an engine without one.
        device: of the engine.
    """
    is_new = optimizer is not None and not optimizer.state
    state = _state_to_load(module, optimizer, scheduler, device)
    if optimizer is not None and is_new:  # torch has made moments by a step with zero gradients
        optimizer.state.clear()
        state["optimizer"]["state"] = {}
    return state


def load_training_state(
    path: str | Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    device: torch.device,
) -> dict[str, Any]:
    """Load a checkpoint that was saved at any world size; returns its `extra`.

    Args:
        path: of the checkpoint.
        module, optimizer, scheduler, device: as in `training_state`; their state is replaced.

    Raises:
        ValueError: names a file that is missing or cut short, or says that the checkpoint is of another model.
    """
    manifest = checkpoint.read_manifest(path)
    state = _state_to_load(module, optimizer, scheduler, device)
    saved_names = checkpoint.tensor_names(path)
    checkpoint.check_parameter_names(path, saved_names, state["model"])
    state = {name: x for name, x in state.items() if name in {"model", "optimizer", *saved_names}}
    checkpoint.leave_out_unsaved_moments(state["optimizer"], saved_names)
    checkpoint.load(path, state)
    set_state_dict(
        module,
        [] if optimizer is None else [optimizer],
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=False),
    )
    checkpoint.set_scheduler_state(state, manifest, scheduler)
    checkpoint.set_random_states(state, device)
    return manifest["extra"]


def _state_to_load(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: Any, device: torch.device
) -> dict[str, Any]:
    optimizers = [] if optimizer is None else [optimizer]
    if not optimizers and not any(p.requires_grad for p in module.parameters()):
        model, optim = get_state_dict(module, [])  # of a reference, whose weights may follow those of the policy
    else:
        with _trainable(optimizers):
            model, optim = get_state_dict(module, optimizers, options=StateDictOptions(ignore_frozen_params=True))
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    model.pop(name, None)  # a frozen output layer that is tied to the embedding
    state = {"model": model, "optimizer": optim, **checkpoint.scheduler_state(scheduler)}
    return state | checkpoint.random_states(device)


@contextmanager
def _trainable(optimizers: list[torch.optim.Optimizer]) -> Iterator[None]:
    """A context in which all parameters of optimizers are trainable, also those that were frozen during a run."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    frozen = [x for group in groups for x in group["params"] if not x.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
