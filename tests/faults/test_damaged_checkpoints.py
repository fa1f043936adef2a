"""A newest checkpoint that is damaged: the run says so and continues from the one before."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlkit.engines import checkpoint
from rlkit.engines.distributed import init_distributed
from rlkit.runs import checkpoints
from rlkit.tracking import Run


class Saved:
    """What an engine does with its checkpoints, on a state of two tensors."""

    def __init__(self):
        init_distributed()
        self.state = {"model": {"w": torch.zeros(64)}, "optimizer": {"m": torch.zeros(8)}}

    def save_checkpoint(self, path, extra):
        self.state["model"]["w"].fill_(extra["step"])
        checkpoint.save(path, self.state, {"scheduler": None, "extra": extra})

    def load_checkpoint(self, path):
        saved = checkpoint.read_manifest(path)
        checkpoint.load(path, self.state)
        return saved["extra"]


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def emptied(file):
    file.write_bytes(b"")


def turned(place):
    def turn(file):
        content = bytearray(file.read_bytes())
        content[int(place * (len(content) - 1))] ^= 1
        file.write_bytes(content)

    return turn


def gone(file):
    file.unlink()


def a_folder(file):
    file.unlink()
    file.mkdir()


DAMAGES = {"cut": cut, "emptied": emptied, "first byte": turned(0), "a byte": turned(0.6), "last byte": turned(1)}
DAMAGES |= {"gone": gone, "a folder": a_folder}
FILES = ["manifest.json", ".metadata", "__0_0.distcp"]
RESUME = SimpleNamespace(resume=True, save_every=1, keep_checkpoints=2, steps=9, max_skipped_steps=10)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path, {})


def save(run, step, **engines):
    checkpoints.save(RESUME, run, step - 1, **engines)


def test_the_last_step_is_saved_when_training_ends_early(run):
    """As with --patience, or when DAPO finds no group with different rewards."""
    saved = []
    init_distributed()
    engine = SimpleNamespace(save_checkpoint=lambda path, extra: saved.append((path.name, extra)))
    cfg = SimpleNamespace(steps=100, save_every=2, keep_checkpoints=2, max_skipped_steps=0)
    for step in range(3):
        checkpoints.save(cfg, run, step, {"draws": 10 * step}, checkpoints=engine)
    assert saved == [("step_2", {"step": 2, "draws": 10})]
    checkpoints.finish(cfg, run, [])
    assert saved[1:] == [("step_3", {"step": 3, "draws": 20})]
    checkpoints.finish(cfg, run, [])
    assert len(saved) == 2


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_one_before_is_used(damage, file, run, capsys):
    engine = Saved()
    for step in (1, 2):
        save(run, step, checkpoints=engine)
    newest = run.out / "checkpoints" / "step_2"
    assert {path.name for path in newest.iterdir()} == set(FILES)
    DAMAGES[damage](newest / file)
    other = Saved()
    assert checkpoints.resume(RESUME, run, checkpoints=other) == {"step": 1}
    assert other.state["model"]["w"].eq(1).all()
    said = capsys.readouterr().out
    assert f"resume: checkpoint {newest}: expected " in said and f"continuing {run.out} at step 1" in said
    assert file in said
    assert {path.name for path in newest.parent.iterdir()} == {"step_1", "step_2.damaged"}
    save(run, 2, checkpoints=other)
    assert checkpoints.resume(RESUME, run, checkpoints=Saved()) == {"step": 2}


def test_every_byte_of_a_manifest_counts(run):
    """The step that it holds, say, could else be another one."""
    engine = Saved()
    save(run, 1, checkpoints=engine)
    manifest = run.out / "checkpoints" / "step_1" / "manifest.json"
    content = manifest.read_bytes()
    for i in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[i] ^= 1
        manifest.write_bytes(damaged)
        try:  # white space may turn into other white space
            assert checkpoint.read_manifest(manifest.parent)["extra"] == {"step": 1}
            assert chr(content[i]).isspace()
        except checkpoint.DamagedCheckpoint:
            pass


@pytest.mark.parametrize("damaged", ["checkpoints", "critic"])
def test_all_engines_go_back_together(damaged, run, capsys):
    engines = {"checkpoints": Saved(), "critic": Saved()}
    for step in (1, 2):
        save(run, step, **engines)
    turned(0.5)(run.out / damaged / "step_2" / "__0_0.distcp")
    others = {"checkpoints": Saved(), "critic": Saved()}
    assert checkpoints.resume(RESUME, run, **others) == {"step": 1}
    assert all(engine.state["model"]["w"].eq(1).all() for engine in others.values())
    assert f"{run.out / damaged / 'step_2'}: expected " in capsys.readouterr().out
    assert not any((run.out / folder / "step_2").exists() for folder in engines)


def test_where_all_are_damaged_the_run_does_not_begin_anew(run):
    for step in (1, 2):
        save(run, step, checkpoints=Saved())
        turned(0.5)(run.out / "checkpoints" / f"step_{step}" / ".metadata")
    with pytest.raises(ValueError, match=r"resume: expected an intact checkpoint in .*, got 2 damaged ones.*step_2"):
        checkpoints.resume(RESUME, run, checkpoints=Saved())
    names = {path.name for path in (run.out / "checkpoints").iterdir()}
    assert names == {"step_1", "step_2"}


def test_a_checkpoint_of_another_model_is_no_damaged_one(run):
    """Going back would hide a mistake in the options."""
    for step in (1, 2):
        save(run, step, checkpoints=Saved())
    other = Saved()
    other.state["model"]["w"] = torch.zeros(65)
    with pytest.raises(ValueError, match="expected the state of this model and optimizer"):
        checkpoints.resume(RESUME, run, checkpoints=other)
    assert not list((run.out / "checkpoints").glob("*.damaged"))


def test_the_checksums_are_in_the_manifest(run):
    save(run, 1, checkpoints=Saved())
    manifest = json.loads((run.out / "checkpoints" / "step_1" / "manifest.json").read_text())
    assert manifest["files"].keys() == manifest["checksums"].keys() == set(FILES) - {"manifest.json"}


TWO_RANKS = """
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
import torch
import torch.distributed as dist
from forked_ranks import fork_ranks
from rlkit.engines import checkpoint
from rlkit.engines.distributed import init_distributed
from rlkit.runs import checkpoints
from rlkit.tracking import Run
class Engine:
    def save_checkpoint(self, path, extra):
        own = {f"rng.{dist.get_rank()}": torch.full((99,), float(extra["step"]))}
        checkpoint.save(path, {"model": {"w": torch.full((99,), float(extra["step"]))}, **own}, extra)
    def load_checkpoint(self, path):
        return checkpoint.read_manifest(path)
