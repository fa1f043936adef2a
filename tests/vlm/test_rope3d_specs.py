"""rope3d_spec of each family, and what is refused."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlkit.vlm.inputs import position_spec
from rlkit.vlm.rope3d import ROPE3D_MODEL_TYPES, ROPE3D_REFUSED, rope3d_position_ids, rope3d_spec

sys.path.insert(0, str(Path(__file__).parent))

from rope3d_families import (  # noqa: E402
    END,
    ERNIE,
    GLM,
    IMAGE,
    QWEN2,
    QWEN2_5,
    QWEN3,
    START,
    VIDEO,
    VIDEO_END,
    VIDEO_START,
    VISION_TYPES,
    transformers_model,
)

OF_FAMILY = {"qwen2_vl": QWEN2, "paddleocr_vl": QWEN2, "qwen2_5_vl": replace(QWEN2, tokens_per_second=4)}
OF_FAMILY |= {"ernie4_5_vl_moe": ERNIE} | dict.fromkeys(["glm4v", "glm4v_moe", "glm46v", "glm_ocr"], GLM)


@pytest.mark.parametrize("model_type", VISION_TYPES)
def test_spec_of_each_family(model_type):
    config = transformers_model(model_type, tokens_per_second=4).config
    assert rope3d_spec(config) == OF_FAMILY.get(model_type, QWEN3)
    for name, value in (("spatial_merge_size", 3), ("temporal_merge_size", 4)):
        if hasattr(config.vision_config, name):
            setattr(config.vision_config, name, value)
    spec = rope3d_spec(config)
    assert spec.merge_size == 3 and spec.temporal_merge_size == (4 if model_type == "ernie4_5_vl_moe" else 1)


@pytest.mark.parametrize("model_type", ["llava", "qwen2_5_vl_text", None])
def test_unknown_family_is_named(model_type):
    with pytest.raises(ValueError, match=f"hf_config: expected a model_type of qwen2_vl, .*, got {model_type!r}"):
        rope3d_spec(SimpleNamespace(model_type=model_type))


@pytest.mark.parametrize("model_type", ROPE3D_REFUSED)
def test_refused_family_is_named_with_the_reason(model_type):
    with pytest.raises(ValueError, match=f"a supported model_type, got '{model_type}': {ROPE3D_REFUSED[model_type]}"):
        rope3d_spec(SimpleNamespace(model_type=model_type))
    with pytest.raises(ValueError, match=f"supported model_type, got '{model_type}'"):  # no plain positions instead
        position_spec(SimpleNamespace(model_type=model_type))


def test_every_family_of_transformers_is_known():
    """A model with several axes of positions that is in neither list would get plain ones without a word."""
    import transformers

    models = Path(transformers.__file__).parent / "models"
    several = re.compile(r"def get_rope_index|mrope_section|def compute_3d_position_ids")
    found = {path.parent.name for path in models.glob("*/modeling_*.py") if several.search(path.read_text())}
    assert {"qwen2_vl", "glm4v", "qwen2_5_omni"} <= found
    assert found - {*ROPE3D_MODEL_TYPES, *ROPE3D_REFUSED} == set()
    assert not {*ROPE3D_MODEL_TYPES} & {*ROPE3D_REFUSED}


TOKENS, GRID = torch.tensor([[7, *[IMAGE] * 4, 8]]), torch.tensor([[1, 4, 4]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(input_ids=TOKENS[0]), r"input_ids: expected integer \[B, T\], got torch.int64 \[6\]"),
        (dict(input_ids=TOKENS.float()), r"input_ids: .* got torch.float32 \[1, 6\]"),
        (dict(attention_mask=torch.ones(1, 5)), r"attention_mask: expected \[1, 6\], got \[1, 5\]"),
        (dict(attention_mask=torch.ones(1, 6)), "attention_mask: expected bool or integer, got torch.float32"),
        (dict(input_ids=TOKENS.tolist()), r"input_ids: expected integer \[B, T\], got a list"),
        (dict(attention_mask=[[1] * 6]), "attention_mask: expected a tensor or None, got a list"),
        (dict(image_grid_thw=GRID.numpy()), r"image_grid_thw: expected integer \[n, 3\] .* got a ndarray"),
        (dict(image_grid_thw=GRID[0]), r"image_grid_thw: expected integer \[n, 3\] .* got torch.int64 \[3\]"),
        (dict(image_grid_thw=GRID.float()), r"image_grid_thw: .* got torch.float32 \[1, 3\]"),
        (dict(image_grid_thw=torch.tensor([[1, 4, 5]])), r"image_grid_thw: .* merge_size 2 divides, .* \(1, 4, 5\)"),
        (dict(video_grid_thw=torch.tensor([[1, 3, 4]])), r"video_grid_thw: .* merge_size 2 divides"),
        (
            dict(image_grid_thw=torch.tensor([[1, 4, 6]])),
            "input_ids: expected 6 attended image tokens .* 1 grids of image_grid_thw, got 4",
        ),
        (dict(image_grid_thw=None), "input_ids: expected 0 attended image tokens .*, got 4"),
        (dict(video_grid_thw=GRID), "input_ids: expected 4 attended video tokens .*, got 0"),
        (dict(attention_mask=torch.tensor([[1, 1, 1, 0, 1, 1]])), "expected 4 attended image tokens .*, got 3"),
        (
            dict(input_ids=TOKENS.view(2, 3)),
            r"image_grid_thw: .* a grid that begins in row 0 of input_ids \(2 attended image tokens there\)",
        ),
        (dict(second_per_grid_ts=[1.0]), r"second_per_grid_ts: expected \[0\], .* got \[1\]"),
        (dict(second_per_grid_ts=torch.ones(0, 1)), r"second_per_grid_ts: expected \[0\], .* got \[0, 1\]"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        rope3d_position_ids(**(dict(input_ids=TOKENS, image_grid_thw=GRID, spec=QWEN2_5) | change))


@pytest.mark.parametrize(
    ("tokens", "grids", "message"),
    [
        ([START, IMAGE, END], dict(video=[1, 2, 2]), "expected 0 attended image tokens .*, got 1"),
        (
            [VIDEO_START, IMAGE, VIDEO_END, IMAGE],
            dict(image=[1, 2, 4], video=[1, 2, 2]),
            "expected 2 attended image tokens .*, got 1",
        ),
        ([VIDEO_START, IMAGE, IMAGE], dict(image=[1, 2, 4]), "expected 2 attended image tokens .*, got 0"),
    ],
)
def test_glm_frames_are_no_images(tokens, grids, message):
    grids = {f"{kind}_grid_thw": torch.tensor([grid]) for kind, grid in grids.items()}
    with pytest.raises(ValueError, match=message):
        rope3d_position_ids(torch.tensor([tokens]), **grids, spec=GLM)


def test_frames_that_cannot_be_merged_are_named():
    tokens, grid = torch.full((1, 1), VIDEO), torch.tensor([[2, 2, 2], [3, 2, 2]])
    with pytest.raises(ValueError, match=r"video_grid_thw: .* temporal_merge_size 2 divides, got .* \(3, 2, 2\)"):
        rope3d_position_ids(tokens, video_grid_thw=grid, spec=ERNIE)
