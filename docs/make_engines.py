"""Make the table of docs/notes_engines.md from the cases in tests/engines.

python docs/make_engines.py [--check]    # --check writes nothing and exits with 1 if the table is out of date
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "notes_engines.md"
BEGIN, END = "<!-- made by docs/make_engines.py: edit the cases in tests/engines -->\n", "<!-- end -->\n"
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "engines")]


def with_table(page: str) -> str:
    """The page with its table made from the current cases."""
    from one_gradient import table

    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n\n" + END + rest.partition(END)[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the table is out of date")
    check, old = parser.parse_args().check, PAGE.read_text()
    new = with_table(old)
    if not check:
        PAGE.write_text(new)
    return int(check and new != old)


if __name__ == "__main__":
    sys.exit(main())
