"""lm-eval and inspect-ai measure an exported model, and the run's page shows their results.

`make optional` runs this file. The commands are those of docs/recipes.md.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlkit.data import load_task
from rlkit.tracking import Run
from rlkit.vlm import build_tiny

ROOT = Path(__file__).parents[2]
LM_EVAL_TASK = """
task: sorting
dataset_path: json
dataset_kwargs: {data_files: {test: sorting.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import exact
from inspect_ai.solver import generate


@task
def sorting():
    rows = json_dataset("sorting.jsonl", FieldSpec(input="question", target="answer"))
    return Task(dataset=rows, solver=generate(max_tokens=4), scorer=exact())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with an exported model in runs/A and a task for each tool."""
    path = tmp_path_factory.mktemp("harnesses")
    rows = load_task("sorting").train
    build_tiny(path / "runs" / "A" / "model", rows, warm_up_steps=0)
    Run(path / "runs" / "A", {}).log(0, {"reward/mean": 0.5})
    (path / "my_tasks").mkdir()
    (path / "my_tasks" / "sorting.yaml").write_text(LM_EVAL_TASK)
    (path / "my_task.py").write_text(INSPECT_TASK)
    few = [{"question": str(row["question"]), "answer": row["answer"]} for row in rows[:6]]
    (path / "sorting.jsonl").write_text("".join(json.dumps(row) + "\n" for row in few))
    return path


def commands():
    """The commands of the page, by the name of their program."""
    text = (ROOT / "docs" / "recipes.md").read_text().partition("## Other evaluation tools")[2]
    block = re.search(r"```bash\n(.*?)```", text, re.DOTALL)[1].replace("\\\n", " ")
    return [line.partition("#")[0].strip() for line in block.splitlines() if line.strip()]


def test_results_of_both_tools_are_on_the_page(folder):
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {
        **os.environ,
        "PATH": paths,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    for line in commands():
        done = subprocess.run(
            line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    tasks = json.loads((folder / "runs" / "A" / "eval.json").read_text())["tasks"]
    assert tasks["sorting (lm-eval)"]["rows"] == 6 and 0 <= tasks["sorting (lm-eval)"]["exact_match"] <= 1
    assert tasks["sorting (inspect)"]["rows"] == 6 and {"mean", "mean_error"} <= tasks["sorting (inspect)"].keys()
    assert "sorting (lm-eval)" in (folder / "runs" / "A" / "report.html").read_text()
