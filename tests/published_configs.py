"""Configurations of published models, without weights: the numbers of their config.json on the Hugging Face hub.

- Qwen2.5-VL: https://huggingface.co/Qwen/Qwen2.5-VL-7B-Instruct/blob/main/config.json, and those of 3B and 32B; also in
  table 1 of https://arxiv.org/abs/2502.13923.
- Qwen3-30B-A3B: https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
- SmolLM2: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct/blob/main/config.json
"""

from transformers import LlamaConfig, Qwen2_5_VLConfig, Qwen3MoeConfig

# hidden size, MLP size, layers, heads, key-value heads, vocabulary, tied embeddings, MLP size of the vision tower
QWEN_VL = {
    "qwen2.5-vl-3b": (2048, 11008, 36, 16, 2, 151936, True, 3420),
    "qwen2.5-vl-7b": (3584, 18944, 28, 28, 4, 152064, False, 3420),
    "qwen2.5-vl-32b": (5120, 27648, 64, 40, 8, 152064, False, 3456),
}


def qwen_vl(name):
    hidden, inner, layers, heads, kv_heads, vocabulary, tied, vision_inner = QWEN_VL[name]
    text = {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocabulary, "max_position_embeddings": 128000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }  # fmt: skip
    vision = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": vision_inner, "num_heads": 16, "patch_size": 14,
        "out_hidden_size": hidden, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
    }  # fmt: skip
    ids = {"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652}
    return Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, **ids, tie_word_embeddings=tied, dtype="bfloat16",
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )  # fmt: skip


def qwen3_moe():
    return Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        vocab_size=151936, max_position_embeddings=40960, tie_word_embeddings=False, dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip


def smollm2():
    return LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True, dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip


PUBLISHED = {
    **{name: (lambda name=name: qwen_vl(name)) for name in QWEN_VL},
    "qwen3-30b-a3b": qwen3_moe,
    "smollm2-135m": smollm2,
}


def write(folder):
    """A directory with a config.json for each."""
    for name, config in PUBLISHED.items():
        config().save_pretrained(folder / name)


def add_missing_tokens(tokenizer, config):
    """Give each id of the model a token: others are suppressed, and vLLM on a GPU suppresses 1024 at most."""
    tokenizer.add_tokens([f"<{i}>" for i in range(len(tokenizer), config.get_text_config().vocab_size)])
