"""Cases of `on_vllm.py`, one a family: does the trainer score what vLLM samples as vLLM does?

`family/llama`; `audios/qwen2_5_omni_thinker`, a recipe on audios;
`family/deepseek_v3/other_cpu`, where vLLM is told that this CPU has AMX if it has none, and that it has
none if it has; `positions/Qwen2VL`: position ids; `names/kimi_k25`: names of weights;
`chunks/kimi_k25`: what vLLM's processor makes of images and videos; `long_rope/160`: LongRoPE in a run with sequences
of up to 160 tokens, `long_rope/0` in one that does not say.
"""

import json
import math
import random
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3nProcessor,
    SiglipImageProcessor,
)
from vllm_models import register
from vllm_prepared_inputs import beside_media

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("vlm", "engines", "recipes")]
import family_processors  # noqa: E402
import helpers  # noqa: E402
import test_every_family  # noqa: E402
import vllm_names  # noqa: E402
from family_configs import BASE, TEXT  # noqa: E402
from media_rows import wav  # noqa: E402
from test_families import seeded  # noqa: E402

from rlkit.data import collate  # noqa: E402
from rlkit.engines import make_engine  # noqa: E402
from rlkit.plan.cache import cache_bytes  # noqa: E402
from rlkit.rollout import Sampling, make_rollout  # noqa: E402
from rlkit.rollout.serve import serving  # noqa: E402
from rlkit.rollout.vllm_prepared import has_prepared  # noqa: E402
from rlkit.vlm import (  # noqa: E402
    encode_prompt,
    load_model,
    load_processor,
    rope3d_position_ids,
    rope3d_spec,
    suppressed_token_ids,
    tiny_text_tokenizer,
)
from rlkit.vlm.loading import whole_config  # noqa: E402

# vLLM asks on a CPU for heads of 32 and experts in multiples of 32; not square ones, whose layout their shape would not
# tell
WIDE = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96,
    "moe_intermediate_size": 96, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip
