"""The documentation site: its navigation, its links and formulas, and the code that its pages quote.

`make site` builds it, with mkdocs in an environment of its own; what is tested here needs no mkdocs.
"""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site)


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name functions of the site's environment."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
SETTINGS = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def leaves(entries):
    for entry in entries:
        for below in entry.values():
            yield from leaves(below) if isinstance(below, list) else [below]


def test_every_page_is_in_the_navigation():
    pages = set(site.source_pages().values())
    listed = list(leaves(SETTINGS["nav"]))
    assert len(listed) == len(set(listed)) and set(listed) <= pages
    hooked = {page for page in pages if page.startswith(("reference/", "measurements/"))}
    assert pages - hooked <= set(listed)


def test_the_reference_is_listed_in_the_order_of_its_index():
    config = {"nav": [{"Reference": [{"All functions": "reference/README.md"}]}]}
    listed = list(leaves(site.on_config(config)["nav"]))
    pages = {f"reference/{path.name}" for path in (ROOT / "docs" / "reference").glob("*.md")}
    assert set(listed) == pages and len(listed) == len(pages)
    assert listed[:3] == ["reference/README.md", "reference/losses.policy.md", "reference/losses.sequence_policy.md"]


def test_nothing_is_asked_of_another_host():
    assert SETTINGS["theme"]["font"] is False and SETTINGS["strict"] is True
    assert "repo_url" not in SETTINGS and "extra_javascript" not in SETTINGS


@pytest.mark.parametrize(
    ("page", "loads"),
    [
        ('<script src="https://cdn.example/mathjax.js"></script>', ["https://cdn.example/mathjax.js"]),
        ('<link rel="stylesheet" href="//fonts.example/css">', ["//fonts.example/css"]),
        ('<img alt="x" src=http://example.org/a.png>', ["http://example.org/a.png"]),
        ('<a href="https://arxiv.org/abs/1707.06347">PPO</a><script src="assets/a.js"></script>', []),
        ('<link rel="canonical" href="https://example.org/">', []),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(tmp_path, page, loads):
    (tmp_path / "index.html").write_text(page)
    assert site.loaded_from_elsewhere(tmp_path) == [f"index.html: {address}" for address in loads]


def test_what_a_stylesheet_loads_from_elsewhere_is_found(tmp_path):
    (tmp_path / "a.css").write_text("@font-face{src:url(https://fonts.example/a.woff)} a{background:url(b.png)}")
    assert site.loaded_from_elsewhere(tmp_path) == ["a.css: https://fonts.example/a.woff"]


def test_links_lead_to_pages_of_the_site():
    places = {"docs/a.md": "a.md", "docs/reference/b.md": "reference/b.md", "README.md": "index.md"}
    places |= {"rlkit/x.py": "source/rlkit/x.py.md", "docs/c.md": "c.md"}
    text = "[b](reference/b.md#f), [x](../rlkit/x.py), [home](../README.md), [w](https://a.b), [d](#d), [gone](z.py)"
    moved = (
        "[b](reference/b.md#f), [x](source/rlkit/x.py.md), [home](index.md), [w](https://a.b), [d](#d), [gone](z.py)"
    )
    assert site.relinked(text, "docs/a.md", places) == moved
    assert site.relinked("[x](../../rlkit/x.py) [c](../c.md)", "docs/reference/b.md", places) == (
        "[x](../source/rlkit/x.py.md) [c](../c.md)"
    )
    assert site.relinked("[a](docs/a.md)\n```\n[a](docs/a.md)\n```\n", "README.md", places) == (
        "[a](a.md)\n```\n[a](docs/a.md)\n```\n"
    )


def test_each_linked_source_has_a_page():
    sources = site.linked_sources(site.source_pages())
    assert {"recipes/grpo_vlm.py", "rlkit/losses/policy.py", "tests/own_data"} <= sources
    assert "``````python" in site.source_page("recipes/grpo_vlm.py")
    assert "- `" in site.source_page("tests/own_data")


def test_formulas_are_taken_out_and_code_is_left():
    text = "Ratio $`r_t\n= 1`$.\n\n```math\nL = A\n```\n\n```python\nx = '$`a`$'\n```\n"
    left, formulas = site.without_formulas(text)
    assert formulas == [("L = A", True), ("r_t = 1", False)]
    assert left == "Ratio formula1place.\n\nformula0place\n\n```python\nx = '$`a`$'\n```\n"


def test_lists_and_tables_get_the_blank_line_that_mkdocs_needs():
    assert site.github_forms("Why:\n- a\n- b\n") == "Why:\n\n- a\n- b\n"
    assert site.github_forms("GiB\n| a | b |\n| - | - |\n") == "GiB\n\n| a | b |\n| - | - |\n"
    assert site.github_forms("- a\n- b\n  c\n- d\n") == "- a\n- b\n  c\n- d\n"
    assert site.github_forms("A \\< 0\n```\na\n- b\n```\n") == "A &lt; 0\n```\na\n- b\n```\n"


PRINTED = [  # on the page of the first ten minutes, and by the code
    "log-probabilities", "sampler and trainer differ by ", "can be loaded by transformers",
    "building a tiny model and warming it up: ", "held-out ", "results:", "resume: continuing ", "pass@",
    ": the run ends after this step, with a checkpoint", "; press Ctrl-C again to end at once, without one",
    "the newest checkpoint is ", " is still that of step ", " --resume to the command",
]  # fmt: skip


def test_what_the_first_ten_minutes_print_is_printed():
    page = (ROOT / "docs" / "first_ten_minutes.md").read_text()
    printed = "".join(fence["code"] for fence in site.FENCE.finditer(page) if not fence["language"])
    code = "".join(path.read_text() for folder in ("rlkit", "recipes") for path in (ROOT / folder).rglob("*.py"))
    assert [text for text in PRINTED if text not in printed or text not in code] == []


def test_the_changed_recipe_of_the_first_ten_minutes_is_one():
    from rlkit.advantages import dr_grpo_advantages

    page = (ROOT / "docs" / "first_ten_minutes.md").read_text()
    old, new = re.search(r"^sed 's/(\w+)/(\w+)/' recipes/grpo_vlm.py > my_grpo.py$", page, re.M).groups()
    lines = [line.replace(old, new, 1) for line in (ROOT / "recipes" / "grpo_vlm.py").read_text().splitlines()]
    names = {"__name__": "my_grpo"}
    exec(compile("\n".join(lines), "my_grpo.py", "exec", dont_inherit=True), names)
    assert names["dr_grpo_advantages"] is dr_grpo_advantages and "grpo_advantages" not in names


def quoted_blocks():
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "reading_grpo_vlm.md").read_text(), re.S)


@pytest.mark.parametrize("block", quoted_blocks(), ids=lambda block: block.strip().splitlines()[0][:40])
def test_what_a_page_quotes_is_in_the_recipe(block):
    """With its indentation, line by line."""
    assert "\n" + block in (ROOT / "recipes" / "grpo_vlm.py").read_text()


def test_functions_are_quoted_whole_and_in_order():
    """The loss, the optimizer steps and `main`, from their first line to their last."""
    recipe = (ROOT / "recipes" / "grpo_vlm.py").read_text()
    functions = recipe[recipe.index("def policy_loss(") : recipe.index("\nif __name__")]
    quoted = [line for block in quoted_blocks() for line in block.splitlines() if line.strip()]
    assert quoted == [line for line in functions.splitlines() if line.strip()]
