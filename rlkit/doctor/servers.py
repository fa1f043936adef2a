"""Checks whether sampling servers respond, and which model they serve."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from rlkit.doctor.findings import Finding

SECONDS = 5.0


def check_servers(urls: Sequence[str]) -> Iterator[Finding]:
    """For each server, its response time and the model that it serves."""
    for url in urls:
        try:
            start = time.perf_counter()
            _get(f"{url.rstrip('/')}/health")
            seconds = time.perf_counter() - start
            models = [model["id"] for model in json.loads(_get(f"{url.rstrip('/')}/v1/models"))["data"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            yield Finding(url, f"expected a vLLM or SGLang server, got {type(error).__name__}: {error}", False)
            continue
        yield Finding(url, f"answers within {1000 * seconds:.0f} ms and serves {', '.join(map(str, models))}")


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        return answer.read()
