"""A Megatron-Core model with the shape of a transformers one: what is supported, its config, its layers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from rlkit.engines.megatron.attention import PackedAttention
from rlkit.engines.packing.attention import use_packed_tower
from rlkit.vlm.routers import ChosenExperts, check_numbers

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama", "qwen2_5_vl")


class Split(NamedTuple):
    """Degrees of parallelism; the rest of the ranks are data-parallel."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    sequence_parallel: bool = False
    expert: int = 1


def check(config: Any, split: Split, world: int) -> None:
    """Raise a ValueError that says why a model, or a split of it over so many ranks, is not possible."""
    tensor, pipeline, context, sequence_parallel, expert = split
    if config.model_type not in FAMILIES:
        raise ValueError(f"model: {', '.join(FAMILIES)} expected, came {config.model_type}; use the fsdp2 engine")
    config = config.get_text_config()
    obstacles = {
        "attention_bias": getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "sliding windows": "sliding_attention" in (getattr(config, "layer_types", None) or ()),
        "attention_dropout": config.attention_dropout,
        "mlp_only_layers": getattr(config, "mlp_only_layers", None),
        "decoder_sparse_step": getattr(config, "decoder_sparse_step", 1) != 1,
        f"hidden_act {config.hidden_act!r}": config.hidden_act != "silu",
        f"rope_type {_rope_type(config)!r}": _rope_type(config) not in ("default", "linear", "llama3"),
    }
    if found := [name for name, there in obstacles.items() if there]:
        raise ValueError(f"model: {config.model_type} with {', '.join(found)} is not supported; use the fsdp2 engine")
    for name, size in (("tensor", tensor), ("pipeline", pipeline), ("context", context), ("expert", expert)):
        if size < 1:
            raise ValueError(f"{name}: at least 1 expected, came {size}")
    parts = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
    }
    if not is_moe(config):
        parts["neurons of the MLP"] = config.intermediate_size
    for name, count in parts.items():
        if count % tensor:
            raise ValueError(f"tensor: a divisor of the {count} {name} expected, came {tensor}")
    if config.num_hidden_layers % pipeline:
        raise ValueError(f"pipeline: a divisor of the {config.num_hidden_layers} layers expected, came {pipeline}")
    if sequence_parallel and tensor == 1:
        raise ValueError("sequence_parallel: it divides what tensor parallelism does not; tensor above 1 expected")
    experts = config.num_experts if is_moe(config) else 1
    if experts % expert:
        raise ValueError(f"expert: a divisor of the {experts} experts expected, came {expert}")
    if is_moe(config) and tensor > 1 and not (sequence_parallel and expert > 1):
        raise ValueError("tensor: with experts it goes with sequence_parallel, and with expert above 1")
    if world % (pipeline * expert):
        raise ValueError(f"pipeline {pipeline} x expert {expert}: a divisor of the {world} ranks expected")
    if world % (tensor * pipeline * context):
        product = f"tensor {tensor} x pipeline {pipeline} x context {context}"
        raise ValueError(f"{product}: a divisor of the {world} ranks expected")


