"""Models whose configuration is changed before they are made: `--model config.json`, `--model_config name=value ...`.

    write_model("configs/small/config.json", ["hidden_size=64", "text_config.num_hidden_layers=2"], "out/init", seed=0)

The model directory that is written is like any other: every rank and every sampler reads the same weights and the same
configuration, and an export carries them.
"""

from __future__ import annotations

import difflib
import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlkit.vlm.loading import load_config, make_model, model_path

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json", "*.pth", "*.gguf")
TYPES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a mapping",
}
HUB_ID = r"\w[\w.-]*/\w[\w.-]*"  # owner/name
PER_LAYER = ("layer_types", "mlp_layer_types")  # lists with one entry for each layer


def is_config_file(model: str) -> bool:
    """Whether a model is named by its configuration alone, so that it gets random weights."""
    return model.endswith(".json")


def changed_config(model: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The content of a model's config.json with overrides.

    The order of overrides matters only for those of one field, of which the last holds. Where `num_hidden_layers` is
    overridden, lists with an entry for each layer (`PER_LAYER`) are left out, so that the model's family makes them
    anew, unless they are overridden too.

    Args:
        model: a directory, or a configuration file.
        overrides: each is `name=value`, or a JSON or YAML file of names and values. Dots in a name lead to the parts of
            the configuration: `text_config.hidden_size`. A value is read as JSON (a number, true, null, a list). If it
            is not JSON, it is a string.

    Raises:
        ValueError: the file or the field does not exist, the value has another type than the field, or a list of layers
            has another length than `num_hidden_layers`.
    """
    file = config_file(model)
    fields = dict(_flattened(load_config(str(file.parent), file=file.name).to_dict()))
    content = json.loads(file.read_text())
    trained = content.get("thinker_config", content)  # of Qwen-Omni the fields of the thinker
    changes = dict(_parsed(overrides))
    for name, value in changes.items():
        _check(name, value, fields)
        part, last = _part_with(trained, name)
        part[last] = value
    for name, layers in changes.items():
        part, last = _part_with(trained, name)
        for derived in PER_LAYER if last == "num_hidden_layers" else ():
            if (changed := f"{name.removesuffix(last)}{derived}") not in changes:
                part.pop(derived, None)
            elif (entries := len(changes[changed] or ())) != layers:
                raise ValueError(f"model_config: {changed}: expected {layers} entries, one per layer, got {entries}")
    return content


def _part_with(content: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """The part of a configuration that has a field, and the last part of the field's name."""
    *parents, last = name.split(".")
    for parent in parents:
        content = content.setdefault(parent, {})
    return content, last


def config_file(model: str) -> Path:
    """The configuration file of a model.

    Raises:
        ValueError: it is not on this machine.
    """
    file = Path(model) if is_config_file(model) else Path(model_path(model)) / "config.json"
    if not file.is_file():
        expected = f"model: expected a directory or a config.json on this machine, got {model!r}"
        if re.fullmatch(HUB_ID, model) and not Path(model).exists():
            expected += f"; download it first by hf download {model}, and pass the directory that this prints"
        raise ValueError(expected)
    return file


def write_model(model: str, overrides: Sequence[str], place: str | Path, *, seed: int = 0) -> None:
    """Write a model directory with a changed configuration.

    A model that is given by its directory keeps its weights, as links to its files. One that is given by its
    configuration file gets random weights in float32. In both cases the tokenizer and the processor are copied from the
    files beside the configuration.

    Args:
        model, overrides: as in `changed_config`.
        place: directory to write. After an error it does not exist.
        seed: of random weights.

    Raises:
        ValueError: as `changed_config`, or no model can be made of the configuration.
    """
    content, source = changed_config(model, overrides), config_file(model)
    part = Path(f"{place}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by an interrupted start
    part.mkdir(parents=True)
    weights = {file for pattern in WEIGHT_FILES for file in source.parent.glob(pattern)}
    copy_small_files(source.parent, part, but={file.name for file in weights})
    (part / "config.json").write_text(json.dumps(content, indent=2))
    if is_config_file(model):
        (part / "config.json").write_text(json.dumps(without_quantization(content), indent=2))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = make_model(str(part))
        made.save_pretrained(part)
    else:
        load_config(str(part))  # the values fit together
        for file in weights:
            (part / file.name).symlink_to(file.resolve())
    part.rename(place)


def copy_small_files(source: Path, place: Path, *, but: Collection[str]) -> None:
    """Copy a model's tokenizer, processor and code, but not the files of these names."""
    for file in source.iterdir():
        if file.is_file() and file.name not in but and file.suffix in (".json", ".txt", ".model", ".jinja", ".py"):
            shutil.copyfile(file, place / file.name)


def without_quantization(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json, for weights that are not quantized."""
    left = {name: x for name, x in content.items() if name not in ("quantization_config", "compression_config")}
    return {name: without_quantization(x) if name == "text_config" else x for name, x in left.items()}


def _parsed(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(name, value) of each overridden field, in the order of the overrides."""
    for text in overrides:
        name, equals, value = text.partition("=")
        if equals:
            yield name, json_or_text(value)
        else:
            yield from _flattened(_file_content(text))


def _file_content(path: str) -> Mapping[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"model_config: expected name=value or a JSON or YAML file, got {path!r}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"model_config {path!r}: expected fields by name, got a {type(content).__name__}")
    return content


def json_or_text(text: str) -> Any:
    """The value of an option that is written as JSON, or else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _flattened(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every field; a part that is not empty is only given field by field."""
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _check(name: str, value: Any, fields: Mapping[str, Any]) -> None:
    if name not in fields:
        same_last = [one for one in fields if one.rpartition(".")[2] == name.rpartition(".")[2]]
        near = same_last[:1] or difflib.get_close_matches(name, fields, 1, 0.0)
        raise ValueError(f"model_config: expected a field of config.json, got {name!r}; the nearest is {near[0]!r}")
    old = fields[name]
    fits = old is None or value is None or type(value) is type(old)
    if not fits and not (isinstance(old, float) and type(value) is int):
        raise ValueError(f"model_config: {name}: expected {TYPES[type(old)]}, such as {old!r}, got {value!r}")
