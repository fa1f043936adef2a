"""Run by `test_plan.py`, in a process of its own that has joined no others: plans, and what a real process takes.

on_fake_ranks.py MODEL_DIR CONFIG_DIR OUT_FILE

CONFIG_DIR has the configuration of a model with a large vocabulary, without weights or tokenizer.
"""

import io
import json
import sys
from contextlib import redirect_stdout
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlkit.engines import make_engine
from rlkit.losses import token_mean
from rlkit.plan.__main__ import main as command
from rlkit.plan.fit import make_plan
from rlkit.plan.hardware import gpu_named
from rlkit.plan.recipes import load_recipe, recipe_options
from rlkit.plan.rehearsal import Roles, local
from rlkit.plan.workload import largest_micro_batches, longest_batch
from rlkit.runs.models import trained_part
from rlkit.vlm import load_model
from rlkit.vlm.loading import load_config

CASES = {  # ranks, options
    "one_rank": (1, []),
    "three_ranks": (3, []),
    "two_by_two": (4, ["--parallel", "fsdp_size", "2"]),
    "ulysses": (4, ["--ulysses_sequence_parallel_size", "2"]),
    "lora": (2, ["--lora_rank", "4"]),
    "checkpointing": (2, ["--enable_gradient_checkpointing"]),
    "fused": (2, ["--use_fused_kernels"]),
    "halves": (2, ["--dtype", "bfloat16"]),
}
SHORT = ["--max_prompt_tokens", "64", "--max_new_tokens", "64", "--prompts_per_step", "4"]
COMMANDS = {  # recipe, arguments
    "fits": ("grpo_vlm", ["--nproc", "2", "--gpu", "l4-24gb", *SHORT]),
    "too_large": ("sft", [
        "--gpu", "l4-24gb", "--max_tokens", "8192", "--max_new_tokens", "0", "--no_enable_gradient_checkpointing",
        "--micro_batch_tokens", "32768",
    ]),
    "reward_model": ("reward_model", ["--max_tokens", "256"]),
    "unknown_gpu": ("grpo_vlm", ["--gpu", "h1000"]),
    "no_ranks": ("grpo_vlm", ["--nproc", "0"]),
    "too_long": ("grpo_vlm", ["--max_new_tokens", "9000"]),
    "three_of_four": ("grpo_vlm", ["--nproc", "4", "--ulysses_sequence_parallel_size", "3", *SHORT]),
    "images_of_text": ("grpo_vlm", ["--image_tokens", "5", *SHORT]),
    "megatron": ("grpo_vlm", ["--engine", "megatron"]),
    "tiny": ("grpo_vlm", ["--model", "tiny"]),
}  # fmt: skip
LENGTHS = ["--max_prompt_tokens", "96", "--max_new_tokens", "40", "--micro_batch_tokens", "600"]


def planned(cfg, config, ranks):
    roles = Roles(policy=config, reference=None if cfg.lora_rank else config, adapter_reference=bool(cfg.lora_rank))
    plan = make_plan(cfg, roles, ranks, gpu_named("h100-80gb"), None)
    return {"phases": plan.phases, "resident": plan.rehearsal.resident, "sampler": plan.sampler.sequences}


def taken(path, cfg, ranks):
    """Bytes that a process takes as rank 0, whose collectives reach nobody, after a step on real tensors."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    model = trained_part(cfg, load_model(path, dtype=getattr(torch, cfg.dtype)))
    sharded = {k: v for k, v in cfg.parallel.items()}
    engine = make_engine(
        "fsdp2", model=model, device="cpu", optimizer=lambda p: torch.optim.AdamW(p, fused=True),
        compute_dtype=torch.bfloat16, **sharded,
    )  # fmt: skip
    parameters = list(engine.module.parameters())
    workload = longest_batch(cfg, engine.config, ranks, None)
    batch = largest_micro_batches(replace(workload, prompts=1), engine.config, 600, share_prompts=True)
    engine.train_batch(batch, lambda out, mb: (token_mean(out.logprobs, mb.mask, mb.total_tokens), {}))
    state = [x for one in engine.optimizer.state.values() for x in one.values()]
    found = {
        "parameters": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer": state,
    }
    dist.destroy_process_group()
    return {kind: storage_bytes(local(tensors)) for kind, tensors in found.items()}


def storage_bytes(tensors):
    """Of all storages; gradients of one FSDP unit share theirs."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def said(recipe, arguments, config_dir):
    """What the command prints, its message, and its exit status."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        try:
            command([f"recipes/{recipe}.py", "--model", config_dir, *arguments])
        except SystemExit as end:
            message = end.code
    return {"printed": printed.getvalue(), "end": message}


def main(path, config_dir, out):
    module, config = load_recipe("recipes/grpo_vlm.py"), load_config(path)
    found = {}
    for name, (ranks, options) in CASES.items():
        cfg = recipe_options(module, ["--model", path, *LENGTHS, *options])
        found[name] = planned(cfg, config, ranks)
        if name != "ulysses":  # the ranks of a real group would have to answer
            found[name]["taken"] = taken(path, cfg, ranks)
    found["commands"] = {name: said(*case, config_dir) for name, case in COMMANDS.items()}
    json.dump(found, open(out, "w"))


if __name__ == "__main__":
    main(*sys.argv[1:])
