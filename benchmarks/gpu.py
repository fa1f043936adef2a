"""Tables of one GPU: the output layer beside a matrix product, a step of a 3B with images, copies of its weights, and
their transfer to vLLM.

    benchmarks/gpu.sh            # writes benchmarks/results/gpu.md
    benchmarks/gpu.sh --small    # tries the script with small sizes, also on a CPU, and prints only

Models have the published configuration and random weights. **No GPU has run this yet.**
"""

from __future__ import annotations

import argparse
import copy
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from published_configs import add_missing_tokens, qwen_vl
from transformers import AutoModelForImageTextToText

from rlkit.data import collate, load_task
from rlkit.data.samples import append_response, prompt_sample
from rlkit.engines import make_engine
from rlkit.engines.flops import batch_flops
from rlkit.losses import linear_logprobs, logprobs, token_mean
from rlkit.rollout import make_rollout
from rlkit.tracking import peak_flops
from rlkit.tracking.files import replace_file
from rlkit.vlm import build_tiny, load_processor
from rlkit.vlm.loading import load_config

OUT = Path(__file__).parent / "results" / "gpu.md"
TOKEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of a call, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def peak_gib(work: Callable[[], object]) -> float:
    """GiB that a call takes at most beyond what was there; 0 on a CPU."""
    if DEVICE.type == "cpu":
        work()
        return 0.0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def table(title: str, header: list[str], rows: list[list[object]]) -> str:
    lines = [f"## {title}", "", "| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows), ""])


def matmul_peak(size: int) -> float:
    """FLOP/s of a square matrix product in bfloat16."""
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b)


def head(tokens: int, sizes: list[tuple[int, int]], peak: float) -> str:
    """Forward and backward of `linear_logprobs`, with the Triton kernels and without."""
    rows = []
    for vocabulary, hidden_size in sizes:
        hidden, weight = (
            torch.randn(n, hidden_size, device=DEVICE).mul_(0.05).bfloat16().requires_grad_()
            for n in (tokens, vocabulary)
        )
        targets = torch.randint(0, vocabulary, (tokens,), device=DEVICE)

        def forward(hidden=hidden, weight=weight, targets=targets):
            with torch.no_grad():
                return linear_logprobs(hidden, weight, targets)

        def both(hidden=hidden, weight=weight, targets=targets):
            logps, entropy = linear_logprobs(hidden, weight, targets)
            torch.autograd.grad(logps.sum() + entropy.sum(), (hidden, weight))

        found, choose = [], logprobs.kernels_for
        for name in ("Triton", "torch"):
            logprobs.kernels_for = choose if name == "Triton" else lambda hidden: None
            found.append(forward())
            flops = 2 * tokens * vocabulary * hidden_size
            shares = [flops / seconds(forward) / peak, 4 * flops / seconds(both) / peak]
            rows.append([
                f"{name}, {tokens} x {vocabulary} x {hidden_size}", *(f"{share:.0%}" for share in shares),
                f"{peak_gib(both):.2f}",
            ])  # fmt: skip
        logprobs.kernels_for = choose
        difference = max((x - y).abs().max().item() for x, y in zip(*found, strict=True))
        rows[-1].append(f"{difference:.1e}")
        rows[-2].append("")
    header = ["output layer: tokens x vocabulary x hidden", "forward", "with backward", "peak GiB", "difference"]
    return table("Output layer, as a share of the matrix product's FLOP/s (8 N V H with backward)", header, rows)


