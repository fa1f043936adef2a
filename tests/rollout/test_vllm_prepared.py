"""Inputs of vLLM that ranks of one engine send each other; no vLLM is needed."""

import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rlkit.engines.distributed import init_distributed
from rlkit.rollout.vllm import VllmRollout
from rlkit.rollout.vllm_prepared import copy_parts


def prompt(hash_, data):
    element = SimpleNamespace(data=data)
    return {
        "type": "multimodal",
        "mm_hashes": {"image": [hash_]},
        "mm_kwargs": {"image": [{"pixel_values": element}]},
    }, element


def test_an_image_of_several_prompts_is_copied_and_sent_once():
    pixels = torch.arange(4000.0)
    one, first = prompt("a", pixels[:1000])
    two, second = prompt("a", pixels[:1000])
    three, third = prompt("b", pixels[1000:2000])
    copy_parts([one, two, three])
    assert first.data is second.data and torch.equal(first.data, pixels[:1000])
    assert torch.equal(third.data, pixels[1000:2000])
    assert len(pickle.dumps([first, second, third])) < 2 * 4000 + 2000  # two images, not the whole tensor


@pytest.fixture
def group():
    init_distributed("cpu")
    return dist.group.WORLD


def test_an_error_is_raised_after_the_exchange(group):
    """Other ranks wait in it."""

    def inputs():
        raise ValueError("prompt: expected fewer tokens")

    exchanged = []
    gather = dist.all_gather_object

    def noted(per_rank, own, group):
        exchanged.append(own)
        gather(per_rank, own, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_object", noted)
        with pytest.raises(ValueError, match="expected fewer tokens"):
            VllmRollout._gathered(SimpleNamespace(group=group), inputs)
    assert isinstance(exchanged[0], ValueError)
    inputs_of_all = VllmRollout._gathered(SimpleNamespace(group=group), lambda: [({"type": "token"}, None)])
    assert inputs_of_all == ([({"type": "token"}, None)], 0)
