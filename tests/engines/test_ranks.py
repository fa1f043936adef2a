"""One process with and without a launcher, and two processes: the same numbers on the same global batch."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from isolated_cases import require, run_cases
from safetensors.torch import load_file

from rlkit.engines import make_engine
from rlkit.engines.value_head import load_value_model
from rlkit.vlm import load_model, load_processor

sys.path.insert(0, str(Path(__file__).parent))
import on_ranks
from one_gradient import OUTPUTS, VALUE, topk, train, with_teacher
from rows import make_batch


@pytest.fixture(scope="module")
def out(tiny_dir, tmp_path_factory):
    """The folder with the results of all cases, which run in one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    config = transformers.Qwen2Config(
        vocab_size=32000, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder / "big", max_shard_size="20MB")
    command = [sys.executable, on_ranks.__file__, tiny_dir, str(folder / "big"), str(folder)]
    run_cases(command, folder, [name for names in on_ranks.NAMES.values() for name in names], timeout=1800)
    return folder


def result(out, case):
    """Metrics and gradients of four steps, and the parameters after the third."""
    require(out, case)
    return json.loads((out / case / "steps.json").read_text()), torch.load(out / case / "tensors.pt", weights_only=True)


def assert_equals_one_process(out, case):
    (metrics, tensors), (expected, expected_tensors) = result(out, case), result(out, on_ranks.CASES[case].reference)
    for i, (step, expected_step) in enumerate(zip(metrics["steps"], expected["steps"], strict=True)):
        assert step == pytest.approx(expected_step, abs=1e-5, rel=1e-5), i
    assert metrics["total"] == pytest.approx(expected["total"], rel=1e-5, abs=1e-3)
    pairs = zip(
        [*tensors["gradients"], tensors["parameters"]],
        [*expected_tensors["gradients"], expected_tensors["parameters"]],
        strict=True,
    )
    for kind, (found, wanted) in enumerate(pairs):
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(
                tensor, wanted[name], atol=1e-5, rtol=1e-5, msg=lambda m, n=f"{kind} {name}": f"{n}: {m}"
            )


@pytest.mark.parametrize(
    "case", [name for name, case in on_ranks.CASES.items() if name not in (case.reference, "text_rank")]
)
def test_token_mean_invariant_to_microbatch_and_dp(out, case):
    """Loss, every metric, gradient and parameter; also frozen, with LoRA, with rows on one rank only."""
    assert_equals_one_process(out, case)


def test_mixed_text_and_image_ranks_do_not_hang(out):
    """One rank has the row without an image, the other all rows with an image."""
    assert_equals_one_process(out, "text_rank")


@pytest.mark.parametrize("case", ["one_process", "frozen", "projector", "lora", "nf4", "value"])
def test_references_have_gradients_and_change(out, case):
    metrics, tensors = result(out, case)
    assert all(step["grad_norm"] > 0.01 and step["skipped_steps"] == 0 for step in metrics["steps"])
    assert len({step["loss"] for step in metrics["steps"]}) == 4
    vision = [name for name in tensors["gradients"][0] if ".visual." in name]
    assert bool(vision) == (case in ("one_process", "projector", "value"))


def test_weights_read_in_shards_are_the_same_bits(out):
    (metrics, tensors), (expected, expected_tensors) = result(out, "data_2_on_meta"), result(out, "data_2")
    assert metrics == expected
    for kind in (0, 1, 2):
        pairs = tensors["gradients"][kind], expected_tensors["gradients"][kind]
        assert all(torch.equal(pairs[0][name], tensor) for name, tensor in pairs[1].items())


def test_no_rank_holds_the_whole_model(out):
    require(out, "loading")
    for rank in range(2):
        loading = json.loads((out / f"loading.{rank}.json").read_text())
        sharded, full = (loading[how] / loading["size"] for how in ("sharded", "full"))
        print(f"rank {rank} of 2: read in shards {sharded:.2f} of the model's size, in full {full:.2f}")
        assert sharded < 0.75 < 1 < full
        assert len(loading["same"]) == 27 and all(loading["same"])


def test_weights_that_transformers_converts_are_read_in_shards(out):
    require(out, "converted")
    for rank in range(2):
        found = json.loads((out / f"converted.{rank}.json").read_text())
        assert len(found) == 2 * len(on_ranks.CONVERTED)
        for case, (count, differ) in found.items():
            assert count > 20 and not differ, case


