"""`recipes/sft.py` as a person runs it, and its loss against transformers' own and TRL's."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import helpers  # noqa: E402
from helpers import evaluation, numbers, run_here, text_dir  # noqa: E402, F401

from rlkit.data import Batch, load_task, step_rows  # noqa: E402
from rlkit.vlm import load_processor  # noqa: E402

LEARNING = [
    "--task", "helpers:few_digits", "--steps", 25, "--prompts_per_step", 16, "--warmup_steps", 5, "--save_every", 10,
    "--max_new_tokens", 2,
]  # fmt: skip
SMALL = ["--steps", 2, "--prompts_per_step", 6, "--max_new_tokens", 2]


@pytest.fixture(scope="module")
def whole(tiny_dir, tmp_path_factory):
    """A run that was never killed, from random weights."""
    out = tmp_path_factory.mktemp("sft") / "whole"
    run_here("sft", "--model", tiny_dir, "--out", out, "--lr", 2e-3, *LEARNING)
    return out


def learned(found):
    right = found["accuracy_after"] > found["accuracy_before"] + 0.2
    return right and found["heldout_loss_after"] < 0.2 * found["heldout_loss_before"]


def test_learns(whole):
    # seen with AVX2, without it, and with two threads: held-out accuracy 0 -> 1.0
    assert learned(evaluation(whole))


def test_learning_rate_0_does_not_learn(tiny_dir, tmp_path):
    run_here("sft", "--model", tiny_dir, "--out", tmp_path / "run", *LEARNING, "--lr", 0.0, "--steps", 3)
    found = evaluation(tmp_path / "run")
    assert not learned(found) and found["heldout_loss_after"] == found["heldout_loss_before"]


def test_resume_is_exact(tiny_dir, tmp_path):
    helpers.assert_resume_is_exact(tmp_path, "sft", "--model", tiny_dir, *SMALL, "--lr", 2e-3)


def test_leaves_what_it_promises(whole):
    rows = helpers.rows(whole)
    assert [row["step"] for row in rows] == list(range(25))
    assert {"loss", "grad_norm", "lr", "tokens", "skipped_rows", "time/encode", "time/train"} <= rows[0].keys()
    assert all(row["tokens"] == 32 for row in rows)  # a digit and the token that ends the response, 16 times
    assert [p.name for p in sorted((whole / "checkpoints").iterdir())] == ["step_20", "step_25"]
    heldout = helpers.responses_on_page(whole)
    assert len(heldout) == 40 and all(one["images"] for one in heldout)
    assert json.loads((whole / "config.json").read_text())["lr"] == 2e-3
    assert AutoModelForImageTextToText.from_pretrained(whole / "model").num_parameters() > 5e5
    assert load_processor(str(whole / "model")).image_processor.merge_size == 2


def test_loss_equals_transformers(whole, tiny_dir):
    """The first step's loss is what the model itself says, given `labels` and -100 for all that is no response."""
    processor, model = load_processor(tiny_dir), AutoModelForImageTextToText.from_pretrained(tiny_dir)
    rows = [row for _, row in step_rows(helpers.few_digits().train, 0, 16, 0)]
    prompt = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What digit is this?<|im_end|>\n"
    prompt += "<|im_start|>assistant\n"
    texts = [prompt + row["answer"] + "<|im_end|>" for row in rows]
    inputs = processor(text=texts, images=[row["images"] for row in rows], padding=True, return_tensors="pt")
    labels = inputs["input_ids"].clone()
    labels[:, :-2] = -100  # padded on the left, and a response is one token and its end
    with torch.no_grad():
        assert model(**inputs, labels=labels).loss.item() == pytest.approx(numbers(whole)[0]["loss"], rel=1e-5)


def test_loss_equals_trls():
    golden = load_file(HERE.parent / "peers" / "golden_trl.safetensors")
    logprobs, mask = golden["sft/in/logprobs"].requires_grad_(), golden["sft/in/mask"]
    batch = Batch(torch.zeros(mask.shape, dtype=torch.long), mask, [mask.shape[1]] * len(mask))
    loss, _ = helpers.load("sft").loss_fn(SimpleNamespace(logprobs=logprobs), batch)
    torch.testing.assert_close(loss.detach(), golden["sft/out/out"], rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, golden["sft/out/d_logprobs"], rtol=1e-5, atol=1e-6)


