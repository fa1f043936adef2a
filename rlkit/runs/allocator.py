"""Chooses how torch allocates GPU memory, before CUDA starts."""

from __future__ import annotations

import os
from typing import Any

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def use_expandable_segments(cfg: Any) -> None:
    """Set torch's allocator to segments that grow, so that less GPU memory is lost to fragmentation.

    Not if the user has set the allocator, and not if vLLM runs in this process or may be started by it, as the memory
    pool of vLLM's sleep mode cannot have such segments. Back ends of other packages may be like vLLM.

    Args:
        cfg: options of the recipe; without `rollout` if it does not sample.
    """
    samples_with_trainer = getattr(cfg, "rollout", "hf") == "hf"
    on_running_servers = not samples_with_trainer and cfg.rollout in ("vllm_server", "sglang") and bool(cfg.servers)
    if (samples_with_trainer or on_running_servers) and not any(os.environ.get(name) for name in SETTINGS):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
