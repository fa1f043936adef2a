"""Tiny configurations of every family: text, vision, and those whose rows cannot be packed."""

IMAGE, VIDEO = 90, 95
BASE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
BOTH = ["sliding_attention", "full_attention"]
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "num_key_value_heads": 4,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DSA = {  # with few heads many scores are 0, and their order is arbitrary
    **LATENT, **ROUTED, "q_lora_rank": 8, "n_routed_experts": 4, "index_topk": 4, "index_head_dim": 8,
    "index_n_heads": 16, "head_dim": 4,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
ROPE35 = {"rope_parameters": {**ROPE["rope_parameters"], "partial_rotary_factor": 1.0}}
QWEN4 = {
    **ROPE35, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16, "hc_count": 2, "hc_lowrank": 8,
    "layer_types": ["indexed_attention", "linear_attention"],  # an error in the first one's padding would spread
    "ple_layer_ids": [2], "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "split_ngram_parts": 4,
    "make_ngram_vocab_size_divisible_by": 16, "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 8,
    "indexer_budget": 4, "indexer_compress_ratio": 2,
}  # fmt: skip
GEMMA = {"sliding_window": 5, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
UNIFIED = {
    "sliding_window": 3, "layer_types": BOTH, "global_head_dim": 16,
    "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in BOTH},
}  # fmt: skip
NO_DROPOUT = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
GRANITE = {
    "attention_multiplier": 0.3, "embedding_multiplier": 2.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
}  # fmt: skip
GRANITE_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
GRANITE_SWA = {"sliding_window": 5, "layer_types": BOTH, "layer_rope_theta": [1e4, 1e3]}
TEXT = {
    "qwen2": {},
    "qwen2_sliding": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {},
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "layer_types": BOTH, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 3},
    "gemma3_text": {"sliding_window": 5, "layer_types": BOTH, "query_pre_attn_scalar": 3},
    "qwen3_moe": {**EXPERTS, "decoder_sparse_step": 1, "num_key_value_heads": 1},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4, "sliding_window": 5},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "layer_types": BOTH},
    "deepseek_v3": {
        **LATENT, "q_lora_rank": 8, "first_k_dense_replace": 2, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
        "head_dim": 4, "num_experts_per_tok": 2,
    },
    "diffllama": {},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    "gemma3n_text": {
        **GEMMA, "layer_types": BOTH * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "laurel_rank": 4,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        **GEMMA, "layer_types": BOTH * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "global_head_dim": 16,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in BOTH},
    },
    "gemma4_unified_text": UNIFIED,
    "glm4_moe": {**ROUTED, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "ministral3": {},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo3": {"sliding_window": 5, "layer_types": BOTH},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {
        **MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "kimi_linear": {
        **LATENT, **ROUTED, "layer_types": LINEAR["layer_types"], "linear_head_dim": 8, "linear_num_heads": 4,
        "num_local_experts": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "nemotron_h": {
        **ROUTED, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "ssm_state_size": 8,
        "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "moe_shared_expert_intermediate_size": 16,
        "n_routed_experts": 4, "chunk_size": 16,
    },
    "olmo_hybrid": LINEAR,
    "qwen3_next": {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16},
    "llama4_text": {
        "num_local_experts": 4, "intermediate_size": 16, "intermediate_size_mlp": 48, "attention_chunk_size": 5,
        "no_rope_layer_interval": 2, "interleave_moe_layer_step": 2,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "deepseek_v32": {**DSA, "mlp_layer_types": ["dense", "sparse"], "n_group": 1, "topk_group": 1},
    "glm_moe_dsa": {**DSA, "mlp_layer_types": ["dense", "sparse"], "indexer_types": ["full", "shared"]},
    "qwen4_exp_text": QWEN4,
    "apertus": {},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "cohere2": {"sliding_window": 5, "layer_types": BOTH, "logit_scale": 0.5},
    "deepseek_v2": {
        **LATENT, **ROUTED, "q_lora_rank": 8, "n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 4,
    },
    "dots1": {
        **ROUTED, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_shared_experts": 1, "sliding_window": 5,
        "layer_types": BOTH,
    },
    "exaone4": {"sliding_window": 5, "layer_types": BOTH},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe_lite": {
        **LATENT, **ROUTED, "q_lora_rank": 8, "n_routed_experts": 4, "mlp_layer_types": ["dense", "sparse"],
        "head_dim": 4,
    },
    "granite": GRANITE,
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "jamba": {
        "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "mimo_v2_flash": {
        **ROUTED, "n_routed_experts": 4, "v_head_dim": 6, "sliding_window": 5, "layer_types": BOTH,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi3": {},
    "starcoder2": {"sliding_window": 5},
    "qwen2_moe_sliding": {  # its layers, and those of PhiMoE, have windows in the mask only
        **EXPERTS, "shared_expert_intermediate_size": 16, "use_sliding_window": True, "sliding_window": 5,
        "max_window_layers": 1,
    },
    "afmoe": {
        **ROUTED, "num_experts": 4, "num_dense_layers": 1, "num_shared_experts": 1, "sliding_window": 5,
        "layer_types": BOTH, "mup_enabled": True,
    },
    "arcee": {},
    "axk1": {
        **LATENT, **ROUTED, "q_lora_rank": 8, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "head_dim": 4,
        "first_k_dense_replace": 1,
    },
    "axk2": {**DSA, "mlp_layer_types": ["dense", "sparse"], "gated_norm_rank": 8},
    "cohere": {"logit_scale": 0.5},
    "cohere2_moe": {
        **EXPERTS, "sliding_window": 5, "layer_types": BOTH, "logit_scale": 0.5, "num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "cwm": {
        "sliding_window": 5, "layer_types": BOTH, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "exaone_moe": {
        **ROUTED, "num_experts": 4, "sliding_window": 5, "layer_types": BOTH, "mlp_layer_types": ["dense", "sparse"],
    },
    "gemma": {},
    "glm": {"partial_rotary_factor": 0.5},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, **NO_DROPOUT},
    "gpt_neox": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "granite_swa": {**GRANITE, **GRANITE_SWA},
    "granitemoe": {**GRANITE, **GRANITE_MOE},
    "granitemoe_swa": {**GRANITE, **GRANITE_MOE, **GRANITE_SWA, "shared_intermediate_size": 16},
    "granitemoeshared": {**GRANITE, **GRANITE_MOE, "shared_intermediate_size": 16},
    "helium": {},
    "hy_v3": {**EXPERTS, "num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]},
    "hyperclovax": GRANITE,
    "jais2": {},
    "laguna": {
        **EXPERTS, "shared_expert_intermediate_size": 16, "sliding_window": 5, "layer_types": BOTH,
        "mlp_layer_types": ["dense", "sparse"], "num_attention_heads_per_layer": [4, 4],
    },
    "mellum": {**ROUTED, "num_local_experts": 4, "sliding_window": 5, "layer_types": BOTH},
    "minicpm3": {**LATENT, "q_lora_rank": 8, "head_dim": 4, "dim_model_base": 16, "scale_emb": 2},
    "ministral": {"sliding_window": 5, "layer_types": BOTH},
    "nanochat": {"final_logit_softcapping": 0.5},
    "olmo": {"clip_qkv": 0.5},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "phi": {"partial_rotary_factor": 0.5, "qk_layernorm": True},
    "phimoe": {"num_local_experts": 4, "sliding_window": 5, "attention_bias": True, "lm_head_bias": True},
    "qwen3_5_moe_text": {**ROPE35, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": {**ROPE35, **LINEAR},
    "solar_open": {**ROUTED, "n_routed_experts": 4},
    "vaultgemma": {
        "sliding_window": 5, "layer_types": BOTH, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.5,
        "query_pre_attn_scalar": 3,
    },
    "youtu": {**LATENT, "q_lora_rank": 8, "head_dim": 4},
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "jetmoe": {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "longcat_flash": {  # layers with two attentions each, and experts that hand on their inputs
        **LATENT, "q_lora_rank": 8, "head_dim": 4, "num_layers": 1, "num_hidden_layers": 2, "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2,
    },
    "zamba2": {
        "mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 4, "chunk_size": 16, "num_mem_blocks": 1,
        "adapter_rank": 4, "layers_block_type": ["mamba", "hybrid"], "use_mem_rope": True,
        "head_dim": 16,
    },
}  # fmt: skip
SMALL_VIT = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
}  # fmt: skip
SIGLIP = {**SMALL_VIT, "image_size": 16}
TILES = {**SIGLIP, "patch_size": 8}
PINPOINTS = [[16, 32], [32, 16], [32, 32]]
WORDS = {k: v for k, v in BASE.items() if k != "head_dim"}
COMPASS = {
    "layer_types": BOTH, "sliding_window": 5, "logit_scale": 0.5,
    "rope_parameters": {
        "sliding_attention": {**ROPE["rope_parameters"], "mrope_section": [1, 1, 2]}, "full_attention": None,
    },
}  # fmt: skip
VIT2 = {"depth": 1, "num_heads": 2, "patch_size": 4}
VIT25 = {
    **VIT2, "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32, "window_size": 16,
    "fullatt_block_indexes": [0],
}  # fmt: skip
VIT3 = {
    **VIT2, "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32, "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
GLM_VIT = {**VIT2, "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32, "image_size": 16}
GLM_IDS = {
    "image_start_token_id": 91, "image_end_token_id": 92, "video_start_token_id": 93, "video_end_token_id": 94,
    "video_token_id": 95,
}  # fmt: skip
QWEN_IDS = {"vision_start_token_id": 91, "vision_end_token_id": 92, "video_token_id": 95}
OMNI = {
    "audio_config": {
        "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "d_model": 16, "output_dim": 32,
        "downsample_hidden_size": 8,
    },
    **QWEN_IDS, "audio_token_id": 96, "audio_start_token_id": 93, "audio_end_token_id": 94,
}  # fmt: skip
VIT35 = {name: value for name, value in VIT3.items() if name != "deepstack_visual_indexes"}
GLM5 = {
    **LATENT, **ROUTED, "qk_rope_head_dim": 0, "q_lora_rank": 8, "n_routed_experts": 4, "index_topk": 4,
    "index_kpool": 2, "index_head_dim": 8, "index_n_heads": 16, "linear_head_dim": 8, "linear_num_heads": 4,
    "layer_types": ["indexed_attention", "linear_attention"], "mlp_layer_types": ["dense", "sparse"], "hc_mult": 2,
    "indexer_types": ["full", "full"],
}  # fmt: skip
PATCHES = (4, (16, 3 * 2 * 4 * 4))
VISION = {  # the config, tokens per image, shape of its pixel_values
    "llava": (
        {
            "text_config": {**WORDS, "model_type": "llama"},
            "vision_config": {**SIGLIP, "model_type": "clip_vision_model", "projection_dim": 16},
            "image_seq_length": 16,
        },
        16,
        (1, 3, 16, 16),
    ),
    "llava_next": (  # an image of two tiles beside each other
        {
            "text_config": {**WORDS, "model_type": "llama"},
            "vision_config": {**TILES, "model_type": "clip_vision_model", "projection_dim": 16},
            "image_grid_pinpoints": PINPOINTS,
        },
        14,
        (1, 3, 3, 16, 16),
    ),
    "llava_next_video": (
        {
            "text_config": {**WORDS, "model_type": "llama"},
            "vision_config": {**TILES, "model_type": "clip_vision_model", "projection_dim": 16},
            "image_grid_pinpoints": PINPOINTS,
        },
        14,
        (1, 3, 3, 16, 16),
    ),
    "llava_onevision": (
        {
            "text_config": {**WORDS, "model_type": "qwen2"},
            "vision_config": {**TILES, "model_type": "siglip_vision_model", "vision_use_head": False},
            "image_grid_pinpoints": PINPOINTS, "video_token_id": VIDEO,
        },
        14,
        (1, 3, 3, 16, 16),
    ),
    "internvl": (
        {
            "text_config": {**WORDS, "model_type": "qwen2"},
            "vision_config": {**SIGLIP, "model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]},
            "image_seq_length": 4,
        },
        4,
        (1, 3, 16, 16),
    ),
    "smolvlm": (
        {"text_config": {**WORDS, "model_type": "llama"}, "vision_config": {**SIGLIP}, "scale_factor": 2},
        4,
        (1, 1, 3, 16, 16),
    ),
    "idefics3": (
        {"text_config": {**WORDS, "model_type": "llama"}, "vision_config": {**SIGLIP}, "scale_factor": 2},
        4,
        (1, 1, 3, 16, 16),
    ),
    "gemma3": (
        {
            "text_config": {**BASE, "sliding_window": 5, "layer_types": BOTH, "model_type": "gemma3_text"},
            "vision_config": {**SIGLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
            "mm_tokens_per_image": 4,
        },
        4,
        (1, 3, 16, 16),
    ),
    "glm4v": ({"text_config": {**WORDS, **ROPE}, "vision_config": GLM_VIT, **GLM_IDS}, *PATCHES),
    "glm46v": ({"text_config": {**WORDS, **ROPE}, "vision_config": GLM_VIT, **GLM_IDS}, *PATCHES),
    "glm4v_moe": (
        {
            "text_config": {
                **WORDS, **ROPE, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                "first_k_dense_replace": 1, "partial_rotary_factor": 1.0,
            },
            "vision_config": GLM_VIT, **GLM_IDS,
        },
        *PATCHES,
    ),
    "glm_ocr": ({"text_config": {**BASE, **ROPE}, "vision_config": GLM_VIT, **GLM_IDS}, *PATCHES),
    "ernie4_5_vl_moe": (
        {
            "text_config": {
                **WORDS, "rope_parameters": {**ROPE["rope_parameters"], "mrope_section": [1, 1, 2]},
                "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [16, 8], "moe_num_shared_experts": 1,
            },
            "vision_config": {**VIT2, "hidden_size": 16, "intermediate_size": 32}, **GLM_IDS,
        },
        4,
        (16, 3 * 4 * 4),
    ),
    "glm5_next": (
        {
            "text_config": {**WORDS, **GLM5}, **GLM_IDS,
            "vision_config": {**GLM_VIT, "projection_intermediate_size": 32},
        },
        *PATCHES,
    ),
    "qwen2_vl": (
        {
            "text_config": {**WORDS, **ROPE}, "vision_config": {**VIT2, "embed_dim": 16, "hidden_size": 32}, **QWEN_IDS,
        },
        *PATCHES,
    ),
    "qwen2_5_vl": ({"text_config": {**WORDS, **ROPE}, "vision_config": VIT25, **QWEN_IDS}, *PATCHES),
    "qwen3_vl": ({"text_config": {**BASE, **ROPE}, "vision_config": VIT3, **QWEN_IDS}, *PATCHES),
    "exaone4_5": (
        {
            "text_config": {**WORDS, "model_type": "exaone4", "sliding_window": 5, "layer_types": BOTH},
            "vision_config": {**VIT25, "num_key_value_heads": 1}, "video_token_id": VIDEO,
        },
        *PATCHES,
    ),
    "hyperclovax_vision_v2": (
        {
            "text_config": {**BASE, **GRANITE, "model_type": "hyperclovax"},
            "vision_config": {**VIT25, "model_type": "qwen2_5_vl_vision"}, "video_token_id": VIDEO,
        },
        *PATCHES,
    ),
    "muse_glimmer": (
        {
            "text_config": {**BASE, "sliding_window": 5, "layer_types": BOTH, "layer_rope_theta": [1e4, 0]},
            "vision_config": {
                **SMALL_VIT, "num_hidden_layers": 2, "pos_emb_height": 2, "pos_emb_width": 2,
                "layer_types": ["window_attention", "full_attention"],
            },
            "out_hidden_size": 64, "projector_hidden_size": 16, "video_token_id": VIDEO,
        },
        *PATCHES,
    ),
    "video_llama_3": (
        {
            "text_config": {**WORDS, "model_type": "qwen2"}, "vision_config": SMALL_VIT, "video_token_id": VIDEO,
        },
        4,
        (16, 3 * 4 * 4),
    ),
    "cohere_compass": (
        {
            "text_config": {**BASE, **COMPASS}, "vision_config": VIT3, **QWEN_IDS, "tie_word_embeddings": True,
        },
        *PATCHES,
    ),
    "cosmos3_omni": ({"text_config": {**BASE, **ROPE}, "vision_config": VIT3, **QWEN_IDS}, *PATCHES),
    "cosmos3_edge": (
        {
            "text_config": {**BASE, **ROPE}, "vision_config": {**SMALL_VIT, "num_patches": 16},
            "projector_hidden_size": 16, **QWEN_IDS,
        },
        4,
        (16, 3 * 4 * 4),
    ),
    "qwen3_vl_moe": (
        {
            "text_config": {**BASE, **ROPE, **EXPERTS, "decoder_sparse_step": 1, "moe_intermediate_size": 24},
            "vision_config": VIT3, **QWEN_IDS,
        },
        *PATCHES,
    ),
    "qwen3_5": ({"text_config": {**BASE, **ROPE35, **LINEAR}, "vision_config": VIT35, **QWEN_IDS}, *PATCHES),
    "qwen3_5_moe": (
        {
            "text_config": {**BASE, **ROPE35, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16},
            "vision_config": VIT35, **QWEN_IDS,
        },
        *PATCHES,
    ),
    "qwen4_exp": ({"text_config": {**BASE, **QWEN4}, "vision_config": VIT35, **QWEN_IDS}, *PATCHES),
    "qwen2_5_omni_thinker": ({"text_config": {**WORDS, **ROPE}, "vision_config": VIT25, **OMNI}, *PATCHES),
    "qwen3_omni_moe_thinker": (
        {
            "text_config": {**BASE, **ROPE, **EXPERTS, "decoder_sparse_step": 1}, "vision_config": VIT3, **OMNI,
        },
        *PATCHES,
    ),
    "gemma3n": (  # ids from 80 on are those of images, from 96 on those of audios
        {
            "text_config": {
                **BASE, **TEXT["gemma3n_text"], "model_type": "gemma3n_text", "vocab_size_per_layer_input": 80,
            },
            "vision_config": {
                "vocab_size": 16, "vocab_offset": 80, "hidden_size": 2048,
                "model_args": {"channel_multiplier": 0.01, "msfa_output_resolution": 2},
            },
            "audio_config": {
                "vocab_size": 4, "vocab_offset": 96, "hidden_size": 16, "input_feat_size": 8,
                "conf_num_attention_heads": 2, "conf_num_hidden_layers": 1, "sscp_conv_channel_size": [4, 4],
            },
            "vision_soft_tokens_per_image": 4, "boi_token_id": 91, "eoi_token_id": 92, "audio_token_id": 96,
            "audio_soft_tokens_per_image": 12,
        },
        4,
        (1, 3, 32, 32),
    ),
    "gemma4": (
        {
            "text_config": {**BASE, **TEXT["gemma4_text"], "model_type": "gemma4_text"},
            "vision_config": {
                **SMALL_VIT, "num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 2,
                "position_embedding_size": 72, "rope_parameters": {"rope_type": "default", "rope_theta": 1e2},
            },
            "audio_config": {
                "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 24,
                "subsampling_conv_channels": [8, 4],
            }, "boi_token_id": 91, "eoi_token_id": 92, "video_token_id": 95, "audio_token_id": 96,
        },
        4,
        (1, 16, 3 * 4 * 4),
    ),
    "gemma4_unified": (  # tokens of an image attend to later ones, in the first layer; its 4 tokens exceed the window
        {
            "text_config": {**BASE, **UNIFIED, "model_type": "gemma4_unified_text"},
            "vision_config": {
                "patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 64,
                "output_proj_dims": 32,
            },
            "audio_config": {}, "boi_token_id": 91, "eoi_token_id": 92, "video_token_id": 95, "audio_token_id": 96,
        },
        4,
        (1, 4, 3 * 8 * 8),
    ),
    "kimi_k25": (
        {
            "text_config": {**BASE, **TEXT["deepseek_v3"], "model_type": "deepseek_v3"},
            "vision_config": {**SMALL_VIT, "pos_emb_height": 8, "pos_emb_width": 8}, "projection_hidden_size": 16,
            **QWEN_IDS,
        },
        4,
        (16, 3, 4, 4),
    ),
    "llama4": (
        {
            "text_config": {**BASE, **TEXT["llama4_text"], "model_type": "llama4_text"},
            "vision_config": {
                **SMALL_VIT, "intermediate_size": 64, "image_size": 16, "vision_output_dim": 24,
                "projector_input_dim": 24, "projector_output_dim": 24,
            },
            "boi_token_index": 91, "eoi_token_index": 92,
        },
        4,
        (1, 3, 16, 16),
    ),
    "lfm2_vl": (
        {
            "text_config": {**WORDS, **TEXT["lfm2"], "model_type": "lfm2"}, "projector_hidden_size": 16,
            "vision_config": {
                **SMALL_VIT, "model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False,
            },
        },
        4,
        (1, 16, 3 * 4 * 4),
    ),
    "minicpmv4_6": (
        {
            "text_config": {**BASE, **ROPE35, **LINEAR, "model_type": "qwen3_5_text"}, "insert_layer_id": 0,
            "vision_config": {**SMALL_VIT, "image_size": 16}, "video_token_id": 95,
        },
        4,
        (1, 3, 4, 256),
    ),
    "mistral3": (
        {
            "text_config": {**BASE, "model_type": "mistral"}, "spatial_merge_size": 2,
            "vision_config": {**SMALL_VIT, "model_type": "pixtral", "head_dim": 8, "image_size": 16},
        },
        4,
        (1, 3, 16, 16),
    ),
    "mistral4": (  # AutoModelForCausalLM does not know it, so that it is always the text model of Mistral 3
        {
            "text_config": {
                **BASE, **LATENT, **ROUTED, "q_lora_rank": 8, "n_routed_experts": 4, "head_dim": 12,
                "model_type": "mistral4", "rope_parameters": {
                    "rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 4,
                },
            },
            "model_type": "mistral3", "spatial_merge_size": 2,
            "vision_config": {**SMALL_VIT, "model_type": "pixtral", "head_dim": 8, "image_size": 16},
        },
        4,
        (1, 3, 16, 16),
    ),
    "paddleocr_vl": (
        {
            "text_config": {**BASE, **ROPE, "model_type": "paddleocr_vl_text"},
            "vision_config": {**SMALL_VIT, "image_size": 16}, **QWEN_IDS,
        },
        4,
        (16, 3, 4, 4),
    ),
}  # fmt: skip
MADE_OF_FULL = {  # weights of a layer that each rank makes of full tensors of the files
    "ernie4_5_vl_moe": ["mlp.text_moe", "mlp.vision_moe"],
    "glm5_next": ["self_attn.conv1d"],
    "kimi_k25": ["attn.q_proj", "attn.k_proj", "attn.v_proj"],  # of the vision tower
    "kimi_linear": ["self_attn.conv1d"],
    "olmo_hybrid": ["linear_attn.conv1d"],
    "qwen4_exp": ["ple.ple_embedding.ngram_embedding"],
    "qwen4_exp_text": ["ple.ple_embedding.ngram_embedding"],
}
REFUSED = {
    "mamba": ({"state_size": 4}, "linear-attention, state-space"),
    "minimax": ({"num_local_experts": 2, "layer_types": LINEAR["layer_types"]}, "linear-attention"),
    "gpt_neo": (
        {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 5},
        "does not go through transformers' AttentionInterface",
    ),
    "recurrent_gemma": ({"lru_width": 32, "attention_window_size": 5, "num_hidden_layers": 3}, "state-space"),
    "stablelm": ({}, "does not go through transformers' AttentionInterface"),  # or does not declare it
    "bloom": ({"n_layer": 2, "n_head": 4}, "does not go through transformers' AttentionInterface"),
    "nemotron": ({"hidden_act": "relu2"}, "its layers do not hand the layout of packed rows to their attention"),
    "zaya": ({**EXPERTS, "num_experts_per_tok": 1, "router_hidden_size": 16}, "convolution layers leaks"),
    "inkling_text": (
        {
            **ROUTED, "n_routed_experts": 4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
            "swa_head_dim": 8, "sliding_window_size": 5, "d_rel": 4, "rel_extent": 16,
            "layer_types": ["hybrid_sliding", "hybrid"], "mlp_layer_types": ["dense", "sparse"],
        },
        "convolution layers leaks",
    ),
    "hy_v4": (
        {
            **DSA, "mlp_layer_types": ["dense", "sparse"], "n_group": 1, "topk_group": 1, "hc_mult": 2,
            "indexer_types": ["full", "shared"],
        },
        "its layers of indexed_attention are not supported",
    ),
    "deepseek_v4": (
        {
            **ROUTED, "n_routed_experts": 4, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 8, "o_groups": 2,
            "o_lora_rank": 8, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 2, "sliding_window": 5,
            "hc_mult": 2, "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
            "mlp_layer_types": ["moe", "moe"],
        },
        "its layers of compressed_sparse_attention, heavily_compressed_attention are not supported",
    ),
}  # fmt: skip