def fail(*paths, **options):
    raise OSError("read-only")
def expect_error(kind, function, *args, **options):
    try:
        function(*args, **options)
    except (OSError, SystemExit) as error:
        print(f"rank {dist.get_rank()} {kind} {type(error).__name__} {error}", flush=True)
def on_rank():
    init_distributed()
    run = Run(sys.argv[1], {}, is_main_process=dist.get_rank() == 0)
    cfg = SimpleNamespace(resume=True, save_every=1, keep_checkpoints=2, steps=9, max_skipped_steps=0)
    for step in range(4):
        checkpoints.save(cfg, run, step, checkpoints=Engine())
    for name in ["__0_0.distcp", "__1_0.distcp", ".metadata"]:
        dist.barrier()
        file = run.out / "checkpoints" / "step_4" / name
        if run.is_main_process:
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        dist.barrier()
        print(f"rank {dist.get_rank()} {name} resumed {checkpoints.resume(cfg, run, checkpoints=Engine())}", flush=True)
        checkpoints.save(cfg, run, 3, checkpoints=Engine())
    folder, remove, rename = run.out / "checkpoints", shutil.rmtree, Path.rename
    if run.is_main_process:
        shutil.rmtree = fail
    expect_error("not removed", checkpoint.keep_newest, folder, 1)
    shutil.rmtree = remove
    if run.is_main_process:
        (folder / "step_4" / "manifest.json").unlink()
        Path.rename = fail
    dist.barrier()
    expect_error("not set aside", checkpoints.resume, cfg, run, checkpoints=Engine())
    if run.is_main_process:
        rename(folder / "step_4", folder / "step_4.old")
    expect_error("not restored", checkpoint.read_manifest, folder / "step_4")
    Path.rename = rename
    disk = run.out.with_name(f"disk_{dist.get_rank()}")
    disk.mkdir()
    os.chdir(disk)
    run = Run("run", {}, is_main_process=dist.get_rank() == 0)
    expect_error("not shared", checkpoints.save, cfg, run, 0, checkpoints=Engine())
    print(f"rank {dist.get_rank()} left {[path.name for path in Path('run/checkpoints').iterdir()]}", flush=True)
    for rank in (1, 0):
        if dist.get_rank() == rank:
            Path("run/checkpoints/step_1").mkdir()
        dist.barrier()
        expect_error(f"step_1 of rank {rank}", lambda: print(checkpoints.resume(cfg, run, checkpoints=Engine())))
        if dist.get_rank() == rank:
            Path("run/checkpoints/step_1").rmdir()
    dist.destroy_process_group()
fork_ranks(on_rank, 2)
"""


def test_all_ranks_go_back_together(tmp_path):
    """Each rank reads a part of the files, and all learn what one of them finds."""
    env = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[1]}{os.pathsep}{os.environ['PYTHONPATH']}"}
    command = [sys.executable, "-c", TWO_RANKS, tmp_path / "run"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        for rank in (0, 1):
            assert f"rank {rank} {name} resumed {{'step': 3}}" in done.stdout, done.stdout
    folder = f"{tmp_path}/run/checkpoints"
    for rank in (0, 1):  # rank 1 does not wait for ever where rank 0 cannot rename or remove a directory
        assert f"rank {rank} not removed OSError checkpoints {folder}: expected to" in done.stdout, done.stdout
        assert f"rank {rank} not set aside SystemExit " in done.stdout, done.stdout
        assert f"rank {rank} not restored OSError checkpoint {folder}/step_4: expected to" in done.stdout, done.stdout
    assert done.stdout.count("got: read-only") == 6, done.stdout
    assert done.stdout.count("{'step': 0}") == 2, done.stdout  # a new run, also for rank 1, which has a checkpoint
    shared = "a file system that all machines share, got"
    for rank in (0, 1):  # as on two machines, each rank has its own disk
        expected = f"rank {rank} not shared SystemExit run: checkpoint run/checkpoints/step_1: expected it on "
        assert f"{expected}{shared} on rank 0: [Errno 2]" in done.stdout, done.stdout
        assert f"rank {rank} left []" in done.stdout, done.stdout
        expected = f"rank {rank} step_1 of rank 0 SystemExit run: resume: expected --out on {shared} one without run/"
        assert expected in done.stdout, done.stdout
