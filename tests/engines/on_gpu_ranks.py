"""Run by `test_on_gpus.py` under torchrun: engines on GPUs, compared with the same batch on the CPU in float32.

torchrun --nproc-per-node=2 on_gpu_ranks.py MODEL_DIR OUT_DIR cuda  # or cpu, to try the script
"""

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "rollout")]
from rows import make_batch, make_samples  # noqa: E402
from vllm_models import build  # noqa: E402

from rlkit.data import collate  # noqa: E402
from rlkit.engines import make_engine  # noqa: E402
from rlkit.engines.distributed import init_distributed  # noqa: E402
from rlkit.engines.value_head import load_value_model  # noqa: E402
from rlkit.losses import token_mean  # noqa: E402
from rlkit.vlm import load_model, load_processor, lora, quantize_base  # noqa: E402

ROWS = 9  # row 3 is text only, the others have images
ALONE = {  # the back end and its options
    "fsdp2": ("fsdp2", {}),
    "padded": ("fsdp2", {"use_remove_padding": False}),
    "checkpointed": ("fsdp2", {"enable_gradient_checkpointing": True}),
    "compiled": ("fsdp2", {"use_torch_compile": True}),
    "compiled, checkpointed": ("fsdp2", {"use_torch_compile": True, "enable_gradient_checkpointing": True}),
    "offloaded": ("fsdp2", {"offload_between_phases": True}),
    "read in shards": ("fsdp2", {"on_meta": True}),
    "lora": ("fsdp2", {"kind": "lora"}),
    "lora on 4 bits": ("fsdp2", {"kind": "4 bits"}),
    "value": ("fsdp2", {"kind": "value"}),
    "experts": ("fsdp2", {"kind": "experts"}),
    "fsdp1": ("fsdp1", {}),
    "megatron": ("megatron", {}),
    "megatron value": ("megatron", {"kind": "value"}),
    "megatron experts": ("megatron", {"kind": "experts"}),
    "fused": ("fsdp2", {"use_fused_kernels": True}),  # last: Liger's kernels stay in the process
}
TWO = {
    "copies": ("fsdp2", {"fsdp_size": 1}),  # hybrid sharding whose shards are whole
    "copies, read in shards": ("fsdp2", {"fsdp_size": 1, "on_meta": True}),
    "copies lora": ("fsdp2", {"fsdp_size": 1, "kind": "lora"}),
    "tensor": ("fsdp2", {"tensor": 2}),
    "ulysses": ("fsdp2", {"ulysses_sequence_parallel_size": 2}),
    "megatron tensor": ("megatron", {"tensor": 2}),
    "megatron pipeline": ("megatron", {"pipeline": 2}),
    "megatron context": ("megatron", {"context": 2}),
    "megatron expert": ("megatron", {"expert": 2, "kind": "experts"}),
}
FOUR = {  # hybrid sharding: two copies of the weights, each on two ranks
    "hybrid": ("fsdp2", {"fsdp_size": 2}),
    "hybrid, read in shards": ("fsdp2", {"fsdp_size": 2, "on_meta": True}),
    "hybrid lora": ("fsdp2", {"fsdp_size": 2, "kind": "lora"}),
}
NAMES = {1: ALONE, 2: {**TWO, **ALONE}, 4: FOUR}  # by the number of ranks
KINDS = ("policy", "lora", "4 bits", "value", "experts")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def cases(ranks):
    """(name, back end, options, dtype) of all cases for this number of ranks."""
    for name, (backend, options) in NAMES[ranks].items():
        if backend != "megatron" or find_spec("megatron"):
            yield from ((name, backend, options, dtype) for dtype in DTYPES)


def value_loss(out, mb):
    loss = token_mean((out.values - mb.advantages[:, None]).square(), mb.mask, mb.total_tokens)
    size = token_mean(
        out.values.abs(), mb.mask, mb.total_tokens
    )  # their mean is near 0, so its relative error is large
    return loss, {"entropy": size}


def loss_fn(out, mb):
    entropy = token_mean(out.entropy, mb.mask, mb.total_tokens)
    policy = token_mean(-mb.advantages.exp()[:, None] * out.logprobs, mb.mask, mb.total_tokens)
    return policy - 0.3 * entropy, {"entropy": entropy, "rows": len(mb)}


