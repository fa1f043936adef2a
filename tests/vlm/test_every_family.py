"""Every family through its own processor, the engine, the sampler, freezing and LoRA; all in this process, tiny."""

import sys
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from einops import rearrange
from PIL import Image
from torch.nn.functional import interpolate
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig
from transformers.video_utils import VideoMetadata

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
import family_processors  # noqa: E402
from test_families import TEXT, WAYS, all_at_once, gradients, one_at_a_time, text_model  # noqa: E402

from rlkit.data import append_observation, append_response, collate  # noqa: E402
from rlkit.data.formats import chat_row  # noqa: E402
from rlkit.data.media import Audio, Video  # noqa: E402
from rlkit.data.messages import prompt_of  # noqa: E402
from rlkit.data.samples import check_sample, prompt_sample  # noqa: E402
from rlkit.data.vision_tensors import AUDIO_MASKS, FRAME_COUNTS  # noqa: E402
from rlkit.engines import make_engine  # noqa: E402
from rlkit.engines.packing.attention import use_packed_attention  # noqa: E402
from rlkit.engines.packing.dummy_media import dummy_sample  # noqa: E402
from rlkit.engines.packing.inputs import prepare_model_inputs  # noqa: E402
from rlkit.losses import token_mean  # noqa: E402
from rlkit.rollout import Sampling, make_rollout  # noqa: E402
from rlkit.rollout.vllm_requests import (  # noqa: E402
    as_trainer_tokens,
    check_images,
    check_kimi_videos,
    check_videos,
    check_vision_chunks,
    vision_chunk_prompt,
)
from rlkit.vlm import (  # noqa: E402
    encode_chat,
    encode_prompt,
    encode_responses,
    encoder_modules,
    freeze,
    load_processor,
    lora,
    merged_parameters,
    rope3d_spec,
    suppressed_token_ids,
    tiny_text_tokenizer,
    vision_tower_pattern,
)
from rlkit.vlm.encoding import encode_text  # noqa: E402
from rlkit.vlm.families import REFUSED_VISION_FAMILIES, audio_mask_name, audio_tokens  # noqa: E402
from rlkit.vlm.inputs import GEMMA_VIDEO_KEYS, position_ids, position_spec  # noqa: E402
from rlkit.vlm.processors import placeholder_id  # noqa: E402

SEES = family_processors.FAMILIES
SIZES = ([], [(20, 20)], [(40, 18), (17, 33)])
NEW = 5


def image(width, height):
    rng = np.random.default_rng(width)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype="uint8"))


@cache
def reader(family):
    return family_processors.processor(family) if family in SEES else tiny_text_tokenizer(family_processors.CORPUS)


def model(family):
    if family in SEES:
        return family_processors.model(family)
    dropout = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0} if family == "gpt2" else {}
    options = TEXT[family]
    sizes = dict.fromkeys([name for name in ("vocab_size", *options) if "vocab_size" in name], len(reader(family)))
    return text_model(family, {**options, **dropout, **sizes}, "sdpa" if family == "qwen4_exp_text" else "eager")


@cache
def prompts(family):
    """Without an image, with one and with two; a model that sees none has the questions alone."""
    rows = [{"question": f"how many {i}?", "images": [image(*size) for size in sizes]} for i, sizes in enumerate(SIZES)]
    return [
        encode_prompt(reader(family), row if family in SEES else {**row, "images": []}, group_id=i)
        for i, row in enumerate(rows)
    ]


def clip(frames, width, height, fps=2.5):
    rng = np.random.default_rng(frames)
    return {"frames": rng.integers(0, 256, (frames, height, width, 3), dtype="uint8"), "fps": fps}


WATCHES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp"]
WATCHES += ["glm4v", "glm4v_moe", "glm46v", "glm_ocr", "internvl", "gemma4", "gemma4_unified", "minicpmv4_6"]
WATCHES += ["ernie4_5_vl_moe", "cohere_compass", "cosmos3_edge", "cosmos3_omni", "glm5_next", "kimi_k25", "smolvlm"]
WATCHES += ["llava_next_video", "llava_onevision", "video_llama_3", "exaone4_5", "muse_glimmer"]
CLIPS = [  # (videos, images, question)
    ([clip(4, 17, 33)], [], "how many?"),
    ([clip(3, 20, 20), clip(2, 24, 12)], [image(20, 20)], "how <video> is <image> <video> many?"),
]


OMNI_CLIPS = [  # Qwen3-Omni's rates are 2 frames per second or 1
    ([clip(4, 17, 33, 2.0)], [], "how many?"),
    ([clip(3, 20, 20, 1.0), clip(4, 24, 12, 1.0)], [image(20, 20)], "how <video> is <image> <video> many?"),
    ([clip(2, 20, 20, 2.0), clip(6, 12, 24, 1.0)], [], "<video> <video> many?"),
]


def clips(family):
    """With videos that fit the family.

    The processors of InternVL, MiniCPM-V, SmolVLM, LLaVA-NeXT-Video and LLaVA-OneVision stack the videos of a row.
    That of Gemma 4 makes at least 35 tokens of a frame, fewest of narrow ones, and writes its time in whole seconds.
    Kimi K2.5 merges up to four frames. That of VideoLLaMA 3 leaves out the patches that are those of the frame before.
    """
    if family == "kimi_k25":
        return [([clip(5, 17, 33)], *CLIPS[0][1:]), CLIPS[1]]
    if family == "video_llama_3":
        still = clip(2, 17, 33)
        return [([{**still, "frames": still["frames"].repeat(2, 0)}], *CLIPS[0][1:]), CLIPS[1]]
    if family in ("internvl", "minicpmv4_6", "smolvlm", "llava_next_video", "llava_onevision"):
        return [CLIPS[0], ([clip(3, 20, 20), clip(3, 24, 12)], *CLIPS[1][1:])]
    if family.startswith("gemma4"):
        narrow = [clip(frames, 176, 10, 0.8) for frames in (2, 1)]
        return [(narrow[:1], *CLIPS[0][1:]), (narrow, *CLIPS[1][1:])]
    return OMNI_CLIPS if family in OMNI else CLIPS


