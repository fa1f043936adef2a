"""What happens on a GPU, as far as fake CUDA tensors can tell without one: which kernels are asked for, and with what.

They have shapes, types and devices and no numbers, so that tensors of two devices, and a look at a number, raise.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlkit.engines import attention
from rlkit.engines.attention import Block, Layout, varlen_attention
from rlkit.engines.checkpoint import random_states, set_random_states
from rlkit.engines.distributed import init_distributed

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Kernels(TorchDispatchMode):
    """The shapes that torch's flash kernel was given."""

    def __init__(self):
        super().__init__()
        self.came = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_varlen_attn" in str(func):
            self.came.append([x.shape[-1] for x in args[:3]])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "size", "of_values", "kernel"),
    [
        (torch.bfloat16, 64, 64, [64, 64, 64]),
        (torch.bfloat16, 192, 128, [192, 192, 192]),  # DeepSeek's heads
        (torch.float32, 64, 64, None),
        (torch.bfloat16, 20, 20, None),
        (torch.bfloat16, 512, 512, None),
    ],
)
@pytest.mark.parametrize("window", [None, 3])
def test_flash_kernels_get_what_they_take(dtype, size, of_values, kernel, window, monkeypatch):
    monkeypatch.setattr(attention, "_flash_attn", lambda: None)
    layout = Layout([0, 7, 9], [7, 2, 40], [(0, 0)] * 3, CPU)
    blocks = layout.blocks
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), Kernels() as kernels:
        layout.device, layout.blocks = GPU, [Block(*(x.to(GPU) for x in block)) for block in blocks]
        shapes = (4, size), (2, size), (2, of_values)
        out = varlen_attention(*(torch.empty(49, *x, dtype=dtype, device=GPU) for x in shapes), layout, window=window)
    assert kernels.came == ([] if kernel is None else [kernel])
    assert out.shape == (49, 4, of_values) and out.device == GPU and out.dtype == dtype


def test_random_numbers_of_a_gpu_go_on_behind_a_checkpoint(monkeypatch):
    """Dropout draws there, not on the host."""
    init_distributed("cpu")
    gpu = torch.Generator().manual_seed(5)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: gpu.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: gpu.set_state(state))
    state = random_states(GPU)
    drawn = [torch.rand(3), torch.rand(3, generator=gpu)]
    set_random_states(state, GPU)
    assert all(map(torch.equal, drawn, [torch.rand(3), torch.rand(3, generator=gpu)]))
    set_random_states({}, GPU)  # of a checkpoint of fewer ranks
    assert random_states(CPU).keys() == {"rng.0"}
