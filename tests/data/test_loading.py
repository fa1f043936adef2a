"""Tasks of files and data sets: chats, pairs and marked answers, and what is made of a task that has none."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from PIL import Image

from rlkit.data import (
    Task,
    first_of_sources,
    load_chats,
    load_pairs,
    load_task,
    load_unpaired,
    mix_tasks,
    open_stream,
    with_heldout,
)
from rlkit.data.formats import task_row
from rlkit.data.tables import HELD_OUT_SEED
from rlkit.rewards.rules import exact_match
from rlkit.vlm import encode_prompt, load_processor


@pytest.fixture(scope="module")
def processor(tiny_dir):
    return load_processor(tiny_dir)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def everything(task):
    return [*task.train, *task.heldout]


def test_marked_rows_of_files_and_tasks(tmp_path):
    task = load_unpaired("digits")
    assert len(task.train) == 2 * len(load_task("digits").train)
    for i in (0, 7):
        good, bad = task.train[2 * i], task.train[2 * i + 1]
        assert good["messages"] == bad["messages"] and (good["label"], bad["label"]) == (True, False)
        assert good["completion"] == good["answer"] != bad["completion"]
    name = write(
        tmp_path / "rows.jsonl", [{"prompt": f"Q{i}", "completion": str(i), "label": i % 3 == 0} for i in range(20)]
    )
    task = load_unpaired(name)
    found = everything(task)
    assert sorted(int(row["completion"]) for row in found) == list(range(20))
    assert all(row["label"] == (int(row["completion"]) % 3 == 0) for row in found)
    pairs = write(tmp_path / "pairs.jsonl", [{"prompt": f"Q{i}", "chosen": "a", "rejected": "b"} for i in range(4)])
    found = everything(load_unpaired(pairs))
    assert sorted((row["completion"], row["label"]) for row in found) == [("a", True)] * 4 + [("b", False)] * 4
    name = write(tmp_path / "rows.jsonl", [{"prompt": "Q", "completion": "a"}])
    with pytest.raises(ValueError, match="label: expected a column label, got columns"):
        load_unpaired(name)


def labelled_pairs():
    rows = [
        {"question": f"Q{i}", "images": [], "answer": "a", "chosen": "a", "rejected": "b", "label": 3} for i in "123"
    ]
    return Task("labelled", rows[1:], rows[:1], exact_match)


def marked_answers():
    rows = [{"question": f"Q{i}", "images": [], "answer": "a", "completion": i, "label": i == "1"} for i in "123"]
    return Task("marked", rows[1:], rows[:1], exact_match)


def chats_with_a_class():
    chats = [
        [{"role": "user", "content": f"Is {i} odd?"}, {"role": "assistant", "content": f"{i % 2}!"}] for i in range(4)
    ]
    rows = [task_row({"messages": chat, "label": i % 2}) for i, chat in enumerate(chats)]
    return Task("parity", rows[1:], rows[:1], exact_match)


def test_the_class_of_a_chat_does_not_mark_its_answer():
    """It is the right answer of the task; another row's is the wrong one."""
    found = list(load_unpaired(f"{__file__}:chats_with_a_class").train)
    assert len(found) == 6 and all(row["label"] == (row["completion"] == str(row["answer"])) for row in found)


def test_pairs_with_a_label_are_pairs(tmp_path):
    """Only an answer can be marked by a label; that of a pair may be a class or an id."""
    pairs = [{"prompt": f"Q{i}", "chosen": "a", "rejected": "b", "label": i % 2 == 0} for i in range(4)]
    for name, count in ((write(tmp_path / "pairs.jsonl", pairs), 4), (f"{__file__}:labelled_pairs", 3)):
        found = everything(load_unpaired(name))
        assert (
            sorted((row["completion"], row["label"]) for row in found) == [("a", True)] * count + [("b", False)] * count
        )
    found = everything(load_unpaired(f"{__file__}:marked_answers"))
    assert sorted((row["completion"], row["label"]) for row in found) == [("1", True), ("2", False), ("3", False)]


