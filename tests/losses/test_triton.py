"""The Triton kernels of `linear_logprobs` in Triton's interpreter (results, FLOPs, bytes) and through its compiler.

No GPU has run them.
"""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


def test_tied_heads_and_strides(found):
    assert found["tied"] < 5e-6


def test_no_tokens_and_vmap(found):
    assert found["empty"] == [[0], [0]] and found["vmap"] < 1e-6


def test_kernels_are_tried_also_where_no_gradient_is_wanted(found):
    assert found["work"] == [True, False]  # none for float64


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


@pytest.mark.parametrize("with_bias_and_suppressed", [False, True])
@pytest.mark.parametrize("name", ["_sums", "_gradients"])
def test_kernels_compile_for_a_gpu(name, with_bias_and_suppressed):
    """Triton's compiler needs no GPU. It refuses Python that the interpreter runs, such as type hints by `Any`."""
    compiler = pytest.importorskip("triton.compiler")
    from triton.backends.compiler import GPUTarget

    from rlkit.losses import _triton

    kernel = getattr(_triton, name)
    types = dict.fromkeys(kernel.arg_names, "*fp32") | dict.fromkeys(("n", "v", "size", "tiles_per_part"), "i32")
    types |= dict.fromkeys(("hidden", "weight", "bias"), "*bf16") | {"targets": "*i64", "suppressed": "*u8"}
    if name == "_gradients":
        types["out"] = "*bf16"
    constants = _triton._blocks(torch.bfloat16)
    if not with_bias_and_suppressed:
        constants |= {"bias": None, "suppressed": None}
    signature = {x: "constexpr" if x in constants else types[x] for x in kernel.arg_names}
    source = compiler.ASTSource(kernel, signature, constants)
    compiled = compiler.compile(source, target=GPUTarget("cuda", 90, 32), options=_triton.SCHEDULE)
    assert "wgmma" in compiled.asm["ptx"]  # products on the tensor cores


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
