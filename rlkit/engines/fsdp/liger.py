"""Liger's Triton kernels in a model, where they are installed."""

from __future__ import annotations

from typing import Any

import torch


def use_liger(model: Any, device: torch.device) -> bool:
    """Give a model on a GPU Liger's norms and gated layers, if the package liger-kernel is installed.

    By transformers' own function for it (https://arxiv.org/abs/2410.10989). Liger's loss is left out: `linear_logprobs`
    does its work, with a temperature; and so is its rotary embedding, which every model of the process would get.
    Models of the family that are made later have Liger's norms, too: it replaces them in transformers' module.

    Args:
        model: from transformers, before it is sharded.
        device: where it will run; Triton needs a GPU.

    Returns:
        Whether the model has such kernels now: not on a CPU, without the package, or in a family that Liger has not.
    """
    from transformers.utils import is_liger_kernel_available

    if device.type != "cuda" or not is_liger_kernel_available():
        return False
    from transformers.integrations import apply_liger_kernel

    apply_liger_kernel(model, {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False})
    return any("forward" in vars(module) for module in model.modules())
