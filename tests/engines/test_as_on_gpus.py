"""What happens on a GPU, as far as fake CUDA tensors can tell without one: which kernels are asked for, and with what.

They have shapes, types and devices and no numbers, so that tensors of two devices, and a look at a number, raise.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))
from family_configs import HYBRID, VISION
from test_families import vision_model

from rlkit.engines.checkpoint import random_states, set_random_states
from rlkit.engines.distributed import init_distributed
from rlkit.engines.packing import attention
from rlkit.engines.packing.attention import Block, Layout, use_packed_tower, varlen_attention
from rlkit.vlm.families import IN_PATCHES

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


@pytest.mark.parametrize("family", sorted(IN_PATCHES & {*VISION, *HYBRID}))
def test_a_tower_is_asked_for_all_images_at_once(family, monkeypatch):
    """With the features and gradients of transformers' own, which asks for each image, or each window of one."""
    model, calls, attend = vision_model(family), [], attention._tower_attention
    monkeypatch.setattr(attention, "_tower_attention", lambda *args, **more: calls.append(0) or attend(*args, **more))
    model.set_attn_implementation("sdpa")
    config = model.config.vision_config
    tower = next(module for module in model.modules() if getattr(module, "config", None) is config)
    grid = torch.tensor([[1, 4, 4], [1, 8, 4], [1, 4, 8]])
    pixels = torch.randn(80, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
    found = []
    for packed in (False, True):
        assert not packed or use_packed_tower(model, model.config)
        features = tower(pixels, grid_thw=grid).pooler_output
        tower.zero_grad()
        features.square().sum().backward()
        found.append([features, *(p.grad.clone() for p in tower.parameters() if p.grad is not None)])
    for came, expected in zip(*found, strict=True):
        torch.testing.assert_close(came, expected, atol=1e-5, rtol=1e-5)
    assert len(calls) == config.depth
    assert type(model)(model.config).config.vision_config._attn_implementation == "sdpa"  # others are as they would be


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, [80, 80, 80]), (torch.float32, None)])
def test_a_towers_images_are_one_call_of_the_kernel(dtype, kernel, monkeypatch):
    monkeypatch.setattr(attention, "_flash_attn", lambda: None)
    bounds = torch.tensor([0, 16, 48, 80], dtype=torch.int32)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), Kernels() as kernels:
        q, k, v = torch.empty(3, 1, 4, 80, 80, dtype=dtype, device=GPU).unbind()
        if kernel is None:  # float32 waits for the lengths, which fake tensors have not
            with pytest.raises(DataDependentOutputException):
                attention._tower_attention(None, q, k, v, None, cu_seq_lens_q=bounds.to(GPU), max_length_q=32)
        else:
            out, _ = attention._tower_attention(None, q, k, v, None, cu_seq_lens_q=bounds.to(GPU), max_length_q=32)
            assert out.shape == (1, 80, 4, 80) and out.device == GPU
    assert kernels.came == ([] if kernel is None else [kernel])
