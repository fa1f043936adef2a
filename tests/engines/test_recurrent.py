"""Recurrent layers in packed rows: the rows that they compute, and responses that continue from a prompt's last
state."""

import gc
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from family_configs import LINEAR, TEXT
from test_families import CPU, WAYS, all_at_once, check, gradients, text_model

from rlkit.data import append_response, collate
from rlkit.data.samples import prompt_sample
from rlkit.engines.packing.attention import use_packed_attention
from rlkit.engines.packing.inputs import prepare_model_inputs
from rlkit.engines.packing.layout import PackedLayout

CONTINUING = ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear"]
CASES = {  # (tokens of a prompt, tokens of each of its responses)
    "responses of one token": [(9, (1, 1, 1))],
    "one response of one token": [(9, (1, 6))],
    "a prompt shorter than the convolution": [(2, (5, 3)), (1, (4, 9))],
    "a group of one": [(7, (5,)), (6, (3, 8))],
    "two groups": [(9, (4, 6)), (21, (3, 5, 11))],
    "two groups of one length": [(9, (4, 4)), (9, (4, 4))],
    "no shared prompt": [(7, (5,)), (6, (3,)), (20, (2,))],
    "longer than a chunk of the kernel": [(70, (3, 80)), (5, (66, 65))],
}


