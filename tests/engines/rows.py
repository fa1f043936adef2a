"""Rows for engine tests: prompts with images and without, answers of random tokens, several to a prompt."""

import numpy as np
import torch
from PIL import Image

from rlkit.data import Batch, collate, extend
from rlkit.vlm import encode


def make_samples(processor, seed=0, answers=(3, 1, 2, 3), sizes=((56, 56), None, (84, 56), (56, 112))):
    """One prompt for each of `sizes` (None: text only), `answers[i]` answers to it, each of 1-5 random tokens."""
    rng = np.random.default_rng(seed)
    samples = []
    for group, (count, size) in enumerate(zip(answers, sizes, strict=True)):
        images = [] if size is None else [Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8))]
        row = {"question": "What digit is this?" * (1 + group % 2), "images": images}
        prompt = encode(processor, row, group_id=group)
        for _ in range(count):
            tokens = rng.integers(20, 200, size=int(rng.integers(1, 6))).tolist()
            samples.append(extend(prompt, tokens, [-1.0] * len(tokens)))
    return samples


def make_batch(processor, seed=0, rows=None, **kwargs) -> Batch:
    """`rows` of the samples as a batch; advantages are drawn for all samples: a part is a part of the whole."""
    samples = make_samples(processor, seed, **kwargs)
    advantages = torch.from_numpy(np.random.default_rng(seed + 1).standard_normal(len(samples))).float()
    chosen = list(range(len(samples))) if rows is None else list(rows)
    return collate([samples[i] for i in chosen], advantages=advantages[chosen])
