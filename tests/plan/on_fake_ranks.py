"""Run by `test_plan.py`, in a process of its own that has joined no others: plans, and what a real process takes.

on_fake_ranks.py MODEL_DIR CONFIG_DIR SMOLLM2_DIR OUT_FILE

CONFIG_DIR and SMOLLM2_DIR have configurations, without weights or tokenizer: of a model with a large vocabulary, and of
a model that is trained, too.
"""

import gc
import io
import json
import sys
import time
from collections import deque
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from unittest import mock

import torch
import torch.distributed as dist
from sent_bytes import Sent
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from rlkit.engines import distributed, make_engine, offload
from rlkit.engines.distributed import BUCKET_BYTES
from rlkit.engines.fsdp import fsdp2
from rlkit.engines.value_head import load_value_model
from rlkit.losses import _kernels, token_mean
from rlkit.plan import fake_ranks, rehearsal
from rlkit.plan.__main__ import main as command
from rlkit.plan.fit import make_plan
from rlkit.plan.hardware import gpu_named
from rlkit.plan.recipes import load_recipe, recipe_options, recipe_roles
from rlkit.plan.rehearsal import Roles, local
from rlkit.plan.roofline import Case, training
from rlkit.plan.workload import largest_micro_batches, longest_batch
from rlkit.rollout.servers.weight_transfer import buckets
from rlkit.runs.models import freeze_parts, trained_part
from rlkit.runs.options import sends_adapters
from rlkit.vlm import load_model
from rlkit.vlm.loading import load_config

