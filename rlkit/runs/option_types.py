"""Types of options: they say which numbers an option may have, and whether a resumed run may change it.

    learning_rate: NonNegativeFloat = 1e-6
    save_every: ChangeableOnResume[PositiveInt] = 50
    delta: Annotated[float, Above(1)] = 4.0

To Python and to type checkers these are `float` and `int`. A class that only changes the default of an option may write
`save_every: int = 10`: the option keeps what the class that declares it says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cache
from inspect import get_annotations
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

T = TypeVar("T")


@dataclass(frozen=True)
class AtLeast:
    """Range of an option: `low` and more."""

    low: float

    def __contains__(self, x: float) -> bool:
        return x >= self.low

    def __str__(self) -> str:
        return f"at least {self.low:g}"


@dataclass(frozen=True)
class Above:
    """Range of an option: more than `low`."""

    low: float

    def __contains__(self, x: float) -> bool:
        return x > self.low

    def __str__(self) -> str:
        return f"a number above {self.low:g}"


@dataclass(frozen=True)
class Between:
    """Range of an option: `low` to `high`, both included."""

    low: float
    high: float

    def __contains__(self, x: float) -> bool:
        return self.low <= x <= self.high

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


PositiveInt = Annotated[int, AtLeast(1)]
NonNegativeInt = Annotated[int, AtLeast(0)]
PositiveFloat = Annotated[float, Above(0)]
NonNegativeFloat = Annotated[float, AtLeast(0)]
UnitInterval = Annotated[float, Between(0, 1)]

CHANGEABLE = "changeable on resume"
# Options that a resumed run may change freely; others only if --allow_changes names them. They say where and how fast
# results are computed, not which.
ChangeableOnResume = Annotated[T, CHANGEABLE]


def check_ranges(cfg: Any) -> None:
    """Raise a ValueError that names the first option of a dataclass whose number is out of the range of its type."""
    for name, notes in _notes(cfg.__class__).items():
        ranges = [note for note in notes if isinstance(note, AtLeast | Above | Between)]
        if ranges and (value := getattr(cfg, name)) is not None:
            _check(name, value, ranges[0])


def check_range(name: str, value: float, low: float, high: float = math.inf, why: str = "") -> None:
    """Raise a ValueError that names an option whose value is not in [low, high], and says why if another sets this."""
    _check(name, value, AtLeast(low) if high == math.inf else Between(low, high), why)


def _check(name: str, value: float, allowed: AtLeast | Above | Between, why: str = "") -> None:
    if value not in allowed:
        raise ValueError(f"{name}: expected {allowed}{f' ({why})' if why else ''}, got {value:g}")


def changeable_options(config: type) -> set[str]:
    """Names of the options that a resumed run may change freely, see `ChangeableOnResume`."""
    return {name for name, notes in _notes(config).items() if CHANGEABLE in notes}


@cache
def _notes(config: type) -> dict[str, list[Any]]:
    """What `Annotated` says of each option of a dataclass: in the class itself, then in its base classes."""
    found: dict[str, list[Any]] = {option.name: [] for option in fields(config)}
    for owner in config.__mro__:
        for name, hint in get_annotations(owner, eval_str=True).items():
            if name in found:
                found[name] += _notes_of_type(hint)
    return found


def _notes_of_type(hint: Any) -> list[Any]:
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        return [*notes, *_notes_of_type(inner)]
    if get_origin(hint) in (Union, UnionType):  # such as NonNegativeFloat | None
        return [note for part in get_args(hint) for note in _notes_of_type(part)]
    return []
