"""Functions that a user brings: how they are found, and what is said when they fail."""

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
    """What `module:function` or `path/to/file.py:function` names, usually a function.

    Modules are looked for where Python looks, and then in the working directory.

    Args:
        name: as above.
        option: what it is for, in errors: "task", "reward", "tool".

    Raises:
        ValueError: the name has another form, or there is no such file, module or function. An exception of the user's
            own code comes with its traceback.
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
    """The module in a file, which may import its neighbours."""
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    loaded = sys.modules.get(file.stem)
    if loaded is not None and Path(getattr(loaded, "__file__", None) or "").resolve() == file:
        return loaded
    name = file.stem if loaded is None else f"{file.stem} at {file}"  # not in the place of another of that name
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # it is a file of Python
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class Failures:
    """Failures of a user's function, which end no run: a traceback for each distinct error, then counts.

    Errors of one type from one line of code are one error. Threads may share it.

    Args:
        what: the function is, for messages: "reward", "tool".
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.names: dict[tuple[str, str], str] = {}  # of errors that have been logged
        self.counts: Counter[str] = Counter()  # since `take`
        self.repeated: Counter[str] = Counter()  # since `log_repeated`
        self.lock = Lock()

    def add(self, error: Exception, where: str) -> None:
        """An error, and on what; the first of its kind is logged with its traceback."""
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
        """One that did not raise, such as a reward that returned None."""
        with self.lock:
            self.counts[reason] += 1

    def log_repeated(self) -> None:
        """Log how often known errors came again since the last call."""
        with self.lock:
            repeated, self.repeated = self.repeated, Counter()
        if said := _listed(repeated):
            log.warning("%s failed again: %s", self.what, said)

    def take(self) -> str:
        """What was counted since the last call, the commonest first: "12 x KeyError: 'answer' (mine.py, line 7)"."""
        with self.lock:
            counts, self.counts = self.counts, Counter()
        return _listed(counts)


def _listed(counts: Counter[str]) -> str:
    return "; ".join(f"{n} x {name}" for name, n in counts.most_common(3) if n)


def _place(error: Exception) -> str:
    """The line that an error comes from, in the innermost code that is neither Python's own nor a package's."""
    frames = traceback.extract_tb(error.__traceback__)
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    own = [frame for frame in frames if not frame.filename.startswith(installed)] or frames
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else "no traceback"
