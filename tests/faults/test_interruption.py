"""Ctrl-C, SIGTERM and the loss of a rank: a step in progress is saved, and one sentence says how to continue."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from waiting import until

from rlkit.engines import checkpoint
from rlkit.runs import RunOptions, out_of_memory, resume, run_recipe, save, start_run
from rlkit.tracking import PHASES, Run, read_metrics, watchdog

GLOO = "[/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:1"


@dataclass
class Config(RunOptions):
    steps: int = 4
    """Steps."""
    save_every: int = 100
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """Checkpoints that are kept."""
    max_skipped_steps: int = 0
    """Steps that may be skipped."""


class Engine:
    """One weight, which counts the steps."""

    weight = torch.zeros(1)

    def save_checkpoint(self, path, extra):
        checkpoint.save(path, {"model": {"w": self.weight}}, extra)

    def load_checkpoint(self, path):
        extra = checkpoint.read_manifest(path)
        checkpoint.load(path, {"model": {"w": self.weight}})
        return extra


@pytest.fixture
def end(tmp_path, monkeypatch, capfd):
    """Runs a recipe in which something happens at some place, and returns its exit code and what it printed."""

    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)  # other tests of this process need it

    def run(place="", happens=None, *options):
        def at(here):
            if here == place:
                happens()
            elif place and here == "end":
                pytest.fail(f"{place}: expected the end of the run there")

        def main(cfg: Config):
            run, engine = start_run(cfg, "task"), Engine()
            at("set-up")
            start = resume(cfg, run, checkpoints=engine)["step"]
            for step in run.steps(start, cfg.steps):
                at(f"step {step}")
                engine.weight += 1
                run.log(step, {"w": engine.weight.item()})
                save(cfg, run, step, checkpoints=engine)
            at("evaluation")
            run.close()
            at("end")

        monkeypatch.setattr(sys, "argv", ["recipe", "--out", str(tmp_path / "run"), *options])
        Engine.weight = torch.zeros(1)
        code = 0
        try:
            run_recipe(main)
        except SystemExit as error:
            code = error.code
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        return code, "".join(capfd.readouterr())

    return run


def sends(*numbers):
    return lambda: [os.kill(os.getpid(), number) for number in numbers]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_step_is_finished_and_saved_and_the_run_goes_on_from_there(end, tmp_path, number, code):
    ended, said = end("step 1", sends(number))
    saved = tmp_path / "run" / "checkpoints" / "step_2"
    assert ended == code and f"{number.name}: the run ends after this step, with a checkpoint" in said
    hint = f"the newest checkpoint is {saved}; to continue, add --out {tmp_path / 'run'} --resume to the command"
    assert f"ended by {number.name}; {hint}\n" in said and "Traceback" not in said
    assert end("", None, "--resume")[0] == 0
    assert [(row["step"], row["w"]) for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [
        (0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0),
    ]  # fmt: skip


def test_a_model_of_fewer_steps_is_named(end, tmp_path):
    """A finished run has its model; it was trained for longer, and then interrupted."""
    assert end("", None, "--steps", "2")[0] == 0
    out = tmp_path / "run"
    (out / "model").mkdir()
    (out / "eval.json").write_text('{"accuracy_after": 0.5, "steps": 2}')
    _, said = end("step 2", sends(signal.SIGTERM), "--resume", "--allow_changes", "steps")
    checkpoint_and_model = f"the newest checkpoint is {out}/checkpoints/step_3; {out}/model is still that of step 2; to"
    assert checkpoint_and_model in said


def test_a_scheduler_may_say_it_twice(end, tmp_path):
    """As Slurm does: to torchrun, which passes it on, and to each process."""
    assert end("step 1", sends(signal.SIGTERM, signal.SIGTERM))[0] == 0
    assert (tmp_path / "run" / "checkpoints" / "step_2").exists()


def test_a_second_ctrl_c_ends_it_at_once(end, tmp_path):
    ended, said = end("step 1", sends(signal.SIGINT, signal.SIGINT))
    assert ended == 130 and "ended by SIGINT; no step was saved" in said and "Traceback" not in said
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_outside_the_steps_one_signal_ends_it_at_once(end, tmp_path):
    ended, said = end("set-up", sends(signal.SIGTERM))
    assert ended == 0 and "ended by SIGTERM; no step was saved" in said
    ended, said = end("evaluation", sends(signal.SIGINT))
    assert ended == 130 and f"the newest checkpoint is {tmp_path / 'run' / 'checkpoints' / 'step_4'}; to cont" in said


def raises(error, *numbers):
    def happens():
        sends(*numbers)()
        raise error

    return happens


def test_an_out_of_memory_error_says_where_and_what_to_do(end):
    with pytest.raises(torch.OutOfMemoryError) as error:
        end("step 1", raises(torch.OutOfMemoryError("Tried to allocate 2.00 GiB")))
    (note,) = error.value.__notes__
    assert "task-seed0: rank 0 ran out of memory in the phase set_up. `python -m rlkit.plan`, with the recipe" in note


@pytest.mark.parametrize("options", [["--memory_snapshot"], []])
def test_an_out_of_memory_error_leaves_a_snapshot_of_what_was_recorded(end, tmp_path, monkeypatch, options):
    """torch's recorder for GPUs is a stand-in here."""
    calls = []
    memory = SimpleNamespace(
        _record_memory_history=lambda max_entries: calls.append(("record", max_entries > 1000)),
        _dump_snapshot=lambda path: calls.append(("write", path)),
    )
    cuda = SimpleNamespace(is_available=lambda: True, memory=memory)
    stand_in = SimpleNamespace(cuda=cuda, OutOfMemoryError=torch.OutOfMemoryError)
    monkeypatch.setattr(out_of_memory, "torch", stand_in)
    with pytest.raises(torch.OutOfMemoryError) as error:
        end("step 1", raises(torch.OutOfMemoryError("Tried to allocate 2.00 GiB")), *options)
    file = str(tmp_path / "run" / "memory-rank-0.pickle")
    assert calls == ([("record", True), ("write", file)] if options else [])
    shown = [f"{file} shows all allocations; open it at https://docs.pytorch.org/memory_viz"]
    assert error.value.__notes__[1:] == (shown if options else [])


