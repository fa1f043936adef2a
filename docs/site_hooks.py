"""Hooks of mkdocs for the documentation site: `make site`, settings in mkdocs.yml.

- Pages outside docs/ (README, changelog, security, measurements) are pages of the site, and so are notebooks.
- A link to a source file leads to a page that shows it, so that the site needs no other host.
- The forms of maths that GitHub reads, $`...`$ and ```math, become MathML, which browsers show without a script.
- A page that would load something from another host is a warning, which `strict` makes an error.
"""

import json
import logging
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}
FENCE = re.compile(r"^(?P<mark>`{3,})(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=mark)$", re.M | re.S)
FORMULA = re.compile(r"\$`([^`]+)`\$")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(?=[)#])")
PLACE = "formula{}place"  # letters and digits only, which Markdown leaves alone
LOADS = re.compile(
    r"""<(?:script|img|iframe|source|link(?![^>]*rel="canonical"))[^>]*\s(?:src|href)="?((?:https?:)?//[^"\s>]+)"""
)
IMPORTS = re.compile(r"""(?:@import\s+|url\()["']?((?:https?:)?//[^"')\s]+)""")
logger = logging.getLogger("mkdocs.hooks.site")


def source_pages() -> dict[str, str]:
    """Path in the repository -> path on the site, of each Markdown page and each notebook."""
    inside = [p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")]
    notebooks = {f"docs/{p.name}": f"{p.stem}.md" for p in (ROOT / "docs").glob("*.ipynb")}
    results = {f"benchmarks/results/{p.name}": f"measurements/{p.name}" for p in ROOT.glob("benchmarks/results/*.md")}
    return {**{f"docs/{path}": path for path in inside}, **notebooks, **OUTSIDE, **results}


def page_text(path: str) -> str:
    """The Markdown of a page of the repository."""
    text = (ROOT / path).read_text()
    return notebook_text(json.loads(text)) if path.endswith(".ipynb") else text


def notebook_text(notebook: dict) -> str:
    """A notebook as Markdown: its text, its code, and the printed lines and images that are stored in it."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            elif image := output.get("data", {}).get("image/png"):
                parts.append(f"![output](data:image/png;base64,{''.join(image).replace(chr(10), '')})")
    return "\n\n".join(parts) + "\n"


def prose_mapped(text: str, change: Callable[[str], str]) -> str:
    """`text` with `change` applied to everything outside of its fences."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def linked_sources(pages: dict[str, str]) -> set[str]:
    """Files and folders of the repository that pages link to and that are no pages: code, tests."""
    found = set()
    for path in pages:
        for target in LINK.findall(FENCE.sub("", page_text(path))):
            linked = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
            if linked not in pages and not linked.startswith(("docs/", "..")) and (ROOT / linked).exists():
                found.add(linked)
    return found


def source_page(path: str) -> str:
    """A page that shows a file, or the names in a folder."""
    full = ROOT / path
    if full.is_dir():
        names = sorted(p.name for p in full.iterdir() if p.name[0] not in "._")
        return f"# {path}\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    language = {".py": "python", ".yaml": "yaml", ".sh": "bash"}.get(full.suffix, "text")
    return f"# {full.name}\n\n`{path}`\n\n``````{language}\n{full.read_text()}``````\n"


def relinked(text: str, path: str, places: dict[str, str]) -> str:
    """The text of the page at `path` in the repository, its links leading to the pages of the site.

    Args:
        places: path in the repository -> path on the site.
    """

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found[1]))
        place = places.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
        if place is None:  # there is no such file: mkdocs says so
            return found[1]
        return posixpath.relpath(place, posixpath.dirname(places[path]) or ".")

    return prose_mapped(text, lambda prose: LINK.sub(link, prose))


