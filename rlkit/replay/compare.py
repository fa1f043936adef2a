"""Compares two bundles of the same step, quantity by quantity, in the order in which the step computes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlkit.data.samples import Sample
from rlkit.replay.bundles import Bundle, Draw, Update, digest

GIVEN = ("tokens", "mask", "group_ids", "numbers", "rollout_logprobs", "rewards", "recorded_row")  # inputs


@dataclass(frozen=True)
class Quantity:
    """The comparison of one recorded quantity with its recomputed value.

    Attributes:
        name: display name, such as "rewards" or "update 1: advantages".
        differs: whether the difference is larger than rounding.
        difference: largest absolute difference; nan if there is no such number, as for shapes.
        where: the place of the largest difference, with both values.
    """

    name: str
    differs: bool
    difference: float
    where: str = ""


def compare_bundles(recorded: Bundle, computed: Bundle, tolerance: float) -> list[Quantity]:
    """Compare all quantities of a step, in the order in which they are computed.

    One difference can cause all later ones, so the first is the one to look at.

    Args:
        recorded: the bundle that the run saved.
        computed: the bundle of the replay.
        tolerance: a number x may differ by tolerance * (1 + |x|); rewards have to be equal.
    """
    found = list(_compare_draws(recorded.draws, computed.draws))
    if len(recorded.updates) != len(computed.updates):
        found.append(
            Quantity(
                "updates",
                True,
                float("nan"),
                f"{len(recorded.updates)} optimizer steps recorded, {len(computed.updates)} computed",
            )
        )
    for i, (old, new) in enumerate(zip(recorded.updates, computed.updates, strict=False)):
        name = f"update {i + 1}" if len(recorded.updates) > 1 else ""
        if old.engine != "checkpoints":
            name = f"{name} of {old.engine.removesuffix('_checkpoints')}".strip()
        found += [
            Quantity(f"{name}: {one.name}" if name else one.name, one.differs, one.difference, one.where)
            for one in _compare_updates(old, new, tolerance)
        ]
    return found


def _compare_draws(recorded: Sequence[Draw], computed: Sequence[Draw]) -> Iterator[Quantity]:
    if len(recorded) != len(computed):
        where = f"{len(recorded)} calls of the sampler recorded, {len(computed)} computed"
        yield Quantity("draws", True, float("nan"), where)
    for old, new in zip(recorded, computed, strict=False):
        prompts = {prompt.group_id: prompt for prompt in new.prompts}
        answered = {sample.group_id: sample for sample in old.samples}
        yield _compare_prompts(answered, prompts)
        yield _compare_pixels(answered, prompts)
        yield _compare_rewards(old.samples, new.samples)


def _compare_prompts(answered: dict[int, Sample], prompts: dict[int, Sample]) -> Quantity:
    """Prompt tokens: as recorded, and as the replay encodes the task's rows."""
    for group, sample in answered.items():
        if group not in prompts:
            return Quantity("prompts", True, float("nan"), f"prompt {group}: the task has no such row for this step")
        ids = prompts[group].token_ids
        if sample.token_ids[: len(ids)] != ids:
            at = next((i for i, (a, b) in enumerate(zip(sample.token_ids, ids, strict=False)) if a != b), len(ids))
            old, new = sample.token_ids[at : at + 1], ids[at : at + 1]
            return Quantity(
                "prompts", True, float("nan"), f"prompt {group}, token {at}: recorded {old}, computed {new}"
            )
    return Quantity("prompts", False, 0.0)


def _compare_pixels(answered: dict[int, Sample], prompts: dict[int, Sample]) -> Quantity:
    """The processor's output for images. Responses whose later turns added images are not compared."""
    for group, sample in answered.items():
        prompt = prompts.get(group)
        if prompt is None or sum(map(len, prompt.placeholders.values())) != sum(map(len, sample.placeholders.values())):
            continue
        for name, x in sample.vision.items():
            other = prompt.vision.get(name)
            if other is None or digest(other) != digest(x):
                same = other is not None and other.shape == x.shape
                gap = (other.double() - x.double()).abs().max().item() if other is not None and same else float("nan")
                return Quantity("images", True, gap, f"prompt {group}: {name}")
    return Quantity("images", False, 0.0)


