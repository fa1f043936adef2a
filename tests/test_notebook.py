"""docs/handful_of_images.ipynb: its cells run, and the outputs that are stored in it are there."""

import json
from functools import partial
from pathlib import Path

import matplotlib
import torch

import rlkit.vlm

NOTEBOOK = Path(__file__).parents[1] / "docs" / "handful_of_images.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_the_cells_run_in_their_order(monkeypatch, capsys):
    """With two steps instead of a hundred, and a model that was hardly warmed up."""
    import matplotlib.pyplot as plt

    monkeypatch.setattr(rlkit.vlm, "build_tiny", partial(rlkit.vlm.build_tiny, warm_up_steps=2))
    matplotlib.use("agg")
    assert CODE[0].count("STEPS, PROMPTS_PER_STEP, GROUP_SIZE = 100, 16, 8") == 1
    names, threads = {}, torch.get_num_threads()
    try:
        for cell in CODE:
            exec(compile(cell.replace("100, 16, 8", "2, 4, 2"), str(NOTEBOOK), "exec"), names)
        assert len(plt.get_fignums()) == 4 and len(names["curve"]) == 2
    finally:
        plt.close("all")
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert printed.count("of 10 held-out images are right") == 2 and "'model.safetensors', 'processor_config" in printed


def test_its_outputs_are_stored_and_show_that_it_learned():
    outputs = [output for cell in CELLS for output in cell.get("outputs", [])]
    assert not any(output.get("name") == "stderr" or output["output_type"] == "error" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    before, after = [int(line.split()[0]) for line in printed.splitlines() if "held-out images" in line]
    assert before <= 5 and after >= 8
