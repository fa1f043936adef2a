"""The dtype in which each parameter is gathered for a sampler: no more bytes than the sampler keeps."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from rlkit.vlm.loading import kept_in_float32

# vLLM keeps these matrices in float32 for some families, e.g. routers of GLM-4 MoE and ERNIE 4.5, and Gemma 4's
# positions of patches. All are small.
FLOAT32_MATRICES = re.compile(r"\.(gate|router|A_log|\w*conv1d|\w*(position|pos_emb)\w*)(\.|$)")


def sampler_dtype(model: Any, name: str, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a parameter for a sampler that computes in `dtype`: the smaller one of that and its own.

    A parameter keeps its own dtype if the sampler may hold it in float32: vectors (norms, biases, and A_log and dt_bias
    of linear attention), routers, short convolutions, position embeddings, and what transformers keeps in float32 for
    the model. They are about a thousandth of all bytes.

    Args:
        model: from transformers.
        name: of the parameter, in the module or in its files.
        tensor: the parameter or a part of it, perhaps on the meta device.
        dtype: None for the own dtype of every parameter.
    """
    if dtype is None or not tensor.is_floating_point() or tensor.element_size() <= dtype.itemsize:
        return tensor.dtype
    is_vector = sum(size > 1 for size in tensor.shape) < 2
    kept_by_family = any(re.search(rf"(^|\.){pattern}($|\.)", name) for pattern in kept_in_float32(model, dtype))
    return tensor.dtype if is_vector or kept_by_family or FLOAT32_MATRICES.search(name) else dtype
