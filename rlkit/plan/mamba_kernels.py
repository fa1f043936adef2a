"""Stand-ins for the kernels of mamba-ssm: they allocate the same tensors and compute nothing.

Shapes are those of mamba_ssm/ops/triton/ssd_combined.py (Mamba-2) and csrc/selective_scan/selective_scan.cpp (Mamba) of
https://github.com/state-spaces/mamba: B sequences of T tokens, H heads of size P, G groups, states of N numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SCANNED = 2048  # tokens between two states that `selective_scan_fn` keeps
ROWS = 32  # of a chunk's matrix, which the backward pass of Mamba-2 sums up at a time


class _SplitScan(torch.autograd.Function):
    """Gates, x, B, C and time steps [B, T, 2 H P + 2 G N + H] -> [B, T, hidden size].

    It is a Mamba-2 layer after its first projection: convolution, scan, gated norm and last projection. It saves its
    inputs, the output of the scan and the norm of each token, and computes the rest again in its backward pass.
    """

    @staticmethod
    def forward(ctx: Any, projected: Tensor, options: dict[str, Any], *weights: Tensor | None) -> Tensor:
        convolution, d, last, norm, *_ = weights
        assert convolution is not None and d is not None and last is not None
        heads, size, groups = len(d), options["headdim"], options["ngroups"]
        _convolved, x, b = _scan_inputs(projected, convolution, heads, size, groups)
        scanned, *_in_scan = _scan(x, b, options["chunk_size"])
        norms = None if norm is None else projected.new_empty(groups, *x.shape[:2], dtype=torch.float32)
        ctx.options, ctx.shape = options, (heads, size, groups)
        ctx.save_for_backward(projected, scanned, norms, *weights)
        _gated = torch.empty_like(scanned)
        return projected.new_empty(*x.shape[:2], len(last))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        projected, scanned, norms, *weights = ctx.saved_tensors
        convolved, x, b = _scan_inputs(projected, weights[0], *ctx.shape)
        of_projected, _of_convolved = torch.empty_like(projected), torch.empty_like(convolved)
        # the input of the last projection, the gradients of it and of the scan; without a norm the first is made twice
        _gated = scanned.new_empty(3 if norms is not None else 4, *scanned.shape)
        _allocate_gradients_of_scan(x, b, ctx.options["chunk_size"])
        return of_projected, None, *(None if w is None else torch.empty_like(w) for w in weights)


class _ChunkScan(torch.autograd.Function):
    """x [B, T, H, P], time steps [B, T, H], B and C [B, T, G, N] -> [B, T, H, P]: the scan of Mamba-2.

    It saves its inputs, its output and the cumulative decays, and computes the rest again in its backward pass.
    """

    @staticmethod
    def forward(ctx: Any, chunk_size: int, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, *weights: Tensor) -> Tensor:
        out, decays, *_in_scan = _scan(x, b, chunk_size)
        ctx.chunk_size = chunk_size
        ctx.save_for_backward(x, dt, b, c, out, decays, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, b, c, _, _, *weights = ctx.saved_tensors
        found = tuple(torch.empty_like(t) for t in (x, dt, b, c, *weights))
        _allocate_gradients_of_scan(x, b, ctx.chunk_size)
        return None, *found


class _SelectiveScan(torch.autograd.Function):
    """Inputs and time steps [B, C, T], B and C [B, N, T], gates [B, C, T] -> [B, C, T]: the scan of Mamba.

    It saves its inputs, those that are not contiguous as copies, the output before the gate, and a state for every 2048
    tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, gate: Tensor, a: Tensor, *weights: Tensor
    ) -> Tensor:
        tokens = [t if t.stride(-1) == 1 else t.contiguous() for t in (x, dt, b, c, gate)]
        out = torch.empty_like(tokens[1])
        batch, channels, length = x.shape
        states = a.new_empty(batch, channels, -(-length // SCANNED), 2 * a.shape[1])
        ctx.save_for_backward(*tokens, a, *weights, states, out)
        return torch.empty_like(tokens[4])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        x, dt, b, c, gate, *weights, _, _ = ctx.saved_tensors
        _gradient = gradients[0] if gradients[0].stride(-1) == 1 else gradients[0].contiguous()
        _sums = torch.empty_like(b, dtype=torch.float32), torch.empty_like(c, dtype=torch.float32)
        return tuple(torch.empty_like(t) for t in (x, dt, b, c, gate, *weights))


def _scan_inputs(
    projected: Tensor, convolution: Tensor, heads: int, size: int, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Convolved x, B and C in one tensor, and views of it: x [B, T, H, P] and B [B, T, G, N]."""
    convolved = projected.new_empty(*projected.shape[:2], len(convolution))
    x, b, _ = convolved.tensor_split([heads * size, (len(convolution) + heads * size) // 2], -1)
    return convolved, x.unflatten(-1, (heads, size)), b.unflatten(-1, (groups, -1))


def _scan(x: Tensor, b: Tensor, chunk_size: int) -> tuple[Tensor, ...]:
    """The output of a scan, cumulative decays, and what else exists until its function returns."""
    decays, steps, products = _of_chunks(x, b, chunk_size)
    shape = (len(x), products.shape[1], *x.shape[2:], b.shape[3])
    float32_states = x.new_empty(shape, dtype=torch.float32)
    states = x.new_empty(shape)
    del float32_states
    return x.new_empty(x.shape), decays, steps, products, states


def _of_chunks(x: Tensor, b: Tensor, chunk_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cumulative decays and time steps [B, H, chunks, L], products of C and B [B, chunks, G, L, L], in float32."""
    batch, tokens, heads, _ = x.shape
    chunks = -(-tokens // chunk_size)
    decays, steps = (x.new_empty(batch, heads, chunks, chunk_size, dtype=torch.float32) for _ in range(2))
    return decays, steps, x.new_empty(batch, chunks, b.shape[2], chunk_size, chunk_size, dtype=torch.float32)


def _allocate_gradients_of_scan(x: Tensor, b: Tensor, chunk_size: int) -> None:
    """Allocate, and give back, what a backward pass of the scan computes again and the gradients of that.

    The sums over heads are taken to have one part; on few tokens the kernels have several.
    """
    decays, _steps, products = _of_chunks(x, b, chunk_size)
    shape = (2, len(x), products.shape[1], *x.shape[2:], b.shape[3])  # states at the starts of chunks, and gradients
    float32_states = x.new_empty(shape, dtype=torch.float32)
    _states = x.new_empty(shape)
    del float32_states
    _of_products, _of_b_and_c = torch.empty_like(products), b.new_empty(2, *b.shape, dtype=torch.float32)
    _of_decays = decays.new_empty(4 - (-chunk_size // ROWS), *decays.shape)


def split_scan(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    *,
    headdim: int,
    outproj_weight: Tensor,
    outproj_bias: Tensor | None = None,
    rmsnorm_weight: Tensor | None = None,
    ngroups: int = 1,
    **kwargs: Any,
) -> Tensor:
    """In place of `mamba_split_conv1d_scan_combined`."""
    weights = (conv1d_weight, D, outproj_weight, rmsnorm_weight, conv1d_bias, dt_bias, A, outproj_bias)
    options = {"chunk_size": chunk_size, "headdim": headdim, "ngroups": ngroups}
    return _SplitScan.apply(zxbcdt, options, *weights)


def chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor,
    dt_bias: Tensor,
    **kwargs: Any,
) -> Tensor:
    """In place of `mamba_chunk_scan_combined`, without states at the start or the end."""
    return _ChunkScan.apply(chunk_size, hidden_states, dt, B, C, A, D, dt_bias)


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor,
    **kwargs: Any,
) -> Tensor:
    """In place of `selective_scan_fn`, without its last state."""
    return _SelectiveScan.apply(hidden_states, dt, B, C, z, A, D, delta_bias)
