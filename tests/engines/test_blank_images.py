"""Samples with and without images, and with unlike numbers of them, in one batch, family by family."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parent))
from test_families import IMAGE, VISION, check, gradients, rows, vision_model

from rlkit.data import collate, extend
from rlkit.data.samples import prompt
from rlkit.engines.packing.attention import use_packed_attention
from rlkit.engines.packing.inputs import blank_sample, pack
from rlkit.vlm.inputs import frames_as_images, join_vision, kinds_seen, position_spec

CPU = torch.device("cpu")


PATCHES = [family for family, (*_, shape) in VISION.items() if len(shape) == 2 and not family.startswith("glm")]
BLANKS = [*((family, {"image": True}) for family in VISION)]
BLANKS += [(family, {"image": image, "video": True}) for family in PATCHES for image in (False, True)]


@pytest.mark.parametrize(("family", "needed"), BLANKS)
def test_a_blank_image_changes_no_number_and_reaches_the_tower(family, needed):
    """The rank without images, or videos, has gradients of the tower, all of them 0, and waits for no other rank."""
    model, (batch, weights) = vision_model(family), rows()
    use_packed_attention(model)
    for packed in (True, False):
        found = []
        for blank in (None, blank_sample(model.config, **{"image": False, **needed})):
            inputs = pack(batch, position_spec(model.config), CPU, packed=packed, blank=blank)
            logits = inputs.kept(model(**inputs.kwargs, use_cache=False).logits)
            logprobs = inputs.scatter(logits.log_softmax(-1).gather(1, inputs.targets[:, None])[:, 0])
            found.append((logprobs.detach(), gradients(model, (weights * logprobs).sum())))
        (plain, without), (came, gradient) = found
        torch.testing.assert_close(came, plain, atol=1e-5, rtol=1e-5)
        for name, value in without.items():
            torch.testing.assert_close(gradient[name], value, atol=1e-4, rtol=1e-4, msg=name)
        more = gradient.keys() - without.keys()
        assert any("patch_embed" in name for name in more)
        assert all(gradient[name].abs().max() == 0 for name in more)


def test_a_blank_image_of_an_unknown_family_is_refused_by_name():
    for family, vision in (("llava_next", "clip_vision_model"), ("llava", "pixtral")):
        config = SimpleNamespace(model_type=family, vision_config=SimpleNamespace(model_type=vision))
        with pytest.raises(ValueError, match=f"{family}: some ranks have images and others have none"):
            blank_sample(config, image=True)
        assert blank_sample(config, image=False).token_ids == [0]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_5", "glm4v_moe", "glm46v"])
def test_a_blank_image_in_patches_has_one_token(family):
    config = AutoConfig.for_model(family)
    vision, blank = config.vision_config, blank_sample(config, image=True)
    assert blank.token_ids == [config.image_token_id]
    assert blank.vision["image_grid_thw"].prod() == len(blank.vision["pixel_values"]) == vision.spatial_merge_size**2
    assert blank.vision["pixel_values"].shape[1] == 3 * vision.temporal_patch_size * vision.patch_size**2


@pytest.mark.parametrize("family", ["smolvlm", "idefics3"])
def test_samples_of_unlike_numbers_of_images_go_together(family):
    g = torch.Generator().manual_seed(0)
    samples = []
    for count in (1, 3, 0, 2):
        ids = torch.randint(3, 80, (5,), generator=g).tolist() + [IMAGE] * (4 * count) + [7]
        vision = {"pixel_values": torch.randn(1, count, 3, 16, 16, generator=g)} if count else {}
        samples.append(extend(prompt(ids, vision=vision), [11, 12, 13], [-1.0] * 3))
    batch = collate(samples)
    check(vision_model(family), batch, torch.randn(batch.tokens.shape, generator=g))


def test_masks_of_images_are_filled_up_and_what_does_not_fit_is_named():
    masks = [{"pixel_attention_mask": torch.ones(1, count, 2, 2, dtype=torch.bool)} for count in (1, 2)]
    assert join_vision(masks)["pixel_attention_mask"].sum((2, 3)).tolist() == [[4, 0], [4, 4]]
    with pytest.raises(ValueError, match=r"pixel_values: of 2 samples, .*: \(1, 3, 4, 4\), \(1, 3, 4, 6\)"):
        join_vision([{"pixel_values": torch.zeros(1, 3, 4, width)} for width in (4, 6)])


def test_frames_of_a_glm_are_images_in_the_order_of_the_row():
    """Two images around a video of two frames; its own first, behind one image, and the tower sees each frame alone."""
    spec = position_spec(vision_model("glm4v").config)
    frame = [91, IMAGE, IMAGE, 92]
    row = torch.tensor([91, IMAGE, 92, 93, *frame, 5, *frame, 94, 91, IMAGE, IMAGE, IMAGE, 92, 0, 0])
    images, video = torch.tensor([[1, 2, 2], [1, 2, 6]]), torch.tensor([[2, 2, 4]])
    patches = torch.arange(32.0)[:, None]
    one = {"pixel_values": patches[:16], "image_grid_thw": images}
    one |= {"pixel_values_videos": patches[16:], "video_grid_thw": video}
    came = frames_as_images(row, one, spec)
    assert came["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4], [1, 2, 4], [1, 2, 6]]
    assert came["pixel_values"].flatten().tolist() == [*range(4), *range(16, 32), *range(4, 16)]
    assert kinds_seen([one], spec) == kinds_seen([came], spec) == [True, False]


def test_images_and_videos_are_two_calls_of_the_tower():
    spec = position_spec(vision_model("qwen3_vl").config)
    image, video = {"pixel_values": torch.zeros(1)}, {"pixel_values_videos": torch.zeros(1)}
    seen = [kinds_seen(vision, spec) for vision in ([{}], [image, {}], [video], [image, video], [{**image, **video}])]
    assert seen == [[False, False], [True, False], [False, True], [True, True], [True, True]]
