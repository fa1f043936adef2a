"""The suite's pytest plugin: the option --trainer, and a summary table. Without the option it does nothing."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--trainer module:Class`."""
    group = parser.getgroup("rlkit.conformance")
    group.addoption(
        "--trainer", default="", help="adapter of a trainer for rlkit.conformance, as in my_adapter:Trainer"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Load the adapter, or stop pytest with a usage error."""
    if name := config.getoption("--trainer"):
        from rlkit.conformance.adapter import load_adapter

        try:
            config.stash[ADAPTER] = load_adapter(name)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error


ADAPTER = pytest.StashKey[Any]()
FINDINGS = pytest.StashKey[list]()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the summary table."""
    if findings := config.stash.get(FINDINGS, []):
        from rlkit.conformance.report import as_text

        adapter = config.stash[ADAPTER]
        terminalreporter.section("conformance")
        terminalreporter.write_line(as_text(getattr(adapter, "name", "") or type(adapter).__name__, findings))
