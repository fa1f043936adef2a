"""Which dimension vision tensors are concatenated along, and what is padded before."""

import pytest
import torch

from rlkit.data.vision_tensors import concatenate_vision


def ones(*shape):
    return torch.ones(shape)


def test_most_tensors_are_concatenated_along_the_first_dimension():
    parts = [
        {"pixel_values": ones(4, 6), "image_grid_thw": torch.tensor([[1, 2, 2]])},
        {},
        {"pixel_values": ones(8, 6), "image_grid_thw": torch.tensor([[1, 2, 4]])},
    ]
    found = concatenate_vision(parts)
    assert found["pixel_values"].shape == (12, 6) and found["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4]]
    assert concatenate_vision(parts, ["image_grid_thw"]).keys() == {"image_grid_thw"}
    assert concatenate_vision([{}, {}]) == {}


@pytest.mark.parametrize("within_sample", [False, True])
def test_images_of_one_sample_of_smolvlm_are_beside_each_other_and_samples_below(within_sample):
    """Samples with fewer images are padded with images of zeros."""
    parts = [
        {"pixel_values": ones(1, count, 3, 4, 4), "pixel_attention_mask": ones(1, count, 4, 4)} for count in (2, 1)
    ]
    found = concatenate_vision(parts, within_sample=within_sample)
    if within_sample:
        assert found["pixel_values"].shape == (1, 3, 3, 4, 4) and found["pixel_attention_mask"].shape == (1, 3, 4, 4)
    else:
        assert found["pixel_values"].shape == (2, 2, 3, 4, 4) and found["pixel_attention_mask"].shape == (2, 2, 4, 4)
        assert found["pixel_values"].mean((2, 3, 4)).tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize("within_sample", [False, True])
def test_tiles_of_llava_are_padded_and_images_stay_in_the_first_dimension(within_sample):
    parts = [{"pixel_values": ones(1, tiles, 3, 4, 4), "image_sizes": torch.tensor([[tiles, 4]])} for tiles in (3, 5)]
    found = concatenate_vision(parts, within_sample=within_sample)
    assert found["pixel_values"].mean((2, 3, 4)).tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert found["image_sizes"].tolist() == [[3, 4], [5, 4]]


def test_images_of_mistral_are_padded_in_height_and_width():
    parts = [
        {"pixel_values": ones(1, 1, height, width), "image_sizes": torch.tensor([[height, width]])}
        for height, width in ((2, 3), (4, 1))
    ]
    found = concatenate_vision(parts)["pixel_values"]
    assert found.shape == (2, 1, 4, 3)
    assert found[0, 0, :2, :3].all() and found[1, 0, :4, :1].all() and found.sum() == 2 * 3 + 4 * 1


def test_videos_of_llava_onevision_are_padded_in_the_number_of_frames():
    parts = [
        {"pixel_values_videos": ones(1, frames, 3, 2, 2), "num_frames_per_video": torch.tensor([frames])}
        for frames in (1, 3)
    ]
    found = concatenate_vision(parts)
    assert found["pixel_values_videos"].mean((2, 3, 4)).tolist() == [[1, 0, 0], [1, 1, 1]]
    assert found["num_frames_per_video"].tolist() == [1, 3]


@pytest.mark.parametrize(("mask", "shape"), [("feature_attention_mask", (4, None)), ("input_features_mask", (None, 4))])
def test_audios_are_padded_to_the_frames_of_the_longest(mask, shape):
    """Features are [audios, mels, frames] or [audios, frames, mels]."""
    parts = [
        {"input_features": ones(1, *(size or frames for size in shape)), mask: ones(1, frames)} for frames in (2, 5)
    ]
    found = concatenate_vision(parts, within_sample=True)
    assert found[mask].tolist() == [[1, 1, 0, 0, 0], [1] * 5]
    assert found["input_features"].shape == (2, *(size or 5 for size in shape))
    assert found["input_features"].sum((1, 2)).tolist() == [8, 20]
