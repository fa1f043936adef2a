"""Steps of the fsdp2 engine on a simulated GPU: no tensors of two devices meet, and the host waits only where it must.

FSDP2, models and losses are the real ones. Floating-point tensors have no values, see `simulated_gpu`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("on_simulated_gpu.py")
FAMILIES = ["qwen2", "qwen3_moe", "qwen3_5_text", "qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4"]
OPTIONS = [
    "in one micro-batch", "padded", "prompts not shared", "fused", "checkpointing", "adapters", "value model",
]  # fmt: skip
LAYOUTS = ["hybrid sharding", "ulysses", "tensor parallelism", "tensor parallelism, fused"]
READ, COPY = "aten._local_scalar_dense.default", "copy to the host"


@pytest.fixture(scope="module")
def found():
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, timeout=600, check=False, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", [*FAMILIES, *OPTIONS, *LAYOUTS])
def test_the_host_waits_twice_in_a_training_step(case, found):
    """For the norm of the gradient, which decides about the step, and for the metrics: not in each micro-batch."""
    assert found["steps"][case]["train_batch"] == {f"train_batch: {READ}": 1, f"reduce_metrics: {COPY}": 1}


@pytest.mark.parametrize("case", [*FAMILIES, *OPTIONS, *LAYOUTS, "only scores"])
def test_the_host_waits_once_for_log_probabilities(case, found):
    assert found["steps"][case]["infer_batch"] == {f"infer_batch: {COPY}": 1}


def test_the_host_waits_for_no_weights(found):
    steps = found["steps"]
    assert all(not step["get_per_tensor_param"] for step in steps.values() if "get_per_tensor_param" in step)
    assert steps["qwen2"]["get_per_tensor_param"] == steps["adapters"]["get_adapter"] == {}


def test_the_simulated_gpu_can_tell(found):
    seen = dict(found["seen"])
    assert seen.pop("mixed devices").endswith("expected tensors on gpu, got one on the host of shape (3,)")
    assert seen == {name: int(name != "nothing") for name in seen} and len(seen) == 9
