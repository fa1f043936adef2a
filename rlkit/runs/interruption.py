"""Ends a run on Ctrl-C, on SIGTERM from a scheduler, or when another rank is lost.

During training, a signal ends the run after the current step, with a checkpoint, and a second Ctrl-C ends it at once.
Before and after training, the first signal ends it at once.

The exit code is 130 for Ctrl-C and 0 for SIGTERM. It is not 143, because torchrun treats every nonzero exit code as a
failure: torchrun would end the node's other ranks, restart them if --max-restarts allows it, and exit with 1, also on
nodes that got no signal.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlkit.engines.checkpoint import checkpoints
from rlkit.engines.distributed import all_reduce
from rlkit.tracking import EVAL, METRICS, Run, read_object

POLICY = "checkpoints"  # the policy's checkpoint is written last: if it exists, the step is completely saved
EXIT_CODES: dict[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 0}
_signals: list[int] = []  # received so far, in order
_training: list[Run] = []  # the run that is training, if any
_logging: list[Run] = []  # the run that continues from its log, if any


class Interrupted(SystemExit):
    """A signal ended the run. `code` is the exit code."""


@contextmanager
def outside_endings(recipe: str) -> Iterator[None]:
    """Inside the `with` block, a signal or the loss of a rank ends the recipe with a message; see the module."""
    before = {number: signal.signal(number, _on_signal) for number in EXIT_CODES}
    try:
        yield
    except Interrupted:
        _say_how_it_ended(recipe, "")
        raise
    except Exception as error:
        if _signals:  # an error after a signal is its consequence, such as a collective with ranks that have ended
            _say_how_it_ended(recipe, f" in the middle of a step ({_first_line(error)})")
            raise Interrupted(EXIT_CODES[_signals[0]]) from None
        if not _lost_a_rank(error):
            raise
        sys.exit(
            f"{recipe}: rank {dist.get_rank()} has lost another rank, which ended, or was killed, or cannot be reached "
            f"any more; {_how_to_continue()}, on any number of ranks ({_first_line(error)})"
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _signals.clear()
        _training.clear()
        _logging.clear()


def end_after_step(run: Run) -> None:
    """From now on, a signal during a step ends this run after the step, in `save`."""
    _training[:] = [run]


def continue_from_log(run: Run) -> None:
    """This run has no checkpoints, and continues after the last batch that was logged."""
    _logging[:] = [run]


def a_signal_has_come() -> bool:
    """Whether any rank has received a signal that ends the run. All ranks call this together."""
    local_signal = torch.tensor(_signals[0] if _signals else 0)
    number = int(all_reduce(local_signal, dist.ReduceOp.MAX).item())
    if number and not _signals:
        _signals.append(number)
    return bool(number)


def interrupted() -> Interrupted:
    """The exception that ends a run after a signal."""
    return Interrupted(EXIT_CODES[_signals[0]])


def _on_signal(number: int, frame: Any) -> None:
    _signals.append(number)
    is_ctrl_c = number == signal.SIGINT
    if is_ctrl_c and len(_signals) > 2:
        os._exit(EXIT_CODES[signal.SIGINT])
    in_step = bool(_training) and bool(_training[0].current_step)
    if not in_step or (is_ctrl_c and len(_signals) > 1):
        raise interrupted()
    if len(_signals) == 1 and os.environ.get("RANK", "0") == "0":
        again = "; press Ctrl-C again to end at once, without one" if is_ctrl_c else ""
        text = f"\n{signal.Signals(number).name}: the run ends after this step, with a checkpoint{again}\n"
        os.write(2, text.encode())  # print is not safe in a signal handler


def _say_how_it_ended(recipe: str, when: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"{recipe}: ended by {signal.Signals(_signals[0]).name}{when}; {_how_to_continue()}", flush=True)


def _how_to_continue() -> str:
    """Which checkpoint is the newest, and how to continue from it."""
    if not _training and _logging and (_logging[0].out / METRICS).exists():
        return f"to continue after the batches that were logged, add --out {_logging[0].out} --resume to the command"
    saved = checkpoints(_training[0].out / POLICY) if _training else []
    if not saved:
        return "no step was saved"
    out = _training[0].out
    older = f"; {out / 'model'} is still that of step {step}" if (step := _exported_step(out)) else ""
    return f"the newest checkpoint is {saved[-1]}{older}; to continue, add --out {out} --resume to the command"


def _exported_step(out: Path) -> int | None:
    """The step whose model lies in model/, from an earlier end of the run with fewer steps."""
    return read_object(out / EVAL).get("steps") if (out / "model").exists() else None


def _lost_a_rank(error: Exception) -> bool:
    """Whether a collective failed because another rank is gone.

    gloo's error message names its transport, and the store raises an exception of its own. NCCL does not fail. It waits
    until torchrun ends this rank, too.
    """
    of_gloo = isinstance(error, RuntimeError) and "/gloo/transport/" in str(error)
    return of_gloo or isinstance(error, dist.DistNetworkError)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
