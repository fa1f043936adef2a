"""A Megatron-Core model with the shape of a transformers model: what is supported, its config, its layers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

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
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from rlkit.engines.distributed import TIMEOUT
from rlkit.engines.megatron.attention import PackedAttention
from rlkit.engines.megatron.cpu import use_host_token_dispatchers
from rlkit.engines.megatron.experts import GroupedExperts, PlainRouter
from rlkit.engines.megatron.supported import ParallelDims, is_moe, padded_vocabulary
from rlkit.engines.packing.vision_attention import use_packed_vision_attention
from rlkit.vlm.routers import ChosenExperts, check_expert_ids


def has_transformer_engine(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("transformer_engine") is not None


# --- process groups and config


def initialize_parallel_state(dims: ParallelDims, device: torch.device) -> None:
    """Make Megatron's process groups, or reuse those of this process. The caller's random states do not change.

    Raises:
        ValueError: another engine of this process has other degrees of parallelism.
    """
    state = parallel_state
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(
            dims.tensor,
            dims.pipeline,
            context_parallel_size=dims.context,
            expert_model_parallel_size=dims.expert,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=int(TIMEOUT.total_seconds() // 60),
        )
        _initialize_rng_tracker(device)
    existing = (
        state.get_tensor_model_parallel_world_size(),
        state.get_pipeline_model_parallel_world_size(),
        state.get_context_parallel_world_size(),
        state.get_expert_model_parallel_world_size(),
    )
    wanted = (dims.tensor, dims.pipeline, dims.context, dims.expert)
    if existing != wanted:
        raise ValueError(
            f"tensor, pipeline, context, expert: expected {existing} as in an earlier engine of this process, "
            f"got {wanted}"
        )


def _initialize_rng_tracker(device: torch.device) -> None:
    """Megatron requires its own random states, although nothing is drawn from them (no dropout, no initialisation).

    On a CPU it gets the tracker without states that it uses in inference.
    """
    if device.type == "cpu":
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    else:
        with torch.random.fork_rng([device]):
            model_parallel_cuda_manual_seed(0, force_reset_rng=True)


@dataclass
class MegatronConfig(TransformerConfig):
    """Megatron's config of a language model, and whether it is part of a vision-language model."""

    has_vision: bool = False


