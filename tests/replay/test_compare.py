"""What differs first between two bundles is named, in the order in which a step computes things."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from rlkit.data.samples import append_response, prompt_sample
from rlkit.replay.bundles import Bundle, Draw, Update
from rlkit.replay.compare import compare_bundles, describe

TOLERANCE = 1e-4


@pytest.fixture
def bundle():
    prompts = [
        prompt_sample([1, 2], vision={"pixel_values": torch.ones(2, 2)}, placeholders={2: [1]}, group_id=i)
        for i in range(2)
    ]
    samples = [
        append_response(prompt, [7 + i], [-1.0], number=i, reward=[0.5, math.nan][i], text="seven")
        for prompt in prompts
        for i in range(2)
    ]
    fields = {
        "tokens": torch.tensor([s.token_ids for s in samples]),
        "mask": torch.tensor([s.mask for s in samples]),
        "group_ids": torch.tensor([s.group_id for s in samples]),
        "numbers": torch.tensor([s.number for s in samples]),
        "ref_logprobs": torch.full((4, 3), -1.0),
        "advantages": torch.tensor([1.0, -1.0, 0.0, 0.0]),
        "logprobs": torch.full((4, 3), -2.0),
    }
    update = Update("checkpoints", fields, {"loss": 2.0, "kl": 0.5, "grad_norm": 3.0, "time/train": 1.0})
    return Bundle(0, draws=[Draw(samples, prompts=prompts)], updates=[update])


def first_difference(recorded, computed):
    found = compare_bundles(recorded, computed, TOLERANCE)
    return next((one for one in found if one.differs), None)


def test_equal_bundles_differ_nowhere(bundle):
    other = copy.deepcopy(bundle)
    other.updates[0].metrics["time/train"] = 9.0
    other.updates[0].fields["logprobs"] += 1e-6
    found = compare_bundles(bundle, other, TOLERANCE)
    assert not any(one.differs for one in found) and describe(found).endswith("nothing differs")
    names = "prompts images rewards ref_logprobs advantages logprobs loss kl grad_norm".split()
    assert [one.name for one in found] == names


def _prompt(bundle, **facts):
    bundle.draws[0].prompts[1] = replace(bundle.draws[0].prompts[1], **facts)


def _field(bundle, name, row, change):
    bundle.updates[0].fields[name][row] += change


FAULTS = {
    "prompts": (lambda b: _prompt(b, token_ids=[1, 3]), r"prompt 1, token 1: recorded \[2\], computed \[3\]"),
    "images": (lambda b: _prompt(b, vision={"pixel_values": torch.zeros(2, 2)}), "prompt 1: pixel_values"),
    "rewards": (
        lambda b: b.draws[0].samples.__setitem__(2, replace(b.draws[0].samples[2], reward=0.75)),
        r"prompt 1, response 0 \('seven'\): recorded 0.5, computed 0.75",
    ),
    "tokens": (lambda b: _field(b, "tokens", 0, 1), "recorded"),
    "ref_logprobs": (lambda b: _field(b, "ref_logprobs", (3, 2), 0.5), "prompt 1, response 1, token 2: recorded -1"),
    "advantages": (lambda b: _field(b, "advantages", 1, 2.0), "prompt 0, response 1: recorded -1, computed 1"),
    "logprobs": (lambda b: _field(b, "logprobs", (0, 1), math.nan), "prompt 0, response 0, token 1: .* computed nan"),
    "loss": (lambda b: b.updates[0].metrics.update(loss=2.1, grad_norm=9.0), "recorded 2, computed 2.1"),
    "grad_norm": (lambda b: b.updates[0].metrics.update(grad_norm=3.1), "recorded 3, computed 3.1"),
    "updates": (lambda b: b.updates.append(b.updates[0]), "1 optimizer steps recorded, 2 computed"),
    "draws": (lambda b: b.draws.append(b.draws[0]), "1 calls of the sampler recorded, 2 computed"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_difference_is_named(bundle, name):
    other = copy.deepcopy(bundle)
    fault, where = FAULTS[name]
    fault(other)
    found = first_difference(bundle, other)
    assert found.name == name
    import re

    assert re.search(where, found.where)
    assert (
        describe(compare_bundles(bundle, other, TOLERANCE)).splitlines()[-1].startswith(f"first difference: {name}: ")
    )


def test_a_reward_that_could_not_be_scored_stays_so(bundle):
    other = copy.deepcopy(bundle)
    other.draws[0].samples[1] = replace(other.draws[0].samples[1], reward=0.0)
    assert first_difference(bundle, other).name == "rewards"
