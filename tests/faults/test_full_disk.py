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
# in a mount namespace of its own: a file system of 4 MB at DISK
MOUNT = 'mkdir -p $DISK && mount -t tmpfs -o size=4m tmpfs $DISK && exec $PYTHON -c "$PROGRAM"'
SHARED = """
import os, shutil, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from rlkit.engines import checkpoint
from rlkit.engines.distributed import init_distributed
from rlkit.runs.directory import claim_directory, release_directory
from rlkit.runs import checkpoints
from rlkit.tracking import Run, read_metrics
disk = Path(os.environ["DISK"])
def fill(left):
    free = shutil.disk_usage(disk).free - left
    with (disk / "other").open("ab") as file:
        file.write(bytes(max(0, free)))
"""


def on_a_small_disk(tmp_path, program):
    """What a program prints whose DISK has 4 MB; the machine must allow a mount namespace."""
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([unshare, "-rm", "mount", "-t", "tmpfs", "tmpfs", tmp_path]).returncode:
        pytest.skip("no file system can be mounted here")
    facts = {"DISK": str(tmp_path / "disk"), "PYTHON": sys.executable, "PROGRAM": SHARED + program}
    env = {**os.environ, **facts, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([unshare, "-rm", "sh", "-c", MOUNT], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_full_directory_is_found_before_anything_is_loaded(tmp_path):
    said = on_a_small_disk(tmp_path, """
fill(0)
for name in ("run", ""):
    try:
        print("claimed", claim_directory(str(disk / name), "x", resume=False))
    except ValueError as error:
        print(error)
""")  # fmt: skip
    assert "claimed" not in said and said.count("No space left on device") == 2, said
    assert f"out '{tmp_path}/disk/run': expected a directory that can be written to" in said


def test_a_read_only_directory_is_found_before_anything_is_loaded(tmp_path):
    said = on_a_small_disk(tmp_path, """
release_directory(claim_directory(str(disk / "run"), "x", resume=False))
os.system(f"mount -o remount,ro {disk}")
for name in ("run", "other", ""):
    try:
        print("claimed", claim_directory(str(disk / name), "x", resume=True))
    except ValueError as error:
        print(error)
""")  # fmt: skip
    assert "claimed" not in said and said.count("expected a directory that can be written to") == 3, said


@pytest.mark.parametrize("wait", [True, False])
def test_a_save_that_finds_no_room(wait, tmp_path):
    said = on_a_small_disk(tmp_path, f"""
init_distributed()
state = {{"model": {{"w": torch.ones(250_000)}}}}
checkpoint.save(disk / "checkpoints" / "step_1", state, {{"step": 1}})
fill(300_000)
state["model"]["w"].fill_(2)
try:
    checkpoint.save(disk / "checkpoints" / "step_2", state, {{"step": 2}}, wait={wait})
    checkpoint.finish()
except OSError as error:
    print("message:", error)
print("left:", sorted(p.name for p in (disk / "checkpoints").iterdir()))
print("extra:", checkpoint.read_manifest(disk / "checkpoints" / "step_1"))
checkpoint.load(disk / "checkpoints" / "step_1", state)
print("loaded:", float(state["model"]["w"].mean()))
(disk / "other").unlink()
checkpoint.save(disk / "checkpoints" / "step_2", state, {{"step": 2}}, wait={wait})
print("later:", checkpoint.read_manifest(disk / "checkpoints" / "step_2"))
""")  # fmt: skip
    assert f"message: checkpoint {tmp_path}/disk/checkpoints/step_2: expected room for 1000000 bytes" in said, said
    assert "bytes free" in said and "the last complete checkpoint is step_1" in said
    assert "left: ['step_1']" in said and "extra: {'step': 1}" in said and "loaded: 1.0" in said
    assert "later: {'step': 2}" in said


def test_a_run_whose_disk_fills_ends_with_one_sentence(tmp_path):
    said = on_a_small_disk(tmp_path, """
init_distributed()
cfg = SimpleNamespace(save_every=1, steps=9, max_skipped_steps=10)
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
""")  # fmt: skip
    assert f"save: the-run: checkpoint {tmp_path}/disk/run/checkpoints/step_2: expected room for" in said, said
    assert f"log: the-run: {tmp_path}/disk/run/metrics.jsonl: expected room for 10" in said
    assert "rows: [0]" in said and "extra: {'step': 1}" in said


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
