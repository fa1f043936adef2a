"""Liger's Triton kernels in the layers of a model."""

from __future__ import annotations

from typing import Any

import torch


def use_liger_kernels(model: Any, device: torch.device) -> bool:
    """Replace norms and gated layers of a model on a GPU by Liger's Triton kernels, if liger-kernel is installed.

    Applied by transformers' own function (https://arxiv.org/abs/2410.10989), without two of its kernels. Liger's loss
    is not needed: `linear_logprobs` does its work, with a temperature. Liger's rotary embedding would be used by every
    model of the process. So would Liger's norms by models of the same family that are made later.

    Args:
        model: from transformers, before it is sharded.
        device: where it will run; Triton needs a GPU.

    Returns:
        Whether the model has such kernels now; False also for a family that Liger does not support.
    """
    from transformers.utils import is_liger_kernel_available

    if device.type != "cuda" or not is_liger_kernel_available():
        return False
    from transformers.integrations import apply_liger_kernel

    apply_liger_kernel(model, {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False})
    return any("forward" in vars(module) for module in model.modules())
