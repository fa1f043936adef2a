"""RoPE scaling in GGUF files, of which transformers 5.19 reads only the base of the frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# `rope.scaling.*` of a file -> the name in `rope_parameters`
YARN = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
READ = {"type", "factor", "finetuned", *YARN}
LOW, HIGH = 1.0, 4.0  # `low_freq_factor` and `high_freq_factor` of every published model with llama3's scaling


def restore_rope_scaling(config: Any, file: Path) -> None:
    """Give the configuration that transformers made of a GGUF file the RoPE scaling in that file.

    llama.cpp writes it in one of two forms: as numbers `rope.scaling.*` (linear and YaRN), or as a tensor
    `rope_freqs.weight` by which the frequencies are divided (llama3). In families with several kinds of layers both are
    for those with full attention.

    Args:
        config: its `rope_parameters` are changed.
        file: the GGUF file.

    Raises:
        ValueError: scaling of another kind, or a tensor that is not that of llama3.
    """
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(file)
    prefix = f"{reader.fields['general.architecture'].contents()}.rope."
    fields = {k.removeprefix(prefix): x.contents() for k, x in reader.fields.items() if k.startswith(prefix)}
    tensors = {x.name: x for x in reader.tensors if x.name.startswith("rope_")}
    divisors = torch.ones(1)
    if (found := tensors.pop("rope_freqs.weight", None)) is not None:
        divisors = torch.tensor(dequantize(found.data, found.tensor_type)).double().flatten()
    scaling = _scaling(fields)
    if tensors or scaling is None or not _is_restored(config, scaling, divisors):
        got = (
            ", ".join([*sorted(tensors), *(f"{k}={x}" for k, x in fields.items() if "scal" in k)])
            or "rope_freqs.weight"
        )
        raise ValueError(
            f"model {str(file)!r}: expected RoPE without scaling or with that of llama3, linear or YaRN, got {got}; "
            "pass the model's safetensors"
        )


def _scaling(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The numbers as `rope_parameters`, empty without scaling; None for a kind that is not restored."""
    given = {k.removeprefix("scaling."): x for k, x in fields.items() if k.startswith("scaling.")}
    kind, factor = given.get("type", "linear"), given.get("factor") or fields.get("scale_linear") or 1.0
    if kind == "none" or (kind == "linear" and factor == 1):
        return {}
    if kind not in ("linear", "yarn") or given.keys() - READ:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if "original_context_length" not in given:
        return None
    return {"rope_type": "yarn", "factor": factor, **{YARN[k]: x for k, x in given.items() if k in YARN}}


def _is_restored(config: Any, scaling: Mapping[str, Any], divisors: Tensor) -> bool:
    """Put the scaling into the configuration; whether its frequencies are then those of the file."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    is_divided = bool((divisors != 1).any())
    if not scaling and not is_divided:
        return True
    rope = getattr(config, "rope_parameters", None)
    if rope is None or (scaling and is_divided):
        return False
    layers = {"layer_type": "full_attention"} if "full_attention" in rope else {}
    rope = rope["full_attention"] if layers else rope
    rope |= scaling
    if not is_divided:
        return True
    frequencies = rope["rope_theta"] ** -(torch.arange(len(divisors), dtype=torch.float64) / len(divisors))
    if rope["rope_type"] == "default":
        rope |= _llama3(frequencies, divisors)
    if rope["rope_type"] not in ROPE_INIT_FUNCTIONS:
        return False
    own, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, **layers)
    expected = frequencies / divisors
    return own.shape == expected.shape and torch.allclose(own.double(), expected, rtol=1e-4, atol=1e-12)


def _llama3(frequencies: Tensor, divisors: Tensor) -> dict[str, Any]:
    r"""The numbers of llama3's scaling with these divisors; empty if there are none.

    $$1 / \text{divisor} = \text{smooth} + (1 - \text{smooth}) / \text{factor}$$, where smooth is 0 for frequencies
    with fewer than `LOW` periods in the original length, 1 for those with more than `HIGH`, and linear between them.
    """
    factor = divisors.max()
    between = (divisors > 1 + 1e-4) & (divisors < factor * (1 - 1e-4))  # a file may have rounded 1 and the factor
    if not between.any():
        return {}
    smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    lengths = 2 * math.pi / frequencies * (LOW + smooth * (HIGH - LOW))
    return {
        "rope_type": "llama3",
        "factor": round(factor.item(), 4),
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": round(lengths[between].median().item()),
    }
