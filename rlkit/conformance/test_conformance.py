"""Each check as a test: `pytest --pyargs rlkit.conformance --trainer my_adapter:Trainer`."""

from __future__ import annotations

from typing import Any

import pytest

from rlkit.conformance.checks import CHECKS, Check
from rlkit.conformance.plugin import ADAPTER, FINDINGS
from rlkit.conformance.report import BUG, ERROR, MISSING, run_check


@pytest.fixture(scope="session")
def adapter(request: pytest.FixtureRequest) -> Any:
    if ADAPTER not in request.config.stash:
        pytest.skip("--trainer: expected an adapter such as my_adapter:Trainer, got none")
    return request.config.stash[ADAPTER]


@pytest.mark.parametrize("one", CHECKS, ids=lambda one: one.name)
def test_check(one: Check, adapter: Any, request: pytest.FixtureRequest) -> None:
    found = run_check(one, adapter)
    request.config.stash.setdefault(FINDINGS, []).append(found)
    if found.verdict == MISSING:
        pytest.skip(found.text)
    if found.verdict in (BUG, ERROR):
        pytest.fail(f"{found.question} {found.text}", pytrace=False)