def test_a_rank_that_is_lost_is_one_sentence(end):
    ended, said = end("step 0", raises(RuntimeError(GLOO)))
    assert "rank 0 has lost another rank, which ended, or was killed, or cannot be reached any more; no step" in ended
    assert ended.endswith(f"on any number of ranks ({GLOO})")
    ended, said = end("step 0", raises(RuntimeError(GLOO), signal.SIGTERM))  # the other one was told to end, too
    assert ended == 0 and f"ended by SIGTERM in the middle of a step ({GLOO}); no step was saved" in said


def test_any_other_error_keeps_its_traceback(end):
    with pytest.raises(RuntimeError, match="out of memory"):
        end("step 1", raises(RuntimeError("out of memory")))


def test_a_checkpoint_that_cannot_be_written_is_said_and_is_no_success(end, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_complete", full)
    ended, _ = end("step 1", sends(signal.SIGTERM))
    assert "expected room for 4 bytes, got " in ended and "No space left on device" in ended


def test_a_rank_that_does_not_respond_is_named(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(watchdog, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(watchdog, "SILENT_SECONDS", 0.4)
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = ""

    def waits_for(*words):
        nonlocal said
        deadline = time.time() + 100
        while not all(word in said for word in words):
            assert time.time() < deadline, said
            time.sleep(0.02)
            said += capfd.readouterr().err

    with subprocess.Popen(["sleep", "1000"]) as other, ExitStack() as stack:
        stack.callback(other.kill)
        file = tmp_path / PHASES / "1"
        file.parent.mkdir()
        run = Run(tmp_path, {}, watchdog=600)
        host = (file.with_name("0")).read_text().split()[2]
        other.send_signal(signal.SIGSTOP)
        until(lambda: watchdog._process_state(other.pid) == "T")
        file.write_text(f"{time.time()} {other.pid} {host} train")
        waits_for(f"watchdog: rank 1 (process {other.pid} on {host}, in train) was stopped ", f"-CONT {other.pid}, or")
        file.write_text(f"{time.time()} {other.pid} elsewhere train")  # it responds, and then no more
        waits_for(f"(process {other.pid} on elsewhere, in train) has not responded for ", "continue it with --resume")
    file.write_text(f"{time.time()} {other.pid} {host} reward")
    waits_for(f"rank 1 (process {other.pid} on {host}, in reward) has ended: end the run")
    time.sleep(0.6)
    assert (said + capfd.readouterr().err).count("watchdog: ") == 3  # each once
    run.close()
