"""What it costs the trainer's process to send images to vLLM servers.

    OMP_NUM_THREADS=1 python benchmarks/images_to_servers.py

Prompts of one image each, with eight responses of one token, are sent to the stand-in server of the tests, which runs
in another process on this machine and accepts images without reading them. Counted are the CPU seconds of this process,
and the time until the first request has arrived.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rlkit.data import load_task
from rlkit.data.samples import prompt_sample
from rlkit.rollout import Sampling, make_rollout
from rlkit.vlm import build_tiny, load_processor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rollout"))
from standin import VllmStandin

ROUNDS, IMAGES, SIZE = 5, 64, (1024, 768)


def images() -> list[Image.Image]:
    """Smooth random pictures with the grain of a photograph."""
    rng, made = np.random.default_rng(0), []
    for _ in range(IMAGES):
        small = Image.fromarray(rng.integers(0, 256, (48, 64, 3), dtype="uint8"))
        smooth = np.asarray(small.resize(SIZE, Image.Resampling.BICUBIC), dtype="int16")
        grain = rng.integers(-4, 5, smooth.shape, dtype="int16")
        made.append(Image.fromarray((smooth + grain).clip(0, 255).astype("uint8")))
    return made


class TimedStandin(VllmStandin):
    """A stand-in that forgets what it was asked, and notes in `first` when a request had arrived."""

    def __init__(self, first: Any) -> None:
        super().__init__()
        self.first = first

    async def _generate(self, request: Any) -> Any:
        await request.read()
        with self.first.get_lock():
            self.first.value = self.first.value or time.monotonic()
        response = await super()._generate(request)
        self.bodies.clear()
        return response


def serve(pipe: Any, first: Any) -> None:
    with TimedStandin(first) as server:
        pipe.send(server.url)
        pipe.recv()


def main() -> None:
    context = multiprocessing.get_context("spawn")
    (pipe, other_end), first = context.Pipe(), context.Value("d", 0.0)
    process = context.Process(target=serve, args=(other_end, first), daemon=True)
    process.start()
    prompts = [prompt_sample([20, 21], images=[image], group_id=i) for i, image in enumerate(images())]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/tiny"
        build_tiny(path, load_task("digits").train, warm_up_steps=0)
        rollout = make_rollout("vllm_server", model=path, processor=load_processor(path), urls=pipe.recv())
        cpu, arrived = [], []
        for _ in range(ROUNDS):
            first.value = 0.0
            start, start_cpu = time.monotonic(), time.process_time()
            rollout.generate(prompts, Sampling(1), n=8)
            cpu.append(time.process_time() - start_cpu)
            arrived.append(first.value - start)
        rollout.close()
    pipe.send("end")
    process.join()
    print(f"CPU seconds of the trainer's process: {min(cpu):.2f} ({', '.join(f'{x:.2f}' for x in cpu)})")
    print(f"seconds until the first request arrived: {min(arrived):.3f} ({', '.join(f'{x:.3f}' for x in arrived)})")
    print(f"{IMAGES} prompts with an image of {SIZE[0]} x {SIZE[1]} pixels, {ROUNDS} rounds; {os.cpu_count()} cores")
    print(f"({platform.machine()}), Python {platform.python_version()}, Pillow {version('pillow')}")


if __name__ == "__main__":
    main()