def rows_with_images(config: object, count: int, image: int, text: int, responses: int) -> object:
    """`count` prompts with an image each, and `responses` responses of different lengths to each."""
    vision, samples = config.vision_config, []
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    merge, generator = vision.spatial_merge_size, torch.Generator().manual_seed(0)
    for group in range(count):
        patches = image * merge**2
        grid = torch.tensor([[1, 2 * merge, patches // (2 * merge)]])
        pixels = torch.randn(patches, size, generator=generator)
        ids = [config.image_token_id] * image + [10 + group] * text
        prompt = prompt_sample(ids, vision={"pixel_values": pixels, "image_grid_thw": grid}, group_id=group)
        lengths = torch.randint(text // 2, 2 * text, (responses,), generator=generator).tolist()
        samples += [append_response(prompt, [20] * length, [0.0] * length) for length in lengths]
    return collate(samples)


def loss_fn(out, mb):
    return token_mean(out.logprobs - 0.01 * out.entropy, mb.mask, mb.total_tokens), {}


def small_config() -> object:
    """The published configuration with two narrow layers and a small vocabulary."""
    config = qwen_vl("qwen2.5-vl-3b")
    text, vision = config.text_config, config.vision_config
    text.num_hidden_layers, text.vocab_size, text.hidden_size, text.intermediate_size = 2, 512, 256, 256
    text.num_attention_heads, text.num_key_value_heads, text.layer_types = 2, 1, text.layer_types[:2]
    vision.depth, vision.fullatt_block_indexes, vision.out_hidden_size = 2, [1], 256
    vision.hidden_size, vision.intermediate_size, vision.num_heads = 64, 64, 4
    config.image_token_id, config.video_token_id, config.vision_start_token_id = 5, 6, 3
    return config


def steps(config: object, workload: tuple[int, int, int, int], peak: float) -> str:
    """Tokens per second, MFU and memory of a training step with images, packed and padded."""
    batch, rows = rows_with_images(config, *workload), []
    ways = {
        "packed, shared prompts, fused output layer": {"use_fused_kernels": True},
        "packed, shared prompts": {},
        "packed": {"share_prompts": False},
        "padded": {"use_remove_padding": False},
    }
    tokens, flops = int(batch.attention_mask.sum()), 3 * batch_flops(config, batch)
    for name, options in ways.items():
        needed, memory = seconds_and_memory(config, batch, options)
        rows.append([
            name, f"{needed:.2f}", f"{tokens / needed:,.0f}", f"{flops / needed / peak:.0%}", f"{memory:.1f}",
        ])  # fmt: skip
    header = ["3B with images", "seconds", "tokens/s", "MFU", "peak GiB beyond weights and optimizer"]
    return table(f"A step: {len(batch)} rows, {tokens} tokens, prompts counted once for each response", header, rows)


def seconds_and_memory(config: object, batch: object, options: dict[str, bool]) -> tuple[float, float]:
    """Seconds of a training step, and its peak beyond weights and optimizer. The engine is gone afterwards."""
    engine = new_engine(config, **options)

    def step():
        engine.train_batch(batch, loss_fn, ("logprobs", "entropy"))

    return seconds(step, repeats=3), peak_gib(step)


def new_engine(config: object, **options: bool) -> object:
    """An engine with random weights. Two with their optimizers do not fit on a GPU of 80 GB."""
    gc.collect()
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    return make_engine(
        "fsdp2", model=model, device=DEVICE.type, compute_dtype=torch.bfloat16, enable_gradient_checkpointing=True,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=0.0, fused=True), **options,
    )  # fmt: skip


def copies(config: object, workload: tuple[int, int, int, int]) -> str:
    """The table of `time_of_copies` for an engine that has an optimizer state."""
    engine = new_engine(config)
    engine.train_batch(rows_with_images(config, *workload), loss_fn, ("logprobs", "entropy"))
    return time_of_copies(engine)


def time_of_copies(engine: object) -> str:
    """Seconds to cast all weights to bfloat16, as for a sampler, and to move weights and optimizer state to the host.

    One GPU has no other rank to gather from.
    """

    def weights():
        for _, tensor in engine.get_per_tensor_param(dtype=torch.bfloat16):
            del tensor

    size = 2 * sum(p.numel() for p in engine.module.parameters())
    needed = seconds(weights, repeats=3)
    rows = [["all weights cast to bfloat16", f"{size / 1e9:.1f}", f"{needed:.2f}", f"{size / needed / 1e9:.0f}"]]
    offloaded = (engine._offloaded_weights, engine._offloaded_state)

    def there_and_back():
        for part in offloaded:
            with part.on_device():
                part.changed = part.enabled = True  # or only their memory would be freed

    needed = seconds(there_and_back, repeats=3)
    size = 2 * engine.host_bytes
    moved = ["weights and optimizer to the host and back", f"{size / 1e9:.1f}", f"{needed:.2f}"]
    rows.append([*moved, f"{size / needed / 1e9:.0f}"])
    return table("Copies of all weights", ["what", "GB", "seconds", "GB/s"], rows)


def weight_sync(config: object) -> str:
    """Seconds in which vLLM, in this process and with random weights of its own, takes all weights of an engine."""
    engine = new_engine(config)
    with tempfile.TemporaryDirectory() as folder:
        processor = write_without_weights(config, Path(folder))
        rollout = make_rollout(
            "vllm", model=folder, processor=processor, load_format="dummy", max_model_len=1024, enforce_eager=True,
            kv_cache_memory_bytes=256 << 20, gpu_memory_utilization=0.3,
        )  # fmt: skip

    def update():
        rollout.update_weights(engine.get_per_tensor_param(dtype=rollout.weight_dtype))

    needed, memory = seconds(update, repeats=3), peak_gib(update)
    size = rollout.weight_dtype.itemsize * sum(p.numel() for p in engine.module.parameters())
    rollout.close()
    rate = f"{size / needed / 1e9:.0f}"
    row = ["vLLM takes all weights", f"{size / 1e9:.1f}", f"{needed:.2f}", rate, f"{memory:.2f}"]
    return table("A sampler in the trainer's process", ["what", "GB", "seconds", "GB/s", "peak GiB"], [row])


def write_without_weights(config: object, folder: Path) -> object:
    """Write a model directory without weights, with the tokenizer and processor of the tiny model, which it returns."""
    build_tiny(folder, load_task("digits").train, warm_up_steps=0)
    tiny, config = load_config(str(folder)), copy.deepcopy(config)
    for name in TOKEN_IDS:
        setattr(config, name, getattr(tiny, name))
    for file in folder.glob("*.safetensors"):
        file.unlink()
    config.save_pretrained(folder)
    processor = load_processor(str(folder))
    add_missing_tokens(processor.tokenizer, config)
    processor.save_pretrained(folder)
    return processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="small sizes, on any machine; writes nothing")
    small = parser.parse_args().small
    if not small and DEVICE.type == "cpu":
        raise SystemExit("gpu.sh: expected a GPU, got none; --small tries the script")
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    matmul = matmul_peak(256 if small else 8192)
    peak = peak_flops(name) or matmul
    heads = [(500, 32)] if small else [(151936, 2048), (152064, 3584)]
    config = small_config() if small else qwen_vl("qwen2.5-vl-3b")
    workload = (2, 8, 12, 2) if small else (4, 512, 256, 8)
    title = (
        f"# One GPU: {name}\n\nMade by benchmarks/gpu.sh with torch {torch.__version__}. A product of 8192 x 8192 "
        f"matrices in bfloat16 reaches {matmul / 1e12:.0f} TFLOP/s, {matmul / peak:.0%} of the data sheet.\n"
    )
    tables = [
        lambda: head(64 if small else 16384, heads, matmul),
        lambda: steps(config, workload, peak),
        lambda: copies(config, workload),
        lambda: weight_sync(config),
    ]
    write_each([lambda: title, *tables], None if small else OUT)


def write_each(parts: list[Callable[[], str]], out: Path | None) -> None:
    """Print each part as soon as it is there, and write it to a file: a failure or a time limit loses no table."""
    done: list[str] = []
    for part in parts:
        done.append(part())
        print(done[-1], flush=True)
        if out:
            replace_file(out, "\n".join(done))


if __name__ == "__main__":
    main()
