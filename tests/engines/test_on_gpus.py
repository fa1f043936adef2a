"""Engines on one, two and four GPUs, compared with the same batch on the CPU: `pytest -m gpu`. Not run yet."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import on_gpu_ranks

from rlkit.engines.offload import Offloaded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
# mean difference of logprobs; relative differences of three steps (loss, gradient norm, entropy), and after a resume
TOLERANCES = {"float32": (1e-3, 2e-3, 1e-3), "bfloat16": (0.05, 0.1, 0.02)}


def test_copies_to_the_host_are_not_waited_for_and_lose_no_bit():
    """`unload` returns while the GPU still works. Memory that is then written to is not that of a waiting copy."""
    tensors = [torch.randn(1 << 24, device="cuda") for _ in range(4)]
    before = [x.cpu() for x in tensors]
    offloaded = Offloaded()
    offloaded.unload(tensors)  # allocates the host memory
    offloaded.load()
    square = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    for _ in range(100):  # about a second of work, which the copies wait for
        square @ square
    offloaded.unload(tensors)
    assert not offloaded._stream.query()
    others = [torch.zeros(1 << 24, device="cuda") for _ in tensors]
    offloaded.load()
    assert all(torch.equal(x.cpu(), y) for x, y in zip(tensors, before, strict=True))
    assert not any(other.any() for other in others)
    offloaded.unload(tensors)
    torch.cuda.empty_cache()
    assert offloaded._stream.query()  # whoever empties the cache gets their memory


def test_copies_to_the_gpu_are_not_waited_for_and_lose_no_bit():
    """`start_loading` returns while the GPU still works; what uses the tensors after `load` sees all of them."""
    tensors = [torch.randn(1 << 24, device="cuda") for _ in range(4)]
    before = [x.cpu() for x in tensors]
    offloaded = Offloaded()
    offloaded.unload(tensors)
    square = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    for _ in range(100):  # about a second of work, which the copies wait for: it may use the memory that they are given
        square @ square
    offloaded.start_loading()
    assert not offloaded._stream.query()
    for _ in range(100):  # the copies run beside this
        square @ square
    after_work = torch.cuda.Event()
    after_work.record()
    offloaded._stream.synchronize()
    assert not after_work.query()
    offloaded.load()
    doubled = [2 * x for x in tensors]
    assert all(torch.equal(x.cpu(), 2 * y) for x, y in zip(doubled, before, strict=True))
    offloaded.unload(tensors)
    offloaded.start_loading()
    offloaded.unload(tensors)  # at once, as after a step that was skipped
    offloaded.load()
    assert all(torch.equal(x.cpu(), y) for x, y in zip(tensors, before, strict=True))


@pytest.mark.parametrize("ranks", list(on_gpu_ranks.NAMES))
def test_engines_on_gpus_equal_one_on_the_cpu(ranks, tiny_dir, tmp_path):
    """For comparison: attention to three tokens instead of all changes logprobs by 0.7 and halves the gradient norm."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, on_gpu_ranks.__file__, tiny_dir, str(tmp_path), "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == {f"{name}, {dtype}" for name, *_, dtype in on_gpu_ranks.cases(ranks)}
    wrong = {}
    for name, errors in found.items():
        logprobs, steps, resumed = TOLERANCES[name.rpartition(", ")[2]]
        if not (errors["logprobs"] < logprobs and max(errors["steps"]) < steps and errors["resumed"] < resumed):
            wrong[name] = errors
    assert not wrong
