"""Run by `test_smollm2.py`: host memory that two ranks take to load SmolLM2-135M and to export it, with fsdp2 and with
fsdp1, and to load it with Megatron as two stages; and to load a Llama with the tensor parallelism of fsdp2 and of
Megatron, because two ranks cannot share SmolLM2's three key-value heads.

on_host_memory_ranks.py MODEL_DIR OUT_DIR PORT OTHER_PORT
"""

import ctypes
import gc
import json
import os
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from megatron.core import parallel_state
from transformers.models.llama import modeling_llama  # noqa: F401  (as the engine of Megatron below)

from rlkit import runs
from rlkit.engines import make_engine
from rlkit.engines.distributed import init_distributed, local_part
from rlkit.engines.megatron import engine as megatron_engine  # noqa: F401  (imported once, before the ranks are forked)
from rlkit.vlm import load_model

RANKS = 2


def write_llama(path):
    """Write a model of 40 million parameters in bfloat16, like SmolLM2's files. Float32 would be used where it lies."""
    config = transformers.LlamaConfig(
        vocab_size=8_000, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=128,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(path)


def anonymous_bytes():
    """Memory of this process that is not a file's: what it has allocated."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@contextmanager
def measured(found, name):
    """Add to `found` the most that this rank held beyond what it held before, read every millisecond."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    before, peak, done = anonymous_bytes(), [0], threading.Event()

    def watch():
        while not done.wait(0.001):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found[name] = [max(peak[0], anonymous_bytes()) - before, anonymous_bytes() - before]


def join_ranks(rank, port):
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({name: str(x) for name, x in own.items()})
    torch.set_num_threads(1)
    init_distributed("cpu")


def on_fsdp1_rank(rank, path, out, port):
    """In a process that has loaded no other model, whose memory would be used again and not be counted."""
    join_ranks(rank, port)
    cfg, found = runs.TrainingOptions(model=path, engine="fsdp1"), {}
    with measured(found, "fsdp1"):
        engine = runs.build_engine(cfg, path, None, optimizer_steps=1)
    found["fsdp1_parameters"] = sum(local_part(p).numel() for p in engine.module.parameters())
    with measured(found, "fsdp1_export"):
        engine.export_hf(Path(out) / "fsdp1_export", torch.bfloat16)
    with measured(found, "fsdp1_sync"):
        for _ in engine.get_per_tensor_param(dtype=torch.bfloat16):
            pass
    (Path(out) / f"fsdp1.{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def on_rank(rank, path, out, port):
    join_ranks(rank, port)
    cfg, found = runs.TrainingOptions(model=path), {}
    with measured(found, "reference"):  # first, as it imports the model's code
        reference = runs.build_scorer(cfg, path, None)
    with measured(found, "policy"):
        engine = runs.build_engine(cfg, path, None, optimizer_steps=1)
    with measured(found, "export"):
        engine.export_hf(Path(out) / "export", torch.bfloat16)
    found["parameters"] = sum(p.numel() for p in engine.module.parameters())
    found["dtypes"] = [str(next(one.module.parameters()).dtype) for one in (engine, reference)]
    del engine, reference
    llama = str(Path(out) / "llama")
    cfg = runs.TrainingOptions(model=llama, parallel={"tensor": 2})
    with measured(found, "tensor"):
        engine = runs.build_engine(cfg, llama, None, optimizer_steps=1)
    found["tensor_parameters"] = sum(local_part(p).numel() for p in engine.module.parameters())
    del engine
    for kind, folder, parallel in (("stages", path, {"pipeline": 2}), ("tensor", llama, {"tensor": 2})):
        name = f"megatron_{kind}"
        with measured(found, name):
            engine = make_engine("megatron", model=load_model(folder, on_meta=True), **parallel)
        found[f"{name}_parameters"] = sum(p.numel() for p in engine.module.parameters())
        del engine
        parallel_state.destroy_model_parallel()
    (Path(out) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    write_llama(Path(sys.argv[2]) / "llama")
    for function, port in ((on_rank, sys.argv[3]), (on_fsdp1_rank, sys.argv[4])):
        mp.start_processes(function, (*sys.argv[1:3], port), nprocs=RANKS, start_method="fork")
