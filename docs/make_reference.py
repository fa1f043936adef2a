r"""Write docs/reference: a page for each module that people import from, and an index, out of the docstrings and loops.

    python docs/make_reference.py [--check]    # --check writes nothing, names what is out of date and exits with 1

Docstrings have formulas as $...$ and $$...$$. In those Markdown takes `_`, `*` and backslashes for its own and `<b` for
HTML, before GitHub looks for maths. The pages have the forms that it leaves alone: $`...`$, ```math fences and \lt.
"""

import argparse
import ast
import re
import sys
from importlib import import_module
from itertools import groupby, pairwise
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
PACKAGES = tuple(f"rlkit.{room}" for room in "losses advantages data rewards vlm engines rollout".split())
sys.path.insert(0, str(ROOT))  # this checkout's rlkit, installed or not
SECTION = re.compile(r"^((?:(?:, )?(?:Args|Attributes|Returns|Raises))+):(.*(?:\n(?: {4}.*)?$)*)", re.M)
ITEM = re.compile(r"(\*{0,2}\w+(?:, \w+)*: )?(.*)")  # what is described, and its description
INLINE = re.compile(r"(`+[^`]+`+|<http[^>]*>)|\$([^$]+)\$|(https?://[^\s<>();,]*[\w/])|(<|(?<!\*)\*(?!\*)|\b_|_\b)")


def tex(formula: str) -> str:
    return re.sub(r"<\s*", r"\\lt ", formula.strip())


def fence(code: str) -> str:
    return f"```python\n{code}\n```"


def inline(text: str, links: dict[str, str]) -> str:
    """Running text: its formulas, addresses and names of functions."""

    def safe(found: re.Match[str]) -> str:
        code, formula, address, mark = found.groups()
        if code:
            return f"[{code}]({links[name]})" if (name := code.strip("`")) in links else code
        return f"$`{' '.join(tex(formula).split())}`$" if formula else f"<{address}>" if address else "\\" + mark

    return INLINE.sub(safe, text)


def prose(text: str, links: dict[str, str]) -> list[str]:
    """Paragraphs, lists and tables as they are; display formulas and indented examples in fences."""
    text = re.sub(r"\n*\$\$(.+?)\$\$\n*", "\n\n$$\\1\n\n", text, flags=re.S).strip("\n")
    blocks = []
    for example, group in groupby(re.split(r"\n{2,}", text), lambda block: block.startswith("    ")):
        if example:
            blocks.append(fence(dedent("\n\n".join(group))))
        else:
            blocks += [f"```math\n{tex(b[2:])}\n```" if b.startswith("$$") else inline(b, links) for b in group if b]
    return blocks


def documentation(doc: str, links: dict[str, str]) -> list[str]:
    """A docstring: its text, then Args, Returns and Raises as lists."""
    text, *rest = SECTION.split(doc)
    blocks = prose(text, links)
    for title, body, after in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        items = [" ".join(item.split()) for item in re.split(r"\n {4}(?=\S)", body) if item.strip()]
        if title == "Returns" and not all(ITEM.match(item)[1] for item in items):
            items = [" ".join(items)]  # one result, over several lines
        pairs = (ITEM.match(item).groups("") for item in items)
        lines = ["- " + re.sub(r"[*\w]+", r"`\g<0>`", names) + inline(said, links) for names, said in pairs]
        blocks += [f"**{title}**", "\n".join(lines), *prose(after, links)]
    return blocks


def signature(node: ast.FunctionDef | ast.ClassDef, lines: list[str]) -> str:
    """The source of a function above its docstring; of a class, its fields and its methods with their docstrings."""
    start = min(part.lineno for part in (node, *node.decorator_list)) - 1
    if isinstance(node, ast.ClassDef):
        code = lines[start : node.lineno]
        for part in node.body:
            if isinstance(part, ast.AnnAssign):
                code += lines[part.lineno - 1 : part.end_lineno]
            elif isinstance(part, ast.FunctionDef) and (part.name == "__init__" or part.name[0] != "_"):
                code += ["", signature(part, lines)]
        return "\n".join(code)
    if node.col_offset and ast.get_docstring(node):  # a method
        return "\n".join(lines[start : node.body[0].end_lineno])
    return re.sub(r"( *#.*)?$", " ...", "\n".join(lines[start : node.body[0].lineno - 1]), count=1)


