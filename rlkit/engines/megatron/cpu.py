"""Megatron-Core on a CPU: its CUDA-only calls answered by the host, for as long as a `with` block lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

HOST = torch.device("cpu")


@contextmanager
def cuda_calls_on_host(device: torch.device) -> Iterator[None]:
    """Within it, what Megatron asks of CUDA by name happens on the host; on a GPU it changes nothing.

    Megatron makes tensors on `torch.cuda.current_device()` or "cuda", waits for that device, keeps its random states,
    and knows parameters by type names such as "torch.cuda.FloatTensor". All is as it was when the block ends.

    Args:
        device: on which the model runs.
    """
    if device.type != "cpu":
        yield
        return
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    stream = _Stream()
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: HOST),
        (torch.cuda, "synchronize", _nothing),
        (torch.cuda, "current_stream", lambda: stream),
        (torch.cuda, "stream", nullcontext),
        (token_dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", stream),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _already_there),
        (torch.cuda.nvtx, "range_push", _nothing),
        (torch.cuda.nvtx, "range_pop", _nothing),
        (torch.cuda, "get_rng_state", _get_rng_state),
        (torch.cuda, "manual_seed", torch.default_generator.manual_seed),
        (random, "_get_cuda_rng_state", _get_rng_state),
        (random, "_set_cuda_rng_state", _set_rng_state),
    ]
    with ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(patch.object(owner, name, answer))
        if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 asks for it where Transformer Engine is absent too
            stack.enter_context(patch.object(moe_utils, "te_general_gemm", None, create=True))
        stack.enter_context(_HostTensors())
        yield


class _HostTensors(TorchFunctionMode):
    """Tensors asked for on CUDA, or moved there, are on the host; their type names say CUDA all the same."""

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


class _Stream:
    """The one there is: what is asked of it has happened when the call returns."""

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


def _already_there(x: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Counts of tokens, on their way to a call that takes no tensors."""
    return x.numpy() if as_numpy and isinstance(x, Tensor) else x


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _get_rng_state(*args: Any, **kwargs: Any) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)
