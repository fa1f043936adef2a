"""The initial tiny model of `recipes/grpo_tools.py`: its tool calls are well-formed, but look at random places."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from rlkit.data import collate
from rlkit.engines import make_engine
from rlkit.losses import token_mean
from rlkit.rollout import Sampling
from rlkit.rollout.agent import ScriptedRollout, run_episodes
from rlkit.rollout.image_tools import QUADRANT_CALLS, noisy_demonstration
from rlkit.vlm import build_tiny, encode_prompts, load_model, load_processor


def build_tiny_tool_user(
    path: Path, rows: Sequence[Mapping[str, Any]], tool: Callable[..., Any], *, max_new_tokens: int, seed: int
) -> None:
    """Fine-tune a tiny Qwen2.5-VL on scripted episodes, and export it. All ranks call this together.

    Args:
        path: folder for the model; if it exists, nothing is done.
        rows: rows of the built-in task of zoomed digits.
        tool: the built-in zoom tool.
    """
    if path.exists():
        return
    rank, world, untrained = dist.get_rank(), dist.get_world_size(), path.with_name("raw")
    if rank == 0 and not untrained.exists():
        print(f"building a tiny Qwen2.5-VL that calls a tool: {path}", flush=True)
        words = [{**rows[0], "answer": call} for call in QUADRANT_CALLS]  # for the tokenizer
        build_tiny(untrained, [*rows, *words], seed=seed, warm_up_steps=0)
    dist.barrier()
    processor = load_processor(str(untrained))
    engine = make_engine(
        "fsdp2",
        "language_model",
        model=load_model(str(untrained)),
        processor=processor,
        optimizer=lambda parameters: AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0),
        scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10)),
    )
    rng = np.random.default_rng(seed)
    prompts, _ = encode_prompts(processor, enumerate(rows))
    scripted = ScriptedRollout(processor, lambda sample: noisy_demonstration(sample, rng))
    episodes = run_episodes(scripted, prompts, Sampling(max_new_tokens), tool, processor=processor)

    def imitation(out: Any, mb: Any) -> tuple[Any, dict]:
        responses = (mb.tokens == processor.image_token_id).cumsum(1) > 1  # the tokens after the second image
        weights = 1 + 9 * responses  # a call has ten tokens and is learned fast; a response has one
        return -token_mean(out.logprobs * weights, mb.mask, mb.total_tokens), {}

    for _ in range(160):
        chosen = rng.choice(len(episodes), 32, replace=False)[rank::world]
        engine.train_batch(collate([episodes[i] for i in chosen]), imitation)
    engine.export_hf(path)
