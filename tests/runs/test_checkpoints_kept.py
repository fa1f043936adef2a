"""Checkpoints that a run keeps: those of all its engines, until the last engine has saved a newer one."""

import json
from types import SimpleNamespace

import pytest

from rlkit.engines.checkpoint import checkpoints
from rlkit.engines.distributed import init_distributed
from rlkit.runs import resume, save


class Engine:
    def __init__(self, fails_at=None):
        self.fails_at = fails_at

    def save_checkpoint(self, path, extra):
        if extra["step"] == self.fails_at:
            raise OSError("no room")
        path.mkdir(parents=True)
        (path / "extra.json").write_text(json.dumps(extra))

    def load_checkpoint(self, path):
        return json.loads((path / "extra.json").read_text())


def run_in(out):
    def stop(message):
        raise SystemExit(message)

    return SimpleNamespace(
        out=out, phase=lambda name: None, first_mismatch=None, skipped_in_a_row=0, save_last_step=None, stop=stop,
        is_main_process=True, print=print,
    )  # fmt: skip


def kept(out, folder):
    return [path.name for path in checkpoints(out / folder)]


@pytest.mark.parametrize(("keep", "steps"), [(1, [3]), (2, [2, 3]), (0, [1, 2, 3])])
def test_the_newest_are_kept(tmp_path, keep, steps):
    init_distributed("cpu")
    cfg = SimpleNamespace(keep_checkpoints=keep, save_every=1, steps=9, max_skipped_steps=0)
    for step in range(3):
        save(cfg, run_in(tmp_path), step, checkpoints=Engine(), critic_checkpoints=Engine())
    assert kept(tmp_path, "checkpoints") == kept(tmp_path, "critic_checkpoints") == [f"step_{n}" for n in steps]


def test_a_save_that_fails_half_way_leaves_a_pair_to_resume_from(tmp_path):
    init_distributed("cpu")
    cfg = SimpleNamespace(keep_checkpoints=1, save_every=1, steps=9, max_skipped_steps=0)
    policy, critic, run = Engine(fails_at=2), Engine(), run_in(tmp_path)
    save(cfg, run, 0, checkpoints=policy, critic_checkpoints=critic)
    with pytest.raises(SystemExit, match="no room"):
        save(cfg, run, 1, checkpoints=policy, critic_checkpoints=critic)
    assert {*kept(tmp_path, "checkpoints")} & {*kept(tmp_path, "critic_checkpoints")} == {"step_1"}


@pytest.mark.parametrize("first", [[], [0]], ids=["at the first save", "at the second save"])
def test_checkpoints_of_lost_steps_are_removed(tmp_path, first):
    """The critic's was saved, and the policy's was not. The resumed run is then stopped one step before that step."""
    init_distributed("cpu")
    cfg = SimpleNamespace(keep_checkpoints=1, save_every=1, steps=9, max_skipped_steps=0, resume=True)
    engines = {"checkpoints": Engine(), "critic_checkpoints": Engine()}
    for step in first:
        save(cfg, run_in(tmp_path), step, **engines)
    engines["critic_checkpoints"].save_checkpoint(tmp_path / "critic_checkpoints" / "step_3", {"step": 3})
    assert resume(cfg, run_in(tmp_path), **engines)["step"] == len(first)
    save(cfg, run_in(tmp_path), 1, **engines)
    assert resume(cfg, run_in(tmp_path), **engines)["step"] == 2
    assert kept(tmp_path, "checkpoints") == kept(tmp_path, "critic_checkpoints") == ["step_2"]
