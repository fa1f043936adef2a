import csv
import io
import json

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from rlkit.data import Task, load_task, step_rows
from rlkit.data.loading import BUILT_IN
from rlkit.data.tables import read_table
from rlkit.rewards.rules import exact_match
from rlkit.vlm import load_image


@pytest.fixture(scope="module")
def digits():
    return load_task("digits")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")
    datasets.disable_progress_bars()


def picture(shade: int = 40) -> Image.Image:
    return Image.new("RGB", (12, 10), (shade, shade, shade))


def png(shade: int = 40) -> bytes:
    buffer = io.BytesIO()
    picture(shade).save(buffer, "PNG")
    return buffer.getvalue()


def rows_of(task: Task) -> list:
    """All rows in the file's order."""
    return sorted([*task.train, *task.heldout], key=lambda row: int(row["where"].rsplit(" ", 1)[1]))


def write_jsonl(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_digits(digits):
    assert len(digits.train) == 1437 and len(digits.heldout) == 360
    names = [row["where"] for row in digits.train], [row["where"] for row in digits.heldout]
    assert len({*names[0], *names[1]}) == 1797 and not set(names[0]) & set(names[1])
    row = digits.heldout[0]
    assert row["question"] == "What digit is this?" and row["images"][0].size == (56, 56)
    assert {row["answer"] for row in digits.heldout} == {row["answer"] for row in digits.train} == set("0123456789")
    assert np.asarray(row["images"][0]).max() > 200  # not left at 16 shades of black
    assert digits.reward(f" {row['answer']}\n", row) == 1 and digits.reward(f"{row['answer']}{row['answer']}", row) == 0


def test_addition():
    task = load_task("addition")
    assert (len(task.train), len(task.heldout)) == (3895, 200)
    rows = [*task.train, *task.heldout]
    assert len({row["question"] for row in rows}) == 4095  # each pair once, and so none both ways round
    for row in rows[::100]:
        _, _, a, _, b = row["question"].rstrip("?").split()
        assert 10 <= int(a) <= int(b) <= 99 and row["answer"] == str(int(a) + int(b))
    row = {"answer": "42"}
    answers = {"42": 1, "17 + 25 = 42.": 1, "The sum of 17 and 25 is 42": 1, "32": 0, "42, no: 43": 0, "none": 0, "": 0}
    assert {text: task.reward(text, row) for text in answers} == answers


def test_digits_are_the_same_in_every_call(digits):
    again = BUILT_IN["digits"]()
    for rows, other in ((digits.heldout, again.heldout), (digits.train[:50], again.train[:50])):
        assert [row["where"] for row in rows] == [row["where"] for row in other]
        assert all(a["images"][0].tobytes() == b["images"][0].tobytes() for a, b in zip(rows, other, strict=True))
    assert [row["where"] for row in digits.heldout[:3]] == ["digits row 595", "digits row 1172", "digits row 234"]


def test_exact_match():
    assert exact_match(" Paris\n", {"answer": "paris"}) == 1 and exact_match("Paris, France", {"answer": "paris"}) == 0
    assert exact_match("3", {"answer": 3}) == 1
    assert exact_match("None", {"answer": None}) is None  # nothing to compare with is not a wrong answer


@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_file_of_relative_paths(tmp_path, monkeypatch, ending):
    folder = tmp_path / "data"
    (folder / "pics").mkdir(parents=True)
    for i in range(4):
        (folder / "pics" / f"{i}.png").write_bytes(png(10 * i))
    raw = [{"question": f"q{i}", "answer": i, "image": f"pics/{i}.png", "extra": [i]} for i in range(4)]
    path = folder / f"task.{ending}"
    path.write_text(json.dumps(raw, indent=1) if ending == "json" else "\n".join(map(json.dumps, raw)))
    monkeypatch.chdir(tmp_path)  # relative to the file, not to the working directory
    task = load_task(f"data/task.{ending}")
    assert task.name == "task" and len(task.train) == 3 and len(task.heldout) == 1 and task.reward is exact_match
    for i, row in enumerate(rows_of(task)):
        assert (row["question"], row["answer"], row["extra"]) == (f"q{i}", i, [i])
        assert row["where"] == f"data/task.{ending} row {i + 1}"
        assert load_image(row["images"][0]).getpixel((0, 0)) == (10 * i,) * 3


def test_parquet_of_bytes_and_lists(tmp_path):
    path = tmp_path / "a.parquet"
    table = {"problem": ["p0", "p1"], "solution": ["s0", "s1"], "images": [[png(1), png(2)], []]}
    datasets.Dataset.from_dict(table).to_parquet(path)
    first, second = rows_of(load_task(str(path)))
    assert (first["question"], first["answer"]) == ("p0", "s0") and second["images"] == []
    assert [load_image(source).getpixel((0, 0))[0] for source in first["images"]] == [1, 2]


@pytest.mark.parametrize("many", [False, True])
def test_parquet_of_image_features(tmp_path, many):
    """What datasets write for Image columns; one broken image is one bad row."""
    kind = datasets.List(datasets.Image()) if many else datasets.Image()
    features = datasets.Features({"prompt": datasets.Value("string"), "label": datasets.Value("int64"), "image": kind})
    images = [{"bytes": png(7), "path": None}, {"bytes": b"broken", "path": None}]
    table = {"prompt": ["p", "q"], "label": [4, 5], "image": [[image] for image in images] if many else images}
    path = tmp_path / "hf.parquet"
    datasets.Dataset.from_dict(table, features=features).to_parquet(path)
    good, bad = rows_of(load_task(str(path)))
    assert load_image(good["images"][0]).getpixel((0, 0)) == (7, 7, 7) and good["answer"] == 4
    with pytest.raises(ValueError, match="cannot be read"):
        load_image(bad["images"][0])


@pytest.mark.parametrize("many", [False, True])
def test_structs_with_a_path_are_relative_to_the_file(tmp_path, many):
    (tmp_path / "x.png").write_bytes(png(9))
    struct = {"bytes": None, "path": "x.png"}
    name = write_jsonl(tmp_path / "t.jsonl", [{"question": "q", "answer": "a", "images": [struct] if many else struct}])
    (row,) = load_task(name).train
    assert load_image(row["images"][0]).getpixel((0, 0)) == (9, 9, 9)


def test_null_image_is_no_image_and_urls_stay(tmp_path):
    rows = [
        {"question": "q", "answer": "a", "image": None},
        {"question": "q", "answer": "a", "image": "https://host/x.png"},
        {"question": "q", "answer": "a"},
        {"question": "q", "answer": "a", "image": str(tmp_path / "absolute.png")},
    ]
    came = [row["images"] for row in rows_of(load_task(write_jsonl(tmp_path / "t.jsonl", rows)))]
    assert came == [[], ["https://host/x.png"], [], [str(tmp_path / "absolute.png")]]


def test_text_in_json_stays_text(tmp_path):
    """Readers that guess types turn the first into a date, and no answer would ever match it."""
    answers = ["2020-01-01", "12:00:00", "007", "1.0", "true", "line\u2028separator", "ü"]
    name = write_jsonl(tmp_path / "t.jsonl", [{"question": a, "answer": a} for a in answers])
    (tmp_path / "t.jsonl").write_text(
        "\ufeff" + "\n\n".join(json.dumps({"question": a, "answer": a}, ensure_ascii=False) for a in answers)
    )
    rows = rows_of(load_task(name))
    assert [row["answer"] for row in rows] == [row["question"] for row in rows] == answers
    assert all(exact_match(answer, row) == 1 for answer, row in zip(answers, rows, strict=True))


def test_a_tenth_is_held_out_and_a_changed_file_is_read_anew(tmp_path):
    rows = [{"question": "q", "answer": str(i), "image": None} for i in range(57)]
    name = write_jsonl(tmp_path / "t.jsonl", rows)
    task, again = load_task(name), load_task(name)
    assert (len(task.train), len(task.heldout)) == (52, 5)
    assert [r["answer"] for r in task.heldout] == [r["answer"] for r in again.heldout]
    assert {r["answer"] for r in [*task.train, *task.heldout]} == {str(i) for i in range(57)}
    assert [r["answer"] for r in task.train[3:9:2]] == [task.train[i]["answer"] for i in (3, 5, 7)]
    assert task.train[-1] == task.train[51]
    with pytest.raises(IndexError):
        task.train[52]
    write_jsonl(tmp_path / "t.jsonl", rows[:3])
    assert len(load_task(name).train) == 2
    big = load_task(write_jsonl(tmp_path / "big.jsonl", [{"question": f"q{i}", "answer": "a"} for i in range(3200)]))
    assert (len(big.train), len(big.heldout)) == (2900, 300)


FINE = {"question": "q", "answer": "a", "image": "x.png"}


@pytest.mark.parametrize("missing", ["question", "answer"])
def test_missing_column(tmp_path, missing):
    row = {key: value for key, value in FINE.items() if key != missing}
    name = write_jsonl(tmp_path / "t.jsonl", [row])
    with pytest.raises(ValueError, match=rf"^{name}: {missing}: expected a column {missing} or .*, got columns \["):
        load_task(name)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_without_images_is_text(tmp_path, kind):
    rows = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(20)]
    name = str(tmp_path / f"t.{kind}")
    write_jsonl(tmp_path / name, rows) if kind == "jsonl" else datasets.Dataset.from_list(rows).to_parquet(name)
    task = load_task(name)
    assert [row["images"] for row in task.train] == [[]] * 18 and len(task.heldout) == 2
    assert [row["question"] for row in rows_of(task)] == [row["question"] for row in rows]


