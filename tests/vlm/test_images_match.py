"""Tokens, grids and pixels that describe different images: one error that names the row, before the forward."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
import family_processors
from family_configs import IMAGE, VISION
from test_families import layout_of_image, rows, text_model, vision_model

from rlkit.data import append_response, collate
from rlkit.data.samples import prompt_sample
from rlkit.engines import make_engine
from rlkit.engines.packing.micro_batches import micro_batches
from rlkit.vlm import encode_prompt
from rlkit.vlm.families import tokens_of_tiled_image
from rlkit.vlm.inputs import IMAGE_SIZE_KEYS, check_image_tokens, position_ids, position_spec

# grids without 3D position ids
PLAIN_GRIDS = ["exaone4_5", "glm5_next", "hyperclovax_vision_v2", "muse_glimmer", "video_llama_3"]
GRIDS = [family for family, (*_, shape) in VISION.items() if len(shape) == 2 and family not in PLAIN_GRIDS]
SIZES = ["gemma4", "kimi_k25", "lfm2_vl", "llava_next", "llava_onevision", "minicpmv4_6", "mistral3", "paddleocr_vl"]
SIZES += ["llava_next_video", *PLAIN_GRIDS]
VIDEO, AUDIO = 95, 96
RESPONSE = [7, 8]


def sample(family, images=1, cut=0, **changed):
    """A row with so many images, of whose tokens some are missing, and a response."""
    _, count, shape = VISION[family]
    tensors = {"pixel_values": torch.randn(shape), **layout_of_image(family, shape)}
    apart = int(len(shape) == 5 and "image_sizes" not in tensors)
    tensors = {name: torch.cat([x] * images, apart) for name, x in tensors.items()} if images else {}
    ids = [3, 4, *[91, *[IMAGE] * count, 92] * max(images, 1)]
    ids = ids[: len(ids) - cut] if cut else ids
    ids = ids if images or changed.pop("stray", False) else [3, 4]
    return append_response(prompt_sample(ids, vision={**tensors, **changed}, group_id=5), RESPONSE, [-1.0] * 2)


def engine(model):
    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    found = make_engine("fsdp2", model=model, device="cpu", optimizer=optimizer)
    ran = []
    found.module.register_forward_pre_hook(lambda *_: ran.append(1))
    return found, ran


def refused(trained, ran, samples, message):
    """In scoring and in training, with nothing computed."""
    batch = collate(samples)
    for run in (
        trained.infer_batch,
        lambda batch: trained.train_batch(batch, lambda out, mb: (out.logprobs.sum(), {})),
    ):
        with pytest.raises(ValueError, match=message):
            run(batch)
    assert not ran


@pytest.mark.parametrize("family", VISION)
def test_a_row_whose_images_and_tokens_differ_is_named(family):
    (trained, ran), good = engine(vision_model(family)), sample(family)
    count = VISION[family][1]
    one = f"{count} for 1 images" if family in (*GRIDS, *SIZES) else ".*1 images"
    none = "0 for 0 images" if family in (*GRIDS, *SIZES) else ".*0 images"
    for bad, tokens, why in (
        (sample(family, cut=3), count - 2, one),  # the bracket behind it too
        (sample(family, images=0, stray=True), count, none),
        (sample(family, images=2, cut=count + 2), count, ".*2 images"),
    ):
        refused(
            trained,
            ran,
            [good, sample(family, 0), bad],
            rf"^row 2 of the batch \(group 5\): image tokens: expected {why}, got {tokens}",
        )


@pytest.mark.parametrize("family", (*family_processors.SIZED, "llama4"))
def test_tokens_are_counted_as_processors_and_models_count_them(family):
    """The processor writes the tokens, and the forward of transformers refuses another number of them."""
    model, processor = family_processors.model(family).eval(), family_processors.processor(family)
    for sizes in ([(20, 20)], [(40, 18), (17, 33)], [(100, 9), (9, 100)], [(25, 41)], [(64, 64), (31, 7)]):
        images = [Image.new("RGB", size) for size in sizes]
        prompt = encode_prompt(processor, {"question": "how many?", "images": images})
        check_image_tokens(collate([append_response(prompt, [70, 71], [-1.0] * 2)]), model.config)
        with torch.no_grad():
            model(input_ids=torch.tensor([prompt.token_ids]), **prompt.vision)


def test_tiles_of_published_sizes_have_the_tokens_that_transformers_computes():
    """Images of more than nine tiles have fewer tokens in LLaVA-OneVision, whose tiny model has four."""
    sizes = [(384, 384), (100, 1000), (900, 33), (2304, 2304), (1500, 2300), (384, 2304), (771, 800), (1, 1)]
    onevision = transformers.LlavaOnevisionProcessor(
        transformers.LlavaOnevisionImageProcessor(),
        family_processors.tokenizer("<image>", "<image>", "<video>"),
        transformers.LlavaOnevisionVideoProcessor(),
        num_image_tokens=27**2,
        vision_feature_select_strategy="full",
    )
    next_one = transformers.LlavaNextProcessor(
        transformers.LlavaNextImageProcessor(size={"shortest_edge": 336}),
        family_processors.tokenizer("<image>", "<image>"),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    for processor, family in ((onevision, "llava_onevision"), (next_one, "llava_next")):
        expected = processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"]
        config = transformers.AutoConfig.for_model(family)
        assert [tokens_of_tiled_image(size, config) for size in sizes] == expected


@pytest.mark.parametrize("family", family_processors.SIZED)
def test_pixels_without_their_sizes_name_the_row(family):
    lacking = sample(family)
    del lacking.vision[IMAGE_SIZE_KEYS[family]]
    with pytest.raises(ValueError, match=rf"row 1 .*: {IMAGE_SIZE_KEYS[family]}: expected the sizes"):
        check_image_tokens(collate([sample(family), lacking]), vision_model(family).config)


def test_part_of_a_patch_at_the_edge_of_an_image_has_no_token():
    """Mistral 3's convolution drops it."""
    found = sample("mistral3", pixel_values=torch.randn(1, 3, 18, 17), image_sizes=torch.tensor([[18, 17]]))
    model = vision_model("mistral3")
    check_image_tokens(collate([found]), model.config)
    model(input_ids=torch.tensor([found.token_ids]), **found.vision)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_another_rows_images_are_not_taken(family):
    """As many tokens as features over all rows, and wrong in two: a model would not notice."""
    few, many = sample(family, images=2, cut=VISION[family][1] + 2), sample(family)
    many = append_response(
        prompt_sample([*many.token_ids[:-2], *many.token_ids[2:-2]], vision=many.vision), RESPONSE, [-1.0] * 2
    )
    batch = collate([few, many])
    assert (batch.tokens == IMAGE).sum() == 3 * VISION[family][1]
    with pytest.raises(ValueError, match=r"^row 0 of the batch \(group 5\): .* 2 images"):
        check_image_tokens(batch, vision_model(family).config)


