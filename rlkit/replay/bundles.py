"""The files of a bundle: everything that a training step sampled, trained on and measured.

A bundle is a folder such as `rollouts/step_12`. Each data-parallel rank writes two files to it: first
`rank_0.safetensors` with all tensors, then `rank_0.json` with everything else and the checksums of both files.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.data.placeholders import Expansion
from rlkit.data.samples import Sample

FORMAT = "rlkit rollouts 1"
SAMPLE_FACTS = ("group_id", "number", "text", "finish_reason", "version")


@dataclass
class Draw:
    """One call of the sampler, with the responses to its prompts.

    Attributes:
        samples: all responses with their rewards; the reward is nan if the response could not be scored.
        sampling: fields of `rlkit.rollout.Sampling`.
        phase: the phase of the run in which the responses were generated.
        prompts: the prompts. They are not saved, because each response begins with its prompt.
    """

    samples: list[Sample]
    sampling: dict[str, Any] = field(default_factory=dict)
    phase: str = "generate"
    prompts: list[Sample] = field(default_factory=list)


@dataclass
class Update:
    """One optimizer step: input and output of the engine's `train_batch`.

    Attributes:
        engine: checkpoint folder of the engine: "checkpoints" for the policy, "critic_checkpoints" for the critic.
        fields: tensors of the batch, [B] or [B, T], in the order in which the recipe added them: tokens, mask,
            rollout_logprobs, rewards, ..., advantages. The outputs of the forward pass (logprobs, values) follow.
        metrics: over all ranks: loss, grad_norm, ...
    """

    engine: str
    fields: dict[str, Tensor]
    metrics: dict[str, float]


@dataclass
class Bundle:
    """A training step.

    Attributes:
        step: number of the step, from 0.
        origin: "rlkit", or the trainer whose dump was converted.
        recipe, recipe_sha256: path of the recipe's file, and its checksum.
        task: name of the task.
        options: options of the run.
        versions: versions of Python and of packages.
        draws, updates: in the order of the step.
    """

    step: int
    origin: str = "rlkit"
    recipe: str = ""
    recipe_sha256: str = ""
    task: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    draws: list[Draw] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)


def bundle_path(folder: str | Path, step: int) -> Path:
    """Path of a step's bundle in a run's folder of rollouts."""
    return Path(folder) / f"step_{step}"


def bundle_folder(path: str | Path) -> Path:
    """The folder of a bundle, given the folder or one of its files."""
    return Path(path).parent if Path(path).is_file() else Path(path)


def bundle_steps(folder: str | Path) -> list[int]:
    """The steps that have a bundle in this folder, in order."""
    names = [path.parent.name.removeprefix("step_") for path in Path(folder).glob("step_*/rank_0.json")]
    return sorted(int(name) for name in names if name.isdecimal())


def write_bundle(path: str | Path, bundle: Bundle, *, rank: int = 0, ranks: int = 1) -> None:
    """Write this rank's files of a bundle.

    Args:
        path: folder of the bundle.
        bundle: the samples and batches of this rank.
        rank, ranks: data-parallel rank, and number of data-parallel ranks.

    Raises:
        OSError: a file cannot be written.
    """
    folder, tensors = Path(path), _Tensors()
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Any] = []
    content = {
        "format": FORMAT,
        "rank": rank,
        "ranks": ranks,
        **{name: getattr(bundle, name) for name in _PLAIN},
        "draws": [_draw_to_json(draw, f"draw_{i}", tensors, rows) for i, draw in enumerate(bundle.draws)],
        "updates": [_update_to_json(update, f"update_{i}", tensors) for i, update in enumerate(bundle.updates)],
        "rows": rows,
    }
    file = folder / f"rank_{rank}.safetensors"
    part = file.with_suffix(".part")
    _save_tensors(tensors.by_name, part)
    content["tensors_sha256"] = _file_sha256(part)
    content = json.loads(json.dumps(content, default=str))  # checksum what a reader will parse
    content["sha256"] = _content_sha256(content)
    part.chmod(0o644)  # safetensors makes it readable for the owner only
    part.replace(file)
    part.write_text(json.dumps(content))
    part.replace(folder / f"rank_{rank}.json")


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except SafetensorError as error:  # such as "I/O error: No space left on device (os error 28)"
        code = re.search(r"os error (\d+)", str(error))
        raise OSError(int(code[1]) if code else errno.EIO, str(error), str(path)) from error


_PLAIN = ("step", "origin", "recipe", "recipe_sha256", "task", "options", "versions")


def read_bundle(path: str | Path, *, updates: bool = True) -> Bundle:
    """Read a bundle with the rows of all ranks. Samples are sorted by group id, batches by group id and response
    number.

    Args:
        path: folder of the bundle, or one of its JSON files.
        updates: also read the batches.

    Raises:
        ValueError: the bundle is missing, damaged, incomplete or of another version.
    """
    folder = bundle_folder(path)
    parts = [_read_rank(folder, 0)]
    first = parts[0][0]
    parts += [_read_rank(folder, rank) for rank in range(1, first["ranks"])]
    found = Bundle(**{name: first[name] for name in _PLAIN})
    for i, draw in enumerate(first["draws"]):
        samples = [
            s for content, tensors in parts for s in _draw_from_json(content["draws"][i], content["rows"], tensors)
        ]
        samples.sort(key=lambda sample: sample.group_id)
        found.draws.append(Draw(samples, draw["sampling"], draw["phase"]))
    if updates:
        for i, update in enumerate(first["updates"]):
            names = update["fields"]
            per_rank = [{name: tensors[f"update_{i}.{name}"] for name in names} for _, tensors in parts]
            found.updates.append(Update(update["engine"], merge_rows(per_rank), update["metrics"]))
    return found


def merge_rows(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the batches of several ranks, padded to the widest one and sorted by group id and response number."""
    shared = [name for name in parts[0] if all(name in part for part in parts)]
    width = max(part["mask"].shape[1] for part in parts)

    def widened(x: Tensor) -> Tensor:
        if x.ndim == 1 or x.shape[1] == width:
            return x
        return torch.cat([x, x.new_zeros(len(x), width - x.shape[1], *x.shape[2:])], 1)

    merged = {name: torch.cat([widened(part[name]) for part in parts]) for name in shared}
    if "group_ids" not in merged or "numbers" not in merged:
        return merged
    order = np.lexsort((merged["numbers"].numpy(), merged["group_ids"].numpy()))
    return {name: x[torch.from_numpy(order)] for name, x in merged.items()}


