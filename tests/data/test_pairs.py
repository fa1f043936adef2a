"""Rows that show answers: the formats they come in, and the tokens that are trained."""

import json

import numpy as np
import pytest
from PIL import Image

from rlkit.data import collate, load_task, prompt
from rlkit.data.pairs import answered, asking, chat, chat_sample, load_chats, load_marked, load_pairs, marked, pair
from rlkit.vlm import encode, load_processor


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}
SEEN = [{"type": "image"}, {"type": "text", "text": "Q"}]


@pytest.fixture(scope="module")
def processor(tiny_dir):
    return load_processor(tiny_dir)


@pytest.mark.parametrize(
    ("row", "messages", "chosen", "rejected"),
    [
        # RLAIF-V, and TRL's explicit prompt
        ({"question": "Q", "chosen": "a", "rejected": "b"}, [user("Q")], "a", "b"),
        ({"question": "Q", "chosen": "a", "rejected": "b", "images": ["x"]}, [user(SEEN)], "a", "b"),
        ({"prompt": "Q", "chosen": "a", "rejected": "b"}, [user("Q")], "a", "b"),
        # TRL, a chat
        ({"prompt": [SYSTEM, user("Q")], "chosen": [assistant("a")], "rejected": [assistant("b")]},
         [SYSTEM, user("Q")], "a", "b"),
        ({"prompt": [SYSTEM, user("Q")], "chosen": [assistant("a")], "rejected": [assistant("b")], "images": ["x"]},
         [SYSTEM, user(SEEN)], "a", "b"),
        ({"prompt": [user(SEEN)], "chosen": [assistant([{"type": "text", "text": "a"}])], "images": ["x"],
          "rejected": [assistant([{"type": "text", "text": "b"}])]}, [user(SEEN)], "a", "b"),
        # TRL, an implicit prompt
        ({"chosen": [user("Q"), assistant("a")], "rejected": [user("Q"), assistant("b")]}, [user("Q")], "a", "b"),
        ({"chosen": "The sky is blue.", "rejected": "The sky is green."}, [user("The sky is ")], "blue.", "green."),
        ({"chosen": "The sky is grey.", "rejected": "The sky is green."}, [user("The sky is ")], "grey.", "green."),
        # UltraFeedback, and several turns before the answer
        ({"prompt": "Q", "chosen": [user("Q"), assistant("a")], "rejected": [user("Q"), assistant("b")],
          "score_chosen": 8.0}, [user("Q")], "a", "b"),
        ({"chosen": [user("Q"), assistant("m"), user("R"), assistant("a")],
          "rejected": [user("Q"), assistant("m"), user("R"), assistant("b")]},
         [user("Q"), assistant("m"), user("R")], "a", "b"),
    ],
)  # fmt: skip
def test_formats_of_pairs(row, messages, chosen, rejected):
    assert pair(row) == (messages, chosen, rejected)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "Q", "chosen": "a", "rejected": "a"}, "its chosen and its rejected answer are the same"),
        ({"question": "Q", "chosen": "a", "rejected": None}, "as its answer, came none"),
        ({"chosen": "red", "rejected": "green"}, "it has no question"),
        ({"question": None, "chosen": [assistant("a")], "rejected": [assistant("b")]}, "it has no question"),
        ({"chosen": [user("Q"), assistant("a"), user("R"), assistant("c")],
          "rejected": [user("Q"), assistant("b"), user("R"), assistant("c")]}, "came 3 messages, the first of role"),
        ({"question": "Q", "chosen": [user("a")], "rejected": [user("b")]}, "came 1 messages, .* role 'user'"),
    ],
)  # fmt: skip
def test_bad_pairs_are_named(row, message):
    with pytest.raises(ValueError, match=message) as caught:
        pair({**row, "where": "pairs.jsonl row 7"})
    assert str(caught.value).startswith("pairs.jsonl row 7: ")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Q", "completion": "a", "label": True}, ([user("Q")], "a", True)),
        ({"question": "Q", "completion": "a", "label": np.False_, "images": ["x"]}, ([user(SEEN)], "a", False)),
        ({"prompt": [SYSTEM, user("Q")], "completion": [assistant("a")], "label": False},
         ([SYSTEM, user("Q")], "a", False)),
        ({"prompt": "Q", "chosen": "a", "rejected": "b", "label": True}, ([user("Q")], "a", True)),
        ({"prompt": "Q", "chosen": "a", "rejected": "b", "label": False}, ([user("Q")], "b", False)),
    ],
)  # fmt: skip
def test_answers_that_are_marked(row, expected):
    assert marked(row) == expected and type(marked(row)[2]) is bool


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Q", "completion": "a", "label": "good"}, "rows 3: label: true or false expected, came 'good'"),
        ({"prompt": "Q", "completion": "a"}, "rows 3: label: true or false expected, came None"),
        ({"prompt": "Q", "label": True}, "rows 3: .* expected as its answer, came none"),
        ({"completion": "a", "label": True}, "rows 3: it has no question"),
    ],
)
def test_bad_marks_are_named(row, message):
    with pytest.raises(ValueError, match=message):
        marked({**row, "where": "rows 3"})


