"""Checks whether sampling servers respond, and which model they serve."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator, Sequence

from rlkit.doctor.findings import Finding
from rlkit.rollout.servers.token import server_token

SECONDS = 5.0


def check_servers(urls: Sequence[str]) -> Iterator[Finding]:
    """For each server, its response time and the model that it serves."""
    for url in urls:
        try:
            start = time.perf_counter()
            _get(url, "/health")
            seconds = time.perf_counter() - start
            models = [model["id"] for model in json.loads(_get(url, "/v1/models"))["data"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            yield Finding(url, f"expected a vLLM or SGLang server, got {type(error).__name__}: {error}", False)
            continue
        yield Finding(url, f"answers within {1000 * seconds:.0f} ms and serves {', '.join(map(str, models))}")


def _get(url: str, path: str) -> bytes:
    """The body of the response, requested as a run does: with the server's token, and not through a proxy."""
    request = urllib.request.Request(url.rstrip("/") + path, headers={"Authorization": f"Bearer {server_token(url)}"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=SECONDS) as response:
        return response.read()
