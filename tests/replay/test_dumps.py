"""What verl and TRL log, as bundles: prompts by their rows, responses tokenized again, rewards as they were."""

import json
import math

import pyarrow
import pyarrow.parquet
import pytest

from rlkit.data import load_task
from rlkit.replay.bundles import read_bundle
from rlkit.replay.dumps import convert, main, read_trl, read_verl
from rlkit.vlm import build_tiny, encode_prompt, load_processor


@pytest.fixture(scope="module")
def task():
    return load_task("sorting")


@pytest.fixture(scope="module")
def tokenizer(task, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "model"
    build_tiny(path, task.train, warm_up_steps=0)
    return load_processor(str(path))


def as_logged(tokenizer, row):
    return tokenizer.decode(encode_prompt(tokenizer, row).token_ids, skip_special_tokens=True)


def verl_dump(folder, tokenizer, rows):
    """Two steps with two responses to each prompt, in verl's order: the responses to a prompt beside each other."""
    for step in (1, 10):  # by number, not by name
        entries = [
            {"input": as_logged(tokenizer, row), "output": row["answer"] if good else "", "gts": row["answer"]}
            | {"score": float(good) if step == 1 else 0.5, "step": step, "acc": good}
            for row in rows
            for good in (True, False)
        ]
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def test_responses_of_verl_may_have_any_characters(tmp_path):
    entries = [{"input": "q", "output": f"one{mark}two", "score": 1.0} for mark in ("\u2028", "\x85", "\n")]
    lines = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)  # as verl writes them
    (tmp_path / "1.jsonl").write_text(lines, encoding="utf-8")
    ((*responses,),) = read_verl(tmp_path)
    assert [one.response for one in responses] == [entry["output"] for entry in entries]


def test_a_dump_of_verl(tmp_path, tokenizer, task):
    rows = task.train[:3]
    verl_dump(tmp_path, tokenizer, rows)
    out = tmp_path / "bundles"
    assert convert(read_verl(tmp_path), out, tokenizer, origin="verl", rows=rows) == (2, 0, [])
    bundle = read_bundle(out / "step_0")
    samples = bundle.draws[0].samples
    assert bundle.origin == "verl" and not bundle.updates
    assert [s.group_id for s in samples] == [0, 0, 1, 1, 2, 2] and [s.number for s in samples] == [0, 1] * 3
    assert [s.reward for s in samples] == [1.0, 0.0] * 3
    for sample, row in zip(samples[::2], rows, strict=True):
        prompt = encode_prompt(tokenizer, row).token_ids
        response = tokenizer(row["answer"], add_special_tokens=False).input_ids
        assert sample.token_ids == [*prompt, *response, tokenizer.eos_token_id] and sample.text == row["answer"]
        assert sample.row["answer"] == row["answer"] and sample.mask == [False] * len(prompt) + [True] * (
            len(response) + 1
        )
        assert all(math.isnan(x) for x in sample.logprobs[len(prompt) :])
    assert {sample.reward for sample in read_bundle(out / "step_1").draws[0].samples} == {0.5}


def test_a_response_that_was_cut_has_no_end_token(tmp_path, tokenizer, task):
    verl_dump(tmp_path, tokenizer, task.train[:1])
    length = len(tokenizer(task.train[0]["answer"], add_special_tokens=False).input_ids)
    convert(read_verl(tmp_path), tmp_path / "b", tokenizer, origin="verl", rows=task.train[:1], max_new_tokens=length)
    cut, whole = read_bundle(tmp_path / "b" / "step_0").draws[0].samples
    assert cut.finish_reason == "length" and cut.token_ids[-1] != tokenizer.eos_token_id
    assert whole.finish_reason == "stop" and whole.token_ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("conversation", [True, False])
def test_a_dump_of_trl(tmp_path, tokenizer, task, conversation):
    rows, table = task.train[:2], []
    for row in rows:
        text, prompt = row["answer"], row["question"]
        message = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
        completion = [{"role": "assistant", "content": text}]
        for part in (0.25, math.nan):
            table.append(
                {"step": 1, "prompt": message if conversation else prompt}
                | {"completion": completion if conversation else text}
                | {"exact": 1.0, "format": part, "solution": "x", "advantage": -7.0}
            )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "completions_00001.parquet")
    assert convert(read_trl(tmp_path), tmp_path / "b", tokenizer, origin="TRL") == (1, 0, [])
    samples = read_bundle(tmp_path / "b" / "step_0").draws[0].samples
    assert [s.reward for s in samples] == [1.25, 1.0] * 2 and [s.text for s in samples[::2]] == [
        r["answer"] for r in rows
    ]
    wanted = encode_prompt(tokenizer, {"question": rows[0]["question"], "answer": ""}).token_ids
    if not conversation:
        wanted = tokenizer(rows[0]["question"], add_special_tokens=False).input_ids
    assert samples[0].token_ids[: len(wanted)] == wanted


