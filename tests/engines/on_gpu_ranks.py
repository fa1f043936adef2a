"""Run by `test_on_gpus.py` under torchrun: engines on GPUs, compared with the same batch on the CPU in float32.

torchrun --nproc-per-node=2 on_gpu_ranks.py MODEL_DIR OUT_DIR cuda
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from rows import make_batch  # noqa: E402

from rlkit.engines import checkpoint, make_engine  # noqa: E402
from rlkit.engines.distributed import init_distributed  # noqa: E402
from rlkit.losses import token_mean  # noqa: E402
from rlkit.vlm import load_model, load_processor  # noqa: E402

ROWS = 9  # row 3 is text only, the others have images
ALONE = {  # the back end and its options
    "fsdp2": ("fsdp2", {}),
    "padded": ("fsdp2", {"use_remove_padding": False}),
    "checkpointed": ("fsdp2", {"enable_gradient_checkpointing": True}),
    "fsdp1": ("fsdp1", {}),
    "megatron": ("megatron", {}),
    "fused": ("fsdp2", {"use_fused_kernels": True}),  # last: Liger's kernels stay in the process
}
TWO = {
    "copies": ("fsdp2", {"fsdp_size": 1}),
    "tensor": ("fsdp2", {"tensor": 2}),
    "ulysses": ("fsdp2", {"ulysses_sequence_parallel_size": 2}),
    "megatron tensor": ("megatron", {"tensor": 2}),
    "megatron pipeline": ("megatron", {"pipeline": 2}),
    "megatron context": ("megatron", {"context": 2}),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def cases(ranks):
    """(name, back end, options, dtype) of all cases for this number of ranks."""
    names = {**({} if ranks == 1 else TWO), **ALONE}
    for name, (backend, options) in names.items():
        if backend != "megatron" or find_spec("megatron"):
            # Transformer Engine's attention does not support float32
            half_only = backend == "megatron" and find_spec("transformer_engine")
            yield from ((name, backend, options, dtype) for dtype in DTYPES if not half_only or dtype != "float32")


def loss_fn(out, mb):
    entropy = token_mean(out.entropy, mb.mask, mb.total_tokens)
    policy = token_mean(-mb.advantages.exp()[:, None] * out.logprobs, mb.mask, mb.total_tokens)
    return policy - 0.3 * entropy, {"entropy": entropy, "rows": len(mb)}


def step(engine, batch):
    metrics = engine.train_batch(batch, loss_fn, ("logprobs", "entropy"))
    return [metrics[name] for name in ("loss", "grad_norm", "entropy")]


def load_scaled(model_dir):
    """A model with larger weights, so that its outputs depend on attention."""
    model = load_model(model_dir)
    for parameter in model.parameters():
        parameter.data.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return model


def measure(model_dir, out, backend, device, dtype, options):
    """Logprobs [ROWS, T] and three steps; the last two again from a checkpoint, with the engine moved to the host and
    back before each."""

    def new():
        return make_engine(
            backend, model=load_scaled(model_dir), device=device, compute_dtype=dtype, micro_batch_tokens=120,
            optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-3, eps=1e-4), **options,
        )  # fmt: skip

    engine, processor = new(), load_processor(model_dir)
    rows = list(range(ROWS))[engine.data_parallel_rank :: engine.data_parallel_size]
    all_rows, batch = make_batch(processor), make_batch(processor, rows=rows)
    logprobs = torch.zeros(all_rows.tokens.shape)
    logprobs[rows, : batch.tokens.shape[1]] = engine.infer_batch(batch)["logprobs"]
    logprobs = engine.global_sum(logprobs)
    steps, resumed = [step(engine, batch)], []
    engine.save_checkpoint(out / "checkpoint", {"step": 1}, wait=False)
    steps += [step(engine, batch) for _ in range(2)]
    engine.load_checkpoint(out / "checkpoint")
    for _ in range(2):
        if backend != "fsdp1":
            engine.to("cpu")
            engine.to(device)
        resumed.append(step(engine, batch))
    steps, resumed = torch.tensor(steps), torch.tensor(resumed)
    return {"logprobs": logprobs, "steps": steps, "resumed": resumed, "mask": all_rows.mask}


def main(model_dir, out, device):
    torch.backends.cudnn.allow_tf32 = False  # in the convolution that takes patches
    init_distributed(device)
    exact = measure(model_dir, out, "fsdp2", "cpu", torch.float32, {})
    found = {}
    for name, backend, options, dtype in cases(dist.get_world_size()):
        result = measure(model_dir, out, backend, device, DTYPES[dtype], options)
        if backend == "megatron":
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
        differences = (result["logprobs"] - exact["logprobs"])[exact["mask"]].abs()
        found[f"{name}, {dtype}"] = {
            "logprobs": differences.mean().item(),
            "steps": (result["steps"] / exact["steps"] - 1).abs().amax(0).tolist(),
            "resumed": (result["resumed"] / result["steps"][1:] - 1).abs().max().item(),
        }
    if dist.get_rank() == 0:
        (out / "found.json").write_text(json.dumps(found, indent=1))
    checkpoint.finish()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
