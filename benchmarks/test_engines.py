"""Overhead of the fsdp2 engine: time compared with a bare loop, and memory of exporting weights and of checkpoints.

    OMP_NUM_THREADS=1 pytest benchmarks/test_engines.py --benchmark-enable --benchmark-json=FILE.json
    python benchmarks/table.py FILE.json benchmarks/results/engines.md

The bare loop gets the same rows, packed before the clock starts, and the same attention. The difference is packing, the
loss closure, metrics and, on a GPU, sharding. Engine and loop alternate step by step, and their losses and gradient
norms are compared. Memory is measured in processes of their own by the kernel's count of pages, which includes copies
outside of torch. These processes return freed memory at once, which takes time, so time is measured in other processes.
On a GPU a VLM of 2B with random weights is measured as well: its MFU, and tokens per second compared with a padded
transformers loop. On a CPU these two are compared for correctness on a tiny VLM.
"""

import gc
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from rlkit.data import Batch, append_response, collate, prompt_sample, token_budget_batches
from rlkit.engines import make_engine
from rlkit.engines.distributed import local_part
from rlkit.engines.flops import batch_flops
from rlkit.engines.packing.attention import use_packed_attention
from rlkit.engines.packing.inputs import prepare_model_inputs
from rlkit.losses import token_mean
from rlkit.tracking import peak_flops

torch.set_num_threads(1)
ROUNDS, WARM_UP = 12, 2
VERSIONS = {"python": platform.python_version(), **{name: version(name) for name in ("torch", "transformers")}}
Step = Callable[[], tuple[float, float]]  # its loss and gradient norm


def optimizer(parameters):
    fused = torch.cuda.is_available()  # without temporary copies of all weights
    return torch.optim.AdamW(parameters, lr=1e-9, fused=fused)  # the same gradient in every round


def loss_fn(out, mb):
    return token_mean(-out.logprobs, mb.mask, mb.total_tokens), {}


def engine_step(engine, batch: Batch) -> Step:
    def step():
        metrics = engine.train_batch(batch, loss_fn)
        return metrics["loss"], metrics["grad_norm"]

    return step


def step_of(model: torch.nn.Module, losses: Callable) -> Step:
    """A hand-written step: backward of each micro-batch's loss, clip, step."""
    adam = optimizer(model.parameters())

    def step():
        adam.zero_grad()
        total = 0.0
        for loss in losses():
            loss.backward()
            total = total + loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        return float(total), float(norm)

    return step


def relative_difference(found: tuple[float, float], expected: tuple[float, float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(found, expected, strict=True))


# --- time over a bare loop


def text_batch(rows: int, longest: int) -> Batch:
    g = torch.Generator().manual_seed(0)
    samples = []
    for length in torch.linspace(longest // 8, longest, rows).int().tolist():
        ids = torch.randint(3, 2000, (length,), generator=g).tolist()
        samples.append(append_response(prompt_sample(ids[:8]), ids[8:], [-5.0] * (length - 8)))
    return collate(samples)


def text_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=2000, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=1024,
        )
    )  # fmt: skip


def bare_step(batch: Batch, budget: int) -> Step:
    model = text_model().train()
    use_packed_attention(model, packed=True)
    pieces = token_budget_batches(batch.lengths, budget)
    cpu = torch.device("cpu")
    inputs = [prepare_model_inputs(batch.select(rows), None, cpu, share_prompts=False) for rows in pieces]

    def losses():
        for one in inputs:
            logits = model(**one.kwargs, use_cache=False).logits[0]
            yield F.cross_entropy(logits, one.targets, reduction="sum") / batch.total_tokens

    return step_of(model, losses)


@pytest.mark.parametrize(
    ("name", "rows", "longest", "budget"),
    [("one micro-batch", 6, 256, 16384), ("one, longer", 8, 496, 16384), ("four micro-batches", 8, 496, 600)],
)
def test_overhead(benchmark, name, rows, longest, budget):
    batch = text_batch(rows, longest)
    engine = make_engine("fsdp2", model=text_model(), device="cpu", optimizer=optimizer, micro_batch_tokens=budget)
    ours, bare = engine_step(engine, batch), bare_step(batch, budget)
    count = len(token_budget_batches(batch.lengths, budget))
    assert (count > 1) == ("four" in name)
    difference = relative_difference(ours(), bare())
    assert difference <= 1e-4
    bare_seconds: list[float] = []

    def time_bare_step():
        began = time.perf_counter()
        bare()
        bare_seconds.append(time.perf_counter() - began)

    benchmark.group = "overhead"
    benchmark.extra_info.update(
        versions=VERSIONS, name=name, tokens=sum(batch.lengths), micro_batches=count, difference=difference
    )
    benchmark.pedantic(ours, setup=time_bare_step, rounds=ROUNDS, warmup_rounds=WARM_UP)
    if benchmark.enabled:
        engine_seconds, bare_seconds = benchmark.stats.stats.data, bare_seconds[WARM_UP:]
        ratio = median(x / y for x, y in zip(engine_seconds, bare_seconds, strict=True))
        benchmark.extra_info.update(bare=min(bare_seconds), ratio=ratio)


