"""Estimates the memory that sampling takes, on trainers' GPUs or on servers: the sampler's weights and its KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rlkit.plan.cache import HALF, cache_bytes
from rlkit.plan.hardware import USABLE, Gpu
from rlkit.plan.rehearsal import Rehearsal
from rlkit.plan.workload import Workload
from rlkit.rollout.hf import cache_bytes_per_token
from rlkit.runs.command_line import option_value
from rlkit.runs.models import DEFAULT_UTILIZATION

NOT_READ = ("kv_cache_dtype", "cpu_offload_gb")  # options of vLLM that save memory, which a plan does not count
SERVER_SHARE = 0.92  # of a GPU's memory; vLLM 0.32's default of gpu_memory_utilization


class Servers(NamedTuple):
    """Sampling servers on GPUs of their own.

    Attributes:
        gpus: number of GPUs of all servers.
        tensor_parallel: number of GPUs of each server.
    """

    gpus: int
    tensor_parallel: int = 1


@dataclass(frozen=True)
class SamplerMemory:
    """Memory of sampling on each trainer's GPU, or on each GPU of the servers.

    Attributes:
        weights, cache: bytes.
        workspace: bytes of vLLM's activations and logits, see `workspace_bytes`.
        sequences: how many an engine decodes at once, at most.
        rows: responses that an engine generates in a step.
        tensor_parallel: number of GPUs of an engine.
        utilization: largest `gpu_memory_utilization` that the trainer beside vLLM leaves room for; otherwise None.
        share: vLLM's `gpu_memory_utilization`; None if `kv_cache_memory_bytes` has precedence.
        servers: whose memory this is; None if it is that of a trainer's GPU.
    """

    weights: int
    cache: int
    sequences: int
    rows: int
    tensor_parallel: int = 1
    utilization: float | None = None
    share: float | None = None
    servers: Servers | None = None
    workspace: int = 0


def sampler_memory(
    cfg: Any, config: Any, rehearsal: Rehearsal, world: int, gpu: Gpu, servers: Servers | None = None
) -> SamplerMemory:
    """Memory of the sampling back end on a GPU that it shares with the trainer, or of servers, if they are known.

    Args:
        cfg: options of the recipe.
        config: configuration of the policy.
        rehearsal: the training step.
        world: number of ranks.
        gpu: the GPU.
        servers: those that sample, on GPUs of the same kind.

    Raises:
        ValueError: vLLM would refuse an option.
    """
    workload, resident = rehearsal.workload, sum(rehearsal.resident.values())
    if cfg.rollout == "hf":  # samples with the trainer's weights, as it computes; the cache may fill the rest
        size = 4 if cfg.compute_dtype == "float32" else HALF
        weights = size * rehearsal.parameters
        row = (workload.prompt + workload.response) * cache_bytes_per_token(config, size)
        free = int((cfg.gpu_memory_utilization or DEFAULT_UTILIZATION) * gpu.memory) - resident - weights
        sequences = max(1, min(workload.sampled_rows, 512, free // row))
        return SamplerMemory(weights, sequences * row, sequences, workload.sampled_rows)
    if cfg.rollout == "vllm":
        options: dict[str, Any] = {name: option_value(text) for name, text in cfg.rollout_options.items()}
        gpus = options.get("tensor_parallel_size", 1)
        if not isinstance(gpus, int) or gpus < 1 or world % gpus:
            raise ValueError(f"tensor_parallel_size: expected a divisor of {world} ranks, got {gpus}")
        rows = -(-workload.sampled_rows * rehearsal.data_parallel_size * gpus // world)
        most = int(100 * (USABLE * gpu.memory - resident) / gpu.memory) / 100
        share = options.get("gpu_memory_utilization") or cfg.gpu_memory_utilization or most
        return vllm_memory(options, config, workload, rehearsal.parameters, rows, gpu, share, utilization=most)
    if servers is not None:
        return server_memory(servers, config, rehearsal, gpu)
    return SamplerMemory(0, 0, workload.sampled_rows, workload.sampled_rows)


def server_memory(servers: Servers, config: Any, rehearsal: Rehearsal, gpu: Gpu) -> SamplerMemory:
    """Memory of each GPU of vLLM servers, which share all responses of a step equally.

    Raises:
        ValueError: the GPUs cannot be split like this.
    """
    if not 1 <= servers.tensor_parallel <= servers.gpus or servers.gpus % servers.tensor_parallel:
        raise ValueError(
            f"server_tensor_parallel: expected a divisor of the {servers.gpus} GPUs of the servers, got "
            f"{servers.tensor_parallel}"
        )
    workload = rehearsal.workload
    tokens = default_tokens(gpu, server=True)
    options = {"tensor_parallel_size": servers.tensor_parallel, "max_num_batched_tokens": tokens}
    rows = -(-workload.sampled_rows * rehearsal.data_parallel_size * servers.tensor_parallel // servers.gpus)
    memory = vllm_memory(options, config, workload, rehearsal.parameters, rows, gpu, SERVER_SHARE)
    return replace(memory, servers=servers)


def vllm_memory(
    options: Mapping[str, Any],
    config: Any,
    workload: Workload,
    parameters: int,
    rows: int,
    gpu: Gpu,
    share: float,
    *,
    utilization: float | None = None,
) -> SamplerMemory:
    """Memory of a vLLM engine on each of its GPUs.

    Args:
        options: of `vllm.LLM`. Those that are read are tensor_parallel_size, quantization (fp8; other kinds count as 16
            bits), max_num_seqs, max_num_batched_tokens, max_model_len, and kv_cache_memory_bytes, with which vLLM
            ignores its share of the GPU.
        config: configuration of the policy.
        workload: rows of one rank.
        parameters: number of parameters of the policy.
        rows: responses that the engine generates in a step.
        gpu: the GPU.
        share: of the GPU's memory, for weights, workspace and cache together.
        utilization: largest `gpu_memory_utilization` that is possible.

    Raises:
        ValueError: vLLM cannot split the model like this, `max_model_len` is shorter than the rows, or
            `kv_cache_memory_bytes` is no number.
    """
    gpus, heads = options.get("tensor_parallel_size", 1), config.get_text_config().num_attention_heads
    if heads % gpus:
        raise ValueError(f"tensor_parallel_size: expected a divisor of the {heads} attention heads, got {gpus}")
    row = workload.prompt + workload.response
    longest = options.get("max_model_len") or row
    if longest < row:
        raise ValueError(f"max_model_len: expected at least the {row} tokens of prompt and response, got {longest}")
    weights = weight_bytes(config, parameters, options.get("quantization")) // gpus
    most = options.get("max_num_seqs") or default_sequences(gpu)
    workspace = workspace_bytes(config, options.get("max_num_batched_tokens") or default_tokens(gpu), most, gpus)
    fixed = options.get("kv_cache_memory_bytes") or 0
    if not isinstance(fixed, int | float) or fixed < 0:
        raise ValueError(f"kv_cache_memory_bytes: expected a number of bytes, got {fixed}")
    cache = int(fixed) or max(0, int(share * gpu.memory) - weights - workspace)
    has_room = cache >= sequence_bytes(config, longest, gpus)  # for the longest sequence, without which vLLM ends
    sequences = min(most, cache // sequence_bytes(config, row, gpus)) if has_room else 0
    used = None if fixed else share
    return SamplerMemory(weights, cache, sequences, rows, gpus, utilization, share=used, workspace=workspace)


def weight_bytes(config: Any, parameters: int, quantization: str | None) -> int:
    """Bytes of a vLLM engine's weights, on all of its GPUs. With fp8, embeddings and output layer keep 16 bits."""
    if quantization != "fp8":
        return HALF * parameters
    text = config.get_text_config()
    matrices = 1 if config.tie_word_embeddings else 2
    return parameters + matrices * text.vocab_size * text.hidden_size


