"""Which kernels would be called on a GPU, and with which arguments, tested with fake CUDA tensors on a CPU.

Fake tensors have shapes, dtypes and devices but no values: mixing devices, or reading a value, raises.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))
from family_configs import IMAGE, VISION
from test_families import vision_model

from rlkit.data.samples import Batch
from rlkit.engines.checkpoint import random_states, set_random_states
from rlkit.engines.distributed import init_distributed
from rlkit.engines.packing import attention, flash, vision_attention
from rlkit.engines.packing.attention import AttentionOptions, varlen_attention
from rlkit.engines.packing.forward_hooks import before_forward, model_facts
from rlkit.engines.packing.layout import AttentionBlock, PackedLayout
from rlkit.engines.packing.vision_attention import packed_vision_attention, use_packed_vision_attention
from rlkit.vlm.families import PATCH_ROW_FAMILIES

CPU, GPU, META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")


class Kernels(TorchDispatchMode):
    """Records the head sizes that torch's flash kernel is called with."""

    def __init__(self):
        super().__init__()
        self.head_sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_varlen_attn" in str(func):
            self.head_sizes.append([x.shape[-1] for x in args[:3]])
        return func(*args, **(kwargs or {}))


def without_flash_attn(monkeypatch):
    for module in (attention, flash):
        monkeypatch.setattr(module, "flash_attn_varlen_func", lambda: None)


@pytest.mark.parametrize(
    ("dtype", "size", "value_size", "kernel"),
    [
        (torch.bfloat16, 64, 64, [64, 64, 64]),
        (torch.bfloat16, 192, 128, [192, 192, 192]),  # DeepSeek's heads
        (torch.float32, 64, 64, None),
        (torch.bfloat16, 20, 20, None),
        (torch.bfloat16, 512, 512, None),
    ],
)
@pytest.mark.parametrize("window", [None, 3])
def test_flash_kernels_are_called_with_supported_arguments(dtype, size, value_size, kernel, window, monkeypatch):
    without_flash_attn(monkeypatch)
    layout = PackedLayout([0, 7, 9], [7, 2, 40], [(0, 0)] * 3, CPU)
    blocks = layout.blocks
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), Kernels() as kernels:
        layout.device, layout.blocks = GPU, [AttentionBlock(*(x.to(GPU) for x in block)) for block in blocks]
        shapes = (4, size), (2, size), (2, value_size)
        q, k, v = (torch.empty(49, *x, dtype=dtype, device=GPU) for x in shapes)
        out = varlen_attention(q, k, v, layout, AttentionOptions(window=window))
    assert kernels.head_sizes == ([] if kernel is None else [kernel])
    assert out.shape == (49, 4, value_size) and out.device == GPU and out.dtype == dtype


