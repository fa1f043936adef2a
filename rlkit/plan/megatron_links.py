"""The communication of the megatron engine: a rank's groups, and the bytes that it receives in each phase of a step."""

from __future__ import annotations

from typing import Any, NamedTuple

from rlkit.engines.megatron.supported import ParallelDims, is_moe
from rlkit.plan.links import Group, LinkBytes, all_gather, all_reduce, all_to_all, group, reduce_scatter, send
from rlkit.plan.megatron import GRADIENT, WEIGHT
from rlkit.plan.rehearsal import ModelSize


class Groups(NamedTuple):
    """A rank's groups. Megatron orders ranks by tensor, context, (expert,) data and pipeline, the first the fastest.

    Attributes:
        data: ranks with the same part of the dense weights, context ranks included.
        expert_data: ranks with the same experts.
    """

    tensor: Group
    context: Group
    expert: Group
    pipeline: Group
    data: Group
    expert_data: Group


def groups(dims: ParallelDims, world: int, gpus_per_node: int) -> Groups:
    """The groups of a rank, among `world` ranks."""
    tensor, pipeline, context, _, expert = dims
    return Groups(
        tensor=group(tensor, 1, gpus_per_node),
        context=group(context, tensor, gpus_per_node),
        expert=group(expert, 1, gpus_per_node),  # tensor ranks have whole experts
        pipeline=group(pipeline, world // pipeline, gpus_per_node),
        data=group(world // (tensor * pipeline), tensor, gpus_per_node),
        expert_data=group(world // (expert * pipeline), expert, gpus_per_node),
    )


def update_link_bytes(size: ModelSize, ranks: Groups) -> LinkBytes:
    """Bytes of an optimizer step: float32 gradients are summed into shards, updated weights gathered in bfloat16."""
    experts = size.trained_experts
    dense = size.trained - experts
    return (
        reduce_scatter(GRADIENT * dense, ranks.data)
        + reduce_scatter(GRADIENT * experts, ranks.expert_data)
        + all_gather(WEIGHT * dense, ranks.data)
        + all_gather(WEIGHT * experts, ranks.expert_data)
    )


def activation_link_bytes(
    config: Any, dims: ParallelDims, ranks: Groups, tokens: float, *, forwards: int, backwards: int
) -> LinkBytes:
    """Bytes of activations, and of their gradients, that a rank of a middle pipeline stage receives.

    For its t tokens, in each layer, with H hidden and K key units:

    - tensor: an all-reduce of t H numbers after attention, and one after a dense MLP, in each pass
    - sequence: an all-gather of t H in backward for each of these, since layers keep only their part of an input
    - context: an all-gather of keys and values, which all ranks need; in backward a reduce-scatter of their gradients
    - expert: an all-to-all of t H to each of the token's experts, and one back from them, in each pass

    A pipeline sends t H numbers to the next stage in the first forward; their gradient to the one before in backward.
    Not counted: activations of the embedding and of the output layer, the sum of the gradients of tied weights between
    the first and the last stage, and metrics.

    Args:
        config: of the transformers model.
        dims, ranks: degrees of parallelism, and the groups.
        tokens: of all micro-batches of a rank, before context ranks share them.
        forwards: how often each layer runs forward.
        backwards: 0 for scoring, 1 for training.
    """
    text, passes = config.get_text_config(), forwards + backwards
    tokens = tokens / dims.context
    hidden = WEIGHT * tokens * text.hidden_size
    sequence_shards = dims.tensor if dims.sequence_parallel else 1
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    keys = WEIGHT * tokens * text.num_key_value_heads * head_size / dims.tensor
    blocks = 1 if is_moe(text) else 2  # attention, and a dense MLP
    layer = blocks * passes * all_reduce(hidden, ranks.tensor)
    if dims.sequence_parallel:
        layer += blocks * backwards * all_gather(hidden, ranks.tensor)
    layer += passes * all_gather(2 * keys * dims.context, ranks.context)
    if is_moe(text):
        routed = text.num_experts_per_tok * hidden / sequence_shards
        layer += passes * 2 * all_to_all(routed, ranks.expert)
    layers = text.num_hidden_layers / dims.pipeline
    neighbours = min(dims.pipeline - 1, 1 + backwards)
    return layers * layer + neighbours * send(hidden / sequence_shards, ranks.pipeline)


def sync_link_bytes(size: ModelSize, dims: ParallelDims, ranks: Groups) -> LinkBytes:
    """Bytes of a weight sync: each stage gathers its matrices and experts, and sends them to all other stages."""
    whole = WEIGHT * size.parameters
    experts = WEIGHT * size.experts * dims.expert
    dense = whole / dims.pipeline - experts
    return all_gather(dense, ranks.tensor) + all_gather(experts, ranks.expert) + all_gather(whole, ranks.pipeline)
