"""Specs of the families, and transformers' own tiny model of each, for the tests of rope3d."""

import importlib
import re
from dataclasses import replace

import pytest

from rlkit.vlm.rope3d import ROPE3D_MODEL_TYPES, Rope3DSpec

IMAGE, VIDEO, START, END, VIDEO_START, VIDEO_END = 90, 91, 92, 93, 94, 95
QWEN2 = Rope3DSpec(IMAGE, VIDEO, START)
QWEN2_5 = replace(QWEN2, tokens_per_second=2)
QWEN3 = replace(QWEN2, framewise_video=True)
ERNIE = Rope3DSpec(IMAGE, VIDEO, temporal_merge_size=2)
GLM = Rope3DSpec(IMAGE, VIDEO, framewise_video=True, video_start_token_id=VIDEO_START, video_end_token_id=VIDEO_END)
SPECS = {"qwen2": QWEN2, "qwen2_5": QWEN2_5, "qwen3": QWEN3, "ernie": ERNIE, "glm": GLM}
# the others: test_rope3d_omni.py
VISION_TYPES = [name for name in ROPE3D_MODEL_TYPES if not re.match(r"qwen\d.*omni", name)]


def transformers_model(model_type: str, tokens_per_second: int = 2):
    """The class that owns `get_rope_index` with a configuration and nothing else: it reads no weights."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    config = transformers.AutoConfig.for_model(model_type)
    ids = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
    for name, value in (ids | dict(video_start_token_id=VIDEO_START, video_end_token_id=VIDEO_END)).items():
        if hasattr(config, name):
            setattr(config, name, value)
    if hasattr(config.vision_config, "tokens_per_second"):
        config.vision_config.tokens_per_second = tokens_per_second
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    (owner,) = (x for x in vars(module).values() if isinstance(x, type) and "get_rope_index" in vars(x))
    model = owner.__new__(owner)
    model.config = config
    return model
