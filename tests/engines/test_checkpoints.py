"""Checkpoints of the fsdp2 engine in one process. On several ranks: `test_ranks.py`, `test_ulysses.py`."""

import json
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch.optim import lr_scheduler

from rlkit.engines import checkpoint, make_engine
from rlkit.losses import token_mean
from rlkit.runs.models import RunSchedule
from rlkit.vlm import freeze, load_model, load_processor, vision_tower_pattern

sys.path.insert(0, str(Path(__file__).parent))
from rows import make_batch


@pytest.fixture(scope="module")
def processor(tiny_dir):
    return load_processor(tiny_dir)


def weighted_loss(out, mb):
    """Uses both outputs, so that both gradients are compared."""
    weights = mb.advantages[:, None] * out.logprobs + 0.3 * out.entropy
    return token_mean(weights, mb.mask, mb.total_tokens), {}


def hyperbolic(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))


def halved(updates):
    return 0.5**updates


def multi_step(optimizer):
    return lr_scheduler.MultiStepLR(optimizer, [3, 4])


def sequential(optimizer):
    return lr_scheduler.SequentialLR(optimizer, [hyperbolic(optimizer), multi_step(optimizer)], [1])


def make_resumable(tiny_dir, *, model=None, backend="fsdp2", scheduler=hyperbolic):
    return make_engine(
        backend,
        model=model or load_model(tiny_dir),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
        scheduler=scheduler,
    )


def test_engine_resume_is_exact(tiny_dir, processor, tmp_path):
    """Steps after the load have exactly the same metrics."""
    batch, steps = make_batch(processor), []
    engine = make_resumable(tiny_dir)
    for i in range(5):
        if i == 2:
            torch.manual_seed(7)
            engine.save_checkpoint(tmp_path / "step_2", {"step": 2, "note": "x"})
            noise = torch.rand(3)
        steps.append(engine.train_batch(batch, weighted_loss, ("logprobs", "entropy")))
    other = make_resumable(tiny_dir)
    assert other.load_checkpoint(tmp_path / "step_2") == {"step": 2, "note": "x"}
    assert torch.equal(torch.rand(3), noise)
    for expected in steps[2:]:
        assert other.train_batch(batch, weighted_loss, ("logprobs", "entropy")) == expected
    assert [p.name for p in tmp_path.iterdir()] == ["step_2"]


@pytest.mark.parametrize("scheduler", [multi_step, sequential])
def test_a_scheduler_whose_state_has_integer_keys_resumes(tiny_dir, processor, tmp_path, scheduler):
    """MultiStepLR counts its milestones by step."""
    batch = make_batch(processor)
    engine, other = (make_resumable(tiny_dir, scheduler=scheduler) for _ in range(2))
    engine.train_batch(batch, weighted_loss, ("logprobs", "entropy"))
    engine.save_checkpoint(tmp_path / "step_1")
    other.load_checkpoint(tmp_path / "step_1")
    rates = []
    for _ in range(4):
        rates.append(engine.train_batch(batch, weighted_loss, ("logprobs", "entropy"))["lr"])
        assert other.train_batch(batch, weighted_loss, ("logprobs", "entropy"))["lr"] == rates[-1]
    assert rates[-1] < rates[1] / 5


def test_the_schedule_of_an_earlier_checkpoint_is_continued(tiny_dir, processor, tmp_path, monkeypatch):
    """It is in the manifest there, as JSON."""
    batch = make_batch(processor)
    engine, other = make_resumable(tiny_dir), make_resumable(tiny_dir)
    for _ in range(2):
        engine.train_batch(batch, weighted_loss, ("logprobs", "entropy"))
    save, schedule = checkpoint.save, engine.scheduler.state_dict()

    def save_as_before(path, state, manifest):
        save(path, state, {**manifest, "scheduler": schedule})

    with monkeypatch.context() as earlier:
        earlier.setattr(checkpoint, "scheduler_state", lambda scheduler: {})
        earlier.setattr(checkpoint, "save", save_as_before)
        engine.save_checkpoint(tmp_path / "step_2")
    other.load_checkpoint(tmp_path / "step_2")
    for _ in range(3):  # the first learning rate is in the optimizer's state, too
        expected = engine.train_batch(batch, weighted_loss, ("logprobs", "entropy"))
        assert other.train_batch(batch, weighted_loss, ("logprobs", "entropy")) == expected