def step(engine, batch):
    values = engine.known_outputs == ("values",)
    metrics = engine.train_batch(batch, value_loss if values else loss_fn, engine.known_outputs)
    return [metrics[name] for name in ("loss", "grad_norm", "entropy")]


def save_models(model_dir, path, experts):
    """Write the model with larger weights, so that its outputs depend on attention, and one with experts, of text
    alone. All ranks call this."""
    if dist.get_rank() == 0:
        build("qwen3_moe", experts)
        model = load_model(model_dir)
        for parameter in model.parameters():
            parameter.data.mul_(3.0 if parameter.ndim > 1 else 1.0)
        model.save_pretrained(path)
        load_processor(model_dir).save_pretrained(path)
    dist.barrier()


def load_kind(path, kind, *, on_meta):
    """The model itself; with adapters that change it, also above 4 bits; or with a value head that is not all zeros."""
    torch.manual_seed(0)
    if kind == "value":
        model = load_value_model(path, on_meta=on_meta)
        head = model.get_output_embeddings().weight
        head.data.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(3)) / head.shape[1] ** 0.5)
        return model
    model = load_model(path, on_meta=on_meta)
    if kind in ("lora", "4 bits"):
        model = lora(model, 4, 8)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.05)
    if kind == "4 bits":
        quantize_base(model)
    return model


def make_rows(processor, kind, rows):
    """Of experts, text with given choices of them: rounding would change a choice, and with it all that follows."""
    if kind != "experts":
        return make_batch(processor, rows=rows)
    draw = torch.Generator().manual_seed(1)
    samples = make_samples(processor, sizes=(None,) * 4)
    routed = [torch.rand(len(s.token_ids) - 1, 2, 4, generator=draw).argsort(-1)[..., :2].short() for s in samples]
    samples = [replace(s, routed_experts=experts) for s, experts in zip(samples, routed, strict=True)]
    advantages = torch.randn(ROWS, generator=draw)
    return collate([samples[i] for i in rows], advantages=advantages[rows])


def measure(models, out, backend, device, dtype, options):
    """Logprobs or values [ROWS, T] and three steps; the last two again from a checkpoint, with the engine moved to the
    host and back before each."""

    options = dict(options)
    kind, on_meta = options.pop("kind", "policy"), options.pop("on_meta", False)
    model_dir = models[kind == "experts"]
    if kind == "experts":
        options["router_replay"] = True

    def new():
        return make_engine(
            backend, "value_model" if kind == "value" else "language_model",
            model=load_kind(model_dir, kind, on_meta=on_meta), device=device, compute_dtype=dtype,
            micro_batch_tokens=120,
            optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-3, eps=1e-4), **options,
        )  # fmt: skip

    engine, processor = new(), load_processor(model_dir)
    rows = list(range(ROWS))[engine.data_parallel_rank :: engine.data_parallel_size]
    all_rows, batch = (make_rows(processor, kind, of) for of in (list(range(ROWS)), rows))
    logprobs = torch.zeros(all_rows.tokens.shape)
    logprobs[rows, : batch.tokens.shape[1]] = engine.infer_batch(batch)[engine.known_outputs[0]]
    logprobs = engine.global_sum(logprobs)
    steps, resumed = [step(engine, batch)], []
    engine.save_checkpoint(out / "checkpoint", {"step": 1})
    steps += [step(engine, batch) for _ in range(2)]
    engine.load_checkpoint(out / "checkpoint")
    for _ in range(2):
        if backend != "fsdp1" and not options.get("offload_between_phases"):
            engine.to("cpu")
            engine.to(device)
        resumed.append(step(engine, batch))
    steps, resumed = torch.tensor(steps), torch.tensor(resumed)
    return {"logprobs": logprobs, "steps": steps, "resumed": resumed, "mask": all_rows.mask}


def main(model_dir, out, device):
    torch.backends.cudnn.allow_tf32 = False  # in the convolution that takes patches
    init_distributed(device)
    models = str(out / "scaled"), str(out / "experts")
    save_models(model_dir, *models)
    all_exact = {kind: measure(models, out, "fsdp2", "cpu", torch.float32, {"kind": kind}) for kind in KINDS}
    found = {}
    for name, backend, options, dtype in cases(dist.get_world_size()):
        result, exact = (
            measure(models, out, backend, device, DTYPES[dtype], options),
            all_exact[options.get("kind", "policy")],
        )
        torch.compiler.reset()  # the next engine has other layers
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
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
