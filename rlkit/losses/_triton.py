"""`linear_logprobs` as Triton kernels: logits are made tile by tile in float32 and never written to memory.

Forward (`_sums`): a program handles a block of tokens and one part of the vocabulary. It computes logits z tile by
tile, and keeps for each token the maximum m and the sums s = sum exp(z - m) and u = sum (z - m) exp(z - m). This is the
online softmax of https://arxiv.org/abs/1805.02867, with the additional sum u for the entropy. `merge` combines the
parts.

Backward (`_gradients`): the kernel recomputes the logits, and writes their gradient in the dtype of `hidden`, for one
chunk of tokens at a time. Two matrix products turn it into the gradients of `hidden` and `weight`.

For N tokens, V vocabulary entries and hidden size H, forward takes 2 N V H FLOPs. Backward takes 6 N V H, of which
2 N V H recompute the logits. This is the minimum without storing [N, V] logits.

`rlkit.losses.naive.linear_logprobs` is the reference implementation in plain loops.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlkit.losses._kernels import LinearLogprobs, linear_gradients

log = logging.getLogger(__name__)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCKS = {"BLOCK_N": 128, "BLOCK_V": 128}  # tokens and vocabulary entries per tile
BLOCK_BYTES = 128  # bytes of each row of `hidden` and `weight` per step of the inner loop
SCHEDULE = {"num_warps": 8, "num_stages": 3}
PROGRAMS = 512  # forward splits the vocabulary into parts until there are about this many programs
LOWEST = tl.constexpr(-3.0e38)  # below every logit, but finite, so that LOWEST - LOWEST is not nan


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b. A GPU adds a bfloat16 product to a float32 total without rounding it or writing it to memory."""
    if total.device.type == "cuda" and total.dtype != a.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


