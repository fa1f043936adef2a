"""Tiny models of vision families with the processors that belong to them, built here without a download."""

import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

import transformers
from transformers import AutoConfig, AutoModelForImageTextToText

from rlkit.vlm.tiny import _tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from test_families import VISION, seeded  # noqa: E402

EDGES = "start", "end"
ENDS = (("start", "bos"), ("end", "eos"))
CORPUS = ["What digit is this? how many\n", "user assistant system", *["a\n\n\nb\n\n\n\nc"] * 9]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}IMAGE{% elif p['type'] == 'text' %}{{ p['text'] }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SMALL = {"height": 16, "width": 16}


def tokenizer(chat_image, *special, **named):
    """With the special tokens of a family, and a chat template that writes `chat_image` where an image is."""
    found = _tokenizer(CORPUS, 400, [*SPECIAL, *special, *named.values()], extra_special_tokens=named)
    found.chat_template = CHAT.replace("IMAGE", chat_image)
    return found


def with_videos(tokenizer, chat_video, kind="video"):
    """Its chat template then writes `chat_video` where a video is."""
    start = "{% elif p['type'] == 'text' %}"
    video = f"{{% elif p['type'] == '{kind}' %}}" + chat_video
    tokenizer.chat_template = tokenizer.chat_template.replace(start, video + start)
    return tokenizer


def with_audios(tokenizer, chat_audio):
    """Its chat template then writes `chat_audio` where an audio is."""
    return with_videos(tokenizer, chat_audio, "audio")


def llava():
    t = tokenizer("<image>", image_token="<image>")
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=SMALL)
    return transformers.LlavaProcessor(
        images, t, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


PINPOINTS = [[16, 32], [32, 16], [32, 32]]


def llava_next():
    t = tokenizer("<image>", image_token="<image>")
    sizes = {"size": {"shortest_edge": 16}, "crop_size": SMALL, "image_grid_pinpoints": PINPOINTS}
    return transformers.LlavaNextProcessor(
        transformers.LlavaNextImageProcessor(**sizes),
        t,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def llava_onevision():
    t = with_videos(tokenizer("<image>", image_token="<image>", video_token="<video>"), "<video>")
    images = transformers.LlavaOnevisionImageProcessor(size=SMALL, image_grid_pinpoints=PINPOINTS)
    videos = transformers.LlavaOnevisionVideoProcessor(size=SMALL)
    options = {"num_image_tokens": 4, "vision_feature_select_strategy": "full"}
    return transformers.LlavaOnevisionProcessor(images, t, videos, **options)


def llava_next_video():
    t = with_videos(tokenizer("<image>", image_token="<image>", video_token="<video>"), "<video>")
    sizes = {"size": {"shortest_edge": 16}, "crop_size": SMALL}
    return transformers.LlavaNextVideoProcessor(
        transformers.LlavaNextVideoVideoProcessor(**sizes),
        transformers.LlavaNextImageProcessor(**sizes, image_grid_pinpoints=PINPOINTS),
        t,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def muse_glimmer():
    named = ["image_start", "image_end", "vid_start", "vid_end", "vid_frame_separator"]
    t = tokenizer("<|patch|>", "<|patch|>", "<|video|>", *(f"<|{name}|>" for name in named))
    images = transformers.MuseGlimmerImageProcessor(patch_size=4, max_image_tokens=16)
    videos = transformers.MuseGlimmerVideoProcessor(patch_size=4, max_video_frame_tokens=4)
    return transformers.MuseGlimmerProcessor(images, videos, with_videos(t, "<|video|>"))


def exaone4_5():
    t = tokenizer("<|image_pad|>", image_token="<|image_pad|>", video_token="<|video_pad|>")
    images = transformers.Qwen2VLImageProcessor(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024})
    videos = transformers.Qwen2VLVideoProcessor(
        patch_size=4,
        size={"shortest_edge": 64, "longest_edge": 256},
        image_mean=images.image_mean,
        image_std=images.image_std,
    )
    return transformers.Exaone4_5_Processor(images, with_videos(t, "<|video_pad|>"), videos)


def hyperclovax_vision_v2():
    t = tokenizer("<|image_pad|>", image_token="<|image_pad|>", video_token="<|video_pad|>")
    images = transformers.Qwen2VLImageProcessor(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024})
    return transformers.HyperCLOVAXVisionV2Processor(images, t, transformers.Qwen2VLVideoProcessor(patch_size=4))


def video_llama_3():
    t = tokenizer("<|image_pad|>", image_token="<|image_pad|>", video_token="<|video_pad|>")
    images = transformers.VideoLlama3ImageProcessor(patch_size=4, size={"shortest_edge": 64, "longest_edge": 512})
    videos = transformers.VideoLlama3VideoProcessor(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024})
    return transformers.VideoLlama3Processor(images, with_videos(t, "<|video_pad|>"), videos)