def github_forms(text: str) -> str:
    r"""What GitHub's Markdown reads and mkdocs's does not: lists and tables without a blank line, \<, code in HTML."""

    def change(prose: str) -> str:
        prose = re.sub(r"^((?![-*|#<]|\d+\. )\S.*)\n(?=- |\| )", r"\1\n\n", prose, flags=re.M)
        prose = re.sub(r"<(table|tr|td)\b(?! markdown)", r'<\1 markdown="1"', prose)
        return prose.replace("\\<", "&lt;")

    return prose_mapped(text, change)


def without_formulas(text: str) -> tuple[str, list[tuple[str, bool]]]:
    """The text with a place for each formula, and the formulas, each with whether it stands in a line of its own."""
    formulas: list[tuple[str, bool]] = []

    def place(formula: str, block: bool) -> str:
        formulas.append((" ".join(formula.split()), block))
        return PLACE.format(len(formulas) - 1)

    def fence(found: re.Match[str]) -> str:
        return place(found["code"], True) if found["language"] == "math" else found[0]

    text = FENCE.sub(fence, text)
    return prose_mapped(text, lambda prose: FORMULA.sub(lambda found: place(found[1], False), prose)), formulas


def mathml(formula: str, block: bool) -> str:
    """A formula of TeX as MathML.

    Raises:
        ValueError: a command that is not known is left in it.
    """
    from latex2mathml.converter import convert

    found = convert(formula, display="block" if block else "inline").replace(r"\_", "_")
    if "\\" in found:
        raise ValueError(f"formula: expected TeX that latex2mathml knows, got {formula}")
    return found


def loaded_from_elsewhere(site: Path) -> list[str]:
    """Addresses on other hosts that the pages and stylesheets of a built site load, each with its file."""
    found = []
    for path in sorted(site.rglob("*")):
        if pattern := {".html": LOADS, ".css": IMPORTS}.get(path.suffix):
            text = path.read_text()
            found += [f"{path.relative_to(site)}: {address}" for address in pattern.findall(text)]
    return found


# --- called by mkdocs


def on_config(config):
    """The pages of the reference in the navigation, a section for each package."""
    section = next(entry["Reference"] for entry in config["nav"] if "Reference" in entry)
    pages = sorted(path.stem for path in (ROOT / "docs/reference").glob("*.md") if path.stem != "README")
    index = (ROOT / "docs/reference/README.md").read_text()
    pages.sort(key=lambda name: index.find(f"({name}.md)"))  # the order of the families
    for package in dict.fromkeys(name.partition(".")[0] for name in pages):
        own = [name for name in pages if name.partition(".")[0] == package]
        section.append({package: [{name.partition(".")[2] or name: f"reference/{name}.md"} for name in own]})
    return config


def on_files(files, config):
    """Add the pages outside docs/ and of notebooks, and a page for each source file that is linked."""
    from mkdocs.structure.files import File, InclusionLevel

    pages = source_pages()
    added = {path: place for path, place in pages.items() if path != f"docs/{place}"}
    for path, place in added.items():
        files.append(File.generated(config, place, content=page_text(path)))
    sources = {path: f"source/{path}.md" for path in sorted(linked_sources(pages))}
    for path, place in sources.items():
        files.append(File.generated(config, place, content=source_page(path)))
    for file in files.documentation_pages():
        if file.src_uri.startswith(("source/", "measurements/")):
            file.inclusion = InclusionLevel.NOT_IN_NAV
    config.extra["places"] = pages | sources
    return files


def on_page_markdown(markdown, page, config, files):
    places = config.extra["places"]
    path = next((path for path, place in places.items() if place == page.file.src_uri), None)
    if path is None or page.file.src_uri.startswith("source/"):
        return markdown
    markdown, page.meta["formulas"] = without_formulas(github_forms(relinked(markdown, path, places)))
    return markdown


def on_page_content(html, page, config, files):
    for number, (formula, block) in enumerate(page.meta.get("formulas", [])):
        html = re.sub(rf"\b{PLACE.format(number)}\b", lambda _, f=formula, b=block: mathml(f, b), html)
    return html


def on_post_build(config):
    for address in loaded_from_elsewhere(Path(config["site_dir"])):
        logger.warning(f"loaded from another host: {address}")
