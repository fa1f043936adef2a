"""The check that a trainer is installed and has the version that its plug-in was written for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def require(package: str, expected: str) -> None:
    """Raise an ImportError unless `package` is installed in version `expected`, such as "0.9" for 0.9.1 or 0.9.2.

    Raises:
        ImportError: the package is not installed, or has another version.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        raise ImportError(f"{package}: expected version {expected} for rlkit.plugins, got none installed") from None
    if not (found + ".").startswith(expected + "."):
        raise ImportError(f"{package}: expected version {expected} for rlkit.plugins, got {found}")