def padded_vocabulary(config: Any, split: Split) -> int:
    """Tokens of the vocabulary, and what fills it up so that tensor ranks have equally many."""
    return -(-config.get_text_config().vocab_size // split.tensor) * split.tensor


def is_moe(config: Any) -> bool:
    return config.model_type == "qwen3_moe"


def _mrope_section(config: Any) -> list[int] | None:
    return config.rope_parameters.get("mrope_section")


def _rope_type(config: Any) -> str:
    return config.rope_parameters["rope_type"]


def use_split(split: Split, device: torch.device) -> None:
    """Make Megatron's process groups, or take those that are there; one split a process. No random state moves.

    Raises:
        ValueError: another engine of this process has another split.
    """
    state = parallel_state
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(
            split.tensor,
            split.pipeline,
            context_parallel_size=split.context,
            expert_model_parallel_size=split.expert,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            model_parallel_cuda_manual_seed(0)  # Megatron's own random states, of which it must have some
    there = (
        state.get_tensor_model_parallel_world_size(),
        state.get_pipeline_model_parallel_world_size(),
        state.get_context_parallel_world_size(),
        state.get_expert_model_parallel_world_size(),
    )
    if there != (split.tensor, split.pipeline, split.context, split.expert):
        came = " x ".join(map(str, there))
        raise ValueError(
            f"tensor x pipeline x context x expert: this process already has an engine with {came}; engines of one "
            "process share their process groups"
        )


def transformer_config(config: Any, split: Split, dtype: torch.dtype, *, recompute: bool) -> TransformerConfig:
    """Megatron's configuration of a transformers one that `check` has passed."""
    more: dict[str, Any] = {}
    if recompute:
        more = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if is_moe(config):
        more |= {
            "num_moe_experts": config.num_experts,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_router_pre_softmax": not config.norm_topk_prob,  # a softmax of the chosen, or the chosen of a softmax
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": split.expert,
            "expert_tensor_parallel_size": 1,
        }
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        ffn_hidden_size=config.intermediate_size,
        mrope_section=_mrope_section(config),
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type in ("qwen2", "qwen2_5_vl_text"),
        qk_layernorm=config.model_type in ("qwen3", "qwen3_moe"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=split.tensor,
        pipeline_model_parallel_size=split.pipeline,
        context_parallel_size=split.context,
        sequence_parallel=split.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=split.pipeline > 1,  # packed rows differ in length
        batch_p2p_comm=False,
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        moe_token_dispatcher_type="alltoall",  # the default refuses varying lengths, experts or not
        calculate_per_token_loss=True,  # gradients are sums: no division by micro-batches, nor by ranks
        finalize_model_grads_func=finalize_model_grads,
        **more,
    )


def _leave(weight: Tensor) -> None:
    """Weights come from the transformers model."""


class Norm(nn.RMSNorm):
    """RMSNorm, whose gradient is summed over the ranks among which sequence parallelism divides the tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _share_tokens(self.weight, config)


class ScalarHead(nn.Module):
    """The output layer of a value model: one number a token, in float32, from the tokens of all tensor ranks."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size))

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return F.linear(hidden.float(), self.weight), None


class RoutedLayer(TransformerLayer):
    """A layer whose tokens go to the experts that come with the row, if any do, whatever its router would choose; in
    the recomputation of a backward as well."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        routing = kwargs["packed_seq_params"].routing
        if routing is None:
            return super().forward(*args, **kwargs)
        if self.config.sequence_parallel:
            group = parallel_state.get_tensor_model_parallel_group()
            routing = routing.chunk(group.size())[group.rank()]
        with ChosenExperts(routing[:, self.layer_number - 1], self.config.num_moe_experts) as chosen:
            out = super().forward(*args, **kwargs)
        if not chosen.used:
            raise ValueError("routed_experts: this router does not choose by topk, it cannot be replayed")
        return out


def check_routing(routing: Tensor, config: TransformerConfig) -> None:
    """Raise a ValueError that says why `routed_experts` are not this model's."""
    if (came := tuple(routing.shape[-2:])) != (config.num_layers, config.moe_router_topk):
        expected = f"[B, T, {config.num_layers} layers, {config.moe_router_topk} experts]"
        raise ValueError(f"routed_experts: {expected} expected, came [B, T, {came[0]}, {came[1]}]")
    check_numbers(routing, config.num_moe_experts)


class HiddenHead(nn.Module):
    """In place of the output layer, whose weight it keeps: the hidden states of all tokens, to which each tensor rank
    adds the gradient of its slice of the vocabulary."""

    def __init__(self, head: Any, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = head.weight

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden), None
        return copy_to_tensor_model_parallel_region(hidden), None


def _share_tokens(weight: Any, config: TransformerConfig) -> None:
    weight.sequence_parallel = config.sequence_parallel


def has_transformer_engine(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("transformer_engine") is not None


def build(
    model: Any, config: TransformerConfig, device: torch.device, *, scalar: bool, without_logits: bool = False
) -> GPTModel:
    """This rank's part of a transformers model, its weights not set; the first stage has the vision tower, if any.

    Args:
        model: the transformers model.
        config: Megatron's, of the same.
        device: where this rank computes.
        scalar: a value head in place of the vocabulary.
        without_logits: hidden states come out, and no logits.
    """
    text, decoder = model.config.get_text_config(), model.get_decoder()
    first = parallel_state.is_pipeline_first_stage()
    last = parallel_state.is_pipeline_last_stage()
    built = GPTModel(
        config,
        _layers(config, device),
        vocab_size=padded_vocabulary(text, Split(config.tensor_model_parallel_size)),
        max_sequence_length=text.max_position_embeddings,
        pre_process=first,
        post_process=last,
        position_embedding_type="rope" if config.mrope_section is None else "mrope",
        share_embeddings_and_output_weights=model.get_output_embeddings().weight is decoder.embed_tokens.weight,
    )
    built.rotary_pos_emb.inv_freq = type(decoder.rotary_emb)(config=text).inv_freq.to(device, copy=True)
    for module in (getattr(built, "embedding", None), getattr(built, "output_layer", None)):
        for weight in () if module is None else module.parameters():
            weight.vocabulary = text.vocab_size
    if config.mrope_section is not None:
        built.rotary_pos_emb.cp_group = None  # it is given the positions of the whole row, and would cut them as one
    if scalar and last:
        built.output_layer = ScalarHead(config)
    elif without_logits and last:
        built.output_layer = HiddenHead(built.output_layer, config)
    if first and config.mrope_section is not None:
        built.visual = copy.deepcopy(model.model.visual)
        if device.type == "cuda":
            use_packed_tower(built.visual, model.config)
        for parameter in built.visual.parameters():
            parameter.data = parameter.data.to(config.params_dtype)
            _share_tokens(parameter, config)
    return built.to(device)


def embed(model: GPTModel, tokens: Tensor, source: Tensor, kwargs: Mapping[str, Any], config: Any) -> Tensor | None:
    """A row's token embeddings with image features in their places, as the first stage's decoder takes them.

    Args:
        model: from `build`.
        tokens: [1, n], what this context rank has of the row.
        source: [n], where each of them stands in the row; -1 for padding.
        kwargs: of the row: `input_ids` [1, N], and its `pixel_values` and `image_grid_thw`, if it has images.
        config: transformers', which names the token that stands where features go.

    Returns:
        [n, 1, H], or under sequence parallelism this rank's part of it; None where the model does it alone.
    """
    if "pixel_values_videos" in kwargs:
        raise ValueError("batch: videos are not supported by the megatron engine")
    if "pixel_values" not in kwargs or not model.pre_process:
        return None
    hidden = model.embedding(input_ids=tokens, position_ids=None)
    pixels = kwargs["pixel_values"].to(model.config.params_dtype)
    features = model.visual(pixels, grid_thw=kwargs["image_grid_thw"]).pooler_output
    is_image = torch.eq(kwargs["input_ids"][0], config.image_token_id)
    place = is_image.cumsum(0).sub(1).clamp(min=0)[source]  # -1 takes the last one's
    is_image = is_image[source] & (source >= 0)
    if model.config.sequence_parallel:
        group = parallel_state.get_tensor_model_parallel_group()
        is_image, place = (x.chunk(group.size())[group.rank()] for x in (is_image, place))
    return torch.where(is_image[:, None, None], features[place][:, None].to(hidden.dtype), hidden)


def _layers(config: TransformerConfig, device: torch.device) -> ModuleSpec | TransformerBlockSubmodules:
    """Transformer Engine's layers where it is, else Megatron's with a norm and an attention that need no GPU."""
    if has_transformer_engine(device):
        spec = get_gpt_layer_with_transformer_engine_spec(config.num_moe_experts, qk_layernorm=config.qk_layernorm)
        spec.module = RoutedLayer if config.num_moe_experts else spec.module
        return spec
    if config.num_moe_experts and device.type == "cuda":
        raise ValueError("model: experts on a GPU need transformer_engine, which is not installed")
    spec = get_gpt_layer_local_spec(config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    spec.module = RoutedLayer if config.num_moe_experts else spec.module
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=Norm)
