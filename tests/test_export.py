"""`python -m rlkit.export`: a checkpoint of a run becomes the model that the run itself would have exported."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent / "recipes"))

from helpers import run_here  # noqa: E402

import rlkit.export  # noqa: E402
from rlkit.export import export_checkpoint, main  # noqa: E402

SHORT = ["--task", "helpers:few_digits", "--max_new_tokens", 0, "--heldout_rows", 2]


def weights(path):
    return {name: x for file in path.glob("*.safetensors") for name, x in load_file(file).items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def sft(tiny_dir, tmp_path_factory):
    """A run with adapters whose checkpoints of all three steps are kept."""
    out = tmp_path_factory.mktemp("export") / "sft"
    adapters = ["--lora_rank", 4, "--freeze", "layers.0.*lora"]
    options = ["--steps", 3, "--save_every", 1, "--keep_checkpoints", 0, "--lr", 1e-2, "--prompts_per_step", 2]
    run_here("sft", "--model", tiny_dir, "--out", out, *SHORT, *adapters, *options)
    return out


def test_is_what_the_run_exports(sft):
    assert main([str(sft)]) is None
    assert same(weights(sft / "model_step_3"), weights(sft / "model"))
    assert (sft / "model_step_3/processor_config.json").exists()


def test_the_model_stays_on_the_host_where_there_is_a_gpu(sft, tmp_path, monkeypatch):
    devices, make = [], rlkit.export.make_engine
    monkeypatch.setattr(rlkit.export, "make_engine", lambda *a, **k: devices.append(k.get("device")) or make(*a, **k))
    export_checkpoint(sft, 1, tmp_path / "model")
    assert devices == ["cpu"]


def test_a_model_that_a_failed_start_left_is_not_the_base(sft, tiny_dir, tmp_path):
    """Its name is that of the model that a run builds by itself; this run was given another one."""
    other = shutil.copytree(tiny_dir, sft / "init")
    file = next(other.glob("*.safetensors"))
    save_file({name: torch.zeros_like(x) for name, x in load_file(file).items()}, file, metadata={"format": "pt"})
    try:
        export_checkpoint(sft, 3, tmp_path / "model")
    finally:
        shutil.rmtree(other)
    assert same(weights(tmp_path / "model"), weights(sft / "model"))


def test_an_earlier_step(sft, tmp_path):
    export_checkpoint(sft, 1, tmp_path / "early")
    early, last = weights(tmp_path / "early"), weights(sft / "model")
    assert early.keys() == last.keys() and not same(early, last)


def test_all_checkpoints_are_kept(sft):
    assert sorted(path.name for path in (sft / "checkpoints").iterdir()) == ["step_1", "step_2", "step_3"]


def test_freeze_stops_what_it_names(sft):
    names = load_file(sft / "adapter/adapter_model.safetensors")
    frozen = {name: x.abs().max().item() for name, x in names.items() if "layers.0." in name and "lora_B" in name}
    trained = {name: x.abs().max().item() for name, x in names.items() if "layers.1." in name and "lora_B" in name}
    assert frozen and not any(frozen.values()) and trained and all(trained.values())


def test_a_reward_model(tiny_dir, tmp_path):
    out = tmp_path / "rm"
    task = ["--model", tiny_dir, "--out", out, "--heldout_rows", 2, "--steps", 1, "--prompts_per_step", 2]
    run_here("reward_model", *task, "--lr", 1e-2)
    export_checkpoint(out)
    assert same(weights(out / "model_step_1"), weights(out / "model"))


def test_errors(sft, tmp_path):
    with pytest.raises(ValueError, match=r"step: expected one of 1, 2, 3, whose checkpoints are kept, got 7"):
        export_checkpoint(sft, 7)
    with pytest.raises(ValueError, match=r"to: expected a new directory, got .*/model, which exists"):
        export_checkpoint(sft, to=sft / "model")
    with pytest.raises(ValueError, match=r"run: expected a checkpoint in .*critic_checkpoints, got none"):
        export_checkpoint(sft, critic=True)
    with pytest.raises(SystemExit, match=r"export: run: expected the directory of a run, got .*none, which has no"):
        main([str(tmp_path / "none")])
    (tmp_path / "config.json").write_text("")
    with pytest.raises(ValueError, match=r"run: expected options as JSON in .*config.json, got a damaged file"):
        export_checkpoint(tmp_path)
    damaged = tmp_path / "damaged"
    shutil.copytree(sft, damaged)
    next((damaged / "checkpoints/step_3").glob("*.distcp")).write_bytes(b"")
    with pytest.raises(ValueError, match="step_3"):
        export_checkpoint(damaged)
