"""The result of a check, and how it is printed."""

from __future__ import annotations

from typing import NamedTuple

MARKS = {True: "ok", False: "FAIL", None: "--"}


class Finding(NamedTuple):
    """One line of a check.

    Attributes:
        subject: what was checked.
        text: the result.
        ok: False if a run would fail; None for information only, such as a missing optional package.
    """

    subject: str
    text: str
    ok: bool | None = True


def line(finding: Finding) -> str:
    """The finding as text. Continuation lines are indented."""
    text = finding.text.replace("\n", "\n" + " " * 36)
    return f"{MARKS[finding.ok]:>5}  {finding.subject:<28} {text}".rstrip()