def digest(x: Tensor) -> str:
    """A checksum of a tensor's dtype, shape and values."""
    data = x.detach().cpu().contiguous()
    found = hashlib.sha256(f"{data.dtype} {tuple(data.shape)} ".encode())
    found.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


class _Tensors:
    """Collects the tensors of a file. Equal images and vision tensors, as of responses to one prompt, are saved
    once."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}
        self.digests: dict[int, tuple[Tensor, str]] = {}  # keeps the tensor alive, so that its id is not reused

    def add(self, name: str, x: Tensor) -> None:
        self.by_name[name] = x.detach().cpu().contiguous().clone()

    def add_once(self, x: Tensor) -> str:
        if id(x) not in self.digests:
            self.digests[id(x)] = (x, f"sha256_{digest(x)}")
        name = self.digests[id(x)][1]
        if name not in self.by_name:
            self.add(name, x)
        return name


def _draw_to_json(draw: Draw, name: str, tensors: _Tensors, rows: list[Any]) -> dict[str, Any]:
    samples, numbers_of_rows = [], {}
    for i, sample in enumerate(draw.samples):
        if id(sample.row) not in numbers_of_rows:
            numbers_of_rows[id(sample.row)] = len(rows)
            rows.append(_row_to_json(sample.row, tensors))
        if sample.routed_experts is not None:
            tensors.add(f"{name}.routed_experts_{i}", sample.routed_experts)
        samples.append(
            {
                **{fact: getattr(sample, fact) for fact in SAMPLE_FACTS},
                "versions": list(sample.versions),
                "row": numbers_of_rows[id(sample.row)],
                "vision": {key: tensors.add_once(x) for key, x in sample.vision.items()},
                "placeholders": {str(kind): list(map(_image_to_json, x)) for kind, x in sample.placeholders.items()},
                "routed_experts": sample.routed_experts is not None,
            }
        )
    for key, dtype in _PER_TOKEN.items():
        values = [getattr(sample, key) for sample in draw.samples]
        tensors.add(f"{name}.{key}", torch.tensor([x for row in values for x in row], dtype=dtype))
        tensors.add(f"{name}.{key}.lengths", torch.tensor([len(row) for row in values], dtype=torch.int64))
    rewards = [math.nan if sample.reward is None else sample.reward for sample in draw.samples]
    tensors.add(f"{name}.rewards", torch.tensor(rewards, dtype=torch.float64))
    return {"name": name, "sampling": draw.sampling, "phase": draw.phase, "samples": samples}


_PER_TOKEN = {"token_ids": torch.int64, "compact_ids": torch.int64, "mask": torch.bool, "logprobs": torch.float64}


def _draw_from_json(draw: Mapping[str, Any], rows: Sequence[Any], tensors: Mapping[str, Tensor]) -> list[Sample]:
    name = draw["name"]
    per_token = {key: _ragged(tensors[f"{name}.{key}"], tensors[f"{name}.{key}.lengths"]) for key in _PER_TOKEN}
    rewards = tensors[f"{name}.rewards"].tolist()
    samples = []
    for i, entry in enumerate(draw["samples"]):
        placeholders = {
            int(kind): [_image_from_json(x) for x in images] for kind, images in entry["placeholders"].items()
        }
        samples.append(
            Sample(
                per_token["token_ids"][i],
                per_token["compact_ids"][i],
                per_token["mask"][i],
                per_token["logprobs"][i],
                **{fact: entry[fact] for fact in SAMPLE_FACTS},
                versions=entry["versions"],
                vision={key: tensors[name_of_tensor] for key, name_of_tensor in entry["vision"].items()},
                placeholders=placeholders,
                row=rows[entry["row"]],
                reward=rewards[i],
                routed_experts=tensors[f"{name}.routed_experts_{i}"] if entry["routed_experts"] else None,
            )
        )
    return samples


def _ragged(values: Tensor, lengths: Tensor) -> list[list[Any]]:
    return [part.tolist() for part in values.split(lengths.tolist())]


def _image_to_json(image: int | Expansion) -> Any:
    return image if isinstance(image, int) else {"tokens": list(image.tokens), "more": [image.before, image.after]}


def _image_from_json(image: Any) -> int | Expansion:
    return image if isinstance(image, int) else Expansion(image["tokens"], *image["more"])


def _row_to_json(row: Any, tensors: _Tensors) -> Any:
    """A data row as JSON. What JSON lacks is a mapping with one of `_TAGS`: tuples, sets, mappings with keys that are
    no text, bytes, images. Arrays become lists, and other objects str(x)."""
    if isinstance(row, Mapping):
        if all(isinstance(key, str) for key in row) and not _is_tagged(row):
            return {key: _row_to_json(x, tensors) for key, x in row.items()}
        return {_MAPPING: [[_row_to_json(key, tensors), _row_to_json(x, tensors)] for key, x in row.items()]}
    for kind, tag in _COLLECTIONS.items():
        if isinstance(row, kind):
            return {tag: [_row_to_json(x, tensors) for x in row]}
    if isinstance(row, list):
        return [_row_to_json(x, tensors) for x in row]
    if row is None or isinstance(row, bool | int | float | str):
        return row
    if isinstance(row, np.generic | np.ndarray):
        return row.tolist()
    if isinstance(row, bytes):
        return {_BYTES: tensors.add_once(_bytes_tensor(row))}
    if hasattr(row, "tobytes") and hasattr(row, "mode"):  # a PIL image
        return _picture_to_json(row, tensors)
    return str(row)


def _picture_to_json(image: Any, tensors: _Tensors) -> dict[str, Any]:
    """A PIL image with its EXIF data, which sets its orientation."""
    exif = _exif(image)
    if image.mode in _PNG_MODES:
        file = io.BytesIO()
        image.save(file, "PNG", exif=exif)
        return {_PNG: tensors.add_once(_bytes_tensor(file.getvalue()))}
    facts = {"mode": image.mode, "size": image.size, "palette": image.getpalette("RGBA"), "exif": exif}
    return {_PIXELS: [tensors.add_once(_bytes_tensor(image.tobytes())), _row_to_json(facts, tensors)]}


def _exif(image: Any) -> bytes:
    try:
        return image.getexif().tobytes() if image.getexif() else b""
    except (struct.error, TypeError, ValueError):  # data of a wrong type, as its camera wrote them
        return image.info.get("exif", b"")


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))  # torch.frombuffer refuses empty data


_PNG, _PIXELS, _BYTES = "png tensor", "pixels tensor", "bytes tensor"
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # those that PNG gives back; pixels of others are saved as is
_MAPPING = "python mapping"
_COLLECTIONS = {tuple: "python tuple", set: "python set", frozenset: "python frozenset"}
_TAGS = {_PNG, _PIXELS, _BYTES, _MAPPING, *_COLLECTIONS.values()}


def _is_tagged(row: Mapping[Any, Any]) -> bool:
    return len(row) == 1 and not _TAGS.isdisjoint(row)


def _restored(row: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(row, list):
        return [_restored(x, tensors) for x in row]
    if not isinstance(row, dict):
        return row
    if not _is_tagged(row):
        return {key: _restored(x, tensors) for key, x in row.items()}
    ((tag, content),) = row.items()
    if tag == _BYTES:
        return tensors[content].numpy().tobytes()
    if tag in (_PNG, _PIXELS):
        return _restored_picture(content, tensors)
    parts = _restored(content, tensors)
    if tag == _MAPPING:
        return dict(parts)
    return next(kind for kind, name in _COLLECTIONS.items() if name == tag)(parts)


def _restored_picture(content: Any, tensors: Mapping[str, Tensor]) -> Any:
    from PIL import Image

    if isinstance(content, str):
        image: Image.Image = Image.open(io.BytesIO(tensors[content].numpy().tobytes()))
        image.load()
        return image
    name, facts = content[0], _restored(content[1], tensors)
    image = Image.frombytes(facts["mode"], tuple(facts["size"]), tensors[name].numpy().tobytes())
    if facts["palette"]:
        image.putpalette(facts["palette"], "RGBA")
    if facts["exif"]:
        image.info["exif"] = facts["exif"]
    return image


def _update_to_json(update: Update, name: str, tensors: _Tensors) -> dict[str, Any]:
    for field_name, x in update.fields.items():
        tensors.add(f"{name}.{field_name}", x)
    return {"engine": update.engine, "fields": list(update.fields), "metrics": update.metrics}


def _read_rank(folder: Path, rank: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read and verify the files of one rank. The data rows are restored: one object per prompt, with its images.

    Raises:
        ValueError: a file is missing, damaged or of another version.
    """
    from safetensors.torch import load_file

    file = folder / f"rank_{rank}.json"
    if not file.is_file():
        raise ValueError(f"bundle {str(folder)!r}: expected a folder with {file.name}, got none")
    content = _parsed(file)
    if content.get("format") != FORMAT:
        raise ValueError(f"bundle {str(file)!r}: expected the format {FORMAT!r}, got {content.get('format')!r}")
    if content.get("sha256") != _content_sha256(content):
        raise ValueError(f"bundle {str(file)!r}: expected the content that was written, got another checksum")
    tensors = file.with_suffix(".safetensors")
    if not tensors.is_file():
        raise ValueError(f"bundle {str(folder)!r}: expected {tensors.name} beside {file.name}, got none")
    if _file_sha256(tensors) != content["tensors_sha256"]:
        raise ValueError(f"bundle {str(tensors)!r}: expected the tensors that were written, got another checksum")
    found = load_file(tensors)
    content["rows"] = [_restored(row, found) for row in content["rows"]]
    return content, found


def _parsed(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"bundle {str(file)!r}: expected JSON, got: {error}") from error
    return content if isinstance(content, dict) else {}


def _file_sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _content_sha256(content: Mapping[str, Any]) -> str:
    rest = {name: x for name, x in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