def test_resume_after_steps_in_which_a_part_of_the_model_was_not_used(tiny_dir, processor, tmp_path):
    """The optimizer has no moments of the vision tower if no row before the checkpoint had an image."""
    text, images = make_batch(processor, responses=(2,), sizes=(None,)), make_batch(processor)
    engine, other = make_resumable(tiny_dir), make_resumable(tiny_dir)
    engine.train_batch(text, weighted_loss, ("logprobs", "entropy"))
    engine.save_checkpoint(tmp_path / "step_1")
    saved = checkpoint.tensor_names(tmp_path / "step_1")
    assert not any(name.startswith("optimizer.state.model.visual.") for name in saved)
    other.load_checkpoint(tmp_path / "step_1")
    for batch in (text, images, images):
        expected = engine.train_batch(batch, weighted_loss, ("logprobs", "entropy"))
        assert other.train_batch(batch, weighted_loss, ("logprobs", "entropy")) == expected


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp1"])
def test_a_save_before_the_first_step_changes_nothing(tiny_dir, processor, tmp_path, backend):
    """The optimizer has no moments yet, and its first step is still the first for AdamW's bias correction."""
    batch = make_batch(processor)
    never_saved, engine, other = (make_resumable(tiny_dir, backend=backend) for _ in range(3))
    engine.save_checkpoint(tmp_path / "step_0")
    assert not any(name.startswith("optimizer.state.") for name in checkpoint.tensor_names(tmp_path / "step_0"))
    other.load_checkpoint(tmp_path / "step_0")
    for _ in range(3):
        expected = never_saved.train_batch(batch, weighted_loss, ("logprobs", "entropy"))
        assert engine.train_batch(batch, weighted_loss, ("logprobs", "entropy")) == expected
        assert other.train_batch(batch, weighted_loss, ("logprobs", "entropy")) == expected
    other.load_checkpoint(tmp_path / "step_0")
    assert not other.optimizer.state


def test_a_save_that_fails_at_its_end_is_reported(tiny_dir, tmp_path):
    engine = make_resumable(tiny_dir)
    engine.save_checkpoint(tmp_path / "step_1", {"step": 1})
    (tmp_path / "step_1.old").write_text("")  # a file: rmtree ignores it, and no directory can be renamed to it
    with pytest.raises(
        checkpoint.CheckpointNotWritten, match="step_1: expected room for .* complete checkpoint is step_1"
    ):
        engine.save_checkpoint(tmp_path / "step_1", {"step": 2})
    assert engine.load_checkpoint(tmp_path / "step_1") == {"step": 1}


def test_checkpoint_that_is_cut_short_names_the_file(tiny_dir, tmp_path):
    engine = make_resumable(tiny_dir)
    engine.save_checkpoint(tmp_path / "step_1", {})
    shard = next(tmp_path.glob("step_1/*.distcp"))
    contents = shard.read_bytes()
    size, half = len(contents), len(contents) // 2
    shard.write_bytes(contents[:half])
    with pytest.raises(ValueError, match=rf"step_1: expected {size} bytes in {shard.name}, got {half} bytes"):
        engine.load_checkpoint(tmp_path / "step_1")
    shard.unlink()
    with pytest.raises(ValueError, match=f"step_1: expected {size} bytes in {shard.name}, got no file"):
        engine.load_checkpoint(tmp_path / "step_1")
    (tmp_path / "step_1" / "manifest.json").write_text('{"files": {')
    with pytest.raises(ValueError, match="step_1: expected JSON in manifest.json, got a damaged file"):
        engine.load_checkpoint(tmp_path / "step_1")
    with pytest.raises(ValueError, match="step_9: expected manifest.json, got none"):
        engine.load_checkpoint(tmp_path / "step_9")


def test_checkpoint_of_another_model(tiny_dir, tmp_path):
    make_resumable(tiny_dir).save_checkpoint(tmp_path / "step_1", {})
    other = load_model(tiny_dir)
    other.resize_token_embeddings(500)
    with pytest.raises(ValueError, match="step_1: expected the state of this model and optimizer"):
        make_resumable(tiny_dir, model=other).load_checkpoint(tmp_path / "step_1")


def test_loading_holds_one_tensor_of_the_files_at_a_time(tiny_dir, tmp_path, monkeypatch):
    make_resumable(tiny_dir).save_checkpoint(tmp_path / "step_1")
    engine, load, loaded, alive = make_resumable(tiny_dir), torch.load, [], []

    def counting_load(*args, **options):
        alive.append(sum(ref() is not None for ref in loaded))
        x = load(*args, **options)
        if isinstance(x, torch.Tensor):  # otherwise a number of the optimizer
            loaded.append(weakref.ref(x))
        return x

    monkeypatch.setattr(torch, "load", counting_load)
    engine.load_checkpoint(tmp_path / "step_1")
    assert len(loaded) > 20 and not any(alive)


def test_manifest_lists_all_files(tiny_dir, tmp_path):
    engine = make_resumable(tiny_dir)
    engine.save_checkpoint(tmp_path / "step_1", {"step": 1})
    manifest = json.loads((tmp_path / "step_1" / "manifest.json").read_text())
    assert manifest["extra"]["extra"] == {"step": 1}
    assert set(manifest["files"]) == {p.name for p in (tmp_path / "step_1").iterdir()} - {"manifest.json"}


