"""Run by `test_plan.py`, in a process of its own that has joined no others: plans, and what a real process takes.

on_fake_ranks.py MODEL_DIR CONFIG_DIR OUT_FILE

CONFIG_DIR has the configuration of a model with a large vocabulary, without weights or tokenizer. SmolLM2-135M is
planned and trained, too.
"""

import gc
import io
import json
import sys
import time
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from unittest import mock

import torch
import torch.distributed as dist
from sent_bytes import Sent
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlkit.engines import make_engine, offload
from rlkit.losses import _kernels, token_mean
from rlkit.plan import fake_ranks, rehearsal
from rlkit.plan.__main__ import main as command
from rlkit.plan.fit import make_plan
from rlkit.plan.hardware import gpu_named
from rlkit.plan.recipes import load_recipe, recipe_options, recipe_roles
from rlkit.plan.rehearsal import Roles, local
from rlkit.plan.roofline import Case, training
from rlkit.plan.workload import largest_micro_batches, longest_batch
from rlkit.runs.models import trained_part
from rlkit.vlm import load_model
from rlkit.vlm.loading import load_config, model_path
from rlkit.vlm.pretrained import SMOLLM2

CASES = {  # ranks, options
    "one_rank": (1, []),
    "three_ranks": (3, ["--rollout", "vllm_server", "--servers", "http://a:1"]),
    "two_by_two": (4, ["--parallel", "fsdp_size", "2", "--enable_gradient_checkpointing"]),
    "ulysses": (4, ["--ulysses_sequence_parallel_size", "2"]),
    "lora": (2, ["--lora_rank", "4", "--dtype", "bfloat16", "--sync_adapters", "--rollout", "vllm"]),
    "nf4": (2, ["--lora_rank", "4", "--quantize_base"]),
    "fused": (2, ["--use_fused_kernels", "--dtype", "bfloat16"]),
    "offloaded": (2, ["--offload_between_phases", "--updates_per_batch", "2"]),
    "offloaded_lora": (2, ["--offload_between_phases", "--updates_per_batch", "2", "--lora_rank", "4"]),
}
WITH_REFERENCE = ("one_rank", "lora")
SHORT = ["--max_prompt_tokens", "64", "--max_new_tokens", "64", "--prompts_per_step", "4"]
STAGES = ["--parallel", "tensor", "2", "pipeline", "2"]
TEACHER = ["--teacher", "CONFIG_DIR", "--loss", "jsd"]
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
    "fsdp1": ("grpo_vlm", ["--engine", "fsdp1"]),
    "megatron": ("grpo_vlm", ["--nproc", "4", "--engine", "megatron", *STAGES, *SHORT]),
    "megatron_adapters": ("grpo_vlm", ["--engine", "megatron", "--lora_rank", "4"]),
    "megatron_heads": ("grpo_vlm", ["--nproc", "8", "--engine", "megatron", "--parallel", "tensor", "8", *SHORT]),
    "tiny": ("grpo_vlm", ["--model", "tiny"]),
    "tiny_teacher": ("distill", []),
    "servers": ("distill", [*TEACHER, "--teacher_servers", "http://a:1", "--teacher_top_k", "8", *SHORT]),
    "megatron_teacher": ("distill", ["--engine", "megatron", *TEACHER, *SHORT]),
}  # fmt: skip
LENGTHS = ["--max_prompt_tokens", "96", "--max_new_tokens", "40", "--micro_batch_tokens", "600"]
FEW_TOKENS = ["--max_prompt_tokens", "32", "--max_new_tokens", "48", "--micro_batch_tokens", "160", "--group_size", "4"]


def planned(cfg, config, ranks, *, reference):
    """The plan of a policy, perhaps with a reference; attention and output layer are computed as on a CPU."""
    whole, adapters = reference and not cfg.lora_rank, reference and bool(cfg.lora_rank)
    roles = Roles(policy=config, reference=config if whole else None, adapter_reference=adapters)
    kernels_of_gpus = {"use_planned_attention": mock.DEFAULT, "use_packed_vision_attention": mock.DEFAULT}
    with mock.patch.multiple(rehearsal, **kernels_of_gpus), mock.patch.object(fake_ranks, "planned_head", nullcontext):
        plan = make_plan(cfg, roles, ranks, gpu_named("h100-80gb"), None)
    resident, host = plan.rehearsal.resident, plan.rehearsal.host
    two = replace(plan.rehearsal, micro_batches=plan.rehearsal.micro_batches[:2])
    sent = training("policy", config, Case(cfg, two, ranks, gpus_per_node=8)).link.machine
    found = {"phases": plan.phases, "resident": resident, "host": host, "sampler": plan.sampler.sequences}
    return {**found, "sent": sent, "copied_back": plan.rehearsal.copied_back}


