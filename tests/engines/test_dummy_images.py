"""Samples with and without images, and with different numbers of images, in one batch, for each family."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parent))
from family_configs import TEXT
from test_families import IMAGE, VISION, check, gradients, rows, text_model, vision_model

from rlkit.data import append_response, collate
from rlkit.data.samples import prompt_sample
from rlkit.engines import make_engine
from rlkit.engines.fsdp.sharding import unsplit_modules
from rlkit.engines.packing.attention import use_packed_attention
from rlkit.engines.packing.dummy_media import dummy_sample
from rlkit.engines.packing.inputs import prepare_model_inputs
from rlkit.vlm.inputs import (
    GEMMA_VIDEO_KEYS,
    check_image_tokens,
    concatenate_vision,
    frames_as_images,
    gemma_frames_as_images,
    position_spec,
    vision_kinds,
)
from rlkit.vlm.routers import routers

CPU = torch.device("cpu")


PATCHES = [family for family, (*_, shape) in VISION.items() if len(shape) == 2 and not family.startswith("glm")]
HEARS = {  # family -> the first module that an audio goes through
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), "audio_tower.conv"),
    "gemma3n": "subsample_conv_projection.conv_0",
    "gemma4": "subsample_conv_projection.layer0",
    "gemma4_unified": "embed_audio",
}
DUMMIES = [*((family, {"image": True}) for family in VISION)]
WITH_VIDEOS = [*PATCHES, "minicpmv4_6", "glm5_next", "kimi_k25", "llava_onevision"]
DUMMIES += [(family, {"image": x, "video": True}) for family in WITH_VIDEOS for x in (False, True)]
DUMMIES += [
    (family, {**others, "audio": True})
    for family in VISION
    if family in HEARS
    for others in ({"image": False}, {"image": True}, {"image": False, "video": True})
    if "omni" in family or "video" not in others
]


@pytest.mark.parametrize(("family", "needed"), DUMMIES)
def test_a_dummy_image_changes_no_output_and_goes_through_the_tower(family, needed):
    """A rank without images, videos or audios then has zero gradients there, and joins the others' collectives."""
    model, (batch, weights) = vision_model(family), rows()
    use_packed_attention(model)
    for remove_padding in (True, False):
        found = []
        for dummy in (None, dummy_sample(model.config, **{"image": False, **needed})):
            options = {"remove_padding": remove_padding, "dummy": dummy}
            inputs = prepare_model_inputs(batch, position_spec(model.config), CPU, **options)
            logits = inputs.select_outputs(model(**inputs.kwargs, use_cache=False).logits)
            logprobs = inputs.scatter(logits.log_softmax(-1).gather(1, inputs.targets[:, None])[:, 0])
            found.append((logprobs.detach(), gradients(model, (weights * logprobs).sum())))
        (plain, plain_gradients), (with_dummy, dummy_gradients) = found
        torch.testing.assert_close(with_dummy, plain, atol=1e-5, rtol=1e-5)
        for name, value in plain_gradients.items():
            torch.testing.assert_close(dummy_gradients[name], value, atol=1e-4, rtol=1e-4, msg=name)
        in_tower = dummy_gradients.keys() - plain_gradients.keys()
        first = "conv_stem" if family == "gemma3n" else "patch_"  # patch_embed, patch_conv
        towers = [first] * any(needed.get(kind) for kind in ("image", "video"))
        towers += [HEARS[family]] if "audio" in needed else []
        assert towers and all(any(tower in name for name in in_tower) for tower in towers)
        assert all(dummy_gradients[name].abs().max() == 0 for name in in_tower)


@pytest.mark.parametrize("family", VISION)
def test_no_unit_of_fsdp_contains_another(family):
    """FSDP cannot shard weights twice; Qwen-Omni names its towers and their layers."""
    units = unsplit_modules(vision_model(family))
    weights = [id(parameter) for unit in units for parameter in unit.parameters()]
    assert len(units) >= 2 and len(weights) == len({*weights})


def test_a_dummy_image_alone_goes_to_all_experts_of_ernie():
    """Its experts for text and for images both join the collectives of a rank that has no rows."""
    model, found = vision_model("ernie4_5_vl_moe"), []
    with pytest.raises(ValueError, match="^model: expected one router in each layer, got several in those of ernie4_5"):
        routers(model)
    use_packed_attention(model)
    for sample in (rows("ernie4_5_vl_moe")[0].select([0]), collate([dummy_sample(model.config, image=True)])):
        kwargs = prepare_model_inputs(sample, position_spec(model.config), CPU).kwargs
        found.append(gradients(model, model(**kwargs, use_cache=False).logits.sum()))
    assert found[0].keys() == found[1].keys()
    assert {"text_moe", "vision_moe"} <= {part for name in found[1] for part in name.split(".")}


