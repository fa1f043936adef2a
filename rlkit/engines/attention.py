"""Packed (variable-length) causal attention, plugged into transformers through its public `AttentionInterface`.

A packed row holds several sequences end to end. The engine passes `packed_cu_seqlens` and `packed_max_seqlen` to the
model's forward; transformers hands unknown keyword arguments down to the attention function, which is this module's.
Without them (generation, padded batches) transformers' own SDPA function runs, so one model object serves both.

The name under which it is registered must not contain "flash": transformers would look for a kernel of that name.
"""

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "rlkit_packed"


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention within each sequence of a packed row.

    Args:
        query: [N, Hq, D].
        key, value: [N, Hkv, D], Hq a multiple of Hkv.
        cu_seqlens: [B+1] int32 starts of the sequences, and N.
        max_seqlen: length of the longest.
        scale: of the scores; 1/sqrt(D) by default.
        window: attend to this many tokens back, oneself included; all by default.
        dropout: probability; on a GPU without flash-attn it must be 0.

    Returns:
        [N, Hq, D].
    """
    if not query.is_cuda:
        return _varlen_sdpa(query, key, value, cu_seqlens, max_seqlen, scale, window, dropout)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    window_size = (-1 if window is None else window - 1, 0)
    if (flash := _flash_attn()) is not None:
        return flash(
            query, key, value, *lengths, dropout_p=dropout, softmax_scale=scale, causal=True, window_size=window_size
        )
    if dropout:
        raise ValueError(f"attention dropout {dropout} on packed rows needs flash-attn on a GPU; set it to 0")
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale, "window_size": window_size}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    else:  # torch 2.11
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out: Any = varlen_attn(query, key, value, *lengths, **options)
    return out


def _varlen_sdpa(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    scale: float | None, window: int | None, dropout: float,
) -> Tensor:  # fmt: skip
    """CPU: one SDPA call over right-padded rows where they are of like length, else one call a sequence."""
    lengths = cu_seqlens.diff().tolist()
    gqa = query.shape[1] != key.shape[1]

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [B, T, H, D]; padding lies to the right, so causal hides it
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        band = None
        if window is not None and window < q.shape[2]:
            distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
            band = (distance >= 0) & (distance < window)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=band, is_causal=band is None, scale=scale, dropout_p=dropout, enable_gqa=gqa
        )
        return out.transpose(1, 2)

    if len(lengths) * max_seqlen <= 2 * query.shape[0]:
        shift = torch.arange(len(lengths)) * max_seqlen - cu_seqlens[:-1]
        slots = torch.arange(query.shape[0]) + shift.repeat_interleave(cu_seqlens.diff())
        rows = (
            x.new_zeros(len(lengths) * max_seqlen, *x.shape[1:]).index_copy(0, slots, x).unflatten(0, (-1, max_seqlen))
            for x in (query, key, value)
        )
        return sdpa(*rows).flatten(0, 1).index_select(0, slots)
    pieces = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    return torch.cat([sdpa(q[None], k[None], v[None])[0] for q, k, v in pieces])


@cache
def _flash_attn() -> Any:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, packed_cu_seqlens: Tensor | None = None,
    packed_max_seqlen: int = 0, sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls: query [1, H, N, D] -> [1, N, H, D]."""
    if packed_cu_seqlens is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = varlen_attention(
        q, k, v, packed_cu_seqlens, packed_max_seqlen, scale=scaling, window=sliding_window, dropout=dropout
    )
    return out[None], None


def _mask(*, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """No mask for packed rows, which come without an `attention_mask`: it would be of [N, N]."""
    return None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **kwargs)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Route the text model's attention through `varlen_attention`; a vision tower keeps its own."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    nested = "text_config" in getattr(model.config, "sub_configs", {})
    model.set_attn_implementation({"text_config": NAME} if nested else NAME)
