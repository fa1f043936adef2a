"""Loads models and their configurations from a directory, the Hugging Face hub, ModelScope or a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rlkit.data.lookup import check_source, one_line, requires_extra
from rlkit.data.vision_tensors import FRAME_COUNTS
from rlkit.vlm.families import WHOLE_MODELS, tokens_of_frame
from rlkit.vlm.model_size import check_fits_files, check_layer_counts
from rlkit.vlm.pretrained import SMOLLM2, gguf_path, smollm2_path
from rlkit.vlm.weight_files import ADAPTERS, adapters_message, check_dtypes, check_trainable

MODELSCOPE = "modelscope:"
LARGE = 1 << 28  # elements, more than any buffer has
DECODERS_BY_DESIGN = ("gpt_neox", "gpt_neox_japanese")  # their is_decoder is false, as an encoder's is


@cache
def model_path(path: str | Path) -> str:
    """Downloads or converts a model that is named by its source, and returns its directory.

    A model named `modelscope:OWNER/NAME` is downloaded. `smollm2` and GGUF files are converted once, see
    rlkit.vlm.pretrained. Other names are returned unchanged.

    Raises:
        ValueError: the download from ModelScope failed, or a GGUF file cannot be read.
        ImportError: the package modelscope, or one that a conversion needs, is not installed.
    """
    path = str(path)
    if path == SMOLLM2:
        return smollm2_path()
    if path.endswith(".gguf"):
        return gguf_path(path)
    if not path.startswith(MODELSCOPE):
        return path
    with requires_extra("modelscope"):
        from modelscope import snapshot_download
    try:
        return snapshot_download(path.removeprefix(MODELSCOPE))
    except Exception as error:  # modelscope raises many types, some of them no OSError
        raise ValueError(f"model {path!r}: {error}") from error


def load_config(path: str | Path, *, trust_remote_code: bool = False, file: str = "config.json") -> Any:
    """The transformers configuration of a model; of Qwen-Omni that of the thinker, the part that writes text.

    Args:
        path: a directory, a hub id, or another name that `model_path` knows.
        trust_remote_code: run configuration code that lies in the model's repository.
        file: name of the configuration file in a directory.

    Raises:
        ValueError: a directory without a model, a name that cannot be found, a model type transformers lacks, or a
            configuration that makes no sense.
    """
    import transformers

    path = model_path(path)
    check_source(path, "model")
    if Path(path).exists() and not (Path(path) / file).is_file():
        if (Path(path) / ADAPTERS).is_file():
            raise ValueError(adapters_message(path))
        raise ValueError(f"model: expected a directory with a {file}, got {path!r}, which has none")
    named = {} if file == "config.json" else {"_configuration_file": file}
    try:
        content = transformers.PreTrainedConfig.get_config_dict(path, **named)[0]
        check_names_family(content, trust_remote_code=trust_remote_code)
        check_layer_counts(content)
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **named)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {path!r}: {error}") from error
    except Exception as error:  # a configuration is data: it may be wrong in any way
        raise ValueError(f"model {path!r}: config.json: {one_line(error)}") from error
    if (thinker := thinker_config(config)) is not config:
        thinker.name_or_path = path
    return thinker


def check_names_family(content: Any, *, trust_remote_code: bool) -> None:
    """Refuse a configuration of a family that transformers does not have, unless it brings its own code.

    Args:
        content: of config.json.
        trust_remote_code: whether that code may run.

    Raises:
        ValueError: it names the family, or says that the content is no mapping.
    """
    import transformers

    if not isinstance(content, Mapping):
        raise ValueError(f"config.json: expected a mapping of names to values, got {type(content).__name__}")
    family, code = content.get("model_type"), content.get("auto_map")
    has_code = isinstance(code, Mapping) and "AutoConfig" in code
    if (isinstance(family, str) and family in transformers.CONFIG_MAPPING) or (has_code and trust_remote_code):
        return
    hint = "; the model brings its own code, which runs with --trust_remote_code (trust_remote_code=True)"
    raise ValueError(
        f"model_type: expected a family that transformers {transformers.__version__} knows, got {family!r}"
        f"{hint if has_code else ''}"
    )


def thinker_config(config: Any) -> Any:
    """The configuration of Qwen-Omni's thinker, which is the part that writes text; that of other models itself."""
    return getattr(config, "thinker_config", None) or config


