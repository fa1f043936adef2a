"""The router and the experts of a layer, without Transformer Engine.

The experts are two parameters, each multiplied with all tokens by one grouped matrix product. Megatron-Core has two
such modules: one needs Transformer Engine, the other the package grouped_gemm and bfloat16.
`torch.nn.functional.grouped_mm` needs neither, and also computes on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class PlainRouter(TopKRouter):
    """A router whose logits are a plain matrix product, on every device: Megatron 0.16.1 needs Transformer Engine's."""

    def gating(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


class GroupedExperts(nn.Module):
    """The experts of a layer that this rank has: `down(silu(gate(x)) * up(x))`, with the matrices stacked.

    Args:
        experts: how many this rank has.
        config: Megatron's.
    """

    def __init__(self, experts: int, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__()
        self.experts, hidden, inner = experts, config.hidden_size, config.moe_ffn_hidden_size or 0
        self.gate_up_proj = _parameter(experts * 2 * inner, hidden, config)
        self.down_proj = _parameter(experts * hidden, inner, config)

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """The experts' outputs, times the routing probabilities; no bias.

        Args:
            hidden: [n, H], sorted by expert.
            tokens_per_expert: [experts] how many of them each expert has.
            probs: [n].
        """
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32).to(hidden.device, non_blocking=True)
        gate, up = self._product(hidden, self.gate_up_proj, ends).chunk(2, -1)
        inner = (F.silu(gate) * up * probs[:, None]).to(hidden.dtype)
        return self._product(inner, self.down_proj, ends), None

    def _product(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """[n, in] times each expert's own [out, in], where expert e has the rows up to `ends[e]`."""
        return F.grouped_mm(x, weight.unflatten(0, (self.experts, -1)).transpose(1, 2), offs=ends)


def _parameter(rows: int, columns: int, config: TransformerConfig) -> nn.Parameter:
    device = torch.cuda.current_device()
    weight: Any = nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype, device=device))
    weight.is_expert = True
    weight.allreduce = config.expert_model_parallel_size == 1  # Megatron's name; False: other ranks have other experts
    set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)  # counted in the norm on each rank
    return weight
