import io
import json
import re
import sys
import threading

import pytest

from rlkit.report import append_records
from rlkit.tracking import (
    CONFIG,
    EVAL,
    METRICS,
    SAMPLES,
    Run,
    peak_flops,
    rates,
    read_metrics,
)
from rlkit.tracking.status import progress_bar, show_phase
from rlkit.tracking.throughput import highest_of_all_ranks

# --- Run


def lines(run: Run) -> list[dict]:
    return [json.loads(line) for line in (run.out / METRICS).read_text().splitlines()]


def test_run_writes_config_and_metrics(tmp_path):
    run = Run(tmp_path / "a" / "b", {"lr": 0.1, "path": tmp_path})
    written = json.loads((run.out / CONFIG).read_text())
    assert written["lr"] == 0.1 and written["path"] == str(tmp_path) and written["versions"]["torch"]
    run.log(0, {"loss": 1.5})
    run.log(1, {"loss": float("nan")})
    assert lines(run)[0] == {"step": 0, "loss": 1.5} and lines(run)[1]["loss"] != lines(run)[1]["loss"]
    assert sorted(path.name for path in run.out.iterdir()) == [CONFIG, METRICS]  # no half-written files left


def test_the_options_of_each_start_are_kept(tmp_path):
    for seed in range(3):
        Run(tmp_path, {"seed": seed}).log(0, {})
        Run(tmp_path, {"seed": 9}, is_main_process=False)  # another rank
    seeds = {path.name: json.loads(path.read_text())["seed"] for path in tmp_path.glob("config*.json")}
    assert seeds == {"config-1.json": 0, "config-2.json": 1, CONFIG: 2}
    assert len(read_metrics(tmp_path / METRICS)) == 3  # and what was logged stays until `start_at`


def test_options_of_an_earlier_start_are_never_replaced(tmp_path):
    (tmp_path / "config-2.json").write_text("{}")  # config-1.json was removed by hand
    for seed in range(3):
        Run(tmp_path, {"seed": seed}).log(0, {})
    seeds = {path.name: json.loads(path.read_text()).get("seed") for path in tmp_path.glob("config*.json")}
    assert seeds == {"config-2.json": None, "config-1.json": 0, "config-3.json": 1, CONFIG: 2}


def test_start_at_drops_what_will_be_logged_again(tmp_path):
    run = Run(tmp_path, {})
    run.drop_metrics_from(0)
    assert lines(run) == []
    for step in range(6):
        run.log(step, {"loss": step})
    run = Run(tmp_path, {})
    run.drop_metrics_from(4)
    run.log(4, {"loss": 40})
    assert [(row["step"], row["loss"]) for row in lines(run)] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40)]


def test_last_line_cut_short_is_tolerated(tmp_path):
    run = Run(tmp_path, {})
    for step in range(3):
        run.log(step, {"loss": 0.25, "reward/mean": 1.0})
    path = tmp_path / METRICS
    whole = path.read_text()
    for cut in range(1, len(whole.splitlines()[-1]) + 1):  # killed after any byte
        path.write_text(whole[:-cut])
        assert [row["step"] for row in read_metrics(path)] in ([0, 1], [0, 1, 2])
    path.write_text(whole[:-9])
    run = Run(tmp_path, {})
    run.drop_metrics_from(2)
    run.log(2, {"loss": 0.5})
    assert [row["step"] for row in lines(run)] == [0, 1, 2]


def test_evaluation_merges(tmp_path):
    run = Run(tmp_path, {})
    assert run.log_evaluation(accuracy_before=0.1) == {"accuracy_before": 0.1}
    assert Run(tmp_path, {}).log_evaluation(accuracy_after=0.9, accuracy_before=0.2) == {
        "accuracy_before": 0.2, "accuracy_after": 0.9,
    }  # fmt: skip
    assert json.loads((tmp_path / EVAL).read_text()) == {"accuracy_before": 0.2, "accuracy_after": 0.9}