# of latent attention vLLM has one size on a CPU; YaRN is what DeepSeek's own checkpoints have
# vLLM's kernel for the gated delta rule has one size on a CPU
DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
MORE = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "minicpmv4_6"), DELTA),
    "diffllama": {"num_key_value_heads": 2},
    "llama": {"sliding_window": 5},  # which its class does not declare and transformers ignores
    "glm_ocr": {"intermediate_size": 192},  # vLLM's merger has this width, that of transformers 3 * out_hidden_size
    **dict.fromkeys(("llama4", "llama4_text"), {"attention_chunk_size": 32, "floor_scale": 8}),
    **dict.fromkeys(("gemma4_unified", "gemma4_unified_text"), {"global_head_dim": 64}),
    "gemma3n": {"hidden_size_per_layer_input": 32, "max_position_embeddings": 2048},
    **dict.fromkeys(("gemma4", "gemma4_text"), {"global_head_dim": 64, "hidden_size_per_layer_input": 32}),
    "granitemoehybrid": {"mamba_n_heads": 8},  # times 16 is twice the hidden size
    # without experts, which vLLM does not compute on a CPU
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "mamba_ssm_cache_dtype": "bfloat16",
    },
    # published configs have these widths, transformers' classes do not
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm2_vl"), {"conv_dim": 64, "conv_dim_out": 64, "block_dim": 64}),
    "deepseek_v3": {
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 24,
        "first_k_dense_replace": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 128,
        },
    },
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 24,
    "num_key_value_heads": 2,
}  # fmt: skip
MORE["glm4_moe_lite"] = {**LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "first_k_dense_replace": 1}
MORE["axk1"] = MORE["glm4_moe_lite"]
MORE["mistral4"] = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 24, "head_dim": 96,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16,
    },
}  # fmt: skip
# what published configs say and transformers' classes do not, and sizes that vLLM has on a CPU
MORE |= {
    "afmoe": {"score_func": "sigmoid", "n_group": 1, "topk_group": 1, "route_norm": True},
    "cwm": {"bos_token_id": 1},
    "dbrx": {
        "d_model": 64, "n_heads": 2, "attn_config": {"kv_n_heads": 1, "clip_qkv": 0.5, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {**LATENT, "topk_method": "greedy", "scoring_func": "softmax", "n_group": 1, "topk_group": 1},
    "gpt_neox": {"num_key_value_heads": 2},  # it has as many as heads, whatever its configuration says; so has OPT
    "granitemoe_swa": {"shared_intermediate_size": 96},
    "granitemoeshared": {"shared_intermediate_size": 96},
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 96, "route_norm": True, "qk_norm": True},
    "jetmoe": {"kv_channels": 32},
    "longcat_flash": {
        **LATENT, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 96, "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True, "zero_expert_type": "identity",
    },
    "minicpm3": {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "num_key_value_heads": 2, "head_dim": 16},
    **dict.fromkeys(("nanochat", "vaultgemma"), {"final_logit_softcapping": 15.0}),
    "opt": {"word_embed_proj_dim": 64, "num_key_value_heads": 2},
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), DELTA),
    "zamba2": {"head_dim": 64, "num_key_value_heads": 2},  # of 2 * hidden_size
}  # fmt: skip
# for GPUs: sizes of published models, for which vLLM has kernels, and what only published configs say
MORE |= {
    "glm_moe_dsa": {
        **LATENT, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 64, "index_head_dim": 128,
        "index_n_heads": 32, "index_topk": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "indexer_types": ["full", "full"], "first_k_dense_replace": 1,
    },
    "kimi_linear": {
        **LATENT, "qk_nope_head_dim": 128, "v_head_dim": 128, "mla_use_nope": True, "linear_head_dim": 128,
        "linear_num_heads": 2, "first_k_dense_replace": 1, "linear_attn_config": {
            "head_dim": 128, "num_heads": 2, "short_conv_kernel_size": 4, "kda_layers": [1], "full_attn_layers": [2],
        },
    },
}  # fmt: skip
OWNERS = {"Qwen2VL": "qwen2_vl", "Qwen2_5_VL": "qwen2_5_vl"}  # vLLM's name of a model, and of its family
IMAGE, VIDEO = 90, 91
SECTIONS = {"qwen": [6, 5, 5], "padd": [6, 5, 5], "glm4": [4, 2, 2], "glm_": [4, 6, 6], "mini": [4, 2, 2]}
SAMPLING = Sampling(6, temperature=0.8, seed=(0, 1))
TOKENS = 40  # more than a window
SIZE = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_memory_bytes": 16 << 20, "block_size": 32}
LARGE = {
    "gemma3n": {"max_model_len": 2048, "kv_cache_memory_bytes": 128 << 20},  # of many tokens for each image
    "smolvlm": {"max_model_len": 512},  # which writes the time of each frame
}
# vLLM takes one video of GLM-4V in a prompt, and rounds the times of GLM-OCR's frames to seconds
ONE_CLIP = [
    ([{**test_every_family.clip(4, 17, 33), "fps": 2}], [test_every_family.image(20, 20)], "<video> or <image>?")
]


def seeing(family, reader):
    config = family_processors.model(family).config.to_dict()
    text, vision = (
        config["text_config"] | WIDE | MORE.get(family, {}) | {"vocab_size": len(reader.tokenizer)},
        config["vision_config"],
    )
    if "mrope_section" in (rope := text.get("rope_parameters") or {}):
        rope["mrope_section"] = SECTIONS[family[:4]]
    if family.startswith("glm"):
        rope["partial_rotary_factor"], text["use_qk_norm"] = 1.0 if family == "glm_ocr" else 0.5, False
    if family.startswith(("qwen3_5", "minicpmv4_6")):
        rope["partial_rotary_factor"], rope["mrope_section"] = 0.5, [4, 2, 2]
    if family.startswith("qwen3"):  # published configs say what transformers does anyway
        rope["mrope_interleaved"] = text["norm_topk_prob"] = True
    vision |= {"out_hidden_size": 64} if "out_hidden_size" in vision else {}
    vision |= {"hidden_size": 64} if family == "qwen2_vl" else {}
    if family.startswith("gemma4"):
        vision["default_output_length"] = vision["num_soft_tokens"] = 70  # published configs have it
        text["use_bidirectional_attention"] = None  # vLLM has no other attention on a CPU
        del text["per_layer_config"]  # made from global_head_dim
    if family == "gemma3n":  # published configs have the media's own tokens after those of the tokenizer
        config["vision_soft_tokens_per_image"], config["audio_soft_tokens_per_image"] = 256, 188
        vision["model_args"]["msfa_output_resolution"] = 16
        vision["vocab_offset"], config["audio_config"]["vocab_offset"] = (
            len(reader.tokenizer),
            len(reader.tokenizer) + 20,
        )
        text["vocab_size"], text["vocab_size_per_layer_input"] = len(reader.tokenizer) + 24, len(reader.tokenizer)
    if family == "llava_next_video":
        vision["patch_size"] = reader.patch_size
    if family == "muse_glimmer":  # published configs have these names
        vision |= {"output_dim": config["out_hidden_size"], "adapter_dim": config["projector_hidden_size"]}
    if family == "mistral4":
        config["tie_word_embeddings"] = False
    if "omni" in family:  # the rest is what published configs say
        config["audio_config"]["output_dim"] = 64
        vision["image_size"], vision["apply_vit_abs_pos_embed"] = 4 * vision["patch_size"], True
        text["tie_word_embeddings"] = False
    model_type = config.pop("model_type")  # mistral3 for mistral4, which is the type of its text model
    config = AutoConfig.for_model(model_type, **config | {"text_config": text})
    return seeded(lambda: AutoModelForImageTextToText.from_config(config, dtype=torch.float32))