@cache
def watching_prompts(family):
    """With a video; with an image between two videos, of three frames and less or more; Omni's also of two rates."""
    rows = [{"question": text, "images": images, "videos": videos} for videos, images, text in clips(family)]
    return [encode_prompt(reader(family), row, group_id=i) for i, row in enumerate(rows)]


def sound(seconds, rate=16000):
    rng = np.random.default_rng(int(1000 * seconds))
    return {"array": rng.uniform(-0.5, 0.5, int(seconds * rate)), "sampling_rate": rate}


OMNI = ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"]  # which hear the sound of videos, too
HEARS = {  # family -> the first module that an audio goes through
    **dict.fromkeys(OMNI, "audio_tower.conv"),
    "gemma3n": "audio_tower.subsample_conv_projection.conv_0",
    "gemma4": "audio_tower.subsample_conv_projection.layer0",
    "gemma4_unified": "embed_audio",
}
SOUNDS = [  # (audios, images, question)
    ([sound(1.2)], [], "how many?"),
    ([sound(0.3), sound(1.503)], [image(20, 20)], "how <audio> is <image> <audio> many?"),
]


@cache
def hearing_prompts(family):
    """With an audio; and with an image between two audios, of which Qwen3-Omni pads the first to a second."""
    rows = [{"question": text, "images": images, "audios": audios} for audios, images, text in SOUNDS]
    return [encode_prompt(reader(family), row, group_id=i) for i, row in enumerate(rows)]


def film(frames, seconds, fps=2.0):
    """A video with its sound."""
    return Video(clip(frames, 20, 20)["frames"], fps, Audio(sound(seconds)["array"].astype("float32"), 16000))


# rows with videos that are longer or shorter than their sound; some have the same frames, or the same sound
FILMS = [
    {"question": "how many?", "videos": [film(4, 1.5)]},
    {"question": "<video> how <video> many", "videos": [film(4, 3.1), film(6, 1.5)]},
    {
        "question": "<audio> is <video> how <image> <video> many",
        "videos": [clip(4, 20, 20, 1.0), film(4, 4.0, 1.0)],
        "images": [image(20, 20)],
        "audios": [sound(0.5)],
    },
]


@cache
def listening_prompts(family):
    return [encode_prompt(reader(family), row, group_id=i) for i, row in enumerate(FILMS)]


def positions(sample, spec):
    tokens = torch.tensor([sample.token_ids])
    return position_ids(tokens, torch.ones_like(tokens).bool(), [sample.vision], spec)


