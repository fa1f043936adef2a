"""Ready-made tasks on rows in the columns and formats of the published data sets; see each task for its page."""

import io
from pathlib import Path

import datasets
import pytest
from PIL import Image

from rlkit.data import load_task, step_rows
from rlkit.data.hub import map_table, open_stream, read_split, read_splits, stream_steps
from rlkit.data.published_tasks import BOXED, LETTER, PUBLISHED_TASKS
from rlkit.rewards.maths import maths_reward
from rlkit.vlm import load_image

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "hf_cache")
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)  # 5 s at the end of a stream's epoch
    datasets.disable_progress_bars()


def local(name: str):
    return load_task(f"{name}@{FIXTURES / name}")


def png(shade: int) -> dict:
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20), (shade,) * 3).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": f"{shade}.png"}


def write(folder: Path, split: str, table: dict, shard: str = "00000-of-00001", **features) -> None:
    """A parquet file as the hub has it: image columns are structs, and the file says so."""
    plain = datasets.Dataset.from_dict({name: rows for name, rows in table.items() if name not in features})
    kinds = datasets.Features({**plain.features, **features})
    (folder / "data").mkdir(parents=True, exist_ok=True)
    whole = datasets.Dataset.from_dict({name: table[name] for name in kinds}, features=kinds)
    whole.to_parquet(folder / "data" / f"{split}-{shard}.parquet")


def test_the_prompts_are_fixed():
    """Numbers that were measured with another prompt cannot be compared."""
    assert BOXED == "Reason step by step, and put your final answer within \\boxed{}."
    assert LETTER == "Reason step by step, and put the letter of the correct option within \\boxed{}."


def test_gsm8k():
    task = local("gsm8k")
    assert (len(task.train), len(task.heldout), task.name) == (2, 1, "gsm8k")
    first, second = task.train
    assert first["question"].endswith(f"How many rolls are left?\n\n{BOXED}") and first["images"] == []
    assert (first["answer"], second["answer"], task.heldout[0]["answer"]) == ("78", "1080", "7")
    assert task.heldout[0]["where"] == f"{FIXTURES / 'gsm8k'} test row 1"
    for text, reward in {
        "12*9=108, so \\boxed{78}": 1, "#### 78": 1, "The answer is 78.": 1, "\\boxed{78.0}": 1, "\\boxed{87}": 0,
        "first \\boxed{78}, no: \\boxed{108}": 0, "": 0,
    }.items():  # fmt: skip
        assert task.reward(text, first) == reward, text
    assert task.reward("\\boxed{1,080}", second) == 1


def test_math_and_math500():
    task, test = local("math"), local("math500")
    assert [row["answer"] for row in task.train] == ["\\frac{3}{4}", "(-2,2)", "3"]  # the last box
    assert [row["difficulty"] for row in task.train] == [1, 3, 5] and task.heldout[0]["answer"] == "32"
    assert task.train[0]["question"] == f"What is $\\frac{{1}}{{4}}+\\frac{{1}}{{2}}$?\n\n{BOXED}"
    assert len(test.train) == 0 and test.heldout[0]["difficulty"] == 2
    for row, right, wrong in (
        (task.train[0], "\\boxed{0.75}", "\\boxed{\\frac{4}{3}}"),
        (task.train[1], "$\\boxed{(-2, 2)}$", "\\boxed{[-2,2]}"),
        (test.heldout[0], "\\boxed{\\sqrt 8}", "\\boxed{\\sqrt{2}}"),
    ):  # fmt: skip
        assert maths_reward(right, row) == 1 and maths_reward(wrong, row) == 0, row


def test_evaluation_sets_have_nothing_to_train_on():
    with pytest.raises(ValueError, match="expected rows to train on, got none"):
        step_rows(local("math500").train, 0, 4, seed=0)


def test_dapo17k_has_each_problem_once():
    task, aime = local("dapo17k"), local("aime24")
    questions = [row["question"] for row in [*task.train, *task.heldout]]
    assert (len(task.train), len(task.heldout)) == (18, 2) and len(set(questions)) == 20
    assert [row["question"] for row in local("dapo17k").heldout] == [row["question"] for row in task.heldout]
    row = task.train[0]
    n = int(row["answer"]) // 2
    assert f"What is {n} plus {n}?" in row["question"] and row["question"].startswith(
        "Solve the following math problem"
    )
    assert task.reward(f"It is simple.\n\nAnswer: {2 * n}", row) == 1 and task.reward(f"Answer: {n}", row) == 0
    assert (len(aime.train), len(aime.heldout), aime.heldout[0]["answer"]) == (0, 1, "25")


