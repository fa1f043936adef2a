"""Rewrite the page of a run, or write a page that compares several runs.

python -m rlkit.report runs/A               # writes runs/A/report.html
python -m rlkit.report runs/A runs/B        # writes compared.html
python -m rlkit.report runs/A --add results.json    # adds what lm-eval or inspect-ai measured on runs/A/model
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlkit.report.harnesses import add_results
from rlkit.report.page import write_page
from rlkit.tracking import CONFIG, METRICS


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m rlkit.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="directories of runs")
    parser.add_argument(
        "--out",
        type=Path,
        help="path of the page; default: report.html of a single run, else compared.html",
    )
    parser.add_argument(
        "--add",
        nargs="+",
        type=Path,
        default=[],
        help="files of results of lm-eval or inspect-ai to add to the run's eval.json and page",
    )
    arguments = parser.parse_args()
    for run in arguments.runs:
        if not ((run / METRICS).exists() or (run / CONFIG).exists()):
            sys.exit(f"rlkit.report: runs: expected directories with {METRICS}, got {run}")
    single = len(arguments.runs) == 1
    if arguments.add and not single:
        sys.exit(f"rlkit.report: add: expected one run, got {len(arguments.runs)}")
    if arguments.add:
        try:
            add_results(arguments.runs[0], arguments.add)
        except ValueError as error:
            sys.exit(f"rlkit.report: {error}")
    path = arguments.out or (arguments.runs[0] / "report.html" if single else Path("compared.html"))
    if not path.parent.is_dir():
        sys.exit(f"rlkit.report: out: expected a file in a directory that exists, got {path}")
    print(f"written: {write_page(path, arguments.runs)}")


if __name__ == "__main__":
    main()
