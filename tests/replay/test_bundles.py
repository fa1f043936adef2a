"""The files of a bundle: what is read is what was written, and damage is named."""

import errno
import hashlib
import io
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from safetensors.torch import load_file, save_file

from rlkit.data import load_task
from rlkit.data.placeholders import Expansion
from rlkit.data.samples import append_response, prompt_sample
from rlkit.replay.bundles import Bundle, Draw, Update, bundle_path, bundle_steps, read_bundle, write_bundle
from rlkit.runs import rollouts
from rlkit.vlm import load_image

PICTURE = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3))
ROW = {"question": "Which?", "answer": 7, "images": [PICTURE, b"\x00\xff"], "weights": np.ones(2), "made": {"by": None}}


def responses(group_id, rewards=(1.0, math.nan)):
    """Responses to one prompt with an image and a placeholder of each kind, the second one longer."""
    vision = {"pixel_values": torch.full((4, 3), float(group_id)), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    prompt = prompt_sample(
        [5, 9, 9, 8, 8, 6],
        [5, 9, 8, 6],
        vision=vision,
        placeholders={9: [2], 8: [Expansion([8, 8])]},
        row=ROW,
        group_id=group_id,
    )
    return [
        append_response(
            prompt, [1] * (i + 1), [-0.1] * (i + 1), text="a" * i, number=i, reward=x, finish_reason="stop", version=3
        )
        for i, x in enumerate(rewards)
    ]


def update(rows, width):
    ids = torch.tensor(rows)
    fields = {
        "tokens": ids[:, None].expand(-1, width).contiguous(),
        "mask": torch.ones(len(rows), width, dtype=torch.bool),
        "group_ids": ids // 2,
        "numbers": ids % 2,
        "advantages": ids.float(),
    }
    return Update("checkpoints", fields, {"loss": 0.25, "grad_norm": math.inf})


@pytest.fixture
def bundle():
    return Bundle(
        3,
        recipe="recipes/grpo_vlm.py",
        options={"steps": 4, "trackers": ["a"], "max_mismatch": math.inf},
        versions={"torch": "2"},
        draws=[Draw(responses(0) + responses(1), {"seed": [0, 3]}), Draw(responses(2), {}, "evaluate")],
        updates=[update([0, 1, 2, 3], 3)],
    )


def assert_same_sample(one, other):
    for name in ("token_ids", "compact_ids", "mask", "logprobs", "group_id", "number", "text", "finish_reason"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.reward == other.reward or math.isnan(one.reward) and math.isnan(other.reward)
    assert one.version == other.version and one.placeholders == other.placeholders
    assert one.vision.keys() == other.vision.keys()
    assert all(torch.equal(x, other.vision[name]) for name, x in one.vision.items())


def test_what_is_read_is_what_was_written(tmp_path, bundle):
    write_bundle(bundle_path(tmp_path, 3), bundle)
    found = read_bundle(tmp_path / "step_3")
    for name in ("step", "origin", "recipe", "options", "versions"):
        assert getattr(found, name) == getattr(bundle, name), name
    assert [draw.phase for draw in found.draws] == ["generate", "evaluate"] and found.draws[0].sampling == {
        "seed": [0, 3]
    }
    for draw, written in zip(found.draws, bundle.draws, strict=True):
        for one, other in zip(draw.samples, written.samples, strict=True):
            assert_same_sample(one, other)
    row = found.draws[0].samples[0].row
    assert row["images"][0].tobytes() == PICTURE.tobytes() and row["images"][1] == b"\x00\xff"
    assert {**row, "images": ()} == {**ROW, "images": (), "weights": [1.0, 1.0]}
    (read,), (wrote,) = found.updates, bundle.updates
    assert list(read.fields) == list(wrote.fields) and read.metrics == wrote.metrics
    assert all(torch.equal(x, wrote.fields[name]) for name, x in read.fields.items())
    assert bundle_steps(tmp_path) == [3] and bundle_steps(tmp_path / "none") == []


def read_again(folder, row):
    """A row that was written and read."""
    sample = append_response(prompt_sample([1], row=row), [2], [0.0], reward=1.0)
    write_bundle(folder, Bundle(0, draws=[Draw([sample])]))
    return read_bundle(folder).draws[0].samples[0].row


@pytest.mark.parametrize(
    "value",
    [
        ((1, 2), [3, (4,)], ()),
        {(2, 3)},
        frozenset([frozenset([1])]),
        {1: "one", (2, 3): "two", None: {"deep": (4,)}, "1": "text", 2.5: []},
        {"python tuple": [1]},
        {"png tensor": "x"},
        {"bytes tensor": {"python mapping": 5}},
    ],
    ids=str,
)
def test_values_that_json_lacks_are_read_as_they_were(tmp_path, value):
    row = read_again(tmp_path, {"value": value, "question": "?"})
    assert row == {"value": value, "question": "?"} and type(row["value"]) is type(value)


def test_a_verifier_that_compares_tuples_scores_the_same(tmp_path):
    task = load_task("reasoning_gym:arc_agi,rows=2,heldout=1")
    for row in task.train:
        assert task.reward(row["answer"], row) == task.reward(row["answer"], read_again(tmp_path, row)) == 1


def test_bundles_of_earlier_versions_are_read(tmp_path, bundle):
    """These wrote tuples as lists, and only bytes and PNG files with a tag."""
    write_bundle(tmp_path, bundle)
    file = io.BytesIO()
    PICTURE.save(file, "PNG")
    encoded = {f"old_{i}": torch.tensor(list(data)).byte() for i, data in enumerate((file.getvalue(), b"ab"))}
    tensors = {**load_file(tmp_path / "rank_0.safetensors"), **encoded}
    save_file(tensors, tmp_path / "rank_0.safetensors")
    content = json.loads((tmp_path / "rank_0.json").read_text())
    content["rows"] = [{"a": [1, [2]], "1": {}, "image": {"png tensor": "old_0"}, "b": {"bytes tensor": "old_1"}}] * 3
    content["tensors_sha256"] = hashlib.sha256((tmp_path / "rank_0.safetensors").read_bytes()).hexdigest()
    rest = {key: x for key, x in content.items() if key != "sha256"}
    content["sha256"] = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    (tmp_path / "rank_0.json").write_text(json.dumps(content))
    row = read_bundle(tmp_path).draws[0].samples[0].row
    assert row.pop("image").tobytes() == PICTURE.tobytes() and row == {"a": [1, [2]], "1": {}, "b": b"ab"}


MODES = "1 L LA La P PA RGB RGBA RGBX RGBa I I;16 I;16B I;16L F CMYK YCbCr LAB HSV".split()


@pytest.mark.parametrize("mode", MODES)
def test_images_of_all_modes_are_read_as_they_were(tmp_path, mode):
    colours = Image.fromarray(np.arange(60, dtype=np.uint8).reshape(5, 4, 3) * 4)
    if mode in ("P", "PA"):
        image = colours.quantize(8).convert(mode)
    else:
        size = len(Image.new(mode, (5, 4)).tobytes())
        image = Image.frombytes(mode, (5, 4), bytes(range(size)))
    read = read_again(tmp_path, {"image": image})["image"]
    assert (read.mode, read.size, read.tobytes()) == (mode, image.size, image.tobytes())
    assert read.getpalette() == image.getpalette()


@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
def test_an_image_is_turned_as_before(tmp_path, mode):
    exif, file = Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.Model] = 6, "a camera"
    Image.new(mode, (40, 20)).save(file, "JPEG", exif=exif)
    image = Image.open(file)
    read = read_again(tmp_path, {"image": image})["image"]
    assert read.getexif()[ExifTags.Base.Model] == "a camera"
    assert load_image(read).size == load_image(image).size == (20, 40)


def test_exif_data_of_a_wrong_type_do_not_end_the_run(tmp_path):
    image = Image.new("RGB", (4, 2))
    entry = struct.pack("<HHHI4s", 1, ExifTags.Base.Orientation, 2, 2, b"6")  # a text in place of a number
    image.info["exif"] = b"Exif\0\0II*\0\x08\0\0\0" + entry + bytes(4)
    read = read_again(tmp_path, {"image": image})["image"]
    assert read.getexif()[ExifTags.Base.Orientation] == image.getexif()[ExifTags.Base.Orientation] == "6"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "expected room for those of this step in OUT/rollouts, got: ",
        ),
        (PermissionError(errno.EACCES, "denied"), "expected to write those of this step to OUT/rollouts, got: "),
        (OSError("image file is truncated"), "expected to write those of this step to OUT/rollouts, got: "),
    ],
)
def test_only_a_full_disk_is_said_to_lack_room(monkeypatch, error, said):
    def write(*args, **kwargs):
        raise error

    stopped = []
    run = SimpleNamespace(out=Path("OUT"), phase=lambda name: None, stop=stopped.append)
    engine = SimpleNamespace(model_parallel_group=None, data_parallel_rank=0, data_parallel_size=1)
    monkeypatch.setattr(rollouts, "write_bundle", write)
    rollouts.save_rollouts(Options(), run, 3, {"checkpoints": engine})
    assert stopped == [f"rollouts: {said}{error}"]


