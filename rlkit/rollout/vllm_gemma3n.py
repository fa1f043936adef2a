"""Gemma 3n for vLLM, as transformers computes it.

vLLM 0.32 looks up per-layer embeddings in its class of the whole model only, so not for the text model alone. In both
it leaves out a factor before a norm, 1 / sqrt(hidden_size), which changes the weight of the norm's epsilon.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.models import gemma3n, gemma3n_mm


class ExactGemma3nForCausalLM(gemma3n.Gemma3nForCausalLM):
    """The text model alone."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _scale_epsilon(self.model)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, *, per_layer_inputs: Tensor | None = None, **options: Any
    ) -> Any:
        """Hidden states [N, H] of tokens [N] at positions [N]."""
        if input_ids is not None:
            embedded = self.model.get_per_layer_input_embeddings(input_ids)
            per_layer_inputs = embedded.unflatten(-1, (self.config.num_hidden_layers, -1))
        return super().forward(input_ids, positions, per_layer_inputs=per_layer_inputs, **options)


class ExactGemma3nForConditionalGeneration(gemma3n_mm.Gemma3nForConditionalGeneration):
    """The whole model, with its towers."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _scale_epsilon(self.language_model.model)


def _scale_epsilon(model: Any) -> None:
    """Scale epsilon so that norm(x) equals transformers' norm(c x), where c = 1 / sqrt(hidden_size)."""
    model.self_decoder.per_layer_projection_norm.variance_epsilon *= model.config.hidden_size
