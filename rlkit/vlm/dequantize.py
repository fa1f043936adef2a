"""Writes a quantized model again in bfloat16, so that it can be trained: a program.

    python -m rlkit.vlm.dequantize MODEL NEW_DIRECTORY

It reads FP8 with any scales (DeepSeek, Qwen, GLM, Mistral, compressed-tensors, modelopt, fbgemm, MXFP8), integers of
compressed-tensors (Kimi), and MXFP4 (gpt-oss). A weight is computed in float32 and rounded once. One file is held in
memory at a time.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkit.vlm.loading import load_config
from rlkit.vlm.model_config import config_file, copy_small_files, without_quantization
from rlkit.vlm.weight_files import INDEX, quantization_method, weight_files

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1; a fourth bit is the sign
# scales of activations and caches: weights do not depend on them
OF_ACTIVATIONS = re.compile(r".*[._](activation|input|output|q|k|v|kv|prob)_(scale|scale_inv|zero_point|global_scale)")
# what stands beside a quantized tensor NAME, and is used up with it
BESIDE = ("_scale_inv", "_scale", "_scales", "_shape")
ReadTensor = Callable[[str], Tensor]


def dequantize_model(model: str, place: str | Path) -> None:
    """Write a directory with the weights of a quantized model in bfloat16, and its other files.

    Args:
        model: directory with safetensors files.
        place: directory to write; it must not exist. After an error it does not.

    Raises:
        ValueError: no such directory, weights that are not quantized, or in a way that this module does not read.
    """
    source, place = config_file(model).parent, Path(place)
    if place.exists():
        raise ValueError(f"place: expected a directory that does not exist, got {str(place)!r}")
    config = load_config(str(source))
    content = without_quantization(json.loads((source / "config.json").read_text()))
    part = place.with_name(f"{place.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by an interrupted conversion
    part.mkdir(parents=True)
    try:
        copy_small_files(source, part, but=(INDEX, "hf_quant_config.json"))
        (part / "config.json").write_text(json.dumps(content, indent=2))
        _write_files(weight_files(str(source)), part, quantization_method(config), _block_of(config))
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    part.rename(place)


def _block_of(config: Any) -> tuple[int, int] | None:
    """Rows and columns that share a scale, if the configuration says so."""
    for part in (config, config.get_text_config()):
        match getattr(part, "quantization_config", None):
            case {"weight_block_size": [int(rows), int(columns)]}:
                return rows, columns
            case {"config_groups": dict(groups)}:  # compressed-tensors
                weights = [group.get("weights") or {} for group in groups.values()]
                blocks = [x["block_structure"] for x in weights if isinstance(x.get("block_structure"), list)]
                if blocks and all(block == blocks[0] for block in blocks):
                    return tuple(blocks[0])
    return None


def _write_files(files: Sequence[str], part: Path, method: str | None, block: tuple[int, int] | None) -> None:
    """Write every file again with its weights in bfloat16, and the index of all."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    if not files:
        raise ValueError("model: expected safetensors files, got none")
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
        source = {name: weights for weights in opened for name in weights.keys()}

        def read(name: str) -> Tensor:
            return source[name].get_tensor(name)

        index, total, left_out = dict[str, str](), 0, 0
        for file, weights in zip(files, opened, strict=True):
            tensors = dict(_dequantized(weights.keys(), source, read, method, block))
            left_out += len(weights.keys()) - len(tensors)
            save_file(tensors, part / Path(file).name, {"format": "pt"})
            index |= dict.fromkeys(tensors, Path(file).name)
            total += sum(x.nbytes for x in tensors.values())
            print(f"wrote {part.name.removesuffix('.part')}/{Path(file).name}: {len(tensors)} tensors", flush=True)
    if not left_out:
        raise ValueError("model: expected quantized weights with their scales, got none")
    if len(files) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": index}
        (part / INDEX).write_text(json.dumps(content, indent=2) + "\n")


