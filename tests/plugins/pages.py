"""The code blocks of docs/other_trainers.md, by the heading they stand under."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "other_trainers.md").read_text()


def blocks(heading, language="python"):
    """The blocks of a language under a heading of the page."""
    section = re.split(r"^## ", PAGE.split(f"\n## {heading}\n")[1], flags=re.M)[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
