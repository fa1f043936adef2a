"""Rows for engine tests: prompts with images and without, answers of random tokens, several to a prompt."""

import numpy as np
import torch
from PIL import Image

from rlkit.data import Batch, collate, extend
from rlkit.data.samples import prompt
from rlkit.vlm import encode


def make_samples(processor, seed=0, answers=(3, 1, 2, 3), sizes=((56, 56), None, (84, 56), (56, 112)), videos=()):
    """One prompt for each of `sizes` (None: text only), `answers[i]` answers to it, each of 1-5 random tokens; a video
    behind the prompts whose numbers are in `videos`."""
    rng = np.random.default_rng(seed)
    samples = []
    for group, (count, size) in enumerate(zip(answers, sizes, strict=True)):
        images = [] if size is None else [Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8))]
        row = {"question": "What digit is this?" * (1 + group % 2), "images": images}
        asked = encode(processor, row, group_id=group)
        asked = with_video(processor, asked, rng) if group in videos else asked
        for _ in range(count):
            tokens = rng.integers(20, 200, size=int(rng.integers(1, 6))).tolist()
            samples.append(extend(asked, tokens, [-1.0] * len(tokens)))
    return samples


def with_video(processor, asked, rng):
    """Of a Qwen2.5-VL: two frames of one merged patch each, which no image processor makes."""
    pixels = torch.from_numpy(rng.standard_normal((8, 3 * 2 * 14 * 14))).float()
    vision = {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[2, 2, 2]])}
    vision |= {**asked.vision, "second_per_grid_ts": torch.tensor([0.5])}
    names = ["<|vision_start|>", "<|video_pad|>", "<|video_pad|>", "<|vision_end|>"]
    ids = [*asked.token_ids, *processor.tokenizer.convert_tokens_to_ids(names)]
    return prompt(ids, vision=vision, group_id=asked.group_id)


def make_batch(processor, seed=0, rows=None, **kwargs) -> Batch:
    """`rows` of the samples as a batch; advantages are drawn for all samples: a part is a part of the whole."""
    samples = make_samples(processor, seed, **kwargs)
    advantages = torch.from_numpy(np.random.default_rng(seed + 1).standard_normal(len(samples))).float()
    chosen = list(range(len(samples))) if rows is None else list(rows)
    return collate([samples[i] for i in chosen], advantages=advantages[chosen])