@pytest.mark.parametrize("name", ["geometry3k", "clevr_counting"])
def test_images_stand_in_front(name, tmp_path):
    kind = datasets.List(datasets.Image())
    table = {
        "images": [[png(3)], [png(4)]],
        "problem": ["<image>Find x.", "<image>Find y."],
        "answer": ["3", "2\\sqrt{5}"],
    }
    for split in ("train", "test"):
        write(tmp_path, split, table, images=kind)
    task = load_task(f"{name}@{tmp_path}")
    row = task.heldout[1]
    assert (len(task.train), len(task.heldout)) == (2, 2) and row["question"] == f"Find y.\n\n{BOXED}"
    assert [load_image(image).getpixel((0, 0)) for image in row["images"]] == [(4, 4, 4)]
    assert task.reward("\\boxed{2\\sqrt{5}}", row) == 1 and task.reward("So \\boxed{4}", task.train[0]) == 0
    assert task.reward("So \\boxed{3}", task.train[0]) == 1


def test_scienceqa(tmp_path):
    table = {
        "image": [png(5), None],
        "question": ["Which of these is a liquid?", "Which word is a noun?"],
        "choices": [["a stone", "milk", "air"], ["run", "house"]],
        "answer": [1, 1], "hint": ["", "A noun names a thing."], "task": ["closed choice"] * 2, "grade": ["grade2"] * 2,
        "subject": ["natural science", "language science"], "topic": ["chemistry", "grammar"],
        "category": ["states", "words"], "skill": ["s", "t"], "lecture": ["Liquids flow.", ""],
        "solution": ["Milk.", ""],
    }  # fmt: skip
    for split in ("train", "validation", "test"):
        write(tmp_path, split, table, image=datasets.Image(), answer=datasets.Value("int8"))
    task = load_task(f"scienceqa@{tmp_path}")
    seen, read = task.train
    assert seen["question"] == f"Which of these is a liquid?\nA. a stone\nB. milk\nC. air\n\n{LETTER}"
    assert read["question"] == f"A noun names a thing.\nWhich word is a noun?\nA. run\nB. house\n\n{LETTER}"
    assert load_image(seen["images"][0]).size == (30, 20) and read["images"] == []
    assert seen["answer"] == "B" and task.reward("\\boxed{B}", seen) == 1 and "flow" not in seen["question"]


def test_mmstar(tmp_path):
    question = "What is in the picture?\nOptions: A: A cat, B: A dog, C: A cow, D: A hen"
    table = {
        "index": [0], "question": [question], "image": [png(6)], "answer": ["D"], "category": ["coarse perception"],
        "l2_category": ["image scene and topic"],
        "meta_info": [{"source": "MMBench", "split": "val", "image_path": "images/0.jpg"}],
    }  # fmt: skip
    write(tmp_path, "val", table, image=datasets.Image())
    task = load_task(f"mmstar@{tmp_path}")
    assert len(task.train) == 0 and task.heldout[0]["question"] == f"{question}\n\n{LETTER}"
    assert task.reward("\\boxed{D}", task.heldout[0]) == 1 and task.reward("\\boxed{A}", task.heldout[0]) == 0


# --- data sets of one's own, and what cannot be read


def test_data_set_in_a_directory(tmp_path):
    broken = {"bytes": b"broken", "path": "x.png"}
    train = {"problem": ["p", "q", "s"], "solution": ["1", "2", "4"], "image": [png(1), None, broken]}
    unseen = {"problem": ["r"], "solution": ["3"], "image": [png(2)]}
    write(tmp_path / "set", "train", train, image=datasets.Image())
    write(tmp_path / "set", "validation", unseen, image=datasets.Image())
    task = load_task(str(tmp_path / "set"))
    assert [row["question"] for row in task.train] == ["p", "q", "s"] and task.train[1]["images"] == []
    with pytest.raises(ValueError, match="cannot be read"):  # one bad row, found when its prompt is made
        load_image(task.train[2]["images"][0])
    assert task.heldout[0]["answer"] == "3" and load_image(task.heldout[0]["images"][0]).getpixel((0, 0)) == (2, 2, 2)
    assert task.heldout[0]["where"] == f"{tmp_path / 'set'} validation row 1" and task.name == "set"
    saved = datasets.Dataset.from_dict({"question": [f"q{i}" for i in range(20)], "answer": list(range(20))})
    saved.save_to_disk(tmp_path / "saved")
    task = load_task(str(tmp_path / "saved"))
    assert (len(task.train), len(task.heldout), len(task.splits["train"])) == (18, 2, 20)
    task = load_task(str(FIXTURES / "math500"))  # a test split alone: to evaluate
    assert len(task.train) == 0 and task.heldout[0]["answer"] == "2\\sqrt{2}"