# --- memory and time of exporting weights, saving and loading, in processes of their own


def megabytes(kind: str) -> float:
    """VmRSS, the memory of this process, or VmHWM, its peak."""
    return int(re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024 / 1e6


def peak(function: Callable) -> float:
    """The most megabytes that this process held beyond what it held before."""
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = megabytes("VmRSS")
    function()
    return megabytes("VmHWM") - before


def seconds(function: Callable) -> float:
    dist.barrier()
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def on_rank(out: Path, what: str) -> None:
    """Seconds or memory ("seconds" or "memory") of each call on this rank, after one step of a model of 66M weights."""
    config = Qwen2Config(
        vocab_size=8000, hidden_size=768, intermediate_size=2304, num_hidden_layers=8, num_attention_heads=12,
        num_key_value_heads=6,
    )  # fmt: skip
    engine = make_engine("fsdp2", model=Qwen2ForCausalLM(config), device="cpu", optimizer=optimizer)
    engine.train_batch(text_batch(2, 64), loss_fn)
    engine.optimizer.zero_grad()
    weights = [p.detach() for p in engine.module.parameters()]
    sizes = [p.numel() * p.element_size() / 1e6 for p in weights]
    path, plain = out / "checkpoint", out / f"plain.{dist.get_rank()}"

    def export_weights(bucket_bytes):
        for pair in engine.get_per_tensor_param(bucket_bytes):
            del pair  # freed before the next one is gathered

    def torch_save():
        states = [value for state in engine.optimizer.state.values() for value in state.values()]
        with plain.open("wb") as file:
            torch.save([local_part(x) for x in (*weights, *states)], file)
            os.fsync(file.fileno())

    calls = {
        "get_per_tensor_param": lambda: export_weights(0),
        "get_per_tensor_param, buckets of 25 MB": lambda: export_weights(25_000_000),
        "torch.save, flushed to disk": torch_save,
        "save_checkpoint": lambda: engine.save_checkpoint(path),
        "load_checkpoint": lambda: engine.load_checkpoint(path),
    }
    if what == "seconds":
        for call in calls.values():
            call()
        found = {name: min(seconds(call) for _ in range(3)) for name, call in calls.items()}
    else:
        found = {name: peak(call) for name, call in calls.items()}
    result = {"weights": sum(sizes), "largest": max(sizes), what: found}
    (out / f"{what}.{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2])
def test_weights_and_checkpoints(benchmark, tmp_path, world):
    def launch(what):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        common = {"WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        if what == "memory":  # glibc returns freed memory at once
            common |= {"MALLOC_MMAP_THRESHOLD_": 1 << 16, "MALLOC_TRIM_THRESHOLD_": 1 << 16}
        ranks = []
        for rank in range(world):
            own = {key: str(x) for key, x in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
            ranks.append(subprocess.Popen([sys.executable, __file__, str(tmp_path), what], env={**os.environ, **own}))
        assert [rank.wait(timeout=240) for rank in ranks] == [0] * world
        return [json.loads((tmp_path / f"{what}.{rank}.json").read_text()) for rank in range(world)]

    def run():
        return [one | other for one, other in zip(launch("seconds"), launch("memory"), strict=True)]

    benchmark.group = "weights and checkpoints"
    found = benchmark.pedantic(run, rounds=1)
    rows = {
        name: {
            "seconds": max(rank["seconds"][name] for rank in found),
            "extra_mb": max(rank["memory"][name] for rank in found),
        }
        for name in found[0]["seconds"]
    }
    sizes = {key: found[0][key] for key in ("weights", "largest")}
    benchmark.extra_info.update(versions=VERSIONS, world=world, rows=rows, **sizes)


# --- a VLM: its MFU on a GPU


def vlm_config(*, tiny: bool) -> Qwen3VLConfig:
    """Qwen3-VL-2B, or a tiny model of its kind."""
    text = {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    }  # fmt: skip
    vision = {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048,
        "deepstack_visual_indexes": [5, 11, 17],
    }  # fmt: skip
    ids = {"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652}
    if tiny:
        text |= {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
        vision |= {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
        vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        ids = {"image_token_id": 490, "video_token_id": 491, "vision_start_token_id": 492}
    ids["vision_end_token_id"] = ids["vision_start_token_id"] + 1
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)


def vlm_batch(config: Qwen3VLConfig, rows: int, longest: int, side: int) -> Batch:
    """Each row has an image of side x side patches and its own prompt, so that nothing is shared."""
    g = torch.Generator().manual_seed(0)
    vision, samples = config.vision_config, []
    features, width = side**2 // 4, 3 * vision.temporal_patch_size * vision.patch_size**2
    for length in torch.linspace(longest // 8, longest, rows).int().tolist():
        question, response = torch.randint(3, 480, (2, length), generator=g).tolist()
        compact = [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id, *question[:16]]
        start = prompt_sample(
            [compact[0], *[compact[1]] * features, *compact[2:]],
            compact,
            vision={
                "pixel_values": torch.randn(side**2, width, generator=g),
                "image_grid_thw": torch.tensor([[1, side, side]]),
            },
            placeholders={config.image_token_id: [features]},
        )
        samples.append(append_response(start, response, [-5.0] * length))
    return collate(samples)


def vlm(config: Qwen3VLConfig, device: str) -> Qwen3VLForConditionalGeneration:
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3VLForConditionalGeneration(config)


def vlm_engine(config: Qwen3VLConfig, batch: Batch, device: str, **options) -> Step:
    engine = make_engine(
        "fsdp2", model=vlm(config, device), device=device, optimizer=optimizer, enable_gradient_checkpointing=True,
        micro_batch_tokens=16384, **options,
    )  # fmt: skip
    return engine_step(engine, batch)


def padded_loop(config: Qwen3VLConfig, batch: Batch, device: str) -> Step:
    """Plain transformers, four rows at a time: more logits than [4, T, V] do not fit in memory."""
    model = vlm(config, device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def losses():
        for first in range(0, len(batch), 4):
            rows = list(range(first, min(first + 4, len(batch))))
            part = batch.select(rows)
            targets = part.tokens.masked_fill(~part.mask, -100)[:, 1:].to(device)
            kinds = (part.tokens == config.image_token_id).int()
            inputs = {
                "input_ids": part.tokens, "attention_mask": part.attention_mask.long(), "mm_token_type_ids": kinds,
                **{key: torch.cat([one[key] for one in part.vision]) for key in part.vision[0]},
            }  # fmt: skip
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits = model(**{k: x.to(device) for k, x in inputs.items()}, use_cache=False).logits[:, :-1]
                loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
            yield loss / batch.total_tokens.item()

    return step_of(model, losses)


VLM_STEPS: dict[str, Callable[..., Step]] = {
    "rlkit": vlm_engine,
    "rlkit padded": partial(vlm_engine, use_remove_padding=False),
    "transformers padded": padded_loop,
    "rlkit, use_fused_kernels": partial(vlm_engine, use_fused_kernels=True),  # last: Liger's kernels stay
}


def test_vlm_steps_agree():
    config = vlm_config(tiny=True)
    batch = vlm_batch(config, 6, 64, 4)
    steps = {name: make(config, batch, "cpu")() for name, make in VLM_STEPS.items()}
    theirs = steps.pop("transformers padded")
    assert all(relative_difference(ours, theirs) <= 1e-4 for ours in steps.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", VLM_STEPS)
def test_mfu(benchmark, name):
    """One model at a time: weights, gradients and AdamW's state of 2B take 34 GB. All have the same weights."""
    config = vlm_config(tiny=False)
    batch = vlm_batch(config, 32, 2048, 28)
    step = VLM_STEPS[name](config, batch, "cuda")
    loss, norm = step()

    def synchronised_step():
        step()
        torch.cuda.synchronize()

    torch.cuda.reset_peak_memory_stats()
    benchmark.group = "GPU"
    benchmark.extra_info.update(versions=VERSIONS, name=name, device=torch.cuda.get_device_name(), loss=loss, norm=norm)
    benchmark.pedantic(synchronised_step, rounds=5, warmup_rounds=1)
    benchmark.extra_info.update(peak_gb=torch.cuda.max_memory_allocated() / 1e9)
    if benchmark.enabled:
        seconds, device_flops = benchmark.stats.stats.median, peak_flops(torch.cuda.get_device_name())
        flops = 3 * batch_flops(config, batch, share_prompts=False)
        mfu = flops / seconds / device_flops if device_flops else None
        benchmark.extra_info.update(tokens_per_second=sum(batch.lengths) / seconds, mfu=mfu)
        assert name != "rlkit" or mfu is None or mfu >= 0.4, f"MFU {mfu:.1%}"


@pytest.fixture(autouse=True)
def free_memory():
    """Free the model of one test before the next one makes its own."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    on_rank(Path(sys.argv[1]), sys.argv[2])
