"""Error messages for unknown models and data sets, missing optional packages, and exceptions of other libraries."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher
from pathlib import Path

log = logging.getLogger(__name__)


def check_source(name: str, what: str) -> None:
    """Refuse a local path that does not exist, without a request to the hub, which would take half a minute.

    A name that could be on the hub, but whose first part is a local folder, passes with a warning.

    Args:
        name: a directory, or `owner/name` on the hub; some old models have only a `name`.
        what: what it names, for errors: "model", "data set".

    Raises:
        ValueError: there is no such directory, and it cannot be a name on the hub; or a run's directory instead of the
            model in it.
    """
    path = Path(name)
    if what == "model" and _is_run(path):
        raise ValueError(f"model: expected a directory with a model, got that of a run; use {str(path / 'model')!r}")
    if path.exists():
        return
    near = _nearest(path)
    hint = f"; {str(near)!r} has {', '.join(_similar_names(path, near)) or 'nothing'}" if near else ""
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise ValueError(f"{what}: expected a directory that exists or owner/name on the hub, got {name!r}{hint}")
    if hint:
        log.warning("%s %r: no such local directory, looking on the hub%s", what, name, hint)


def _nearest(path: Path) -> Path | None:
    """The innermost existing folder of a path; None if that is the root or the working directory."""
    found = next((one for one in path.parents if one.is_dir()), None)
    return None if found in (None, Path("."), Path(path.anchor)) else found


def _similar_names(path: Path, folder: Path) -> list[str]:
    """Up to five names in a folder, the most similar to the path's part there first."""
    wanted = path.relative_to(folder).parts[0]
    names = sorted(one.name for one in folder.iterdir())
    return sorted(names, key=lambda name: -SequenceMatcher(None, wanted, name).ratio())[:5]


def _is_run(path: Path) -> bool:
    """Whether a directory has a trained model in it, and a config.json with the options of a run."""
    config = path / "config.json"
    is_model = config.is_file() and "model_type" in config.read_text()
    return not is_model and (path / "model" / "config.json").is_file()


@contextmanager
def requires_extra(name: str) -> Iterator[None]:
    """A context for imports of optional packages: an error names the extra of rlkit that installs the package.

        with requires_extra("recipes"):
            import datasets

    Raises:
        ImportError: the package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = f"package {error.name}: expected it to be installed, got none"
        raise ImportError(f"{package}; in the checkout: pip install -e '.[{name}]'") from error


def one_line(error: Exception) -> str:
    """An error of another package as a part of a sentence: its type and message, without line breaks."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
