"""`recipes/reward_model.py` as a person runs it, and its loss against TRL's."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import helpers  # noqa: E402
from helpers import evaluation, numbers, run_here, text_dir  # noqa: E402, F401

from rlkit.data import Batch, collate, load_pairs  # noqa: E402
from rlkit.engines import make_engine  # noqa: E402
from rlkit.engines.value_head import load_value_model, scoring_batch  # noqa: E402
from rlkit.rewards import model_scores  # noqa: E402
from rlkit.vlm import encode_prompt, encode_responses, load_processor  # noqa: E402

LEARNING = [
    "--task", "helpers:few_digits", "--steps", 20, "--prompts_per_step", 16, "--warmup_steps", 5, "--save_every", 8,
]  # fmt: skip
SMALL = ["--task", "helpers:few_digits", "--steps", 2, "--prompts_per_step", 6]


@pytest.fixture(scope="module")
def whole(tiny_dir, tmp_path_factory):
    """A run that was never stopped, from random weights."""
    out = tmp_path_factory.mktemp("reward_model") / "whole"
    run_here("reward_model", "--model", tiny_dir, "--out", out, "--lr", 2e-3, *LEARNING)
    return out


def learned(found):
    """All scores are 0 at first, and a tie is not right; chance is 0.5."""
    return found["accuracy_after"] > 0.8 and found["heldout_loss_after"] < 0.6 * found["heldout_loss_before"]


def test_learns(whole):
    # seen with AVX2, without it, and with two threads: accuracy 0 -> 1.0
    assert learned(evaluation(whole)) and evaluation(whole)["accuracy_before"] == 0
    rows = helpers.rows(whole)
    assert [row["step"] for row in rows] == list(range(20))
    assert rows[0]["loss"] == pytest.approx(0.6931, abs=1e-4) and rows[-1]["preference/margin"] > 1
    assert {"grad_norm", "lr", "tokens", "skipped_rows", "time/encode", "time/train"} <= rows[0].keys()
    assert [p.name for p in sorted((whole / "checkpoints").iterdir())] == ["step_16", "step_20"]
    assert len(helpers.responses_on_page(whole)) == 40


def test_learning_rate_0_does_not_learn(tiny_dir, tmp_path):
    run_here("reward_model", "--model", tiny_dir, "--out", tmp_path / "run", *LEARNING, "--lr", 0.0, "--steps", 2)
    found = evaluation(tmp_path / "run")
    assert not learned(found) and found["heldout_loss_after"] == found["heldout_loss_before"]  # however long


def test_resume_is_exact(tiny_dir, tmp_path):
    helpers.assert_resume_is_exact(tmp_path, "reward_model", "--model", tiny_dir, *SMALL, "--lr", 2e-3)


def test_the_export_is_the_model_that_was_measured(whole):
    """Scores of held-out responses by the model that another program would load, each alone, and all at once."""
    processor = load_processor(str(whole / "model"))
    engine = make_engine("fsdp2", "value_model", model=load_value_model(str(whole / "model")))
    task, samples = load_pairs("helpers:few_digits"), []
    for i in range(12):
        prompt = encode_prompt(processor, task.heldout[i])
        responses = [prompt.row["chosen"], prompt.row["rejected"]]
        samples += encode_responses(prompt, processor, responses, [processor.tokenizer.eos_token_id], 100)
    scores = torch.stack([engine.infer_batch(scoring_batch(collate([s])))["values"].sum() for s in samples])
    assert (scores[0::2] > scores[1::2]).float().mean() >= 0.8
    rewards = model_scores(lambda batch: engine.infer_batch(scoring_batch(batch))["values"].sum(1), samples)
    torch.testing.assert_close(rewards, scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("case", "centre_coef"), [("reward", 0.0), ("reward_margin", 0.0), ("reward_centred", 0.01)])
def test_loss_equals_trls(case, centre_coef):
    """TRL has all chosen responses first, here each pair's rows are next to each other."""
    golden = load_file(HERE.parent / "peers" / "golden_trl.safetensors")
    x = {key.rsplit("/", 1)[1]: value for key, value in golden.items() if key.startswith(f"{case}/in/")}
    n = len(x["rewards"])
    order = torch.arange(n).view(2, -1).T.flatten()
    values = torch.zeros(n, 4).index_put((torch.arange(n), torch.arange(n) % 4), x["rewards"][order, 0])
    values.requires_grad_()
    batch = Batch(torch.zeros(n, 4, dtype=torch.long), values != 0, [4] * n)
    batch.add(margin=x.get("margin", torch.zeros(n // 2)).repeat_interleave(2))
    pair_loss = helpers.load("reward_model").pair_loss
    loss, stats = pair_loss(SimpleNamespace(values=values), batch, centre_coef=centre_coef)
    torch.testing.assert_close(loss.detach(), golden[f"{case}/out/out"], rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(loss, values)
    expected = golden[f"{case}/out/d_rewards"][order, 0]
    torch.testing.assert_close(gradient[torch.arange(n), torch.arange(n) % 4], expected, rtol=1e-5, atol=1e-6)
    better = (x["rewards"][: n // 2] > x["rewards"][n // 2 :]).float().mean().item()
    assert stats["preference/accuracy"].item() == pytest.approx(better)


def test_a_margin_is_a_finite_number():
    margin_of = helpers.load("reward_model").margin_of
    for margin in (None, "", 0, float("nan")):  # nan: none, in a table of numbers
        assert margin_of({"margin": margin}) == margin_of({}) == 0
    assert margin_of({"margin": "1.5"}) == 1.5
    for margin in ("far", "inf", float("-inf"), [1]):
        with pytest.raises(ValueError, match="^margin: expected a finite number, got "):
            margin_of({"margin": margin})


def test_margins_and_lora_on_a_text_file(text_dir, tmp_path):  # noqa: F811
    lines = [{"prompt": f"Name {i}.", "chosen": "yes", "rejected": "no", "margin": 2.0} for i in range(24)]
    lines[4]["rejected"] = "yes"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_here(
        "reward_model", "--model", text_dir, "--task", tmp_path / "rows.jsonl", "--out", tmp_path / "run", "--steps", 2,
        "--prompts_per_step", 22, "--lora_rank", 4, "--enable_gradient_checkpointing", "--centre_coef", 0.01,
    )  # fmt: skip
    rows, found = numbers(tmp_path / "run"), evaluation(tmp_path / "run")
    assert rows[0]["loss"] == pytest.approx(torch.nn.functional.softplus(torch.tensor(2.0)).item(), rel=1e-5)
    assert rows[0]["tokens"] > 10 * 40  # of whole responses with their prompts
    assert sum(row["skipped_rows"] for row in rows) == 2 or found["heldout_skipped"] == 1
    head = load_value_model(str(tmp_path / "run" / "model")).get_output_embeddings().weight
    assert head.abs().max() > 0


def test_help_names_every_option(capsys):
    helpers.assert_help_names_every_option("reward_model", capsys)


def test_bad_input_is_one_clear_message(whole, tiny_dir, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    (tmp_path / "margins.jsonl").write_text('{"prompt": "q", "chosen": "a", "rejected": "b", "margin": "far"}\n' * 20)
    for message, arguments in {
        "reward_model: .*rows.jsonl: chosen: expected a column chosen": ["--task", tmp_path / "rows.jsonl"],
        "reward_model: out .*holds a run already; continue it with --resume": ["--out", whole],
        "reward_model-.*: step 0: no row of this batch can be trained on": ["--max_tokens", 5],
        "reward_model-.*: step 0: no row of this batch can be": ["--task", tmp_path / "margins.jsonl"],
    }.items():
        with pytest.raises(SystemExit, match=message):
            out = tmp_path / str(len(list(tmp_path.iterdir())))
            run_here("reward_model", "--model", tiny_dir, "--out", out, *SMALL, *arguments)