def test_both_answers_of_a_pair_are_held_out(tmp_path):
    pairs = [{"prompt": f"Q{i}", "chosen": "a", "rejected": "b"} for i in range(40)]
    task = with_heldout(load_unpaired(write(tmp_path / "pairs.jsonl", pairs)), "0.1", load_unpaired)
    held = [row["question"] for row in task.heldout]
    assert len(held) == 8 and all(held.count(question) == 2 for question in held)
    assert len(task.train) == 72 and not {row["question"] for row in task.train} & set(held)
    for rows in (task.heldout, with_heldout(task, "all").heldout):  # one of the two is the first of its pair
        first = [rows[i]["question"] for i in first_of_sources(rows)]
        assert len(first) == len(rows) / 2 and set(first) == {row["question"] for row in rows}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_prompt_is_held_out_or_trained_on_but_never_both(tmp_path, suffix):
    """DAPO's file has each problem a hundred times, preferences have several answers to a prompt."""
    rows = [{"question": f"Q{i % 40}", "answer": str(i % 40), "chosen": f"a{i}", "rejected": "b"} for i in range(200)]
    path = write(tmp_path / f"rows.{suffix}", rows)
    if suffix == "parquet":
        import datasets

        datasets.Dataset.from_list(rows).to_parquet(path)
    for load, heldout in product((load_task, load_pairs), ("", "0.1")):
        task = with_heldout(load(path), heldout, load) if heldout else load(path)
        held, trained = ({row["question"] for row in part} for part in (task.heldout, task.train))
        assert len(held) == 4 and len(trained) == 36 and not held & trained
        assert len(task.heldout) == (20 if heldout else 4) and len(task.train) == 180


def test_prompts_of_a_held_out_file_are_not_trained_on(tmp_path, capsys, monkeypatch):
    """Whatever the column of the prompt; also of a mixture, and of both answers of a pair."""
    rows = [{"question": f"Q{i}", "answer": "a", "chosen": "a", "rejected": "b", "input": ""} for i in range(40)]
    held = [{"prompt": f"Q{i}", "answer": "a", "chosen": "c", "rejected": "d"} for i in (5, 3, 70)]
    path, file = write(tmp_path / "rows.jsonl", rows), write(tmp_path / "held.jsonl", held)
    for load, times in ((load_task, 1), (load_pairs, 1), (load_unpaired, 2)):
        task = with_heldout(load(path), file, load)
        assert [row["question"] for row in task.heldout] == np.repeat(["Q5", "Q3", "Q70"], times).tolist()
        left = [f"Q{i}" for i in range(40) if i not in (3, 5)]
        assert [row["question"] for row in task.train] == np.repeat(left, times).tolist()
        printed = f"not trained on: {2 * times} of {40 * times} rows, whose prompts are in {file}\n"
        assert capsys.readouterr().out == printed
    monkeypatch.setenv("RANK", "1")
    more = load_task(write(tmp_path / "more.jsonl", [{"instruction": f"Q{i}", "output": "a"} for i in range(3, 6)]))
    mixture = with_heldout(mix_tasks([load_task(path), replace(more, train=more.splits["train"])]), file)
    assert not {row["question"] for row in mixture.train} & {"Q3", "Q5"} and "Q4" in {
        row["question"] for row in mixture.train
    }
    assert capsys.readouterr().out == ""


def test_questions_about_images_are_not_compared(tmp_path):
    rows = [{"question": "Which digit?", "image": f"{i}.png", "answer": str(i)} for i in range(9)]
    path, file = write(tmp_path / "rows.jsonl", rows[:5]), write(tmp_path / "held.jsonl", rows[5:])
    task = with_heldout(load_task(path), file)
    assert (len(task.train), len(task.heldout)) == (5, 4)


def test_different_prompts_are_split_row_by_row(tmp_path):
    """Also rows with the same question about other images, and rows without a question."""
    order = np.random.default_rng(HELD_OUT_SEED).permutation(30)
    for name, rows in {
        "texts": [{"question": f"Q{i}", "answer": str(i)} for i in range(30)],
        "images": [{"question": "Which digit?", "image": f"{i}.png", "answer": str(i)} for i in range(30)],
        "chats": [
            {"messages": [{"role": "user", "content": f"Q{i}"}], "input": "", "answer": str(i)} for i in range(30)
        ],
        "nulls": [
            {"messages": [{"role": "user", "content": "Q"}], "question": None, "answer": str(i)} for i in range(30)
        ],
    }.items():
        task = load_task(write(tmp_path / f"{name}.jsonl", rows))
        assert [int(row["answer"]) for row in task.heldout] == order[:3].tolist()
        assert [int(row["answer"]) for row in task.train] == order[3:].tolist()