def definitions(source: str) -> dict[str, tuple[str, str]]:
    """Name -> signature and docstring of what a module defines; a constant's docstring is the string below it."""
    found, lines = {}, source.splitlines()
    for node, below in pairwise([*ast.parse(source).body, ast.Pass()]):
        if isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = ast.unparse(node), ast.get_docstring(ast.Module([below], [])) or ""
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = signature(node, lines), ast.get_docstring(node) or ""
    return found


def loop(path: Path, name: str) -> list[str]:
    """The function of the same name in the folder `naive` beside the module, if there is one."""
    beside = path.parent / "naive" / path.name
    source = beside.read_text() if beside.exists() else ""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            start = min(part.lineno for part in (node, *node.decorator_list)) - 1
            return ["**As a loop**", fence("\n".join(source.splitlines()[start : node.end_lineno]))]
    return []


def in_order(package: str) -> list[Path]:
    """The files of a package, by name, or in the order of the families that comments in its `__all__` name."""
    folder = ROOT.joinpath(*package.split("."))
    families = re.findall(r"^    # (\w+)$", (folder / "__init__.py").read_text(), re.M)
    place = {family: number for number, family in enumerate(families)}
    return sorted(sorted(folder.glob("*.py")), key=lambda path: place.get(path.stem, -1))


def pages() -> dict[str, str]:
    """File name -> text of each page."""
    modules, at = {}, {}  # module -> package, file, page, public definitions; full name -> its place on a page
    for package in PACKAGES:
        public = import_module(package).__all__
        for path in in_order(package):
            module = f"{package}.{path.stem}".removesuffix(".__init__")
            page = f"{module.removeprefix('rlkit.')}.md"
            own = {name: what for name, what in definitions(path.read_text()).items() if name in public}
            modules[module] = package, path, page, own
            at |= {f"{package}.{name}": f"{page}#{name.lower()}" for name in own}
    texts, index = {}, ["# Reference", "Made by `python docs/make_reference.py` from the docstrings: edit those."]
    index.append("The equation, our body and a plain loop side by side: [twenty functions](../formula_and_code.md).")
    for module, (package, path, page, own) in modules.items():
        near = tuple(f"{of}." for of in (*PACKAGES[:2], package))  # their names are linked without the package's
        links = at | {name.rpartition(".")[2]: target for name, target in at.items() if name.startswith(near)}
        about = documentation((ast.get_docstring(ast.parse(path.read_text()), clean=False) or "").strip(), links)
        if module == package:
            index += [f"## {module}", *about]
        rows, source = [], f"[source](../../{path.relative_to(ROOT).as_posix()})"
        blocks = [f"# {module}", f"[All functions and conventions](README.md) · {source}", *about]
        for name, (code, doc) in own.items():
            blocks += [f"## `{name}`", fence(f"from {package} import {name}"), fence(code)]
            blocks += [*documentation(doc, links), *loop(path, name)]
            first = re.split(r"(?<=\.)\s", " ".join(doc.split("\n\n")[0].split()))[0]
            rows.append(f"- [`{name}`]({at[f'{package}.{name}']}): {inline(first, links)}".rstrip(" :"))
        if own:
            texts[page] = "\n\n".join(blocks) + "\n"
            index += [f"### [{module}]({page})", "\n".join(rows)]
    return {"README.md": "\n\n".join(index) + "\n", **texts}


def stale(texts: dict[str, str]) -> list[str]:
    """The pages that are missing, differ, or have no module any more."""
    old = {path.name: path.read_text() for path in FOLDER.glob("*.md")}
    return sorted(name for name in {*old, *texts} if old.get(name) != texts.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    check, texts = parser.parse_args().check, pages()
    FOLDER.mkdir(exist_ok=True)
    for name in (changed := stale(texts)):
        print(f"{'out of date' if check else 'written' if name in texts else 'removed'}: {name}")
        if not check:
            (FOLDER / name).write_text(texts[name]) if name in texts else (FOLDER / name).unlink()
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
