"""The pages that people wrote: the options, measurements and files that they name are there."""

import ast
import configparser
import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = [p for folder in ("rlkit", "recipes", "benchmarks", "docs") for p in sorted((ROOT / folder).rglob("*.py"))]
ELSEWHERE = {  # of torchrun, pip, pytest, hf, vLLM, tyro, SLURM, slime, lm-eval and inspect-ai
    "--standalone", "--nproc-per-node", "--nnodes", "--benchmark-enable", "--benchmark-group-by", "--quantization",
    "--enable-return-routed-experts", "--enable-lora", "--max-lora-rank", "--max-logprobs", "--middleware", "--help",
    "--node-rank", "--master-addr", "--master-port", "--shutdown-timeout", "--account", "--partition", "--requeue",
    "--signal",
    "--advantage-estimator", "--custom-reward-post-process-path", "--no-deps", "--no-build-isolation",
    "--pyargs", "--algo",
    "--model_args", "--tasks", "--include_path", "--output_path", "--log-dir", "--local-dir",
}  # fmt: skip
MEASURED = "time|reward|reward_part|groups|ratio|mismatch|critic|marked|preference|value"


@cache
def options():
    """Fields of the recipes' dataclasses, and what is given to a parser."""
    found = set()
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and re.fullmatch("Config|[A-Za-z]*Options", node.name):
                declared = [n for n in node.body if isinstance(n, ast.AnnAssign)]
                found |= {f"--{n.target.id}" for n in declared}
                found |= {f"--no_{n.target.id}" for n in declared if "bool" in ast.unparse(n.annotation)}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
                found.add(node.value)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_options_that_a_page_names_are_there(page):
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", page.read_text()))
    assert named - options() - ELSEWHERE == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_measurements_that_a_page_names_are_there(page):
    code = "\n".join(path.read_text() for path in CODE)
    for name in set(re.findall(rf"`((?:{MEASURED})/[a-z_]+)(?:/max)?`", page.read_text())):
        family, _, last = name.partition("/")
        written = re.search(rf"{name}(?!\w)", code) or (f"{family}/{{name}}" in code and f'"{last}"' in code)
        phase = family == "time" and f'phase("{last}")' in code
        assert written or phase or f'phase="{last}"' in code, name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_a_page_names_are_there(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", prose):
        assert (page.parent / target).exists(), target


def anchors(page):
    """The ids of a page's headings, as the site makes them, and those that the page writes itself."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in re.findall(r"^#+ (.*)", text, re.M)]
    return {re.sub(r"[-\s]+", "-", title) for title in headings} | set(re.findall(r' id="([^"]+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_headings_that_a_page_links_to_are_there(page):
    for target, anchor in re.findall(r"\]\(([\w./-]*\.md|)#([\w.-]+)\)", page.read_text()):
        assert anchor in anchors((page.parent / target) if target else page), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_tests_that_a_page_names_are_there(page):
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    for name in set(re.findall(r"`(test_\w+(?:\.py)?)`", page.read_text())):
        assert name in files if name.endswith(".py") else any(f"def {name}(" in text for text in files.values()), name


def test_comparisons_with_peers_are_counted_right(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "peers")
    from cases_trl import CASES as TRL
    from cases_verl import CASES as VERL

    text = "\n".join(page.read_text() for page in PAGES)
    assert set(re.findall(r"(\d+) comparisons", text)) == {str(len(VERL) + len(TRL))}
    assert set(re.findall(r"(\d+) of the \d+ comparisons", text)) == {str(len(VERL))}


def test_nobody_is_told_to_install_the_other_rlkit():
    """That name on PyPI is another project's: `pip install 'rlkit[liger]'` would fetch a stranger's package."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    name, extras = config["metadata"]["name"], config["options.extras_require"]
    assert name == "rlkit-vlm"
    own = [line for extra in extras.values() for line in extra.split() if line.startswith("rlkit")]
    assert own and all(line.startswith(f"{name}[") for line in own)
    instruction = re.compile(r"pip install [^\n]*?\brlkit\b(?!-vlm)|(?<!-)\brlkit\[")
    files = [*PAGES, *CODE, ROOT / "Makefile"]
    assert [str(path) for path in files if instruction.search(path.read_text())] == []


def test_extras_that_are_named_are_there():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for path in [*PAGES, *CODE]:
        for named in re.findall(r"pip install -e '\.\[([\w,-]+)\]'", path.read_text()):
            assert set(named.split(",")) <= set(config["options.extras_require"]), path


def test_supported_versions_are_those_of_the_packages():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    required = "\n".join([config["options"]["install_requires"], *config["options.extras_require"].values()])
    page = " ".join((ROOT / "docs" / "first_ten_minutes.md").read_text().split())
    packages = {"torch": "torch", "transformers": "transformers", "vLLM": "vllm", "Megatron-Core": "megatron-core"}
    for name, package in packages.items():
        low, high = re.search(rf"(?<![\w-]){package}>=([\d.]+),<([\d.]+)", required).groups()
        assert f"{name} {low} or newer (below {high})" in page


@pytest.mark.parametrize("kind", ["Sample", "Batch"])
def test_fields_of_samples_and_batches_are_on_their_page(kind):
    from rlkit.data import Sample, append_response, collate, prompt_sample

    page = (ROOT / "docs" / "reading_grpo_vlm.md").read_text()
    table = page.partition(f"| field of a `{kind}` |")[2].partition("\n\n")[0]
    first_cells = "".join(re.findall(r"^\|([^|]*)\|", table, re.M))
    listed = set(re.findall(r"`(\w+)`", first_cells))
    if kind == "Sample":
        there = {field.name for field in dataclasses.fields(Sample)} | {"response_ids"}
    else:
        batch = collate([append_response(prompt_sample([1]), [2], [0.0])])
        there = {*vars(batch), *batch.fields, "attention_mask", "routed_experts"}
    assert listed == there


def logged_by_recipes():
    """Keys of the dicts that recipes assign to `metrics`, or add to it."""
    for path in sorted((ROOT / "recipes").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("metrics")
            for inner in ast.walk(node.value) if named else ():
                if isinstance(inner, ast.Dict):
                    yield from (key.value for key in inner.keys if isinstance(key, ast.Constant))
            if named and isinstance(node.targets[0], ast.Subscript):
                yield node.targets[0].slice.value


def test_metrics_of_the_recipes_are_on_their_page():
    names = set(logged_by_recipes())
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert {"entropy", "kl", "lm_loss", "divergence"} <= names
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_all_logged_metrics_are_on_their_page():
    """Those whose names are literal text in the code."""
    kinds = "reward|response_length|ratio|mismatch|value|preference|unpaired|groups|staleness|weight_sync|time"
    sources = [path.read_text() for folder in ("rlkit", "recipes") for path in (ROOT / folder).rglob("*.py")]
    logged = {name for text in sources for name in re.findall(rf'"((?:{kinds})/[a-z0-9_]+(?:/max)?)"', text)}
    named = set(re.findall(r"`([a-z_]+/[a-z0-9_/]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    assert len(logged) > 30 and logged <= named, logged - named
