"""The status line: a progress bar on a terminal, or a line every few seconds in a file or pipe."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO


def progress_bar(start: int, stop: int, *, unit: str = "step", show: bool = True) -> Any:
    """A tqdm bar from `start` to `stop`: "step 37/220 |###   | reward 0.244, ... | 01:27, 07:10 left | train".

    If stderr is a file or a pipe, it writes a line every few seconds instead.
    """
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    style: dict[str, Any] = {} if terminal else {"file": _LinePerState(sys.stderr), "mininterval": 5.0}
    bar = "|{bar:12}| " if terminal else ""
    form = (
        f"{unit} {{n_fmt}}/{{total_fmt}} {bar}{{percentage:.0f}}%{{postfix}} | {{elapsed}}, {{remaining}} left{{desc}}"
    )
    return tqdm(initial=start, total=stop, unit=unit, disable=not show, bar_format=form, **style)


def show_phase(bar: Any, phase: str) -> None:
    """Show the phase at the end of the progress bar. The bar is redrawn at most once per `mininterval`."""
    if bar.disable:
        return
    bar.set_description_str(f" | {phase}", refresh=False)
    now = time.time()
    if now - bar.last_print_t >= max(bar.mininterval, 1.0):
        bar.last_print_t = now
        bar.refresh()


class _LinePerState:
    """A stream that writes each update of a progress bar as a new line, for files and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        if line := text.strip("\r\n "):
            self.stream.write(line + "\n")

    def flush(self) -> None:
        self.stream.flush()
