"""docs/reference: up to date, complete, and in the forms of Markdown and maths that GitHub renders."""

import importlib.util
import inspect
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location(
    "make_reference", Path(__file__).parents[1] / "docs" / "make_reference.py"
)
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)

PAGES = reference.pages()
NAMES = [(package, name) for package in reference.PACKAGES[:2] for name in import_module(package).__all__]
FUNCTIONS = [(package, name) for package, name in NAMES if inspect.isfunction(getattr(import_module(package), name))]
FENCE = re.compile(r"^```(\w+)\n(.*?)\n```$", re.M | re.S)
MATHS = re.compile(r"\$`([^`]+)`\$")


def test_pages_are_up_to_date():
    assert reference.stale(PAGES) == [], "run python docs/make_reference.py"


def test_check_names_what_is_out_of_date(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reference, "pages", lambda: PAGES)
    monkeypatch.setattr(reference, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["make_reference.py"])
    assert reference.main() == 0 and {path.name: path.read_text() for path in tmp_path.iterdir()} == PAGES
    (tmp_path / "losses.kl.md").write_text("old")
    (tmp_path / "losses.gone.md").write_text("left over")
    (tmp_path / "README.md").unlink()
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["make_reference.py", "--check"])
    assert reference.main() == 1
    assert re.findall(r"\S+\.md", capsys.readouterr().out) == ["README.md", "losses.gone.md", "losses.kl.md"]
    assert (tmp_path / "losses.kl.md").read_text() == "old" and not (tmp_path / "README.md").exists()
    monkeypatch.setattr(sys, "argv", ["make_reference.py"])
    assert reference.main() == 0 and reference.stale(PAGES) == []


# --- every public name


def test_both_packages_are_covered():
    assert {"clipped_policy_loss", "token_mean", "grpo_advantages", "AdaptiveKL"} <= {name for _, name in NAMES}


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_import_line_stands_on_one_page_and_works(package, name):
    line = f"from {package} import {name}"
    having = [page for page, text in PAGES.items() if f"```python\n{line}\n```" in text]
    assert len(having) == 1
    scope = {}
    exec(line, scope)
    assert scope[name] is getattr(import_module(package), name)
    assert f"- [`{name}`]({having[0]}#{name.lower()}): " in PAGES["README.md"]


@pytest.mark.parametrize("package", reference.PACKAGES)
def test_import_lines_import_what_is_described(package):
    found = [line for text in PAGES.values() for line in re.findall(rf"^from {package} import \w+$", text, re.M)]
    assert found and len(set(found)) == len(found)
    for line in found:
        exec(line, {})


def test_what_an_example_calls_can_be_imported_as_a_page_says():
    looked_up = 0
    for page, text in PAGES.items():
        if not (heading := re.match(r"# (rlkit\.\w+)\.\w+$", text, re.M)):
            continue
        package, module = import_module(heading[1]), import_module(heading[0].removeprefix("# "))
        for name in {name for _, block in FENCE.findall(text) for name in re.findall(r"(?<![.\w])([a-z]\w+)\(", block)}:
            if inspect.isfunction(found := getattr(module, name, None)) and found.__module__ == module.__name__:
                looked_up += 1
                assert getattr(package, name, None) is found and name in package.__all__, f"{page}: {name}"
    assert looked_up > 100


@pytest.mark.parametrize("package", reference.PACKAGES[:2])
def test_the_package_has_an_index_by_family(package):
    """Each family is a module, in the order of `__all__` and of the pages, with all that is public in it."""
    doc, public = import_module(package).__doc__, import_module(package).__all__
    index = re.search(r"^All, by family, each a module:\n\n((?:- .*\n|  .*\n)+)", doc, re.M)[1]
    families = re.findall(r"^- (\w+):((?:.*\n  )*.*)", index, re.M)
    assert [name for _, names in families for name in re.findall(r"`(\w+)`", names)] == public
    for family, names in families:
        found = reference.definitions(Path(import_module(f"{package}.{family}").__file__).read_text())
        assert re.findall(r"`(\w+)`", names) == [name for name in found if name[0] != "_"]
    pages = re.findall(rf"^### \[{package}\.(\w+)\]", PAGES["README.md"], re.M)
    assert pages == [family for family, _ in families]
    if package == "rlkit.losses":
        first = re.search(r"^The fifteen functions that most people need:\n\n((?:- .*\n)+)", doc, re.M)[1]
        assert len({*re.findall(r"`(\w+)`", first)} & {*public}) == len(re.findall(r"`(\w+)`", first)) == 15


