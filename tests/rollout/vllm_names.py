"""Does vLLM's class of a family know all names under which rlkit hands weights over? It is made, and computes nothing.

For families that vLLM does not compute on a CPU, or reads by the configuration of published files only.
"""

import json
import os
from contextlib import ExitStack
from copy import deepcopy
from unittest import mock

import torch
from family_configs import TEXT
from family_processors import model as vision_model
from family_processors import processor
from test_every_family import prompts, watching_prompts
from test_families import text_model
from transformers import PreTrainedConfig
from vllm_models import register

from rlkit.rollout.vllm_requests import as_trainer_tokens, vision_chunk_prompt
from rlkit.vlm import tiny_text_tokenizer
from rlkit.vlm.checkpoint_weights import checkpoint_buffers, checkpoint_parameters

KIMI_IMAGES = {
    "in_patch_limit": 64, "patch_size": 4, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "merge_kernel_size": 2,
    "fixed_output_tokens": None, "patch_limit_on_one_side": 8, "in_patch_limit_each_frame": 64,
    "in_patch_limit_video": None, "sample_fps": 2.0, "max_num_frames_each_video": None, "temporal_merge_kernel_size": 4,
    "timestamp_mode": "hh:mm:ss.fff",
}  # fmt: skip


ONLY_PUBLISHED = {  # what configurations of published files say and transformers' classes do not
    "glm_moe_dsa": {"first_k_dense_replace": 1},
    "kimi_linear": {
        "first_k_dense_replace": 1, "mla_use_nope": True, "linear_attn_config": {
            "head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4, "kda_layers": [1], "full_attn_layers": [2],
        },
    },
}  # fmt: skip


def write(family, path):
    """A model directory with the file names and the class name of published ones."""
    if family in TEXT:
        model, reader = text_model(family, TEXT[family] | ONLY_PUBLISHED[family]), tiny_text_tokenizer(["words"])
    else:
        model, reader = vision_model(family), processor(family)
    if family == "kimi_k25":
        config = deepcopy(model.config)
        config.tie_word_embeddings = False
        model = type(model)(config)
    model.save_pretrained(path)
    reader.save_pretrained(path)
    if family == "kimi_k25":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "architectures": ["KimiK25ForConditionalGeneration"]}))
        (path / "processor_config.json").unlink()
        (path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": KIMI_IMAGES}))
    register(path)
    return model


def published(family, config):
    """The configuration as vLLM expects it from the remote code of published files."""
    if family == "glm5_next":
        for name in ("mhc", "mla_use_nope", "indexer_rope_interleave", "index_kpool_always_select_tail"):
            setattr(config.text_config, name, True)
        config.text_config.scoring_func, config.text_config.topk_method = "sigmoid", "noaux_tc"
        config.text_config.index_topk_freq = 1
    if family == "glm_moe_dsa":
        config.topk_method = "noaux_tc"
    if family != "ernie4_5_vl_moe":
        return config
    text, vision = config.text_config.to_dict(), config.vision_config
    text = {name: value for name, value in text.items() if name not in ("model_type", "architectures")}
    layers = [1, 1], [text["num_hidden_layers"] - 1] * 2
    flat = PreTrainedConfig(
        **text, pixel_hidden_size=vision.hidden_size, spatial_conv_size=vision.spatial_merge_size,
        temporal_conv_size=2, use_temporal_conv=True, im_patch_id=config.image_token_id,
        moe_layer_start_index=layers[0], moe_layer_end_index=layers[1], architectures=config.architectures,
    )  # fmt: skip
    flat.moe_num_experts = [text["moe_num_experts"]] * 2
    ratio = vision.intermediate_size / vision.hidden_size
    flat.vision_config = PreTrainedConfig(**vision.to_dict() | {"embed_dim": vision.hidden_size, "mlp_ratio": ratio})
    return flat


def parameters_without_weights(family, path):
    """vLLM's parameters that would keep their old weights. A name that it does not know is an error of vLLM."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import destroy_model_parallel, ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    model = write(family, path)
    options = EngineArgs(
        model=str(path), dtype="float32", enforce_eager=True, max_model_len=64, enable_prefix_caching=False,
        enable_chunked_prefill=False,
    )  # fmt: skip
    config = options.create_engine_config()
    config.model_config.hf_config = published(family, config.model_config.hf_config)
    config.model_config.hf_text_config = config.model_config.hf_config.get_text_config()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, VLLM_KIMI_K3_GEMM_AR="0"))  # it needs CUDA's cutlass
        stack.enter_context(set_current_vllm_config(config))
        stack.enter_context(set_default_torch_dtype(torch.float32))
        if "glm" in family:  # sparse attention, which vLLM does not compute on a CPU
            stack.enter_context(mock.patch.object(mla_attention, "get_attn_backend", lambda *_, **__: CPUMLABackend))
        destroy_model_parallel()
        init_distributed_environment(1, 0, "env://", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        of_vllm = initialize_model(config)
        weights = checkpoint_parameters(model, ((name, x.detach()) for name, x in model.named_parameters()))
        loaded = of_vllm.load_weights([*weights, *checkpoint_buffers(model)])
        destroy_model_parallel()
    return sorted({name for name, _ in of_vllm.named_parameters()} - loaded)


def vision_chunks(family, path):
    """What vLLM's own processor makes of prompts with images and videos.

    Whether tokens and sizes are the trainer's, and by how many of 255 levels pixels differ: vLLM resizes by other code.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY

    write(family, path)
    model_config = EngineArgs(model=str(path), dtype="float32", max_model_len=64).create_model_config()
    of_vllm, reader, found = MULTIMODAL_REGISTRY.create_processor(model_config), processor(family), []
    for sample in [*prompts(family)[1:], *watching_prompts(family)]:
        sent = vision_chunk_prompt(sample, reader, model_config.hf_config)
        items = of_vllm.info.parse_mm_data(sent["multi_modal_data"])
        made = of_vllm(sent["prompt_token_ids"], mm_items=items, hf_processor_mm_kwargs={})
        tokens = as_trainer_tokens(made["prompt_token_ids"], reader, sample.token_ids)
        one = {"tokens": tokens == sample.token_ids, "sizes": [], "levels": []}
        of_trainer = {"image": media(sample.vision, "pixel_values", "image_grid_thw")}
        of_trainer["video_chunk"] = media(sample.vision, "pixel_values_videos", "video_grid_thw")
        chunks = media(made["mm_kwargs"].get_data(), "pixel_values", "grid_thws")
        for (pixels, size), chunk in zip(chunks, sent["multi_modal_data"]["vision_chunk"], strict=True):
            expected, expected_size = next(of_trainer[chunk["type"]])
            one["sizes"].append(size.tolist() == expected_size.tolist())
            one["levels"].append((pixels - (expected + 1) * 127.5).abs().max().item())
        found.append(one)
    return found


def media(tensors, pixels, sizes):
    """(pixels, size) of each image or chunk of a video."""
    if pixels not in tensors:
        return iter(())
    return zip(tensors[pixels].split(tensors[sizes].prod(1).tolist()), tensors[sizes], strict=True)
