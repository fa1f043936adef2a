"""Rows or matrices shared by two and four ranks: the numbers of one process. The ranks run `on_ulysses_ranks.py`."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from isolated_cases import require, run_cases
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))
import on_ulysses_ranks
from on_ulysses_ranks import CASES, FAMILIES, ORDER, SPLITS, is_vision, make_case, make_rows
from one_gradient import POLICY, train, with_teacher

from rlkit.engines.packing.attention import packed_attention
from rlkit.engines.packing.inputs import prepare_model_inputs
from rlkit.engines.packing.layout import PackedLayout
from rlkit.engines.packing.ulysses import UlyssesGroup, slice_decoder_inputs

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("ulysses")
    run_cases([sys.executable, on_ulysses_ranks.__file__, str(out)], out, on_ulysses_ranks.NAMES, timeout=1800)
    return out


def result(out, split, name, rank=0):
    require(out, f"{split}/{name}")
    return torch.load(out / split / f"{name}.{rank}.pt", weights_only=True)


SHARED = [(split, name) for split, (world, *_, names) in SPLITS.items() if world > 1 for name in names]


@pytest.mark.parametrize(("split", "name"), SHARED)
def test_token_mean_invariant_to_sequence_and_tensor_parallel(results, split, name):
    """Every metric, gradient and parameter, through all losses."""
    alone = result(results, "1 process", name)
    for rank in range(SPLITS[split][0]):
        shared = result(results, split, name, rank)
        scores = alone["scores"][shared["rows"]][:, : shared["scores"].shape[1]]
        torch.testing.assert_close(shared["scores"], scores, atol=1e-5, rtol=1e-5)
        for found, expected in zip(shared.get("topk", ()), alone.get("topk", ()), strict=True):
            torch.testing.assert_close(found, expected[shared["rows"]][:, : found.shape[1]], atol=1e-5, rtol=1e-5)
        assert shared["total"] == alone["total"]
        for i, (step, expected) in enumerate(zip(shared["steps"], alone["steps"], strict=True)):
            assert step == pytest.approx(expected, abs=1e-5, rel=1e-5), (rank, i)
        tensors = zip(
            [*shared["gradients"], shared["parameters"]], [*alone["gradients"], alone["parameters"]], strict=True
        )
        for kind, (found, expected) in enumerate(tensors):
            assert found.keys() == expected.keys()
            for parameter, tensor in found.items():
                torch.testing.assert_close(
                    tensor, expected[parameter], atol=1e-5, rtol=0, msg=lambda m, n=f"{kind} {parameter}": f"{n}: {m}"
                )
        torch.testing.assert_close(shared["gathered"], alone["gathered"], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("split", [split for split, name in SHARED if name == "qwen2_no_rows"])
def test_ranks_of_a_model_parallel_group_keep_the_same_rows_when_rebalanced(results, split):
    """All rows were on one data-parallel rank. `infer_batch` would raise for ranks whose rows differ."""
    found, scores = {}, {}
    for rank in range(SPLITS[split][0]):
        number, rows, scores[number] = result(results, split, "qwen2_no_rows", rank)["rebalanced"]
        assert found.setdefault(number, rows) == rows and rows
    assert len(found) > 1
    _, rows, score = result(results, "1 process", "qwen2_no_rows")["rebalanced"]
    assert sorted(row for part in found.values() for row in part) == sorted(rows)
    assert sum(scores.values()) == pytest.approx(score, abs=1e-3)


def test_rebalanced_rows_are_on_one_rank_each(results):
    """The last of four ranks had two groups, and sends one away. A rank that receives nothing has no rows."""
    found = of_each_rank(results, "rows_of_the_last_rank", 4)
    assert sorted(row for rows in found for row in rows) == [[1] * 5, [1] * 5, [2] * 3, [2] * 3]
    assert max(map(len, found)) == 2


def test_references_have_gradients_and_change(results):
    for name, case in CASES.items():
        alone = result(results, "1 process", name)
        assert all(0.01 < step["grad_norm"] and step["skipped_steps"] == 0 for step in alone["steps"])
        assert len({step["loss"] for step in alone["steps"]}) == 4
        for gradients in alone["gradients"]:
            assert any(".visual." in n for n in gradients) == (is_vision(case) and not case.lora)
            assert all(gradient.abs().max() > 1e-5 for n, gradient in gradients.items() if "patch_embed" in n)


@pytest.mark.parametrize(
    ("split", "name"),
    [
        ("1 process", "qwen2"), ("Ulysses 2", "qwen2"), ("DP 2 x Ulysses 2", "qwen2"), ("DP 2 x TP 2", "qwen3"),
        ("2 replicas x 2 shards, Ulysses 2", "qwen2"),
    ],
)  # fmt: skip
def test_a_checkpoint_resumes_on_one_rank_that_shares_no_rows(results, split, name):
    engine = make_case(CASES[name])
    assert engine.load_checkpoint(results / split / f"{name}.checkpoint") == {"step": 1}
    batch = with_teacher(make_rows(None, ORDER))
    for loss_fn, expected in zip(POLICY[1:], result(results, "1 process", name)["steps"][1:], strict=True):
        assert train(engine, batch, loss_fn, POLICY) == pytest.approx(expected, abs=1e-5)


def of_each_rank(results, name, ranks=2):
    require(results, name)
    return [json.loads((results / f"{name.split('/')[-1]}.{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_one_sequence_at_a_time(results, family):
    atol = 4e-4 if family == "gemma3n" else 2e-5  # its vision tower has 80 blocks
    for errors in of_each_rank(results, f"family/{family}"):
        assert len(errors) > 14 and all(error < atol for error in errors)


def test_what_cannot_be_shared_is_an_error_on_every_rank(results):
    expected = {
        "fsdp_size": "fsdp_size: expected a divisor of the 2 ranks, got 3",
        "tensor": "tensor: expected a divisor of the 2 ranks, got 3",
        "key_value": "tensor: expected a divisor of the 1 num_key_value_heads of qwen2, got 2",
        "experts": "tensor: expected 1 for qwen3_moe, whose plan has unsupported moe_tp_experts, packed_colwise, got "
        "2; use ulysses_sequence_parallel_size for long rows, or the megatron engine",
        "adapters": "tensor: expected 1 with adapters and with Ulysses, got 2",
        "plan": "tensor: expected 1 for gpt2, which has no plan in transformers, got 2",
        "both": "fsdp_size: expected None with tensor=2, got 2",
        "world": "ulysses_sequence_parallel_size: expected a divisor of the 2 ranks, got 3",
        "heads": "ulysses_sequence_parallel_size: expected a divisor of the 3 attention heads of qwen2, got 2",
        "rope": "ulysses_sequence_parallel_size: expected 1 for qwen2, whose RoPE (dynamic) depends on the longest "
        "position, got 2",
        "recurrent_tensor": "tensor: expected 1 for lfm2, whose recurrent layers are not sharded, got 2",
        "sparse_tensor": "tensor: expected 1 for gemma3n_text, whose activation sparsity needs all neurons, got 2",
        "image_experts": "ulysses_sequence_parallel_size: expected 1 for ernie4_5_vl_moe, whose experts for images "
        "have no gradient on a rank without image tokens, got 2",
        "padded": "ulysses_sequence_parallel_size: expected 1 with use_remove_padding=False, got 2",
        **dict.fromkeys(
            ("rows", "field", "size"),
            "batch: expected the same rows on all ranks of a model-parallel group, got different ones; give each rank "
            "rows[engine.data_parallel_rank :: engine.data_parallel_size]",
        ),
    }
    for messages in of_each_rank(results, "errors"):
        assert {name: messages.get(name) for name in expected} == expected


def test_a_checkpoint_that_does_not_fit_is_named_on_every_rank(results):
    """Of another model, without a shard, cut short, corrupt, or not there at all."""
    fits = "expected the state of this model and optimizer, got another or a damaged one: "
    other = f"OUT/Ulysses 2/qwen2.checkpoint: {fits}"
    expected = {
        "wider": other + r"Size mismatch .*\[8, 32\].*\[16, 32\]. for .*layers.0.self_attn.k_proj.weight",
        "deeper": other + r"Missing key in .*layers\.2\.",
        "shallower": r"OUT/Ulysses 2/qwen2.checkpoint: expected only parameters that this model trains, got \d+ others "
        "such as model.layers.1.input_layernorm",
        "missing": r"OUT/missing: expected \d+ bytes in __1_0.distcp, got no file",
        "half": r"OUT/half: expected \d+ bytes in __1_0.distcp, got \d+ bytes",
        "corrupt": r"OUT/corrupt: expected the checksum \w+ of __1_0.distcp, got \w+: a damaged file",
        "no_metadata": r"OUT/no_metadata: expected the checksum \w+ of .metadata, got \w+: a damaged file",
        "none": "OUT/none: expected manifest.json, got none",
    }
    for messages in of_each_rank(results, "errors"):
        for name, pattern in expected.items():
            assert re.match("checkpoint " + pattern, messages.get(name, "no error")), name


# --- in one process: the inputs of each rank


@pytest.mark.parametrize("size", [5, 25])
def test_a_row_is_padded_and_sliced_in_equal_parts(size):
    batch = make_rows(None, ORDER)
    full = prepare_model_inputs(batch, None, CPU)
    tokens = full.kwargs["input_ids"].shape[1]
    assert tokens % size
    found, counts = [], []
    for rank in range(size):
        inputs = prepare_model_inputs(batch, None, CPU, ulysses=UlyssesGroup(size, rank, None, None))
        kwargs = {name: inputs.kwargs[name] for name in ("input_ids", "position_ids", "packed_layout")}
        assert sum(kwargs["packed_layout"].lengths) == kwargs["input_ids"].shape[1] == kwargs["position_ids"].shape[1]
        local = slice_decoder_inputs(torch.nn.Identity(), (), kwargs)[1]["input_ids"][0]
        assert len(local) == -(-tokens // size) and len(inputs.logits_to_keep) == len(inputs.targets) >= 1
        pairs = [*zip(local[inputs.logits_to_keep].tolist(), inputs.targets.tolist(), strict=True)]
        found += pairs[: inputs.outputs_per_rank[rank]]
        counts.append(inputs.outputs_per_rank)
    assert all(c == counts[0] for c in counts) and (0 in counts[0]) == (size == 25)
    # each scored token and its target occur once, in the order of `output_indices`
    order = [full.output_indices.tolist().index(i) for i in inputs.output_indices.tolist()]
    tokens = full.kwargs["input_ids"][0, full.logits_to_keep[order]].tolist()
    assert found == list(zip(tokens, full.targets[order].tolist(), strict=True))


class Waits(TorchDispatchMode):
    """Counts the numbers that are read out of tensors, for which the host would wait on a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_an_argument_that_cannot_be_sliced_is_named():
    layout = PackedLayout([0], [4], [(0, 0)], CPU)
    layout.ulysses = UlyssesGroup(2, 1, None, None)
    module = torch.nn.Identity()
    module.config = SimpleNamespace(model_type="other")
    mask, features = torch.tensor([[False, True, True, False]]), [torch.tensor([[1.0], [2.0]])]
    kwargs = {"packed_layout": layout, "visual_pos_masks": mask, "deepstack_visual_embeds": features}
    with Waits() as waits:
        _, sliced = slice_decoder_inputs(module, (torch.arange(4)[None],), {**kwargs, "use_cache": False})
    assert not waits.count
    assert sliced["input"].tolist() == [[2, 3]] and sliced["visual_pos_masks"].tolist() == [[True, False]]
    assert sliced["deepstack_visual_embeds"][0].tolist() == [[2.0]] and sliced["use_cache"] is False
    for unknown in (torch.zeros(4), {"layer": torch.zeros(1, 4)}, [torch.zeros(3)]):
        expected = "ulysses_.*: expected arguments of the decoder that are known, got features of other"
        with pytest.raises(ValueError, match=expected):
            slice_decoder_inputs(module, (), {"packed_layout": layout, "features": unknown})


def test_a_row_that_was_not_sliced_is_an_error_in_attention():
    """A model may call its layers without calling the module that has the hook."""
    layout = PackedLayout([0], [4], [(0, 0)], CPU)
    layout.ulysses = UlyssesGroup(2, 0, None, None)
    x, odd = torch.zeros(1, 2, 4, 8), torch.zeros(1, 3, 2, 8)
    for q in (x, odd):
        with pytest.raises(ValueError, match="expected 1/2 of the tokens .*, got [24] of 4 tokens and [23] heads"):
            packed_attention(torch.nn.Identity(), q, q, q, None, packed_layout=layout)
