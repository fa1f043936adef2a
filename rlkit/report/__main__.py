"""Rewrite the page of a run, or write a page that compares several runs.

python -m rlkit.report runs/A               # writes runs/A/report.html
python -m rlkit.report runs/A runs/B        # writes compared.html
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlkit.report.page import write_page
from rlkit.tracking import CONFIG, METRICS


def main() -> None:
    parser = argparse.ArgumentParser(
        "rlkit.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="directories of runs")
    parser.add_argument(
        "--out",
        type=Path,
        help="path of the page; default: report.html of a single run, else compared.html",
    )
    arguments = parser.parse_args()
    for run in arguments.runs:
        if not ((run / METRICS).exists() or (run / CONFIG).exists()):
            sys.exit(f"rlkit.report: runs: expected directories with {METRICS}, got {run}")
    single = len(arguments.runs) == 1
    path = arguments.out or (arguments.runs[0] / "report.html" if single else Path("compared.html"))
    print(f"written: {write_page(path, arguments.runs)}")


if __name__ == "__main__":
    main()
