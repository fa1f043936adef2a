"""Padded rows -> one packed row, and back; exact and differentiable.

    packed  = unpad(hidden, attention_mask)               # [B, T, ...] -> [N, ...], N attended tokens, row after row
    targets = unpad_like(tokens, packed)                  # another tensor of the same batch: one gather
    logprobs = repad(token_logprobs, packed)              # [N, ...] -> [B, T, ...]

`cu_seqlens` and `max_seqlen` have the form that flash-attn and `torch.nn.attention.varlen.varlen_attn` expect. The
batch dimension has to come first: `unpad_like(rearrange(ids, "a b t -> b t a"), packed)` packs M-RoPE ids [3, B, T] to
[N, 3].
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Packed(NamedTuple):
    """The attended tokens of a batch, row after row without padding.

    Args:
        values: [N, ...], the attended tokens.
        cu_seqlens: int32 [B + 1]; row b is `values[cu_seqlens[b]:cu_seqlens[b + 1]]`, empty if nothing is attended.
        max_seqlen: length of the longest row, on the host.
        indices: int64 [N], position `b * T + t` of each token in the padded batch.
        batch_shape: (B, T).
    """

    values: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    indices: Tensor
    batch_shape: tuple[int, int]


def unpad(x: Tensor, attention_mask: Tensor, *, lengths: Sequence[int] | None = None) -> Packed:
    """Packs the attended tokens: `values = x[attention_mask]`, in the order of the rows.

    Args:
        x: [B, T, ...], any dtype.
        attention_mask: bool or integer [B, T], nonzero on the tokens to keep: padding on any side,
            holes and empty rows are fine.
        lengths: B ints on the host, the attended tokens of each row. Without them the lengths are copied from the
            device, the only synchronisation. On the CPU they are checked against the mask.

    Returns:
        a `Packed`; gradients of its `values` flow to `x`.

    Raises:
        ValueError: `x`, `attention_mask` and `lengths` do not fit together, or the mask is floating point.
    """
    _check_tensor("attention_mask", attention_mask)
    if attention_mask.ndim != 2 or attention_mask.is_floating_point() or attention_mask.is_complex():
        got = f"{attention_mask.dtype} {list(attention_mask.shape)}"
        raise ValueError(f"attention_mask: expected bool or integer [B, T], got {got}")
    batch, width = attention_mask.shape
    _check_leading("x", x, (batch, width))
    keep = attention_mask.to(x.device, torch.bool)
    per_row = keep.sum(1, dtype=torch.int32)
    if lengths is None:
        lengths = per_row.tolist()
    elif len(lengths) != batch:
        raise ValueError(f"lengths: expected {batch}, one per row of attention_mask, got {len(lengths)}")
    elif x.device.type == "cpu" and list(lengths) != per_row.tolist():
        raise ValueError(f"lengths: expected {per_row.tolist()} as in attention_mask, got {list(lengths)}")
    # the size is known, so that nothing waits for the device, as `nonzero` would
    indices = torch.nonzero_static(keep.flatten(), size=sum(lengths)).squeeze(1)
    return Packed(
        values=x.flatten(0, 1).index_select(0, indices),
        cu_seqlens=pad(per_row.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen=max(lengths, default=0),
        indices=indices,
        batch_shape=(batch, width),
    )


def unpad_like(x: Tensor, packed: Packed) -> Tensor:
    """Packs another tensor [B, T, ...] of the same batch into values [N, ...], without reading the mask again.

    Raises:
        ValueError: `x` does not begin with `packed.batch_shape`.
    """
    _check_leading("x", x, packed.batch_shape)
    return x.flatten(0, 1).index_select(0, packed.indices)


def repad(x: Packed | Tensor, like: Packed | None = None, *, fill: float = 0) -> Tensor:
    """Inverse of `unpad`: puts packed values back to their places in the padded batch.

    Args:
        x: a `Packed`, or values [N, ...] in the order of `like`, of any dtype and trailing shape.
        like: says where the values go; required if `x` is a tensor.
        fill: value of all tokens that are not attended.

    Returns:
        [B, T, ...]; gradients flow to the values.

    Raises:
        ValueError: a tensor without `like`, or of another length.
    """
    if isinstance(x, Packed):
        like, values = (x if like is None else like), x.values
    elif like is None:
        raise ValueError("like: expected a Packed, which says where the values go, got None")
    else:
        values = x
    count = len(like.indices)
    if values.ndim == 0 or len(values) != count:
        raise ValueError(f"x: expected [{count}, ...], one value per attended token, got {list(values.shape)}")
    batch, width = like.batch_shape
    padded = values.new_full((batch * width, *values.shape[1:]), fill)
    padded.index_copy_(0, like.indices, values)
    return padded.unflatten(0, (batch, width))


def concatenated_ranges(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Concatenates ranges: [s, s + 1, ..., s + n - 1] for each start s and length n.

    Args:
        starts, lengths: as many integers on the host; a length may be 0.

    Returns:
        int64 [sum of lengths], on the host.
    """
    sizes, first = torch.tensor(lengths, dtype=torch.long), torch.tensor(starts, dtype=torch.long)
    offset = first - (sizes.cumsum(0) - sizes)
    return offset.repeat_interleave(sizes) + torch.arange(int(sizes.sum()))


def _check_tensor(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: expected a tensor, got a {type(x).__name__}")


def _check_leading(name: str, x: Tensor, batch_shape: tuple[int, int]) -> None:
    _check_tensor(name, x)
    if tuple(x.shape[:2]) != batch_shape:
        raise ValueError(f"{name}: expected [{batch_shape[0]}, {batch_shape[1]}, ...], got {list(x.shape)}")
