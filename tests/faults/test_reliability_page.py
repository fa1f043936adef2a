"""The page of what is tried has the counts of today, and each file of tests is on it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date():
    command = [sys.executable, ROOT / "docs" / "make_reliability.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_file_is_on_the_page():
    page = (ROOT / "docs" / "reliability.md").read_text()
    files = [file for folder in ("faults", "security") for file in (ROOT / "tests" / folder).glob("test_*.py")]
    files.remove(Path(__file__))
    assert len(files) > 5 and all(f"]({Path('..') / file.relative_to(ROOT)})" in page for file in files)