def test_marked_rows_of_files_and_tasks(tmp_path):
    task = load_marked("digits")
    assert len(task.train) == 2 * len(load_task("digits").train)
    for i in (0, 7):
        (question, good, yes), (same, bad, no) = marked(task.train[2 * i]), marked(task.train[2 * i + 1])
        assert question == same and good == task.train[2 * i]["answer"] != bad and (yes, no) == (True, False)
    lines = [{"prompt": f"Q{i}", "completion": str(i), "label": i % 3 == 0} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = load_marked(str(tmp_path / "rows.jsonl"))
    found = [marked(row) for row in [*task.train, *task.heldout]]
    assert sorted(int(answer) for _, answer, _ in found) == list(range(20))
    assert all(good == (int(answer) % 3 == 0) for _, answer, good in found)
    assert all(row["answer"] is None for row in task.heldout)  # a mark is no answer
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Q", "completion": "a"}\n')
    with pytest.raises(ValueError, match="columns completion and label, or chosen and rejected expected; it has"):
        load_marked(str(tmp_path / "rows.jsonl"))


def test_chats():
    assert chat({"question": "Q", "answer": 3}) == [user("Q"), assistant("3")]
    assert chat({"question": "Q", "answer": "3", "images": ["x"]}) == [user(SEEN), assistant("3")]
    assert chat({"messages": [SYSTEM, user("Q"), assistant("a")], "images": ["x"]})[1] == user(SEEN)
    for row in ({"messages": [user("Q")]}, {"messages": [user("Q"), assistant(None)]}, {"question": "Q"}):
        with pytest.raises(ValueError, match="as its answer, came"):
            chat(row)


def test_a_task_without_pairs_gets_wrong_answers():
    task, again = load_pairs("digits"), load_pairs("digits")
    answers = {row["answer"] for row in load_task("digits").train}
    for i in range(100):
        row = task.train[i]
        assert row["chosen"] == row["answer"] != row["rejected"] and row["rejected"] in answers
        assert row["rejected"] == again.train[i]["rejected"]
    assert len({task.train[i]["rejected"] for i in range(100)}) == 10
    assert len(task.heldout) == 360 and pair(task.heldout[3])[1] == task.heldout[3]["answer"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_pairs_from_a_file(tmp_path, suffix, processor):
    for i in range(20):
        Image.fromarray(np.full((56, 56, 3), i, dtype=np.uint8)).save(tmp_path / f"{i}.png")
    rows = [
        {"question": "What?", "chosen": f"good {i}", "rejected": "bad", "image": f"{i}.png", "margin": 0.5}
        for i in range(20)
    ]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import datasets

        datasets.Dataset.from_list(rows).to_parquet(str(path))
    task = load_pairs(str(path))
    assert (len(task.train), len(task.heldout)) == (18, 2)
    seen = set()
    for row in [*task.train, *task.heldout]:
        messages, chosen, rejected = pair(row)
        asked = encode(processor, asking(row, messages))
        seen.add(chosen)
        assert np.asarray(asked.images[0])[0, 0, 0] == int(chosen.removeprefix("good "))
        assert (
            row["margin"] == 0.5 and row["answer"] is None and rejected == "bad" and row["where"].startswith(str(path))
        )
    assert len(seen) == 20


def test_files_with_other_columns_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n')
    with pytest.raises(ValueError, match=r"columns chosen and rejected expected; it has \['question', 'answer'\]"):
        load_pairs(str(path))
    path.write_text('{"text": "q"}\n')
    with pytest.raises(ValueError, match=r"columns messages, or question and answer expected; it has \['text'\]"):
        load_chats(str(path))
    with pytest.raises(ValueError, match="no such file"):
        load_chats(str(tmp_path / "none.parquet"))
    path.write_text(json.dumps({"messages": [user("Q"), assistant("a")]}) + "\n")
    assert load_chats(str(path)).train[0]["answer"] == "a"


# --- tokens


def end_of(processor):
    return [processor.tokenizer.eos_token_id]


def texts(processor, sample):
    """The trained tokens in their runs, and the untrained ones, as text."""
    runs, ids = [], []
    for i, token in enumerate(sample.token_ids):
        ids.append(token)
        if i + 1 == len(sample.mask) or sample.mask[i + 1] != sample.mask[i]:
            runs.append((sample.mask[i], processor.tokenizer.decode(ids)))
            ids = []
    return runs


def test_every_turn_of_the_assistant_is_trained_and_nothing_else(processor):
    images = [Image.new("RGB", size) for size in ((56, 56), (84, 56))]
    turns = [user([{"type": "image"}, {"type": "text", "text": "One?"}]), assistant("1"),
             user([{"type": "text", "text": "And"}, {"type": "image"}]), assistant("2 or 3")]  # fmt: skip
    messages = chat({"messages": turns, "images": images})
    asked = encode(processor, asking({"images": images}, messages[:-1]))
    sample = chat_sample(asked, processor, messages, end_of(processor), 200)
    collate([sample])  # both tracks agree
    assert texts(processor, sample) == [
        (False, "<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>One?<|im_end|>\n"
                "<|im_start|>assistant\n"),
        (True, "1<|im_end|>"),
        (False, "\n<|im_start|>user\nAnd<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|><|im_end|>\n"
                "<|im_start|>assistant\n"),
        (True, "2 or 3<|im_end|>"),
    ]  # fmt: skip
    assert sample.token_ids[: len(asked.token_ids)] == asked.token_ids and sample.vision is asked.vision
    assert asked.row["question"] == "And"


def test_answers_of_a_pair_share_their_prompt(processor):
    row = {"question": "What?", "chosen": "4", "rejected": "seven", "images": [Image.new("RGB", (56, 56))]}
    messages, *answers = pair(row)
    asked = encode(processor, asking(row, messages))
    chosen, rejected = answered(asked, processor, answers, end_of(processor), 200)
    assert [text for trained, text in texts(processor, chosen) if trained] == ["4<|im_end|>"]
    assert [text for trained, text in texts(processor, rejected) if trained] == ["seven<|im_end|>"]
    assert chosen.vision["pixel_values"] is rejected.vision["pixel_values"]  # and so is computed once
    whole = chat_sample(asked, processor, chat({**row, "answer": "4"}), end_of(processor), 200)
    assert whole.token_ids == chosen.token_ids and whole.mask == chosen.mask
    n = len(whole.token_ids)
    with pytest.raises(ValueError, match=f"{n} tokens with its answer, more than the limit of {n - 1}"):
        answered(asked, processor, ["4"], end_of(processor), n - 1)


class Template:
    """A tokenizer of characters with a chat template of its own."""

    eos_token_id = 0

    def __init__(self, write):
        self.write = write

    def apply_chat_template(self, messages, add_generation_prompt=False, tokenize=True):
        return self.write(messages) + ("A:" if add_generation_prompt else "")

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(letter) for letter in text]}