@pytest.mark.parametrize("package", reference.PACKAGES[:2])
def test_what_a_shell_completes_is_public(package):
    """The modules' own imports, such as `torch`, are reachable by way of `import *`, and are no part of the package."""
    assert dir(import_module(package)) == sorted(import_module(package).__all__)


def described(doc):
    """The arguments that a docstring describes."""
    args = re.search(r"^Args(?:, \w+)*:(.*(?:\n(?: {4}.*)?$)*)", inspect.cleandoc(doc or ""), re.M)
    names = re.findall(r"^ {4}(\w+(?:, \w+)*):", args[1], re.M) if args else []
    return [one for some in names for one in some.split(", ")]


@pytest.mark.parametrize(("package", "name"), FUNCTIONS)
def test_every_argument_is_described(package, name):
    """By the function itself, by one that it names, or among those that its module or its package say once."""
    function = getattr(import_module(package), name)
    doc, takes = inspect.getdoc(function) or "", inspect.signature(function).parameters
    assert re.match(r"[A-Z`].*?(\.(\s|$)|\$)", doc, re.S), "no sentence and no formula"
    own = described(doc)
    assert set(own) <= set(takes) and len(set(own)) == len(own)
    known = {*own, *described(import_module(function.__module__).__doc__), *described(import_module(package).__doc__)}
    if other := re.search(r"^Args(?:, \w+)*: as `(\w+)`\.$", doc, re.M):
        known |= set(inspect.signature(getattr(import_module(package), other[1])).parameters)
    assert set(takes) - known == set()


@pytest.mark.parametrize(("package", "name"), [(p, n) for p, n in FUNCTIONS if not n.endswith("_loss")])
def test_docstring_says_what_comes_out(package, name):
    """Of losses the package says it, once."""
    assert re.search(r"^(\w+, )*Returns(, \w+)*:", inspect.getdoc(getattr(import_module(package), name)), re.M)


@pytest.mark.parametrize(("package", "name"), FUNCTIONS)
def test_the_loop_stands_below_the_function(package, name):
    function = getattr(import_module(package), name)
    page = PAGES[f"{function.__module__.removeprefix('rlkit.')}.md"]
    parts = [part for part in page.split("\n## `") if part.startswith(f"{function.__name__}`")]
    assert len(parts) == 1
    looped = len(re.findall(rf"^\*\*As a loop\*\*\n\n```python\n(?:@.*\n)?def {function.__name__}\(", parts[0], re.M))
    assert looped == (name != "pf_ppo_indices")  # which is a random draw


# --- what GitHub makes of it


def formulas(text):
    return [body for kind, body in FENCE.findall(text) if kind == "math"] + MATHS.findall(FENCE.sub("", text))


@pytest.mark.parametrize("page", PAGES)
def test_maths_is_in_the_safe_forms_alone(page):
    text = FENCE.sub("", PAGES[page])
    assert "```" not in text
    assert not re.search(r"\w\$`|`\$\w", text), "GitHub sees no formula next to a letter or digit"
    assert "$" not in re.sub(r"`[^`]*`", "", MATHS.sub("", text))
    assert not [line for line in text.splitlines() if line.startswith("|") and "|" in "".join(MATHS.findall(line))]


@pytest.mark.parametrize("page", PAGES)
def test_lists_end_before_a_blank_line(page):
    assert not re.search(r"^- .*\n(?:  .*\n)*(?!  |- |\n).", FENCE.sub("", PAGES[page]), re.M)


@pytest.mark.parametrize("page", PAGES)
def test_formulas_are_whole(page):
    for formula in formulas(PAGES[page]):
        assert formula.strip() and "<" not in formula and "\n\n" not in formula, formula
        depth = 0
        for brace in re.findall(r"(?<!\\)[{}]", formula):
            depth += 1 if brace == "{" else -1
            assert depth >= 0, formula
        assert depth == 0, formula
        assert formula.count(r"\Big(") == formula.count(r"\Big)") and formula.count(r"\big(") == formula.count(r"\big)")
        assert not re.search(r"\\text\{[^}]*(?<!\\)_", formula), f"'_' is allowed in math mode only: {formula}"