def taken(path, cfg, ranks):
    """Bytes that a process takes as rank 0, whose collectives reach nobody, for three updates on real tensors.

    The peaks are those of torch's CPU allocator, from before the model is loaded on, in the last update.
    """
    gc.collect()  # what an earlier engine frees later would be subtracted
    marks = []
    small_blocks = mock.patch.object(offload, "BLOCK_BYTES", 1 << 16)
    with torch.autograd.profiler.profile(profile_memory=True) as profile, small_blocks:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        engine = make_engine(
            "fsdp2", model=trained_part(cfg, load_model(path, dtype=getattr(torch, cfg.dtype))), device="cpu",
            optimizer=lambda p: torch.optim.AdamW(p, fused=True), compute_dtype=torch.bfloat16,
            micro_batch_tokens=cfg.micro_batch_tokens, offload_between_phases=cfg.offload_between_phases,
            enable_gradient_checkpointing=cfg.enable_gradient_checkpointing, use_fused_kernels=cfg.use_fused_kernels,
            keep_gradients=True, **cfg.parallel,
        )  # fmt: skip
        parameters = list(engine.module.parameters())
        workload = longest_batch(cfg, engine.config, ranks, None)
        batch = largest_micro_batches(workload, engine.config, cfg.micro_batch_tokens, share_prompts=True)
        engine.optimizer.register_step_pre_hook(lambda *_: marks.append(time.time_ns()))
        with Sent() as sent:  # in a first step, after which the optimizer has a state
            engine.train_batch(batch, loss, engine.known_outputs)
        to_host = mock.patch.object(offload, "copy_to_host", wraps=offload.copy_to_host)
        with to_host as copied, engine.keep_on_device():
            engine.train_batch(batch.select([0]), loss, engine.known_outputs)
            marks.append(time.time_ns())
            engine.train_batch(batch, loss, engine.known_outputs)
        with engine._offloaded_weights.on_device(), engine._offloaded_state.on_device():
            found = {
                "parameters": parameters,
                "gradients": [p.grad for p in parameters if p.grad is not None],
                "optimizer": [x for one in engine.optimizer.state.values() for x in one.values()],
            }
            resident = {kind: storage_bytes(local(tensors)) for kind, tensors in found.items()}
            copied_back = sum(call.args[0].nbytes() for call in copied.call_args_list)
        host = engine.host_bytes
        dist.destroy_process_group()
    before_forward, before_step = marks[-2:]
    return {**resident, "host": host, "copied_back": copied_back, "sent": sent.by_call, "peaks": {
        "forward and backward": allocator_peak(profile, before_forward, before_step),
        "optimizer step": allocator_peak(profile, before_step, time.time_ns()),
    }}  # fmt: skip


def loss(out, mb):
    return token_mean(sum(out.tensors.values()), mb.mask, mb.total_tokens), {}


def allocator_peak(profile, begin, end):
    """Most bytes that torch's allocator had given out, between two moments."""
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    total, peak = 0, 0
    for at, size in sorted((event.start_ns(), event.nbytes()) for event in events):
        peak = max(peak, total) if at >= begin else 0
        if at > end:
            break
        total += size
    return max(peak, total) if at <= end else peak


def storage_bytes(tensors):
    """Of all storages; gradients of one FSDP unit share theirs."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def distilled(config_dir):
    """The phases of plans with a teacher, of which the student learns the whole distributions or only the top."""
    module, phases = load_recipe("recipes/distill.py"), {}
    for top_k in (0, 8):
        options = ["--model", config_dir, "--teacher", config_dir, "--loss", "jsd", "--teacher_top_k", str(top_k)]
        cfg = recipe_options(module, [*options, *SHORT])
        phases[top_k] = make_plan(cfg, recipe_roles(module, cfg), 2, gpu_named("h100-80gb"), None).phases
    return phases


def said(recipe, arguments, config_dir):
    """What the command prints, its message, and its exit status."""
    printed, arguments = io.StringIO(), [config_dir if x == "CONFIG_DIR" else x for x in arguments]
    with redirect_stdout(printed):
        try:
            command([f"recipes/{recipe}.py", "--model", config_dir, *arguments])
        except SystemExit as end:
            message = end.code
    return {"printed": printed.getvalue(), "end": message}


def main(path, config_dir, out):
    # the plan is for a GPU, and so are its pieces of logits
    _kernels.CPU_CACHE_BYTES, _kernels.CPU_CHUNK_BYTES = _kernels.PIECE_BYTES, _kernels.CHUNK_BYTES
    module, config = load_recipe("recipes/grpo_vlm.py"), load_config(path)
    found = {}
    for name, (ranks, options) in CASES.items():
        cfg = recipe_options(module, ["--model", path, *LENGTHS, *options])
        found[name] = planned(cfg, config, ranks, reference=name in WITH_REFERENCE)
        if name != "ulysses":  # the ranks of a real group would have to answer
            found[name]["taken"] = taken(path, cfg, ranks)
    cfg = recipe_options(module, ["--model", SMOLLM2, *FEW_TOKENS, "--no_enable_gradient_checkpointing"])
    smollm2 = model_path(SMOLLM2)
    found["smollm2"] = planned(cfg, load_config(smollm2), 2, reference=False)
    found["smollm2"]["taken"] = taken(smollm2, cfg, 2)
    found["distilled"] = distilled(config_dir)
    found["commands"] = {name: said(*case, config_dir) for name, case in COMMANDS.items()}
    if find_spec("megatron") and find_spec("triton"):
        import megatron_memory

        found["megatron"] = {name: megatron_memory.planned_and_taken(name) for name in megatron_memory.CASES}
    json.dump(found, open(out, "w"))


if __name__ == "__main__":
    main(*sys.argv[1:])
