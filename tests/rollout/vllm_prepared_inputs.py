"""Responses to prompts with images and videos that the trainer has prepared, and to those that vLLM prepares."""

from contextlib import ExitStack
from unittest import mock

import numpy as np
import torch
from PIL import Image

from rlkit.rollout import Sampling
from rlkit.vlm import encode_prompt


def film(processor):
    """A prompt with a video, whose frames are a third of a second apart, and an image."""
    frames = np.random.default_rng(0).integers(0, 256, (6, 56, 84, 3), dtype="uint8")
    videos, images = [{"frames": frames, "fps": 3}], [frames[0, :, :56]]
    row = {"question": "<video> or <image>?", "videos": videos, "images": [Image.fromarray(x) for x in images]}
    return encode_prompt(processor, row, group_id=9)


def beside_media(rollout, prompts) -> dict:
    """Whether both have the same tokens and log-probabilities, greedy and sampled, and how many calls of the image and
    video processors vLLM made for each.

    Args:
        rollout: `VllmRollout`.
        prompts: with images or videos.
    """
    tensors = [(x, x.clone()) for prompt in prompts for x in prompt.vision.values()]
    facts = {"calls": [], "distinct": 0}
    for name, sampling, n in (
        ("greedy", Sampling(6, temperature=0.0), 1),
        ("sampled", Sampling(6, temperature=0.8, seed=(3,)), 3),
    ):
        found = [_responses(rollout, prompts, sampling, n, facts["calls"], prepared) for prepared in (True, False)]
        facts[name] = found[0] == found[1]
        facts["distinct"] = len({tuple(tokens) for tokens, _ in found[0]})
    facts["unchanged"] = all(torch.equal(x, before) for x, before in tensors)
    return facts


def _responses(rollout, prompts, sampling, n, calls, prepared) -> list:
    rollout.llm.reset_prefix_cache()
    rollout.llm.llm_engine.reset_encoder_cache()
    rollout.llm.llm_engine.reset_mm_cache()
    parts = [getattr(rollout.processor, f"{kind}_processor", None) for kind in ("image", "video")]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(rollout, "takes_prepared", prepared))
        counted = [
            stack.enter_context(mock.patch.object(of, "preprocess", autospec=True, side_effect=of.preprocess))
            for of in map(type, filter(None, parts))
        ]
        samples = rollout.generate(prompts, sampling, n=n)
    calls.append(sum(one.call_count for one in counted))
    return [(s.response_ids, s.logprobs) for s in samples]
