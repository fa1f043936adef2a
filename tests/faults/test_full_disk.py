"""A directory that is read-only or full is found before the first step; when it fills later, what was saved stays."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlkit.runs.directory import claim_directory

ROOT = Path(__file__).parents[2]
# in a mount namespace of its own: a file system of 4 MB at DISK, emptied before each part of the program
MOUNT = 'mkdir -p $DISK && mount -t tmpfs -o size=4m tmpfs $DISK && exec $PYTHON -c "$PROGRAM"'
SHARED = """
import os, shutil, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from rlkit.engines import checkpoint
from rlkit.engines.distributed import init_distributed
from rlkit.engines.export import export_adapter
from rlkit.runs.directory import claim_directory, release_directory
from rlkit.runs import checkpoints
from rlkit.tracking import Run, read_metrics
disk = Path(os.environ["DISK"])
def fill(left):
    free = shutil.disk_usage(disk).free - left
    with (disk / "other").open("ab") as file:
        file.write(bytes(max(0, free)))
init_distributed()
"""
FULL = """
fill(0)
for name in ("run", ""):
    try:
        print("claimed", claim_directory(str(disk / name), "x", resume=False))
    except ValueError as error:
        print(error)
"""
SAVE = """
state = {"model": {"w": torch.ones(250_000)}}
checkpoint.save(disk / "checkpoints" / "step_1", state, {"step": 1})
fill(300_000)
state["model"]["w"].fill_(2)
try:
    checkpoint.save(disk / "checkpoints" / "step_2", state, {"step": 2})
except OSError as error:
    print("message:", error)
print("left:", sorted(p.name for p in (disk / "checkpoints").iterdir()))
print("extra:", checkpoint.read_manifest(disk / "checkpoints" / "step_1"))
checkpoint.load(disk / "checkpoints" / "step_1", state)
print("loaded:", float(state["model"]["w"].mean()))
(disk / "other").unlink()
checkpoint.save(disk / "checkpoints" / "step_2", state, {"step": 2})
print("later:", checkpoint.read_manifest(disk / "checkpoints" / "step_2"))
"""
RUN = """
cfg = SimpleNamespace(save_every=1, keep_checkpoints=2, steps=9, max_skipped_steps=10)
class Engine:
    state = {"w": torch.ones(250_000)}
    def save_checkpoint(self, path, extra):
        checkpoint.save(path, self.state, extra)
run = Run(disk / "run", {}, name="the-run", watchdog=100.0)
run.log(0, {"loss": 1.0})
checkpoints.save(cfg, run, 0, checkpoints=Engine())
fill(300_000)
try:
    checkpoints.save(cfg, run, 1, checkpoints=Engine())
except SystemExit as stopped:
    print("save:", stopped)
fill(0)
try:
    for step in range(1, 999):
        run.log(step, {"text": "x" * 1000})
except SystemExit as stopped:
    print("log:", stopped)
print("rows:", [row["step"] for row in read_metrics(disk / "run" / "metrics.jsonl")][:1])
(disk / "other").unlink()
print("extra:", checkpoint.read_manifest(disk / "run" / "checkpoints" / "step_1"))
"""
EXPORT = """
gathered = []
def weights():
    for i in range(4):
        gathered.append(i)
        yield f"w{i}", torch.full((50_000,), float(value))
config = SimpleNamespace(save_pretrained=lambda path: (path / "config").write_text("{}"))
class Engine:
    def export_hf(self, path, dtype):
        export_adapter(path, config, weights())
checkpoint.save(disk / "run" / "checkpoints" / "step_9", {"w": torch.ones(100)}, {"step": 9})
run, value = Run(disk / "run", {}, name="the-run"), 1
cfg = SimpleNamespace(steps=9, export_dtype="float32", trust_remote_code=False)
checkpoints.finish(cfg, run, [], model=Engine())
for left in (300_000, 0):
    value, gathered = 2, []
    fill(left)
    try:
        checkpoints.finish(cfg, run, [], model=Engine())
    except SystemExit as stopped:
        print("finish:", stopped, gathered)
print("left:", sorted(p.name for p in (disk / "run").iterdir() if p.is_dir()))
print("extra:", checkpoint.read_manifest(disk / "run" / "checkpoints" / "step_9"))
from safetensors.torch import load_file
print("loaded:", load_file(disk / "run" / "model" / "adapter_model.safetensors")["w3"].mean())
"""
ROLLOUTS = """
from rlkit.replay.bundles import Bundle, Update, write_bundle
update = Update("checkpoints", {"mask": torch.ones(250_000)}, {})
fill(300_000)
try:
    write_bundle(disk / "step_0", Bundle(0, updates=[update]))
