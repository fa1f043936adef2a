"""Write docs/formula_and_code.md: for twenty functions the paper's equation, our body and the plain loop side by side.

    python docs/make_formula_and_code.py [--check]    # --check writes nothing, and exits with 1 if the page is old

All of it is taken from the sources: the equation from the docstring, the body and the loop as they stand.
"""

import argparse
import ast
import inspect
import sys
from collections.abc import Callable
from importlib import import_module

from make_reference import ROOT, documentation, fence

PAGE = ROOT / "docs" / "formula_and_code.md"
FUNCTIONS = {  # section -> module and name, within rlkit
    "Policy losses": (
        "losses.policy.clipped_policy_loss",
        "losses.policy.cispo_loss",
        "losses.policy.sapo_loss",
        "losses.sequence_policy.gspo_loss",
        "losses.sequence_policy.gmpo_loss",
        "losses.trust_region.dppo_tv_loss",
        "losses.trust_region.m2po_loss",
    ),
    "Advantages": (
        "advantages.group.grpo_advantages",
        "advantages.baselines.rloo_advantages",
        "advantages.baselines.maxrl_advantages",
        "advantages.returns.gae",
        "advantages.returns.vtrace",
    ),
    "Critic, KL, sampler and trainer": (
        "losses.value.clipped_value_loss",
        "losses.kl.kl_k3",
        "losses.mismatch.importance_weights",
    ),
    "Preferences and imitation": (
        "losses.preference.dpo_loss",
        "losses.preference.simpo_loss",
        "losses.preference.kto_loss",
        "losses.supervised.dft_loss",
    ),
    "Reduction": ("losses.reductions.token_mean",),
}
INTRODUCTION = """\
# The formula and the code

Made by `python docs/make_formula_and_code.py` from the sources: edit those.

Twenty functions: the paper's equation, the body of our function, and the same as a plain loop over rows and tokens that
shares no code with it. Tests compare values and gradients of the two. The [reference](reference/README.md) has all
functions and their arguments.

In the equations r is the ratio of a token, $`\\exp(\\text{logprobs} - \\text{old\\_logprobs})`$, A its advantage
and m the mask; sg stops the gradient; $`\\sigma`$ is the logistic function; G is the number of responses to a prompt.
In losses of pairs h is the log-ratio of policy to reference of the chosen response, less that of the rejected one.

A body checks its arguments (`check`), masks them, and computes the formula. What bodies and loops call stands at the
end: [functions](#called-by-the-functions), [loops](#called-by-the-loops)."""


def page() -> str:
    blocks, shown, loops = [INTRODUCTION], [], []
    for section, names in FUNCTIONS.items():
        blocks.append(f"## {section}")
        for name in names:
            module, _, own = name.rpartition(".")
            function = getattr(import_module(f"rlkit.{module}"), own)
            loop = getattr(import_module(f"rlkit.{module.replace('.', '.naive.')}"), own)
            shown.append(function)
            loops.append(loop)
            blocks += [f"### [`{own}`](reference/{module}.md#{own})", *documentation(equation(function), {})]
            blocks.append(beside(without_docstring(function), without_docstring(loop)))
    for title, of in (("functions", shown), ("loops", loops)):
        blocks.append(f"## Called by the {title}")
        files: dict[str, list[str]] = {}
        for helper in helpers(of):
            files.setdefault(helper.__module__, []).append(inspect.getsource(helper).rstrip())
        for module, sources in files.items():
            file = f"{module.replace('.', '/')}.py"
            blocks += [f"[{file}](../{file})", fence("\n\n\n".join(sources))]
    return "\n\n".join(blocks) + "\n"


def equation(function: Callable[..., object]) -> str:
    """The docstring down to the paragraph that names the paper."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    paper = next(number for number, text in enumerate(paragraphs) if "https://" in text)
    return "\n\n".join(paragraphs[: paper + 1])


def without_docstring(function: Callable[..., object]) -> str:
    source = inspect.getsource(function)
    node = definition(function)
    if ast.get_docstring(node) is None:
        return source.rstrip()
    lines = source.splitlines()
    return "\n".join([*lines[: node.body[0].lineno - 1], *lines[node.body[0].end_lineno :]])


def beside(left: str, right: str) -> str:
    """Two pieces of code in one row of a table."""
    cells = "\n\n</td><td>\n\n".join((fence(left), fence(right)))
    head = '<table>\n<tr><th>function</th><th>loop</th></tr>\n<tr valign="top"><td>'
    return f"{head}\n\n{cells}\n\n</td></tr>\n</table>"


def helpers(functions: list[Callable[..., object]]) -> list[Callable[..., object]]:
    """The private functions, and those of the loops, that these call, and that those call, and so on."""
    found: list[Callable[..., object]] = []
    waiting = [*functions]
    while waiting:
        function = waiting.pop(0)
        scope = inspect.unwrap(function).__globals__
        names = [node.id for node in ast.walk(definition(function)) if isinstance(node, ast.Name)]
        for called in (scope.get(name) for name in names):
            if inspect.isfunction(called) and private(called) and called not in (*found, *functions):
                found.append(called)
                waiting.append(called)
    return found


def private(function: Callable[..., object]) -> bool:
    """Whether a function of rlkit is not on a page of the reference."""
    name = f"{function.__module__}.{function.__name__}"
    return name.startswith("rlkit.") and ("._" in name or ".naive." in name)


def definition(function: Callable[..., object]) -> ast.FunctionDef:
    (node,) = ast.parse(inspect.getsource(function)).body
    assert isinstance(node, ast.FunctionDef)
    return node


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    check, text = parser.parse_args().check, page()
    changed = not PAGE.exists() or PAGE.read_text() != text
    if changed:
        print(f"{'out of date' if check else 'written'}: {PAGE.name}")
        if not check:
            PAGE.write_text(text)
    return int(check and changed)


if __name__ == "__main__":
    sys.exit(main())