def test_there_are_formulas():
    assert sum(len(formulas(text)) for text in PAGES.values()) > 150


@pytest.mark.parametrize("page", PAGES)
def test_links_arrive(page):
    for target, anchor in re.findall(r"\]\(([\w.]+\.md)(?:#(\w+))?\)", PAGES[page]):
        headings = re.findall(r"^## `(\w+)`$", PAGES[target], re.M)
        assert not anchor or [name.lower() for name in headings].count(anchor) == 1
    for path in re.findall(r"\]\((\.\./[^)]+)\)", PAGES[page]):
        assert (reference.FOLDER / path).is_file()


# --- the generator


LINKS = {"kl_k1": "losses.kl.md#kl_k1"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (r"with $r_t = \text{old\_logprobs}_t$, and", r"with $`r_t = \text{old\_logprobs}_t`$, and"),
        ("over\n$a_b\n* c_d$.", "over\n$`a_b * c_d`$."),
        ("$y_{<t}$, $a < b$", r"$`y_{\lt t}`$, $`a \lt b`$"),
        ("`cost_$1` and ``a_b``", "`cost_$1` and ``a_b``"),
        ("`kl_k1` and `kl_k2`", "[`kl_k1`](losses.kl.md#kl_k1) and `kl_k2`"),
        ("DPO, https://arxiv.org/abs/2305.18290.", "DPO, <https://arxiv.org/abs/2305.18290>."),
        ("(https://a.org/b_c); <https://a.org/b_>", "(<https://a.org/b_c>); <https://a.org/b_>"),
        ('a <b> c, ".*visual.*", 2 * 3', r'a \<b> c, ".\*visual.\*", 2 \* 3'),
        ("**bold** old_logprobs, _private_", r"**bold** old_logprobs, \_private\_"),
    ],
)
def test_inline(text, wanted):
    assert reference.inline(text, LINKS) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("A:\n\n$$a_b,\n\\quad c < d$$\nwith e.", ["A:", "```math\na_b,\n\\quad c \\lt d\n```", "with e."]),
        ("$$a$$\n$$b$$", ["```math\na\n```", "```math\nb\n```"]),
        (
            "A:\n\n    x = f(y)\n\n    if z:\n        w = 1\n\nB.",
            ["A:", "```python\nx = f(y)\n\nif z:\n    w = 1\n```", "B."],
        ),
        ("- a $x$\n  b\n- c", ["- a $`x`$\n  b\n- c"]),
    ],
)
def test_prose(text, wanted):
    assert reference.prose(text, {}) == wanted


def test_sections():
    args = "Args:\n    a, b: [B],\n        of $x_y$.\n    kl_k1: as `kl_k1`.\n    **more: [B]\n\n"
    rest = "Returns:\n    [B]: one\n    value.\n\nRaises:\n    ValueError: no."
    assert reference.documentation(f"One.\n\n{args}{rest}", LINKS) == [
        "One.",
        "**Args**",
        "- `a`, `b`: [B], of $`x_y`$.\n- `kl_k1`: as [`kl_k1`](losses.kl.md#kl_k1).\n- `**more`: [B]",
        "**Returns**",
        "- [B]: one value.",
        "**Raises**",
        "- `ValueError`: no.",
    ]
    assert reference.documentation("Returns:\n    ids: [B]\n    delta: [T]", {})[1] == "- `ids`: [B]\n- `delta`: [T]"
    assert reference.documentation("Args, Raises: as `kl_k1`.", LINKS)[1] == "- as [`kl_k1`](losses.kl.md#kl_k1)."


def test_signature():
    source = '@f\ndef a(\n    x: int = 3e-4,  # why\n) -> int:  # fmt: skip\n    """A."""\n\nX = 1\n"""Of X."""\n'
    source += (
        'class C:\n    """C."""\n\n    y: int = 0\n\n    def b(self) -> int:\n        """B."""\n        return 1\n'
    )
    assert reference.definitions(source) == {
        "a": ("@f\ndef a(\n    x: int = 3e-4,  # why\n) -> int: ...", "A."),
        "X": ("X = 1", "Of X."),
        "C": ('class C:\n    y: int = 0\n\n    def b(self) -> int:\n        """B."""', "C."),
    }
