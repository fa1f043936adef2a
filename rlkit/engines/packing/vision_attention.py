"""One attention call for all images of a batch, in vision towers that concatenate the patches of all images."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from rlkit.engines.packing.flash import flash_supports, flash_varlen_attention
from rlkit.vlm.families import PATCH_ROW_FAMILIES

NAME = "rlkit_flash_vision"  # transformers passes cu_seqlens to an attention whose name contains "flash"


def use_packed_vision_attention(model: torch.nn.Module, config: Any) -> bool:
    """Have a vision tower compute the attention of all images in one kernel call, on a GPU.

    Otherwise transformers splits the patches at every layer, which synchronises with the device, and calls SDPA once
    for each image or window. It passes `cu_seqlens` instead if the name of the attention contains "flash". The config
    of a model cannot be given such a name when the model is made, so the tower gets its own copy of its config.

    Args:
        model: contains the tower.
        config: of the whole model.

    Returns:
        Whether the tower is of this kind.
    """
    if config.model_type not in PATCH_ROW_FAMILIES:
        return False
    AttentionInterface.register(NAME, packed_vision_attention)
    own = copy.copy(config.vision_config)
    own._attn_implementation = NAME
    for module in model.modules():
        if isinstance(getattr(module, "config", None), type(own)):
            module.config = own
    return True


def packed_vision_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: [1, H, N, D], images or windows end to end -> [1, N, H, D]."""
    if flash_supports(query, value) and not dropout:
        seqlens = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        return flash_varlen_attention(q, k, v, seqlens, (-1, -1), scaling).unsqueeze(0), None
    lengths = cu_seq_lens_q.diff().tolist()
    images = zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True)
    attended = [F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling) for q, k, v in images]
    return torch.cat(attended, 2).transpose(1, 2), None
