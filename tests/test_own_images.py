"""Every command and every Python block of docs/own_images.md, in their order, in an empty directory."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty directory with the checkout's recipes. What is imported from it is forgotten afterwards."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("my_rewards", "my_losses"):
        sys.modules.pop(name, None)


def run_command(line, monkeypatch):
    """A line of the page: `python` in this process, which has its imports behind it, and anything else in a shell."""
    program, *arguments = shlex.split(line)
    if program != "python":
        subprocess.run(line, shell=True, check=True)
        return
    if arguments[0] == "-m":
        arguments = [str(ROOT / arguments[1].replace(".", "/") / "__main__.py"), *arguments[2:]]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", arguments)
        patch.setattr(sys, "path", [str(Path.cwd()), *sys.path])
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as end:
            assert not end.code, f"{line}: {end.code}"


def test_the_page_as_it_stands(folder, monkeypatch, capfd):
    page = (ROOT / "docs" / "own_images.md").read_text()
    named = re.findall(r"`(\w+\.(?:py|yaml))`[^`]*?:\n\n```(?:python|yaml)\n(.*?)```", page, re.DOTALL)
    files = {code: name for name, code in named}
    assert sorted(files.values()) == ["my_losses.py", "my_rewards.py", "photos.yaml"]
    for language, block in re.findall(r"```(python|bash|yaml)\n(.*?)```", page, re.DOTALL):
        if block in files:
            (folder / files[block]).write_text(block)
        elif language == "python":
            exec(block, {})
        else:
            for line in block.replace("\\\n", " ").splitlines():
                run_command(line, monkeypatch)
    printed = capfd.readouterr().out

    assert "30 to train on, 10 held out" in printed and "highest for: right;" in printed
    assert "continuing runs/photos at step 6" in printed
    found = json.loads((folder / "runs" / "photos" / "eval.json").read_text())
    # seen: 0.5 -> 0.9 of ten photographs in 30 steps; whether it learned is for the learning tests
    assert found["steps"] == 10 and 0 <= found["accuracy_after"] <= 1
    checked = json.loads((folder / "runs" / "check" / "eval.json").read_text())
    assert checked["tasks"]["photos/rows.jsonl"]["rows"] == 40
    kept = [json.loads(line) for line in (folder / "runs" / "photos" / "samples.jsonl").read_text().splitlines()]
    assert {record["kind"] for record in kept} == {"training", "held-out"} and all(r["images"] for r in kept)
    assert (folder / "runs" / "photos" / "report.html").read_text().count("data:image/webp;base64,") >= 10
    assert "parameters, torch.float32" in printed

    for name in ("reward", "loss", "lr_2e-4", "lr_7e-4", "lr_2e-3"):
        assert json.loads((folder / "runs" / name / "eval.json").read_text())["steps"] == 6
    assert (folder / "my_grpo.py").read_text().count("penalty_loss") == 2
    compared = (folder / "learning_rates.html").read_text()
    assert all(f'"name": "{name}"' in compared for name in ("lr_2e-4", "lr_7e-4", "lr_2e-3"))
