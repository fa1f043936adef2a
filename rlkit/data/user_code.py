"""Functions that a user names on the command line."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any


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
