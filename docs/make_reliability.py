"""Write docs/reliability.md: what tests/faults and tests/security try, with the number of cases that pytest collects.

python docs/make_reliability.py [--check]    # --check writes nothing, and exits with 1 if the page is out of date
"""

import ast
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
FOLDERS = ("tests/faults", "tests/security")
BESIDE = ("tests/rewards/test_sandbox.py", "tests/rewards/test_programs.py", "tests/vlm/test_remote_code.py")
NAMES = "python_files=test_*.py live_*.py"  # the latter for `make faults` alone
OWN = "tests/faults/test_reliability_page.py"
TEXT = """# Reliability: faults and attacks that are tested

Each row is a file of tests that breaks something on purpose, or acts as an attacker. `make faults` runs them all;
`make test` runs all except `live_...`. Cases are counted by pytest, and `docs/make_reliability.py` writes this page.
[SECURITY.md](../SECURITY.md) says what is promised and what is not. For a run of yours that fails, see [when a run
goes wrong](when_a_run_goes_wrong.md).

| what is tried | cases | file |
|---|---:|---|
{rows}
| **all** | **{total}** | |

## Not tried

- ranks on several machines, and ranks that NCCL connects: no test here needs a GPU;
- chat templates that never end, which nothing limits;
- the servers of SGLang themselves.
"""


def collected() -> Counter[str]:
    """The number of cases of each file."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-n", "0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "-o", NAMES, *FOLDERS, *BESIDE], cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"pytest: expected to collect the tests, got exit code {done.returncode}: {done.stdout[-500:]}")
    return Counter(line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line and OWN not in line)


def subject(file: str) -> str:
    """The first paragraph of a file's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / file).read_text()))
    if not text:
        sys.exit(f"{file}: expected a docstring that says what is tried, got none")
    return " ".join(text.split("\n\n")[0].split())


def page() -> str:
    cases = collected()
    rows = [f"| {subject(file)} | {cases[file]} | [{Path(file).name}](../{file}) |" for file in sorted(cases)]
    return TEXT.format(rows="\n".join(rows), total=sum(cases.values()))


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.exists() and PAGE.read_text() == text else f"{PAGE.name}: out of date; run {__file__}")
    PAGE.write_text(text)