def _dequantized(
    names: Sequence[str], source: Mapping[str, Any], read: ReadTensor, method: str | None, block: tuple[int, int] | None
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) for each of some names that is no scale."""
    for name in names:
        if OF_ACTIVATIONS.fullmatch(name) or _is_beside(name, source):
            continue
        base = name.removesuffix("_packed").removesuffix("_blocks")
        dtype = source[name].get_slice(name).get_dtype()
        scales = next((base + end for end in BESIDE if base + end in source and end != "_shape"), None)
        asymmetric = {base + "_zero_point", base + "_g_idx", base + "_global_scale", base + "_scale_2"} & {*source}
        if base == name and not dtype.startswith(("F4", "F6", "F8", "I8", "U8")):
            yield name, read(name)
            continue
        if scales is None or asymmetric:
            raise ValueError(f"{name}: expected {dtype} with one scale beside it, got {sorted(asymmetric) or 'none'}")
        scale, quantized = read(scales), read(name)
        if name.endswith("_blocks") and dtype == "U8":
            yield base, from_mxfp4(quantized, scale).transpose(-1, -2).contiguous()
        elif name.endswith("_packed") and dtype == "I32":
            yield base, scaled(unpacked(quantized, read(base + "_shape").tolist()), scale, block)
        elif quantized.dtype in FP8 or (dtype == "I8" and method == "compressed-tensors"):
            yield base, scaled(quantized, scale, block)
        else:
            raise ValueError(f"{name}: expected FP8, integers of compressed-tensors or MXFP4, got {dtype} of {method}")


def _is_beside(name: str, source: Mapping[str, Any]) -> bool:
    """Whether a tensor belongs to a quantized one."""
    bases = (name.removesuffix(end) for end in BESIDE if name.endswith(end))
    return any(f"{base}{kind}" in source for base in bases for kind in ("", "_packed", "_blocks"))


def scaled(quantized: Tensor, scale: Tensor, block: tuple[int, int] | None = None) -> Tensor:
    """`quantized * scale` in bfloat16, where each entry of `scale` holds for a block of rows and columns.

    Args:
        quantized: [..., rows, columns]
        scale: one number for all, one for each matrix, or [..., blocks of rows, blocks of columns]. A byte is the
            exponent of a power of two, plus 127 (MXFP8).
        block: rows and columns of a block, of which the last ones may be smaller. Where it does not fit, or is not
            given, all blocks have the same size.

    Raises:
        ValueError: a scale of another shape, or blocks that could have the same size or that of a power of two.
    """
    weight, factors = quantized.float(), scale.float()
    if scale.dtype == torch.uint8:
        factors = torch.exp2(factors - 127)
    if factors.numel() == 1:
        return (weight * factors.reshape(())).bfloat16()
    if factors.ndim == 1:  # one for each matrix, or for each row
        factors = factors[:, None, None] if weight.ndim == 3 else factors[:, None]
    if factors.ndim != weight.ndim or weight.ndim < 2:
        raise ValueError(f"scale: expected one for {tuple(weight.shape)}, got {tuple(scale.shape)}")
    for dim, given in zip((-2, -1), block or (0, 0), strict=True):
        size, count = weight.shape[dim], factors.shape[dim]
        if given and -(-size // given) == count:
            length = given
        elif size % count == 0:
            length = size // count
            power = 2 ** (length - 1).bit_length()
            if count > 1 and power > length and -(-size // power) == count:
                raise ValueError(
                    f"scale: expected a configuration that states the size of blocks, got {size} in {count} blocks, "
                    f"which may be of {length} or of {power}"
                )
        else:
            raise ValueError(f"scale: expected one that divides {tuple(weight.shape)}, got {tuple(factors.shape)}")
        factors = factors.repeat_interleave(length, dim).narrow(dim, 0, size)
    return (weight * factors).bfloat16()


def unpacked(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Integers of 4 or 8 bits out of 32-bit ones, lowest bits first; the half of their range was added to them.

    Args:
        packed: int32 [rows, ceil(columns / (32 / bits))]
        shape: rows and columns.

    Raises:
        ValueError: another number of bits.
    """
    rows, columns = shape
    bits = next((bits for bits in (4, 8) if packed.shape == (rows, -(-columns // (32 // bits)))), None)
    if bits is None:
        raise ValueError(f"weight_packed: expected 4 or 8 bits for {rows} x {columns}, got {tuple(packed.shape)}")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (packed[..., None] >> shifts) & (2**bits - 1)
    return values.flatten(-2)[:, :columns] - 2 ** (bits - 1)


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """MXFP4 (https://arxiv.org/abs/2310.10537): two E2M1 numbers a byte, and one power of two for 32 of them.

    Args:
        blocks: uint8 [..., groups, 16], the lower half of a byte first.
        scales: uint8 [..., groups], the exponent plus 127.

    Returns:
        [..., groups * 32], bfloat16.
    """
    values = torch.tensor([*FP4_VALUES, *(-x for x in FP4_VALUES)])
    numbers = values[torch.stack([blocks & 15, blocks >> 4], -1).long()].flatten(-2)
    return torch.ldexp(numbers, scales.int()[..., None] - 127).flatten(-2).bfloat16()


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m rlkit.vlm.dequantize", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help="directory of the quantized model")
    parser.add_argument("directory", help="directory to write")
    given = parser.parse_args()
    try:
        dequantize_model(given.model, given.directory)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
