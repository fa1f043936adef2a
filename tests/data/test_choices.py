"""What a run chooses about its rows: the reward, words around the question, and which rows are held out."""

import json
from dataclasses import replace

import pytest
from PIL import Image

from rlkit.data import Task, load_chats, load_pairs, load_task, step_rows, with_heldout, with_prompt
from rlkit.rewards import exact_match, maths_reward
from rlkit.vlm import encode_prompt, load_processor


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows(count, start=0):
    return [{"question": f"q{i}", "answer": str(i)} for i in range(start, start + count)]


def answers(found):
    return sorted(int(row["answer"]) for row in found)


# --- the reward


def test_reward_of_a_file(tmp_path):
    name = write(tmp_path / "t.jsonl", rows(3))
    assert load_task(name).reward is exact_match and load_task(name, reward="maths").reward is maths_reward
    (tmp_path / "mine.py").write_text("def long(text, row):\n    return float(len(text))\n")
    questions = write(tmp_path / "questions.jsonl", [{"prompt": "q"}, {"prompt": "r"}])
    assert load_task(questions, reward=f"{tmp_path}/mine.py:long").reward("four", {}) == 4  # which needs no answer
    with pytest.raises(ValueError, match="answer: expected a column answer or "):
        load_task(questions, reward="maths")
    with pytest.raises(ValueError, match="^reward: expected exact, "):
        load_task(name, reward="rouge")


# --- held-out rows


@pytest.mark.parametrize(("count", "held"), [(1, 0), (2, 1), (9, 1), (10, 1), (19, 1), (20, 2), (57, 5)])
def test_a_tenth_is_held_out_at_least_one(tmp_path, count, held):
    task = load_task(write(tmp_path / "t.jsonl", rows(count)))
    assert (len(task.train), len(task.heldout)) == (count - held, held)
    assert answers([*task.train, *task.heldout]) == list(range(count)) == answers(task.splits["train"])


