"""Answers to prompts whose images the trainer has prepared, beside those to images that vLLM prepares."""

from unittest import mock

import torch

from rlkit.rollout import Sampling


def beside_images(rollout, prompts) -> dict:
    """Whether both have the same tokens and log-probabilities, greedy and sampled, and how often vLLM prepared images.

    Args:
        rollout: `VllmRollout`.
        prompts: with images alone.
    """
    tensors = [(x, x.clone()) for prompt in prompts for x in prompt.vision.values()]
    facts = {"takes": rollout.takes_prepared_images, "calls": []}
    for name, sampling, n in (
        ("greedy", Sampling(6, temperature=0.0), 1),
        ("sampled", Sampling(6, temperature=0.8, seed=(3,)), 3),
    ):
        found = [_answers(rollout, prompts, sampling, n, facts["calls"], prepared) for prepared in (True, False)]
        facts[name] = found[0] == found[1]
        facts[f"{name}_tokens"] = len({tuple(tokens) for tokens, _ in found[0]})
    facts["unchanged"] = all(torch.equal(x, before) for x, before in tensors)
    return facts


def _answers(rollout, prompts, sampling, n, calls, prepared) -> list:
    rollout.llm.reset_prefix_cache()
    rollout.llm.llm_engine.reset_encoder_cache()
    rollout.llm.llm_engine.reset_mm_cache()
    of_images = type(rollout.processor.image_processor)
    with (
        mock.patch.object(rollout, "takes_prepared_images", prepared and rollout.takes_prepared_images),
        mock.patch.object(of_images, "preprocess", autospec=True, side_effect=of_images.preprocess) as preprocess,
    ):
        samples = rollout.generate(prompts, sampling, n=n)
    calls.append(preprocess.call_count)
    return [(s.response_ids, s.logprobs) for s in samples]
