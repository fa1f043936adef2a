"""What a seed decides before the first step, and the end of a recipe whose options cannot be used."""

import pytest
import torch

from rlkit.data import load_task
from rlkit.runs import TrainingOptions, build_engine, one_sentence_errors, release_directory, start_run
from rlkit.vlm import build_tiny, load_processor


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "model"
    build_tiny(path, load_task("sorting").train[:8], warm_up_steps=0)
    return str(path)


def adapters(tiny, out, **options):
    """The adapters of a run that starts in a process which has drawn random numbers before."""
    torch.rand(7)
    cfg = TrainingOptions(out=str(out), model=tiny, lora_rank=2, **options)
    run = start_run("recipe", cfg, "task")
    engine = build_engine(cfg, tiny, load_processor(tiny), updates=1)
    run.close()
    release_directory(out)
    found = {name: x.detach().clone() for name, x in engine.module.named_parameters() if "lora_" in name}
    assert found
    return found


def test_a_seed_repeats_the_adapters(tiny, tmp_path):
    first, again, other = (adapters(tiny, tmp_path / str(i), seed=seed) for i, seed in enumerate((3, 3, 4)))
    assert all(torch.equal(x, again[name]) for name, x in first.items())
    assert not any(torch.equal(x, other[name]) for name, x in first.items() if "lora_A" in name)


@pytest.mark.parametrize("error", [ValueError, ImportError])
def test_what_a_person_can_mend_is_one_sentence(error):
    with pytest.raises(SystemExit, match="^ppo: steps: expected at least 1, got 0$"):
        with one_sentence_errors("ppo"):
            raise error("steps: expected at least 1, got 0")


def test_a_fault_of_the_program_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="^bug$"):
        with one_sentence_errors("ppo"):
            raise RuntimeError("bug")
