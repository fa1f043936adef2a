"""Linear layers whose frozen weights take 4.25 bits each: the 4-bit NormalFloat (NF4) of QLoRA.

The paper is https://arxiv.org/abs/2305.14314. A row is cut into blocks of 64 weights. A block has one scale, and each
weight of it a code of 4 bits, the index of one of 16 values:

    scale  = max |w| over the block, in bfloat16
    code   = argmin over i of |w / scale - NF4_VALUES[i]|
    weight = scale * NF4_VALUES[code]

The scales are not quantized again (the paper's "double quantization"), which would save 0.12 bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK = 64  # weights with one scale, as in the paper
NF4_VALUES = (  # appendix E of the paper: quantiles of the normal distribution, with an exact 0
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class Nf4Weight(NamedTuple):
    """A matrix [rows, columns] in NF4. Rows are independent, so a shard of rows is quantized like the whole matrix.

    Attributes:
        codes: uint8 [rows, blocks * 32], two codes a byte, the first one in the upper half, as bitsandbytes has them.
        scales: bfloat16 [rows, blocks]; there are ceil(columns / 64) blocks.
    """

    codes: Tensor
    scales: Tensor


def quantize_nf4(weight: Tensor) -> Nf4Weight:
    """The NF4 codes and scales of a matrix [rows, columns]; a last block that is not full is padded with zeros.

    Raises:
        ValueError: the weight is no matrix.
    """
    if weight.ndim != 2:
        raise ValueError(f"weight: expected a matrix, got shape {list(weight.shape)}")
    padded = F.pad(weight.float(), (0, -weight.shape[1] % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(-1).bfloat16()
    normalized = blocks / scales.float().where(scales > 0, 1.0)[..., None]
    values = torch.tensor(NF4_VALUES, device=weight.device)
    midpoints = (values[1:] + values[:-1]) / 2
    codes = torch.bucketize(normalized, midpoints, out_int32=True).to(torch.uint8).flatten(1)
    return Nf4Weight(codes[:, ::2] << 4 | codes[:, 1::2], scales)


def dequantize_nf4(codes: Tensor, scales: Tensor, columns: int, pairs: Tensor | None = None) -> Tensor:
    """The matrix [rows, columns], float32, of NF4 codes and scales.

    Args:
        codes, scales: see `Nf4Weight`.
        columns: without padding.
        pairs: the result of `pair_values` on the device of the codes; by default it is made and copied there.
    """
    pairs = pair_values().to(codes.device) if pairs is None else pairs
    values = F.embedding(codes.int(), pairs).view(*scales.shape, BLOCK)
    return (values * scales.float()[..., None]).flatten(1)[:, :columns]


def pair_values() -> Tensor:
    """[256, 2] the two values of each byte of codes."""
    values = torch.tensor(NF4_VALUES)
    return torch.cartesian_prod(values, values)


class Nf4Linear(nn.Module):
    """A frozen linear layer with its weight in NF4: x @ dequantized weight.T + bias, in the dtype of x.

    The weight is dequantized in every forward and again in backward, so that only its codes are kept in between. Codes
    and scales are parameters: FSDP2 shards them by rows, and does not cast codes, as they are no floating-point
    numbers.

    Args:
        linear: the layer to replace; its weight may be on the meta device.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, linear.weight.dtype
        codes, scales = quantize_nf4(linear.weight.detach())
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = linear.bias
        self.register_buffer("pairs", pair_values(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        return _LinearNf4.apply(x, self.codes, self.scales, self.pairs, self.bias)

    def dequantized(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The weight [out_features, in_features], in the dtype that it had, of the full codes and scales."""
        return dequantize_nf4(codes, scales, self.in_features).to(self.dtype)

    def extra_repr(self) -> str:
        """The sizes, for `print(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class _LinearNf4(torch.autograd.Function):
    """A linear function of x alone, which keeps the codes for backward instead of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, pairs: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes, scales, pairs)
        ctx.columns = x.shape[-1]
        return F.linear(x, dequantize_nf4(codes, scales, ctx.columns, pairs).to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        codes, scales, pairs = ctx.saved_tensors
        return grad @ dequantize_nf4(codes, scales, ctx.columns, pairs).to(grad.dtype), None, None, None, None


def weight_counts(model: nn.Module) -> list[int]:
    """The number of weights in each parameter of a model. A layer in NF4 has those of its matrix."""
    layers = [module for module in model.modules() if isinstance(module, Nf4Linear)]
    in_codes = {id(layer.codes): layer.in_features * layer.out_features for layer in layers}
    scales = {id(layer.scales) for layer in layers}
    return [in_codes.get(id(p), p.numel()) for p in model.parameters() if id(p) not in scales]