class FusedLinearLogprobs(torch.autograd.Function):
    """As `rlkit.losses._kernels.LinearLogprobs`. Only the backward pass works in chunks of tokens."""

    @staticmethod
    def forward(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        suppress: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(logprobs, entropy, log-sum-exp of the logits) of each token."""
        suppressed = None if suppress is None else is_suppressed(suppress, len(weight))
        return merge(vocabulary_sums(hidden, weight, bias, targets, temperature, suppressed))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Under `torch.func.vmap`, fall back to `LinearLogprobs`. The third result is a placeholder."""
        logprobs, entropy = torch.vmap(LinearLogprobs.apply, in_dims)(*inputs)
        return (logprobs, entropy, entropy.detach()), (0, 0, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.chunk = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*tensors, *output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, suppress, entropy, log_total = ctx.saved_tensors
        suppressed = None if suppress is None else is_suppressed(suppress, len(weight))

        def logit_gradient(rows: slice) -> Tensor:
            of_rows = (x[rows] for x in (targets, temperature, log_total, entropy, grad_logprobs, grad_entropy))
            return logit_gradients(hidden[rows], weight, bias, suppressed, *of_rows)

        return linear_gradients(ctx, logit_gradient, add_product)


def vocabulary_sums(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    suppressed: Tensor | None,
    parts: int = 0,
) -> Tensor:
    """The sums for log-softmax and entropy, over the whole vocabulary or a shard of it.

    Args:
        hidden: [N, H].
        weight, bias: [V, H] and [V], or a shard of their rows. Indices are relative to the shard's first row.
        targets: [N]. A target in another shard is any number outside of [0, V).
        temperature: [N, 1].
        suppressed: [V], nonzero for suppressed entries; see `is_suppressed`.
        parts: number of parts of the vocabulary, each with its own programs; by default enough to keep a GPU busy.

    Returns:
        [4, parts, N] float32: maximum logit m; sum exp(z - m); sum (z - m) exp(z - m); the target's logit, or 0 if the
        target is in another part.
    """
    hidden, weight, targets, temperature = (x.contiguous() for x in (hidden, weight, targets, temperature))
    bias = None if bias is None else bias.contiguous()
    blocks = _blocks(hidden.dtype)
    programs, tiles = triton.cdiv(len(hidden), blocks["BLOCK_N"]), triton.cdiv(len(weight), blocks["BLOCK_V"])
    tiles_per_part = triton.cdiv(tiles, min(tiles, parts or max(1, PROGRAMS // max(1, programs))))
    parts = triton.cdiv(tiles, tiles_per_part)
    out = hidden.new_empty(4, parts, len(hidden), dtype=torch.float32)
    if len(hidden):
        inputs = (hidden, weight, bias, suppressed, targets, temperature)
        with torch.cuda.device_of(hidden):  # Triton launches on the current GPU
            _sums[programs, parts](*inputs, out, len(hidden), *weight.shape, tiles_per_part, **blocks, **SCHEDULE)
    return out


def merge(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs [N], entropy [N], log-sum-exp [N]) from the sums [4, parts, N] of all parts of the vocabulary."""
    largest, total, weighted, chosen = sums
    shift = largest - (most := largest.amax(0))
    total, weighted = (shift.exp() * x for x in (total, weighted + shift * total))
    log_sum = total.sum(0).log()
    logprobs = (chosen.sum(0) - most - log_sum).clamp(max=0)
    return logprobs, log_sum - weighted.sum(0) / total.sum(0), most + log_sum


def logit_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    suppressed: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
) -> Tensor:
    """The gradient [N, V] with respect to the logits before temperature, in the dtype of `hidden`.

    Args:
        hidden, weight, bias, targets, temperature, suppressed: see `vocabulary_sums`.
        log_total, entropy: [N], log-sum-exp and entropy over the whole vocabulary.
        grad_logprobs, grad_entropy: [N], gradients with respect to log-probabilities and entropy.
    """
    hidden, weight = hidden.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    out = hidden.new_empty(len(hidden), len(weight))
    blocks = _blocks(hidden.dtype)
    grid = triton.cdiv(len(hidden), blocks["BLOCK_N"]), triton.cdiv(len(weight), blocks["BLOCK_V"])
    rows = (x.contiguous() for x in (targets, temperature, log_total, entropy, grad_logprobs, grad_entropy))
    inputs = (hidden, weight, bias, suppressed, *rows)
    with torch.cuda.device_of(hidden):
        _gradients[grid](*inputs, out, len(hidden), *weight.shape, **blocks, **SCHEDULE)
    return out


def is_suppressed(token_ids: Tensor, size: int) -> Tensor:
    """[size] uint8: 1 at these token ids, else 0."""
    return torch.zeros(size, dtype=torch.uint8, device=token_ids.device).index_fill_(0, token_ids, 1)


@cache
def kernels_work(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run on this GPU, found out by a small test. Logs a warning if they do not."""
    if dtype not in DTYPES:
        return False
    try:
        with torch.inference_mode(False), torch.enable_grad():  # the caller may have gradients disabled
            hidden, weight = (torch.ones(2, 16, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
            targets, temperature = torch.zeros(2, device=device, dtype=torch.long), torch.ones(2, 1, device=device)
            logprobs, *_ = FusedLinearLogprobs.apply(hidden, weight, None, targets, temperature, None, 2)
            _, of_weight = torch.autograd.grad(logprobs.sum(), (hidden, weight))
        found = torch.cat([logprobs.detach().exp(), of_weight[:, 0].float()])
        exact = torch.tensor([0.5, 0.5, 1.0, -1.0], device=device)
        torch.testing.assert_close(found, exact, rtol=1e-2, atol=0)  # gradients are rounded to `dtype`
        return True
    except Exception as error:  # Triton raises many types of errors, from its compiler and from the driver
        log.warning("linear_logprobs: computed without Triton kernels on %s: %s", device, error)
        return False


def _blocks(dtype: torch.dtype) -> dict[str, int]:
    return {**BLOCKS, "BLOCK_H": BLOCK_BYTES // dtype.itemsize}


@triton.jit
def _logits(hidden, weight, bias, suppressed, temperature, rows, columns, n, v, size, BLOCK_H: tl.constexpr):
    """A tile of float32 logits divided by temperature; -inf for suppressed entries and beyond the vocabulary.

    In all kernels n, v and size are the numbers of tokens, vocabulary entries and hidden units. `bias` and `suppressed`
    may be None.
    """
    units = tl.arange(0, BLOCK_H)
    hidden_tile = hidden + rows.to(tl.int64)[:, None] * size + units[None, :]
    weight_tile = weight + columns.to(tl.int64)[None, :] * size + units[:, None]
    z = tl.zeros((rows.shape[0], columns.shape[0]), dtype=tl.float32)
    for start in range(0, size, BLOCK_H):
        within = start + units < size
        h = tl.load(hidden_tile + start, mask=(rows[:, None] < n) & within[None, :], other=0.0)
        w = tl.load(weight_tile + start, mask=(columns[None, :] < v) & within[:, None], other=0.0)
        z = tl.dot(h, w, z, input_precision="ieee")
    if bias is not None:
        z += tl.load(bias + columns, mask=columns < v, other=0.0).to(tl.float32)[None, :]
    z /= tl.load(temperature + rows, mask=rows < n, other=1.0)[:, None]
    possible = columns < v
    if suppressed is not None:
        possible &= tl.load(suppressed + columns, mask=columns < v, other=1) == 0
    return tl.where(possible[None, :], z, -float("inf"))


@triton.jit
def _sums(
    hidden,
    weight,
    bias,
    suppressed,
    targets,
    temperature,
    out,
    n,
    v,
    size,
    tiles_per_part,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """out[:, part, row]: maximum logit m, s, u, and the target's logit (0 if the target is in another part)."""
    part, parts = tl.program_id(1), tl.num_programs(1)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    target = tl.load(targets + rows, mask=rows < n, other=-1)
    largest = tl.full((BLOCK_N,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK_N,), dtype=tl.float32)
    chosen = tl.zeros((BLOCK_N,), dtype=tl.float32)
    first = part * tiles_per_part * BLOCK_V
    for start in range(first, tl.minimum(first + tiles_per_part * BLOCK_V, v), BLOCK_V):
        columns = start + tl.arange(0, BLOCK_V)
        z = _logits(hidden, weight, bias, suppressed, temperature, rows, columns, n, v, size, BLOCK_H)
        is_target = (columns[None, :] == target[:, None]) & (columns[None, :] < v)  # exclude targets of the next shard
        chosen += tl.sum(tl.where(is_target, z, 0.0), 1)
        new = tl.maximum(largest, tl.max(z, 1))
        y = z - new[:, None]
        exp = tl.exp(y)
        shift = largest - new
        weighted = tl.exp(shift) * (weighted + shift * total) + tl.sum(tl.where(exp > 0, y * exp, 0.0), 1)
        total = tl.exp(shift) * total + tl.sum(exp, 1)
        largest = new
    at = part.to(tl.int64) * n + rows
    of_all = parts.to(tl.int64) * n
    tl.store(out + at, largest, mask=rows < n)
    tl.store(out + of_all + at, total, mask=rows < n)
    tl.store(out + 2 * of_all + at, weighted, mask=rows < n)
    tl.store(out + 3 * of_all + at, chosen, mask=rows < n)


@triton.jit
def _gradients(
    hidden,
    weight,
    bias,
    suppressed,
    targets,
    temperature,
    log_total,
    entropy,
    grad_logprobs,
    grad_entropy,
    out,
    n,
    v,
    size,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """out[row, entry]: (g_lp (1_y - p) - g_H p (log p + H)) / temperature; 0 for suppressed entries."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    z = _logits(hidden, weight, bias, suppressed, temperature, rows, columns, n, v, size, BLOCK_H)
    real = rows < n
    logp = z - tl.load(log_total + rows, mask=real, other=0.0)[:, None]
    surprise = logp + tl.load(entropy + rows, mask=real, other=0.0)[:, None]
    of_logprob = tl.load(grad_logprobs + rows, mask=real, other=0.0)[:, None]
    of_entropy = tl.load(grad_entropy + rows, mask=real, other=0.0)[:, None]
    is_target = columns[None, :] == tl.load(targets + rows, mask=real, other=-1)[:, None]
    p = tl.exp(logp)
    gradient = tl.where(p > 0, -p * (of_logprob + of_entropy * surprise), 0.0) + tl.where(is_target, of_logprob, 0.0)
    gradient = tl.where(z > -float("inf"), gradient, 0.0)
    gradient /= tl.load(temperature + rows, mask=real, other=1.0)[:, None]
    at = out + rows.to(tl.int64)[:, None] * v + columns[None, :]
    tl.store(at, gradient.to(out.dtype.element_ty), mask=real[:, None] & (columns[None, :] < v))
