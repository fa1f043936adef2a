"""Fingerprints of rows: what changes them, and what does not."""

import json
from dataclasses import replace
from io import BytesIO

import datasets
import numpy as np
import pytest
from PIL import Image

from rlkit.data import load_pairs, load_task, load_unpaired, mix_tasks, with_heldout, with_prompt
from rlkit.data.tables import Rows, as_rows


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows(count, **more):
    return [{"question": f"q{i}", "answer": str(i), **more} for i in range(count)]


def both(task):
    return as_rows(task.train).fingerprint(), as_rows(task.heldout).fingerprint()


@pytest.mark.parametrize(
    "changed",
    [
        rows(201),
        rows(200)[::-1],
        [*rows(199), {"question": "q199", "answer": "other"}],
        rows(200, image="a.png"),
        [*rows(200)[:50], rows(200)[51], rows(200)[50], *rows(200)[52:]],
    ],
)
def test_other_rows_have_other_fingerprints(tmp_path, changed):
    before = both(load_task(write(tmp_path / "a.jsonl", rows(200))))
    assert both(load_task(write(tmp_path / "a.jsonl", rows(200)))) == before
    assert both(load_task(write(tmp_path / "a.jsonl", changed)))[0] != before[0]


def test_held_out_rows_and_rows_to_train_on_differ(tmp_path):
    task = load_task(write(tmp_path / "a.jsonl", rows(200)))
    assert len({*both(task), *both(with_heldout(task, "0.2"))}) == 4
    assert both(with_heldout(task, "0.2")) == both(with_heldout(task, "0.2"))


@pytest.mark.parametrize("load", [load_pairs, load_unpaired])
def test_rows_made_of_others_change_with_all_of_them(tmp_path, load):
    """Also rows that a sample of a hundred would not see."""
    pairs = {"chosen": "a", "rejected": "b"}
    name = write(tmp_path / "a.jsonl", rows(1000, **pairs))

    def of(task):
        mixture = mix_tasks([task, replace(task, name="b")])
        return [*both(task)[:1], *both(mixture)[:1], *both(with_prompt(task, system_prompt="s"))[:1]]

    before = of(load(name))
    assert of(load(name)) == before
    for i in range(400, 410):
        changed = rows(1000, **pairs)
        changed[i]["chosen"] = "other"
        now = of(load(write(tmp_path / "a.jsonl", changed)))
        assert not set(now) & set(before)


def png(size):
    buffer = BytesIO()
    Image.new("RGB", (size, size)).save(buffer, "png")
    return buffer.getvalue()


def parquet(path, names, sizes, group=1000):
    images = [[{"path": name, "bytes": png(size)}] for name, size in zip(names, sizes, strict=True)]
    table = datasets.Dataset.from_dict(
        {"question": [f"q{i}" for i in range(len(images))], "answer": ["1"] * len(images), "images": images},
        features=datasets.Features(
            {"question": datasets.Value("string"), "answer": datasets.Value("string"), "images": [datasets.Image()]}
        ),
    )
    table.to_parquet(path, batch_size=group)
    return str(path)


def test_of_images_in_a_table_paths_and_sizes_count(tmp_path):
    names = [f"{i}.png" for i in range(30)]

    def of(name, *options, **more):
        return both(load_task(parquet(tmp_path / f"{name}.parquet", *options, **more)))

    before = of("a", names, [8] * 30)
    assert of("b", names, [8] * 30, group=7) == before  # the same rows in other row groups
    assert of("c", names, [8] * 29 + [300]) != before
    assert of("d", [*names[:29], "other.png"], [8] * 30) != before


def test_rows_that_are_computed_are_sampled():
    read = []

    def row(i):
        read.append(i)
        return {"question": str(i), "images": [Image.new("RGB", (8, 8))], "answer": np.int64(i)}

    one = Rows(row, np.arange(10_000)).fingerprint()
    assert len(read) == 100 and read[0] == 0 and read[-1] == 9999
    assert Rows(row, np.arange(10_000)).fingerprint() == one
    assert Rows(row, np.arange(1, 10_001)).fingerprint() != one
    assert Rows(row, np.arange(0)).fingerprint() != one