class Copies(TorchDispatchMode):
    """`waits`: of each copy to the device, whether it waits for all earlier work there."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (kwargs or {}).get("device") == META and str(func).startswith("aten._to_copy"):
            self.waits.append(not kwargs.get("non_blocking"))
        assert not (str(func).startswith("aten.copy_") and args[0].device == META)
        return func(*args, **(kwargs or {}))


def test_the_host_waits_for_no_index_of_a_packed_row():
    """It would wait in every micro-batch."""
    layout = PackedLayout([0, 7, 9], [7, 2, 40], [(0, 0), (0, 7), (0, 7)], META)
    with Copies() as copies:
        indices = layout.cu_seqlens_q, layout.cu_seqlens_k, layout.key_indices, layout.positions
    assert {x.device for x in indices} == {META} and copies.waits == [False] * 4


def test_the_host_waits_for_no_tensor_of_a_micro_batch():
    tokens = torch.ones(2, 3, dtype=torch.long)
    batch = Batch(tokens, tokens.bool(), [3, 3], advantages=torch.ones(2))
    with Copies() as copies:
        moved = batch.to(META)
    assert moved.advantages.device == moved.total_tokens.device == META and copies.waits == [False] * 5


def test_ernies_tokens_of_images_are_marked_without_a_copy_from_the_host():
    """`torch.tensor` of a list would copy one in every forward."""

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    called, model = [], vision_model("ernie4_5_vl_moe")
    kwargs = {"input_ids": torch.tensor([[5, model.config.image_start_token_id, IMAGE, IMAGE, 6]])}
    facts = model_facts(model)
    with Operators():
        before_forward(model, (), kwargs, facts=facts)
    assert kwargs["moe_mm_token_type_ids"].tolist() == [[0, 1, 1, 1, 0]]
    assert called and not [name for name in called if "lift_fresh" in name]


def test_random_states_of_a_gpu_are_restored_from_a_checkpoint(monkeypatch):
    """Dropout draws its numbers there, not on the host."""
    init_distributed("cpu")
    gpu = torch.Generator().manual_seed(5)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: gpu.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: gpu.set_state(state))
    state = random_states(GPU)
    drawn = [torch.rand(3), torch.rand(3, generator=gpu)]
    set_random_states(state, GPU)
    assert all(map(torch.equal, drawn, [torch.rand(3), torch.rand(3, generator=gpu)]))
    set_random_states({}, GPU)  # a checkpoint of fewer ranks
    assert random_states(CPU).keys() == {"rng.0"}


@pytest.mark.parametrize("family", sorted(PATCH_ROW_FAMILIES & VISION.keys()))
def test_a_vision_tower_attends_to_all_images_in_one_call(family, monkeypatch):
    """Features and gradients equal transformers' own, which calls attention for each image or window."""
    model, calls, attend = vision_model(family), [], packed_vision_attention

    def counted(*args, **kwargs):
        calls.append(0)
        return attend(*args, **kwargs)

    monkeypatch.setattr(vision_attention, "packed_vision_attention", counted)
    model.set_attn_implementation("sdpa")
    config = model.config.vision_config
    tower = next(module for module in model.modules() if getattr(module, "config", None) is config)
    grid = torch.tensor([[1, 4, 4], [1, 8, 4], [1, 4, 8]])
    pixels = torch.randn(80, VISION[family][2][1], generator=torch.Generator().manual_seed(0))
    found = []
    for packed in (False, True):
        assert not packed or use_packed_vision_attention(model, model.config)
        out = tower(pixels, grid_thw=grid)
        features = out.last_hidden_state if out.pooler_output is None else out.pooler_output
        tower.zero_grad()
        features.square().sum().backward()
        found.append([features, *(p.grad.clone() for p in tower.parameters() if p.grad is not None)])
    for default, packed in zip(*found, strict=True):
        torch.testing.assert_close(packed, default, atol=1e-5, rtol=1e-5)
    assert len(calls) == (config.num_hidden_layers if family == "cosmos3_edge" else config.depth)
    assert type(model)(model.config).config.vision_config._attn_implementation == "sdpa"  # not changed


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, [80, 80, 80]), (torch.float32, None)])
def test_all_images_of_a_tower_are_one_kernel_call(dtype, kernel, monkeypatch):
    without_flash_attn(monkeypatch)
    bounds = torch.tensor([0, 16, 48, 80], dtype=torch.int32)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), Kernels() as kernels:
        q, k, v = torch.empty(3, 1, 4, 80, 80, dtype=dtype, device=GPU).unbind()
        if kernel is None:  # float32 reads the lengths, which fake tensors do not have
            with pytest.raises(DataDependentOutputException):
                packed_vision_attention(None, q, k, v, None, cu_seq_lens_q=bounds.to(GPU), max_length_q=32)
        else:
            out, _ = packed_vision_attention(None, q, k, v, None, cu_seq_lens_q=bounds.to(GPU), max_length_q=32)
            assert out.shape == (1, 80, 4, 80) and out.device == GPU
    assert kernels.head_sizes == ([] if kernel is None else [kernel])