def test_a_family_without_a_known_dummy_image_is_named():
    for family, vision in (("vipllava", "clip_vision_model"), ("llava", "pixtral")):
        text = SimpleNamespace(pad_token_id=None)
        parts = {"vision_config": SimpleNamespace(model_type=vision), "get_text_config": lambda text=text: text}
        config = SimpleNamespace(model_type=family, **parts)
        expected = f"images on every rank or on none, .* no dummy image is known for {family}"
        with pytest.raises(ValueError, match=expected):
            dummy_sample(config, image=True)
        assert dummy_sample(config, image=False).token_ids == [0]


@pytest.mark.parametrize("padding", [0, 1, None])
def test_a_dummy_without_images_has_finite_gradients(padding):
    """The embedding of the padding token is zeros, for which those of Gemma 3n would be nan."""
    model = text_model("gemma3n_text", {**TEXT["gemma3n_text"], "pad_token_id": padding})
    if padding is not None:
        model.get_input_embeddings().weight.data[padding] = 0
    use_packed_attention(model)
    dummy = collate([dummy_sample(model.config, image=False)])
    kwargs = prepare_model_inputs(dummy, None, CPU).kwargs
    found = gradients(model, 0.0 * model(**kwargs, use_cache=False).logits.sum())
    assert found and all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_5", "glm4v_moe", "glm46v"])
def test_a_dummy_image_in_patches_has_one_token(family):
    config = AutoConfig.for_model(family)
    vision, dummy = config.vision_config, dummy_sample(config, image=True)
    assert dummy.token_ids[:-1] == [config.image_token_id] and dummy.token_ids[-1] in (0, 1)  # a text token fills rows
    assert dummy.vision["image_grid_thw"].prod() == len(dummy.vision["pixel_values"]) == vision.spatial_merge_size**2
    assert dummy.vision["pixel_values"].shape[1] == 3 * vision.temporal_patch_size * vision.patch_size**2


@pytest.mark.parametrize("merger_times", [1, 2])
@pytest.mark.parametrize("mode", ["4x", "16x"])
def test_a_dummy_image_of_minicpmv4_6_has_one_token(mode, merger_times, monkeypatch):
    options, *rest = VISION["minicpmv4_6"]
    options = {**options, "downsample_mode": mode, "merger_times": merger_times}
    monkeypatch.setitem(VISION, "minicpmv4_6", (options, *rest))
    model = vision_model("minicpmv4_6")
    dummy = dummy_sample(model.config, image=True)
    check_image_tokens(collate([append_response(dummy, [1], [-1.0])]), model.config)
    (features,) = model.model.get_image_features(**dummy.vision).pooler_output
    assert len(features) == len(dummy.token_ids[:-1]) == 1


@pytest.mark.parametrize("family", ["smolvlm", "idefics3"])
def test_samples_with_different_numbers_of_images_fit_in_one_batch(family):
    g = torch.Generator().manual_seed(0)
    samples = []
    for count in (1, 3, 0, 2):
        ids = torch.randint(3, 80, (5,), generator=g).tolist() + [IMAGE] * (4 * count) + [7]
        vision = {"pixel_values": torch.randn(1, count, 3, 16, 16, generator=g)} if count else {}
        samples.append(append_response(prompt_sample(ids, vision=vision), [11, 12, 13], [-1.0] * 3))
    batch = collate(samples)
    check(vision_model(family), batch, torch.randn(batch.tokens.shape, generator=g))


