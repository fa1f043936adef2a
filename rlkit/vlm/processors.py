"""Processors and tokenizers: loading, their media and their special tokens; torchvision is optional."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlkit.data.thinking_tags import THINKING_TAGS
from rlkit.vlm.families import REFUSED_VISION_FAMILIES, TEXT_ROWS_ONLY
from rlkit.vlm.loading import has_vision, load_config, model_path

QWEN2_5_OMNI, QWEN3_OMNI, GEMMA3N = "Qwen2_5OmniProcessor", "Qwen3OmniMoeProcessor", "Gemma3nProcessor"
ONEVISION, NEXT_VIDEO, VIDEO_LLAMA = "LlavaOnevisionProcessor", "LlavaNextVideoProcessor", "VideoLlama3Processor"
FRAMES_NOT_COUNTED = frozenset({ONEVISION, NEXT_VIDEO})  # these do not say how many frames a video has
# these repeat a placeholder and report no replacements of text; a video may have sound
OMNI_PROCESSORS = frozenset({QWEN2_5_OMNI, QWEN3_OMNI})
# processors whose audios are tested: tokens, position ids, training and sampling
AUDIO_PROCESSORS = OMNI_PROCESSORS | {GEMMA3N, "Gemma4Processor", "Gemma4UnifiedProcessor"}
# processor -> why it is given no images and videos
WITHOUT_MEDIA = {
    "MiniMaxM3VLProcessor": TEXT_ROWS_ONLY["minimax_m3_vl"],
    "PerceptionLMProcessor": TEXT_ROWS_ONLY["perception_lm"],
    "VideoLlavaProcessor": TEXT_ROWS_ONLY["video_llava"],
}
GLM_PROCESSORS = frozenset({"Glm4vProcessor", "Glm46VProcessor"})  # of GLM-4.1V, 4.5V, 4.6V and OCR
# processors without a token for a video, which write its frames as images
FRAMES_AS_IMAGES = frozenset({"SmolVLMProcessor"})
# processors whose videos are tested likewise
VIDEO_PROCESSORS = frozenset(
    {
        "Qwen2VLProcessor",
        "Qwen2_5_VLProcessor",
        "Qwen3VLProcessor",
        *GLM_PROCESSORS,
        "InternVLProcessor",
        "Gemma4Processor",
        "Gemma4UnifiedProcessor",
        "MiniCPMV4_6Processor",
        "Ernie4_5_VLMoeProcessor",
        "CohereCompassProcessor",
        "Cosmos3EdgeProcessor",
        "Glm5NextProcessor",
        "Kimi_K25Processor",
        *FRAMES_AS_IMAGES,
        *FRAMES_NOT_COUNTED,
        VIDEO_LLAMA,
        "MuseGlimmerProcessor",
        "Exaone4_5_Processor",
        *OMNI_PROCESSORS,
    }
)
TWO_FRAMES_AT_LEAST = GLM_PROCESSORS | {"Qwen3VLProcessor", "CohereCompassProcessor"}
# processors that stack the videos of a row, which then have the same number of frames
STACKED_VIDEOS = frozenset({"InternVLProcessor", "MiniCPMV4_6Processor", *FRAMES_NOT_COUNTED, *FRAMES_AS_IMAGES})


def placeholder_id(processor: Any, kind: str) -> Any:
    """The token that stands for an image, a video or an audio in a prompt; None if the processor has none."""
    name = f"{kind}_token_id"
    return getattr(processor, name, None) or getattr(getattr(processor, "tokenizer", None), name, None)


def feature_id(processor: Any) -> Any:
    """The token that `Sample.token_ids` has for each feature of an image; None if the processor has none.

    In Gemma 3 and Llama 4 it is not the token that stands for an image in a prompt.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    if hasattr(processor, "img_patch_token"):  # Llama 4
        return tokenizer.convert_tokens_to_ids(processor.img_patch_token)
    return getattr(tokenizer, "image_token_id", None)


def placeholder_ids(config: Any) -> list[int]:
    """Ids of the tokens that stand for images, videos and audio or enclose them: a policy must not sample these."""
    names = [f"{kind}_token_id" for kind in ("image", "video", "audio")]
    names += [f"{kind}_{end}_token_id" for kind in ("vision", "image", "video") for end in ("start", "end")]
    brackets = ("boi", "eoi", "boa", "eoa")  # of Gemma
    names += [f"{end}_token_{number}" for end in brackets for number in ("id", "index")]
    found = (getattr(config, name, None) for name in names)
    return sorted({token for token in found if isinstance(token, int)})


