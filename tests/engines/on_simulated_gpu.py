"""Run by `test_simulated_gpu.py`: steps of an engine on a simulated GPU, as one of four ranks. Prints JSON.

For each family and each option, and each method of the engine: how often the host waited for the device in code of
rlkit, and where. Arguments are names of other families.
"""

import json
import sys

import torch
import torch.distributed as dist
from simulated_gpu import SimulatedGpu
from test_families import TEXT, VISION, rows, text_model, vision_model
from torch.optim import AdamW
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlkit.engines import distributed, make_engine, register_engine
from rlkit.engines.fsdp import fsdp2
from rlkit.engines.value_head import with_value_head
from rlkit.losses import (
    clipped_policy_loss,
    clipped_value_loss,
    importance_weights,
    mismatch_stats,
    ratio_stats,
    token_mean,
)
from rlkit.vlm.adapt import lora

FAMILIES = ["qwen2", "qwen3_moe", "qwen3_5_text", "qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4"]
OPTIONS = {
    "in one micro-batch": {"micro_batch_tokens": 1000},
    "padded": {"use_remove_padding": False},
    "prompts not shared": {"share_prompts": False},
    "fused": {"use_fused_kernels": True, "suppressed_token_ids": torch.tensor([3, 4])},
    "checkpointing": {"enable_gradient_checkpointing": True},
    "adapters": {},
    "value model": {},
    "only scores": {"only_scores": True},
}
LAYOUTS = {
    "hybrid sharding": {"fsdp_size": 2},
    "ulysses": {"ulysses_sequence_parallel_size": 2},
    "tensor parallelism": {"tensor": 2},
    "tensor parallelism, fused": {"tensor": 2, "use_fused_kernels": True},
}


def policy_loss(out, mb):
    old = out.logprobs.detach() - 0.1
    loss = clipped_policy_loss(out.logprobs, old, mb.rewards, mb.mask)
    loss = loss * importance_weights(old, mb.rollout_logprobs, mb.mask, high=2.0)
    metrics = {
        "entropy": token_mean(out.entropy, mb.mask, mb.total_tokens),
        **ratio_stats(out.logprobs, old, mb.rewards, mb.mask, total=mb.total_tokens),
        **mismatch_stats(old, mb.rollout_logprobs, mb.mask, mb.total_tokens),
    }
    return token_mean(loss, mb.mask, mb.total_tokens), metrics


def critic_loss(out, mb):
    return token_mean(clipped_value_loss(out.values, mb.rollout_logprobs, mb.rollout_logprobs, mb.mask), mb.mask), {}


def methods(engine, batch, kind):
    if kind == "value model":
        yield "train_batch", lambda: engine.train_batch(batch, critic_loss)
    elif kind != "only scores":
        yield "train_batch", lambda: engine.train_batch(batch, policy_loss, ("logprobs", "entropy"))
        yield "get_per_tensor_param", lambda: list(engine.get_per_tensor_param(dtype=torch.bfloat16))
    if kind == "adapters":
        yield "get_adapter", lambda: list(engine.get_adapter(dtype=torch.bfloat16)[1])
    yield "infer_batch", lambda: engine.infer_batch(batch)


def waits(family, kind, options):
    """For each method of an engine on the simulated GPU: the waits in rlkit."""
    sees = family in VISION
    model = vision_model(family, "sdpa") if sees else text_model(family, TEXT[family])
    model = lora(model, rank=2, alpha=4) if kind == "adapters" else model
    model = with_value_head(model) if kind == "value model" else model
    batch, _ = rows(family if sees else None)
    trained = {} if kind == "only scores" else {"optimizer": lambda parameters: AdamW(parameters, foreach=True)}
    found = {}
    with SimulatedGpu() as gpu:
        engine = make_engine(
            "fsdp2",
            "value_model" if kind == "value model" else "language_model",
            model=model.bfloat16().to("gpu"),
            device="gpu",
            compute_dtype=torch.bfloat16,
            **{"micro_batch_tokens": 64, **trained, **options},
        )
        for name, method in methods(engine, batch, kind):
            gpu.waits.clear()
            method()
            found[name] = gpu.waits["rlkit"]
    return found


def what_is_seen():
    """Whether the simulated GPU notices what it should."""
    noticed = {}
    with SimulatedGpu() as gpu:
        x, mask = torch.randn(2, 3).to("gpu", non_blocking=True), torch.eye(2, 3).bool().to("gpu", non_blocking=True)
        for name, operation in {
            "item": lambda: x.sum().item(),
            "item of integers": lambda: mask.sum().item(),
            "mask": lambda: x[mask],
            "nonzero": lambda: mask.nonzero(),
            "index on the host": lambda: x[torch.tensor([0])],
            "to the host": lambda: x.cpu(),
            "to the device": lambda: torch.ones(3).to("gpu"),
            "made on the device": lambda: torch.tensor([1], device="gpu"),
            "nothing": lambda: (x + 1) * mask + x.new_zeros(3) + torch.tensor(2.0),
        }.items():
            gpu.waits.clear()
            operation()
            noticed[name] = sum(counts.total() for counts in gpu.waits.values())
        assert mask.sum().item() == 2 and x[mask].shape == (2,) and mask.nonzero().tolist() == [[0, 0], [1, 1]]
        try:
            x + torch.ones(3)
        except RuntimeError as error:
            noticed["mixed devices"] = str(error)
    return noticed


def main(families):
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    # there are no other ranks
    distributed.gather_objects = lambda x, group=None: [x]
    fsdp2.make_model_parallel_group = lambda rank, size: None
    register_engine("language_model", "fsdp2", "gpu", "rlkit.engines.fsdp.fsdp2:Fsdp2Engine")
    register_engine("value_model", "fsdp2", "gpu", "rlkit.engines.fsdp.value_engine:Fsdp2ValueEngine")
    found = {family: waits(family, "", {}) for family in families or FAMILIES}
    if not families:
        found |= {kind: waits("qwen2_5_vl", kind, options) for kind, options in OPTIONS.items()}
        found |= {kind: waits("qwen2", kind, options) for kind, options in LAYOUTS.items()}
    print(json.dumps({"steps": found, "seen": what_is_seen()}))


if __name__ == "__main__":
    main(sys.argv[1:])
