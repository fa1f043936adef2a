"""Functions of the user: loads them by name, and logs their errors."""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import traceback
from collections import Counter
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)


def load_function(name: str, option: str) -> Any:
    """Loads the object named `module:function` or `path/to/file.py:function`, usually a function.

    Modules are searched on Python's path, and then in the working directory.

    Args:
        name: as above.
        option: what it is used for, for errors: "task", "reward", "tool".

    Raises:
        ValueError: the name has another form, or there is no such file, module or function. Exceptions of the user's
            code are raised unchanged.
    """
    source, _, function = name.rpartition(":")
    if not source or not function:
        raise ValueError(f"{option} {name!r}: expected module:function or path/to/file.py:function")
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise ValueError(f"{option} {name!r}: expected a file {source}, got none in {os.getcwd()}")
        module = _module_of(Path(source).resolve())
    else:
        module = _import(source, name, option)
    found: Any = module
    for part in function.split("."):
        if not hasattr(found, part):
            has = ", ".join(sorted(n for n, x in vars(found).items() if callable(x) and n[0] != "_")[:10]) or "none"
            raise ValueError(f"{option} {name!r}: expected a function of {source} ({has}), got {function!r}")
        found = getattr(found, part)
    return found


def _import(source: str, name: str, option: str) -> ModuleType:
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # last, so that no file there hides an installed package
    try:
        return import_module(source)
    except ModuleNotFoundError as error:
        if error.name and (source == error.name or source.startswith(f"{error.name}.")):
            where = f"expected an installed module or one in {here}"
            raise ValueError(f"{option} {name!r}: {where}, got none of the name {error.name!r}") from error
        raise ValueError(f"{option} {name!r}: {source} cannot be imported: {error}") from error


@cache
def _module_of(file: Path) -> ModuleType:
    """Imports a file as a module; it may import other modules of its folder."""
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    loaded = sys.modules.get(file.stem)
    if loaded is not None and Path(getattr(loaded, "__file__", None) or "").resolve() == file:
        return loaded
    name = file.stem if loaded is None else f"{file.stem} at {file}"  # do not replace another module of that name
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # as it is a .py file
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class Failures:
    """Errors of a user's function that do not end the run: logs a traceback for each distinct error, then counts.

    Errors of the same type from the same line of code count as one error. Thread-safe.

    Args:
        what: kind of the function, for messages: "reward", "tool".
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.names: dict[tuple[str, str], str] = {}  # of logged errors
        self.counts: Counter[str] = Counter()  # since `take`
        self.repeated: Counter[str] = Counter()  # since `log_repeated`
        self.lock = Lock()

    def add(self, error: BaseException, where: str) -> None:
        """Counts an error for the input `where`; the first of its kind is logged with its traceback."""
        place = _place(error)
        kind = type(error).__name__, place
        with self.lock:
            known = kind in self.names
            name = self.names.setdefault(kind, f"{kind[0]}: {error} ({place})")
            self.counts[name] += 1
            self.repeated[name] += known
        if not known:
            log.warning("%s failed on %s: %s", self.what, where, name, exc_info=error)

    def count(self, reason: str) -> None:
        """Counts a failure without an exception, such as a reward of None."""
        with self.lock:
            self.counts[reason] += 1

    def log_repeated(self) -> None:
        """Logs how often known errors were repeated since the last call."""
        with self.lock:
            repeated, self.repeated = self.repeated, Counter()
        if said := _listed(repeated):
            log.warning("%s failed again: %s", self.what, said)

    def take(self) -> str:
        """The failures since the last call, most frequent first: "12 x KeyError: 'answer' (mine.py, line 7)"."""
        with self.lock:
            counts, self.counts = self.counts, Counter()
        return _listed(counts)


def _listed(counts: Counter[str]) -> str:
    return "; ".join(f"{n} x {name}" for name, n in counts.most_common(3) if n)


def _place(error: BaseException) -> str:
    """The line that raised an error, in the innermost code outside the standard library and installed packages."""
    frames = traceback.extract_tb(error.__traceback__)
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    own = [frame for frame in frames if not frame.filename.startswith(installed)] or frames
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else "no traceback"