@dataclass
class Options:
    """Options of a recipe."""


def test_responses_to_a_prompt_share_their_image_and_row(tmp_path, bundle):
    from safetensors import safe_open

    write_bundle(tmp_path, bundle)
    samples = read_bundle(tmp_path).draws[0].samples
    assert samples[0].vision["pixel_values"] is samples[1].vision["pixel_values"] and samples[0].row is samples[1].row
    with safe_open(tmp_path / "rank_0.safetensors", "pt") as file:
        assert sum(name.startswith("sha256_") for name in file.keys()) == 3 + 1 + 2  # pixels, one grid, row's two


def test_ranks_are_read_together(tmp_path, bundle):
    for rank, (group, rows, width) in enumerate([(1, [2, 1], 3), (0, [0, 3], 5)]):
        bundle.draws, bundle.updates = [Draw(responses(group))], [update(rows, width)]
        write_bundle(tmp_path, bundle, rank=rank, ranks=2)
    found = read_bundle(tmp_path)
    assert [sample.group_id for sample in found.draws[0].samples] == [0, 0, 1, 1]
    fields = found.updates[0].fields
    assert fields["advantages"].tolist() == [0, 1, 2, 3] and fields["tokens"].shape == (4, 5)
    (tmp_path / "rank_1.json").unlink()
    with pytest.raises(ValueError, match=r"bundle .*: expected a folder with rank_1.json, got none"):
        read_bundle(tmp_path)
    with pytest.raises(ValueError, match="bundle '/nowhere': expected a folder with rank_0.json, got none"):
        read_bundle("/nowhere")


def test_a_bundle_is_named_by_its_folder_or_a_file_of_it(tmp_path, bundle):
    write_bundle(tmp_path, bundle)
    assert read_bundle(tmp_path / "rank_0.json").step == read_bundle(str(tmp_path)).step == 3


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "rank_0.json").unlink(), "expected a folder with rank_0.json, got none"),
        (lambda folder: (folder / "rank_0.json").write_text("{"), "expected JSON, got"),
        (lambda folder: change(folder, format="rlkit rollouts 0"), "expected the format 'rlkit rollouts 1', got"),
        (lambda folder: change(folder, step=4), "expected the content that was written, got another checksum"),
        (lambda folder: (folder / "rank_0.safetensors").unlink(), "expected rank_0.safetensors beside rank_0.json"),
        (lambda folder: flip(folder / "rank_0.safetensors"), "expected the tensors that were written, got another"),
    ],
)
def test_damage_is_named(tmp_path, bundle, damage, said):
    write_bundle(tmp_path, bundle)
    damage(tmp_path)
    with pytest.raises(ValueError, match=said) as caught:
        read_bundle(tmp_path)
    assert "\n" not in str(caught.value)


def change(folder, **values):
    file = folder / "rank_0.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def flip(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