@pytest.mark.parametrize("then", ["load", "save"])
def test_a_save_killed_between_its_two_renames_is_undone(tiny_dir, tmp_path, then):
    """The old checkpoint was renamed already, the new one not yet."""
    engine = make_resumable(tiny_dir)
    engine.save_checkpoint(tmp_path / "step_1", {"step": 1})
    (tmp_path / "step_1").rename(tmp_path / "step_1.old")
    if then == "save":
        with pytest.raises(FileNotFoundError):  # there is no new checkpoint, and the old one is kept
            checkpoint.replace_directory(tmp_path / "step_1.part", tmp_path / "step_1")
    assert engine.load_checkpoint(tmp_path / "step_1") == {"step": 1}


def test_a_checkpoint_with_more_trained_parameters(tiny_dir, tmp_path):
    """It is refused: the parameters that are frozen now would keep their initial values."""
    make_resumable(tiny_dir).save_checkpoint(tmp_path / "step_1", {})
    model = load_model(tiny_dir)
    freeze(model, vision_tower_pattern(model))
    expected = r"step_1: expected only parameters that .* trains, got \d+ others such as model.visual"
    with pytest.raises(ValueError, match=expected):
        make_resumable(tiny_dir, model=model).load_checkpoint(tmp_path / "step_1")


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("frozen_at_the_load", [False, True])
def test_weights_that_were_trained_before_they_were_frozen(tiny_dir, processor, tmp_path, frozen_at_the_load, backend):
    engine, other = (make_resumable(tiny_dir, backend=backend) for _ in range(2))
    engine.train_batch(make_batch(processor), weighted_loss, ("logprobs", "entropy"))
    freeze(engine.module, "visual")
    engine.save_checkpoint(tmp_path / "step_1")
    assert not any(p.requires_grad for name, p in engine.module.named_parameters() if "visual" in name)
    if frozen_at_the_load:
        freeze(other.module, "visual")
    other.load_checkpoint(tmp_path / "step_1")
    trained = dict(engine.get_per_tensor_param())
    assert all(torch.equal(x, trained[name]) for name, x in other.get_per_tensor_param())


def test_parameters_that_were_added_to_the_optimizer(tiny_dir, processor, tmp_path):
    """A resumed run adds them before it loads the checkpoint."""

    def partly_frozen():
        model = load_model(tiny_dir)
        freeze(model, "visual")
        return make_resumable(tiny_dir, model=model, scheduler=lambda optimizer: RunSchedule(optimizer, halved))

    def add_the_tower(engine):
        tower = [p for p in engine.module.parameters() if not p.requires_grad]
        engine.module.requires_grad_(True)
        engine.optimizer.add_param_group({"params": tower, "lr": 1e-3})

    batch, outputs = make_batch(processor), ("logprobs", "entropy")
    engine, resumed = partly_frozen(), partly_frozen()
    engine.train_batch(batch, weighted_loss, outputs)
    add_the_tower(engine)
    engine.train_batch(batch, weighted_loss, outputs)
    engine.save_checkpoint(tmp_path / "step_2")
    with pytest.raises(ValueError, match="expected only parameters that this model trains, got 30 others such as"):
        partly_frozen().load_checkpoint(tmp_path / "step_2")
    add_the_tower(resumed)
    resumed.load_checkpoint(tmp_path / "step_2")
    assert [group["lr"] for group in resumed.optimizer.param_groups] == [1e-2 / 4, 1e-3 / 4]
    expected = engine.train_batch(batch, weighted_loss, outputs)
    assert resumed.train_batch(batch, weighted_loss, outputs) == expected
    trained = dict(engine.get_per_tensor_param())
    assert all(torch.equal(x, trained[name]) for name, x in resumed.get_per_tensor_param())


def test_weights_of_an_engine_without_an_optimizer(tiny_dir, tmp_path):
    """A reference that follows the policy."""
    engine, other = (make_engine("fsdp2", model=load_model(tiny_dir).requires_grad_(False)) for _ in range(2))
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(0.5)
    engine.save_checkpoint(tmp_path / "step_1", {"step": 1})
    assert other.load_checkpoint(tmp_path / "step_1") == {"step": 1}
    moved = dict(engine.get_per_tensor_param())
    assert all(torch.equal(x, moved[name]) for name, x in other.get_per_tensor_param())


def test_keep_newest_removes_old_checkpoints(tiny_dir, tmp_path):
    """By number, not by name; other directories stay."""
    make_resumable(tiny_dir)  # a process group
    for name in ("step_9", "step_10", "step_2", "step_11.part", "step_x", "else"):
        (tmp_path / name).mkdir()
    checkpoint.keep_newest(tmp_path, 2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step_9", "step_10"]
    assert {path.name for path in tmp_path.iterdir()} == {"step_9", "step_10", "step_11.part", "step_x", "else"}
    checkpoint.keep_newest(tmp_path, 0)  # keeps all
    assert len(checkpoint.checkpoints(tmp_path)) == 2
