"""`ratio_stats` with the clips of a loss, as the trainers of other packages log it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

from torch import Tensor

from rlkit.losses import gspo_loss, gspo_token_loss, luspo_loss, ratio_stats, sequence_ratio_stats

SEQUENCE_LOSSES = (gspo_loss, gspo_token_loss, luspo_loss)  # clip one ratio per response
CLIPS = ("clip_low", "clip_high", "log_clip_low", "log_clip_high")  # arguments of losses


def clip_stats(
    loss: Callable[..., Any], logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, **clip: float
) -> dict[str, Tensor]:
    """`sequence_ratio_stats` of a loss that clips the ratios of responses, `ratio_stats` of any other.

    Args:
        loss: its clips are those that a `functools.partial` has fixed, or its defaults. A loss of yours without a
            `clip_low` or `clip_high` gets those of `ratio_stats`.
        logprobs, old_logprobs, advantages, mask: as for these functions.
        clip: some of `CLIPS`, in place of those of the loss.
    """
    defaults = {name: parameter.default for name, parameter in signature(loss).parameters.items()}
    found = {name: defaults[name] for name in CLIPS if isinstance(defaults.get(name), float | int)} | clip
    if "log_clip_low" in found:  # GMPO clips log-ratios
        found["clip_low"] = 1 - math.exp(-found.pop("log_clip_low"))
    if "log_clip_high" in found:
        found["clip_high"] = math.exp(found.pop("log_clip_high")) - 1
    function = loss.func if isinstance(loss, partial) else loss
    stats = sequence_ratio_stats if function in SEQUENCE_LOSSES else ratio_stats
    return stats(logprobs.detach(), old_logprobs, advantages, mask, **found)