def of_text(family, reader):
    config = BASE | TEXT[family] | WIDE | MORE.get(family, {})
    config |= dict.fromkeys([name for name in config if "vocab_size" in name], len(reader))
    config = AutoConfig.for_model(family, **config)
    return seeded(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager"))


def as_published(family, file):
    """In the names and shapes of the families' own checkpoints; transformers reads them and writes others."""
    tensors = load_file(file)
    if family in ("llava", "llava_next", "llava_next_video", "llava_onevision", "gemma3", "lfm2_vl"):
        tensors = {name.replace("vision_tower.", "vision_tower.vision_model."): x for name, x in tensors.items()}
    if family == "kimi_linear":
        dense = r"block_sparse_moe\.(gate|up|down)_proj"
        tensors = {re.sub(dense, r"mlp.\1_proj", name): x for name, x in tensors.items()}
    if family == "qwen3_vl_moe":
        tensors = {name: x.mT.contiguous() if ".experts." in name else x for name, x in tensors.items()}
    if "omni" in family:
        tensors = {f"thinker.{name}": x for name, x in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    if family in ("mistral3", "mistral4"):  # Mistral's repositories have the weights in its own format, too
        (file.parent / "params.json").write_text("{}")
        save_file({"output.weight": torch.zeros(1)}, file.parent / "consolidated.safetensors")
        index = {"weight_map": dict.fromkeys(tensors, file.name)}
        (file.parent / "model.safetensors.index.json").write_text(json.dumps(index))


def build(family, path):
    if family in family_processors.FAMILIES:
        reader = family_processors.FAMILIES[family]()
        if family == "gemma3n":  # vLLM has the numbers of its tokens in its code
            images = SiglipImageProcessor(size={"height": 256, "width": 256})
            sizes = {"audio_seq_length": 188, "image_seq_length": 256}
            reader = Gemma3nProcessor(reader.feature_extractor, images, reader.tokenizer, **sizes)
        if family == "llava_next_video":  # vLLM divides the size of images by the square of this
            reader.patch_size = 4
        reader.chat_template = reader.tokenizer.chat_template
        if family in ("gemma3", "gemma3n"):  # vLLM looks for tokens that its own tokenizer has
            reader.tokenizer.add_tokens(["\n" * count for count in (1, 2, 3, 4)])
        model = seeing(family, reader)
    else:
        reader = tiny_text_tokenizer(family_processors.CORPUS)
        model = of_text(family, reader)
    for buffer in buffers_of_files(model):
        buffer.normal_()
    if family.startswith(("qwen3_5", "qwen3_next", "minicpmv4_6")):  # vLLM computes them in bfloat16
        model.bfloat16().float()
    model.generation_config.eos_token_id = getattr(reader, "tokenizer", reader).eos_token_id
    model.save_pretrained(path)
    if "omni" in family:
        whole_config(model).save_pretrained(path)
    reader.save_pretrained(path)
    as_published(family, path / "model.safetensors")


def buffers_of_files(model):
    """Biases of routers, and scales of Gemma 4's layers."""
    ends = ("correction_bias", "expert_bias", "layer_scalar")
    return [buffer for name, buffer in model.named_buffers() if name.endswith(ends)]


def measure(family, path):
    """max |sampler's - trainer's logprob|: at first, after the trainer's weights moved, and after they arrived."""
    build(family, path)
    processor, model = load_processor(str(path)), load_model(str(path))
    suppressed = suppressed_token_ids(model.config, getattr(processor, "tokenizer", processor))
    engine = make_engine("fsdp2", model=model, suppressed_token_ids=suppressed, temperature=SAMPLING.temperature)
    sees = hasattr(processor, "tokenizer")
    images = [[test_every_family.image(*size) for size in sizes] if sees else [] for sizes in test_every_family.SIZES]
    rows = [{"question": f"how many {i}?", "images": found} for i, found in enumerate(images)]
    if family in test_every_family.WATCHES and family != "video_llama_3":  # of which vLLM takes images only
        clips = ONE_CLIP if family.startswith("glm") else test_every_family.clips(family)
        rows += [{"question": q, "images": images, "videos": videos} for videos, images, q in clips]
    if family in test_every_family.OMNI:
        clips = test_every_family.OMNI_CLIPS[:2]  # the videos of the third have two rates
        rows += [{"question": q, "images": images, "videos": videos} for videos, images, q in clips]
    if family in test_every_family.HEARS:
        rows += [{"question": q, "images": images, "audios": sounds} for sounds, images, q in test_every_family.SOUNDS]
    if family == "qwen3_omni_moe_thinker":  # for Qwen2.5-Omni vLLM's position ids are wrong
        rows += test_every_family.FILMS[:2]  # it takes sound in all videos or in none
    if family == "llava_next_video":  # of which vLLM takes videos only
        rows = [row for row in rows if not row["images"]]
    prompts = [encode_prompt(processor, row, group_id=i) for i, row in enumerate(rows)]
    register(path)
    try:
        size = SIZE | LARGE.get(family, {})
        rollout = make_rollout("vllm", engine.gathered, model=str(path), processor=processor, **size)
    except ValueError as error:
        return {"error": str(error)}

    facts = {"cache": [cache_bytes(model.config, TOKENS), cache_of_vllm(rollout, TOKENS)]}
    facts["module"] = rollout.llm.apply_model(lambda of_vllm: type(of_vllm).__module__)[0]
    try:
        facts |= distances(engine, rollout, prompts)
        if rollout.takes_prepared:
            by_both = [one for one in prompts if family != "smolvlm" or not one.videos]  # vLLM takes no videos of it
            facts["prepared"] = beside_media(rollout, [prompt for prompt in by_both if has_prepared(prompt)])
        if rollout.weight_dtype == torch.bfloat16:
            facts |= changed_by_casts(engine, rollout)
    except ValueError as error:
        facts["error"] = str(error)
    rollout.close()
    return facts


def distances(engine, rollout, prompts):
    """max |sampler's - trainer's logprob| at each stage."""

    def distance():
        batch = collate(rollout.generate(prompts, SAMPLING, n=2))
        return (engine.infer_batch(batch)["logprobs"] - batch.rollout_logprobs)[batch.mask].abs().max().item()

    facts = {"start": distance()}
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(1.125).copy_(parameter.bfloat16())  # numbers that vLLM can represent in either dtype
        for buffer in buffers_of_files(engine.module):
            buffer.copy_(torch.linspace(1, -1, buffer.numel()))
    facts["unsynced"] = distance()
    rollout.update_weights(engine.get_per_tensor_param())
    return facts | {"synced": distance()}


def measure_long_rope(path, longest):
    """max |sampler's - trainer's logprob| of rows on both sides of 64 tokens, or of short ones, and their lengths."""
    tokenizer, factors = tiny_text_tokenizer(family_processors.CORPUS), [1.0 + i for i in range(16)]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": factors}
    config = AutoConfig.for_model(
        "phi3", **BASE | WIDE | {"vocab_size": len(tokenizer), "original_max_position_embeddings": 64},
        rope_parameters={**rope, "original_max_position_embeddings": 64},
    )  # fmt: skip
    model = seeded(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    suppressed = suppressed_token_ids(config, tokenizer)
    options = {"suppressed_token_ids": suppressed, "temperature": SAMPLING.temperature}
    engine = make_engine("fsdp2", model=load_model(str(path)), longest_sequence=longest, **options)
    size = {**SIZE, "max_model_len": longest}
    rollout = make_rollout("vllm", engine.gathered, model=str(path), processor=tokenizer, **size)
    questions = ["how many?", "how many " * 4, "how many " * (8 if longest is None else 30)]
    prompts = [encode_prompt(tokenizer, {"question": q}, group_id=i) for i, q in enumerate(questions)]
    batch = collate(rollout.generate(prompts, SAMPLING, n=2))
    difference = (engine.infer_batch(batch)["logprobs"] - batch.rollout_logprobs)[batch.mask].abs().max().item()
    facts = {"difference": difference, "lengths": batch.lengths, "max_model_len": rollout.max_model_len}
    rollout.close()
    return facts


def measure_on_server(family, path, port):
    """The same for a language model on a server, to which weights are sent in pieces."""
    build(family, path)
    tokenizer, model = load_processor(str(path)), load_model(str(path))
    suppressed = suppressed_token_ids(model.config, tokenizer)
    engine = make_engine("fsdp2", model=model, suppressed_token_ids=suppressed, temperature=SAMPLING.temperature)
    prompts = [encode_prompt(tokenizer, {"question": f"how many {i}?"}, group_id=i) for i in range(3)]
    options = ["--max-model-len", "256", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(16 << 20)]
    options += ["--block-size", "32"]
    with serving(str(path), port=port, logs=path, options=options) as servers:
        rollout = make_rollout(
            "vllm_server", model=str(path), processor=tokenizer, urls=list(servers), bucket_bytes=1 << 15, timeout=200
        )
        facts = distances(engine, rollout, prompts)
        rollout.close()
    return facts


def changed_by_casts(engine, rollout):
    """vLLM's parameters that the trainer's cast changes, and those that casting all weights would change."""
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(1.001)  # numbers that bfloat16 cannot represent

    def loaded(weights):
        rollout.update_weights(weights)
        return rollout.llm.apply_model(lambda model: {name: x.clone() for name, x in model.named_parameters()})[0]

    whole = loaded(engine.get_per_tensor_param())
    cast = loaded(engine.get_per_tensor_param(dtype=torch.bfloat16))
    rounded = loaded((name, x.bfloat16()) for name, x in engine.get_per_tensor_param())
    sent = sum(x.nbytes for _, x in engine.get_per_tensor_param(dtype=torch.bfloat16))
    return {
        "changed_by_cast": [name for name, x in whole.items() if not torch.equal(x, cast[name])],
        "changed_by_rounding": [name for name, x in whole.items() if not torch.equal(x, rounded[name])],
        "share_of_bytes": sent / sum(x.nbytes for _, x in engine.get_per_tensor_param()),
    }


def cache_of_vllm(rollout, tokens):
    """Bytes of a sequence by vLLM's specs of its layers, without the rest of its last block, as if all were bfloat16.

    On a CPU, vLLM keeps recurrent states in float32.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    (specs,) = rollout.llm.collective_rpc("get_kv_cache_spec")
    total = 0
    for spec in specs.values():
        if isinstance(spec, MambaSpec):
            total += 2 * sum(math.prod(shape) for shape in spec.shapes)
        else:
            limits = (getattr(spec, name, None) for name in ("sliding_window", "attention_chunk_size"))
            kept = min([tokens, *filter(None, limits)])
            total += 2 * kept * spec.unpadded_page_size_bytes // (spec.block_size * spec.dtype.itemsize)
    return total


def positions(name, family):
    """In how many of 200 random rows the position ids are vLLM's own: with its rule for what follows a video, and with
    transformers' rule."""
    from vllm import ModelRegistry
    from vllm.multimodal.inputs import PlaceholderRange

    config = AutoConfig.for_model(family, image_token_id=IMAGE, video_token_id=VIDEO)
    owner = ModelRegistry.models[f"{name}ForConditionalGeneration"].load_model_cls()
    model = owner.__new__(owner)
    model.config = config
    spec, rng, equal = rope3d_spec(config), random.Random(family), [0, 0]
    for _ in range(200):
        row, grids, seconds, features = [3], {IMAGE: [], VIDEO: []}, [], []
        for kind in rng.choices([IMAGE, VIDEO], k=rng.randint(0, 4)):
            t, h, w = (1 if kind == IMAGE else rng.choice([1, 3, 8])), rng.randint(1, 4), rng.randint(1, 4)
            of = "image" if kind == IMAGE else "video"
            data = {f"{of}_grid_thw": SimpleNamespace(data=torch.tensor([t, 2 * h, 2 * w]))}
            if kind == VIDEO:
                seconds.append(rng.choice([0.5, 1.0, 10 / 3, 2 / 23.976]))
                if spec.tokens_per_second is not None:
                    data["second_per_grid_ts"] = SimpleNamespace(data=torch.tensor(seconds[-1], dtype=torch.float64))
            where = PlaceholderRange(offset=len(row), length=t * h * w)
            features.append(SimpleNamespace(modality=of, data=data, mm_position=where))
            grids[kind].append([t, 2 * h, 2 * w])
            row += [kind] * (t * h * w) + [3] * rng.randint(1, 5)
        theirs, delta = model.get_mrope_input_positions(row, features)
        thw = {
            f"{of}_grid_thw": torch.tensor(grids[kind], dtype=torch.long).view(-1, 3)
            for of, kind in (("image", IMAGE), ("video", VIDEO))
        }
        times = torch.tensor(seconds, dtype=torch.float64)
        for i, switch in enumerate((True, False)):
            ids, offset = rope3d_position_ids(
                torch.tensor([row]), **thw, second_per_grid_ts=times, spec=replace(spec, advance_over_time=switch)
            )
            equal[i] += torch.equal(ids[:, 0], theirs) and int(offset) == delta
    return equal


def steps_on_audios(family, path):
    """Two steps of grpo_vlm.py on rows with wav files, two of them also with an image.

    Their tones rise: of one that does not, parts that are shifted sound alike.
    """
    build(family, path / "model")
    register(path / "model")
    lines = []
    for i in range(8):
        (path / f"{i}.wav").write_bytes(wav(300 + 200 * i, 0.3 + 0.1 * i, rise=2000))
        lines.append({"audio": f"{i}.wav", "question": "how many?", "answer": "1"})
        if i % 4 == 1:
            test_every_family.image(20, 20).save(path / f"{i}.png")
            lines[-1]["image"] = f"{i}.png"
    (path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = [
        "--model",
        path / "model",
        "--task",
        path / "rows.jsonl",
        "--heldout",
        "0.25",
        "--steps",
        2,
        "--lr",
        0.02,
    ]
    options += ["--prompts_per_step", 4, "--group_size", 4, "--max_new_tokens", 3, "--warmup_steps", 1]
    options += ["--reward", "helpers:length_is_even", "--rollout", "vllm", "--out", path / "run", "--rollout_options"]
    helpers.run_here("grpo_vlm", *options, *(x for option in SIZE.items() for x in option))
    return helpers.numbers(path / "run")


def facts_of(folder, name):
    what, which, *other_cpu = name.split("/")
    if what == "names":
        folder.joinpath(name).mkdir(parents=True)
        return {"kept": vllm_names.parameters_without_weights(which, folder / name)}
    if what == "chunks":
        folder.joinpath(name).mkdir(parents=True)
        return vllm_names.vision_chunks(which, folder / name)
    if what == "long_rope":
        folder.joinpath(name).mkdir(parents=True)
        return measure_long_rope(folder / name, int(which) or None)
    if what == "audios":
        folder.joinpath(name).mkdir(parents=True)
        return {"steps": steps_on_audios(which, folder / name)}
    if what == "positions":
        return {"equal": positions(which, OWNERS[which])}
    folder.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(dir=folder))  # its name does not say the family: error messages have to
    if not other_cpu:
        return measure(which, path)
    has_amx = torch.cpu._is_amx_tile_supported()
    with mock.patch.object(torch.cpu, "_is_amx_tile_supported", lambda: not has_amx):
        return measure(which, path)
