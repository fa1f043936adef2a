"""The functions may grow in number, and their code no more than that needs.

Docstrings, comments, blank lines, plain loops and the kernels for GPUs are not counted.
"""

import ast
import io
import tokenize
from pathlib import Path

LIBRARY = Path(__file__).parents[2] / "rlkit"
MOST = 2260
FOR_GPUS = {"losses/_triton.py"}
MOST_OF_HELPERS = 110
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code(source: str) -> int:
    """The lines that hold a token, without those of strings that stand alone."""
    strings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {line for t in tokens if t.type not in LAYOUT for line in range(t.start[0], t.end[0] + 1)}
    return len(code - strings)


def test_losses_and_advantages():
    files = [path for package in ("losses", "advantages") for path in (LIBRARY / package).glob("*.py")]
    counts = {path.relative_to(LIBRARY).as_posix(): lines_of_code(path.read_text()) for path in files}
    counts = {name: lines for name, lines in counts.items() if name not in FOR_GPUS}
    assert sum(counts.values()) <= MOST, counts


def test_helpers_of_both():
    """So that code does not move there."""
    counts = {name: lines_of_code((LIBRARY / name).read_text()) for name in ("_check.py", "_numerics.py")}
    assert sum(counts.values()) <= MOST_OF_HELPERS, counts


def test_counts_code_alone():
    source = '"""Doc."""\n\nimport os  # why\n\n\ndef f(\n    x,\n):\n    """Doc\n    of f."""\n'
    source += '    # why\n    return """\n\n"""\n'
    assert lines_of_code(source) == 1 + 3 + 3