def test_unreadable_data_sets_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    cases = {
        str(tmp_path / "empty"): f"data set '{tmp_path / 'empty'}': ",
        str(tmp_path / "gone" / "x"): f"data set: .*, got '{tmp_path / 'gone' / 'x'}'",
        f"gsm8k@{tmp_path / 'gone'}": f"data set: .*, got '{tmp_path / 'gone'}'",
        f"geometry3k@{FIXTURES / 'math500'}": "task 'geometry3k': expected a split 'train' of .*, got \\['test'\\]",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message):
            load_task(name)
    with pytest.raises(ValueError, match="expected one of its splits \\['test', 'train'\\], got 'valid'"):
        read_split(str(FIXTURES / "gsm8k"), "valid", "main")
    with pytest.raises(ValueError, match="data set .*other"):
        read_splits(str(FIXTURES / "gsm8k"), "other")
    with pytest.raises(ValueError, match="data set: .*gone"):
        open_stream(str(tmp_path / "gone"), "train")


def test_every_ready_task_names_its_source():
    for function in PUBLISHED_TASKS.values():
        (source,) = function.__defaults__
        assert f"https://huggingface.co/datasets/{source}" in function.__doc__


# --- streams


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(3):
        table = {"question": [f"q{10 * shard + i}" for i in range(10)], "image": [png(shard)] * 10}
        write(folder, "train", table, f"{shard:05}-of-00003", image=datasets.Image())
    return str(folder)


def streamed(stream, count, steps, **options):
    wanted = stream_steps(stream, lambda raw: {"question": raw["question"], "images": [raw["image"]]}, count, **options)
    return [next(wanted) for _ in range(steps)]


def test_a_stream_resumes_at_any_step(shards):
    stream = open_stream(shards, "train")
    steps = streamed(stream, 4, 17, seed=1, buffer_size=8)  # two epochs and a bit
    names = [[row["question"] for _, row in step] for step in steps]
    assert [[position for position, _ in step] for step in steps] == [[0, 1, 2, 3]] * 17
    flat = [name for step in names for name in step]
    everything = sorted(f"q{i}" for i in range(30))
    assert sorted(flat[:30]) == sorted(flat[30:60]) == everything and flat[:30] != flat[30:60] != everything
    for start in (1, 8, 16):
        (again,) = streamed(open_stream(shards, "train"), 4, 1, seed=1, buffer_size=8, start=start)
        assert again == steps[start]
    assert streamed(stream, 4, 1, seed=2, buffer_size=8) != steps[:1]
    row = steps[0][0][1]
    assert isinstance(row["images"][0]["bytes"], bytes) and row["where"] == "stream epoch 0 row 1"  # not decoded


def test_a_stream_with_a_buffer_of_one_row_keeps_its_order(shards):
    steps = streamed(open_stream(shards, "train"), 30, 2, seed=1, buffer_size=1)
    assert [[row["question"] for _, row in step] for step in steps] == [[f"q{i}" for i in range(30)]] * 2


def test_a_saved_set_streams_too(tmp_path):
    datasets.Dataset.from_dict({"question": ["a", "b", "c"], "image": [None] * 3}).save_to_disk(tmp_path)
    (step,) = streamed(open_stream(str(tmp_path), "train"), 3, 1, seed=0, buffer_size=1)
    assert sorted(row["question"] for _, row in step) == ["a", "b", "c"]


def test_an_empty_stream_and_a_count_of_nothing_are_errors():
    stream = datasets.IterableDataset.from_generator(lambda: iter(()))
    with pytest.raises(ValueError, match="expected rows to train on, got none"):
        next(stream_steps(stream, dict, 2, seed=0))
    with pytest.raises(ValueError, match="count: expected at least 1"):
        next(stream_steps(stream, dict, 0, seed=0))


def test_made_rows_are_read_when_asked_for():
    mapped = []

    def make(raw):
        mapped.append(raw["n"])
        return {"question": raw["n"]}

    rows = map_table(datasets.Dataset.from_dict({"n": list(range(9))}), make, "here")
    assert rows[2:][1] == {"question": 3, "where": "here row 4"} and mapped == [3]