def test_only_the_writer_writes(tmp_path):
    out = tmp_path / "run"
    run = Run(out, {}, is_main_process=False)
    run.drop_metrics_from(0)
    run.log(0, {"loss": 1.0})
    assert run.log_evaluation(a=1) == {"a": 1} and not out.exists()
    Run(out, {}).log_evaluation(b=2)
    assert run.log_evaluation(a=1) == {"a": 1, "b": 2} and json.loads((out / EVAL).read_text()) == {"b": 2}


# --- the clock


def test_phases_are_timed(tmp_path, monkeypatch):
    clock = iter([0.0, 5.0, 7.0, 8.0, 8.5, 10.0, 10.0, 13.0])
    monkeypatch.setattr("rlkit.tracking.run.time.perf_counter", lambda: next(clock))
    run = Run(tmp_path, {})  # at 0
    run.phase("generate")  # at 5: setting up is no part of a step
    run.phase("train")  # at 7
    run.phase("generate")  # at 8
    run.phase("train")  # at 8.5
    run.log(0, {"tokens": 50, "flops": 10**9})  # at 10
    run.phase("checkpoint")
    run.log(1, {"tokens": 1})  # at 13
    first, second = lines(run)
    assert first == {
        "step": 0, "tokens": 50, "flops": 10**9, "time/generate": 2.5, "time/train": 2.5,
        "time/tokens_per_second": 10.0, "time/train_flops_per_second": 4e8,
    }  # fmt: skip
    assert second == {"step": 1, "tokens": 1, "time/train": 0.0, "time/checkpoint": 3.0}  # no token in no time


def test_flops_are_those_of_the_training_phase(tmp_path):
    """An evaluation with the same engine, after a step was logged, is no part of the next step's `flops`."""
    counted = iter([1, 2, 4, 8, 0, 32, 64])
    run = Run(tmp_path, {}, take_flops=lambda: float(next(counted)))
    run.phase("train")  # 1 of setting up
    run.phase("encode")
    run.phase("train")  # 4 of encoding
    run.log(0, {"tokens": 1})  # 2 + 8
    run.phase("evaluate")
    run.log(1, {})  # 32 of the evaluation
    run.log(2, {"tokens": 1})  # there is no phase "train"
    assert [line.get("flops") for line in lines(run)] == [10.0, 0.0, None]


def test_peak_memory_of_each_phase(tmp_path, monkeypatch):
    """Of a phase that comes twice the larger peak; without a GPU none is logged."""
    run = Run(tmp_path, {})
    run.phase("generate")
    run.log(0, {})
    assert not any(name.startswith("memory/") for name in read_metrics(tmp_path / "metrics.jsonl")[0])
    peaks = iter([3.0, 5.0, 2.0])  # of generate, train, generate
    monkeypatch.setattr("rlkit.tracking.run.gpu_peak", lambda _: next(peaks))
    for phase in ("train", "generate"):
        run.phase(phase)
    run.log(1, {})
    row = read_metrics(tmp_path / "metrics.jsonl")[1]
    assert row["memory/generate"] == 3.0 and row["memory/train"] == 5.0
    monkeypatch.setattr("rlkit.tracking.run.gpu_peak", lambda _: 1.5)
    run.phase("train")
    run.log(2, {})
    assert read_metrics(tmp_path / "metrics.jsonl")[2]["memory/train"] == 1.5


def test_peak_memory_is_the_highest_of_all_ranks(monkeypatch):
    def all_gather_object(of_ranks, values):
        of_ranks[:] = [values, {"memory/train": 5.0, "memory/generate": 1.0}]

    own = {"memory/train": 3.0, "memory/generate": 2.0, "memory/checkpoint": 1.0}
    assert highest_of_all_ranks(own) == own  # without a GPU
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_gather_object", all_gather_object)
    assert highest_of_all_ranks(own) == {**own, "memory/train": 5.0}


