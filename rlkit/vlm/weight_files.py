"""The files of a model's weights: which they are, and whether they hold what can be trained."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlkit.vlm.families import square_experts

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model"  # .bin, or the parts of an index
ADAPTERS = "adapter_config.json"
# dtypes, in the headers of safetensors files, of numbers that mean nothing without a scale
SCALED = re.compile(r"F[468](_.*)?")
MAYBE_SCALED = ("I8", "U8")  # weights in these are quantized; masks and tables may be in them too
MOST_NAMES = 8  # in a message
# what `rlkit.vlm.dequantize` reads
CONVERTIBLE = frozenset({"fp8", "fbgemm_fp8", "modelopt", "compressed-tensors", "mxfp4"})


def weight_files(path: str, *, local_only: bool = False) -> list[str]:
    """The safetensors files that hold a model's weights: those of its index, or model.safetensors; [] for none.

    Args:
        path: directory or hub id.
        local_only: of a hub id, only files that are on this machine; [] unless all are.

    Raises:
        OSError: a file of the index is missing.
        ValueError: an index of another form.
    """
    from transformers.utils import cached_file

    options: dict[str, Any] = {"local_files_only": local_only, "_raise_exceptions_for_missing_entries": False}
    options["_raise_exceptions_for_connection_errors"] = not local_only
    if index := cached_file(path, INDEX, **options):
        names = listed_files(index)
        found = (cached_file(path, name, **(options if local_only else {})) for name in names)
        files = [file for file in found if file is not None]
        return files if len(files) == len(names) else []
    single = cached_file(path, SINGLE, **options)
    return [single] if single else []


def has_only_pickled_weights(path: str) -> bool:
    """Whether a directory has pickled weights and no safetensors. Each rank then has to read all of the weights."""
    names = [file.name for file in Path(path).glob("*")]
    return any(name.startswith(PICKLED) for name in names) and SINGLE not in names and INDEX not in names


def listed_files(index: str | Path) -> list[str]:
    """Names of the files that an index lists.

    Raises:
        ValueError: an index of another form.
    """
    try:
        return sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{index}: expected a weight_map from names to files, got: {error!r}") from error


def quantization_method(config: Any) -> str | None:
    """What a configuration says of how weights are quantized, such as "fp8"; None if they are not.

    Args:
        config: from transformers.
    """
    for part in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            if (found := getattr(part, name, None)) is not None:
                method = found.get("quant_method") if isinstance(found, Mapping) else None
                return str(method or "an unknown kind")
    return None


def check_trainable(path: str, config: Any) -> None:
    """Refuse files that cannot be trained, or of which the parts of a run would read different weights.

    Args:
        path: directory or hub id. Of a hub id, files are checked that are on this machine.
        config: from transformers.

    Raises:
        ValueError: adapters, two sets of weights, or quantized weights; it says what to do. Square experts of a family
            of `rlkit.vlm.families.TRANSPOSED_EXPERTS`.
    """
    if square := square_experts(config):
        raise ValueError(
            f"model {path!r}: expected experts whose matrices are not square, because transformers tells by shape "
            f"whether files of {config.model_type} hold them transposed, got {square}"
        )
    folder = Path(path)
    if (folder / ADAPTERS).is_file():
        raise ValueError(adapters_message(path))
    if (folder / SINGLE).is_file() and (folder / INDEX).is_file():
        if SINGLE not in listed_files(folder / INDEX):
            raise ValueError(
                f"model {path!r}: expected one set of weights, got {SINGLE} and the other files of "
                f"{INDEX}; transformers reads the former, vLLM the latter; move one of them"
            )
    if method := quantization_method(config):
        raise ValueError(quantized_message(path, method))
    check_dtypes(path)


def check_dtypes(path: str) -> None:
    """Refuse files with tensors that need a scale, whatever config.json says. Files are read up to their headers.

    Args:
        path: directory or hub id. Of a hub id, files are checked that are on this machine.

    Raises:
        ValueError: it names a tensor.
    """
    from safetensors import SafetensorError, safe_open

    try:
        for file in weight_files(path, local_only=True):
            with safe_open(file, "pt") as weights:
                check_not_scaled(path, ((name, weights.get_slice(name).get_dtype()) for name in weights.keys()))
    except (OSError, SafetensorError):  # whoever reads the weights says so
        return


def check_not_scaled(path: str, dtypes: Iterable[tuple[str, str]]) -> None:
    """Raise a ValueError for a tensor in a dtype that needs a scale.

    Args:
        path: of the model.
        dtypes: (name of a tensor, its dtype in the header of a safetensors file).
    """
    for name, dtype in dtypes:
        if SCALED.fullmatch(dtype) or (dtype in MAYBE_SCALED and name.endswith("weight")):
            raise ValueError(quantized_message(path, f"{name} in {dtype}"))


def report_unused(path: str, model: Any, names: Iterable[str]) -> None:
    """Print the names of tensors in a model's files that the model has no place for, if there are some.

    Those that transformers expects there, such as layers for the prediction of several tokens, are left out.

    Args:
        path: of the model.
        model: from transformers.
        names: of tensors.
    """
    expected = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unused = [name for name in names if not any(re.search(pattern, name) for pattern in expected)]
    kinds = sorted({re.sub(r"\d+", "*", name) for name in unused})
    if kinds:
        listed = ", ".join(kinds[:MOST_NAMES]) + ", ..." * (len(kinds) > MOST_NAMES)
        print(f"model {path!r}: tensors in its files that are not used ({len(unused)}): {listed}", flush=True)


def quantized_message(path: str, what: str) -> str:
    """The error for quantized weights: what came, and how to get weights that can be trained."""
    command = f"python -m rlkit.vlm.dequantize {path} NEW_DIRECTORY"
    convert = f", or write one by: {command}" if what in CONVERTIBLE or " in F8" in what else ""
    return (
        f"model {path!r}: expected weights that are not quantized, got {what}; pass the model in bfloat16 that it was "
        f"made of{convert}"
    )


def adapters_message(path: str) -> str:
    """The error for a directory of LoRA adapters: their base model, and how to merge them."""
    try:
        base = json.loads((Path(path) / ADAPTERS).read_text()).get("base_model_name_or_path")
    except (OSError, json.JSONDecodeError, AttributeError):
        base = None
    return (
        f"model {path!r}: expected a whole model, got LoRA adapters ({ADAPTERS}) of {base!r}; merge them by peft's "
        "merge_and_unload(), save the result, and pass its directory"
    )
