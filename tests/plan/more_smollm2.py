"""The plan of SmolLM2-135M, with a reference or adapters, and what a process takes: `make pretrained`.

All weights without a reference are in test_plan.py.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from on_smollm2 import CASES, RANKS  # noqa: E402
from published_configs import smollm2  # noqa: E402

PARAMETERS, ADAPTERS = 134_515_008, 4_884_480  # the model's, and those of LoRA of rank 16
FLOAT32, MOMENTS = 4, 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """The published configuration with random weights, in float32."""
    path = tmp_path_factory.mktemp("smollm2")
    AutoModelForCausalLM.from_config(smollm2()).float().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("name", CASES)
def test_planned_bytes_are_what_a_process_takes(name, model_dir, tmp_path):
    """Parameters, gradients and optimizer exactly, and the peak of each phase within 1 %."""
    script = [sys.executable, str(HERE / "on_smollm2.py"), name, model_dir, str(tmp_path / "found.json")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    planned, taken = found["phases"], found["taken"]

    has_adapters = name.startswith("adapters")
    trained = ADAPTERS if has_adapters else PARAMETERS
    held = PARAMETERS + ADAPTERS * has_adapters
    step = planned["optimizer step"]
    assert step["parameters"] == taken["parameters"] == FLOAT32 * held / RANKS
    assert step["gradients"] == taken["gradients"]["policy"] == FLOAT32 * trained / RANKS
    assert step["optimizer"] == taken["optimizer"]
    assert taken["optimizer"] == pytest.approx(MOMENTS * FLOAT32 * trained / RANKS, abs=4000)  # and step counters

    compared = {"forward and backward", "optimizer step", "weight sync"}
    compared |= {"reference"} if "reference" in name else set()
    assert planned.keys() - {"load", "generate"} == compared
    peaks = {phase: (sum(planned[phase].values()), taken["peaks"][phase]) for phase in compared}
    print({phase: f"{plan / 2**20:.1f} MiB planned, {peak / 2**20:.1f} taken" for phase, (plan, peak) in peaks.items()})
    for phase, (plan, peak) in peaks.items():
        assert plan == pytest.approx(peak, rel=0.01), phase
