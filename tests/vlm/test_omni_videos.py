"""Videos of models that also hear: the rates of their frames, and what is refused."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
import family_processors
from test_audios import OMNI, tone
from test_videos import film

from rlkit.rollout.vllm_requests import vllm_processor_arguments, vllm_prompt
from rlkit.vlm import encode_prompt
from rlkit.vlm.inputs import concatenate_vision
from rlkit.vlm.videos import load_videos

FRAMES = np.random.default_rng(0).integers(0, 256, (5, 48, 64, 3), dtype="uint8")


@pytest.fixture(scope="module")
def av():
    return pytest.importorskip("av", reason="needs PyAV, of the extra video")


@pytest.mark.parametrize(("family", "rates"), [(OMNI[0], [2, 1.6, 16 / 7]), (OMNI[1], [2, 1, 2])])
def test_frames_of_files_have_times_that_every_sampler_rounds_alike(av, family, rates):
    """A file of three seconds: at 2 frames per second, at most 5 frames, and at 2.5 frames per second."""
    settings = family_processors.omni("Qwen2_5Omni" if family == OMNI[0] else "Qwen3OmniMoe")
    data = film(av)
    for (fps, most), rate in zip([(2.0, 32), (2.0, 5), (2.5, 32)], rates, strict=True):
        settings.video_processor.fps, settings.video_processor.max_frames = fps, most
        (video,) = load_videos(settings, [data])
        times = np.arange(len(video.frames)) / video.fps
        assert video.fps == rate and times[-1] <= 3 < times[-1] + 2 / rate
        assert np.abs(video.frames.mean((1, 2, 3)) - 8 * np.floor(10 * times + 1e-3)).max() < 6


def test_rates_without_whole_position_ids_are_named():
    row = {"question": "What?", "video": {"frames": FRAMES, "fps": 2.5}, "where": "row 4"}
    error = "^row 4: video: expected frames a multiple of 0.5 s apart for Qwen3Omni.*, got 2.5 frames per second"
    with pytest.raises(ValueError, match=error):
        encode_prompt(family_processors.processor(OMNI[1]), row)
    sample = encode_prompt(family_processors.processor(OMNI[0]), row)
    assert torch.equal(sample.vision["video_second_per_grid"], torch.tensor([0.8]))


def test_a_template_without_brackets_around_videos_is_named():
    processor = family_processors.omni()
    processor.chat_template = processor.tokenizer.chat_template.replace("<|vision_bos|><|VIDEO|>", "<|VIDEO|>")
    with pytest.raises(
        ValueError, match=r"^row 4: chat template: expected '<\|vision_bos\|><\|VIDEO\|><\|vision_eos\|>'"
    ):
        encode_prompt(processor, {"question": "What?", "video": FRAMES, "where": "row 4"})


@pytest.mark.parametrize("family", OMNI)
def test_media_of_all_kinds_keep_their_order(family):
    """Images and audios stand before, between and after videos."""
    processor = family_processors.processor(family)
    clips = [{"frames": FRAMES[:2], "fps": 2.0}, {"frames": FRAMES[1:], "fps": 1.0}]
    sounds = [(tone(seconds, pitch=pitch), 16000) for seconds, pitch in ((1.0, 300), (1.2, 900))]
    images = [FRAMES[0], FRAMES[3]]
    text = "<audio> <video> <image> <video> <audio> <image>?"
    row = {"question": text, "videos": clips, "audios": sounds, "images": [*map(Image.fromarray, images)]}
    sample = encode_prompt(processor, row)
    alone = [
        encode_prompt(processor, {"question": f"<{kind}>", f"{kind}s": [one]}).vision
        for kind in ("image", "video", "audio")
        for one in row[f"{kind}s"]
    ]
    assert {*sample.vision} == {name for one in alone for name in one}
    for name, tensor in concatenate_vision(alone).items():
        torch.testing.assert_close(sample.vision[name], tensor, atol=0, rtol=0)


def test_vllm_gets_the_rate_of_the_frames():
    processor = family_processors.processor(OMNI[0])
    rows = [
        {"question": "<video> <video>", "videos": [{"frames": FRAMES, "fps": fps} for fps in (4, second)]}
        for second in (4, 2)
    ]
    same, mixed = (encode_prompt(processor, row, group_id=7) for row in rows)
    assert vllm_processor_arguments(same, processor)["mm_processor_kwargs"] == {"fps": 4, "do_sample_frames": False}
    assert len(vllm_prompt(same)["multi_modal_data"]["video"]) == 2
    with pytest.raises(ValueError, match="group 7.*: videos: expected one frame rate, .* got 2, 4 frames per second"):
        vllm_processor_arguments(mixed, processor)
    assert vllm_processor_arguments(mixed, family_processors.processor("qwen2_5_vl")) == {}