@pytest.mark.parametrize("family", GRIDS)
def test_a_grid_that_does_not_divide_and_pixels_that_are_missing(family):
    (trained, ran), good = engine(vision_model(family)), sample(family)
    odd = sample(family, image_grid_thw=torch.tensor([[1, 3, 4]]))
    refused(
        trained,
        ran,
        [good, odd],
        r"^row 1 .*: image_grid_thw: expected \(t, h, w\) that \(1, 2, 2\) divide, got \[\[1, 3, 4\]\]",
    )
    short = sample(family, pixel_values=torch.randn(12, VISION[family][2][1]))
    refused(
        trained,
        ran,
        [good, short],
        r"^row 1 .*: pixel_values: expected 16 patches for image_grid_thw \[\[1, 4, 4\]\], got 12",
    )


def video(family, **times):
    """Two frames of one token each."""
    frames = torch.randn(8, VISION[family][2][1])
    vision = {"pixel_values_videos": frames, "video_grid_thw": torch.tensor([[2, 2, 2]]), **times}
    return append_response(prompt_sample([3, 91, VIDEO, VIDEO, 92], vision=vision, group_id=5), RESPONSE, [-1.0] * 2)


@pytest.mark.parametrize(
    ("family", "name"), [("qwen2_5_vl", "second_per_grid_ts"), ("qwen2_5_omni_thinker", "video_second_per_grid")]
)
def test_a_video_without_timing_is_refused_and_one_with_it_is_placed_by_it(family, name):
    model, good = vision_model(family), sample(family)
    refused(
        *engine(model),
        [good, video(family)],
        r"^row 1 .*: second_per_grid_ts: expected 1, one per video, got 0",
    )
    timed = collate([good, video(family, **{name: torch.tensor([1.5])})])
    check_image_tokens(timed, model.config)
    ids = position_ids(timed.tokens, timed.attention_mask, timed.vision, position_spec(model.config))
    rate = {"qwen2_5_vl": 4, "qwen2_5_omni_thinker": 25}[family]
    assert model.config.vision_config.to_dict().get("tokens_per_second", 25) == rate
    assert ids[0, 1, 2:4].tolist() == [2, 2 + int(1.5 * rate)]