def test_chats_with_the_options_of_the_real_thing(tiny_dir, tmp_path):
    """Several turns, an image column, a bad row, LoRA, fused logprobs, checkpointing, no responses asked for."""
    lines = []
    for i, row in enumerate(load_task("digits").train[:24]):
        row["images"][0].save(tmp_path / f"{i}.png")
        turns = [("user", "Look."), ("assistant", "Yes."), ("user", "Which?"), ("assistant", row["answer"])]
        messages = [{"role": role, "content": content} for role, content in turns]
        lines.append({"messages": messages[: 3 if i == 5 else 4], "image": f"{i}.png"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_here(
        "sft", "--model", tiny_dir, "--task", tmp_path / "rows.jsonl", "--out", tmp_path / "run", "--steps", 2,
        "--prompts_per_step", 22, "--max_new_tokens", 0, "--lora_rank", 4, "--lora_alpha", 8, "--use_fused_kernels",
        "--enable_gradient_checkpointing", "--freeze_vision_tower", "--micro_batch_tokens", 100,
    )  # fmt: skip
    found, rows = evaluation(tmp_path / "run"), numbers(tmp_path / "run")
    skipped = [row["skipped_rows"] for row in rows]
    assert skipped == [1, 1] or (skipped == [0, 0] and found["heldout_skipped"] == 1)
    processor = load_processor(tiny_dir)
    response = len(processor.tokenizer("Yes.")["input_ids"]) + 1
    assert rows[0]["tokens"] == (22 - skipped[0]) * (response + 2)
    assert "accuracy_after" not in found and found["heldout_loss_after"] < found["heldout_loss_before"]
    before, after = (load_file(Path(path) / "model.safetensors") for path in (tiny_dir, tmp_path / "run" / "model"))
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert before.keys() == after.keys() and changed and not any("visual" in name for name in changed)


def test_text(text_dir, tmp_path):  # noqa: F811
    run_here("sft", "--model", text_dir, "--task", "sorting", "--out", tmp_path / "run", *SMALL)
    assert numbers(tmp_path / "run")[1]["loss"] > 0


def test_the_last_response_alone_with_a_template_of_a_file(text_dir, tmp_path):  # noqa: F811
    """The exported model has the template."""
    turns = [("user", "Sort the digits 21."), ("assistant", "12"), ("user", "And 31?"), ("assistant", "1 3")]
    line = json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})
    (tmp_path / "rows.jsonl").write_text(f"{line}\n" * 20)
    (tmp_path / "mine.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}Said: {% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}"
    )
    run_here(
        "sft", "--model", text_dir, "--task", tmp_path / "rows.jsonl", "--out", tmp_path / "run", "--steps", 1,
        "--prompts_per_step", 4, "--max_new_tokens", 0, "--train_on", "last",
        "--chat_template", tmp_path / "mine.jinja",
    )  # fmt: skip
    tokens = len(load_processor(str(text_dir))("1 3")["input_ids"]) + 1
    assert [row["tokens"] for row in numbers(tmp_path / "run")] == [4 * tokens]
    assert load_processor(str(tmp_path / "run" / "model")).chat_template == (tmp_path / "mine.jinja").read_text()


def test_plain_text(text_dir, tmp_path):  # noqa: F811
    """Every token but the first is trained; there is no prompt to answer."""
    (tmp_path / "texts.jsonl").write_text('{"text": "Sort the digits 311."}\n' * 20)
    run_here(
        "sft", "--model", text_dir, "--task", tmp_path / "texts.jsonl", "--out", tmp_path / "run", "--steps", 2,
        "--prompts_per_step", 4, "--max_new_tokens", 0,
    )  # fmt: skip
    tokens = len(load_processor(str(text_dir))("Sort the digits 311.")["input_ids"])
    assert [row["tokens"] for row in numbers(tmp_path / "run")] == [4 * tokens] * 2
    found = evaluation(tmp_path / "run")
    assert found["heldout"] == 2 and found["heldout_loss_after"] < found["heldout_loss_before"]


def test_help_names_every_option(capsys):
    helpers.assert_help_names_every_option("sft", capsys)


def test_bad_input_is_one_clear_message(whole, tiny_dir, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"words": "q"}\n')
    for message, arguments in {
        "sft: task: expected a built-in": ["--task", "digit"],
        "sft: .*rows.jsonl: question: expected a column": ["--task", tmp_path / "rows.jsonl"],
        "sft: model: expected a directory with a config.json": ["--model", tmp_path],
        "sft: out .*holds a run already; continue it with --resume": ["--out", whole],
        "sft-.*: step 0: no row of this batch can be trained on": ["--max_tokens", 5],
    }.items():
        with pytest.raises(SystemExit, match=message):
            run_here("sft", "--model", tiny_dir, "--out", tmp_path / "run", *SMALL, *arguments)