def test_an_empty_file_says_so(tmp_path):
    for name, text in (("t.jsonl", ""), ("t.json", "[]"), ("t.csv", ""), ("t.csv", "question,answer\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError) as caught:
            load_task(str(tmp_path / name))
        assert str(caught.value) == f"{tmp_path / name}: expected at least one row, got an empty file"


def test_heldout_by_share(tmp_path):
    task = load_task(write(tmp_path / "t.jsonl", rows(20)))
    for share, held in (("0.25", 5), ("0.001", 1), (".5", 10)):
        chosen = with_heldout(task, share)
        assert (len(chosen.train), len(chosen.heldout)) == (20 - held, held)
        assert answers([*chosen.train, *chosen.heldout]) == list(range(20))
        assert answers(with_heldout(task, share).heldout) == answers(chosen.heldout)  # in every run
    own = with_heldout(Task("mine", rows(10), rows(3, 50), exact_match), "0.2")
    assert len(own.train) == 8 and answers([*own.train, *own.heldout]) == list(range(10))
    with pytest.raises(ValueError, match="^heldout: expected a share that leaves rows to train on, got 0.9 of 2$"):
        with_heldout(load_task(write(tmp_path / "two.jsonl", rows(2))), "0.9")


def test_heldout_by_file(tmp_path):
    train, heldout = write(tmp_path / "train.jsonl", rows(20)), write(tmp_path / "heldout.jsonl", rows(3, 50))
    task = with_heldout(load_task(train), heldout)
    assert answers(task.train) == list(range(20)) and answers(task.heldout) == [50, 51, 52]
    (tmp_path / "link.jsonl").symlink_to(train)
    for same in (train, f"{tmp_path}/./train.jsonl", str(tmp_path / "link.jsonl")):
        with pytest.raises(ValueError, match="^heldout: expected another file than those to train on, got "):
            with_heldout(load_task(train), same)
    with pytest.raises(ValueError, match="gone.jsonl: expected a file, got none of this name"):
        with_heldout(task, str(tmp_path / "gone.jsonl"))
    pairs = [
        write(tmp_path / f"{name}.jsonl", [{"prompt": name, "chosen": name, "rejected": "b"}] * 4) for name in "xy"
    ]
    task = with_heldout(load_pairs(pairs[0]), pairs[1], load_pairs)
    assert [row["chosen"] for row in task.heldout] == ["y"] * 4 and len(task.train) == 4


def test_heldout_by_split(tmp_path):
    import datasets

    for split, start in (("train", 0), ("validation", 50), ("test", 60)):
        datasets.Dataset.from_list(rows(12, start)).to_parquet(tmp_path / "set" / f"{split}.parquet")
    task = load_task(str(tmp_path / "set"))
    assert answers(task.heldout) == list(range(60, 72))  # the test split, if nothing is said
    task = with_heldout(task, "validation")
    assert answers(task.train) == list(range(12)) and answers(task.heldout) == list(range(50, 62))
    task = with_heldout(task, "train")
    assert len(task.train) == 0 and answers(task.heldout) == list(range(12))  # what is held out is not trained on
    with pytest.raises(ValueError, match="expected rows to train on, got none"):
        step_rows(task.train, 0, 1, 0)
    every = with_heldout(task, "all")
    assert len(every.train) == 0 and len(every.heldout) == 36
    for name in ("dev", "0", "1.5", ""):
        with pytest.raises(ValueError) as caught:
            with_heldout(task, name)
        assert str(caught.value) == (
            "heldout: expected a file, a split (train, validation, test), all, or a share between 0 and 1, "
            f"got {name!r}"
        )


def test_all_rows_are_held_out_to_evaluate(tmp_path):
    task = with_heldout(load_task(write(tmp_path / "t.jsonl", rows(7))), "all")
    assert answers(task.heldout) == list(range(7)) and len(task.train) == 0
    assert len(with_heldout(load_task("sorting"), "all").heldout) == 1000


# --- words around the question


@pytest.fixture(scope="module")
def processor(tiny_dir):
    return load_processor(tiny_dir)


def shown(processor, row):
    return processor.tokenizer.decode(encode_prompt(processor, row).compact_ids)


def test_prompts_with_more_around_them(processor, tmp_path):
    picture = Image.new("RGB", (56, 56))
    task = Task("mine", [{"question": "What {is} it?", "images": [picture], "answer": "3"}], [], exact_match)
    more = with_prompt(
        task,
        system_prompt="Be brief.",
        prompt_template="Look:\n{question}\nUse \\boxed{}.",
        response_prefix="<think>\n",
    )
    seen = "<|vision_start|><|image_pad|><|vision_end|>"
    assert shown(processor, more.train[0]) == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nLook:\n{seen}What {{is}} it?\nUse \\boxed{{}}."
        "<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert more.train[0]["question"] == "What {is} it?" and len(more.heldout) == 0
    assert with_prompt(task) is task
    null = replace(task, train=[{**task.train[0], "thinking_tags": None}])  # of a column that not all rows have
    assert with_prompt(null, thinking_tags=("[T]", "[/T]")).train[0]["thinking_tags"] == ("[T]", "[/T]")


def test_the_last_question_is_the_one(processor, tmp_path):
    turns = [("user", "Q"), ("assistant", "a"), ("user", "R"), ("assistant", "b")]
    name = write(tmp_path / "t.jsonl", [{"messages": [{"role": role, "content": text} for role, text in turns]}] * 2)
    task = with_prompt(load_task(name), prompt_template="{question} Answer.")
    assert [one["content"] for one in task.train[0]["messages"]] == ["Q", "a", "R Answer."]
    assert [one["content"] for one in task.splits["train"][0]["messages"]] == ["Q", "a", "R Answer."]


def test_what_cannot_be_added(processor, tmp_path):
    task = load_task("sorting")
    for template in ("Answer.", "{question} {question}"):
        with pytest.raises(ValueError, match="^prompt_template: expected a text with {question} once, got '"):
            with_prompt(task, prompt_template=template)
    system = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    task = Task("mine", [{"messages": system, "answer": "3", "where": "row 1"}], [], exact_match)
    with pytest.raises(ValueError, match="^row 1: system_prompt: expected rows without a system message, got one"):
        encode_prompt(processor, with_prompt(task, system_prompt="T").train[0])
    plain = load_chats(write(tmp_path / "t.jsonl", [{"text": "Once."}]))
    with pytest.raises(ValueError, match="row 1: prompt_template: expected rows with a question, got plain text$"):
        encode_prompt(processor, with_prompt(plain, response_prefix="A").train[0])
