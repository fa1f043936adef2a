"""What a name on the command line needs: a path that exists or a name on a hub, and the packages that read it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


def check_source(name: str, what: str) -> None:
    """Refuse a local path that does not exist, before anybody asks the hub for it, which takes half a minute.

    A name that could be of the hub, in a folder that is here, is asked for with a warning.

    Args:
        name: a directory, or `owner/name` on the hub; models of old have a `name` alone.
        what: it is the name of, in errors: "model", "data set".

    Raises:
        ValueError: there is no such directory, and the name is none of the hub.
    """
    path = Path(name)
    if path.exists():
        return
    near = _nearest(path)
    hint = (
        f"; {str(near)!r} has {', '.join(sorted(one.name for one in near.iterdir())[:5]) or 'nothing'}" if near else ""
    )
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise ValueError(f"{what}: expected a directory that exists or owner/name on the hub, got {name!r}{hint}")
    if hint:
        log.warning("%s %r: no such directory here, so the hub is asked%s", what, name, hint)


def _nearest(path: Path) -> Path | None:
    """The innermost folder of a path that does exist; None for the root and the working directory."""
    found = next((one for one in path.parents if one.is_dir()), None)
    return None if found in (None, Path("."), Path(path.anchor)) else found


@contextmanager
def requires_extra(name: str) -> Iterator[None]:
    """Imports inside say which extra of rlkit has the package that is missing.

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
