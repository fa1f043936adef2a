"""Confidence intervals of held-out results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Z = 1.96  # quantile of the normal distribution for 95 %
LOSSES = ("loss", "perplexity", "bits_per_byte", "divergence")  # parts of the names of results that are no rewards
NOT_MEASURED = ("unscored", "unanswered")  # results that are numbers of rows without a reward
MEAN_SUFFIXES = ("_error", "_rows")  # of names: the standard error of a mean, and how many rows it is the mean of


def confidence_interval(mean: float, error: float, count: float) -> tuple[float, float]:
    """The 95 % confidence interval of a mean reward; for rewards from 0 to 1 it lies within 0 and 1.

    With the mean p of n values that are 0 or 1 it is Wilson's score interval:

        (p + z²/2n ± z sqrt(p (1 - p) / n + z²/4n²)) / (1 + z²/n)

    Wilson, Probable inference, the law of succession, and statistical inference, 1927,
    https://doi.org/10.1080/01621459.1927.10502953. For other values from 0 to 1, n is the number of values 0 or 1 that
    would have the same standard error.

    The range of the values is not known here. If the mean is not in 0 to 1, or the variance is above p (1 - p), some
    value is below 0 or above 1, and the interval is mean ± z * error. Other values are taken for values from 0 to 1:
    for rewards from -1 to 1 that are all close to 0, say, the interval wrongly ends at 0.

    Args:
        mean: of `count` values.
        error: its standard error, sqrt(sample variance / count).
        count: number of values, about.
    """
    most = mean * (1 - mean)  # variance of 0s and 1s
    if not 0 <= mean <= 1 or (count - 1) * error**2 > most * (1 + 1e-6):
        return mean - Z * error, mean + Z * error
    if most == 0:
        n = max(count, 1.0)
    elif error == 0:
        return mean, mean
    else:
        n = most / error**2 + 1
    middle, half = mean + Z**2 / (2 * n), Z * math.sqrt(most / n + Z**2 / (4 * n**2))
    low, high = ((middle + x) / (1 + Z**2 / n) for x in (-half, half))
    return max(0.0, low), min(1.0, high)


def intervals(found: Mapping[str, Any], rows: Any, when: str = "") -> dict[str, tuple[float, float]]:
    """The confidence intervals of the results of an evaluation, by name, where a NAME has a NAME_error.

    Results whose names contain one of `LOSSES` get mean ± 1.96 * error. All others are taken for mean rewards or
    shares, also those of other tools such as `acc`, and get `confidence_interval`. The number of values is NAME_rows,
    the rows that NAME is the mean of: `accuracy` that of the rows whose greedy response was scored, the mean reward of
    samples that of the rows with a scored sample, and pass@k that of the rows with at least k scored samples. Without
    a NAME_rows, as in results of other tools and of earlier runs, it is `rows`.

    Args:
        found: results by name. What is not a finite number has no interval.
        rows: number of rows, if it is known.
        when: a suffix of all names, such as "_after" for NAME_after and NAME_error_after.
    """
    made = {}
    for name, mean in found.items():
        error: Any
        error, counted = (found.get(f"{name.removesuffix(when)}{suffix}{when}") for suffix in MEAN_SUFFIXES)
        count: Any = next((x for x in (counted, rows) if _is_finite(x)), 1)
        if name.endswith(when) and _is_finite(mean) and _is_finite(error):
            if any(part in name for part in LOSSES):
                made[name] = mean - Z * error, mean + Z * error
            else:
                made[name] = confidence_interval(mean, error, max(1, count))
    return made


def _is_finite(x: Any) -> bool:
    return isinstance(x, int | float) and math.isfinite(x)
