"""One process without a launcher, torchrun with one rank and with two: the same numbers on the same global batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlkit.data import Batch
from rlkit.engines import make_engine
from rlkit.vlm import load_model, load_processor

HERE = Path(__file__).parent


CASES = ["whole", "micro_batches", "sequences", "frozen", "lora", "text_rank", "empty_rank"]


def launch(tiny_dir, out, cases, ranks):
    """Run the cases on so many ranks; 0 is without a launcher."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    done = subprocess.run(
        [sys.executable, *torchrun, str(HERE / "on_ranks.py"), tiny_dir, str(out), *cases],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def alone(tiny_dir, tmp_path_factory):
    return launch(tiny_dir, tmp_path_factory.mktemp("alone"), CASES[:5], 0)


@pytest.fixture(scope="module")
def two_ranks(tiny_dir, tmp_path_factory):
    return launch(tiny_dir, tmp_path_factory.mktemp("two"), CASES, 2)


def result(out, case):
    """What a run measured: metrics of four steps, gradients of the second, parameters at the end."""
    return json.loads((out / case / "steps.json").read_text()), torch.load(out / case / "tensors.pt", weights_only=True)


def assert_same(one, other, tolerance=1e-5):
    (steps, tensors), (other_steps, other_tensors) = one, other
    for i, (mine, theirs) in enumerate(zip(steps["steps"], other_steps["steps"], strict=True)):
        for name in mine.keys() - {"logprob/max"}:
            assert mine[name] == pytest.approx(theirs[name], abs=tolerance, rel=tolerance), (i, name)
    assert steps["logprobs"] == pytest.approx(other_steps["logprobs"], rel=tolerance, abs=1e-3)
    for kind in ("gradients", "parameters"):
        assert tensors[kind].keys() == other_tensors[kind].keys()
        for name, tensor in tensors[kind].items():
            theirs = other_tensors[kind][name]
            torch.testing.assert_close(theirs, tensor, atol=tolerance, rtol=1e-4, msg=f"{kind} {name}")


def test_one_rank_under_torchrun_equals_no_launcher(tiny_dir, tmp_path, alone):
    assert_same(result(alone, "whole"), result(launch(tiny_dir, tmp_path, ["whole"], 1), "whole"))


@pytest.mark.parametrize("case", CASES[:5])
def test_two_ranks_equal_one(alone, two_ranks, case):
    steps, tensors = result(two_ranks, case)
    assert_same(result(alone, case), (steps, tensors))
    assert steps["steps"][3]["loss"] != steps["steps"][0]["loss"]
    vision = [name for name in tensors["gradients"] if ".visual." in name]
    assert bool(vision) == (case not in ("frozen", "lora"))


def test_mixed_text_and_image_ranks_do_not_hang(alone, two_ranks):
    assert_same(result(alone, "micro_batches"), result(two_ranks, "text_rank"))


def test_rank_without_rows(alone, two_ranks):
    assert_same(result(alone, "whole"), result(two_ranks, "empty_rank"))


def test_checkpoint_of_two_ranks_resumes_on_one(tiny_dir, two_ranks):
    steps, tensors = result(two_ranks, "micro_batches")
    sys.path.insert(0, str(HERE))
    from on_ranks import make_batch, token_loss

    processor = load_processor(tiny_dir)
    engine = make_engine(
        "fsdp2",
        model=load_model(tiny_dir),
        processor=processor,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
    )
    assert engine.load_checkpoint(two_ranks / "micro_batches" / "checkpoint") == {"step": 2}
    batch: Batch = make_batch(processor)
    for expected in steps["steps"][2:]:
        came = engine.train_batch(batch, token_loss, ("logprobs", "entropy"))
        assert came["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert came["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    for name, tensor in engine.get_per_tensor_param():
        torch.testing.assert_close(tensor, tensors["parameters"][name], atol=1e-5, rtol=1e-4)