@pytest.mark.parametrize("column", ["image_path", "IMG", "question_images"])
def test_images_under_another_name_are_not_left_out_in_silence(tmp_path, column):
    name = write_jsonl(tmp_path / "t.jsonl", [{"question": "q", "answer": "a", column: "x.png"}])
    with pytest.raises(ValueError, match=rf"images: expected a column images or image, not '{column}', got columns"):
        load_task(name)


@pytest.mark.parametrize(
    ("column", "value", "many"),
    [
        ("picture", "a.png", "images"), ("photo", "pics/a b.JPG", "images"), ("screenshot", ["a.webp"], "images"),
        ("frames", ["1.jpg", "2.jpg"], "images"), ("clip", "a.mp4", "videos"), ("speech", "a.wav", "audios"),
        ("picture", {"bytes": None, "path": "a.png"}, "images"),
    ],
)  # fmt: skip
def test_media_in_a_column_of_another_name_are_told_by_their_values(tmp_path, column, value, many):
    rows = [{"question": "q", "answer": "a"}, {"question": "q", "answer": "a", column: value}]
    name = write_jsonl(tmp_path / "t.jsonl", rows)
    with pytest.raises(ValueError, match=rf"^{name}: {many}: expected a column {many} or {many[:-1]}, not '{column}'"):
        load_task(name)


