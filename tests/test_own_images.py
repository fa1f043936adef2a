"""Every command and every Python block of docs/own_images.md, in their order, in an empty directory."""

import json
import os
import re
import shlex
from pathlib import Path

from forked_commands import run_commands

ROOT = Path(__file__).parents[1]


def test_the_page_as_it_stands(tmp_path):
    page = (ROOT / "docs" / "own_images.md").read_text()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    commands = []
    for language, block in re.findall(r"```(python|bash)\n(.*?)```", page, re.DOTALL):
        command = ["-c", block]
        if language == "bash":
            program, *command = shlex.split(block)
            assert program == "python"
            if command[0] != "-m":
                command[0] = str(ROOT / command[0])
        commands.append(command)
    ran = run_commands(commands, tmp_path / "printed", cwd=tmp_path, env=environment)
    assert ran[-1].returncode == 0, f"{commands[len(ran) - 1]}\n{ran[-1].stderr[-3000:]}"
    assert len(ran) == len(commands) == 6
    printed = "".join(one.stdout for one in ran)

    assert "30 to train on, 10 held out" in printed and "highest for: right;" in printed
    assert "continuing runs/photos at step 6" in printed
    found = json.loads((tmp_path / "runs" / "photos" / "eval.json").read_text())
    # seen: 0.5 -> 0.9 of ten photographs in 30 steps; whether it learned is for the learning tests
    assert found["steps"] == 10 and 0 <= found["accuracy_after"] <= 1
    checked = json.loads((tmp_path / "runs" / "check" / "eval.json").read_text())
    assert checked["tasks"]["photos/rows.jsonl"]["rows"] == 40
    kept = [json.loads(line) for line in (tmp_path / "runs" / "photos" / "samples.jsonl").read_text().splitlines()]
    assert {record["kind"] for record in kept} == {"training", "held-out"} and all(r["images"] for r in kept)
    assert (tmp_path / "runs" / "photos" / "report.html").read_text().count("data:image/webp;base64,") >= 10
    assert "parameters, torch.float32" in printed