@pytest.mark.parametrize(
    "turns",
    [
        [("assistant", "311", {}), ("tool", "999", {}), ("assistant", "113", {})],
        [("assistant", "113", {"reasoning_content": "sort 1 1 3"})],
        [("assistant", None, {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]})],
        [("tool", "999", {})],
    ],
)
def test_responses_of_trl_that_are_more_than_a_text_are_refused(tmp_path, turns):
    """Output of tools would be trained on, and thinking and calls, which were sampled, would not."""
    completion = [{"role": role, "content": content} | more for role, content, more in turns]
    table = pyarrow.Table.from_pylist([{"prompt": "Sort 311", "completion": completion, "exact": 1.0}])
    pyarrow.parquet.write_table(table, tmp_path / "completions_00001.parquet")
    with pytest.raises(ValueError, match="completion: expected one message of the assistant, of text alone, got"):
        list(read_trl(tmp_path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"dump .*: expected verl's files 1.jsonl, 2.jsonl, ..., got none"),
        ("{}\n", r"1.jsonl, line 1: expected input, output and score, got KeyError"),
        ("x\n", r"1.jsonl, line 1: expected input, output and score, got JSONDecodeError"),
    ],
)
def test_what_is_no_dump_is_named(tmp_path, content, said):
    if content is not None:
        (tmp_path / "1.jsonl").write_text(content)
    with pytest.raises(ValueError, match=said):
        list(read_verl(tmp_path))


def test_a_parquet_file_of_something_else_is_named(tmp_path):
    with pytest.raises(ValueError, match="expected TRL's completions_00001.parquet"):
        list(read_trl(tmp_path))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"]}), tmp_path / "completions_00001.parquet")
    with pytest.raises(ValueError, match="expected the columns prompt and completion, got none called completion"):
        list(read_trl(tmp_path))


def test_a_prompt_that_no_row_or_several_rows_have_is_named(tmp_path, tokenizer, task):
    verl_dump(tmp_path, tokenizer, task.train[:1])
    with pytest.raises(ValueError, match="expected the text of one row of --task, got that of 0 rows"):
        convert(read_verl(tmp_path), tmp_path / "b", tokenizer, origin="verl", rows=task.train[1:3])
    with pytest.raises(ValueError, match="got that of 2 rows"):
        convert(read_verl(tmp_path), tmp_path / "b", tokenizer, origin="verl", rows=[task.train[0]] * 2)


def test_the_command_leaves_out_held_out_rows_and_unreadable_ones(tmp_path, tokenizer, task, capsys):
    """verl trained on all rows of a file, of which a tenth is held out here."""
    rows = [{"question": row["question"], "answer": row["answer"]} for row in task.train[:20]]
    file, dump = tmp_path / "rows.jsonl", tmp_path / "dump"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"question": "Look.", "images": ["none.png"]}]))
    dump.mkdir()
    verl_dump(dump, tokenizer, rows)
    own = load_task(str(file))
    held = {row["question"] for row in own.heldout} & {row["question"] for row in rows}
    main(["verl", str(dump), str(tmp_path / "b"), "--model", tokenizer.name_or_path, "--task", str(file)])
    said = capsys.readouterr().out
    left_out = f"responses to held-out rows of {file}, left out: {4 * len(held)}\n"
    assert held and left_out in said and "2 bundles in " in said
    assert f"rows of {file} that were skipped: 1, the first because of: {file} row 21: " in said
    samples = read_bundle(tmp_path / "b" / "step_0").draws[0].samples
    assert {s.row["question"] for s in samples} == {row["question"] for row in rows} - held


def test_a_response_ends_as_the_template_ends_it(tmp_path, task):
    """As in Gemma and Phi-3, whose tokenizers have another end token."""
    build_tiny(tmp_path / "model", task.train, warm_up_steps=0)
    tokenizer = load_processor(str(tmp_path / "model"))
    turn_end, tokenizer.eos_token = tokenizer.eos_token_id, "<|endoftext|>"
    assert tokenizer.eos_token_id not in (None, turn_end)
    verl_dump(tmp_path, tokenizer, task.train[:1])
    ends = [turn_end, tokenizer.eos_token_id]
    for end in (turn_end, tokenizer.eos_token_id):  # with the template, and without one
        convert(read_verl(tmp_path), tmp_path / "b", tokenizer, origin="verl", ends=ends)
        (first, *_) = read_bundle(tmp_path / "b" / "step_0").draws[0].samples
        assert first.token_ids[-1] == end
        tokenizer.chat_template = None