def sequence_bytes(config: Any, tokens: int, gpus: int) -> int:
    """Bytes of vLLM's cache for a sequence on each GPU of an engine.

    Each GPU has a part of the key-value heads, at least one; if layers differ, all are counted like the one with the
    fewest. The latent vectors of latent attention are on all GPUs.
    """
    text = config.get_text_config()
    heads = min(_key_value_heads(text.per_layer_config[i]) for i in range(text.num_hidden_layers))
    parts = 1 if getattr(text, "kv_lora_rank", None) else min(gpus, heads)
    return -(-cache_bytes(config, tokens) // parts)


def workspace_bytes(config: Any, tokens: int, sequences: int, gpus: int) -> int:
    """Bytes that a vLLM engine takes on each GPU beside weights and cache: the larger of

    - the activations of the widest layer for `tokens` tokens of prompts, 2 bytes times
      (2 H + max(2 Q + 2 K, 3 I) / gpus) for each: the hidden states and their residual; queries, keys, values and
      attention's output, or both halves of the gated layer and their product. I counts all experts of a token.
    - the logits of `sequences` tokens, 14 bytes for each token of the vocabulary: in 16 bits, and in float32 as logits,
      probabilities and log-probabilities.

    What vLLM measures when it starts is not this exactly: kernels differ, and an encoder of images runs, too.

    Args:
        config: configuration of the policy.
        tokens: `max_num_batched_tokens`.
        sequences: `max_num_seqs`.
        gpus: number of GPUs of the engine.
    """
    text = config.get_text_config()
    widest = max(_layer_numbers(text.per_layer_config[i]) for i in range(text.num_hidden_layers))
    activations = HALF * tokens * (2 * text.hidden_size + widest // gpus)
    logits = min(sequences, tokens) * text.vocab_size * (HALF + 3 * 4)
    return max(activations, logits)


def _layer_numbers(layer: Any) -> int:
    """max(2 Q + 2 K, 3 I): numbers of a token inside of a layer with this configuration."""
    heads = layer.num_attention_heads
    size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return max(2 * (heads + _key_value_heads(layer)) * size, 3 * _inner_size(layer))


def _key_value_heads(layer: Any) -> int:
    return getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads


def _inner_size(layer: Any) -> int:
    """Neurons that a token goes through: of a dense MLP, or of all its experts if these have more."""
    dense = _largest(getattr(layer, "intermediate_size", None) or 4 * layer.hidden_size)
    expert = _largest(getattr(layer, "moe_intermediate_size", None) or dense)
    return max(dense, (getattr(layer, "num_experts_per_tok", None) or 1) * expert)


def _largest(sizes: Any) -> int:
    """The size itself, or the largest of a list: of layers in Gemma 3n, of experts of text and images in ERNIE 4.5."""
    return max(sizes) if isinstance(sizes, list | tuple) else sizes


def is_large(gpu: Gpu) -> bool:
    """Whether vLLM 0.32 has the defaults of an H100 for this GPU."""
    return gpu.memory >= 70 * 2**30 and "a100" not in gpu.name.lower()


def default_sequences(gpu: Gpu) -> int:
    """vLLM 0.32's default of `max_num_seqs`."""
    return 1024 if is_large(gpu) else 256


def default_tokens(gpu: Gpu, *, server: bool = False) -> int:
    """vLLM 0.32's default of `max_num_batched_tokens`."""
    if server:
        return 8192 if is_large(gpu) else 2048
    return 16384 if is_large(gpu) else 8192
