"""The Triton kernels of `linear_logprobs` in Triton's interpreter (results, FLOPs, bytes) and through its compiler.

No GPU has run them.
"""

import json
import logging
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlkit.losses import _kernels, linear_logprobs

TOLERANCES = {"float32": 5e-6, "bfloat16": 1e-2, "float16": 2e-3}  # of gradients in these dtypes


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("triton")
    out = tmp_path_factory.mktemp("triton") / "found.json"
    script = [sys.executable, str(Path(__file__).with_name("on_interpreted_kernels.py")), str(out)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", ["plain", "all", "bfloat16", "float16"])
def test_kernels_equal_the_loops(found, name):
    """Logits are float32 whatever the matrices are, so that results are exact for bfloat16, too."""
    results, gradients = found["loops"][name][:2], found["loops"][name][2:]
    assert max(results) < 5e-6
    assert max(gradients) < TOLERANCES.get(name, TOLERANCES["float32"])


def test_shards_of_a_vocabulary_and_parts_of_one_give_the_whole(found):
    assert max(found["shards"]) < 5e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_that_share_a_vocabulary_have_the_whole(found, dtype):
    """Megatron's head on two ranks; 21 of 42 entries are two tiles of 16, for which 32 entries are multiplied."""
    ranks = found["ranks"][f"torch.{dtype}"]
    logps, entropy, of_hidden, of_weight, *of_other_rank = ranks["errors"]
    assert max(logps, entropy, *of_other_rank) < 5e-6
    assert max(of_hidden, of_weight) < TOLERANCES[dtype]
    assert min(ranks["flops"]) > 4 * 18 * 21 * 21  # forward and backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_adds_products_of_16_bits_to_a_float32_sum_in_one_kernel(dtype):
    """Without a kernel that casts the product. Fake CUDA tensors; `test_triton_on_gpus.py` has the numbers."""
    triton_kernels, called = pytest.importorskip("rlkit.losses._triton"), []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(str(func))
            if func is torch.ops.aten.addmm.dtype_out:
                total, a, b, dtype = args
                assert total is kwargs["out"] and dtype == total.dtype and a.dtype == b.dtype
                assert total.shape == (a.shape[0], b.shape[1])
                return total
            return func(*args, **(kwargs or {}))

    with FakeTensorMode():
        total = torch.empty(6, 4, device="cuda")
        grad, hidden = (torch.empty(9, n, device="cuda", dtype=dtype) for n in (6, 4))
        with Calls():
            triton_kernels.add_product(total, grad.t(), hidden)
    computed = [name for name in called if name not in ("aten.t.default", "prim.device.default")]
    assert computed == (["aten.mm.default", "aten.add_.Tensor"] if dtype == torch.float32 else ["aten.addmm.dtype_out"])


def test_tied_heads_and_strides(found):
    assert found["tied"] < 5e-6 and max(found["strided"]) < 5e-6


def test_no_tokens_and_vmap(found):
    assert found["empty"] == [[0], [0]] and found["vmap"] < 1e-6


def test_kernels_are_tried_also_where_no_gradient_is_wanted(found):
    assert found["work"] == [True, True, False, False, False]  # none for float64, nor if weights get no gradient


def test_flops_and_bytes_are_the_least(found):
    """2 N V H forward and 6 N V H backward; weights are read once by each block of tokens, logits never written."""
    c = found["counts"]
    n, v, h, blocks = c["n"], c["v"], c["h"], (c["n"] // c["block"], c["v"] // c["block"])
    forward, backward = c["forward"], c["backward"]
    assert forward["flops"] == 2 * n * v * h
    assert backward["flops"] + backward["products"] == 6 * n * v * h
    matrices = 2 * (v * h * blocks[0] + n * h * blocks[1])  # bytes of weights and hidden states, in tiles
    assert matrices <= forward["read"] <= matrices + 16 * n * blocks[1]
    assert matrices <= backward["read"] <= matrices + 40 * n * blocks[1]
    assert forward["written"] == 4 * 4 * n * blocks[1]  # four sums a token and part; here a part is one tile
    assert backward["written"] == 2 * n * v  # the gradient of the logits, in bfloat16


SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}  # of one program, by compute capability


def compiled(name, dtype, capability, *, with_bias_and_suppressed):
    """A kernel in the form that Triton compiles for sizes and addresses that 16 divides, which takes most memory."""
    compiler = pytest.importorskip("triton.compiler")
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas

    from rlkit.losses import _triton

    try:
        get_ptxas(capability)
    except RuntimeError as error:
        pytest.skip(f"needs ptxas, which wheels of triton contain: {error}")
    kernel, element = getattr(_triton, name), {torch.float32: "*fp32", torch.bfloat16: "*bf16"}[dtype]
    types = dict.fromkeys(kernel.arg_names, "*fp32") | dict.fromkeys(("n", "v", "size", "tiles_per_part"), "i32")
    types |= dict.fromkeys(("hidden", "weight", "bias"), element) | {"targets": "*i64", "suppressed": "*u8"}
    if name == "_gradients":
        types["out"] = element
    constants = _triton._blocks(dtype)
    if not with_bias_and_suppressed:
        constants |= {"bias": None, "suppressed": None}
    signature = {x: "constexpr" if x in constants else types[x] for x in kernel.arg_names}
    aligned = [i for i, x in enumerate(kernel.arg_names) if signature[x][0] == "*" or x in ("v", "size")]
    source = compiler.ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    return compiler.compile(source, target=GPUTarget("cuda", capability, 32), options=_triton.SCHEDULE)


@pytest.mark.parametrize("with_bias_and_suppressed", [False, True])
@pytest.mark.parametrize("name", ["_sums", "_gradients"])
def test_kernels_compile_for_a_gpu(name, with_bias_and_suppressed):
    """Triton's compiler needs no GPU. It refuses Python that the interpreter runs, such as type hints by `Any`."""
    found = compiled(name, torch.bfloat16, 90, with_bias_and_suppressed=with_bias_and_suppressed)
    assert "wgmma" in found.asm["ptx"]  # products on the tensor cores
    assert 2**15 <= found.metadata.shared <= SHARED_BYTES[90]


@pytest.mark.parametrize("name", ["_sums", "_gradients"])
@pytest.mark.parametrize(("capability", "dtype"), [(80, torch.bfloat16), (86, torch.float32)])
def test_a_program_fits_into_a_multiprocessor(capability, dtype, name):
    """A kernel that needs more shared memory than a GPU has cannot be launched. Products of float32 are exact."""
    found = compiled(name, dtype, capability, with_bias_and_suppressed=True)
    assert 2**15 <= found.metadata.shared <= SHARED_BYTES[capability]
    assert "tf32" not in found.asm["ptx"]


@pytest.mark.parametrize("name", ["_sums", "_gradients"])
def test_kernels_are_launched_on_the_gpu_of_their_tensors(name, monkeypatch):
    """Triton launches on the current GPU, where the memory of another one cannot be read."""
    pytest.importorskip("triton")
    from rlkit.losses import _triton

    current, launches = [], []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *_, **__: launches.append(list(current))

    @contextmanager
    def device_of(tensor):
        current.append(tensor)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(_triton, name, Kernel())
    hidden, per_token = torch.ones(2, 3), torch.ones(2)
    if name == "_sums":
        _triton.vocabulary_sums(hidden, torch.ones(5, 3), None, per_token.long(), per_token[:, None], None)
    else:
        rows = per_token.long(), per_token[:, None], *[per_token] * 4
        _triton.logit_gradients(hidden, torch.ones(5, 3), None, None, *rows)
    assert len(launches) == 1 and launches[0][0] is hidden


@pytest.mark.parametrize("reason", ["no triton", "no GPU"])
def test_one_line_is_logged_where_kernels_cannot_run(reason, monkeypatch, caplog):
    if reason == "no triton":
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.delitem(sys.modules, "rlkit.losses._triton", raising=False)
        monkeypatch.delattr("rlkit.losses._triton", raising=False)
    else:
        pytest.importorskip("triton")
    monkeypatch.setattr(_kernels, "_triton", _kernels._triton.__wrapped__)  # without what earlier calls found
    cached, device = _kernels.cache(_kernels._triton), torch.device("cuda", 0)
    with caplog.at_level(logging.WARNING):
        assert cached(device, torch.bfloat16) is None and cached(device, torch.bfloat16) is None
    assert len(caplog.records) == 1 and caplog.messages[0].startswith("linear_logprobs: computed without Triton")


def test_a_cpu_needs_no_kernels(caplog):
    hidden, weight = torch.randn(2, 3), torch.randn(5, 3)
    linear_logprobs(hidden, weight, torch.tensor([0, 4]))
    assert not caplog.records
