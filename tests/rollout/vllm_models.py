"""Tiny models with random weights that vLLM takes on a CPU: head size 32, a vocabulary as large as the tokenizer's."""

import json
from pathlib import Path

import torch
import transformers

from rlkit.data import load_task
from rlkit.vlm import build_tiny
from rlkit.vlm.tiny import CHAT_TEMPLATE, tiny_tokenizer

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.2,
}  # fmt: skip
VISION3 = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 64, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
    "in_channels": 3, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}


def build(kind: str, path: str) -> None:
    """Write the model directory of a kind: weights, config, tokenizer and processor."""
    torch.manual_seed(0)
    if kind == "qwen2_5_vl":
        return build_tiny(path, load_task("digits").train, warm_up_steps=0)
    tokenizer = tiny_tokenizer(["What digit is this?", "user assistant"])
    ids = tokenizer.convert_tokens_to_ids
    text = {**TEXT, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    processor = tokenizer
    if kind == "qwen3_vl":
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
        names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
        names |= {"vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"}
        config = transformers.Qwen3VLConfig(
            text_config=text | {"rope_parameters": rope},
            vision_config=VISION3,
            tie_word_embeddings=False,
            **{name: ids(f"<|{token}|>") for name, token in names.items()},
        )
        processor = transformers.Qwen3VLProcessor(
            image_processor=transformers.Qwen2VLImageProcessor(
                patch_size=16, size={"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
            ),
            tokenizer=tokenizer,
            video_processor=transformers.Qwen3VLVideoProcessor(),
            chat_template=CHAT_TEMPLATE,
        )
        model = transformers.Qwen3VLForConditionalGeneration(config)
    elif kind == "qwen3_moe":
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**text, **EXPERTS))
    else:
        tied = {"qwen2": False, "qwen2_tied": True}[kind]
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**text, tie_word_embeddings=tied))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(path)
    processor.save_pretrained(path)


def register(path) -> None:
    """Register a model's class with vLLM in this process; otherwise vLLM imports it in another process."""
    from vllm import ModelRegistry

    (name,) = json.loads((Path(path) / "config.json").read_text())["architectures"]
    if name in ModelRegistry.models:
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