def test_mistral3_images_of_different_sizes_fit_in_one_batch():
    """Pixels are padded to the largest image; `image_sizes` says where each ends."""
    g = torch.Generator().manual_seed(0)
    samples = []
    for height, width in ((16, 16), (8, 24), (24, 8)):
        ids = torch.randint(3, 80, (5,), generator=g).tolist() + [IMAGE] * (height * width // 64) + [7]
        vision = {"pixel_values": torch.randn(1, 3, height, width, generator=g)}
        vision["image_sizes"] = torch.tensor([[height, width]])
        samples.append(append_response(prompt_sample(ids, vision=vision), [11, 12, 13], [-1.0] * 3))
    batch = collate(samples)
    check(vision_model("mistral3"), batch, torch.randn(batch.tokens.shape, generator=g))


def test_image_masks_are_padded_and_tensors_that_do_not_fit_are_named():
    masks = [{"pixel_attention_mask": torch.ones(1, count, 2, 2, dtype=torch.bool)} for count in (1, 2)]
    assert concatenate_vision(masks)["pixel_attention_mask"].sum((2, 3)).tolist() == [[4, 0], [4, 4]]
    with pytest.raises(
        ValueError, match=r"pixel_values: .* equal except in dimension 0, got \(1, 3, 4, 4\), \(1, 3, 4, 6\)"
    ):
        concatenate_vision([{"pixel_values": torch.zeros(1, 3, 4, width)} for width in (4, 6)])


def test_pixels_of_minicpmv4_6_are_concatenated_along_the_last_dimension():
    one = {"target_sizes": torch.tensor([[2, 2]])}
    found = concatenate_vision([{**one, "pixel_values": torch.zeros(1, 3, 4, width)} for width in (4, 6)])
    assert found["pixel_values"].shape == (1, 3, 4, 10) and found["target_sizes"].shape == (2, 2)
    expected = r"pixel_values: .* equal except in dimension 3, got \(1, 3, 4, 4\), \(1, 3, 5, 4\)"
    with pytest.raises(ValueError, match=expected):
        concatenate_vision([{**one, "pixel_values": torch.zeros(1, 3, height, 4)} for height in (4, 5)])


def test_video_frames_of_glm_are_images_in_the_order_of_the_row():
    """A row of an image, a video of two frames and another image: the tower gets each frame as an image."""
    spec = position_spec(vision_model("glm4v").config)
    frame = [91, IMAGE, IMAGE, 92]
    row = torch.tensor([91, IMAGE, 92, 93, *frame, 5, *frame, 94, 91, IMAGE, IMAGE, IMAGE, 92, 0, 0])
    images, video = torch.tensor([[1, 2, 2], [1, 2, 6]]), torch.tensor([[2, 2, 4]])
    patches = torch.arange(32.0)[:, None]
    one = {"pixel_values": patches[:16], "image_grid_thw": images}
    one |= {"pixel_values_videos": patches[16:], "video_grid_thw": video}
    joined = frames_as_images(row, one, spec)
    assert joined["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4], [1, 2, 4], [1, 2, 6]]
    assert joined["pixel_values"].flatten().tolist() == [*range(4), *range(16, 32), *range(4, 16)]
    assert vision_kinds([one], spec) == vision_kinds([joined], spec) == [True, False, False]


def test_video_frames_of_gemma4_are_images_in_the_order_of_the_row():
    """A frame has half the patches of an image: more padding changes no feature."""
    model = vision_model("gemma4")
    image, video, k = model.config.image_token_id, model.config.video_token_id, 4
    cells = torch.cartesian_prod(torch.arange(2), torch.arange(4))
    images = torch.stack([cells, cells.where(cells[:, 1:] < 2, -1)])  # of two tokens and of one
    inputs = {
        "input_ids": torch.tensor([[5, image, image, 6, video, 5, video, 7], [3, 3, image, 5, 6, 7, 8, 9]]),
        "pixel_values": torch.rand(2, 2 * k, 48, generator=torch.Generator().manual_seed(0)),
        "image_position_ids": images,
        "pixel_values_videos": torch.rand(2, k, 48, generator=torch.Generator().manual_seed(1)),
        "video_position_ids": torch.stack([images[1, [0, 1, 4, 5]]] * 2),
        "num_frames_per_video": torch.tensor([2]),
    }
    joined = gemma_frames_as_images(inputs, model.config)
    assert joined["input_ids"].tolist() == [[5, image, image, 6, image, 5, image, 7], [3, 3, image, 5, 6, 7, 8, 9]]
    assert joined.keys() == {"input_ids", "pixel_values", "image_position_ids"}
    features = torch.cat(model.get_image_features(joined["pixel_values"], joined["image_position_ids"]).pooler_output)
    of_images = torch.cat(model.get_image_features(inputs["pixel_values"], images).pooler_output)
    of_videos = model.model.get_video_features(*(inputs[name] for name in GEMMA_VIDEO_KEYS)).pooler_output
    torch.testing.assert_close(features, torch.cat([of_images[:2], *of_videos, of_images[2:]]), atol=1e-5, rtol=1e-5)
    kinds = [vision_kinds([one], None) for one in ({}, joined, inputs)]
    assert kinds == [[False] * 3, [True, False, False], [True, False, False]]


def test_video_frames_of_gemma4_are_put_in_order_on_the_host():
    """A device would be waited for: the meta device, which has no values, raises."""
    model = vision_model("gemma4")
    where = torch.cartesian_prod(*[torch.arange(model.config.vision_config.pooling_kernel_size)] * 2)[None]
    vision = {"pixel_values_videos": torch.zeros(1, where.shape[1], 48), "video_position_ids": where}
    prompt = prompt_sample([3, model.config.video_token_id, 4], vision=vision)
    trained = make_engine("fsdp2", model=model, device="cpu", optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    trained.device = torch.device("meta")
    for trained.use_remove_padding in (False, True):
        kwargs = trained._inputs(collate([append_response(prompt, [7], [-1.0])]), None).kwargs
        assert kwargs["pixel_values"].is_meta and "pixel_values_videos" not in kwargs


def test_images_videos_and_audios_are_separate_calls_of_the_towers():
    spec = position_spec(vision_model("qwen3_vl").config)
    image, video = {"pixel_values": torch.zeros(1)}, {"pixel_values_videos": torch.zeros(1)}
    audio = {"input_features": torch.zeros(1)}
    rows = [[{}], [image, {}], [video], [image, video], [{**image, **video}], [image, audio]]
    seen = [[int(kind) for kind in vision_kinds(vision, spec)] for vision in rows]
    assert seen == [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0], [1, 1, 0], [1, 0, 1]]