except OSError as error:
    print("rollouts:", error.errno, error)
"""
READ_ONLY = """
release_directory(claim_directory(str(disk / "run"), "x", resume=False))
os.system(f"mount -o remount,ro {disk}")
for name in ("run", "other", ""):
    try:
        print("claimed", claim_directory(str(disk / name), "x", resume=True))
    except ValueError as error:
        print(error)
"""
PARTS = {"full": FULL, "save": SAVE, "run": RUN, "export": EXPORT, "rollouts": ROLLOUTS}
PARTS |= {"read-only": READ_ONLY}  # nothing can be removed after this
EMPTY = """
for path in disk.iterdir():
    shutil.rmtree(path) if path.is_dir() else path.unlink()
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each part of a program prints whose DISK has 4 MB; and DISK. The machine must allow a mount namespace."""
    folder = tmp_path_factory.mktemp("small")
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([unshare, "-rm", "mount", "-t", "tmpfs", "tmpfs", folder]).returncode:
        pytest.skip("no file system can be mounted here")
    program = SHARED + "".join(f"{EMPTY}print('## {name}')\n{part}" for name, part in PARTS.items())
    facts = {"DISK": str(folder / "disk"), "PYTHON": sys.executable, "PROGRAM": program}
    env = {**os.environ, **facts}
    done = subprocess.run([unshare, "-rm", "sh", "-c", MOUNT], env=env, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    parts = dict(part.split("\n", 1) for part in done.stdout.split("## ")[1:])
    return {**parts, "disk": folder / "disk"}


def test_a_full_directory_is_found_before_anything_is_loaded(said):
    found = said["full"]
    assert "claimed" not in found and found.count("No space left on device") == 2, found
    assert f"out '{said['disk']}/run': expected a directory that can be written to" in found


def test_a_read_only_directory_is_found_before_anything_is_loaded(said):
    found = said["read-only"]
    assert "claimed" not in found and found.count("expected a directory that can be written to") == 3, found


def test_a_save_that_finds_no_room(said):
    found = said["save"]
    assert f"message: checkpoint {said['disk']}/checkpoints/step_2: expected room for 1000000 bytes" in found, found
    assert "bytes free" in found and "the last complete checkpoint is step_1" in found
    assert "left: ['step_1']" in found and "extra: {'step': 1}" in found and "loaded: 1.0" in found
    assert "later: {'step': 2}" in found


def test_a_run_whose_disk_fills_ends_with_one_sentence(said):
    found = said["run"]
    assert f"save: the-run: checkpoint {said['disk']}/run/checkpoints/step_2: expected room for" in found, found
    assert f"log: the-run: {said['disk']}/run/metrics.jsonl: expected room for 10" in found
    assert "rows: [0]" in found and "extra: {'step': 1}" in found


def test_an_export_that_finds_no_room_leaves_checkpoints_and_the_export_before(said):
    """In the weights, whose writer is in Rust, and before them; all weights are gathered, as other ranks do."""
    found, out = said["export"], f"{said['disk']}/run"
    assert found.count(f"finish: the-run: {out}/model: expected room for about 800000 bytes, got ") == 2, found
    assert found.count("No space left on device") == 2 and found.count(" bytes free: ") == 2
    assert found.count(f"make room, and add --out {out} --resume to export again [0, 1, 2, 3]\n") == 2
    assert "left: ['checkpoints', 'model']" in found and "extra: {'step': 9}" in found
    assert "loaded: tensor(1.)" in found


def test_the_probe_is_what_finds_it(tmp_path, monkeypatch):
    """Where no file system can be mounted: a directory that takes names and no contents."""

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="expected a directory that can be written to, got: .*No space left"):
        claim_directory(str(tmp_path / "run"), "x", resume=False)
    monkeypatch.undo()
    assert claim_directory(str(tmp_path / "run"), "x", resume=False) == tmp_path / "run"
    assert not [path for path in (tmp_path / "run").iterdir() if "probe" in path.name]


def test_a_bundle_that_does_not_fit_is_an_error_of_the_disk(said):
    assert f"rollouts: {errno.ENOSPC} " in said["rollouts"] and "No space left on device" in said["rollouts"]
    assert f"{said['disk']}/step_0/rank_0.part" in said["rollouts"]
