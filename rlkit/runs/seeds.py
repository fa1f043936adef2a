"""A random generator of a run's seed, for draws that a recipe makes itself."""

import numpy as np
import torch


def generator(*seed: int) -> torch.Generator:
    """A generator on the CPU for a seed of several numbers, such as (seed of the run, step, rank), each >= 0.

    A resumed run draws as one that never stopped. Ranks draw independently if the rank is one of the numbers.
    """
    (mixed,) = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed))