def internvl():
    t = tokenizer(
        "<IMG_CONTEXT>\n", start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )  # fmt: skip
    images = transformers.GotOcr2ImageProcessor(size=SMALL, min_patches=1, max_patches=4)
    videos = transformers.InternVLVideoProcessor(size=SMALL)
    return transformers.InternVLProcessor(images, with_videos(t, "<video>\n"), videos, image_seq_length=4)


ROWS = [f"<row_{i + 1}_col_{j + 1}>" for i in range(6) for j in range(6)]


def idefics3():
    t = tokenizer("<image>", "<global-img>", *ROWS, "<fake_token_around_image>", "<image>", "<end_of_utterance>")
    images = transformers.Idefics3ImageProcessor(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return transformers.Idefics3Processor(images, t, image_seq_len=4)


def smolvlm():
    t = tokenizer("<image>", "<global-img>", *ROWS, "<fake_token_around_image>", "<image>", "<end_of_utterance>")
    images = transformers.SmolVLMImageProcessor(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    sizes = {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 16}}
    return transformers.SmolVLMProcessor(images, t, transformers.SmolVLMVideoProcessor(**sizes), image_seq_len=4)


def gemma3():
    t = tokenizer(
        "<start_of_image>", boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"
    )
    return transformers.Gemma3Processor(transformers.Gemma3ImageProcessor(size=SMALL), t, image_seq_length=4)


def glm4v(kind="Glm4v"):
    t = tokenizer(
        "<|begin_of_image|><|image|><|end_of_image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>",
        "<|end_of_video|>", image_token="<|image|>", video_token="<|video|>",
    )  # fmt: skip
    size = {"size": {"shortest_edge": 8 * 8 * 2, "longest_edge": 32 * 32 * 2}}
    size = {"min_image_tokens": 1, "max_image_tokens": 16} if kind == "Glm5Next" else size
    of = {part: getattr(transformers, kind + part) for part in ("ImageProcessor", "Processor", "VideoProcessor")}
    images = of["ImageProcessor"](patch_size=4, merge_size=2, temporal_patch_size=2, **size)
    size = size if kind == "Glm5Next" else {"size": {"shortest_edge": 8 * 8 * 2, "longest_edge": 16 * 16 * 4}}
    videos = of["VideoProcessor"](patch_size=4, merge_size=2, temporal_patch_size=2, **size)  # of a video's frames
    return of["Processor"](images, with_videos(t, "<|begin_of_video|><|video|><|end_of_video|>"), videos)


def qwen_vl(kind="Qwen3VL"):
    t = tokenizer(
        "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|>", "<|vision_end|>",
        image_token="<|image_pad|>", video_token="<|video_pad|>",
    )  # fmt: skip
    size = {"shortest_edge": 8 * 8, "longest_edge": 32 * 32}
    images = transformers.Qwen2VLImageProcessor(patch_size=4, size=size)
    videos = getattr(transformers, "Qwen3VLVideoProcessor" if kind == "Qwen3VL" else "Qwen2VLVideoProcessor")
    size = {"shortest_edge": 8 * 8, "longest_edge": 16 * 16 * (4 if kind == "Qwen3VL" else 1)}  # of Qwen3, a video's
    with_videos(t, "<|vision_start|><|video_pad|><|vision_end|>")
    norm = {"image_mean": images.image_mean, "image_std": images.image_std}  # vLLM normalizes videos as images
    return getattr(transformers, f"{kind}Processor")(images, t, videos(patch_size=4, size=size, **norm))


def gemma3n():
    named = {f"{end}_token": f"<{end}>" for end in ("boi", "eoi", "boa", "eoa")}
    named |= {"image_token": "<image_soft_token>", "audio_token": "<audio_soft_token>"}
    t = with_audios(tokenizer("<image_soft_token>", **named), "<audio_soft_token>")
    ears = transformers.Gemma3nAudioFeatureExtractor(feature_size=8)
    images = transformers.SiglipImageProcessor(size={"height": 32, "width": 32})
    return transformers.Gemma3nProcessor(ears, images, t, audio_seq_length=12, image_seq_length=4)


def gemma4(kind="Gemma4"):
    named = {f"{end}_token": f"<{end}>" for end in ("boi", "eoi", "boa", "eoa")}
    t = tokenizer("<image_soft_token>", image_token="<image_soft_token>", audio_token="<audio>", **named)
    options = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    of = {part: getattr(transformers, kind + part) for part in ("ImageProcessor", "VideoProcessor", "Processor")}
    t = with_audios(with_videos(t, "<|video|>"), "<audio>")
    size = {} if kind.endswith("Unified") else {"feature_size": 8}
    ears = getattr(transformers, f"{kind}AudioFeatureExtractor")(**size)
    return of["Processor"](ears, of["ImageProcessor"](**options), t, of["VideoProcessor"](**options))


OMNI_PATCH = 64  # transformers resizes each frame of a video to at least 128 * 28 * 28 pixels, of any model


def omni(kind="Qwen2_5Omni"):
    named = {f"{name.lower()}_token": f"<|{name}|>" for name in ("IMAGE", "VIDEO", "AUDIO")}
    named |= {f"{kind}_{end}_token": f"<|{kind}_{end}|>" for kind in ("vision", "audio") for end in ("bos", "eos")}
    t = tokenizer("<|vision_bos|><|IMAGE|><|vision_eos|>", **named)
    with_videos(with_audios(t, "<|audio_bos|><|AUDIO|><|audio_eos|>"), "<|vision_bos|><|VIDEO|><|vision_eos|>")
    images = transformers.Qwen2VLImageProcessor(
        patch_size=OMNI_PATCH, size={"shortest_edge": (2 * OMNI_PATCH) ** 2, "longest_edge": (8 * OMNI_PATCH) ** 2}
    )
    videos = transformers.Qwen2VLVideoProcessor(
        patch_size=OMNI_PATCH, image_mean=images.image_mean, image_std=images.image_std
    )
    ears = transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=4)
    return getattr(transformers, f"{kind}Processor")(images, videos, ears, t)