def test_rates():
    times = {"time/generate": 6.0, "time/train": 2.0, "time/evaluate": 50.0, "time/checkpoint": 9.0}
    assert rates({"tokens": 400, "flops": 3e12}, times, 4e12) == {
        "time/tokens_per_second": 50.0, "time/train_flops_per_second": 1.5e12, "time/mfu": 0.375,
    }  # fmt: skip
    assert "time/mfu" not in rates({"flops": 3e12}, times, None) and rates({}, times, 1e12) == {}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989.4e12), ("NVIDIA H20", 148e12), ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GH200 480GB", 989.4e12), ("NVIDIA L4", 121e12), ("NVIDIA L40S", 362e12), ("NVIDIA A10", 125e12),
        ("Tesla V100-SXM2-16GB", 125e12), ("NVIDIA GeForce RTX 4090", 165.2e12), ("AMD Instinct MI300X", 1307.4e12),
        ("NVIDIA RTX A4000", None), ("Tesla T4", None), ("cpu", None),
    ],
)  # fmt: skip
def test_peak_flops(name, peak):
    assert peak_flops(name) == peak


# --- trackers


@pytest.fixture
def listed(monkeypatch):
    """A tracker of one's own, registered with accelerate; what it was told. As wandb's does, it uses accelerate's log,
    which raises before accelerate has looked at its processes."""
    from accelerate import PartialState, tracking

    said = []
    monkeypatch.setattr(PartialState, "_shared_state", {})

    class Listed(tracking.GeneralTracker):
        name, requires_logging_directory, main_process_only = "listed", False, False

        def __init__(self, run_name):
            super().__init__()
            said.append(("made", run_name))

        tracker = property(lambda self: said)

        def start(self):
            tracking.logger.debug("started")

        def store_init_configuration(self, values):
            said.append(("config", values))

        def log(self, values, step=None, **_):
            said.append((step, values))

        def log_table(self, name, columns, data, step):
            said.append((step, name, columns, data))

        def finish(self):
            said.append("finished")

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "listed", Listed)
    return said


def tracked(out, trackers):
    run = Run(out, {"lr": 0.1, "servers": ("a",), "critic": None}, trackers=trackers)
    run.drop_metrics_from(0)
    for step in range(3):
        run.log(step, {"reward/mean": step / 2, "note": "text"})
    run.log_evaluation(accuracy_after=0.75)
    run.close()
    assert [row["reward/mean"] for row in lines(run)] == [0.0, 0.5, 1.0]  # the file is written all the same


def test_several_trackers_are_told_what_the_files_are(tmp_path, listed):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracked(tmp_path / "run", ("listed", "tensorboard", "listed"))
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("reward/mean")] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert [(event.step, event.value) for event in board.Scalars("eval/accuracy_after")] == [(2, 0.75)]
    made, (_, config), *rest = listed
    assert made == ("made", "rlkit") and config["lr"] == 0.1 and config["servers"] == "('a',)"
    assert "torch" in config["versions"]
    assert rest == [
        *((step, {"reward/mean": step / 2}) for step in range(3)), (2, {"eval/accuracy_after": 0.75}), "finished",
    ]  # fmt: skip


def test_trackers_get_evaluations_at_their_finished_steps(tmp_path, listed):
    """The one before training is step 0, that after the first step, whose number is 0, is step 1."""
    run = Run(tmp_path, {}, trackers=("listed",))
    run.log_evaluation(evaluations=[{"step": 0, "accuracy": 0.1}])
    run.log(0, {"x": 1.0})
    run.log_evaluation(evaluations=[{"step": 0, "accuracy": 0.1}, {"step": 1, "accuracy": 0.2}])
    run.write_evaluation(evaluations=[{"step": 0, "accuracy": 0.1}])  # a later one was lost, and is dropped
    run.log_evaluation(best_step=0)
    assert listed[2:] == [(0, {"heldout/accuracy": 0.1}), (0, {"x": 1.0}), (1, {"heldout/accuracy": 0.2}),
                          (0, {"eval/best_step": 0})]  # fmt: skip