def suppressed_token_ids(config: Any, tokenizer: Any) -> torch.Tensor:
    """Token ids that sampler and trainer both exclude from the distribution, int64 [n].

    These are placeholders, and rows of the output layer without a token in the tokenizer's vocabulary: models round its
    size up, and some vocabularies have holes.
    """
    size, tokens = getattr(config, "text_config", config).vocab_size, {*placeholder_ids(config)}
    if config.model_type == "llama4":  # its config has the token of an image's features only
        tokens |= {tokenizer.get_vocab().get("<|image|>")} - {None}
    if config.model_type == "internvl":  # its config has no token of a video
        tokens |= {tokenizer.video_token_id}
    known = set(tokenizer.get_vocab().values())
    if len(known) < len(tokenizer):  # several tokens have one text, as bytes have in Mistral's tokenizers
        known |= set(range(len(tokenizer)))
    return torch.tensor([i for i in range(size) if i in tokens or i not in known], dtype=torch.long)


def check_vocabulary(processor: Any, config: Any) -> None:
    """Refuse a tokenizer with tokens that have no embedding, which would end a run where the first one appears.

    Special tokens that the chat template does not write are let through. Gemma 3's text models are published with the
    tokenizer of those with images, whose image token (262144) is one beyond their embedding.

    Args:
        processor: a processor or tokenizer.
        config: of the model.

    Raises:
        ValueError: it names the first of these tokens.
    """
    tokenizer, size = getattr(processor, "tokenizer", processor), config.get_text_config().vocab_size
    template = str(processor.chat_template)
    unused = {i for i, x in tokenizer.added_tokens_decoder.items() if x.special and x.content not in template}
    beyond = sorted((i, token) for token, i in tokenizer.get_vocab().items() if i >= size and i not in unused)
    if beyond:
        raise ValueError(
            f"vocab_size: expected at least {beyond[-1][0] + 1} for the tokens of the model's tokenizer, got {size}, "
            f"so that {beyond[0][1]!r} has no embedding"
        )


def without_video_processor(processor_class: Any) -> Any:
    """A subclass of a processor class without its video processor, which needs torchvision.

    transformers reads the parts of a processor from the signature of its constructor. The class name and the video
    processor's configuration are kept, so a saved processor loads elsewhere with both parts.
    """

    from transformers import ProcessorMixin

    class WithoutVideo(processor_class):
        video_config: dict[str, Any] | None = None
        font: str | None = None  # path

        def __init__(
            self,
            image_processor: Any = None,
            tokenizer: Any = None,
            chat_template: Any = None,
            image_seq_length: int | None = None,  # for InternVL; transformers passes what is named here
        ) -> None:
            options = {} if image_seq_length is None else {"image_seq_length": image_seq_length}
            super().__init__(image_processor, tokenizer, chat_template=chat_template, **options)

        def to_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            extra = {} if self.video_config is None else {"video_processor": self.video_config}
            return {**super().to_dict(*args, **kwargs), **extra}

        def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
            """Without `processor_class.save_pretrained`: that of ERNIE 4.5 VL reads the video processor's font."""
            if self.font is not None:
                Path(save_directory).mkdir(parents=True, exist_ok=True)
                Path(save_directory, Path(self.font).name).write_bytes(Path(self.font).read_bytes())
            return ProcessorMixin.save_pretrained(self, save_directory, *args, **kwargs)

    WithoutVideo.__name__ = WithoutVideo.__qualname__ = processor_class.__name__
    return WithoutVideo


