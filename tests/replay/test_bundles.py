"""The files of a bundle: what is read is what was written, and damage is named."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from rlkit.data.placeholders import Expansion
from rlkit.data.samples import append_response, prompt_sample
from rlkit.replay.bundles import Bundle, Draw, Update, bundle_path, bundle_steps, read_bundle, write_bundle

PICTURE = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3))
ROW = {"question": "Which?", "answer": 7, "images": [PICTURE, b"\x00\xff"], "weights": np.ones(2), "made": {"by": None}}


def answers(group_id, rewards=(1.0, math.nan)):
    """Answers to one prompt with an image and a placeholder of each kind, the second one longer."""
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
        draws=[Draw(answers(0) + answers(1), {"seed": [0, 3]}), Draw(answers(2), {}, "evaluate")],
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


def test_answers_to_a_prompt_share_their_image_and_row(tmp_path, bundle):
    from safetensors import safe_open

    write_bundle(tmp_path, bundle)
    samples = read_bundle(tmp_path).draws[0].samples
    assert samples[0].vision["pixel_values"] is samples[1].vision["pixel_values"] and samples[0].row is samples[1].row
    with safe_open(tmp_path / "rank_0.safetensors", "pt") as file:
        assert sum(name.startswith("sha256_") for name in file.keys()) == 3 + 1 + 2  # pixels, one grid, row's two


def test_ranks_are_read_together(tmp_path, bundle):
    for rank, (group, rows, width) in enumerate([(1, [2, 1], 3), (0, [0, 3], 5)]):
        bundle.draws, bundle.updates = [Draw(answers(group))], [update(rows, width)]
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
