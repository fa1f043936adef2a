"""vLLM's model of Apertus with the activation's parameters in the dtype of the other weights.

vLLM 0.32 keeps those of xIELU in bfloat16, and computes their softplus in it; transformers has them in the model's
dtype. In float32 the log-probabilities of a tiny model differ by 2.5e-3 otherwise.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.activation import XIELU
from vllm.model_executor.models.apertus import ApertusForCausalLM


class ExactApertusForCausalLM(ApertusForCausalLM):
    """vLLM calls it instead of its own, by rlkit's `hf_overrides`."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.modules():
            if isinstance(module, XIELU):
                module.to(vllm_config.model_config.dtype)
