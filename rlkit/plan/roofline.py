"""Roofline estimate of a step's duration. Each phase takes

    max(FLOPs / peak FLOP/s, bytes of memory / memory bandwidth, bytes of links / link bandwidth,
        bytes of the network / network bandwidth, bytes to and from the host / host bandwidth)

seconds. This is a lower bound: it assumes that compute, memory, communication and copies to and from the host overlap
completely and run at the speed of the data sheet. A compute-bound phase at 40 % MFU takes two and a half times as long.

In the formulas, a rank has n micro-batches. F is the number of FLOPs of a forward pass over all of them
(`rlkit.engines.flops`), W the bytes of the weights that it reads in one pass, R those outside of the layers, which
FSDP gathers once for forward and backward, T the number of weights that it trains, and O the number of those whose
optimizer state it has. What a collective puts on each link is in `rlkit.plan.links`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlkit.engines.flops import forward_flops
from rlkit.engines.megatron.supported import ParallelDims
from rlkit.plan import megatron_links
from rlkit.plan.cache import HALF
from rlkit.plan.hardware import NETWORK_BANDWIDTH, Gpu
from rlkit.plan.links import Group, LinkBytes, all_gather, all_reduce, group, reduce_scatter
from rlkit.plan.rehearsal import Rehearsal, Roles
from rlkit.plan.sampler import SamplerMemory, sequence_bytes
from rlkit.plan.workload import Workload, optimizer_steps, passes, samples_to_train
from rlkit.runs.options import sends_adapters

GRADIENT = 4  # bytes of a gradient that is summed over ranks: float32
ADAMW = 28  # bytes of memory for a weight in a step: weight, gradient and two moments are read, all but one written


@dataclass(frozen=True)
class Cost:
    """Cost of one phase on one rank.

    Attributes:
        flops: floating-point operations.
        memory: bytes read from and written to the GPU's memory.
        link: bytes received from other GPUs.
        host: bytes copied from host memory and to it, which never happens at the same time.
    """

    flops: float = 0.0
    memory: float = 0.0
    link: LinkBytes = LinkBytes()
    host: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops, self.memory + other.memory, self.link + other.link, self.host + other.host
        )

    def __rmul__(self, factor: float) -> Cost:
        return Cost(factor * self.flops, factor * self.memory, factor * self.link, factor * self.host)

    def seconds(self, gpu: Gpu) -> dict[str, float]:
        """Seconds that compute, memory traffic, communication and copies to the host would each take alone."""
        return {
            "compute": self.flops / gpu.flops,
            "memory": self.memory / gpu.memory_bandwidth,
            "link": self.link.machine / gpu.link_bandwidth,
            "network": self.link.network / NETWORK_BANDWIDTH,
            "host": self.host / gpu.host_bandwidth,
        }


@dataclass(frozen=True)
class Case:
    """What the costs of all phases depend on.

    Attributes:
        cfg: options of the recipe.
        rehearsal: rows and models of a rank.
        world: number of ranks.
        gpus_per_node: ranks of a machine.
    """

    cfg: Any
    rehearsal: Rehearsal
    world: int
    gpus_per_node: int


def costs(
    cfg: Any, roles: Roles, rehearsal: Rehearsal, sampler: SamplerMemory, world: int, gpus_per_node: int
) -> dict[str, Cost]:
    """The cost of each phase of a step on one rank.

    With a critic, several optimizer steps on a batch, or a KL in the reward, the policy scores all rows before the
    first optimizer step ("old logprobs"), and so does the critic ("values"). KTO's policy and reference score the
    responses to other prompts ("baseline"), which take less memory than training. Responses and weights for evaluations
    are no part of a step.

    Args:
        cfg: options of the recipe.
        roles: models of the recipe.
        rehearsal, sampler: memory in the plan.
        world: number of ranks.
        gpus_per_node: ranks of a machine.
    """
    case = Case(cfg, rehearsal, world, gpus_per_node)
    phases = {}
    samples, has_both = samples_to_train(cfg), roles.policy is not None and roles.critic is not None
    if samples and cfg.max_new_tokens:
        phases["generate"] = generation(cfg, roles.policy, rehearsal, sampler)
    if has_both or roles.kl_in_reward or optimizer_steps(cfg) > 1:
        phases["old logprobs"] = scoring("policy", roles.policy, case)
    if roles.adapter_reference:
        phases["reference"] = scoring("policy", roles.policy, case)
    elif roles.reference is not None:
        phases["reference"] = scoring("reference", roles.reference, case)
    if getattr(cfg, "baseline", False):
        phases["baseline"] = scoring("policy", roles.policy, case)
        if "reference" in phases:
            phases["baseline"] += phases["reference"]
    if has_both:
        phases["values"] = scoring("critic", roles.critic, case)
    phases["train"] = Cost(host=rehearsal.host + rehearsal.copied_back)  # to the GPU and back, at least once
    for role, config in (("policy", roles.policy), ("critic", roles.critic)):
        if config is not None:
            phases["train"] += training(role, config, case)
    if samples:
        phases["weight sync"] = weight_sync(sampler, case)
    return phases


def generation(cfg: Any, config: Any, rehearsal: Rehearsal, sampler: SamplerMemory) -> Cost:
    """Prefill of each prompt once, then decoding: with A tokens for each of N responses, of which S are decoded at
    once,

        FLOPs   F, with the prompt of each group computed once
        memory  ceil(N / S) A W + N A cache:  one read of the weights for S tokens, one of the cache for each token

    The cache is that of a half-written response. The GPUs of a vLLM engine share its work equally; what they send each
    other is not counted. For servers whose number is not given it assumes one sampling GPU per rank, of the same kind,
    with room for all responses.
    """
    workload, gpus = rehearsal.workload, sampler.tensor_parallel
    sequences = max(1, min(sampler.rows, sampler.sequences))
    rounds = -(-sampler.rows // sequences)
    tokens = min(workload.response, getattr(cfg, "max_turns", 1) * cfg.max_new_tokens)  # a tool may write the others
    cache = sequence_bytes(config, workload.prompt + workload.response // 2, gpus)
    weights = sampler.weights or HALF * rehearsal.models["policy"].parameters
    flops = rows_flops(config, workload, workload.prompts) * sampler.rows / workload.rows / gpus
    return Cost(flops, rounds * tokens * weights + sampler.rows * tokens * cache)


def scoring(role: str, config: Any, case: Case) -> Cost:
    """One forward pass over all rows.

        FLOPs   F
        memory  n W
        links   fsdp2: an all-gather of n (W - R) + R, and all-reduces of tensor-parallel ranks;  megatron: of
                activations

    Args:
        role: of the model: policy, critic or reference.
        config: its configuration.
        case: options, rows and ranks.
    """
    n, size = len(case.rehearsal.micro_batches), case.rehearsal.models[role]
    if case.cfg.engine == "megatron":
        link = _activations(config, case, forwards=1, backwards=0)
    else:
        shard, _ = fsdp_groups(case)
        link = all_gather(n * (size.weights - size.root) + size.root, shard)
        link += _tensor_activations(config, case, forwards=1, backwards=0)
    return Cost(_rank_flops(role, config, case), n * size.weights, link)


def training(role: str, config: Any, case: Case) -> Cost:
    """All optimizer steps of a model on the rows of a rank. For each pass over the rows:

        FLOPs   (1 + 2) F, or (1 + 1) F if only adapters are trained; F more with gradient checkpointing;
                one F for a vision tower that is frozen, as it is below adapters
        memory  n (2 W + 2 T); n W more with gradient checkpointing
        links   fsdp2: an all-gather of n (2 W - R), a reduce-scatter of the float32 gradients 4 n T, and between the
                replicas of hybrid sharding an all-reduce of their shards; all-reduces of tensor-parallel ranks;
                megatron: activations

    Weights are read for forward and backward, and gradients written in 16 bits. A mini-batch has at least one
    micro-batch. For each optimizer step, of which a pass has one for each mini-batch:

        memory  28 O: AdamW reads and writes its shard of the state
        links   megatron: the gradients and the updated weights
    """
    cfg, rehearsal = case.cfg, case.rehearsal
    size, recomputes = rehearsal.models[role], bool(cfg.enable_gradient_checkpointing)
    n, steps = max(len(rehearsal.micro_batches), optimizer_steps(cfg) // passes(cfg)), optimizer_steps(cfg)
    forwards_and_backwards = 1 + (1 if cfg.lora_rank else 2) + recomputes
    flops = forwards_and_backwards * _rank_flops(role, config, case)
    if cfg.lora_rank or cfg.freeze_vision_tower:
        flops -= (forwards_and_backwards - 1) * _tower_flops(config, case)
    memory = n * ((2 + recomputes) * size.weights + HALF * size.trained)
    if cfg.engine == "megatron":
        link = _activations(config, case, forwards=1 + recomputes, backwards=1)
        step_link = megatron_links.update_link_bytes(size, _megatron_groups(case))
    else:
        shard, replicas = fsdp_groups(case)
        link = all_gather(n * (2 * size.weights - size.root), shard)
        link += reduce_scatter(n * GRADIENT * size.trained, shard)
        link += all_reduce(n * GRADIENT * size.trained / shard.size, replicas)
        link += _tensor_activations(config, case, forwards=1 + recomputes, backwards=1)
        step_link = LinkBytes()
    pass_over_rows, step = Cost(flops, memory, link), Cost(memory=ADAMW * size.owned, link=step_link)
    return passes(cfg) * pass_over_rows + steps * step


def weight_sync(sampler: SamplerMemory, case: Case) -> Cost:
    """Gathering of the trained weights, or of their adapters alone, for the sampler; with G bytes of them,

        memory  2 G
        links   fsdp2: an all-gather of G, also between tensor-parallel ranks;
                megatron: see `rlkit.plan.megatron_links.sync_link_bytes`
        host    twice vLLM's base model if it sleeps while the trainer works and is sent adapters alone

    What is sent on to servers is not counted.
    """
    cfg, models = case.cfg, case.rehearsal.models
    size, adapters = models.get("policy") or models["critic"], sends_adapters(cfg)
    if cfg.engine == "megatron":
        link = megatron_links.sync_link_bytes(size, ParallelDims(**cfg.parallel), _megatron_groups(case))
        return Cost(memory=2 * HALF * size.parameters, link=link)
    gathered = HALF * size.trained if adapters else size.weights
    sleeps = adapters and cfg.rollout == "vllm"
    shard, _ = fsdp_groups(case)
    link, tensor = all_gather(gathered, shard), group(cfg.parallel.get("tensor", 1), 1, case.gpus_per_node)
    if tensor.size > 1:  # which have the other parts of the matrices that they share
        shared = (HALF * size.parameters - gathered) * tensor.size / (tensor.size - 1)
        link, gathered = link + all_gather(shared, tensor), HALF * size.parameters
    return Cost(memory=2 * gathered, link=link, host=2 * sampler.weights if sleeps else 0)


def fsdp_groups(case: Case) -> tuple[Group, Group]:
    """The ranks that shard a model, and those that have the same shard of its replicas (`--parallel fsdp_size`).

    Tensor-parallel ranks are neighbours, and each of them shards its part of the model with every `tensor`-th rank.
    """
    world, gpus_per_node, tensor = case.world, case.gpus_per_node, case.cfg.parallel.get("tensor", 1)
    size = case.cfg.parallel.get("fsdp_size", world // tensor)
    return group(size, tensor, gpus_per_node), group(world // (tensor * size), size, gpus_per_node)


def rows_flops(config: Any, workload: Workload, prompts: int, *, head: bool = True) -> int:
    """FLOPs of one forward pass over all rows of a rank.

    Args:
        config: of the model.
        workload: the rows.
        prompts: how many prompts are computed, with their images; more than there are if rows do not share them.
        head: False for a value head.
    """
    patches = workload.image_patches(config)
    prompt = forward_flops(config, [(workload.prompt, 0)], 0, [patches] if patches else [])
    response = forward_flops(config, [(workload.response, workload.prompt)], workload.response if head else 0)
    return prompts * prompt + workload.rows * response


def _rank_flops(role: str, config: Any, case: Case) -> float:
    """F: model-parallel ranks share the work equally.

    With fsdp2 each of them encodes all images, and tensor-parallel ranks each compute the whole output layer.
    """
    rehearsal = case.rehearsal
    prompts = sum(packed.prompts for packed in rehearsal.micro_batches)
    flops = rows_flops(config, rehearsal.workload, prompts, head=role != "critic")
    not_shared = 0.0
    if case.cfg.engine == "fsdp2":
        not_shared = _tower_flops(config, case)
        if "tensor" in case.cfg.parallel:
            not_shared += flops - rows_flops(config, rehearsal.workload, prompts, head=False)
    return not_shared + (flops - not_shared) * rehearsal.data_parallel_size / case.world


def _tower_flops(config: Any, case: Case) -> float:
    """The part of F for the images."""
    rehearsal = case.rehearsal
    patches = rehearsal.workload.image_patches(config)
    prompts = sum(packed.prompts for packed in rehearsal.micro_batches)
    flops = forward_flops(config, [], 0, [patches] * prompts) if patches else 0
    return flops * (1 if case.cfg.engine == "fsdp2" else rehearsal.data_parallel_size / case.world)


def _tensor_activations(config: Any, case: Case, *, forwards: int, backwards: int) -> LinkBytes:
    """All-reduces of fsdp2's tensor-parallel ranks: t H numbers after each matrix that is split by rows in a forward
    pass, and before each one that is split by columns in a backward pass; in most families 2 and 5 in a layer."""
    size = case.cfg.parallel.get("tensor", 1)
    if size == 1:
        return LinkBytes()
    text, rehearsal = config.get_text_config(), case.rehearsal
    styles = [style for name, style in text.base_model_tp_plan.items() if name.startswith("layers.")]
    times = forwards * styles.count("rowwise") + backwards * styles.count("colwise")
    tokens = sum(packed.tokens(rehearsal.workload) for packed in rehearsal.micro_batches)
    ranks = group(size, 1, case.gpus_per_node)
    return text.num_hidden_layers * times * all_reduce(HALF * tokens * text.hidden_size, ranks)


def _megatron_groups(case: Case) -> megatron_links.Groups:
    return megatron_links.groups(ParallelDims(**case.cfg.parallel), case.world, case.gpus_per_node)


def _activations(config: Any, case: Case, *, forwards: int, backwards: int) -> LinkBytes:
    """Megatron's activations and their gradients, of all micro-batches."""
    dims, rehearsal = ParallelDims(**case.cfg.parallel), case.rehearsal
    tokens = sum(packed.tokens(rehearsal.workload) for packed in rehearsal.micro_batches)
    ranks = _megatron_groups(case)
    return megatron_links.activation_link_bytes(config, dims, ranks, tokens, forwards=forwards, backwards=backwards)