def megatron_config(model_config: Any, dims: ParallelDims, dtype: torch.dtype, *, recompute: bool) -> MegatronConfig:
    """Megatron's config of a transformers model that `check_supported` has accepted."""
    config = model_config.get_text_config()
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    more: dict[str, Any] = _moe_options(config, dims) if is_moe(config) else {}
    if recompute:
        more |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return MegatronConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size,
        ffn_hidden_size=config.intermediate_size,
        mrope_section=config.rope_parameters.get("mrope_section") or [head_size // 2, 0, 0],
        has_vision=hasattr(model_config, "vision_config"),
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type in ("qwen2", "qwen2_5_vl_text"),
        qk_layernorm=config.model_type in ("qwen3", "qwen3_moe"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=dims.tensor,
        pipeline_model_parallel_size=dims.pipeline,
        context_parallel_size=dims.context,
        sequence_parallel=dims.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=dims.pipeline > 1,  # packed rows differ in length
        batch_p2p_comm=False,
        init_method=_no_init,
        output_layer_init_method=_no_init,
        embedding_init_method=_no_init,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        moe_token_dispatcher_type="alltoall",  # the default does not support variable_seq_lengths, even without experts
        calculate_per_token_loss=True,  # gradients are sums: not divided by micro-batches or ranks
        finalize_model_grads_func=finalize_model_grads,
        **more,
    )


def _moe_options(config: Any, dims: ParallelDims) -> dict[str, Any]:
    return {
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": not config.norm_topk_prob,  # the top k of a softmax, or a softmax of the top k
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": dims.expert,
        "expert_tensor_parallel_size": 1,
    }


def _no_init(weight: Tensor) -> None:
    """Weights are copied from the transformers model."""


# --- modules


class Norm(nn.RMSNorm):
    """RMSNorm; under sequence parallelism its gradient is summed over the ranks that share the tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark_sequence_parallel(self.weight, config)


def _mark_sequence_parallel(weight: Any, config: TransformerConfig) -> None:
    """Have Megatron sum a weight's gradient over the ranks that share the tokens."""
    weight.sequence_parallel = config.sequence_parallel


class ValueHead(nn.Module):
    """The output layer of a value model: one number per token, in float32, from the tokens of all tensor ranks."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size))

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return F.linear(hidden.float(), self.weight), None


class HiddenStatesHead(nn.Module):
    """Replaces the output layer, keeps its weight, and returns the hidden states of all tokens.

    Logits are computed afterwards, only where they are needed. Backward sums the gradients of the tensor ranks, each of
    which computes a slice of the vocabulary.
    """

    def __init__(self, head: Any, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = head.weight

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden), None
        return copy_to_tensor_model_parallel_region(hidden), None


def check_routed_experts(routed_experts: Tensor, config: TransformerConfig) -> None:
    """Raise a ValueError if `routed_experts` [B, T, layers, K] are not those of this model."""
    if (shape := tuple(routed_experts.shape[-2:])) != (config.num_layers, config.moe_router_topk):
        expected = f"[B, T, {config.num_layers} layers, {config.moe_router_topk} experts]"
        raise ValueError(f"routed_experts: expected {expected}, got [B, T, {shape[0]}, {shape[1]}]")
    check_expert_ids(routed_experts, config.num_moe_experts)


class RouterReplayLayer(TransformerLayer):
    """A layer whose tokens go to the `routed_experts` of the row, if there are any, also when it is recomputed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        routed_experts = kwargs["packed_seq_params"].routed_experts
        if routed_experts is None:
            return super().forward(*args, **kwargs)
        if self.config.sequence_parallel:
            group = parallel_state.get_tensor_model_parallel_group()
            routed_experts = routed_experts.chunk(group.size())[group.rank()]
        with ChosenExperts(routed_experts[:, self.layer_number - 1], self.config.num_moe_experts) as chosen:
            out = super().forward(*args, **kwargs)
        if not chosen.used:
            raise ValueError("routed_experts: expected a router that calls topk, got one that cannot be replayed")
        return out


def build_model(model: Any, config: MegatronConfig, device: torch.device, *, value_head: bool) -> GPTModel:
    """This rank's part of a model, its weights not yet set; the first stage has the vision tower if there is one.

    The last stage returns hidden states, or values.

    Args:
        model: from transformers.
        config: Megatron's, of the same model.
        device: where this rank computes.
        value_head: a value head instead of the output layer.
    """
    text, decoder = model.config.get_text_config(), model.get_decoder()
    is_first, is_last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    built = GPTModel(
        config,
        _layer_spec(config, device),
        vocab_size=padded_vocabulary(text, ParallelDims(config.tensor_model_parallel_size)),
        max_sequence_length=text.max_position_embeddings,
        pre_process=is_first,
        post_process=is_last,
        position_embedding_type="mrope",  # follows position ids; "rope" counts positions itself
        share_embeddings_and_output_weights=model.get_output_embeddings().weight is decoder.embed_tokens.weight,
    )
    built.rotary_pos_emb.inv_freq = type(decoder.rotary_emb)(config=text).inv_freq.to(device, copy=True)
    for module in (getattr(built, "embedding", None), getattr(built, "output_layer", None)):
        for weight in () if module is None else module.parameters():
            weight.vocabulary = text.vocab_size
    built.rotary_pos_emb.cp_group = None  # position ids are this rank's; with a group Megatron would select them again
    if is_last:
        built.output_layer = ValueHead(config) if value_head else HiddenStatesHead(built.output_layer, config)
    if is_first and config.has_vision:
        built.visual = _empty_copy(model.model.visual, config.params_dtype)
        if device.type == "cuda":
            use_packed_vision_attention(built.visual, model.config)
        for parameter in built.visual.parameters():
            _mark_sequence_parallel(parameter, config)
    if device.type == "cpu":
        use_host_token_dispatchers(built)
    return built.to(device)


def _empty_copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a module on the host, whose parameters have a dtype and no values yet."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, dtype=dtype, device="cpu")) for p in module.parameters()}
    return copy.deepcopy(module, dict[int, Any](empty))


def _layer_spec(config: TransformerConfig, device: torch.device) -> ModuleSpec | TransformerBlockSubmodules:
    """Transformer Engine's layers if it is installed, else Megatron's with our norm and attention."""
    if has_transformer_engine(device):
        spec = get_gpt_layer_with_transformer_engine_spec(config.num_moe_experts, qk_layernorm=config.qk_layernorm)
        spec.submodules.self_attention.submodules.core_attention = PackedAttention
        _set_experts(spec, config)
        return spec
    spec = get_gpt_layer_local_spec(config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer = spec.submodules
    _set_experts(spec, config)
    if config.num_moe_experts:
        layer.mlp.submodules.router = PlainRouter
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=Norm)


def _set_experts(layer: ModuleSpec, config: TransformerConfig) -> None:
    """Set grouped experts and replayed routers in the specification of a layer, if it has experts."""
    if config.num_moe_experts:
        layer.module = RouterReplayLayer
        layer.submodules.mlp.submodules.experts = ModuleSpec(module=GroupedExperts)


# the pixels of a kind of media, their grids, and the config's name of the token that stands for a feature
FEATURE_INPUTS = (
    ("pixel_values", "image_grid_thw", "image_token_id"),
    ("pixel_values_videos", "video_grid_thw", "video_token_id"),
)


def embed_with_media(model: GPTModel, inputs: Mapping[str, Any], row: Mapping[str, Any], config: Any) -> Tensor | None:
    """The token embeddings of a row with features of its images and videos, as the first stage's decoder takes them.

    Args:
        model: from `build_model`.
        inputs: from `context_parallel_inputs`.
        row: of the whole row, on the host: `input_ids` [1, N], and the pixels and grids of its images and videos.
        config: of the transformers model, which names their tokens.

    Returns:
        [n, 1, H], or this rank's part of it under sequence parallelism; None if the model embeds the tokens itself.
    """
    found = [names for names in FEATURE_INPUTS if names[0] in row]
    if not found or not model.pre_process:
        return None
    tokens, source = inputs["input_ids"], inputs["packed_seq_params"].source
    hidden = model.embedding(input_ids=tokens, position_ids=None)
    for pixels, grids, token in found:
        patches = row[pixels].to(tokens.device, model.config.params_dtype, non_blocking=True)
        features = model.visual(patches, grid_thw=row[grids].to(tokens.device, non_blocking=True)).pooler_output
        is_feature = torch.eq(row["input_ids"][0], getattr(config, token))
        hidden = _insert_features(hidden, features, is_feature, source, model.config)
    return hidden


def _insert_features(
    hidden: Tensor, features: Tensor, is_feature: Tensor, source: Tensor, config: TransformerConfig
) -> Tensor:
    """Replace the embeddings of placeholders with features.

    Args:
        hidden: [n, 1, H], this rank's part of the embeddings.
        features: [F, H] of the whole row, in order.
        is_feature: [N] bool, the F placeholders of the whole row.
        source: [n] index in the whole row of each token of this context rank; -1 for padding.
        config: Megatron's.
    """
    feature_index = is_feature.cumsum(0).sub(1).clamp(min=0)[source]
    is_feature = is_feature[source] & (source >= 0)
    if config.sequence_parallel:
        group = parallel_state.get_tensor_model_parallel_group()
        is_feature, feature_index = (x.chunk(group.size())[group.rank()] for x in (is_feature, feature_index))
    is_feature, feature_index = (x.to(hidden.device, non_blocking=True) for x in (is_feature, feature_index))
    return torch.where(is_feature[:, None, None], features[feature_index][:, None].to(hidden.dtype), hidden)