CASES = {  # ranks, models beside the policy, options
    "one_rank": (1, ("reference",), []),
    "three_ranks": (3, (), ["--rollout", "vllm_server", "--servers", "http://a:1"]),
    "two_by_two": (4, (), ["--parallel", "fsdp_size", "2", "--enable_gradient_checkpointing", "--rollout", "vllm"]),
    "ulysses": (4, (), ["--ulysses_sequence_parallel_size", "2"]),
    "tensor": (4, ("reference",), ["--parallel", "tensor", "2", "--rollout", "vllm"]),
    "lora": (2, ("reference",), ["--lora_rank", "4", "--dtype", "bfloat16", "--sync_adapters", "--rollout", "vllm"]),
    "nf4": (2, (), ["--lora_rank", "4", "--quantize_base"]),
    "fused": (2, ("reference",), ["--use_fused_kernels", "--dtype", "bfloat16"]),
    "critic": (2, ("critic",), []),
    "frozen_tower": (2, ("reference",), ["--freeze_vision_tower"]),
    "offloaded": (2, (), ["--offload_between_phases", "--ppo_epochs", "2"]),
    "offloaded_lora": (2, (), ["--offload_between_phases", "--ppo_epochs", "2", "--lora_rank", "4"]),
}
SHORT = ["--max_prompt_tokens", "64", "--max_new_tokens", "64", "--prompts_per_step", "4"]
STAGES = ["--parallel", "tensor", "2", "pipeline", "2"]
TEACHER = ["--teacher", "CONFIG_DIR", "--loss", "jsd"]
COMMANDS = {  # recipe, arguments
    "fits": ("grpo_vlm", ["--nproc", "2", "--gpu", "l4-24gb", *SHORT]),
    "too_large": ("sft", [
        "--gpu", "l4-24gb", "--gpu_memory", "7", "--max_tokens", "2048", "--max_new_tokens", "0",
        "--no_enable_gradient_checkpointing", "--micro_batch_tokens", "8192",
    ]),
    "weights_too_large": ("grpo_vlm", ["--gpu", "x", "--gpu_memory", "0.009", *SHORT]),
    "nothing_left_to_save": ("grpo_vlm", [
        "--gpu", "x", "--gpu_memory", "0.03", "--use_fused_kernels", "--offload_between_phases", "--micro_batch_tokens",
        "128", "--lora_rank", "8", "--dtype", "bfloat16", "--quantize_base", *SHORT,
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
LENGTHS = ["--max_prompt_tokens", "96", "--max_new_tokens", "60", "--micro_batch_tokens", "400", "--group_size", "4"]
FEW_TOKENS = ["--max_prompt_tokens", "32", "--max_new_tokens", "48", "--micro_batch_tokens", "160", "--group_size", "4"]


def planned(cfg, roles, ranks):
    """The plan of these models; attention and output layer are computed as on a CPU."""
    kernels_of_gpus = {"use_planned_attention": mock.DEFAULT, "use_packed_vision_attention": mock.DEFAULT}
    with mock.patch.multiple(rehearsal, **kernels_of_gpus), mock.patch.object(fake_ranks, "planned_head", nullcontext):
        plan = make_plan(cfg, roles, ranks, gpu_named("h100-80gb"), None)
    resident, host = plan.rehearsal.resident, plan.rehearsal.host
    two = replace(plan.rehearsal, micro_batches=plan.rehearsal.micro_batches[:2])
    sent = training("policy", roles.policy, Case(cfg, two, ranks, gpus_per_node=8)).link.machine
    found = {"phases": plan.phases, "resident": resident, "host": host, "sampler": plan.sampler.sequences}
    return {**found, "sent": sent, "copied_back": plan.rehearsal.copied_back}


def planned_and_taken(cfg, ranks, beside):
    """The plan, and what a process takes, of a policy with these models beside it."""
    config = load_config(cfg.model)
    reference = "reference" in beside
    roles = Roles(
        policy=config,
        critic=config if "critic" in beside else None,
        reference=config if reference and not cfg.lora_rank else None,
        adapter_reference=reference and bool(cfg.lora_rank),
    )
    return {**planned(cfg, roles, ranks), "taken": taken(cfg, roles, ranks)}


def make_engines(cfg, roles):
    """The engines of these models, by role, as a recipe makes them on a GPU."""
    path, dtype = cfg.model, getattr(torch, cfg.dtype)
    shared = {
        "device": "cpu", "compute_dtype": torch.bfloat16, "micro_batch_tokens": cfg.micro_batch_tokens,
        "offload_between_phases": cfg.offload_between_phases, "use_fused_kernels": cfg.use_fused_kernels,
        "ulysses_sequence_parallel_size": cfg.ulysses_sequence_parallel_size, **cfg.parallel,
    }  # fmt: skip
    trains = {
        "optimizer": lambda p: torch.optim.AdamW(p, fused=True),
        "enable_gradient_checkpointing": cfg.enable_gradient_checkpointing,
    }
    engines = {}
    if roles.reference is not None:
        model = load_model(path, dtype=roles.reference.dtype or dtype)
        freeze_parts(cfg, model)
        engines["reference"] = make_engine(cfg.engine, model=model, only_scores=True, **shared)
        engines["reference"].module.requires_grad_(False)
    model = trained_part(cfg, load_model(path, dtype=dtype))
    engines["policy"] = make_engine(cfg.engine, model=model, **shared, **trains)
    if roles.critic is not None:
        model = trained_part(cfg, load_value_model(path, dtype=dtype), head=True)
        engines["critic"] = make_engine(cfg.engine, "value_model", model=model, **shared, **trains)
    return engines


def taken(cfg, roles, ranks):
    """Bytes that a process takes as rank 0, whose collectives reach nobody, for three updates on real tensors.

    The peaks are those of torch's CPU allocator, from before the models are loaded on, in the last update.
    """
    gc.collect()  # what an earlier engine frees later would be subtracted
    begins, gradients = [], {}  # (phase, when it began), bytes by role
    with ExitStack() as stack:
        profile = stack.enter_context(torch.autograd.profiler.profile(profile_memory=True))
        stack.enter_context(mock.patch.object(offload, "BLOCK_BYTES", 1 << 16))
        # as on a GPU; and ranks that do not exist cannot say that they have the same rows
        stack.enter_context(mock.patch.object(distributed, "GATHER_BY_BROADCAST", ()))
        stack.enter_context(mock.patch.object(fsdp2, "make_model_parallel_group", lambda *_: None))
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        stack.callback(dist.destroy_process_group)

        def begin(phase):
            begins.append((phase, time.time_ns()))

        begin("made")
        engines = make_engines(cfg, roles)
        trained = [(role, engines[role]) for role in ("critic", "policy") if role in engines]
        for role, engine in trained:

            def before_step(*_, role=role, engine=engine):
                found = [p.grad for p in engine.module.parameters() if p.grad is not None]
                gradients[role] = storage_bytes(local(found))
                begin(f"{PREFIXES[role]}optimizer step")

            engine.optimizer.register_step_pre_hook(before_step)
        policy = engines["policy"]
        workload = longest_batch(cfg, policy.config, policy.data_parallel_size, None)
        batch = largest_micro_batches(workload, policy.config, cfg.micro_batch_tokens, share_prompts=True)

        def train(role, rows):
            begin(f"{PREFIXES[role]}forward and backward")
            engines[role].train_batch(rows, loss, engines[role].known_outputs)
            begin("trained")

        for role, _ in trained:
            with Sent() as sent:  # in a first step, after which the optimizer has a state; the policy's is the last
                train(role, batch)
        begin("reference")
        if "reference" in engines:
            engines["reference"].infer_batch(batch)
        elif roles.adapter_reference:
            with policy.disable_adapter():
                policy.infer_batch(batch)
        with mock.patch.object(offload, "copy_to_host", wraps=offload.copy_to_host) as copied:
            for role, engine in trained:
                with engine.keep_on_device():
                    train(role, batch.select([0]))
                    train(role, batch)
        begin("weight sync")
        send_weights(policy, cfg)
        begin("end")
        found = {"parameters": 0, "optimizer": 0}
        for _, engine in trained:
            with engine._offloaded_weights.on_device(), engine._offloaded_state.on_device():
                state = [x for one in engine.optimizer.state.values() for x in one.values()]
                found["parameters"] += storage_bytes(local(engine.module.parameters()))
                found["optimizer"] += storage_bytes(local(state))
                copied_back = sum(call.args[0].nbytes() for call in copied.call_args_list)
        host = policy.host_bytes
    peaks = allocator_peaks(profile, begins)
    found |= {"gradients": gradients, "host": host, "copied_back": copied_back}
    return {**found, "sent": sent.by_call, "peaks": peaks}


PREFIXES = {"policy": "", "critic": "critic: "}


def send_weights(engine, cfg):
    """As the sampling back ends take them."""
    if sends_adapters(cfg):
        adapters = dict(engine.get_adapter(dtype=torch.bfloat16)[1])
        del adapters
    elif cfg.rollout == "vllm_server":
        for bucket in buckets(engine.get_per_tensor_param(dtype=torch.bfloat16), BUCKET_BYTES):
            sent = bucket  # while the next one is gathered
            del bucket
        del sent
    elif cfg.rollout == "vllm":
        for weight in engine.get_per_tensor_param(dtype=torch.bfloat16):
            del weight
    else:
        with engine.gathered():
            pass


def loss(out, mb):
    return token_mean(sum(out.tensors.values()), mb.mask, mb.total_tokens), {}


def allocator_peaks(profile, begins):
    """Most bytes that torch's allocator had given out in each phase; of a phase that came twice, the second time.

    Args:
        begins: (phase, when it began), in their order.
    """
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    changes = deque(sorted((event.start_ns(), event.nbytes()) for event in events))
    total, peaks = 0, {}
    for (phase, _), until in zip(begins, [*(at for _, at in begins[1:]), float("inf")], strict=True):
        peak = total
        while changes and changes[0][0] <= until:
            total += changes.popleft()[1]
            peak = max(peak, total)
        peaks[phase] = peak
    return peaks


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


def use_pieces_of_gpus():
    """The plan is for a GPU, and so are its pieces of logits."""
    _kernels.CPU_CACHE_BYTES, _kernels.CPU_CHUNK_BYTES = _kernels.PIECE_BYTES, _kernels.CHUNK_BYTES


def main(path, config_dir, smollm2_dir, out):
    use_pieces_of_gpus()
    module, found = load_recipe("recipes/grpo_vlm.py"), {}
    for name, (ranks, beside, options) in CASES.items():
        cfg = recipe_options(module, ["--model", path, *LENGTHS, *options])
        found[name] = planned_and_taken(cfg, ranks, beside)
    AutoModelForCausalLM.from_config(load_config(smollm2_dir)).save_pretrained(smollm2_dir)
    options = ["--model", smollm2_dir, *FEW_TOKENS, "--no_enable_gradient_checkpointing"]
    found["smollm2"] = planned_and_taken(recipe_options(module, options), 2, ())
    found["distilled"] = distilled(config_dir)
    found["commands"] = {name: said(*case, config_dir) for name, case in COMMANDS.items()}
    if find_spec("megatron") and find_spec("triton"):
        import megatron_memory

        found["megatron"] = {name: megatron_memory.planned_and_taken(name) for name in megatron_memory.CASES}
    json.dump(found, open(out, "w"))


if __name__ == "__main__":
    main(*sys.argv[1:])
