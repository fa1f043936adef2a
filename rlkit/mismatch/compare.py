"""Runs one sequence through sampler and trainer, and compares the parts of the two forward passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkit.data.samples import Sample, collate
from rlkit.losses.logprobs import suppress_tokens, target_logprobs
from rlkit.mismatch.trace import Parts, head_logits, recorded_parts
from rlkit.rollout import Sampling

FIRST: list[str] = ["pixels", "positions", "vision tower", "injected features"]


class Part(NamedTuple):
    """The difference of sampler and trainer in one part of the model.

    Attributes:
        error: largest norm of a token's difference vector, relative to the mean norm of the trainer's vectors. For
            positions and log-probabilities, the largest absolute difference. inf if the shapes differ.
        differs: whether the error is larger than rounding.
        where: place of the largest difference, or the two shapes.
    """

    name: str
    error: float
    differs: bool
    where: str = ""


def trainer_parts(engine: Any, sample: Sample) -> tuple[Parts, Tensor]:
    """The parts of the trainer's forward pass over a sequence, and its log-probabilities of the response."""
    batch = collate([sample])
    with recorded_parts(engine.base, len(sample.token_ids)) as parts:
        logprobs = engine.infer_batch(batch)["logprobs"][0]
    with engine.gathered():
        parts["logits"] = head_logits(engine.base, parts["final norm"])
    return parts, logprobs[batch.mask[0]]


def hf_parts(rollout: Any, model: Any, sample: Sample) -> Parts:
    """The parts of the `hf` sampler's forward pass over a sequence; `model` is the model that it samples with."""
    with recorded_parts(model, len(sample.token_ids)) as parts:
        rollout.generate([_as_prompt(sample)], Sampling(1))
    with rollout.gathered():
        parts["logits"] = head_logits(model, parts["final norm"])
    return parts


def vllm_parts(rollout: Any, sample: Sample) -> Parts:
    """The parts of in-process vLLM's forward pass over a sequence. Its prefix and encoder caches are emptied first."""
    found: list[Parts] = []
    llm = rollout.llm
    llm.reset_prefix_cache()
    llm.llm_engine.reset_encoder_cache()

    def trace(model: Any) -> None:
        with recorded_parts(model, len(sample.token_ids)) as parts:
            rollout.generate([_as_prompt(sample)], Sampling(1))
        found.append(parts)

    def logits(model: Any) -> None:
        weight = next(model.parameters())
        hidden = found[0]["final norm"].to(weight.device, rollout.weight_dtype)
        found[0]["logits"] = model.compute_logits(hidden).detach().float().cpu()

    llm.apply_model(trace)
    llm.apply_model(logits)
    if (raw := found[0].pop("raw pixels", None)) is not None:
        found[0]["pixels"] = _normalised(raw, rollout.processor.image_processor)
    return found[0]


def _normalised(raw: Tensor, image_processor: Any) -> Tensor:
    """uint8 patches [patches, channels * ...], normalised as by the image processor. vLLM normalises in its tower."""
    mean, std = (torch.tensor(x)[:, None] for x in (image_processor.image_mean, image_processor.image_std))
    by_channel = raw.reshape(len(raw), len(mean), -1) * image_processor.rescale_factor
    return ((by_channel - mean) / std).reshape(raw.shape)


def _as_prompt(sample: Sample) -> Sample:
    """The whole sequence as a prompt, so that prefill computes all of it in one forward pass."""
    n = len(sample.token_ids)
    return replace(sample, mask=[False] * n, logprobs=[0.0] * n)


def compare_parts(
    sampler: Parts, trainer: Parts, sample: Sample, engine: Any, logprobs: Tensor, tolerance: float
) -> list[Part]:
    """Compare all parts, in the order of the forward pass, and then the log-probabilities of the response.

    A part that only one of the two has counts as a difference.

    Args:
        sampler, trainer: their parts for the same sequence.
        sample: the sequence, with the sampler's log-probabilities of the response.
        engine: the trainer; its temperature and suppressed tokens are used.
        logprobs: the trainer's log-probabilities of the response.
        tolerance: relative difference that counts as rounding.
    """
    names = [name for name in trainer if name in sampler]
    order = [name for name in FIRST if name in names]
    order += [name for name in names if name not in order]
    found = [_compare(name, sampler[name], trainer[name], tolerance) for name in order]
    missing = sorted({*sampler} ^ {*trainer})
    found += [Part(name, math.inf, True, f"{name}: only one of the two has it") for name in missing]

    mask = torch.tensor(sample.mask)
    recorded = torch.tensor(sample.logprobs)[mask]
    logits = sampler["logits"][:-1][mask[1:]]
    if engine.suppressed_token_ids is not None:
        logits = suppress_tokens(logits, engine.suppressed_token_ids.cpu())
    expected = target_logprobs(logits, torch.tensor(sample.token_ids)[mask], engine.temperature)
    found.append(_compare_logprobs("sampling transform", recorded, expected, tolerance))
    found.append(_compare_logprobs("log-probabilities", recorded, logprobs, tolerance))
    return found


def _compare(name: str, x: Tensor, y: Tensor, tolerance: float) -> Part:
    """Compare positions [axes, tokens], or vectors [tokens or patches, features]."""
    if name == "positions":
        x, y = torch.broadcast_tensors(x, y) if len(x) != len(y) else (x, y)
        gap = (x - y).abs().amax(0)
        error, at = gap.max().item(), int(gap.argmax())
        return Part(name, error, error > 0, f"token {at}: sampler {x[:, at].tolist()}, trainer {y[:, at].tolist()}")
    if x.shape != y.shape:
        return Part(name, math.inf, True, f"sampler {list(x.shape)}, trainer {list(y.shape)}")
    gap = (x - y).norm(dim=1)
    scale = y.norm(dim=1).mean().clamp(min=1e-12)
    error, at = (gap / scale).max().item(), int(gap.argmax())
    return Part(name, error, not error <= tolerance, f"{'patch' if name == 'pixels' else 'row'} {at} of {len(x)}")


def _compare_logprobs(name: str, x: Tensor, y: Tensor, tolerance: float) -> Part:
    gap = (x - y).abs()
    at = int(gap.argmax())
    where = f"token {at} of the response: sampler {x[at].item():.4f}, trainer {y[at].item():.4f}"
    return Part(name, gap.max().item(), not gap.max().item() <= 10 * tolerance, where)


def describe(found: Sequence[Part]) -> str:
    """A table of the parts, and a last line that names the first part that differs by more than rounding."""
    lines = [f"{'part':<24} {'difference':>12}"]
    lines += [f"{one.name:<24} {one.error:>12.3g}  {'DIFFERS' if one.differs else 'rounding'}" for one in found]
    first = next((one for one in found if one.differs), None)
    lines.append(
        "nothing differs beyond rounding" if first is None else f"first difference: {first.name}: {first.where}"
    )
    return "\n".join(lines)
