"""Every command and every Python block of docs/own_images.md, in their order, in an empty directory."""

import json
import re
import shlex
from pathlib import Path

from forked_commands import run_commands

ROOT = Path(__file__).parents[1]


def command(line):
    """A line of the page as what follows `python`."""
    program, *rest = shlex.split(line)
    return (
        rest if program == "python" else ["-c", f"import subprocess; subprocess.run({line!r}, shell=True, check=True)"]
    )


def test_the_page_as_it_stands(tmp_path):
    page = (ROOT / "docs" / "own_images.md").read_text()
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    named = re.findall(r"`(\w+\.(?:py|yaml))`[^`]*?:\n\n```(?:python|yaml)\n(.*?)```", page, re.DOTALL)
    files = {code: name for name, code in named}
    assert sorted(files.values()) == ["my_losses.py", "my_rewards.py", "photos.yaml"]
    for code, name in files.items():
        (tmp_path / name).write_text(code.replace("steps: 6", "steps: 2"))
    commands = []
    for language, block in re.findall(r"```(python|bash)\n(.*?)```", page, re.DOTALL):
        if language == "bash":
            commands += [command(line) for line in block.replace("\\\n", " ").splitlines()]
        elif block not in files:
            commands.append(["-c", block])
    ran = run_commands(commands, tmp_path / "printed", cwd=tmp_path)
    assert ran[-1].returncode == 0, f"{commands[len(ran) - 1]}\n{ran[-1].stderr[-3000:]}"
    assert len(ran) == len(commands) == 14
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

    for name in ("reward", "loss", "lr_2e-4", "lr_5e-4", "lr_2e-3"):
        assert json.loads((tmp_path / "runs" / name / "eval.json").read_text())["steps"] == 2
    assert (tmp_path / "my_grpo.py").read_text().count("penalty_loss") == 2
    compared = (tmp_path / "learning_rates.html").read_text()
    assert all(f'"name": "{name}"' in compared for name in ("lr_2e-4", "lr_5e-4", "lr_2e-3"))
