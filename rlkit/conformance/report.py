"""Runs the checks on an adapter, and formats the findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rlkit.conformance.adapter import Refused, provides
from rlkit.conformance.checks import CHECKS, Bug, Check

RIGHT, CHOICE, BUG, ERROR, MISSING = "as the reference", "choice", "bug", "error", "not provided"


class Finding(NamedTuple):
    """The result of a check: a verdict and, unless the trainer agrees with the reference, a sentence."""

    check: str
    question: str
    verdict: str
    text: str = ""


def run_check(one: Check, adapter: Any) -> Finding:
    """Run one check."""
    if not provides(adapter, one.method):
        return Finding(one.name, one.question, MISSING, f"the adapter has no {one.method}")
    try:
        choice = one.run(adapter)
    except Bug as error:
        return Finding(one.name, one.question, BUG, str(error))
    except Refused as error:
        return Finding(one.name, one.question, CHOICE, f"refused: {error}")
    except Exception as error:
        return Finding(one.name, one.question, ERROR, f"trainer or adapter raised {type(error).__name__}: {error}")
    return Finding(one.name, one.question, CHOICE if choice else RIGHT, choice or "")


def run_checks(adapter: Any) -> list[Finding]:
    """Run all checks, in the order of `CHECKS`."""
    return [run_check(one, adapter) for one in CHECKS]


def as_text(name: str, findings: Sequence[Finding]) -> str:
    """A table of one trainer's findings, as plain text."""
    width = max(len(one.check) for one in findings)
    lines = [f"{one.check:<{width}}  {one.verdict:<{len(RIGHT)}}  {one.text}".rstrip() for one in findings]
    counts = ", ".join(f"{sum(one.verdict == verdict for one in findings)} {verdict}" for verdict in _VERDICTS)
    return "\n".join([f"{name}: {counts}", *lines])


_VERDICTS = (RIGHT, CHOICE, BUG, ERROR, MISSING)


def as_markdown(findings: dict[str, Sequence[Finding]]) -> str:
    """A Markdown table of several trainers, with a numbered note for each choice, bug and error."""
    notes: list[str] = []
    rows = []
    for i, one in enumerate(CHECKS):
        cells = []
        for name, trainer_findings in findings.items():
            found = trainer_findings[i]
            if found.verdict in (CHOICE, BUG, ERROR):
                notes.append(f"{len(notes) + 1}. **{name}**, {one.name}: {found.text}.")
                cells.append(f"{found.verdict} ({len(notes)})")
            else:
                cells.append({RIGHT: "yes", MISSING: "–"}[found.verdict])
        rows.append(f"| {one.question} `{one.name}` | {' | '.join(cells)} |")
    head = [f"| check | {' | '.join(findings)} |", f"|---|{'---|' * len(findings)}"]
    return "\n".join([*head, *rows, "", *notes])
