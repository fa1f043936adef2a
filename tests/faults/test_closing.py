"""Nothing that was sampled, and no damaged log, keeps a run from closing after all of its work was done."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from PIL import Image

import rlkit.report
from rlkit.data import prompt_sample
from rlkit.report import write_report
from rlkit.runs import checkpoints
from rlkit.tracking import EVAL, METRICS, Run, read_metrics
from rlkit.vlm.encoding import encode_text

RESPONSE = replace(prompt_sample([1, 2], row={"question": "What is it?", "answer": "7"}), text="7", reward=1.0)
SAMPLES = {
    "an unpaired surrogate": replace(RESPONSE, text="a \ud800 b"),
    "a surrogate in the question": replace(RESPONSE, row={"question": "\udfff", "answer": "\ud800"}),
    "a reward of None": replace(RESPONSE, reward=None),
    "a reward of nan": replace(RESPONSE, reward=math.nan),
    "a reward that is text": replace(RESPONSE, reward="1.0"),
    "an image without pixels": replace(RESPONSE, images=[Image.new("RGB", (0, 4))]),
    "an image that PNG cannot hold": replace(RESPONSE, images=[Image.new("CMYK", (8, 8))]),
    "no image where one should be": replace(RESPONSE, images=[None]),
    "a row of None": replace(RESPONSE, row={"question": None, "answer": None}),
    "text that is None": replace(RESPONSE, text=None),
    "control characters": replace(RESPONSE, text="".join(map(chr, range(32))) + "\x7f\u2028\ufffe"),
    "a million characters": replace(RESPONSE, text="x" * 10**6),
}
LINES = {
    "numbers": "1\n2\n",
    "lists": "[1]\n[]\n",
    "null": "null\n",
    "text": '"step"\n',
    "no step": '{"loss": 1.0}\n',
    "a step of text": '{"step": "one", "loss": 1.0}\n',
    "metrics of other kinds": '{"step": 0, "reward/mean": "high", "loss": [1], "kl": null, "tokens": true}\n',
    "an integer that no float can hold": '{"step": 0, "loss": 1' + "0" * 400 + "}\n",
    "large numbers": '{"step": 0, "loss": 1e308, "reward/mean": -1e308}\n{"step": 1, "loss": -1e308}\n',
    "other characters": '{"step": 0, "reward_part/$\\\\x{": 1.0, "\\ud800": 2.0}\n',
    "bytes": b"\xff\xfe\x00\n",
    "nothing": "",
    "nested too deep": "[" * 100_000 + "\n",
}


def written(folder, samples=()):
    page = write_report(folder, samples)
    assert page.read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert (folder / "learning_curve.png").stat().st_size > 1000
    return page.read_text(encoding="utf-8")


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path, {"note": "\ud800"})
    run.log(0, {"reward/mean": 0.5})
    return run


@pytest.fixture
def no_curves(monkeypatch):
    """Drawing takes most of a page's time."""
    monkeypatch.setattr(rlkit.report, "draw_learning_curve", lambda path, *_: path.write_bytes(bytes(2000)))


@pytest.mark.parametrize("name", SAMPLES)
def test_the_page_shows_any_sample(name, run, no_curves):
    text = written(run.out, [SAMPLES[name], replace(RESPONSE, text="the other one")])
    assert "the other one" in text
    assert "\\ud800" in text if "surrogate" in name else True


@pytest.mark.parametrize("name", LINES)
def test_the_page_of_any_metrics(name, run):
    line = LINES[name]
    with (run.out / METRICS).open("ab") as file:
        file.write(line if isinstance(line, bytes) else line.encode())
    run.log(7, {"reward/mean": 0.75})
    assert "0.75" in written(run.out)
    assert [row["step"] for row in read_metrics(run.out / METRICS)][-1] == 7
    run.drop_metrics_from(7)  # and such a run is resumed
    assert all(row["step"] < 7 for row in read_metrics(run.out / METRICS))


@pytest.mark.parametrize("content", ["", "[]", "1", "{", '{"heldout": null, "accuracy_after": "x"}', '{"tasks": 1}',
                                     '{"tasks": {"a": 1, "b": {"accuracy": null}}}', b"\xff"])  # fmt: skip
def test_the_page_of_any_evaluation(content, run):
    (run.out / EVAL).write_bytes(content if isinstance(content, bytes) else content.encode())
    written(run.out)
    run.log_evaluation(accuracy_before=0.25)
    assert json.loads((run.out / EVAL).read_text())["accuracy_before"] == 0.25


def test_a_run_closes_with_any_samples(run, capsys):
    run.log(1, {"reward/mean": 0.75})
    run.log_evaluation(accuracy_before=0.25, accuracy_after=0.5, accuracy_error_after=0.1)
    run.trackers = [SimpleNamespace(finish=lambda: 1 / 0, name="broken", log=lambda *_, **__: None)]
    checkpoints.finish(SimpleNamespace(steps=1), run, list(SAMPLES.values()))
    said = capsys.readouterr().out
    assert re.search(r"reward/mean +0.5 in the first step, 0.75 in the last", said)
    assert re.search(r"held-out accuracy +0.250 before, 0.500 \(95 %: 0.321 to 0.679\) after", said)
    assert re.search(rf"{run.out / 'report.html'} +open it", said) and "responses.jsonl" not in said
    assert "results:" in said and "tracker" in said and "ZeroDivisionError" in said
    assert "What is it?" in (run.out / "report.html").read_text()


def test_a_page_that_cannot_be_written_is_named(run, capsys):
    (run.out / "report.html").mkdir()
    checkpoints.finish(SimpleNamespace(steps=1), run, [])
    said = capsys.readouterr().out
    assert "report.html" in said and "IsADirectoryError" in said and "results:" in said


def test_a_line_with_a_surrogate_is_printed(run, capsys):
    run.print("skipped: \ud800")
    assert "skipped: \\ud800" in capsys.readouterr().out


def test_a_prompt_with_a_surrogate_is_a_row_that_is_skipped():
    """A tokenizer raises a TypeError, which would end the run."""
    with pytest.raises(ValueError, match=r"prompt: expected Unicode text, got the unpaired surrogate '\\ud800'"):
        encode_text(lambda *_, **__: 1 / 0, "a \ud800 b")