def test_trackers_get_the_kept_responses(tmp_path, listed):
    """As a table where accelerate has `log_table`; TensorBoard gets text, which is no HTML, and images."""
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = Run(tmp_path, {}, trackers=("listed", "tensorboard"))
    Image.new("RGB", (20, 10), (255, 0, 0)).save(tmp_path / "red.png")
    responses = [{"text": "7 | <b>\nseven", "reward": 1.0}, {"text": "8", "reward": None}]
    record = {"kind": "training", "prompt": 0, "question": "?", "expected": "7", "responses": responses}
    run.keep_responses([{**record, "images": []}, {**record, "images": ["red.png"], "responses": []}])
    run.log(4, {"loss": 1.0})
    run.log(5, {"loss": 1.0})
    columns = ["step", "question", "expected", "response", "reward"]
    table = (4, "responses", columns, [[4, "?", "7", "7 | <b>\nseven", 1.0], [4, "?", "7", "8", None]])
    assert listed[2:] == [table, (4, {"loss": 1.0}), (5, {"loss": 1.0})]
    run.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    [image], [text] = board.Images("prompt 2"), board.Tensors("responses/text_summary")
    assert (image.step, image.width, image.height) == (4, 20, 10) and text.step == 4
    assert b"\n| 4 | ? | 7 | 7 &#124; &lt;b> seven | 1.0 |\n" in text.tensor_proto.string_val[0]


def test_a_tracker_that_cannot_take_responses_is_named_once(tmp_path, listed, capsys):
    run = Run(tmp_path, {}, trackers=("listed", "tensorboard"))
    record = {"kind": "training", "question": "?", "expected": "7", "images": ["missing.png"]}
    for step in range(2):
        run.keep_responses([{**record, "responses": [{"text": "7", "reward": 1.0}]}])
        run.log(step, {"loss": 1.0})
    run.close()
    shown = capsys.readouterr().out
    assert shown.count("tracker tensorboard: responses could not be logged: FileNotFoundError") == 1
    assert [step for step, *_ in listed[2:-1]] == [0, 0, 1, 1] and len(read_metrics(tmp_path / SAMPLES)) == 2


def test_a_tracker_that_cannot_be_reached_does_not_end_the_run(tmp_path, listed, capsys, monkeypatch):
    run = Run(tmp_path, {}, trackers=("listed",))

    def refuse(values, step):
        if step == 0:
            raise ConnectionError("the server restarts")
        listed.append((step, values))

    monkeypatch.setattr(run.trackers[0], "log", refuse)
    for step in range(2):
        run.log(step, {"loss": 1.0})
    shown = capsys.readouterr().out
    assert "tracker listed: metrics could not be logged: ConnectionError: the server restarts" in shown
    assert listed[-1] == (1, {"loss": 1.0}) and len(read_metrics(tmp_path / METRICS)) == 2
    run.close()


def test_a_tracker_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="trackers: expected some of .*tensorboard.*, got 'tensorbord'"):
        Run(tmp_path / "a", {}, trackers=["tensorbord"])
    with pytest.raises(ValueError, match="trackers: expected installed ones, got 'aim'"):
        Run(tmp_path / "a", {}, trackers=["aim"])
    assert not (tmp_path / "a").exists()
    Run(tmp_path / "a", {}, trackers=["aim"], is_main_process=False)  # one rank tells them


# --- the page while the run goes on


def test_the_page_is_written_by_time_in_a_thread(tmp_path, monkeypatch):
    """At the first step and then every 60 seconds; not while it is still being written."""
    clock, written, begun, go_on = [0.0], [], threading.Semaphore(0), threading.Event()

    def write():
        written.append(clock[0])
        begun.release()
        go_on.wait(100)

    monkeypatch.setattr("rlkit.tracking.run.time.monotonic", lambda: clock[0])
    run = Run(tmp_path, {}, write_page=write, page_seconds=60)

    def log_at(*seconds, writes):
        for i, clock[0] in enumerate(seconds):
            run.log(0, {})  # does not wait
            assert i > 0 or not writes or begun.acquire(timeout=100)  # the clock is not moved before it is read
        go_on.set()
        run._page_writer.join()
        go_on.clear()

    log_at(1, 30, 100, 200, writes=True)
    log_at(201, writes=True)
    log_at(202, 260, writes=False)
    log_at(262, writes=True)
    assert written == [1, 201, 262]
    run.close()
    Run(tmp_path, {}, write_page=write).log(0, {})  # 0 seconds: never
    Run(tmp_path, {}, write_page=write, page_seconds=60, is_main_process=False).log(0, {})  # another rank
    assert written == [1, 201, 262]