FRAMES = {  # family -> features of an audio, their mask, the tokens of eight frames
    "qwen2_5_omni_thinker": ((1, 128, 8), "feature_attention_mask", 2),
    "qwen3_omni_moe_thinker": ((1, 128, 8), "feature_attention_mask", 1),
    "gemma4": ((1, 8, 8), "input_features_mask", 2),
    "gemma4_unified": ((1, 8, 640), "input_features_mask", 8),
}


@pytest.mark.parametrize("family", FRAMES)
def test_an_audio_of_another_length_than_its_tokens_is_named(family):
    (trained, ran), good, (shape, name, count) = engine(vision_model(family)), sample(family), FRAMES[family]
    features, mask = torch.randn(shape), torch.ones(1, 8, dtype=torch.bool)

    def hearing(tokens, **vision):
        start = prompt_sample([3, 93, *[AUDIO] * tokens, 94], vision=vision, group_id=5)
        return append_response(start, RESPONSE, [-1.0] * 2)

    fits = hearing(count, input_features=features, **{name: mask})
    check_image_tokens(collate([good, fits]), vision_model(family).config)
    for bad, error in (
        (hearing(3, input_features=features, **{name: mask}), f"expected {count} for 1 audios, got 3"),
        (hearing(1), "audio tokens: expected 0 for 0 audios, got 1"),
        (hearing(count, input_features=features), rf"{name}: expected \[1, 8\] as .*, got None"),
    ):
        refused(trained, ran, [good, bad], rf"^row 1 .*{error}")


def test_an_audio_for_a_model_without_an_audio_tower_is_named():
    """The larger models of Gemma 4 have none."""
    config = vision_model("gemma4").config
    config.audio_config = None
    vision = {"input_features": torch.randn(1, 8, 8), "input_features_mask": torch.ones(1, 8, dtype=torch.bool)}
    row = append_response(prompt_sample([3, AUDIO, AUDIO, 4], vision=vision), RESPONSE, [-1.0] * 2)
    error = "^row 0 .*: audios: expected none, as the config of this gemma4 has no audio_config, got 1"
    with pytest.raises(ValueError, match=error):
        check_image_tokens(collate([row]), config)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "glm4v", "glm5_next"])
def test_a_family_without_absolute_time_wants_none(family):
    ids = [3, 91, VIDEO, VIDEO, 92] if family == "qwen2_vl" else [3, 91, VIDEO, 92, 91, VIDEO, 92]
    ids = [3, 93, 91, IMAGE, 92, 91, IMAGE, 92, 94] if family.startswith("glm") else ids
    config, vision = vision_model(family).config, video(family).vision
    check_image_tokens(collate([append_response(prompt_sample(ids, vision=vision), RESPONSE, [-1.0] * 2)]), config)
    del ids[ids.index(IMAGE if family.startswith("glm") else VIDEO)]
    short = collate([append_response(prompt_sample(ids, vision=vision), RESPONSE, [-1.0] * 2)])
    kind = "image" if family.startswith("glm") else "video"
    with pytest.raises(ValueError, match=rf"row 0 .*: {kind} tokens: expected 2 for 1 {kind}s, got 1"):
        check_image_tokens(short, config)


def test_a_missing_token_of_gemma4s_video_is_named():
    config = vision_model("gemma4").config
    where = torch.zeros(2, 4, 2, dtype=torch.long)  # two frames of one token
    vision = {"pixel_values_videos": torch.zeros(2, 4, 48), "video_position_ids": where}
    vision["num_frames_per_video"] = torch.tensor([2])
    for count in (2, 1):
        ids = [3, *[config.video_token_id] * count, 4]
        rows = collate([append_response(prompt_sample(ids, vision=vision), RESPONSE, [-1.0] * 2)])
        if count == 2:
            check_image_tokens(rows, config)
        else:
            with pytest.raises(ValueError, match=r"row 0 .*: video frame tokens: expected 2 for 2 video frames, got 1"):
                check_image_tokens(rows, config)


def test_a_text_model_sees_no_images():
    refused(
        *engine(text_model("llama", {})),
        [sample("llava", 0), sample("llava")],
        "row 1 .*: vision: expected none for llama, a text model, got pixel_values",
    )


def test_several_axes_without_a_rule_are_refused_by_name():
    """Plain positions would train, and be wrong."""
    text = SimpleNamespace(rope_parameters={"mrope_section": [2, 1, 1]})
    config = SimpleNamespace(model_type="other_vl", vision_config=object(), get_text_config=lambda: text)
    with pytest.raises(ValueError, match="hf_config: expected a model_type of qwen2_vl.*, got 'other_vl'"):
        position_spec(config)
    config.vision_config = None
    assert position_spec(config) is None


def test_the_batches_of_other_tests_are_right():
    for family in VISION:
        assert [*micro_batches(rows(family)[0], 1000, vision_model(family).config)]
