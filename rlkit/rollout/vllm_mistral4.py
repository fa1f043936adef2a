"""Mistral Small 4 for vLLM, by the configuration and the names of weights that transformers has.

vLLM 0.32 knows this model in Mistral's own format only, which transformers does not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.deepseek_v2 import DeepseekV3ForCausalLM


class Mistral4ForCausalLM(DeepseekV3ForCausalLM):
    """vLLM's model of DeepSeek-V3, as which it runs Mistral's own format, too."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        rope = config.rope_parameters
        # In transformers this is the share of a head that is rotated. vLLM rotates that part alone, so all of it.
        config.rope_parameters = {**rope, "partial_rotary_factor": 1.0}
        config.llama_4_scaling = {
            "beta": rope["llama_4_scaling_beta"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
        }
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load (name, tensor) pairs with transformers' names, and return the names of what was loaded."""
        return super().load_weights(_one_by_one(weights))


def _one_by_one(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same weights, with a matrix for each expert, where transformers has all experts of a layer in one tensor."""
    for name, tensor in weights:
        layer, _, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True))
        elif kind == "down_proj":
            parts = {kind: tensor}
        else:
            yield name, tensor
            continue
        for part, stacked in parts.items():
            for i, expert in enumerate(torch.unbind(stacked)):
                yield f"{layer}.experts.{i}.{part}.weight", expert