def test_media_as_bytes_need_the_name_of_a_column_of_media(tmp_path):
    table = datasets.Dataset.from_list([{"question": "q", "answer": "a", "picture": png(9)}] * 3)
    table.to_parquet(str(tmp_path / "t.parquet"))
    with pytest.raises(ValueError, match="images: expected a column images or image, not 'picture', which has b'"):
        load_task(str(tmp_path / "t.parquet"))


@pytest.mark.parametrize(
    "rows",
    [
        [{"question": "q", "answer": "a", "picture_id": "7", "caption": "In a.png: a cat", "n": 3, "list": []}],
        [{"question": "Name it.png", "answer": "a.png", "extra_info": {"path": "a.png"}}],
        [{"question": "q", "answer": "a", "note": "a.png"}, {"question": "q", "answer": "a", "note": "none"}],
        [{"question": "q", "answer": "a", "meta": {"path": "a.png", "id": 1}}],
        [{"question": "q", "answer": "a", "image": None, "source": "a.png"}],
        [
            {
                "messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}],
                "answer": "a",
                "id": "a.png",
            }
        ],
    ],
)
def test_columns_that_only_tell_of_media_are_allowed(tmp_path, rows):
    load_task(write_jsonl(tmp_path / "t.jsonl", rows))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("t.jsonl", b"hello\n"), ("t.jsonl", b""), ("t.jsonl", b"\n\n"), ("t.jsonl", b"1\n2\n"),
        ("t.jsonl", bytes(range(256))),
        ("t.jsonl", b'{"question": "q"'), ("t.json", b"[]"), ("t.json", b"[1]"), ("t.json", b'[{"question": 1}'),
        ("t.parquet", b""), ("t.parquet", b"hello"), ("t.parquet", b"PAR1 and something else PAR1"),
    ],
)  # fmt: skip
def test_unreadable_file_is_named(tmp_path, file, content):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"^{tmp_path}/{file}( row 1| line 1)?: .+"):
        load_task(str(tmp_path / file))


def test_bad_line_is_shown(tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps(FINE) + "\n\n{'question'}\n")
    with pytest.raises(ValueError) as caught:
        load_task(str(tmp_path / "t.jsonl"))
    got = "Expecting property name enclosed in double quotes: column 2"
    assert str(caught.value) == f"{tmp_path}/t.jsonl line 3: expected json, got {got}, at \"{{'question'}}\""


@pytest.mark.parametrize("name", ["no_such_module:f", "math:nope", "math:pi", "os:getcwd", ":", ":f", "json:", "a b:c"])
def test_a_function_that_is_none_is_named(name):
    with pytest.raises(ValueError, match=f"task '{name}': "):
        load_task(name)


