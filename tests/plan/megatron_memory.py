"""The memory that tiny Megatron models take on a CPU as rank 0 of simulated ranks, what they send, and the plan.

Attention, norms and the output layer are stand-ins that allocate what the kernels of a GPU do.
"""

import gc
import time
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from megatron.core import parallel_state
from sent_bytes import Sent
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlkit.engines import make_engine
from rlkit.engines.megatron import attention, engine, model, vocab_parallel
from rlkit.engines.megatron.supported import ParallelDims
from rlkit.losses import token_mean
from rlkit.plan import megatron, megatron_links
from rlkit.plan.kernels import _Flash, planned_head
from rlkit.plan.recipes import load_recipe
from rlkit.plan.workload import largest_micro_batches, longest_batch, packed_rows

SEQUENCE = {"tensor": 2, "sequence_parallel": True}
CASES = {  # family, ranks, parallelism, recomputed layers, shared prompts
    "dense": ("Qwen3", 1, {}, False, True),
    "unshared": ("Llama", 1, {}, False, False),
    "recomputed": ("Llama", 2, {}, True, True),
    "experts": ("Qwen3Moe", 2, {}, False, True),
    "tensor": ("Qwen3", 2, SEQUENCE, False, True),
    "context": ("Llama", 2, {"context": 2}, False, True),
}


class FusedNorm(torch.autograd.Function):
    """A norm that saves its input and one number per token, as on a GPU."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, _):
        x, weight, _ = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight)


def flash(query, key, value, layout, options):
    if layout.key_indices is not None:
        key, value = (x.index_select(0, layout.key_indices) for x in (key, value))
    return _Flash.apply(query, key, value)


def make_model(family):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128} if "Moe" in family else {}
    head_size = {} if family == "Llama" else {"head_dim": 32}
    config = getattr(transformers, family + "Config")(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=family == "Llama", **experts,
        **head_size,
    )  # fmt: skip
    return getattr(transformers, family + "ForCausalLM")(config)


def planned_and_taken(name):
    """Bytes by kind, planned and taken."""
    family, ranks, parallel, recompute, share = CASES[name]
    cfg = load_recipe("recipes/grpo_vlm.py").Config(
        max_prompt_tokens=256, max_new_tokens=128, prompts_per_step=8 * ranks, group_size=4, micro_batch_tokens=1600,
        share_prompts=share, enable_gradient_checkpointing=recompute, freeze_vision_tower=False,
    )  # fmt: skip
    hf_model = make_model(family)
    dims = ParallelDims(**parallel)
    workload = longest_batch(cfg, hf_model.config, ranks // (dims.tensor * dims.context), None)
    (stage,) = megatron.stage_parameters(hf_model, dims)
    largest = megatron.largest_micro_batch(workload, packed_rows(workload, cfg.micro_batch_tokens, share_prompts=share))
    activations = megatron.activation_bytes(cfg, hf_model.config, dims, largest, 0, workload)
    head = megatron.head_bytes(hf_model.config, dims, largest)
    planned = {**megatron.state_bytes(stage, dims, ranks), "activations": activations + head}
    options = {
        "compute_dtype": torch.bfloat16, "micro_batch_tokens": cfg.micro_batch_tokens, "share_prompts": share,
        "enable_gradient_checkpointing": recompute, "keep_gradients": True,
    }  # fmt: skip
    found = taken(hf_model, workload, {**options, **parallel}, ranks)
    own = replace(workload, prompts=found["rows"] // workload.group_size)
    forwards = 2 if recompute else 1
    tokens = sum(one.tokens(own) for one in packed_rows(own, cfg.micro_batch_tokens, share_prompts=share))
    groups, size = megatron_links.groups(dims, ranks, ranks), megatron.model_size(hf_model, dims, ranks)
    sent = megatron_links.activation_link_bytes(hf_model.config, dims, groups, tokens, forwards=forwards, backwards=1)
    planned["sent"] = (megatron_links.update_link_bytes(size, groups) + sent).machine
    return {"planned": planned, "taken": found}


def taken(hf_model, workload, options, ranks):
    """Bytes of rank 0: state of the engine, the most that a second step adds to it, and what this step sends."""
    with ExitStack() as stack:
        head = stack.enter_context(planned_head())
        stack.enter_context(mock.patch.object(attention, "varlen_attention", flash))
        stack.enter_context(mock.patch.object(model.Norm, "forward", lambda norm, x: FusedNorm.apply(x, norm.weight)))
        stack.enter_context(mock.patch.object(vocab_parallel, "kernels_for", lambda hidden: head))
        stack.enter_context(mock.patch.object(engine, "check_same_rows", lambda *_: None))  # they would have to answer
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        trained = make_engine("megatron", model=hf_model, device="cpu", optimizer=torch.optim.AdamW, **options)
        budget, share = options["micro_batch_tokens"], options["share_prompts"]
        batch = largest_micro_batches(workload, hf_model.config, budget, share_prompts=share)
        trained.train_batch(batch.select([0]), loss)
        gc.collect()
        step = mock.patch.object(trained.distributed_optimizer, "prepare_grads", lambda: ends.append(time.time_ns()))
        ends = []
        with torch.autograd.profiler.profile(profile_memory=True) as profile, step, Sent() as sent:
            trained.train_batch(batch, loss)
        events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
        level = peak = 0
        for at, size in sorted((event.start_ns(), event.nbytes()) for event in events):
            level += size
            peak = max(peak, level) if at <= ends[0] else peak
        optimizer = trained.optimizer
        shards = [x for group in optimizer.param_groups for x in group["params"]]
        found = {
            "parameters": list(trained.model.parameters()),
            "gradients": [x.grad_data for x in trained.module.buffers + trained.module.expert_parallel_buffers],
            "optimizer": [*shards, *(x for state in optimizer.state.values() for x in state.values())],
        }
        storages = {kind: {x.untyped_storage() for x in tensors} for kind, tensors in found.items()}
        state = {kind: sum(x.nbytes() for x in {y.data_ptr(): y for y in of}.values()) for kind, of in storages.items()}
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return {**state, "activations": peak, "sent": sent.bytes, "rows": len(batch)}


def loss(out, mb):
    return token_mean(sum(out.tensors.values()), mb.mask, mb.total_tokens), {}
