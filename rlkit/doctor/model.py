"""Checks a model's directory, and which features of rlkit support the model. Weights are not loaded."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from rlkit.doctor.findings import Finding
from rlkit.doctor.machine import LINEAR_ATTENTION
from rlkit.vlm import encode_prompt, load_model, load_processor
from rlkit.vlm.families import DELTA_RULE_CLASSES, bidirectional_obstacle, head_obstacle, packing_obstacle
from rlkit.vlm.inputs import position_spec
from rlkit.vlm.loading import has_vision, load_config, model_path
from rlkit.vlm.processors import check_vocabulary
from rlkit.vlm.weight_files import INDEX, listed_files


def check_model(name: str, *, trust_remote_code: bool = False) -> Iterator[Finding]:
    """Check architecture, weight files, processor and chat template, and which forward passes the model supports.

    Args:
        name: a directory, a hub id, or another name that `--model` accepts.
        trust_remote_code: allow code from the model's repository to run.
    """
    try:
        config = load_config(name, trust_remote_code=trust_remote_code)
        model = load_model(name, on_meta=True, trust_remote_code=trust_remote_code)
    except (ValueError, OSError) as error:
        yield Finding("model", str(error), False)
        return
    parameters = sum(x.numel() for x in model.parameters())
    gib = 2 * parameters / 2**30
    size = f"{parameters / 1e9:.3g}B parameters, {gib:.1f} GiB in bfloat16"
    yield Finding("architecture", f"{config.model_type}, {size}, stored as {config.dtype}")
    yield from check_weight_files(Path(model_path(name)))
    yield from _check_forward(model, config)
    yield from _check_processor(name, config, trust_remote_code)
    yield Finding("memory of a run", "python -m rlkit.plan RECIPE --nproc N --gpu NAME --model ... computes it", None)


def check_weight_files(folder: Path) -> Iterator[Finding]:
    """Check that a local directory has all weight files that its index lists."""
    if not folder.is_dir():
        yield Finding(
            "weights", f"{folder} is not a local directory: the files are fetched at the start of a run", None
        )
        return
    if (folder / INDEX).exists():
        names = listed_files(folder / INDEX)
    else:
        names = [path.name for path in (*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin"))]
    missing = [name for name in names if not (folder / name).exists()]
    if missing or not names:
        expected = f"the {len(names)} files that {INDEX} names" if names else "*.safetensors"
        lacking = f"without {', '.join(missing)}" if missing else "none"
        yield Finding("weights", f"expected {expected} in {folder}, got {lacking}", False)
        return
    total = sum((folder / name).stat().st_size for name in names) / 2**30
    yield Finding("weights", f"{len(names)} file{'s' * (len(names) > 1)}, {total:.2f} GiB")


def _check_forward(model: Any, config: Any) -> Iterator[Finding]:
    """Check support for packed rows, fused log-probabilities and positions."""
    obstacle = packing_obstacle(model) or bidirectional_obstacle(model)
    if obstacle:
        yield Finding("packed rows", f"not possible, add --no_use_remove_padding --no_share_prompts: {obstacle}", None)
    else:
        yield Finding("packed rows", "without padding; a prompt is computed once for all of its responses")
    if _lacks_kernels(model):
        yield Finding("gated delta rule", f"computed slowly, without kernels: {LINEAR_ATTENTION}", None)
    if obstacle := head_obstacle(config):
        yield Finding("--use_fused_kernels", f"not possible: {obstacle}", None)
    try:
        several = position_spec(config) is not None
    except ValueError as error:
        yield Finding("positions", str(error), False)
        return
    yield Finding("positions", "3D RoPE, computed by rlkit.vlm.rope3d" if several else "one per token")


def _lacks_kernels(model: Any) -> bool:
    """Whether transformers would compute the gated delta rule on this machine's GPU in plain torch."""
    has_delta_rule = any(type(module).__name__ in DELTA_RULE_CLASSES for module in model.modules())
    return has_delta_rule and torch.cuda.is_available() and find_spec("fla") is None


def _check_processor(name: str, config: Any, trust_remote_code: bool) -> Iterator[Finding]:
    """Check the processor, and show an example in the chat template."""
    row: dict[str, Any] = {"question": "What is this?", "images": []}
    if has_vision(config):
        row["images"] = [Image.new("RGB", (448, 448), "white")]
    try:
        processor = load_processor(name, trust_remote_code=trust_remote_code)
        prompt = encode_prompt(processor, row)
    except (ValueError, OSError) as error:
        yield Finding("processor", str(error), False)
        return
    tokenizer = getattr(processor, "tokenizer", processor)
    yield Finding("processor", f"{type(processor).__name__}, {len(tokenizer)} tokens")
    images = f", {len(prompt.token_ids)} with an image of 448 x 448 pixels expanded" if row["images"] else ""
    yield Finding(
        "chat template", f"{len(prompt.compact_ids)} tokens{images}: {tokenizer.decode(prompt.compact_ids)!r}"
    )
    try:
        check_vocabulary(processor, config)
    except ValueError as error:
        yield Finding("vocabulary", str(error), False)
        return
    size = config.get_text_config().vocab_size
    if without := {i for i in tokenizer.get_vocab().values() if i >= size}:
        text = f"special tokens without an embedding, which no text may have: {len(without)}"
        yield Finding("vocabulary", text, None)
