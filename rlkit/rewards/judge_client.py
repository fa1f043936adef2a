"""A client of a judge's server that bounds what a response may cost, and sends key and question to no other server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

MOST_BYTES = 8 << 20  # of a response; one of a thousand tokens has some thousand


def limited_client(base_url: str, key: str, *, retries: int, seconds: float) -> Any:
    """OpenAI's client, without redirects and compression, that reads at most `MOST_BYTES` of a response.

    Args:
        base_url: of the server.
        key: sent to it.
        retries: as in `rlkit.rewards.judge.chat_judge`.
        seconds: most time until a response begins, and from there until it ends.
    """
    from openai import DefaultHttpxClient, OpenAI

    def limit(response: Any) -> None:
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity":  # kilobytes may unpack to gigabytes
            raise ValueError(f"expected a response without compression, got {encoding}")
        response.stream = _limited_stream(response.stream, time.monotonic() + seconds)

    http_client = DefaultHttpxClient(
        follow_redirects=False, headers={"Accept-Encoding": "identity"}, event_hooks={"response": [limit]}
    )
    return OpenAI(base_url=base_url, api_key=key, max_retries=retries, timeout=seconds, http_client=http_client)


def _limited_stream(stream: Any, deadline: float) -> Any:
    """The body of a response, up to a number of bytes and a moment."""
    base: Any = next(kind for kind in type(stream).__mro__ if kind.__name__ == "SyncByteStream")  # httpx's or httpx2's

    class LimitedStream(base):
        def __iter__(self) -> Iterator[bytes]:
            size = 0
            for part in stream:
                size += len(part)
                if size > MOST_BYTES:
                    raise ValueError(f"expected at most {MOST_BYTES} bytes, got more")
                if time.monotonic() > deadline:
                    raise TimeoutError("expected a whole response in time, got a part of it")
                yield part

        def close(self) -> None:
            stream.close()

    return LimitedStream()
