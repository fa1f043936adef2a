"""Rows shared by two and four ranks: the numbers of one process. What the ranks do stands in `on_ulysses_ranks.py`."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from isolated_cases import require, run_cases

sys.path.insert(0, str(Path(__file__).parent))
import on_ulysses_ranks
from on_ulysses_ranks import CASES, FAMILIES, ORDER, SPLITS, is_vision, make_case, make_rows
from one_gradient import OUTPUTS, POLICY

from rlkit.engines.packing.attention import Layout, _attention
from rlkit.engines.packing.inputs import pack
from rlkit.engines.packing.ulysses import Ulysses, _cut

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("ulysses")
    run_cases([sys.executable, on_ulysses_ranks.__file__, str(out)], out, on_ulysses_ranks.NAMES, timeout=400)
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
        came = result(results, split, name, rank)
        torch.testing.assert_close(
            came["scored"], alone["scored"][came["rows"]][:, : came["scored"].shape[1]], atol=1e-5, rtol=1e-5
        )
        assert came["total"] == alone["total"]
        for step, (mine, theirs) in enumerate(zip(came["steps"], alone["steps"], strict=True)):
            assert mine == pytest.approx(theirs, abs=1e-5, rel=1e-5), (rank, step)
        pairs = zip([*came["gradients"], came["parameters"]], [*alone["gradients"], alone["parameters"]], strict=True)
        for kind, (mine, theirs) in enumerate(pairs):
            assert mine.keys() == theirs.keys()
            for parameter, tensor in mine.items():
                torch.testing.assert_close(
                    tensor, theirs[parameter], atol=1e-5, rtol=0, msg=lambda m, n=f"{kind} {parameter}": f"{n}: {m}"
                )
        torch.testing.assert_close(came["gathered"], alone["gathered"], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("split", [split for split, name in SHARED if name == "qwen2_no_rows"])
def test_ranks_that_compute_together_are_dealt_the_same_rows(results, split):
    """From one data rank that had them all; a rank with others than its partners would have said so."""
    found, scores = {}, {}
    for rank in range(SPLITS[split][0]):
        number, rows, scores[number] = result(results, split, "qwen2_no_rows", rank)["dealt"]
        assert found.setdefault(number, rows) == rows and rows
    assert len(found) > 1
    _, rows, score = result(results, "1 process", "qwen2_no_rows")["dealt"]
    assert sorted(row for part in found.values() for row in part) == sorted(rows)
    assert sum(scores.values()) == pytest.approx(score, abs=1e-3)


def test_there_is_something_to_compare(results):
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
        ("2 copies x 2 shards, Ulysses 2", "qwen2"),
    ],
)  # fmt: skip
def test_a_checkpoint_is_taken_up_by_one_rank_that_shares_no_rows(results, split, name):
    engine = make_case(CASES[name])
    assert engine.load_checkpoint(results / split / f"{name}.checkpoint") == {"step": 1}
    batch = make_rows(None, ORDER)
    for loss_fn, expected in zip(POLICY[1:], result(results, "1 process", name)["steps"][1:], strict=True):
        assert engine.train_batch(batch, loss_fn, OUTPUTS[POLICY]) == pytest.approx(expected, abs=1e-5)


def on_two_ranks(results, name):
    """What each of two ranks measured."""
    require(results, name)
    return [json.loads((results / f"{name.split('/')[-1]}.{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_one_sequence_at_a_time(results, family):
    for errors in on_two_ranks(results, f"family/{family}"):
        assert len(errors) > 20 and all(error < 1e-5 for error in errors)


def test_what_cannot_be_shared_is_said_on_every_rank(results):
    expected = {
        "copies": "fsdp_size=3: a divisor of the number of ranks expected, which is 2",
        "tensor": "tensor=3: a divisor of the number of ranks expected, which is 2",
        "key_value": "tensor=2: a divisor of num_key_value_heads expected, qwen2 has 1",
        "experts": "tensor=2: qwen3_moe: moe_tp_experts, packed_colwise in its plan is not supported",
        "adapters": "tensor=2: it goes neither with adapters nor with Ulysses",
        "plan": "tensor=2: gpt2 has no plan in transformers",
        "both": "fsdp_size=2: it does not go together with tensor=2",
        "world": "ulysses_sequence_parallel_size=3: a divisor of the number of ranks expected, which is 2",
        "heads": "ulysses_sequence_parallel_size=2: a divisor of the number of attention heads expected, qwen2 has 3",
        "rope": "ulysses_sequence_parallel_size=2: qwen2 scales RoPE (dynamic) by the longest position, which is not "
        "in every part",
        "padded": "ulysses_sequence_parallel_size=2: it shares packed rows; use_remove_padding=True expected",
        **dict.fromkeys(
            ("rows", "field", "size"),
            "batch: expected the same rows on all ranks of a model-parallel group, got different ones; give each rank "
            "rows[engine.data_parallel_rank :: engine.data_parallel_size]",
        ),
    }
    for said in on_two_ranks(results, "refusals"):
        assert {name: said.get(name) for name in expected} == expected


def test_a_checkpoint_that_will_not_do_is_named_on_every_rank(results):
    """Of another model, without a shard, cut short, damaged, or none at all."""
    other = r"OUT/Ulysses 2/qwen2.checkpoint: does not fit this model and optimizer, or is damaged: "
    expected = {
        "wider": other + r"Size mismatch .*\[8, 32\].*\[16, 32\]. for .*layers.0.self_attn.k_proj.weight",
        "deeper": other + r"Missing key in .*layers\.2\.",
        "shallower": r"OUT/Ulysses 2/qwen2.checkpoint: of another model.*it holds model.layers.1.input_layernorm",
        "gone": r"OUT/gone: __1_0.distcp is missing, \d+ bytes expected",
        "half": r"OUT/half: __1_0.distcp has \d+ bytes, \d+ bytes expected",
        "rotten": r"OUT/rotten: .* is damaged: ",
        "unlisted": r"OUT/unlisted: .metadata cannot be read: ",
        "none": r"OUT/none: no manifest.json",
    }
    for said in on_two_ranks(results, "refusals"):
        for name, pattern in expected.items():
            assert re.match("checkpoint " + pattern, said.get(name, "nothing")), name


# --- in one process: what a rank is given


@pytest.mark.parametrize("size", [5, 25])
def test_a_row_is_filled_up_and_cut_in_equal_parts(size):
    batch = make_rows(None, ORDER)
    whole = pack(batch, None, CPU)
    tokens = whole.kwargs["input_ids"].shape[1]
    assert tokens % size
    found, counts = [], []
    for rank in range(size):
        inputs = pack(batch, None, CPU, ulysses=Ulysses(size, rank, None, None))
        kwargs = {name: inputs.kwargs[name] for name in ("input_ids", "position_ids", "packed_layout")}
        assert sum(kwargs["packed_layout"].lengths) == kwargs["input_ids"].shape[1] == kwargs["position_ids"].shape[1]
        own = _cut(torch.nn.Identity(), (), kwargs)[1]["input_ids"][0]
        assert len(own) == -(-tokens // size) and len(inputs.keep) == len(inputs.targets) >= 1
        found += [*zip(own[inputs.keep].tolist(), inputs.targets.tolist(), strict=True)][: inputs.counts[rank]]
        counts.append(inputs.counts)
    assert all(c == counts[0] for c in counts) and (0 in counts[0]) == (size == 25)
    # what is kept and its target stand, once each, in the order of `slots`
    order = [whole.slots.tolist().index(slot) for slot in inputs.slots.tolist()]
    expected = zip(whole.kwargs["input_ids"][0, whole.keep[order]].tolist(), whole.targets[order].tolist(), strict=True)
    assert found == list(expected)


def test_an_argument_that_cannot_be_cut_is_refused_by_name():
    layout = Layout([0], [4], [(0, 0)], CPU)
    layout.ulysses = Ulysses(2, 1, None, None)
    module = torch.nn.Identity()
    module.config = SimpleNamespace(model_type="other")
    mask, features = torch.tensor([[False, True, True, False]]), [torch.tensor([[1.0], [2.0]])]
    given = {"packed_layout": layout, "visual_pos_masks": mask, "deepstack_visual_embeds": features, "use_cache": False}
    _, cut = _cut(module, (torch.arange(4)[None],), given)
    assert cut["input"].tolist() == [[2, 3]] and cut["visual_pos_masks"].tolist() == [[True, False]]
    assert cut["deepstack_visual_embeds"][0].tolist() == [[2.0]] and cut["use_cache"] is False
    for unknown in (torch.zeros(4), {"layer": torch.zeros(1, 4)}, [torch.zeros(3)]):
        with pytest.raises(ValueError, match="other: ulysses_.*: how to cut its decoder's features is not known"):
            _cut(module, (), {"packed_layout": layout, "features": unknown})


def test_a_row_that_was_not_cut_is_noticed_in_attention():
    """A model may call its layers past the module that the hook is on."""
    layout = Layout([0], [4], [(0, 0)], CPU)
    layout.ulysses = Ulysses(2, 0, None, None)
    x, odd = torch.zeros(1, 2, 4, 8), torch.zeros(1, 3, 2, 8)
    for q in (x, odd):
        with pytest.raises(
            ValueError, match="a part of each expected in attention, came [24] of 4 tokens and [23] heads"
        ):
            _attention(torch.nn.Identity(), q, q, q, None, packed_layout=layout)