def _compare_rewards(old: Sequence[Sample], new: Sequence[Sample]) -> Quantity:
    computed = {(sample.group_id, sample.number): sample.reward for sample in new}
    for sample in old:
        key = (sample.group_id, sample.number)
        reward = torch.tensor(sample.reward, dtype=torch.float32).item()  # the dtype of batches
        other = computed.get(key, float("nan"))
        if reward != other and not (reward != reward and other != other):
            which = f"prompt {key[0]}, response {key[1]} ({sample.text[:60]!r})"
            words = f"{which}: recorded {reward:g}, computed {other:g}"
            return Quantity("rewards", True, abs(reward - other), words)
    return Quantity("rewards", False, 0.0)


def _compare_updates(old: Update, new: Update, tolerance: float) -> Iterator[Quantity]:
    for name in ("tokens", "mask"):  # if the rows differ, nothing else can be compared
        if name not in new.fields or not torch.equal(old.fields[name], new.fields[name]):
            shapes = f"{list(old.fields['tokens'].shape)} recorded"
            if name in new.fields:
                shapes += f", {list(new.fields[name].shape)} computed"
            yield Quantity(name, True, float("nan"), shapes)
            return
    for name, x in old.fields.items():
        if name in GIVEN or name not in new.fields:
            continue
        yield _compare_tensors(name, x, new.fields[name], old, tolerance)
    scalars = [name for name in old.metrics if name in new.metrics and not name.startswith("time/")]
    for name in sorted(scalars, key=lambda name: (name != "loss", name == "grad_norm")):
        a, b = float(old.metrics[name]), float(new.metrics[name])
        differs = not _close(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64), tolerance)
        yield Quantity(name, differs, 0.0 if a == b else abs(a - b), f"recorded {a:.6g}, computed {b:.6g}")


def _compare_tensors(name: str, x: Tensor, y: Tensor, update: Update, tolerance: float) -> Quantity:
    if x.shape != y.shape:
        return Quantity(name, True, float("nan"), f"{list(x.shape)} recorded, {list(y.shape)} computed")
    if x.numel() == 0:
        return Quantity(name, False, 0.0)
    gap = (x.double() - y.double()).abs()
    gap = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, gap)
    at = [int(i) for i in torch.unravel_index(gap.nan_to_num(nan=torch.inf).argmax(), gap.shape)]
    group = f"prompt {int(update.fields['group_ids'][at[0]])}" if "group_ids" in update.fields else f"row {at[0]}"
    number = f", response {int(update.fields['numbers'][at[0]])}" if "numbers" in update.fields else ""
    token = f", token {at[1]}" if len(at) > 1 else ""
    where = f"{group}{number}{token}: recorded {x[tuple(at)].item():.6g}, computed {y[tuple(at)].item():.6g}"
    return Quantity(name, not _close(x, y, tolerance), gap.max().item(), where)


def _close(x: Tensor, y: Tensor, tolerance: float) -> bool:
    return torch.allclose(x.double(), y.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def describe(found: Sequence[Quantity]) -> str:
    """A table of all quantities, and a last line that names the first difference."""
    lines = [f"{'quantity':<40} {'largest difference':>20}"]
    for one in found:
        verdict = "DIFFERS" if one.differs else "equal" if one.difference == 0 else "rounding"
        lines.append(f"{one.name:<40} {one.difference:>20.3g}  {verdict}")
    first = next((one for one in found if one.differs), None)
    lines.append("nothing differs" if first is None else f"first difference: {first.name}: {first.where}")
    return "\n".join(lines)