def test_a_task_without_pairs_gets_wrong_answers():
    task, again, digits = load_pairs("digits"), load_pairs("digits"), load_task("digits")
    answers = {row["answer"] for row in digits.train}
    for i in range(100):
        row = task.train[i]
        assert row["chosen"] == digits.train[i]["answer"] != row["rejected"] in answers
        assert row["rejected"] == again.train[i]["rejected"]
    assert len({task.train[i]["rejected"] for i in range(100)}) == 10 and len(task.heldout) == 360


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_pairs_from_a_file(tmp_path, suffix, processor):
    for i in range(20):
        Image.fromarray(np.full((56, 56, 3), i, dtype=np.uint8)).save(tmp_path / f"{i}.png")
    rows = [
        {"question": "What?", "chosen": f"good {i}", "rejected": "bad", "image": f"{i}.png", "margin": 0.5}
        for i in range(20)
    ]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        write(path, rows)
    elif suffix == "csv":
        path.write_text("\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]))
    else:
        import datasets

        datasets.Dataset.from_list(rows).to_parquet(str(path))
    task = load_pairs(str(path))
    assert (len(task.train), len(task.heldout)) == (18, 2)
    seen = set()
    for row in everything(task):
        prompt = encode_prompt(processor, row)
        seen.add(row["chosen"])
        assert np.asarray(prompt.images[0])[0, 0, 0] == int(row["chosen"].removeprefix("good "))
        assert float(row["margin"]) == 0.5 and row["answer"] is None and row["rejected"] == "bad"
        assert row["where"].startswith(f"{path} row ")
    assert len(seen) == 20


def test_files_with_other_columns_are_refused(tmp_path):
    name = write(tmp_path / "rows.jsonl", [{"question": "q", "answer": "a"}])
    with pytest.raises(ValueError) as caught:
        load_pairs(name)
    assert str(caught.value) == f"{name}: chosen: expected a column chosen, got columns ['question', 'answer']"
    name = write(tmp_path / "rows.jsonl", [{"words": "q"}])
    with pytest.raises(ValueError, match=r"question: expected a column .* or text, got columns \['words'\]$"):
        load_chats(name)
    with pytest.raises(ValueError, match="none.parquet: expected a file, got none of this name"):
        load_chats(str(tmp_path / "none.parquet"))


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("of", ["file", "directory"])
def test_media_of_a_schema_need_the_name_of_a_column_of_media(tmp_path, of, is_list):
    import datasets

    def write_table(name, **more):
        """Images in a column of this name."""
        cell = [str(tmp_path / "a.png")] if is_list else str(tmp_path / "a.png")
        table = datasets.Dataset.from_dict({"question": ["q"] * 3, "answer": ["x"] * 3, name: [cell] * 3, **more})
        table = table.cast_column(name, datasets.List(datasets.Image()) if is_list else datasets.Image())
        path = str(tmp_path / name) + (".parquet" if of == "file" else "")
        table.to_parquet(path) if of == "file" else table.save_to_disk(path)
        return path

    Image.new("RGB", (30, 30)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="images: expected a column images or image, not 'figure', got columns"):
        load_task(write_table("figure"))
    with pytest.raises(ValueError, match="images: expected all in one column images, not also in 'figure', got"):
        load_task(write_table("figure", image=["a.png"] * 3))
    row = load_task(write_table("images" if is_list else "image")).train[0]
    assert "unreadable" not in row and len(row["images"]) == 1
    if is_list:
        assert len(load_task(write_table("video")).train[0]["videos"]) == 1  # frames


@pytest.mark.parametrize(
    ("name", "texts", "answers"),
    [
        ("train.jsonl", ['{"question": "When?", "answer": "2020-05-17"}'] * 2, ["2020-05-17"] * 2),
        ("train.csv", ["question,answer", "a,007", "b,7", "c,NA", "d,1.50"], ["007", "7", "NA", "1.50"]),
        ("train.tsv", ["question\tanswer", "a\t1.50"], ["1.50"]),
    ],
)
def test_a_directory_has_the_answers_of_its_file(tmp_path, name, texts, answers):
    (tmp_path / name).write_text("\n".join(texts))
    for task in (load_task(str(tmp_path / name)), load_task(str(tmp_path))):
        assert [row["answer"] for row in task.splits["train"]] == answers
    assert [row["answer"] for row in open_stream(str(tmp_path), "train")] == answers


def test_a_directory_that_datasets_has_read_before_is_read_the_same(tmp_path, monkeypatch):
    """Its cache has the types that it took the texts for."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.csv").write_text("question,answer\na,007\n")
    assert datasets.load_dataset(str(tmp_path / "rows"))["train"]["answer"] == [7]
    assert [row["answer"] for row in load_task(str(tmp_path / "rows")).splits["train"]] == ["007"]


def test_texts_of_a_directory_are_read_with_the_settings_of_its_readme(tmp_path):
    (tmp_path / "rows.csv").write_text("question|answer\na|1\n")
    configs = "configs:\n- config_name: main\n  sep: '|'\n  data_files: rows.csv\n"
    (tmp_path / "README.md").write_text(f"---\n{configs}---\n")
    (row,) = load_task(str(tmp_path)).splits["train"]
    assert (row["question"], row["answer"]) == ("a", 1)


def test_files_of_a_directory_that_are_not_read_are_named(tmp_path, capsys):
    for name in ("train.jsonl", "test.jsonl"):
        write(tmp_path / name, [{"question": "a", "answer": "1"}])
    for name in ("dataset_infos.json", "notes.txt"):
        (tmp_path / name).write_text("{}")
    load_task(str(tmp_path))
    assert capsys.readouterr().out == ""
    write(tmp_path / "heldout.jsonl", [{"question": "b", "answer": "1"}])
    assert len(load_task(str(tmp_path)).heldout) == 1
    assert capsys.readouterr().out == f"{tmp_path}: not read: heldout.jsonl (of no split; --heldout takes a file)\n"


@pytest.mark.parametrize("name", ["heldout.jsonl", "held_out-2.jsonl"])
def test_held_out_rows_of_a_directory_are_not_trained_on(tmp_path, name):
    """`datasets` reads files without a split in their names as one split to train on."""
    for file in ("rows.jsonl", name):
        write(tmp_path / file, [{"question": "a", "answer": "1"}])
    with pytest.raises(ValueError, match=rf"got also {name}; rename it to test.jsonl"):
        load_task(str(tmp_path))


@pytest.mark.parametrize(
    "names",
    [("heldout_000.jsonl", "heldout_001.jsonl"), ("a.jsonl", "withheld_out.jsonl"), ("a.jsonl", "held_outcomes.jsonl")],
)
def test_a_directory_of_held_out_files_alone_or_of_none_is_read(tmp_path, names):
    for file in names:
        write(tmp_path / file, [{"question": file, "answer": "1"}])
    assert len(load_task(str(tmp_path)).splits["train"]) == len(names)


def test_a_directory_of_images_beside_their_rows_is_not_the_task(tmp_path, capsys):
    """`datasets` reads it as a folder of images alone."""
    for i in range(3):
        Image.new("RGB", (30, 30)).save(tmp_path / f"{i}.jpg")
    name = write(tmp_path / "rows.jsonl", [{"image": "0.jpg", "question": "a", "answer": "1"}])
    with pytest.raises(ValueError, match=f"got a directory of media; it has rows.jsonl: give --task {name}$"):
        load_task(str(tmp_path))
    assert "not read" not in capsys.readouterr().out


def test_a_broken_file_of_a_directory_is_named(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "a"}\n{"question"\n')
    with pytest.raises(ValueError, match="train.jsonl line 2: expected json, got "):
        load_task(str(tmp_path))


@pytest.mark.parametrize("of", ["file", "directory"])
def test_answers_that_are_classes_have_their_names(tmp_path, of):
    """As in MMLU; Arrow has their numbers, and -1 where there is none."""
    import datasets

    classes = {"question": datasets.Value("string"), "answer": datasets.ClassLabel(names=["A", "B", "C", "D"])}
    rows = {"question": list("abcdef"), "answer": [0, 1, 2, 3, -1, None]}
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(classes))
    path = str(tmp_path / ("rows.parquet" if of == "file" else "rows"))
    table.to_parquet(path) if of == "file" else table.save_to_disk(path)
    task = load_task(path)
    assert [row["answer"] for row in task.splits["train"]] == ["A", "B", "C", "D", None, None]
    assert task.reward("A", task.splits["train"][0]) == 1 and task.reward("0", task.splits["train"][0]) == 0


def test_classes_of_marked_answers_stay_numbers(tmp_path):
    import datasets

    features = {name: datasets.Value("string") for name in ("prompt", "completion")}
    features["label"] = datasets.ClassLabel(names=["bad", "good"])
    rows = {"prompt": ["q", "q"], "completion": ["x", "y"], "label": [0, 1]}
    datasets.Dataset.from_dict(rows, features=datasets.Features(features)).to_parquet(tmp_path / "rows.parquet")
    task = load_unpaired(str(tmp_path / "rows.parquet"))
    assert [bool(row["label"]) for row in task.splits["train"]] == [False, True]


@pytest.mark.parametrize("part", ["system", "history"])
def test_prompts_with_another_system_prompt_or_history_are_others(tmp_path, part):
    def row(number):
        turn = f"Be {number}." if part == "system" else [[f"Say {number}.", "Yes."]]
        return {"instruction": "Continue.", "output": "a", part: turn}

    held = write(tmp_path / "held.jsonl", [row(0)])
    task = with_heldout(load_task(write(tmp_path / "rows.jsonl", [row(i) for i in range(5)])), held)
    assert len(task.train) == 4


def test_nan_is_no_answer(tmp_path):
    name = write(
        tmp_path / "rows.jsonl", [{"question": "a", "answer": float("nan")}, {"question": "b", "answer": None}]
    )
    for row in load_task(name).splits["train"]:
        assert row["answer"] is None and load_task(name).reward("4", row) is None


def test_chats_of_files_and_tasks(tmp_path):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    row = load_chats(write(tmp_path / "chats.jsonl", [{"messages": turns}])).train[0]
    assert row["messages"] == turns[:1] and row["completion"] == row["answer"] == "a"
    row = load_chats(write(tmp_path / "texts.jsonl", [{"text": "Once."}])).train[0]
    assert row["plain_text"] == "Once."
    row = load_chats("sorting").heldout[0]
    assert row["completion"] == row["answer"] and row["messages"][0]["content"] == row["question"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_tools_and_calls_have_no_fields_of_other_rows(tmp_path, kind):
    """Arrow gives every call the arguments of all calls, as None; a null in JSON is one of the call itself."""
    import datasets

    rows = []
    for name, argument in (("weather", "city"), ("sum", "terms")):
        parameters = {"type": "object", "properties": {argument: {"type": "string"}}}
        call = {"type": "function", "function": {"name": name, "arguments": {argument: "x"}}}
        tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        rows.append({"messages": [{"role": "user", "content": "q"}, answer], "tools": [tool], "more": {name: 1}})
    if kind == "jsonl":
        rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["unit"] = None
        write(tmp_path / "rows.jsonl", rows)
    else:
        datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    read = load_chats(str(tmp_path / f"rows.{kind}")).splits["train"]
    for row, raw in zip(read, rows, strict=True):
        assert row["completion"]["tool_calls"] == raw["messages"][1]["tool_calls"] and row["tools"] == raw["tools"]
    if kind == "parquet":
        assert read[0]["more"] == {"weather": 1, "sum": None}  # other columns stay


def test_a_bad_row_is_skipped_and_a_file_of_them_is_refused(tmp_path, processor):
    good = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(29)]
    name = write(tmp_path / "rows.jsonl", [{"question": 5, "answer": "a"}, *good])
    rows = sorted(everything(load_task(name)), key=lambda row: int(row["where"].split()[-1]))
    assert len(rows) == 30 and [row["question"] for row in rows[1:]] == [row["question"] for row in good]
    with pytest.raises(ValueError) as caught:
        encode_prompt(processor, rows[0])
    reason = "question: expected text or a list of messages, got 5"
    assert str(caught.value) == f"{name} row 1: {reason}"
    for load in (load_pairs, load_unpaired):  # nor does it become the rejected answer's question
        bad = [row for row in everything(load(_task_of(name))) if "unreadable" in row]
        assert bad and all(row["unreadable"] == reason for row in bad)
    with pytest.raises(ValueError) as caught:
        load_task(write(tmp_path / "bad.jsonl", [{"question": i, "answer": "a"} for i in range(30)]))
    assert str(caught.value) == f"{tmp_path / 'bad.jsonl'} row 1: question: expected text or a list of messages, got 0"


def _task_of(name):
    """A task by a function, whose rows were read already."""
    global loaded
    loaded = load_task(name)
    return f"{__name__}:loaded"