def whole_config(thinker: Any) -> Any:
    """The configuration of a whole model that consists of a thinker, without a part that speaks."""
    import transformers

    config = thinker.config
    whole = transformers.AutoConfig.for_model(
        WHOLE_MODELS[config.model_type], thinker_config=config.to_dict(), enable_audio_output=False
    )
    whole.architectures, whole.dtype = [type(thinker).__name__.replace("Thinker", "")], config.dtype
    return whole


def has_vision(config: Any) -> bool:
    """Whether the model has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    on_meta: bool = False,
) -> Any:
    """Loads a vision-language model or a text model.

    Args:
        path: a directory, a hub id, or `modelscope:OWNER/NAME`.
        dtype: of the weights.
        trust_remote_code: run model code that lies in the model's repository. Pickled weights are read without running
            code in any case.
        on_meta: create parameters on the meta device, without memory. The fsdp2 and megatron engines then read only
            their rank's part of the files.

    Raises:
        ValueError: as `load_config`; weights that are missing, quantized or cannot be read, see
            `rlkit.vlm.weight_files`; or many fewer than the configuration says, see `rlkit.vlm.model_size`.
    """
    path = str(path)
    config = load_config(path, trust_remote_code=trust_remote_code)
    if getattr(config, "value_head", False):
        raise ValueError(f"model: expected a language model, got the value model {path!r}; use load_value_model for it")
    check_trainable(model_path(path), config)
    load = empty_model if on_meta else load_pretrained
    return load(path, config, dtype=dtype, trust_remote_code=trust_remote_code)


def empty_model(path: str, config: Any, **options: Any) -> Any:
    """The model that `load_pretrained` returns, with its parameters on the meta device.

    Buffers are on the CPU and have their values, because checkpoint files may lack them.
    """
    import transformers
    from accelerate import init_empty_weights

    path = model_path(path)
    auto = _auto_class(config)
    _check_sizes(path, config, **options)
    with _LargeOnMeta(), init_empty_weights(include_buffers=False):
        model = auto.from_config(config, **options).eval()
    model.tie_weights()  # init_empty_weights unties parameters
    keep_in_float32(model, model.config.dtype or model.dtype)
    try:
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    except OSError:  # the model has none
        pass
    except ValueError as error:
        raise ValueError(f"model {path!r}: generation_config.json: {error}") from error
    return model


class _LargeOnMeta(TorchFunctionMode):
    """Large tensors of `torch.empty` are made on the meta device.

    `init_empty_weights` moves a parameter there once it exists, and the experts of one layer of DeepSeek-V3 take 30 GB.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and (on_meta := func(*args, **{**kwargs, "device": "meta"})).numel() > LARGE:
            return on_meta
        return func(*args, **kwargs)


def kept_in_float32(model: Any, dtype: torch.dtype) -> set[str]:
    """Patterns of the parts of a model that `from_pretrained(dtype=dtype)` keeps in float32.

    Args:
        model: from transformers.
    """
    strictly = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ()) if dtype.itemsize < 4 else set()
    in_float16 = set(getattr(model, "_keep_in_fp32_modules", None) or ()) if dtype == torch.float16 else set()
    return strictly | in_float16


def keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Cast the parts of a model by `from_config(dtype=dtype)` that `from_pretrained(dtype=dtype)` reads in float32."""
    patterns = [re.compile(pattern.replace("*", ".*")) for pattern in kept_in_float32(model, dtype)]
    saved = model.state_dict().keys()
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        if name in saved and x.is_floating_point() and any(pattern.search(name) for pattern in patterns):
            x.data = x.data.float()


def make_model(path: str | Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """A model with random weights, made of the configuration in a directory.

    Raises:
        ValueError: no model can be made of the configuration.
    """
    path = str(path)
    config = load_config(path)
    try:
        return _auto_class(config).from_config(config, dtype=dtype).eval()
    except Exception as error:  # a configuration is data: it may be wrong in any way
        raise ValueError(f"model {path!r}: config.json: {one_line(error)}") from error


def load_pretrained(path: str, config: Any, **options: Any) -> Any:
    """`from_pretrained` of the auto class that fits the configuration.

    Raises:
        ValueError: weights are missing or cannot be read.
    """
    model, found = read_pretrained(path, config, **options)
    check_all_found(path, model, found["missing_keys"])
    if ties_output_layer(model) and model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        raise ValueError(other_head_message(path))
    return model


def ties_output_layer(model: Any) -> bool:
    """Whether the output layer should be the embedding, by the model's configuration and class."""
    ties = getattr(model.config, "tie_word_embeddings", False) and getattr(model, "_tied_weights_keys", None)
    return bool(ties) and model.get_output_embeddings() is not None


def check_all_found(path: str, model: Any, missing: Collection[str]) -> None:
    """Raise a ValueError that lists the parameters which are missing in a model's files. transformers draws them."""
    if wrong := sorted({name for name, _ in model.named_parameters()} & {*missing}):
        listed = ", ".join(wrong)
        raise ValueError(f"model {path!r}: expected every weight in its shape, got missing or different ones: {listed}")


def other_head_message(path: str) -> str:
    """The error for an output layer in the files that is not the embedding, although config.json says so.

    transformers uses it, and vLLM uses the embedding.
    """
    return (
        f"model {path!r}: expected an output layer that equals the embedding, as config.json has tie_word_embeddings, "
        "got another one; if it is right, add --model_config tie_word_embeddings=false"
    )


def read_pretrained(path: str, config: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The result of `from_pretrained` with what it says of missing weights and of those that do not fit.

    Raises:
        ValueError: the weights cannot be read, or need scales.
    """
    from safetensors import SafetensorError

    path = model_path(path)
    _check_sizes(path, config, **options)
    try:
        read = _auto_class(config).from_pretrained(path, config=config, output_loading_info=True, **options)
    except UnpicklingError as error:  # its own message suggests to run the code
        raise ValueError(
            f"model {path!r}: expected weights that can be read without running code: safetensors, or a pickle of "
            "nothing but tensors"
        ) from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        problem = str(error)
        if "ignore_mismatched_sizes" in problem:  # an option that nobody has here
            problem = "expected weights in the shapes of its config.json, got others, which are listed above"
        raise ValueError(f"model {path!r}: {problem}") from error
    check_dtypes(path)  # of files that have been downloaded just now
    return read


def _check_sizes(path: str, config: Any, **options: Any) -> None:
    """Refuse an encoder, or a configuration for many more weights than a directory holds, before memory is taken.

    Args:
        options: of `from_config`; others are left out.

    Raises:
        ValueError: see `rlkit.vlm.model_size.check_fits_files`, or no model can be made of the configuration.
    """
    _check_causal(path, config)
    known = {name: x for name, x in options.items() if name in ("dtype", "trust_remote_code")}
    try:
        with torch.device("meta"):
            model = _auto_class(config).from_config(config, **known)
    except Exception as error:  # a configuration is data: it may be wrong in any way
        raise ValueError(f"model {path!r}: config.json: {one_line(error)}") from error
    check_fits_files(path, config, model)


def _check_causal(path: str, config: Any) -> None:
    """Raise a ValueError for an encoder, an encoder-decoder, or a family without a language model."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    kind = config.model_type
    is_encoder = getattr(config, "is_decoder", True) is False and kind not in DECODERS_BY_DESIGN
    if has_vision(config) or kind not in CONFIG_MAPPING:  # code of the model's repository may have a language model
        return
    if is_encoder or getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"model {path!r}: expected a causal language model, got an encoder or encoder-decoder of the family {kind}"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"model {path!r}: expected a causal language model, got the family {kind}, which has none")


def _auto_class(config: Any) -> Any:
    import transformers

    return transformers.AutoModelForImageTextToText if has_vision(config) else transformers.AutoModelForCausalLM


