"""The sampling back end of a run that samples while it trains: given servers, or a vLLM server that the run starts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from rlkit.runs.models import build_rollout
from rlkit.runs.vllm_options import (
    OWN_SERVER_SHARE,
    adapter_flags,
    length_flags,
    own_server_shares_gpu,
    processor_flags,
)
from rlkit.tracking import Run


def build_server_rollout(cfg: Any, run: Run, path: str, processor: Any, engine: Any, stack: ExitStack) -> Any:
    """`build_rollout` on the servers of `--servers`; without any, rank 0 starts a vLLM server. All ranks call this.

    Args:
        cfg: `GenerationOptions` and `ModelOptions`.
        path: directory or hub id of the model.
        stack: closes the connections, and stops the server that was started, when its `with` block ends.

    Raises:
        ValueError: the back end cannot sample during training, or ranks share rows.
    """
    if engine.model_parallel_group is not None:
        raise ValueError(
            "parallel: expected ranks with rows of their own, got ranks that share rows and would be sent different "
            "responses; use grpo_vlm.py"
        )
    shares_gpu = own_server_shares_gpu(cfg, dist.get_world_size())
    if cfg.rollout == "vllm_server" and not cfg.servers:
        urls: list[Any] = [None]
        if run.is_main_process:
            from rlkit.rollout.serve import serving

            run.print(f"starting a vLLM server, its log is in {run.out}")
            flags = server_flags(cfg, engine.config, shares_gpu=shares_gpu)
            urls = [tuple(stack.enter_context(serving(path, logs=run.out, options=flags)))]
        dist.broadcast_object_list(urls, 0)
        cfg = replace(cfg, servers=urls[0])
    options = {"transfer": "gloo"} if shares_gpu else {}  # NCCL needs a GPU per process
    rollout = build_rollout(cfg, path, processor, engine, **options)
    if not hasattr(rollout, "submit"):
        raise ValueError(f"rollout: expected servers, which sample during training, got {cfg.rollout}")
    stack.callback(rollout.close)
    return rollout


def server_flags(cfg: Any, config: Any, *, shares_gpu: bool) -> list[str]:
    """The flags of a vLLM server that samples for a run.

    Args:
        config: of the model.
        shares_gpu: the server is on a GPU that also trains.
    """
    flags = adapter_flags(cfg) + processor_flags(cfg) + length_flags(cfg, config)
    if not torch.cuda.device_count():
        flags += ["--kv-cache-memory-bytes", str(256 << 20)]
    if shares_gpu:
        flags += ["--gpu-memory-utilization", str(OWN_SERVER_SHARE)]
        flags += ["--weight-transfer-config", '{"backend": "rlkit_gloo"}']
    if cfg.trust_remote_code:
        flags += ["--trust-remote-code"]
    if cfg.router_replay:
        flags += ["--enable-return-routed-experts"]
    return flags
