"""Derives options of vLLM from a recipe's options: its share of GPU memory, its longest sequence, its adapters."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from rlkit.runs.image_processor import processor_options
from rlkit.vlm.long_rope import original_length

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's max_lora_rank
OWN_SERVER_SHARE = 0.4  # of a GPU's memory, for a server that a run starts on a GPU which also trains
RESERVED = 0.07  # share of a GPU's memory for CUDA, NCCL and fragmentation, as in rlkit.plan


def own_server_shares_gpu(cfg: Any, ranks: int) -> bool:
    """Whether a run that starts its own vLLM server (recipes/grpo_async.py) has it on a GPU which also trains.

    Args:
        ranks: number of training ranks, each on a GPU of its own.
    """
    starts_server = getattr(cfg, "rollout", "") == "vllm_server" and not cfg.servers
    return starts_server and 0 < torch.cuda.device_count() <= ranks


def vllm_options(cfg: Any, engines: Sequence[Any]) -> dict[str, Any]:
    """`max_model_len` if the options limit prompts and responses, room for an adapter if adapters alone are sent, and
    `gpu_memory_utilization` on a GPU.

    Args:
        cfg: options of a recipe, with `GenerationOptions`.
        engines: all training engines on this GPU.
    """
    options = adapter_options(cfg)
    if cfg.processor_options:
        options["mm_processor_kwargs"] = processor_options(cfg)
    if (longest := longest_sequence(cfg)) is not None:
        options["max_model_len"] = longest
    if torch.cuda.is_available() and not cfg.gpu_memory_utilization:
        torch.cuda.empty_cache()
        options["gpu_memory_utilization"] = share_left(*torch.cuda.mem_get_info(), optimizer_bytes(engines))
    return options


def adapter_options(cfg: Any) -> dict[str, Any]:
    """Options of a vLLM engine that is sent adapters alone: room for one. Empty if it is sent merged weights."""
    if not getattr(cfg, "sync_adapters", False):
        return {}
    rank = next((rank for rank in LORA_RANKS if rank >= cfg.lora_rank), None)
    if rank is None:
        raise ValueError(f"lora_rank: expected at most {LORA_RANKS[-1]} with --sync_adapters, got {cfg.lora_rank}")
    return {"enable_lora": True, "max_lora_rank": rank}


def adapter_flags(cfg: Any) -> list[str]:
    """`adapter_options` as flags of a vLLM server."""
    if not (options := adapter_options(cfg)):
        return []
    return ["--enable-lora", "--max-lora-rank", str(options["max_lora_rank"])]


def processor_flags(cfg: Any) -> list[str]:
    """The run's options of the image processor as a flag of a vLLM server."""
    options = processor_options(cfg)
    return ["--mm-processor-kwargs", json.dumps(options)] if options else []


def length_flags(cfg: Any, config: Any) -> list[str]:
    """The longest sequence as a flag of a vLLM server, if the options limit prompts and responses.

    Without limits, the longest length for short factors of a model with LongRoPE, see rlkit.vlm.long_rope.

    Args:
        config: of the model.
    """
    longest = longest_sequence(cfg) or original_length(config)
    return [] if longest is None else ["--max-model-len", str(longest)]


def longest_sequence(cfg: Any) -> int | None:
    """Largest number of tokens of a prompt and its response together; None if only the model's context limits them."""
    prompt = getattr(cfg, "max_prompt_tokens", 0)
    response = longest_response(cfg) if prompt else 0
    return prompt + response if response else None


def longest_row(cfg: Any) -> int | None:
    """Largest number of tokens of a row, sampled or given; None if only the model's context limits them."""
    return longest_sequence(cfg) or getattr(cfg, "max_tokens", 0) or None


def longest_response(cfg: Any) -> int:
    """Largest number of tokens after a prompt; 0 if only the model's context limits an episode of several turns."""
    several_turns = getattr(cfg, "max_turns", 1) > 1
    return getattr(cfg, "max_response_tokens", 0) if several_turns else cfg.max_new_tokens


def optimizer_bytes(engines: Sequence[Any]) -> int:
    """Bytes that AdamW's state will take on this GPU: two numbers for each parameter that has none yet.

    The state exists from the first step on; with the megatron engine, or after a checkpoint was loaded, before it.
    """
    total = 0
    for engine in engines:
        if getattr(engine, "offload_between_phases", False) or getattr(engine, "optimizer", None) is None:
            continue
        parameters = (p for group in engine.optimizer.param_groups for p in group["params"])
        new = (p for p in parameters if not engine.optimizer.state.get(p))
        total += sum(2 * getattr(p, "_local_tensor", p).nbytes for p in new)
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