def lfm2_vl():
    named = {"image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"}
    t = tokenizer("<image>", image_token="<image>", image_thumbnail_token="<|img_thumbnail|>", **named)
    images = transformers.Lfm2VlImageProcessor(
        encoder_patch_size=4, tile_size=16, max_num_patches=64, min_image_tokens=4, max_image_tokens=16
    )
    return transformers.Lfm2VlProcessor(images, t)


def llama4():
    named = ["start", "end", "x_separator", "y_separator"]
    special = [f"<|{'tile' if 'sep' in name else 'image'}_{name}|>" for name in named]
    t = tokenizer("<|image|>", "<|image|>", "<|patch|>", *special)
    images = transformers.Llama4ImageProcessor(size=SMALL, max_patches=4)
    return transformers.Llama4Processor(images, t, patch_size=4)


def minicpmv4_6():
    kinds = "image", "slice", "image_id"
    named = {f"{kind}_{end}_token": f"<{'/' * (end == 'end')}{kind}>" for kind in kinds for end in ("start", "end")}
    t = tokenizer("<|image_pad|>", image_token="<|image_pad|>", video_token="<|video_pad|>", **named)
    options, t = {"patch_size": 4, "scale_resolution": 16}, with_videos(t, "<|video_pad|>")
    return transformers.MiniCPMV4_6Processor(
        transformers.MiniCPMV4_6ImageProcessor(**options, max_slice_nums=4),
        transformers.MiniCPMV4_6VideoProcessor(**options),
        t,
    )


