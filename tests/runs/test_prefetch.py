"""The input of the next step is computed while the current one is in use."""

import threading
import time
from types import SimpleNamespace

import pytest

from rlkit.runs import prefetch
from rlkit.tracking import Run, read_metrics

RUN = SimpleNamespace(phase=lambda name: None)


def threads():
    """Those of `prefetch`; some may be of earlier tests, and end at any time."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("prefetch")}


def test_yields_the_same_items():
    assert list(prefetch(range(5), RUN)) == [0, 1, 2, 3, 4]
    assert list(prefetch([None, None], RUN)) == [None, None] and list(prefetch([], RUN)) == []


def test_computes_one_item_ahead_and_no_more():
    computed = [threading.Event() for _ in range(4)]

    def items():
        for i, event in enumerate(computed):
            event.set()
            yield i

    found = prefetch(items(), RUN)
    assert not computed[0].is_set()  # nothing starts before it is asked for
    assert next(found) == 0
    assert computed[1].wait(100) and not computed[2].wait(0.1)
    assert next(found) == 1 and computed[2].wait(100)


def test_an_error_comes_with_its_item_and_the_thread_ends():
    def items():
        yield 1
        raise ValueError("row 2")

    before = threads()
    found = prefetch(items(), RUN)
    assert next(found) == 1
    with pytest.raises(ValueError, match="row 2"):
        next(found)
    assert threads() <= before


def test_the_thread_ends_when_the_loop_is_left():
    before = threads()
    for i in prefetch(range(100), RUN):
        if i == 3:
            break
    assert threads() <= before


def test_waiting_is_a_phase_of_its_own(tmp_path):
    """The first item and each that takes longer than the step before; it is not counted as the step's last phase."""

    def items():
        for i in range(3):
            time.sleep(0.2)
            yield i

    run = Run(tmp_path, {})
    found = prefetch(items(), run)
    for step in run.steps(0, 3):
        next(found)
        run.phase("train")
        run.log(step, {})
    for row in read_metrics(tmp_path / "metrics.jsonl"):
        assert row["time/encode"] > 0.1 > row["time/train"]
