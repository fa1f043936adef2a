"""What a check found, and how it is printed."""

from __future__ import annotations

from typing import NamedTuple

MARKS = {True: "ok", False: "FAIL", None: "--"}


class Finding(NamedTuple):
    """One line of a check.

    Attributes:
        subject: what was looked at.
        text: what was found.
        ok: False if a run would fail; None for what is only said, such as an optional package that is not there.
    """

    subject: str
    text: str
    ok: bool | None = True


def line(finding: Finding) -> str:
    """The finding as a line of text; further lines of its text are indented."""
    text = finding.text.replace("\n", "\n" + " " * 36)
    return f"{MARKS[finding.ok]:>5}  {finding.subject:<28} {text}".rstrip()