def mistral3():
    t = tokenizer("[IMG]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
    images = transformers.PixtralImageProcessor(patch_size=8, size={"longest_edge": 32})
    return transformers.PixtralProcessor(images, t, patch_size=4, spatial_merge_size=2)


def kimi_k25():
    t = tokenizer("<|media_pad|>", image_token="<|media_pad|>", video_token="<|kimi_k25_video_placeholder|>")
    with_videos(t, "<|kimi_k25_video_placeholder|>")
    size = {"max_height": 8, "max_width": 8}  # in patches
    images = transformers.Kimi_K25ImageProcessor(patch_size=4, merge_size=2, size=size)
    videos = transformers.Kimi_K25VideoProcessor(patch_size=4, merge_size=2, size=size)
    return transformers.Kimi_K25Processor(images, t, videos)


def paddleocr_vl():
    t = tokenizer(
        "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|>", "<|vision_end|>",
        image_token="<|image_pad|>", video_token="<|video_pad|>",
    )  # fmt: skip
    images = transformers.PaddleOCRVLImageProcessor(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024})
    return transformers.PaddleOCRVLProcessor(images, t)


def cohere_compass():
    t = tokenizer(
        "<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
        "<|VISION_START|>",
        "<|VISION_END|>",
        image_token="<|IMAGE_PAD|>",
        video_token="<|VIDEO_PAD|>",
    )
    images = transformers.CohereCompassImageProcessor(
        patch_size=4, size={"shortest_edge": 8 * 8, "longest_edge": 32 * 32}
    )
    videos = transformers.CohereCompassVideoProcessor(
        patch_size=4, size={"shortest_edge": 8 * 8, "longest_edge": 16 * 16 * 4}
    )
    return transformers.CohereCompassProcessor(
        images, with_videos(t, "<|VISION_START|><|VIDEO_PAD|><|VISION_END|>"), videos
    )


def cosmos3_edge():
    t = tokenizer(
        "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|>", "<|vision_end|>",
        image_token="<|image_pad|>", video_token="<|video_pad|>",
    )  # fmt: skip
    images = transformers.Cosmos3EdgeImageProcessor(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024})
    videos = transformers.Cosmos3EdgeVideoProcessor(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024})
    return transformers.Cosmos3EdgeProcessor(
        images, with_videos(t, "<|vision_start|><|video_pad|><|vision_end|>"), videos
    )


def ernie4_5_vl_moe():
    named = {f"{kind}_{end}_token": f"<|{kind}_{end}|>".upper() for kind in ("image", "video") for end in EDGES}
    t = tokenizer(
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        image_token="<|IMAGE_PLACEHOLDER|>",
        video_token="<|VIDEO_PLACEHOLDER|>",
        **named,
    )
    images = transformers.Ernie4_5_VLMoeImageProcessor(
        patch_size=4, size={"shortest_edge": 8 * 8, "longest_edge": 32 * 32}
    )
    videos = transformers.Ernie4_5_VLMoeVideoProcessor(
        patch_size=4, size={"shortest_edge": 8 * 8, "longest_edge": 16 * 16}, draw_on_frames=False
    )
    return transformers.Ernie4_5_VLMoeProcessor(
        images, with_videos(t, "<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>"), videos
    )


FAMILIES = {
    "qwen2_vl": lambda: qwen_vl("Qwen2VL"),
    "qwen2_5_vl": lambda: qwen_vl("Qwen2_5_VL"),
    "qwen3_vl": qwen_vl,
    "qwen3_vl_moe": qwen_vl,
    "qwen3_5": qwen_vl,
    "qwen3_5_moe": qwen_vl,
    "qwen4_exp": qwen_vl,
    "cohere_compass": cohere_compass,
    "cosmos3_edge": cosmos3_edge,
    "cosmos3_omni": qwen_vl,
    "qwen2_5_omni_thinker": omni,
    "qwen3_omni_moe_thinker": lambda: omni("Qwen3OmniMoe"),
    "glm4v_moe": glm4v,
    **dict.fromkeys(("glm46v", "glm_ocr"), lambda: glm4v("Glm46V")),
    "glm5_next": lambda: glm4v("Glm5Next"),
    "ernie4_5_vl_moe": ernie4_5_vl_moe,
    **{make.__name__: make for make in (glm4v, internvl, llava, idefics3, smolvlm, gemma3, gemma3n)},
    **{make.__name__: make for make in (llava_next, llava_onevision, exaone4_5, hyperclovax_vision_v2, video_llama_3)},
    **{make.__name__: make for make in (llava_next_video, muse_glimmer)},
    **{make.__name__: make for make in (gemma4, kimi_k25, lfm2_vl, llama4, minicpmv4_6, mistral3, paddleocr_vl)},
    "gemma4_unified": lambda: gemma4("Gemma4Unified"),
    "mistral4": mistral3,
}
SIZED = (
    "exaone4_5",
    "gemma4",
    "gemma4_unified",
    "glm5_next",
    "hyperclovax_vision_v2",
    "kimi_k25",
    "lfm2_vl",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "minicpmv4_6",
    "mistral3",
    "muse_glimmer",
    "video_llama_3",
)  # their tensors have the size of each image beside its pixels


