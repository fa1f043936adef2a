"""A copy of the trained model for the sampler hf, in engines whose own module cannot sample: fsdp1 and megatron."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkit.engines.packing.attention import use_packed_attention
from rlkit.vlm.loading import compute_as_published


def sampled_copy(
    model: Any,
    weights: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    longest_sequence: int | None = None,
) -> Any:
    """A transformers model with full weights, which computes as the engine does.

    It is made on the host, in the dtype that the engine was given the model in: buffers keep that dtype, as in the
    engine.

    Args:
        model: the engine's; it may be on the meta device.
        weights: all weights by their Hugging Face names, perhaps cast to `dtype`.
        device: of the copy.
        dtype: of its parameters and activations.
        longest_sequence: see `use_packed_attention`.
    """
    copy = type(model).from_pretrained(None, config=model.config, state_dict=dict(weights), dtype=model.dtype)
    copy.generation_config = model.generation_config
    use_packed_attention(copy, longest_sequence=longest_sequence)
    compute_as_published(copy)
    for parameter in copy.parameters():
        parameter.data = parameter.data.to(dtype)
    copy.register_forward_pre_hook(partial(_cast_inputs, dtype=dtype), with_kwargs=True)
    return copy.to(device)


def _cast_inputs(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: pixels and other floating-point inputs in the dtype of the weights, as FSDP has them."""

    def cast(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return type(x)(cast(one) for one in x)
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return cast(args), {name: cast(x) for name, x in kwargs.items()}