@pytest.mark.parametrize("name", ["nope", "", "gsm8k@"])
def test_unknown_task_is_named(name):
    with pytest.raises(ValueError) as caught:
        load_task(name)
    assert str(caught.value) == (
        "task: expected a built-in (addition, digits, sorting), a published one (aime24, clevr_counting, dapo17k, "
        "geometry3k, gsm8k, math, math500, mmstar, scienceqa), a file (.csv, .json, .jsonl, .parquet, .tsv), a data "
        f"set (a directory, or owner/name) or module:function, got {name!r}"
    )


@pytest.mark.parametrize("mark", ["\u2028", "\x85", "\x0c", "\x1e", "\r\n", "\n"])
def test_cells_of_csv_may_have_line_breaks_and_be_long(tmp_path, mark):
    rows = [{"question": f"one{mark}two", "answer": "3"}, {"question": "x" * 140_000, "answer": "5"}]
    with (tmp_path / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(rows)
    assert read_table(tmp_path / "rows.csv") == rows


@pytest.mark.parametrize(
    ("row", "got"),
    [
        ('How long is 5 inches?\t"5', "unexpected end of data"),
        ('"Moby Dick" was written by whom?\tMelville', "'\t' expected after '\"'"),
    ],
)
def test_quotes_that_do_not_enclose_a_cell_are_refused(tmp_path, row, got):
    """Otherwise the cell would have the rest of the file, or lose its quotes."""
    path = tmp_path / "rows.tsv"
    path.write_text('question\tanswer\n"two\nlines"\t1\nIs it "5"?\tyes\n' + row + "\nmore\t2\nmore\t3\n")
    with pytest.raises(ValueError) as caught:
        load_task(str(path))
    expected = 'expected a cell that begins with " to end with ", and to have "" for each " inside'
    assert str(caught.value) == f"{path} line 5: {expected}, got {got}"


def test_missing_file_is_named_with_what_is_there(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [FINE])
    for name, beside in (("t.csv", ""), ("t.jsonl", f"; '{tmp_path}' has train.jsonl")):
        with pytest.raises(ValueError) as caught:
            load_task(str(tmp_path / name))
        assert str(caught.value) == f"{tmp_path / name}: expected a file, got none of this name{beside}"


def test_a_function_that_needs_arguments_is_no_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows_of_mine.py").write_text("def row(question, n=1): ...\n\n\ndef other(*, n=1): ...\n")
    with pytest.raises(ValueError) as caught:
        load_task("rows_of_mine.py:row")
    expected = "expected a function without arguments that returns a Task, got row(question, n=1)"
    assert str(caught.value) == f"task 'rows_of_mine.py:row': {expected}"
    with pytest.raises(ValueError, match="expected a rlkit.data.Task, got NoneType"):
        load_task("rows_of_mine.py:other")


def test_module_and_function(tmp_path, monkeypatch):
    (tmp_path / "my_rlkit_task.py").write_text(
        "from rlkit.data import Task\ndef make():\n    return Task('mine', [1], [2], lambda text, row: 0.5)\n"
        "def breaks():\n    return {}.nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    task = load_task("my_rlkit_task:make")
    assert (task.name, task.train, task.heldout, task.reward("", {})) == ("mine", [1], [2], 0.5)
    with pytest.raises(AttributeError, match="nothing"):  # the user's own bug keeps its traceback
        load_task("my_rlkit_task:breaks")


def test_step_rows_is_pure_and_covers_every_epoch():
    rows = [{"i": i} for i in range(7)]
    steps = [step_rows(rows, step, 3, seed=1) for step in range(14)]
    assert all([position for position, _ in step] == [0, 1, 2] for step in steps)
    flat = [row["i"] for step in steps for _, row in step]
    epochs = [flat[i : i + 7] for i in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1  # shuffled anew
    for step in (13, 5, 0):  # in any order, from nothing: resuming needs no state
        assert step_rows(rows, step, 3, seed=1) == steps[step]
    assert [row["i"] for step in range(14) for _, row in step_rows(rows, step, 3, seed=2)] != flat
    assert [p for p, _ in step_rows(rows, 0, 20, seed=0)] == list(range(20))  # more than an epoch in a step
    torch.manual_seed(0)
    np.random.seed(0)
    assert step_rows(rows, 5, 3, seed=1) == steps[5]


def test_step_rows_wants_rows():
    with pytest.raises(ValueError, match="expected rows to train on, got none"):
        step_rows([], 0, 3, seed=0)
