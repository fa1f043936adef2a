"""Derives options of in-process vLLM from a recipe's options: its share of GPU memory, and its longest sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

RESERVED = 0.07  # share of a GPU's memory for CUDA, NCCL and fragmentation, as in rlkit.plan


def vllm_options(cfg: Any, engines: Sequence[Any]) -> dict[str, Any]:
    """`max_model_len` if the options limit prompts and answers, and `gpu_memory_utilization` on a GPU.

    Args:
        cfg: options of a recipe, with `GenerationOptions`.
        engines: all training engines on this GPU.
    """
    found: dict[str, Any] = {} if (longest := longest_sequence(cfg)) is None else {"max_model_len": longest}
    if torch.cuda.is_available() and not cfg.gpu_memory_utilization:
        torch.cuda.empty_cache()
        found |= {"gpu_memory_utilization": share_left(*torch.cuda.mem_get_info(), optimizer_bytes(engines))}
    return found


def longest_sequence(cfg: Any) -> int | None:
    """Largest number of tokens of a prompt and its answer together; None if only the model's context limits them."""
    prompt = getattr(cfg, "max_prompt_tokens", 0)
    several_turns = getattr(cfg, "max_turns", 1) > 1
    answer = getattr(cfg, "max_response_tokens", 0) if several_turns else cfg.max_new_tokens
    return prompt + answer if prompt and answer else None


def optimizer_bytes(engines: Sequence[Any]) -> int:
    """Bytes of AdamW's state on this GPU, which exists from the first step on: two numbers per parameter."""
    total = 0
    for engine in engines:
        if getattr(engine, "offload_between_phases", False) or getattr(engine, "optimizer", None) is None:
            continue
        parameters = (p for group in engine.optimizer.param_groups for p in group["params"])
        total += sum(2 * getattr(p, "_local_tensor", p).nbytes for p in parameters)
    return total


def share_left(free: int, total: int, reserved_bytes: int) -> float:
    """The share of a GPU's memory that a sampler can use, rounded down to a hundredth.

    Args:
        free, total: free bytes and all bytes of the GPU.
        reserved_bytes: bytes to leave free for the trainer.

    Raises:
        ValueError: less than 5 % would be left.
    """
    share = math.floor(100 * ((free - reserved_bytes) / total - RESERVED)) / 100
    if share < 0.05:
        numbers = (f"{size / 2**30:.1f}" for size in (free, total, reserved_bytes))
        raise ValueError(
            "gpu_memory_utilization: expected at least 0.05 of the GPU to be free for vLLM, got {:.2f}: {} of {} GiB "
            "are free, and the optimizer will take {}; try --offload_between_phases".format(share, *numbers)
        )
    return share
