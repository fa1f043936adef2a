"""Variable-length flash attention: the kernel of flash-attn where it is installed, else torch's."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@cache
def flash_attn_varlen_func() -> Any:
    """The function of that name in flash-attn; None if the package is not installed."""
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def flash_supports(query: Tensor, value: Tensor) -> bool:
    """Whether flash kernels accept these tensors: on a GPU, in half precision, with a head size of 8, 16, ..., 256."""
    size, half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and half and value.shape[-1] <= size <= 256 and size % 8 == 0


def flash_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seqlens: tuple[Tensor, Tensor, int, int],
    window_size: tuple[int, int],
    scale: float | None,
    dropout: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Attention within each segment of [N, H, D] queries and keys.

    Args:
        query, key, value: as for `flash_supports`; the head size of values may be smaller.
        seqlens: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k.
        window_size: how many keys to the left and to the right a query attends to; -1: all. Right 0 is causal, with
            the last query aligned to the last key.
        scale: of the scores; 1 / sqrt(D) by default.
        dropout, softcap: need flash-attn; None or 0 without it.

    Raises:
        ValueError: dropout without flash-attn.
    """
    size = value.shape[-1]
    if size < query.shape[-1]:  # DeepSeek's values; the kernels expect one head size
        value = F.pad(value, (0, query.shape[-1] - size))
    if (flash_attn := flash_attn_varlen_func()) is not None:
        options: dict[str, Any] = {"dropout_p": dropout, "softmax_scale": scale, "window_size": window_size}
        options |= {} if softcap is None else {"softcap": softcap}
        return flash_attn(query, key, value, *seqlens, causal=window_size[1] == 0, **options).narrow(-1, 0, size)
    if dropout:
        raise ValueError(f"attention_dropout: expected 0 for packed rows on a GPU without flash-attn, got {dropout}")
    from torch.nn.attention.varlen import varlen_attn

    options = {"scale": scale, "window_size": window_size}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    else:  # torch 2.11
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out: Any = varlen_attn(query, key, value, *seqlens, **options)
    return out.narrow(-1, 0, size)