@cache
def processor(family):
    made = FAMILIES[family]()
    made.chat_template = made.tokenizer.chat_template
    return made


def model(family):
    """A tiny model with the token ids of the family's processor."""
    reader = processor(family)
    config = deepcopy(VISION[family][0])
    of = reader.tokenizer.convert_tokens_to_ids
    ids = {"image_token_id": getattr(reader.tokenizer, "image_token_id", None) or reader.image_token_id}
    ids["pad_token_id"] = 0
    if hasattr(reader, "video_token_id"):
        ids["video_token_id"] = reader.video_token_id
    if family == "paddleocr_vl":
        ids["video_token_id"] = of("<|video_pad|>")
    if family.endswith("_thinker"):
        config["vision_config"] |= {"patch_size": OMNI_PATCH, "window_size": 4 * OMNI_PATCH}
        config |= {"position_id_per_seconds": 13} if family.startswith("qwen3") else {}  # as published
        ids |= {f"{name}_token_id": of(f"<|{name.upper()}|>") for name in ("image", "video", "audio")}
        ids |= {
            f"{name}_{end}_token_id": of(f"<|{name}_{short}|>") for name in ("vision", "audio") for end, short in ENDS
        }
    elif family.startswith(("qwen", "paddleocr", "cosmos3")):
        ids |= {f"vision_{end}_token_id": of(f"<|vision_{end}|>") for end in ("start", "end")}
    if family == "gemma3n":
        for part, last in (("vision", 20), ("audio", 4)):  # the last ids of the vocabulary
            config[f"{part}_config"]["vocab_offset"] = len(reader.tokenizer) - last
        ids |= {"audio_token_id": reader.audio_token_id}
        ids |= {f"{name}_token_id": of(f"<{name}>") for name in ("boi", "eoi", "boa", "eoa")}
    if family in ("gemma4", "gemma4_unified"):
        ids |= {f"{name}_token_id": of(f"<{name}>") for name in ("boi", "eoi", "boa", "audio")}
        ids["eoa_token_index"] = of("<eoa>")
    if family == "llama4":
        ids["image_token_id"] = of("<|patch|>")
        ids |= {f"{end}_token_index": of(f"<|image_{name}|>") for end, name in (("boi", "start"), ("eoi", "end"))}
    if family == "gemma3":
        ids |= {f"{end}_token_index": of(f"<{name}_of_image>") for end, name in (("boi", "start"), ("eoi", "end"))}
    if family == "cohere_compass":
        ids |= {f"vision_{end}_token_id": of(f"<|VISION_{end.upper()}|>") for end in EDGES}
    if family == "ernie4_5_vl_moe":
        ids |= {
            f"{kind}_{end}_token_id": of(f"<|{kind}_{end}|>".upper()) for kind in ("image", "video") for end in EDGES
        }
    if family.startswith("glm"):
        for end, way in (("start", "begin"), ("end", "end")):
            ids |= {f"{kind}_{end}_token_id": of(f"<|{way}_of_{kind}|>") for kind in ("image", "video")}
    sizes = [name for name in ("vocab_size", *config["text_config"]) if "vocab_size" in name]
    text = {**config["text_config"], **dict.fromkeys(sizes, len(reader.tokenizer))}
    kind = config.pop("model_type", family)
    config = AutoConfig.for_model(kind, **{**config, **ids, "text_config": text})
    # for Qwen see `refused_model`; in Gemma 4 the mask of audios is wrong with eager attention
    attention = "sdpa" if family in ("qwen4_exp", "gemma4") else "eager"
    return seeded(lambda: AutoModelForImageTextToText.from_config(config, attn_implementation=attention))
