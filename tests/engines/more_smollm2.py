"""SmolLM2-135M-Instruct on two ranks, with Megatron and resumed: `make pretrained`, as it takes long."""

import os
import sys
from pathlib import Path

import pytest
import torch
from isolated_cases import require, run_cases

from rlkit.data import collate
from rlkit.engines import make_engine
from rlkit.vlm import load_model, load_processor, lora, model_path

sys.path.insert(0, str(Path(__file__).parent))
from on_smollm2_ranks import CASES, four_responses, loss_fn

ONE_RANK = ("fsdp2", "adapters")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    command = [sys.executable, str(Path(__file__).with_name("on_smollm2_ranks.py")), str(folder), model_path("smollm2")]
    run_cases(command, folder, list(CASES), timeout=1200, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return folder


def results(out, name, *moments):
    """The log-probabilities of all four responses at these moments, and the metrics of the step."""
    require(out, name)
    ranks = [torch.load(file, weights_only=False) for file in sorted(out.glob(f"{name}.*.pt"))]
    found = ({i: x for rank in ranks for i, x in rank[moment].items()} for moment in moments)
    return *(torch.cat([logprobs[i] for i in range(4)]) for logprobs in found), ranks[0]["step"]


@pytest.mark.parametrize("name", [name for name in CASES if name not in ONE_RANK])
def test_every_layout_takes_the_same_step(out, name):
    """All weights or adapters are trained, in float32; the head is the tied embedding."""
    alone = "adapters" if name.startswith("adapters") else "fsdp2"
    before, after, step = results(out, alone, "before", "after")
    found_before, found_after, found_step = results(out, name, "before", "after")
    assert (after - before).abs().mean() > 0.05 and step["grad_norm"] > 1
    torch.testing.assert_close(found_before, before, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(found_after, after, atol=5e-4, rtol=1e-4)
    for metric in ("loss", "grad_norm"):
        assert found_step[metric] == pytest.approx(step[metric], rel=1e-4, abs=1e-5), metric


def test_adapters_on_two_ranks_are_merged_and_disabled(out):
    moments = ("before", "after", "reference", "merged")
    before, after, reference, merged, _ = results(out, "adapters, two ranks", *moments)
    torch.testing.assert_close(merged, after, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(reference, before, atol=1e-5, rtol=1e-5)
    assert (after - before).abs().mean() > 0.05


def test_a_checkpoint_of_adapters_resumes_exactly(tmp_path):
    path = model_path("smollm2")
    advantages = torch.tensor([1.0, -0.5, 0.7, -1.0])
    batch = collate(four_responses(load_processor(path)), advantages=advantages)
    engine, resumed = (
        make_engine("fsdp2", model=lora(load_model(path), 4, 8), optimizer=lambda p: torch.optim.Adam(p, lr=1e-2))
        for _ in range(2)  # each with other random adapters
    )
    engine.train_batch(batch, loss_fn)
    engine.save_checkpoint(tmp_path / "checkpoint", {"step": 1})
    assert resumed.load_checkpoint(tmp_path / "checkpoint") == {"step": 1}
    assert resumed.train_batch(batch, loss_fn) == engine.train_batch(batch, loss_fn)
    assert torch.equal(resumed.infer_batch(batch)["logprobs"], engine.infer_batch(batch)["logprobs"])