def test_a_page_that_cannot_be_written_does_not_end_the_run(tmp_path, capsys):
    run = Run(tmp_path, {}, write_page=lambda: 1 / 0, page_seconds=60)
    run.log(0, {})
    run.close()
    assert "page of the run: could not be written: ZeroDivisionError" in capsys.readouterr().out


def test_kept_responses_are_those_of_logged_steps(tmp_path):
    """A resumed run writes again what comes after its checkpoint; held-out responses of the checkpoint itself stay."""
    run, path = Run(tmp_path, {}), tmp_path / SAMPLES
    for step in range(4):
        append_records(tmp_path, [{"step": step, "kind": "held-out"}])
        run.keep_responses([{"step": 0, "kind": "training", "prompt": 7, "responses": []}])
        run.log(step, {})
    expected = [(0, "held-out"), (0, "training"), (1, "held-out"), (1, "training"), (2, "held-out")]
    whole = path.read_bytes()
    after = whole.index(b'{"step": 2, "kind": "training"')
    for end in (len(whole), len(whole) - 9, after + 9, after, after - 1):  # the process was killed after this byte
        path.write_bytes(whole[:end])
        run.drop_metrics_from(2)
        assert [(row["step"], row["kind"]) for row in read_metrics(path)] == expected
        assert path.read_bytes() == whole[:after]
    run.drop_metrics_from(0)
    assert path.read_bytes() == whole[: whole.index(b"\n") + 1]  # held-out responses before training
    path.write_bytes(b'cut short, "kind": "training"}')
    run.drop_metrics_from(0)
    run.drop_metrics_from(0)
    assert path.read_bytes() == b""


# --- the progress bar


def run_of_200_steps(stderr, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stderr)
    bar = progress_bar(0, 200)
    for step in range(200):
        if step == 100:
            bar.write("skipped: a row")
        bar.set_postfix_str(f"reward {step}", refresh=False)
        bar.update()
    bar.close()


def test_progress_is_a_few_lines_in_a_file(monkeypatch, capsys):
    stderr = io.StringIO()
    run_of_200_steps(stderr, monkeypatch)
    lines = stderr.getvalue().splitlines()
    assert "\r" not in stderr.getvalue() and 2 <= len(lines) < 10
    assert lines[-1].startswith("step 200/200 100%, reward 199 | ")
    assert capsys.readouterr().out == "skipped: a row\n"


def test_progress_is_one_line_in_a_terminal(monkeypatch):
    stderr = io.StringIO()
    stderr.isatty = lambda: True
    run_of_200_steps(stderr, monkeypatch)
    assert "\r" in stderr.getvalue() and "step 200/200 |############| 100%, reward 199 | " in stderr.getvalue()


def test_the_line_of_status(tmp_path, monkeypatch):
    """Step, what the recipe shows, held-out accuracy, tokens per second, time, and the phase of a long step."""
    stderr, clock = io.StringIO(), [100.0]
    monkeypatch.setattr(sys, "stderr", stderr)
    for name in ("time.time", "tqdm.std.time"):
        monkeypatch.setattr(name, lambda: clock[0])
    run = Run(tmp_path, {})
    run.log_evaluation(accuracy_before=0.25, heldout=12, evaluations=[{"step": 0, "accuracy": 0.25}])
    for step in run.steps(0, 3):
        run.phase("generate")
        if step == 2:
            clock[0] += 60
        run.phase("train")  # generating took a minute: a line is written in the middle of the step
        run.log(step, {"reward/mean": 0.5, "tokens": 10}, show={"reward": "reward/mean", "kl": "kl"})
    lines = [re.sub(r"[\d,]+ tokens/s", "N tokens/s", line) for line in stderr.getvalue().splitlines()]
    in_the_middle = "step 2/3 67%, reward 0.5, held-out accuracy 0.25, N tokens/s | 01:00, "
    assert any(line.startswith(in_the_middle) and line.endswith(" left | train") for line in lines)
    assert lines[-1].startswith("step 3/3 100%, reward 0.5, held-out accuracy 0.25, N tokens/s | ")


def test_progress_is_silent_on_other_ranks(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    bar = progress_bar(3, 6, show=False)
    show_phase(bar, "train")
    bar.update()
    bar.close()
    assert stderr.getvalue() == ""