def model_of(family, **sizes):
    """A tiny model whose states last: as transformers draws `A_log`, they decay within a token or two."""
    model = text_model(family, {**TEXT.get(family, LINEAR), "max_position_embeddings": 512, **sizes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-4)
    return model


def batch_of(groups):
    """A batch of random tokens and a random weight for each."""
    g = torch.Generator().manual_seed(0)
    samples = []
    for prompt, responses in groups:
        start = prompt_sample(torch.randint(3, 80, (prompt,), generator=g).tolist())
        for length in responses:
            response = torch.randint(3, 80, (length,), generator=g).tolist()
            samples.append(append_response(start, response, [-1.0] * length))
    batch = collate(samples)
    return batch, torch.randn(batch.tokens.shape, generator=g)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("case", CASES)
def test_responses_that_continue_equal_single_sequences(case, checkpointing):
    model = model_of("qwen3_5_text")
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable()
    check(model, *batch_of(CASES[case]), ways=["shared"], atol=5e-5)


@pytest.mark.parametrize("family", [*CONTINUING, "qwen4_exp_text"])
def test_each_family_continues(family):
    check(model_of(family), *batch_of(CASES["two groups"]), ways=["shared"], atol=5e-5)


@pytest.mark.parametrize("family", [*CONTINUING, "lfm2"])
def test_how_often_the_tokens_of_a_shared_prompt_are_computed(family):
    """Layers with the gated delta rule compute them once, others once more for each response."""
    model, tokens = model_of(family), []
    use_packed_attention(model)
    names = {"lfm2": "in_proj", "qwen3_next": "in_proj_qkvz", "qwen3_5_text": "in_proj_qkv"}
    mixer = next(module for module in model.modules() if type(module).__name__.endswith(("Net", "Conv", "Attention")))
    projection = getattr(mixer, names.get(family, "q_proj"))
    projection.register_forward_hook(lambda layer, args, output: tokens.append(output[..., 0].numel()))
    batch, weights = batch_of([(9, (8, 8, 8))])
    all_at_once(model, batch, weights, WAYS["shared"])
    assert sum(tokens) == (9 + 3 * (9 + 8) if family == "lfm2" else 9 + 3 * 8)
    tokens.clear()
    all_at_once(model, batch, weights, WAYS["packed"])
    assert sum(tokens) == 3 * (9 + 8)


@pytest.mark.parametrize("family", CONTINUING)
def test_one_token_is_not_computed_as_in_generation(family, monkeypatch):
    """That path has no backward pass in the kernels for GPUs, and overwrites the state of the convolution."""
    model = model_of(family)
    module = sys.modules[type(model).__module__]
    paths = [name for name in vars(module) if name.endswith(("conv1d_update", "recurrent_gated_delta_rule"))]
    paths += [name for name in vars(module) if name == "recurrent_kimi_delta_attention"]
    assert len(paths) == 2

    def fail(*args, **kwargs):
        raise AssertionError("the path for generation")

    for name in paths:
        monkeypatch.setattr(module, name, fail)
    use_packed_attention(model)
    all_at_once(model, *batch_of([(9, (1, 1, 6)), (1, (1, 1))]), WAYS["shared"])


def test_rows_of_a_packed_row():
    """A prompt of 3 tokens with responses of 1 and 2, a sequence of 2, and padding of none; 8 is the index of
    padding."""
    layout = PackedLayout([0, 3, 4, 6, 8], [3, 1, 2, 2, 0], [(0, 0), (0, 3), (0, 3), (0, 0), (0, 0)], CPU)
    with_prefixes, continuing = layout.rows_with_prefixes, layout.rows_that_continue
    assert [block.tokens.tolist() for block in with_prefixes.blocks] == [
        [[0, 1, 2], [6, 7, 8]],
        [[0, 1, 2, 3, 8], [0, 1, 2, 4, 5]],
    ]
    assert with_prefixes.outputs.tolist() == [0, 1, 2, 9, 14, 15, 3, 4]
    assert [block.prompts for block in with_prefixes.blocks] == [None, None]
    assert [block.tokens.tolist() for block in continuing.blocks] == [[[0, 1, 2], [8, 6, 7]], [[3, 8]], [[4, 5]]]
    assert [block.prompts if i == 0 else block.prompts.tolist() for i, block in enumerate(continuing.blocks)] == [
        None, [0], [0],
    ]  # fmt: skip
    assert continuing.outputs.tolist() == [0, 1, 2, 6, 8, 9, 4, 5]


def test_padding_adds_less_than_the_tokens_of_a_block():
    lengths = [1, 2, 3, 5, 9, 17, 100, 1000, 1023]
    layout = PackedLayout([sum(lengths[:i]) for i in range(len(lengths))], lengths, [(0, 0)] * len(lengths), CPU)
    for rows in (layout.rows_with_prefixes, layout.rows_that_continue):
        for block in rows.blocks:
            assert (block.tokens == sum(lengths)).sum() < (block.tokens < sum(lengths)).sum()
        assert len(rows.blocks) == 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("way", ["packed", "shared"])
def test_kernels_on_a_gpu_equal_single_sequences(way):
    """Qwen3.5 in bfloat16 with the kernels of flash-linear-attention. Not run yet."""
    pytest.importorskip("fla.ops.gated_delta_rule", reason="needs pip install -e '.[linear-attention]'")
    compare_with_single_sequences(way, torch.device("cuda"), torch.bfloat16, tolerances=(3e-3, 0.1))


def compare_with_single_sequences(way, device, dtype, tolerances):
    """Compare logprobs by their mean difference, and gradients by the norm of the difference relative to theirs.

    If responses started without their prompt's recurrent state or without its convolution's, logprobs would differ by
    0.007 and gradients by 90 % or more; if the state had no gradient, gradients would differ by 40 %.
    """
    model = model_of("qwen3_5_text", linear_key_head_dim=64, linear_value_head_dim=64).to(device, dtype)
    batch, weights = batch_of([group for groups in CASES.values() for group in groups])

    def logprobs_of(rows, **options):
        inputs = prepare_model_inputs(batch.select(rows), None, device, **options)
        logits = inputs.select_outputs(model(**inputs.kwargs, use_cache=False).logits).float()
        return inputs.scatter(logits.log_softmax(-1).gather(1, inputs.targets[:, None])[:, 0])

    weights = weights.to(device)
    alone = torch.zeros_like(weights)
    for row, length in enumerate(batch.lengths):
        alone[row, :length] = logprobs_of([row], remove_padding=False)[0, :length]
    expected = gradients(model, (weights * alone).sum())
    use_packed_attention(model)
    packed = logprobs_of(range(len(batch)), **WAYS[way])
    found = gradients(model, (weights * packed).sum())
    assert (packed - alone).abs().mean() < tolerances[0]
    wrong = {name: ((x - expected[name]).norm() / expected[name].norm()).item() for name, x in found.items()}
    assert max(wrong.values()) < tolerances[1], wrong


@pytest.mark.parametrize("way", ["packed", "shared"])
def test_the_comparison_of_the_kernels_on_a_cpu(way):
    """The reference in the test on a GPU, here with plain torch layers in float32."""
    compare_with_single_sequences(way, CPU, torch.float32, tolerances=(1e-6, 1e-4))


@pytest.mark.parametrize("family", CONTINUING)
def test_states_of_prompts_are_freed_without_the_garbage_collector(family):
    """It runs rarely: in a plan of a model with 9B parameters, 17 GiB stayed allocated after a training step."""
    model, (batch, weights) = model_of(family), batch_of([(9, (4, 6))])
    model.train()
    model.gradient_checkpointing_enable()
    use_packed_attention(model)
    all_at_once(model, batch, weights, WAYS["shared"])
    gc.collect()
    gc.disable()
    try:
        before = count_tensors()
        all_at_once(model, batch, weights, WAYS["shared"])
        assert count_tensors() == before
    finally:
        gc.enable()


def count_tensors():
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
