"""Megatron-Core on a CPU: CUDA calls that the host answers within a `with` block, and a dispatcher that needs no CUDA.

Megatron-Core has no CPU mode. Where it has an extension point, a class of ours is used there. A few functions are left
that can only be replaced; `cuda_calls_on_host` replaces them while it is active and restores them afterwards. The list
with the reason for each is in tests/test_house_rules.py, which knows no other replacements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

HOST = torch.device("cpu")


@contextmanager
def cuda_calls_on_host(device: torch.device) -> Iterator[None]:
    """Within the block, tensors that Megatron makes on the current CUDA device are on the host instead.

    On a GPU it changes nothing.

    Args:
        device: on which the model runs.
    """
    if device.type != "cpu":
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.cuda, "current_device", _host))
        stack.enter_context(patch.object(torch.cuda, "synchronize", _do_nothing))
        stack.enter_context(patch.object(random, "_get_cuda_rng_state", _get_rng_state))
        stack.enter_context(patch.object(random, "_set_cuda_rng_state", _set_rng_state))
        stack.enter_context(patch.object(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", "unused"))
        stack.enter_context(_TensorsOnHost())
        yield


class _TensorsOnHost(TorchFunctionMode):
    """Tensors that are made on CUDA, or moved there, are on the host; their type names are those of CUDA tensors.

    Megatron recognises parameters by names such as "torch.cuda.FloatTensor".
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = HOST
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def _host() -> torch.device:
    return HOST


def _do_nothing() -> None:
    """The host has nothing to wait for."""


def _get_rng_state(*args: Any, **kwargs: Any) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def use_host_token_dispatchers(model: nn.Module) -> None:
    """Replace the token dispatchers of a model's MoE layers by ones that need no CUDA stream."""
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            experts = layer.num_local_experts, layer.local_expert_indices
            layer.token_dispatcher = _HostTokenDispatcher(*experts, layer.config, get_default_pg_collection())


class _HostTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Sends tokens to their experts; the counts of tokens are on the host already and need no CUDA stream."""

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                splits = getattr(self, name)
                setattr(self, name, splits.numpy() if isinstance(splits, Tensor) else splits)
        return tokens_per_expert
