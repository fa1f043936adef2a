"""Rows for engine tests: prompts with and without images, several responses of random tokens to a prompt."""

import numpy as np
import torch
from PIL import Image

from rlkit.data import Batch, append_response, collate
from rlkit.data.samples import prompt_sample
from rlkit.vlm import encode_prompt


def make_samples(processor, seed=0, responses=(3, 1, 2, 3), sizes=((56, 56), None, (84, 56), (56, 112)), videos=()):
    """One prompt for each of `sizes` (None: text only) with `responses[i]` responses of 1-5 random tokens.

    The prompts whose numbers are in `videos` end with a video.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for group, (count, size) in enumerate(zip(responses, sizes, strict=True)):
        images = [] if size is None else [Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8))]
        row = {"question": "What digit is this?" * (1 + group % 2), "images": images}
        question = encode_prompt(processor, row, group_id=group)
        question = with_video(processor, question, rng) if group in videos else question
        for _ in range(count):
            tokens = rng.integers(20, 200, size=int(rng.integers(1, 6))).tolist()
            samples.append(append_response(question, tokens, [-1.0] * len(tokens)))
    return samples


def with_video(processor, question, rng):
    """A prompt of Qwen2.5-VL with two frames of one merged patch each; image processors make no video so small."""
    pixels = torch.from_numpy(rng.standard_normal((8, 3 * 2 * 14 * 14))).float()
    vision = {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[2, 2, 2]])}
    vision |= {**question.vision, "second_per_grid_ts": torch.tensor([0.5])}
    names = ["<|vision_start|>", "<|video_pad|>", "<|video_pad|>", "<|vision_end|>"]
    ids = [*question.token_ids, *processor.tokenizer.convert_tokens_to_ids(names)]
    return prompt_sample(ids, vision=vision, group_id=question.group_id)


def make_batch(processor, seed=0, rows=None, **kwargs) -> Batch:
    """`rows` of the samples as a batch. Advantages are drawn for all samples, so that each row keeps its own."""
    samples = make_samples(processor, seed, **kwargs)
    advantages = torch.from_numpy(np.random.default_rng(seed + 1).standard_normal(len(samples))).float()
    chosen = list(range(len(samples))) if rows is None else list(rows)
    return collate([samples[i] for i in chosen], advantages=advantages[chosen])
