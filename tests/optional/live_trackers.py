"""The real wandb, trackio and MLflow get kept responses with their images; nothing leaves this machine.

`make optional` runs this file. tests/test_tracking.py has TensorBoard and a tracker that records what it gets.
"""

import json
import sqlite3
import sys
from pathlib import Path

import pytest
from PIL import Image

from rlkit.tracking import Run

QUESTION, RESPONSE = "What | colour\nis <b>this</b>?", "red & blue"


@pytest.fixture
def tracked(tmp_path, monkeypatch, capsys):
    """Logs two steps to a tracker, each with a response to a prompt with an image and one to a prompt without."""

    def track(tracker):
        out = tmp_path / "run"
        run = Run(out, {"lr": 0.1}, trackers=[tracker])
        (out / "images").mkdir()
        for step in range(2):
            Image.new("RGB", (20, 10), (100 * step, 0, 0)).save(out / f"images/{step}.webp", lossless=True)
            record = {"kind": "training", "prompt": 0, "question": QUESTION, "expected": "red"}
            responses = [{"text": RESPONSE, "reward": 1.0}, {"text": "7", "reward": None}]
            run.keep_responses([{**record, "images": [f"images/{step}.webp"], "responses": responses}])
            run.keep_responses([{**record, "images": [], "responses": responses[:1]}])
            run.log(step, {"loss": 1.0})
        run.close()
        assert "could not be logged" not in capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    return track


def test_wandb(tracked, tmp_path, monkeypatch):
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_DIR", "."), ("WANDB_DATA_DIR", str(tmp_path / "data"))):
        monkeypatch.setenv(name, value)
    tracked("wandb")
    staged = [path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file()]
    tables = [json.loads(content) for content in staged if content.startswith(b'{"_type": "table"')]
    assert {table["data"][0][0] for table in tables} == {0, 1}
    for table in tables:
        assert table["columns"] == ["step", "question", "expected", "answer", "reward", "image 1"]
        seen, second, without = table["data"]
        assert seen[1:5] == [QUESTION, "red", RESPONSE, 1.0] and seen[5]["_type"] == "image-file"
        assert second[4] is None and without[5] is None
    assert sum(content[8:12] == b"WEBP" for content in staged) >= 2


def test_trackio(tracked, tmp_path, monkeypatch):
    for module in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        del sys.modules[module]  # it reads its directory when it is imported
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    tracked("trackio")
    with sqlite3.connect(tmp_path / "trackio" / "rlkit.db") as database:
        rows = [(step, json.loads(found)) for step, found in database.execute("select step, metrics from metrics")]
    tables = {step: found["responses"]["_value"] for step, found in rows if "responses" in found}
    assert sorted(tables) == [0, 1]
    for table in tables.values():
        assert table[0]["question"] == QUESTION and table[0]["response"] == RESPONSE and table[2]["images"] is None
        with Image.open(tmp_path / "trackio" / "media" / table[0]["images"][0]["file_path"]) as image:
            assert image.size == (20, 10)


def test_mlflow(tracked, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracked("mlflow")
    [table] = (tmp_path / "mlruns").glob("*/*/artifacts/answers/steps_0_to_99.json")
    rows = json.loads(table.read_text())["data"]
    assert len(rows) == 6 and rows[0] == [0, QUESTION, "red", RESPONSE, 1.0] and rows[4][0] == 1
    images = sorted(
        Path(path).name.split("+")[:3] for path in (tmp_path / "mlruns").glob("*/*/artifacts/images/*[0-9a-f].png")
    )
    assert images == [["prompt 1", "step", "0"], ["prompt 1", "step", "1"]]
