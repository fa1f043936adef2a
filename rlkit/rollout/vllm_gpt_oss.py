"""gpt-oss for vLLM, with weights that can be updated.

vLLM 0.32 replaces weights layer by layer: loaders of parameters collect the new values, and a layer is processed when
it has all of them. Its model of gpt-oss does not call the loaders of experts and attention sinks, so these keep their
old values. Here all weights go through their loaders, as they do in other models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models import gpt_oss


class UpdatableGptOssForCausalLM(gpt_oss.GptOssForCausalLM):
    """vLLM's model of gpt-oss."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load (name, tensor) pairs with transformers' names, and return the names of what was loaded."""
        sinks: set[str] = set()
        return super().load_weights(self._without_sinks(weights, sinks)) | sinks

    def _without_sinks(self, weights: Iterable[tuple[str, Tensor]], loaded: set[str]) -> Iterator[tuple[str, Tensor]]:
        """The other weights, with a matrix for each expert; sinks are loaded, and their names are added to `loaded`."""
        for name, tensor in weights:
            layer, _, kind = name.rpartition(".experts.")
            if name.endswith(".self_attn.sinks"):
                loaded.add(self._load_sinks(name.replace(".self_attn.", ".attn."), tensor))
            elif layer:
                for i, expert in enumerate(torch.unbind(tensor)):
                    yield f"{layer}.experts.{i}.{kind}", expert
            else:
                yield name, tensor

    def _load_sinks(self, name: str, sinks: Tensor) -> str:
        parameter = self.get_parameter(name)
        own_sinks = sinks.chunk(get_tensor_model_parallel_world_size())[get_tensor_model_parallel_rank()]
        getattr(parameter, "weight_loader", default_weight_loader)(parameter, own_sinks)
        return name