def compute_as_published(model: Any) -> None:
    """Mend six families that transformers 5.19 computes otherwise than their authors' code and vLLM.

    PaddleOCR-VL: its vision tower aligns the corners of two grids when it resizes position embeddings; up to 5.0 it did
    not. The results differ for every image that is not a square of the size of the embeddings. Nemotron-H: time steps
    of its Mamba layers have `time_step_min` as lower limit, instead of those in `time_step_limit`. Gemma 4: its
    audio tower expects the boolean mask of sdpa. The mask of eager attention is 0 where that one is True, so that
    frames attend to padding and to frames outside their window. Kimi K2.5: see `encode_kimi_videos`. LLaVA-OneVision
    and LLaVA-NeXT-Video: see `encode_llava_videos`.
    """
    family = model.config.model_type
    if family == "kimi_k25":
        model.model.register_forward_pre_hook(encode_kimi_videos, with_kwargs=True)
    if family in ("llava_next_video", "llava_onevision"):
        model.model.register_forward_pre_hook(encode_llava_videos, with_kwargs=True)
    for module in model.modules() if family in ("paddleocr_vl", "nemotron_h", "gemma4") else ():
        if hasattr(module, "interpolation_align_corners"):
            module.interpolation_align_corners = False
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(model.config.time_step_limit)
        if type(module).__name__ == "Gemma4AudioModel":
            module.set_attn_implementation("sdpa")


def encode_kimi_videos(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Kimi K2.5: a hook before the forward, which replaces pixels by features if there are videos.

    The vision tower merges the frames of a chunk of a video into their mean. transformers 5.19 fails for chunks of
    different numbers of frames, and then splits the features as if there were those of all frames. Here a dummy index
    skips the tower's own merge, and `temporal_patch_merger` merges. The forward takes features instead of pixels, but
    then those of images, too.

    Args:
        model: the part with the vision tower and the projector.
        args, kwargs: of its forward.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    if kwargs.get("pixel_values_videos") is None:
        return None
    pixels, grids = kwargs["pixel_values_videos"], kwargs["video_grid_thw"]
    states = model.vision_tower(pixels, grid_thw=grids, temporal_merge_index=grids.new_zeros(1, 1, 1)).last_hidden_state
    merged = model.vision_tower.temporal_patch_merger(states, grids)
    features: dict[str, Any] = {"pooler_output": [model.mm_projector(merged).squeeze(1)]}
    encoded = {"video": BaseModelOutputWithPooling(**features)}
    if kwargs.get("pixel_values") is not None:
        encoded["image"] = model.get_image_features(kwargs["pixel_values"], kwargs["image_grid_thw"])
    return args, {**kwargs, "pixel_values": None, "pixel_values_videos": None, "mm_encoder_outputs": encoded}


def encode_llava_videos(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """LLaVA-OneVision, LLaVA-NeXT-Video: a hook before the forward: features instead of pixels if there are videos.

    transformers' forward takes videos of one number of frames. Here the frames of all videos are encoded as one video.
    In LLaVA-OneVision it ends with a feature that separates it from the text; each video then gets this feature at its
    end. The forward takes features instead of pixels, but then those of images, too.

    Args:
        model: the part with the vision tower and the projector.
        args, kwargs: of its forward; `num_frames_per_video` says how many frames of each video are no padding.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    counts, videos = kwargs.pop(FRAME_COUNTS, None), kwargs.get("pixel_values_videos")
    if counts is None or videos is None:
        return None
    numbers = counts.tolist()
    frames = torch.cat([video[:number] for video, number in zip(videos, numbers, strict=True)])
    features = model.get_video_features(frames[None]).pooler_output[0]
    if model.config.model_type == "llava_onevision":
        parts = features[:-1].split([number * tokens_of_frame(model.config) for number in numbers])
        features = torch.cat([x for part in parts for x in (part, features[-1:])])
    joined: dict[str, Any] = {"pooler_output": features[None]}
    encoded = {"video": BaseModelOutputWithPooling(**joined)}
    if kwargs.get("pixel_values") is not None:
        names = ("pixel_values", "image_sizes", "batch_num_images")
        encoded["image"] = model.get_image_features(**{name: kwargs[name] for name in names if name in kwargs})
    return args, {**kwargs, "pixel_values": None, "pixel_values_videos": None, "mm_encoder_outputs": encoded}
