"""`recipes/evaluate.py` as a person runs it: its figures against what is counted by hand; test_two_ranks.py has two."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import helpers  # noqa: E402
from helpers import evaluation, numbers, run_here, text_dir  # noqa: E402, F401

from rlkit.data import prompt_sample  # noqa: E402
from rlkit.tracking import Run  # noqa: E402
from rlkit.vlm import load_processor  # noqa: E402

SMALL = ["--rows", 20, "--group_size", 4, "--pass_at", 1, 2, 4, "--prompts_per_step", 8, "--max_new_tokens", 3]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return helpers.built_start(tmp_path_factory)


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluate") / "whole"
    run_here("evaluate", "--model", start, "--task", "helpers:few_digits", "--out", out, *SMALL)
    return out


def responses(out):
    return [json.loads(line) for line in (out / "responses.jsonl").read_text().splitlines()]


def test_figures_are_those_of_the_responses(whole):
    found, said = evaluation(whole)["tasks"]["helpers:few_digits"], responses(whole)
    expected = [row["answer"] for row in helpers.few_digits().heldout[:20]]
    assert [a["row"] for a in said] == list(range(20)) and found["rows"] == 20
    hits = [[text.strip() == right for text in a["samples"]] for a, right in zip(said, expected, strict=True)]
    assert 0 < sum(map(sum, hits)) < 80  # neither all wrong nor all right
    greedy = [a["text"].strip() == right for a, right in zip(said, expected, strict=True)]
    assert found["accuracy"] == pytest.approx(sum(greedy) / 20)
    assert found["accuracy_error"] == pytest.approx(torch.tensor(greedy).double().std().item() / 20**0.5)
    assert found["mean"] == found["pass@1"] == pytest.approx(sum(map(sum, hits)) / 80)
    assert found["pass@4"] == pytest.approx(sum(map(any, hits)) / 20)
    pairs = [any(two) for row in hits for two in itertools.combinations(row, 2)]
    assert found["pass@2"] == pytest.approx(sum(pairs) / len(pairs))
    assert [row["rows"] for row in numbers(whole)] == [8, 8, 4]
    per_row = torch.tensor([sum(row) / 4 for row in hits]).double()
    assert found["mean_error"] == pytest.approx(per_row.std().item() / 20**0.5)
    assert (whole / "report.html").read_text().count('"kind": "held-out"') == 20


def test_greedy_responses_are_transformers_own(whole, start):
    processor, model = load_processor(str(start)), AutoModelForImageTextToText.from_pretrained(start)
    prompt = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What digit is this?<|im_end|>\n"
    for a, row in zip(responses(whole)[:5], helpers.few_digits().heldout, strict=False):
        inputs = processor(text=[prompt + "<|im_start|>assistant\n"], images=row["images"], return_tensors="pt")
        out = model.generate(**inputs, do_sample=False, max_new_tokens=3)
        text = processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert text == a["text"]


def test_stopped_and_resumed_it_gives_the_same(whole, start, tmp_path, monkeypatch):
    log = Run.log

    def stop(run, step, metrics, **options):
        if step == 1:  # its responses are written, and it is not logged
            raise KeyboardInterrupt
        log(run, step, metrics, **options)

    arguments = ["--model", start, "--task", "helpers:few_digits", "--out", tmp_path / "run", *SMALL]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "log", stop)
        run_here("evaluate", *arguments)
    assert len(responses(tmp_path / "run")) == 16 and len(numbers(tmp_path / "run")) == 1
    other_batches = ["--prompts_per_step", 4, "--allow_changes", "prompts_per_step"]
    with pytest.raises(SystemExit, match="allow_changes: expected no option that decides which rows are in a batch"):
        run_here("evaluate", *arguments, "--resume", *other_batches)
    run_here("evaluate", *arguments, "--resume")
    assert numbers(tmp_path / "run") == numbers(whole) and responses(tmp_path / "run") == responses(whole)
    assert evaluation(tmp_path / "run") == evaluation(whole)


def test_text_greedy_alone(text_dir, tmp_path):  # noqa: F811
    arguments = ["--model", text_dir, "--task", "sorting", "--out", tmp_path / "run", *SMALL, "--group_size", 0]
    run_here("evaluate", *arguments)
    found = evaluation(tmp_path / "run")["tasks"]["sorting"]
    assert found["rows"] == 20 and "mean" not in found and responses(tmp_path / "run")[0]["samples"] == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_rows_without_responses_are_counted(text_dir, tmp_path):  # noqa: F811
    short, long = {"question": "1 + 1?", "answer": "2"}, {"question": "1 + 1? " * 99, "answer": "2"}
    for name, rows in {"one": [short, long, short, long], "two": [short, short, long]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks, out = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"], tmp_path / "run"
    small = ["--group_size", 0, "--prompts_per_step", 2, "--max_new_tokens", 1, "--max_prompt_tokens", 50]
    run_here("evaluate", "--model", text_dir, "--task", *tasks, "--heldout", "all", "--out", out, *small)
    found = list(evaluation(out)["tasks"].values())
    assert [(task["rows"], task["skipped"]) for task in found] == [(2, 2), (2, 1)]
    assert [row["skipped_rows"] for row in numbers(out)] == [1, 1, 0, 1]


def test_a_full_disk_is_one_sentence(start, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "responses.jsonl").symlink_to("/dev/full")
    with pytest.raises(SystemExit, match="responses.jsonl: expected room for .* bytes, got: .*No space left"):
        run_here("evaluate", "--model", start, "--task", "helpers:few_digits", "--out", tmp_path / "run", *SMALL)


def test_help_names_every_option(capsys):
    helpers.assert_help_names_every_option("evaluate", capsys)


def test_unscored_responses_are_shown_after_scored_ones(monkeypatch):
    recipe = helpers.load("evaluate")
    monkeypatch.setattr(
        recipe, "encode_prompt", lambda processor, row, group_id: prompt_sample([1], row=row, group_id=group_id)
    )
    task, cfg = helpers.few_digits(), recipe.Config(task=("few",))
    rewards = [1.0, None, -1.0, 0.0]
    responses = [{"task": "few", "row": i, "text": str(i), "reward": reward} for i, reward in enumerate(rewards)]
    shown = recipe.worst_responses(responses, [task], cfg, None)
    assert [sample.text for sample in shown] == ["2", "3", "0", "1"]
    assert [sample.group_id for sample in shown] == [0, 1, 2, 3]  # a prompt of the page for each


def test_bad_input_is_one_clear_message(whole, start, tmp_path):
    for message, arguments in {
        "evaluate: task: expected a built-in": ["--task", "digits", "digit"],
        "evaluate: task: expected each task once, got addition, digits, addition": [
            "--task",
            "addition",
            "digits",
            "addition",
        ],
        "evaluate: pass_at: expected a k of at most group_size = 4, got \\(8,\\)": ["--pass_at", 8],
        "evaluate: pass_at: expected at least 1, got 0": ["--pass_at", 4, 0],
        "evaluate: max_new_tokens: expected at least 1, got 0": ["--max_new_tokens", 0],
        "evaluate: out .*holds a run already; continue it with --resume": ["--out", whole],
    }.items():
        with pytest.raises(SystemExit, match=message):
            run_here("evaluate", "--model", start, "--out", tmp_path / "run", *SMALL, *arguments)
