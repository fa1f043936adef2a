"""vLLM's model of A.X-K1 without the norms that it makes in layers without experts and never calls.

transformers' files have no weights for them, and vLLM 0.32 refuses to start with a parameter that no weight was loaded
into.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.AXK1 import AXK1DecoderLayer, AXK1ForCausalLM


class LoadableAXK1ForCausalLM(AXK1ForCausalLM):
    """vLLM calls it instead of its own, by rlkit's `hf_overrides`."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.model.layers:
            if isinstance(layer, AXK1DecoderLayer) and not layer.is_layer_sparse:
                del layer.post_mlp_layernorm
