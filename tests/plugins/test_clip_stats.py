"""The clip fraction that other trainers log is that of the loss that they use."""

import math
from functools import partial

import pytest
import torch

from rlkit.losses import cispo_loss, clipped_policy_loss, gmpo_loss, gspo_loss
from rlkit.plugins.clip_stats import clip_stats


def two_clips(logprobs, old_logprobs, advantages, mask, clip_low, clip_high=0.4):
    """A loss of a user."""


@pytest.mark.parametrize(
    ("loss", "clip", "expected"),
    [
        (clipped_policy_loss, {}, 3 / 4),  # ratios 1.5, 1.25, 3, 1 above 1.2
        (partial(clipped_policy_loss, clip_high=0.3), {}, 2 / 4),
        (partial(clipped_policy_loss, clip_high=0.3), {"clip_high": 2.5}, 0),
        (partial(cispo_loss, clip_low=1.0, clip_high=4.0), {}, 0),
        (two_clips, {}, 2 / 4),
        (partial(two_clips, clip_low=0.2, clip_high=1.0), {}, 1 / 4),
        (partial(gspo_loss, clip_high=0.6), {}, 1 / 2),  # per response: sqrt(1.5 * 1.25) = 1.37 and sqrt(3 * 1) = 1.73
        (gspo_loss, {}, 1),
        (gmpo_loss, {}, 2 / 4),  # log-ratios 0.41, 0.22, 1.1 and 0 above 0.4
        (partial(gmpo_loss, log_clip_high=0.41), {"log_clip_low": 0.1}, 1 / 4),
    ],
)
def test_the_clip_fraction_is_that_of_the_loss(loss, clip, expected):
    ratios = torch.tensor([[1.5, 1.25, math.nan], [math.nan, 3.0, 1.0]])
    mask = ~ratios.isnan()
    logprobs = ratios.log().nan_to_num().requires_grad_()
    found = clip_stats(loss, logprobs, torch.zeros(2, 3), torch.ones(2), mask, **clip)
    assert found["ratio/clip_fraction"].item() == pytest.approx(expected)
    assert not found["ratio/clip_fraction"].requires_grad