def plain(messages):
    return "".join(f"{m['role'][0].upper()}:{m['content']}" for m in messages)


def forgetful(messages):
    """Earlier answers are left out, as templates of reasoning models do with their thoughts."""
    return plain([m for i, m in enumerate(messages) if m["role"] == "user" or i + 1 == len(messages)])


def test_an_end_token_is_added_where_the_template_writes_none():
    asked = prompt([ord(letter) for letter in "U:QA:"], row={"messages": [user("Q")]})
    (sample,) = answered(asked, Template(plain), ["yes"], [0], 50)
    assert sample.response_ids == [*map(ord, "yes"), 0]
    (sample,) = answered(asked, Template(plain), ["yes!"], [ord("!")], 50)
    assert sample.response_ids == [*map(ord, "yes!")]


def test_a_template_that_rewrites_the_chat_is_an_error():
    messages = [user("Q"), assistant("a"), user("R"), assistant("b")]
    asked = prompt([1], row={"where": "row 5", "messages": messages[:1]})
    with pytest.raises(ValueError, match="row 5: the chat template changes an answer when messages follow"):
        chat_sample(asked, Template(forgetful), messages, [0], 50)
    with pytest.raises(ValueError, match="row 5: the chat template changes the prompt when an answer follows"):
        answered(asked, Template(lambda m: str(len(m)) + plain(m)), ["a"], [0], 50)
