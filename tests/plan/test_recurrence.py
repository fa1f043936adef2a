"""Stand-ins for the kernels of recurrent layers: what they save, and that a plan calls them."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3_5TextConfig

from rlkit.plan.kernels import planned_recurrence
from rlkit.vlm.loading import empty_model

sys.path.insert(0, str(Path(__file__).parents[1]))
from forked_commands import run_commands  # noqa: E402

BATCH, TOKENS, HEADS, KEY, VALUE = 2, 130, 4, 16, 32
STATE = (BATCH, HEADS, KEY, VALUE)
SIZES = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": HEADS,
    "linear_key_head_dim": KEY, "linear_value_head_dim": VALUE, "max_position_embeddings": 4096,
}  # fmt: skip


def functions_of_qwen3_5(model):
    return sys.modules[type(model).__module__]


def inputs(device, size):
    """Queries, keys, values, decays and beta."""
    tokens = (BATCH, TOKENS, HEADS)
    shapes = (*tokens, size), (*tokens, size), (*tokens, VALUE * size // KEY)
    numbers = [torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    decays = torch.rand(tokens, device=device).neg().requires_grad_()
    return [*numbers, decays, torch.rand(tokens, device=device, dtype=torch.bfloat16).requires_grad_()]


def saved_bytes(function, *tensors, **options):
    """Bytes that a function saves for its backward pass, without its inputs; and its results."""
    given, found = {id(x) for x in tensors}, {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: found.update({id(x): x}) or x, lambda x: x):
        out = function(*tensors, **options)
    return sum(x.nbytes for x in found.values() if id(x) not in given), out


@pytest.fixture
def planned():
    model = empty_model("", Qwen3_5TextConfig(**SIZES), dtype=torch.bfloat16)
    with planned_recurrence([model]):
        yield functions_of_qwen3_5(model)


@pytest.mark.parametrize("start", [None, torch.zeros(STATE)], ids=["zero", "given"])
def test_bytes_of_the_gated_delta_rule(planned, start):
    """Normalized queries and keys with their norms, cumulative decays, and 64 numbers for each token and head."""
    tensors = inputs("cpu", KEY)
    start = start if start is None else start.requires_grad_()
    options = {"initial_state": start, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    saved, (out, state) = saved_bytes(planned.torch_chunk_gated_delta_rule, *tensors, **options)
    of_start = 0 if start is None else start.nbytes
    rows = BATCH * TOKENS * HEADS
    assert saved - of_start == rows * (2 * KEY * 2 + 2 * 4 + 4 + 64 * 2)
    assert out.shape == tensors[2].shape and out.dtype == torch.bfloat16
    assert state.shape == STATE and state.dtype == torch.float32
    (out.float().sum() + state.sum()).backward()
    assert all(x.grad.shape == x.shape and x.grad.dtype == x.dtype for x in tensors)
    assert start is None or start.grad.shape == STATE


def test_the_convolution_saves_its_inputs(planned):
    x, weight = torch.randn(2, 8, 50, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    saved, out = saved_bytes(planned.causal_conv1d_fn, x, weight, None, activation="silu")
    assert saved == 0 and out.shape == x.shape
    out.sum().backward()
    assert x.grad.shape == x.shape and weight.grad.shape == weight.shape


PLAN = """
import sys
from rlkit.plan.__main__ import main
from transformers.models.qwen3_5 import modeling_qwen3_5 as module

def fail(*args, **kwargs):
    raise AssertionError("the loop over chunks")

module.torch_chunk_gated_delta_rule = fail
try:
    main(sys.argv[1:])
finally:
    print(module.torch_chunk_gated_delta_rule is fail)  # the stand-in was there during the plan alone
"""


def test_a_plan_does_not_call_the_loop_over_chunks(tmp_path):
    """It takes minutes at real sizes, and its float32 copies much memory that a GPU does not need."""
    Qwen3_5TextConfig(**SIZES).save_pretrained(tmp_path / "model")
    lengths = ["--max_prompt_tokens", 256, "--max_new_tokens", 256, "--prompts_per_step", 1, "--group_size", 2]
    command = ["recipes/grpo_vlm.py", "--model", tmp_path / "model", *lengths, "--no_advice"]
    (done,) = run_commands([["-c", PLAN, *command]], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "| forward and backward |" in done.stdout and done.stdout.splitlines()[-1] == "True"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_of_flash_linear_attention_saves_the_same(planned):
    """Not run yet."""
    fla = pytest.importorskip("fla.ops.gated_delta_rule")
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected, (out, state) = saved_bytes(fla.chunk_gated_delta_rule, *inputs("cuda", 64), **options)
    found, (planned_out, planned_state) = saved_bytes(
        planned.torch_chunk_gated_delta_rule, *inputs("cuda", 64), **options
    )
    assert found == expected
    assert planned_out.shape == out.shape and planned_out.dtype == out.dtype
    assert planned_state.shape == state.shape and planned_state.dtype == state.dtype