@cache
def batch(family):
    """Two responses to each."""
    g = torch.Generator().manual_seed(0)
    responses = [torch.randint(60, 90, (1 + i % 4,), generator=g).tolist() for i in range(6)]
    samples = [append_response(prompts(family)[i // 2], ids, [-1.0] * len(ids)) for i, ids in enumerate(responses)]
    return collate(samples, advantages=torch.randn(6, generator=g))


def loss_fn(out, mb):
    return token_mean(-mb.advantages[:, None] * out.logprobs, mb.mask, mb.total_tokens), {}


def engine(base, **options):
    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    return make_engine("fsdp2", model=base, device="cpu", optimizer=optimizer, max_grad_norm=1e9, **options)


def parameters(engine):
    return {name: full_tensor(p).clone() for name, p in engine.module.named_parameters()}


def full_tensor(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def image_features(base, sample):
    """Those of one image after another; Llama 4's, of its tiles, are those before its projector."""
    found = base.get_image_features(**sample.vision)
    return found.last_hidden_state if base.config.model_type == "llama4" else found.pooler_output


@pytest.mark.parametrize("family", SEES)
def test_tokens_are_the_processors_own(family):
    """What it gives by itself; and as many image tokens as the model's vision tower has features for them."""
    processor, base = reader(family), model(family)
    for sample, sizes in zip(prompts(family), SIZES, strict=True):
        check_sample(sample)
        assert sample.compact_ids.count(placeholder_id(processor, "image")) == len(sizes)
        text = processor.tokenizer.decode(sample.compact_ids)
        assert "how many" in text and "assistant" in text
        images = [image(*size) for size in sizes]
        more = {"images": images, "return_tensors": "pt"} if images else {}
        own = processor(text=[text], add_special_tokens=False, **more)
        assert sample.token_ids == list(own["input_ids"][0])
        if images:
            assert all(torch.equal(tensor, own[name].to(tensor)) for name, tensor in sample.vision.items())
            count = sum(one.numel() // one.shape[-1] for one in image_features(base, sample))
            assert sample.token_ids.count(base.config.image_token_id) == count > 0


@pytest.mark.parametrize("family", REFUSED_VISION_FAMILIES)
def test_families_whose_images_are_not_supported_are_refused_by_name(family, tmp_path):
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"^model .*: expected a family with supported images, got {family}: its "):
        load_processor(str(tmp_path))


def test_paddleocr_resizes_position_embeddings_as_published():
    """Without aligned corners, for an image of 2 x 6 patches where the embeddings are those of 4 x 4."""
    tower = engine(model("paddleocr_vl")).module.get_submodule("model.visual.vision_model.embeddings")
    with torch.no_grad():
        found = tower(torch.zeros(1, 12, 3, 4, 4), torch.tensor([[1, 2, 6]])) - tower.patch_embedding.bias
        grid = tower.position_embedding.weight.T.unflatten(1, (4, 4))[None]
        expected = interpolate(grid, size=(2, 6), mode="bilinear", align_corners=False)[0].flatten(1).T
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", [family for family in WATCHES if family != "smolvlm"])
def test_tokens_of_videos_are_the_processors_own(family):
    """And the position ids are those of the model's own `get_rope_index`."""
    processor, base = reader(family), model(family)
    for sample, (videos, images, _) in zip(watching_prompts(family), clips(family), strict=True):
        check_sample(sample)
        tokens = [placeholder_id(processor, kind) for kind in ("video", "image")]
        assert [sample.compact_ids.count(token) for token in tokens] == [len(videos), len(images)]
        own = processor(
            text=[processor.tokenizer.decode(sample.compact_ids)],
            videos=[one["frames"] for one in videos],
            video_metadata=[
                {
                    "fps": one["fps"],
                    "total_num_frames": len(one["frames"]),
                    "frames_indices": [*range(len(one["frames"]))],
                }
                for one in videos
            ],
            images=images or None,
            do_sample_frames=False,
            return_metadata=True,
            return_mm_token_type_ids=True,
            add_special_tokens=False,
            return_tensors="pt",
        )
        assert sample.token_ids == own["input_ids"][0].tolist()
        if family in ("llava_next_video", "llava_onevision"):  # whose processors do not count them
            own[FRAME_COUNTS] = torch.tensor([len(one["frames"]) for one in videos])
        assert all(torch.equal(tensor, own[name]) for name, tensor in sample.vision.items())
        if (spec := position_spec(base.config)) is None:
            continue
        grids = {name: x for name, x in own.items() if "_grid_" in name}
        expected, _ = base.model.get_rope_index(own["input_ids"], own["mm_token_type_ids"], **grids)
        found = positions(sample, replace(spec, advance_over_time=False))
        assert torch.equal(found, expected) and {"pixel_values_videos", "video_grid_thw"} <= {*sample.vision}


def own_smolvlm(messages, videos, images):
    """What transformers' processor makes of the messages of a chat."""
    filled, given = deepcopy(messages), {"video": iter(videos), "image": iter(images)}
    for part in (part for one in filled for part in one["content"] if part["type"] in given):
        part[part["type"]] = next(given[part["type"]])
    metadata = [
        VideoMetadata(total_num_frames=len(x), fps=2.5, duration=len(x) / 2.5, frames_indices=[*range(len(x))])
        for x in videos
    ]
    options = {"video_metadata": metadata, "do_sample_frames": False, "return_tensors": "pt"}
    return reader("smolvlm").apply_chat_template(
        filled, tokenize=True, return_dict=True, add_generation_prompt=True, processor_kwargs=options
    )


def test_tokens_of_smolvlms_videos_are_the_processors_own():
    """Given a chat; it loses the pixels of images beside videos, which are those of images alone, in their places."""
    processor, size = reader("smolvlm"), 4
    alone, mixed = watching_prompts("smolvlm")
    for sample, (videos, images, _) in zip((alone, mixed), clips("smolvlm"), strict=True):
        check_sample(sample)
        frames = [one["frames"] for one in videos]
        own = own_smolvlm(prompt_of(sample.row).messages, frames, images)
        assert sample.token_ids == own["input_ids"][0].tolist()
        pixels, mask = own["pixel_values"].flatten(0, 1), own["pixel_attention_mask"].flatten(0, 1)
        assert len(pixels) == sum(map(len, frames)) == sample.compact_ids.count(processor.image_token_id) - len(images)
        if images:  # an image of 5 tiles between two videos of 3 frames
            seen = processor(text=["<image>"], images=images, return_tensors="pt")
            pixels, mask = (
                torch.cat([x[:3], seen[name][0], x[3:]])
                for name, x in (("pixel_values", pixels), ("pixel_attention_mask", mask))
            )
        assert torch.equal(sample.vision["pixel_values"][0], pixels) and sample.vision["pixel_values"].ndim == 5
        assert torch.equal(sample.vision["pixel_attention_mask"][0], mask)
        assert sample.token_ids.count(processor.image_token_id) == size * len(pixels)
    text = processor.tokenizer.decode(mixed.compact_ids)
    assert text.count("series of three frames from a 0:00:01 [H:MM:SS] video.\n\nFrame from 00:00:<image>") == 2
    assert "how You are" in text and "is <image> You are" in text and "<video>" not in text


def test_a_chat_with_videos_of_smolvlm_is_trained_on_its_responses():
    """The template of such a chat is not that of the model, but one in transformers."""
    processor, end = reader("smolvlm"), reader("smolvlm").tokenizer.convert_tokens_to_ids("<end_of_utterance>")
    video, text = {"type": "video"}, {"type": "text", "text": "how many"}
    messages = [
        {"role": "user", "content": [video, text]},
        {"role": "assistant", "content": "digit"},
        {"role": "user", "content": [text, video, {"type": "image"}]},
        {"role": "assistant", "content": "user"},
    ]
    media = {"videos": [clip(2, 20, 20), clip(2, 24, 12)], "images": [image(40, 18)]}
    prompt = encode_prompt(processor, chat_row({"messages": messages, **media, "where": "row"}))
    sample = encode_chat(prompt, processor, [end], 500)
    check_sample(sample)
    assert sample.token_ids[: len(prompt.token_ids)] == prompt.token_ids
    assert processor.tokenizer.decode(sample.response_ids) == " digit<end_of_utterance> user<end_of_utterance>"
    (short,) = encode_responses(prompt, processor, ["user"], [end], 500)
    assert short.token_ids == sample.token_ids


def test_videos_of_smolvlm_that_cannot_be_used_are_named(tmp_path):
    processor, row = reader("smolvlm"), {"question": "how many?", "where": "row 3"}
    with pytest.raises(ValueError, match=r"^row 3: video .*none\.mp4.*: cannot be read: "):
        encode_prompt(processor, {**row, "video": str(tmp_path / "none.mp4")})
    with pytest.raises(ValueError, match=r"^row 3: expected a prompt of at most 400 tokens, got \d+$"):
        encode_prompt(processor, {**row, "video": clip(40, 20, 20)}, max_tokens=400)
    with pytest.raises(ValueError, match=r"^videos: expected 2, one per placeholder in the prompt, got 1$"):
        encode_text(processor, "<video> or <video>?", videos=[Video(clip(2, 20, 20)["frames"], 2.0)])
    larger = deepcopy(processor)
    larger.video_processor.max_image_size = {"longest_edge": 32}
    with pytest.raises(ValueError, match=r"^row: videos: expected frames of the size of images' tiles, got \[\(16, 16"):
        encode_prompt(larger, {"question": "?", "videos": [clip(2, 20, 20)], "images": [image(20, 20)]})
    assert encode_prompt(processor, {"question": "a <video>?"}).vision == {}  # without videos it is text


def test_videos_of_smolvlm_go_to_vllm_as_prepared_only():
    """It has no videos of the family, and would split frames into tiles."""
    requests, processor = watching_prompts("smolvlm"), reader("smolvlm")
    check_videos(prompts("smolvlm"), processor)
    check_videos(requests, processor, prepared=True)
    with pytest.raises(ValueError, match="^videos: expected none of a SmolVLMProcessor for servers .* got 3; use"):
        check_videos(requests, processor)


@pytest.mark.parametrize("family", OMNI)
def test_tokens_of_omni_videos_are_the_processors_own(family):
    """The processor has one rate for the videos of a call, on which only the times depend."""
    processor, base = reader(family), model(family)
    for sample, (videos, images, _) in zip(watching_prompts(family), OMNI_CLIPS, strict=True):
        check_sample(sample)
        ids = {kind: getattr(base.config, f"{kind}_token_id") for kind in ("video", "image")}
        assert [sample.compact_ids.count(token) for token in ids.values()] == [len(videos), len(images)]
        own = processor(
            text=[processor.tokenizer.decode(sample.compact_ids)],
            videos=[torch.from_numpy(one["frames"]).permute(0, 3, 1, 2) for one in videos],
            images=images or None,
            fps=videos[0]["fps"],
            add_special_tokens=False,
            return_tensors="pt",
        )
        assert sample.token_ids == own["input_ids"][0].tolist() and sample.token_ids.count(ids["video"]) > 10
        assert own["video_second_per_grid"][0] == sample.vision["video_second_per_grid"][0] == 2 / videos[0]["fps"]
        own["video_second_per_grid"] = torch.tensor([2 / one["fps"] for one in videos])
        assert {*sample.vision} == own.keys() - {"input_ids", "attention_mask"}
        assert all(torch.equal(tensor, own[name]) for name, tensor in sample.vision.items())
        expected, _ = base.get_rope_index(
            own["input_ids"],
            own.get("image_grid_thw"),
            own["video_grid_thw"],
            attention_mask=torch.ones_like(own["input_ids"]),
            second_per_grids=own["video_second_per_grid"],
        )
        assert torch.equal(positions(sample, rope3d_spec(base.config)), expected)


@pytest.mark.parametrize("family", OMNI)
def test_tokens_of_videos_with_sound_are_the_processors_own(family):
    """In a call for each, as the processor has one rate, and all or none of the videos of a call have sound."""
    processor, base = reader(family), model(family)
    for sample in listening_prompts(family)[:2]:
        check_sample(sample)
        sounds = [one.sound.samples for one in sample.videos]
        own = processor(
            text=[processor.tokenizer.decode(sample.compact_ids)],
            videos=[torch.from_numpy(one.frames).permute(0, 3, 1, 2) for one in sample.videos],
            audio=sounds,
            fps=2.0,
            use_audio_in_video=True,
            add_special_tokens=False,
            return_tensors="pt",
        )
        assert sample.token_ids == own["input_ids"][0].tolist() and not sample.audios
        frames = sample.vision["feature_attention_mask"].sum(1)
        assert torch.equal(frames, own["feature_attention_mask"].sum(1))
        for found, expected, count in zip(sample.vision["input_features"], own["input_features"], frames, strict=True):
            assert torch.equal(found[:, :count], expected[:, :count])
        assert {*sample.vision} == own.keys() - {"input_ids", "attention_mask"}
        names = ("pixel_values_videos", "video_grid_thw", "video_second_per_grid")
        assert all(torch.equal(sample.vision[name], own[name]) for name in names)
        expected, _ = base.get_rope_index(
            own["input_ids"],
            None,
            own["video_grid_thw"],
            attention_mask=torch.ones_like(own["input_ids"]),
            use_audio_in_video=True,
            audio_seqlens=frames,
            second_per_grids=own["video_second_per_grid"],
        )
        assert torch.equal(positions(sample, rope3d_spec(base.config)), expected)
    mixed, ids = listening_prompts(family)[2], base.config
    check_sample(mixed)
    lengths = audio_tokens(mixed.vision["feature_attention_mask"].sum(1), base.config).tolist()
    order = [token for token, _ in groupby(mixed.token_ids) if token in (ids.audio_token_id, ids.video_token_id)]
    assert order[:2] == [ids.audio_token_id, ids.video_token_id] and order.count(ids.audio_token_id) == 3
    assert [len(mixed.videos), len(mixed.audios), len(lengths)] == [2, 1, 2]
    assert mixed.token_ids.count(ids.audio_token_id) == sum(lengths)


def _each_alone(extractor, audios):
    alone = [extractor([one.samples], return_tensors="pt") for one in audios]
    return {name: pad_sequence([one[name][0] for one in alone], batch_first=True) for name in alone[0]}


@pytest.mark.parametrize("family", HEARS)
def test_tokens_of_audios_are_the_processors_own(family):
    """And Qwen's position ids are those of its own `get_rope_index`; features have no padding to the limit."""
    processor, base = reader(family), model(family)
    for sample, (_, images, _) in zip(hearing_prompts(family), SOUNDS, strict=True):
        check_sample(sample)
        ids = {kind: getattr(base.config, f"{kind}_token_id") for kind in ("audio", "image")}
        assert [sample.compact_ids.count(token) for token in ids.values()] == [len(sample.audios), len(images)]
        own = processor(
            text=[processor.tokenizer.decode(sample.compact_ids)],
            audio=[one.samples for one in sample.audios],
            images=images or None,
            add_special_tokens=False,
            return_tensors="pt",
        )
        assert sample.token_ids == own["input_ids"][0].tolist()
        name = audio_mask_name(base.config)
        frames, dimensions = sample.vision[name].sum(1), {name: 1, "input_features": AUDIO_MASKS[name]}
        if family == "gemma3n":  # beside a longer audio, its extractor appends frames that are partly silence
            own |= _each_alone(processor.feature_extractor, sample.audios)
        assert torch.equal(frames, own[name].sum(1))
        for name, dim in dimensions.items():
            assert sample.vision[name].shape[dim] == frames.max() <= own[name].shape[dim]
            assert torch.equal(sample.vision[name], own[name].narrow(dim, 0, frames.max()))
        assert sample.token_ids.count(ids["audio"]) == audio_tokens(frames, base.config).sum() > 10
        if position_spec(base.config) is None:
            continue
        expected, _ = base.get_rope_index(
            own["input_ids"],
            sample.vision.get("image_grid_thw"),
            attention_mask=torch.ones_like(own["input_ids"]),
            audio_seqlens=frames,
        )
        assert torch.equal(positions(sample, rope3d_spec(base.config)), expected)


@pytest.mark.parametrize("family", HEARS)
def test_gradients_of_packed_audios_are_those_of_transformers(family):
    assert any(HEARS[family] in name for name in moved_by_packed_rows(family, hearing_prompts(family)))


@pytest.mark.parametrize("family", OMNI)
def test_gradients_of_packed_videos_with_sound_are_those_of_transformers(family):
    moved = moved_by_packed_rows(family, listening_prompts(family))
    assert all(any(part in name for name in moved) for part in ("audio_tower.conv", "patch_embed"))


@pytest.mark.parametrize("family", [*WATCHES, *OMNI])
def test_gradients_of_packed_videos_are_those_of_transformers(family):
    """It gets position ids: after a video, `position_spec` counts on as Qwen's own code does, not as transformers."""
    assert any("patch_" in name for name in moved_by_packed_rows(family, watching_prompts(family)))


def test_videos_that_vllm_would_change_are_refused():
    """It takes one video of GLM in a prompt, and rounds the times that the processor of GLM-OCR writes."""
    for family in ("glm4v", "glm_ocr"):
        check_videos(watching_prompts(family)[:1] * (family == "glm4v"), reader(family))
        with pytest.raises(
            ValueError, match="^group 1: videos: expected at most 1 in a prompt, .* got 2; use rollout 'hf'$"
        ):
            check_videos(watching_prompts(family)[1:], reader(family))
    with pytest.raises(
        ValueError, match=r"^group 0: videos: expected every second frame at a whole second, .* 2 at 0\.8 s"
    ):
        check_videos(watching_prompts("glm_ocr")[:1], reader("glm_ocr"))
    whole = encode_prompt(reader("glm_ocr"), {"question": "how many?", "video": {**clip(5, 17, 33), "fps": 2}})
    check_videos([whole], reader("glm_ocr"))
    text = reader("glm_ocr").tokenizer.decode(whole.token_ids)
    assert [time in text for time in ("0.0 seconds", "1.0 seconds", "2.0 seconds")] == [True] * 3


def test_videos_of_video_llama_3_are_refused_for_vllm():
    check_videos(prompts("video_llama_3"), reader("video_llama_3"))
    with pytest.raises(ValueError, match="^group 1: videos: expected none for a VideoLlama3Processor, .* got 2; use"):
        check_videos(watching_prompts("video_llama_3")[1:], reader("video_llama_3"))


def test_images_of_llava_next_video_are_refused_for_vllm():
    requests = watching_prompts("llava_next_video")
    check_images([*prompts("llava_next_video")[:1], *requests[:1]], reader("llava_next_video"))
    check_images(prompts("llava_next"), reader("llava_next"))
    with pytest.raises(ValueError, match="^group 1: images: expected none for a LlavaNextVideoProcessor, .* got 1"):
        check_images(requests, reader("llava_next_video"))


def test_images_and_videos_of_kimi_k25_are_chunks_in_vllm():
    """One placeholder of images for each chunk, up to four frames; their tokens become those of the trainer again."""
    config, processor = model("kimi_k25").config, reader("kimi_k25")
    image, video = config.image_token_id, config.video_token_id
    config.architectures = ["KimiK25ForConditionalGeneration"]
    long, mixed = watching_prompts("kimi_k25")
    for request, expected in ((long, [4, 1]), (mixed, [3, "image", 2])):
        sent = vision_chunk_prompt(request, processor, config)
        chunks = sent["multi_modal_data"]["vision_chunk"]
        assert [len(x["video_chunk"]) if x["type"] == "video_chunk" else x["type"] for x in chunks] == expected
        ids = sent["prompt_token_ids"]
        assert ids.count(image) == len(chunks) and video not in ids
        shorter = [image if token == video else token for token in request.token_ids]
        assert as_trainer_tokens(shorter, processor, request.token_ids) == request.token_ids
        in_runs = [token for token, run in groupby(shorter) for _ in ([0] if token == image else [*run])]
        assert in_runs == ids
    assert np.array_equal(np.asarray(chunks[2]["video_chunk"][1]), mixed.videos[1].frames[1])
    assert vision_chunk_prompt(prompts("kimi_k25")[0], processor, config) == {}


def test_media_of_kimi_k25_that_vllm_does_not_take_are_refused():
    """Servers take no chunks. For the class that transformers writes, vLLM runs transformers' code, without a hook."""
    config = model("kimi_k25").config
    config.architectures = ["Kimi_K25ForConditionalGeneration"]
    check_vision_chunks(prompts("kimi_k25"), config)
    check_kimi_videos(prompts("kimi_k25"), config)
    with pytest.raises(ValueError, match="^videos: expected none for Kimi_K25For.*, got 3; use rollout 'hf'$"):
        check_kimi_videos(watching_prompts("kimi_k25"), config)
    config.architectures = ["KimiK25ForConditionalGeneration"]
    check_kimi_videos(watching_prompts("kimi_k25"), config)
    check_vision_chunks(prompts("kimi_k25")[:1], config)
    with pytest.raises(ValueError, match="^images: expected none for KimiK25For.* got 4 images and videos; use"):
        check_vision_chunks(watching_prompts("kimi_k25"), config)


def reference_inputs(family, base, sample):
    """Those of transformers' forward of one row.

    GLM-4V's takes images or videos, but not both: a row with both is passed as embeddings, with the features in them.
    Gemma 4's gets the features of images and videos, as it does not compute those of videos.
    """
    ids = torch.tensor([sample.token_ids])
    if family.startswith("gemma4"):
        kinds = {"image": ("pixel_values", "image_position_ids"), "video": GEMMA_VIDEO_KEYS}
        features, masks = {}, {}
        for kind, names in kinds.items():
            if names[0] in sample.vision:
                given = {name: sample.vision[name] for name in names}
                features[kind] = getattr(base.model, f"get_{kind}_features")(**given)
        sounds = {name: x for name, x in sample.vision.items() if name.startswith("input_features")}
        if family == "gemma4_unified":  # its forward makes other masks than its `generate`
            kinds = torch.tensor(reader(family).create_mm_token_type_ids(ids))
            none = dict.fromkeys(("attention_mask", "past_key_values", "position_ids"))
            embeds = base.get_input_embeddings()(ids)
            masks["attention_mask"] = base.create_masks_for_generate(
                base.config, embeds, **none, mm_token_type_ids=kinds
            )
        return {"input_ids": ids, "mm_encoder_outputs": features, **sounds, **masks}
    if family == "kimi_k25":
        return {"inputs_embeds": kimi_embeddings(base, ids, sample.vision)}
    if family == "cosmos3_edge":  # which takes tokens of images for starts of sequences else
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **sample.vision}
    apart = family.startswith("glm") and family != "glm5_next"
    if not apart or not {"pixel_values", "pixel_values_videos"} <= {*sample.vision}:
        return {"input_ids": ids, **sample.vision}
    embeds, (kinds,) = base.get_input_embeddings()(ids), reader(family).create_mm_token_type_ids(ids)
    images = base.get_image_features(sample.vision["pixel_values"], sample.vision["image_grid_thw"])
    videos = base.get_video_features(sample.vision["pixel_values_videos"], sample.vision["video_grid_thw"])
    for kind, features in enumerate((images, videos), start=1):
        here = torch.tensor(kinds).eq(kind)[None, :, None]
        embeds = embeds.masked_scatter(here, torch.cat(features.pooler_output))
    return {"inputs_embeds": embeds}


def kimi_embeddings(base, ids, vision):
    """With the features of images, and of chunks of videos, each alone in the tower: the mean over its frames."""
    embeds, merge = base.get_input_embeddings()(ids), base.config.vision_config.merge_kernel_size[0]
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        features, start = [], 0
        for t, h, w in vision.get(f"{kind}_grid_thw", torch.empty(0, 3)).long().tolist():
            patches = vision[pixels][start : start + t * h * w]
            states = base.model.vision_tower(patches, grid_thw=torch.tensor([[t, h, w]])).last_hidden_state
            shape = "(t h y w x) d -> t (h w) (y x) d"
            squares = rearrange(states, shape, t=t, h=h // merge, y=merge, w=w // merge, x=merge)
            features.append(base.model.mm_projector(squares.mean(0))[:, 0])
            start += len(patches)
        if features:
            here = (ids == getattr(base.config, f"{kind}_token_id"))[..., None]
            embeds = embeds.masked_scatter(here, torch.cat(features))
    return embeds


def moved_by_packed_rows(family, prompts):
    """Names of the parameters that a step moves: two responses to each prompt, with shared prompts.

    Logprobs and gradients are those of transformers' forward of one row after another.
    """
    responses = [[70, 71], [72], [73, 74, 75], [76], [77], [78, 79]][: 2 * len(prompts)]
    samples = [append_response(prompts[i // 2], ids, [-1.0] * len(ids)) for i, ids in enumerate(responses)]
    rows = collate(samples, advantages=torch.tensor([1.0, -2.0, 0.5, 1.5, -0.5, 1.0])[: len(samples)])
    base = model(family)
    expected = []
    for i, sample in enumerate(samples):
        ids = torch.tensor([sample.token_ids])
        where = positions(sample, position_spec(base.config))
        logits = base(**reference_inputs(family, base, sample), position_ids=where, use_cache=False).logits
        logprobs = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        expected.append(logprobs.detach())
        (rows.advantages[i] * logprobs[rows.mask[i, 1 : ids.shape[1]]].sum()).backward()
    trained = engine(model(family))
    scored = trained.infer_batch(rows)["logprobs"]
    for row, mask, logprobs in zip(scored, rows.mask, expected, strict=True):
        response = mask[1 : 1 + len(logprobs)]
        torch.testing.assert_close(row[mask], logprobs[response], atol=1e-5, rtol=1e-5)
    before = parameters(trained)
    trained.train_batch(rows, lambda out, mb: ((mb.advantages[:, None] * out.logprobs * mb.mask).sum(), {}))
    after = parameters(trained)
    for name, parameter in base.named_parameters():
        if parameter.grad is not None:
            step = 0.1 * parameter.grad
            atol = 1e-4 * max(1.0, step.abs().max().item())
            torch.testing.assert_close(after[name], before[name] - step, atol=atol, rtol=1e-4, msg=name)
    return [name for name, x in before.items() if not torch.equal(after[name], x)]


@pytest.mark.parametrize("family", SEES)
def test_a_chat_is_trained_on_its_responses(family):
    """Text of a template that reads parts alone is not lost, and the mask counts what an image expands to."""
    processor = reader(family)
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many"}]},
        {"role": "assistant", "content": "digit"},
        {"role": "user", "content": "system"},
        {"role": "assistant", "content": "user"},
    ]
    row = chat_row({"messages": messages, "images": [image(40, 18)], "where": "row"})
    prompt, ends = encode_prompt(processor, row), [processor.tokenizer.convert_tokens_to_ids("<|im_end|>")]
    sample = encode_chat(prompt, processor, ends, 200)
    check_sample(sample)
    assert sample.token_ids[: len(prompt.token_ids)] == prompt.token_ids
    assert processor.tokenizer.decode(sample.response_ids) == "digit<|im_end|>user<|im_end|>"
    (short,) = encode_responses(prompt, processor, ["user"], ends, 200)
    assert short.token_ids == sample.token_ids[: len(short.token_ids)]


@pytest.mark.parametrize(("family", "token"), [("gemma3", "<image_soft_token>"), ("llama4", "<|patch|>")])
def test_a_feature_token_spelled_out_is_refused(family, token):
    """These families have one token for the place of an image and another for each of its features."""
    for images in ([], [image(20, 20)]):
        with pytest.raises(ValueError, match="image features: expected 1, one per placeholder in the prompt, got 0"):
            encode_prompt(reader(family), {"question": f"{token}?", "images": images})


def test_neither_token_of_an_image_is_sampled_by_llama4():
    """Its config has no id of the token that stands for an image in a prompt."""
    of = reader("llama4").tokenizer.convert_tokens_to_ids
    suppressed = suppressed_token_ids(model("llama4").config, reader("llama4").tokenizer).tolist()
    assert {*map(of, ("<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>"))} == {*suppressed}


def test_the_token_of_a_video_is_not_sampled_by_internvl():
    """Its config has no id of it."""
    suppressed = suppressed_token_ids(model("internvl").config, reader("internvl").tokenizer).tolist()
    assert reader("internvl").tokenizer.convert_tokens_to_ids("<video>") in suppressed


@pytest.mark.parametrize(
    ("family", "counts", "expected"),
    [
        *(
            (name, (3, 2), "as many frames in each video of a row, .* of 2 and 3")
            for name in ("internvl", "minicpmv4_6", "smolvlm", "llava_next_video", "llava_onevision")
        ),
        ("glm4v", (3, 1), "at least 2 frames, as Glm4vProcessor merges two into one, got 1; raise video_fps"),
        ("qwen3_vl", (3, 1), "at least 2 frames, as Qwen3VLProcessor merges two into one, got 1; raise video_fps"),
    ],
)
def test_numbers_of_frames_that_a_processor_cannot_use_are_named(family, counts, expected):
    """transformers' processors fail with errors about tensors and sizes."""
    row = {"question": "how many?", "videos": [clip(count, 20, 20) for count in counts]}
    with pytest.raises(ValueError, match=f"^row: videos: expected {expected}"):
        encode_prompt(reader(family), row)


@pytest.mark.parametrize("family", SEES)
def test_an_observation_brings_its_images(family):
    """Behind a prompt's own, in order: the tower sees what it sees of the two apart."""
    _, one, two = prompts(family)
    both, base = append_observation(one, two), model(family)
    check_sample(both)
    joint, *separate = (image_features(base, sample) for sample in (both, one, two))
    torch.testing.assert_close([*joint], [*separate[0], *separate[1]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llava_next", "llava_next_video", "llava_onevision"])
def test_images_of_different_numbers_of_tiles_are_padded(family):
    """Of two tiles and of four, beside the whole image."""
    one, two = (
        encode_prompt(reader(family), {"question": "?", "images": [image(*size)]}) for size in SIZES[2][:1] + SIZES[1]
    )
    both, base = append_observation(one, two), model(family)
    assert [x.vision["pixel_values"].shape[:2] for x in (one, two, both)] == [(1, 3), (1, 5), (2, 5)]
    joint, *separate = (image_features(base, sample) for sample in (both, one, two))
    torch.testing.assert_close([*joint], [*separate[0], *separate[1]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", [*TEXT, *SEES])
def test_a_training_step_packed_equals_padded(family):
    """Rows with no image, one and two: the same logprobs and the same step; it reaches the vision tower."""
    ways = [engine(model(family), use_remove_padding=packed) for packed in (True, False)]
    before = parameters(ways[0])
    scored, expected = (way.infer_batch(batch(family))["logprobs"] for way in ways)
    torch.testing.assert_close(scored, expected, atol=1e-5, rtol=1e-5)
    for way in ways:
        assert way.train_batch(batch(family), loss_fn)["skipped_steps"] == 0
    came, padded = map(parameters, ways)
    moved = {name for name, tensor in came.items() if not torch.equal(tensor, before[name])}
    for name, tensor in came.items():
        # rounding is relative to a sum's largest terms: one channel of Gemma 3n's tower moves by 700, another by 37
        atol = 1e-4 * max(1, padded[name].abs().max().item())
        torch.testing.assert_close(tensor, padded[name], atol=atol, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert len(moved) > 10
    assert family not in SEES or any(first_of_tower(family) in name for name in moved)


def first_of_tower(family):
    """Part of the names of the parameters that an image goes through first: patch_embed, patch_conv, conv_stem."""
    return "conv_stem" if family == "gemma3n" else "patch_"


@pytest.mark.parametrize("family", SEES)
def test_a_blank_image_changes_no_number(family):
    """For a rank without images beside ranks with some: its gradients of the vision tower are there, and 0."""
    base, rows = model(family), batch(family).select([0, 1])
    use_packed_attention(base)
    found = []
    for dummy in (None, dummy_sample(base.config, image=True)):
        inputs = prepare_model_inputs(rows, position_spec(base.config), torch.device("cpu"), dummy=dummy)
        scores = inputs.select_outputs(base(**inputs.kwargs, use_cache=False).logits).log_softmax(-1)
        logprobs = inputs.scatter(scores.gather(1, inputs.targets[:, None])[:, 0])
        found.append((logprobs.detach(), gradients(base, logprobs.sum())))
    (plain, without), (came, gradient) = found
    torch.testing.assert_close(came, plain, atol=1e-5, rtol=1e-5)
    for name, value in without.items():
        torch.testing.assert_close(gradient[name], value, atol=1e-4, rtol=1e-4, msg=name)
    more = gradient.keys() - without.keys()
    assert any(first_of_tower(family) in name for name in more)
    assert all(gradient[name].abs().max() == 0 for name in more)


@pytest.mark.parametrize("family", [*TEXT, *SEES])
def test_frozen_parameters_do_not_move(family):
    base = model(family)
    frozen = freeze(base, vision_tower_pattern(base) if family in SEES else r"\.(layers|h|blocks)\.0\.")
    trained = engine(base)
    before = parameters(trained)
    trained.train_batch(batch(family), loss_fn)
    after = parameters(trained)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert frozen and moved and not moved & set(frozen)
    assert all(trained.module.get_parameter(name).grad is None for name in frozen)


@pytest.mark.parametrize("family", [*TEXT, *SEES])
def test_lora_moves_adapters_alone_and_merges(family):
    # peft's all-linear shortens "merger.mlp.0" to "0", which is the name of a layer of Qwen3-Omni too
    targets = [r".*[qkvo]_proj"] if family == "qwen3_omni_moe_thinker" else []
    base = lora(model(family), 2, 4, *targets)
    trained = engine(base)
    plain = trained.infer_batch(batch(family))["logprobs"]
    before = parameters(trained)
    trained.train_batch(batch(family), loss_fn)
    after = parameters(trained)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    encoders = encoder_modules(base.get_base_model())
    assert moved and all(".lora_B." in name for name in moved)
    assert not [name for name in moved if any(f".{tower}." in name for tower in encoders)]
    adapted = trained.infer_batch(batch(family))["logprobs"]
    assert (adapted - plain).abs().max() > 1e-4
    with trained.disable_adapter():
        torch.testing.assert_close(trained.infer_batch(batch(family))["logprobs"], plain, atol=1e-6, rtol=1e-6)
    merged = model(family)
    weights = dict(merged_parameters(trained.module, lambda parts: map(full_tensor, parts)))
    missing = merged.load_state_dict(weights, strict=False)
    elsewhere = {*(merged._tied_weights_keys or ()), *(name for name, _ in merged.named_buffers())}
    assert not missing.unexpected_keys and set(missing.missing_keys) <= elsewhere
    torch.testing.assert_close(engine(merged).infer_batch(batch(family))["logprobs"], adapted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", [*TEXT, *SEES])
def test_the_samplers_logprobs_are_the_trainers(family):
    base = model(family)
    tokenizer = getattr(reader(family), "tokenizer", reader(family))
    trainer = engine(base, suppressed_token_ids=suppressed_token_ids(base.config, tokenizer))
    sampler = make_rollout("hf", trainer.gathered, processor=reader(family))
    requests = [*prompts(family), *(watching_prompts(family) if family in [*WATCHES, *OMNI] else [])]
    requests += hearing_prompts(family) if family in HEARS else []
    requests += listening_prompts(family) if family in OMNI else []
    samples = sampler.generate(requests, Sampling(NEW), n=2)
    rows = collate(samples)
    scored = trainer.infer_batch(rows)["logprobs"]
    assert rows.mask.sum() > 12
    torch.testing.assert_close(rows.rollout_logprobs, scored, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_rope_that_changes_with_the_longest_sequence(way):
    """What one sequence alone would be given, or an error that names the family; LongRoPE: test_long_rope.py."""
    options = {"max_position_embeddings": 32}
    options["rope_parameters"] = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    packed = text_model("llama", options, "eager")
    use_packed_attention(packed)
    for lengths in ([20, 32], [20, 33]):
        g = torch.Generator().manual_seed(0)
        start = prompt_sample(torch.randint(3, 80, (8,), generator=g).tolist())
        responses = [torch.randint(3, 80, (n - 8,), generator=g).tolist() for n in lengths]
        rows = collate([append_response(start, response, [-1.0] * len(response)) for response in responses])
        weights = torch.ones(rows.tokens.shape)
        if max(lengths) > 32:
            expected = "^lengths: expected at most 32 tokens .* llama.*, got sequences of 20 to 33 tokens"
            with pytest.raises(ValueError, match=expected):
                all_at_once(packed, rows, weights, WAYS[way])
            continue
        expected, _ = one_at_a_time(text_model("llama", options, "eager"), rows, weights)
        torch.testing.assert_close(all_at_once(packed, rows, weights, WAYS[way])[0], expected, atol=1e-5, rtol=1e-5)