def load_processor(
    path: str | Path,
    *,
    trust_remote_code: bool = False,
    video_fps: float = 2.0,
    video_frames: int = 32,
    video_sound: bool = False,
    **options: Any,
) -> Any:
    """Loads the processor of a vision-language model, or the tokenizer of a text model.

    Args:
        path: a model directory, hub id or `modelscope:OWNER/NAME`.
        trust_remote_code: run processor code that lies in the model's repository.
        video_fps, video_frames: frames per second that the model sees of a video, and the most frames; see
            `rlkit.vlm.load_video`. They become the video processor's `fps` and `max_frames`.
        video_sound: the model hears the sound of video files; it becomes the video processor's `use_audio_in_video`.
        options: for the image processor, e.g. its `size`, the pixel budget (for Qwen-VL also `min_pixels` and
            `max_pixels`).

    Raises:
        ValueError: no such model, one of `REFUSED_VISION_FAMILIES`, one without a processor, an option that its image
            processor does not have, options for a text model, or `video_sound` for a model that hears nothing.
    """
    import transformers

    if not video_fps > 0 or video_frames < 1:
        raise ValueError(f"video_fps, video_frames: expected more than 0, got {video_fps} and {video_frames}")
    path = model_path(path)
    config = load_config(path, trust_remote_code=trust_remote_code)
    if not has_vision(config):
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ValueError(f"model {path!r}: {error}") from error
        if options:
            raise ValueError(f"image processor options: expected none for a text model, got {next(iter(options))!r}")
        _check_video_sound(tokenizer, video_sound)
        return tokenizer
    if (why := REFUSED_VISION_FAMILIES.get(config.model_type)) is not None:
        raise ValueError(f"model {path!r}: expected a family with supported images, got {config.model_type}: {why}")
    options["trust_remote_code"] = trust_remote_code
    video_config = _video_config(path)
    font = _font(path, video_config or {})
    no_processor = f"model {path!r}: expected a processor for this vision-language model, got none that can be loaded"
    try:
        processor = transformers.AutoProcessor.from_pretrained(path, **options)
    except (ImportError, OSError, ValueError) as error:
        name = transformers.models.auto.processing_auto.PROCESSOR_MAPPING_NAMES.get(config.model_type)
        if transformers.utils.is_torchvision_available() or name is None:
            raise ValueError(f"{no_processor}: {error}") from error
        processor_class = getattr(transformers, name)
        try:
            processor = without_video_processor(processor_class).from_pretrained(path, **options)
        except (ImportError, OSError, ValueError) as error:
            raise ValueError(f"{no_processor}: {error}") from error
        processor.video_config, processor.font = video_config, font
    if not hasattr(processor, "image_processor"):  # AutoProcessor silently falls back to the tokenizer
        raise ValueError(f"{no_processor}: no preprocessor_config.json")
    valid = getattr(processor.image_processor, "valid_kwargs", None)  # other options would be silently ignored
    if valid is not None and (unknown := options.keys() - valid.__annotations__.keys() - {"trust_remote_code"}):
        kind, names = type(processor.image_processor).__name__, ", ".join(valid.__annotations__)
        raise ValueError(f"image processor options: expected some of {kind} ({names}), got {sorted(unknown)[0]!r}")
    _check_video_sound(processor, video_sound)
    name = type(processor).__name__
    if name in VIDEO_PROCESSORS and (settings := getattr(processor, "video_processor", None)) is not None:
        settings.fps, settings.max_frames = video_fps, video_frames
        if name in OMNI_PROCESSORS:
            settings.use_audio_in_video = video_sound
    return processor


def _check_video_sound(processor: Any, video_sound: bool) -> None:
    if video_sound and (name := type(processor).__name__) not in OMNI_PROCESSORS:
        raise ValueError(f"video_sound: expected a model with one of {', '.join(sorted(OMNI_PROCESSORS))}, got {name}")


def _video_config(path: str) -> dict[str, Any] | None:
    from transformers.utils import cached_file

    kwargs: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    if (found := cached_file(path, "processor_config.json", **kwargs)) is not None:
        if (config := json.loads(Path(found).read_text()).get("video_processor")) is not None:
            return config
    if (found := cached_file(path, "video_preprocessor_config.json", **kwargs)) is not None:
        return json.loads(Path(found).read_text())
    return None


def _font(path: str, video_config: Mapping[str, Any]) -> str | None:
    """The file of the font with which ERNIE 4.5 VL writes times on the frames of videos; None for other models.

    Raises:
        ValueError: it is missing.
    """
    from transformers.utils import cached_file

    if not video_config.get("draw_on_frames") or (name := video_config.get("font")) is None:
        return None
    if (found := cached_file(path, name, _raise_exceptions_for_missing_entries=False)) is None:
        raise ValueError(
            f"model {path!r}: expected the file {name} of the font with which its processor writes times on frames of "
            "videos, got none; copy it from the published model, or set draw_on_frames to false in its config"
        )
    return found


def decode(processor: Any, token_ids: Sequence[int], thinking_tags: Sequence[str] = THINKING_TAGS) -> str:
    """The text of tokens, without special tokens other than those of the tags around thinking."""
    tokenizer = getattr(processor, "tokenizer", processor)
    tag_ids = {i for tag in thinking_tags for i in tokenizer(tag, add_special_tokens=False)["input_ids"]}
    kept = {i for i in tag_ids.intersection(token_ids) if not tokenizer.decode([i], skip_special_tokens=True)}
    if not kept:
        return tokenizer.decode(token_ids, skip_special_tokens=True)
    dropped = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} - kept
    return tokenizer.decode([i for i in token_ids if i not in dropped])