def test_rows_are_rebalanced_across_ranks(out):
    """Rank 0 had prompts 0, 1 and 3, rank 1 prompt 2. Afterwards rank 0 has 1 and 3, which are one micro-batch group,
    and rank 1 has 0 and 2; all responses to a prompt move with it."""
    require(out, "rebalancing")
    ranks = [json.loads((out / f"rebalancing.{rank}.json").read_text()) for rank in range(2)]
    before, after = ([rank[when] for rank in ranks] for when in ("before", "after"))
    rows = [sorted(repr(row) for rank in ranks_then for row in rank["rows"]) for ranks_then in (before, after)]
    assert rows[0] == rows[1] and len(rows[0]) == 9
    assert [sorted(rank["groups"]) for rank in after] == [[1, 3, 3, 3], [0, 0, 0, 2, 2]]
    assert max(sum(rank["tokens"]) for rank in after) < 0.8 * max(sum(rank["tokens"]) for rank in before)
    assert [rank["images"] for rank in after] == [1, 2]  # one tensor for all responses to a prompt
    assert len(set(ranks[0]["micro_batch_group"])) == 1
    pairs = set(zip(after[1]["groups"], ranks[1]["micro_batch_group"], strict=True))
    assert len(pairs) == len({number for _, number in pairs}) == 2
    assert all(rank["is_kept"] for rank in ranks)
    expected = "batch: expected the same fields on all ranks, got (.*'field_0'.*) and (.*'field_1'.*)"
    assert all(re.fullmatch(expected, rank["error"]) for rank in ranks)


def test_experts_that_only_one_rank_uses(out):
    """FSDP2 pairs the gradients of a unit by position, so that ranks added those of different experts."""
    require(out, "experts")
    expected, found = torch.load(out / "experts.pt", weights_only=True)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.any() or ".experts." not in name, name
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("case", ["data_2", "data_2_value", "fsdp1_data_2"])
def test_checkpoint_of_two_ranks_resumes_on_one(tiny_dir, out, case):
    losses = on_ranks.CASES[case].losses
    expected, batch = result(out, case)[0], make_batch(load_processor(tiny_dir))
    engine = make_engine(
        "fsdp2",
        "value_model" if losses is VALUE else "language_model",
        model=load_value_model(tiny_dir) if losses is VALUE else load_model(tiny_dir),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
    )
    assert engine.load_checkpoint(out / case / "checkpoint") == {"step": 2}
    batch = batch if losses is VALUE else with_teacher(batch)
    for loss_fn, step in zip(losses[2:], expected["steps"][2:], strict=True):
        assert train(engine, batch, loss_fn, losses) == pytest.approx(step, abs=1e-5, rel=1e-5)
    scores = engine.infer_batch(batch, OUTPUTS[losses][:1])[OUTPUTS[losses][0]]
    scores = scores if losses is VALUE else torch.stack([scores, *topk(engine, batch)])
    assert scores.sum().item() == pytest.approx(expected["total"], rel=1e-5, abs=1e-3)


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp1"])
def test_two_ranks_export_parameters_and_buffers(out, backend):
    """Rank 0 writes alone, so it must not wait for the other rank while it collects the buffers."""
    require(out, f"exported.{backend}")
    sent = [json.loads((out / f"exported.{backend}.{rank}.json").read_text()) for rank in range(2)]
    assert sent[0] == sent[1] and "model.layers.1.mlp.gate.e_score_correction_bias" in sent[0]
    assert {*sent[0]} == load_file(out / f"exported.{backend}" / "model.safetensors").keys()


def test_a_recipe_gathers_many_weights_in_one_collective(out):
    """On a CPU each rank broadcasts its part of a bucket, once for each dtype."""
    require(out, "sent")
    for rank in range(2):
        received, weights, (in_buckets, one_by_one) = torch.load(out / f"sent.{rank}.pt", weights_only=True)
        assert list(received) == list(weights) and all(torch.equal(x, weights[name]) for name, x in received.items())
        assert in_buckets <= 4 and one_by_one >= len(weights) > 40


def test_adapters_are_merged_before_weights_are_gathered(out):
    """What is gathered is what the sampler gets, in its dtype, and the matrices of the adapters."""
    require(out, "adapted")
    for rank in range(2):
        for weights, merged, gathered, adapters in torch.load(out / f"adapted.{rank}.pt", weights_only=True):
            assert weights.keys() == merged.keys() and adapters > 0
            for name, x in weights.items():
                assert torch.equal(x, merged[name].to(x.dtype)), name
            assert gathered == sum(x.nbytes for x in weights.values()) + adapters
            assert sum(x.nbytes for x in weights.values()) < 0.6 * sum(4 * x.numel() for x in merged.values())


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp1"])
def test_checkpoint_of_one_rank_resumes_on_two(out, backend):
    require(out, f"resumed.{backend}")
    expected = result(out, "one_process")[0]["steps"][2:]
    for rank in range(2):
        steps = json.loads((out / f"resumed.{backend}.{rank}.json").read_text())
        assert steps == [pytest.approx(step, abs=1e-5, rel=1e-5) for step in expected]


def test_a_killed_save_leaves_the_previous_checkpoint(tiny_dir, out):
    require(out, "killed")
    assert {path.name for path in out.glob("killed*/*.distcp")} and (out / "killed.part").is_dir()
    engine = make_engine("fsdp2", model=load_model(tiny_dir), optimizer=torch.optim.AdamW)
    assert engine.load_checkpoint(out / "killed") == {"step": 1}
    expected = torch.load(out / "killed.pt", weights_only=True)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in engine.get_per_tensor_param())
