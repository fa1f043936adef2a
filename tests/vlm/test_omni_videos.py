"""Videos of models that also hear: the rates of their frames, their sound, and what is refused."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).parent))
import family_processors
from test_audios import OMNI, loudest, tone
from test_videos import film

from rlkit.data.media import Audio, Video
from rlkit.report.responses import prompt_record
from rlkit.rollout.vllm_requests import vllm_prompt, vllm_video_options
from rlkit.vlm import encode_prompt, load_processor
from rlkit.vlm.inputs import concatenate_vision
from rlkit.vlm.videos import FRAME_INTERVALS, _rate_in_steps, load_videos

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


def test_seconds_are_exact_at_every_rate_of_long_files():
    """The processor divides by the rate: 1 / (1 / 49) is not 49."""
    for family, interval in FRAME_INTERVALS.items():
        for seconds in np.linspace(0.5, 60, 240):
            rate = _rate_in_steps(1 / seconds, interval)
            assert 2 / rate % (2 * interval) == 0 and seconds - 1e-9 < 1 / rate < seconds + 5 * interval, family


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
    assert vllm_video_options(same, processor)["mm_processor_kwargs"] == {
        "fps": 4,
        "do_sample_frames": False,
    }
    assert len(vllm_prompt(same, processor)["multi_modal_data"]["video"]) == 2
    with pytest.raises(ValueError, match="group 7.*: videos: expected one frame rate, .* got 2, 4 frames per second"):
        vllm_video_options(mixed, processor)
    assert vllm_video_options(mixed, family_processors.processor("qwen2_5_vl")) == {}


def film_with_tone(av, seconds=3.0, pitch=440.0, rate=44100):
    """A video of `seconds` at 10 frames per second, with a tone in two channels."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        pictures, sound = out.add_stream("mpeg4", rate=10), out.add_stream("aac", rate=rate, layout="stereo")
        pictures.width, pictures.height, pictures.pix_fmt = 64, 48, "yuv420p"
        for i in range(int(10 * seconds)):
            picture = np.full((48, 64, 3), 8 * i, np.uint8)
            out.mux(pictures.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        samples = np.stack([tone(seconds, rate, pitch)] * 2).astype("float32")
        for piece in np.split(samples, range(1024, samples.shape[1], 1024), axis=1):
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(piece), format="fltp", layout="stereo")
            frame.sample_rate = rate
            out.mux(sound.encode(frame))
        out.mux([*pictures.encode(), *sound.encode()])
    return file.getvalue()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("omni") / "model"
    family_processors.processor(OMNI[0]).save_pretrained(folder)
    family_processors.model(OMNI[0]).config.save_pretrained(folder)
    return str(folder)


def test_an_option_has_the_sound_of_files_heard(av, model_path, tmp_path):
    """Frames and sound of a file are those of the file read as a video and as an audio; frames have no sound."""
    data, silent = film_with_tone(av), film(av)
    (tmp_path / "film.mp4").write_bytes(data)
    for sounds in (False, True):
        processor = load_processor(model_path, video_sound=sounds)
        heard, alone = (encode_prompt(processor, {"question": "What?", kind: data}) for kind in ("video", "audio"))
        (video,) = heard.videos
        assert len(video.frames) == 6 and video.fps == 2.0 and ("input_features" in heard.vision) is sounds
        for source in (silent, FRAMES, {"frames": FRAMES, "fps": 2}):
            assert load_videos(processor, [source])[0].sound is None
        if sounds:
            assert np.array_equal(video.sound.samples, alone.audios[0].samples) and video.sound.rate == 16000
            assert abs(loudest(video.sound.samples) - 440) < 4 and abs(len(video.sound.samples) - 48000) < 2048
            assert torch.equal(heard.vision["input_features"], alone.vision["input_features"])
            assert np.array_equal(load_videos(processor, [tmp_path / "film.mp4"])[0].sound.samples, video.sound.samples)
            assert not heard.audios and load_videos(processor, [video])[0].sound.rate == 16000
    with pytest.raises(
        ValueError, match="^video_sound: expected a model with one of Qwen2_5Omni.*, got Qwen2VLProcessor"
    ):
        family_processors.processor("qwen2_vl").save_pretrained(tmp_path)
        family_processors.model("qwen2_vl").config.save_pretrained(tmp_path)
        load_processor(str(tmp_path), video_sound=True)
    LlamaConfig().save_pretrained(tmp_path / "text")
    family_processors.processor("qwen2_vl").tokenizer.save_pretrained(tmp_path / "text")
    with pytest.raises(ValueError, match="^video_sound: expected a model with one of Qwen2_5Omni.*, got .*Tokenizer"):
        load_processor(str(tmp_path / "text"), video_sound=True)


def test_sound_is_as_long_as_the_audios_of_the_model():
    """Qwen2.5-Omni's processor would cut off what is longer; for Qwen3-Omni the sound ends with silence."""
    long, short = (Video(FRAMES, 2.0, Audio(tone(seconds).astype("float32"), 16000)) for seconds in (4.1, 0.5))
    with pytest.raises(ValueError, match=r"audio: expected at most 4 s for Qwen2_5OmniProcessor, got 4.1 s"):
        load_videos(family_processors.processor(OMNI[0]), [long])
    (video,) = load_videos(family_processors.processor(OMNI[1]), [short])
    assert len(video.sound.samples) == 16000 and not video.sound.samples[8000:].any()


def test_vllm_gets_sound_with_all_videos_of_qwen3_omni_or_with_none():
    sound = Audio(tone(1.0).astype("float32"), 16000)
    silent, heard = Video(FRAMES, 2.0), Video(FRAMES, 2.0, sound)
    rows = [
        {"question": "?", "videos": [heard, heard._replace(sound=Audio(-sound.samples, 16000))]},
        {"question": "<video> <video>", "videos": [silent, heard]},
        {"question": "?", "videos": [heard], "audios": [sound]},
    ]
    processor = family_processors.processor(OMNI[1])
    both, some, beside = (encode_prompt(processor, row, group_id=7) for row in rows)
    options = vllm_video_options(both, processor)
    assert options["mm_processor_kwargs"] == {"fps": 2.0, "do_sample_frames": False, "use_audio_in_video": True}
    first, second = options["multi_modal_uuids"]["video"]
    assert first != second  # the frames are the same, and the sound is not
    media = vllm_prompt(both, processor)["multi_modal_data"]
    assert len(media["video"]) == 2 and [len(samples) for samples, _ in media["audio"]] == [16160, 16160]
    for sample, got in (
        (some, "2 videos, 1 with sound, and 0 audios"),
        (beside, "1 videos, 1 with sound, and 1 audios"),
    ):
        with pytest.raises(
            ValueError, match=f"group 7.*: videos: expected no other audios, .*, got {got}; use rollout"
        ):
            vllm_video_options(sample, processor)
    processor = family_processors.processor(OMNI[0])
    with pytest.raises(
        ValueError, match="videos: expected none with sound for Qwen2_5OmniProcessor, as vLLM's position"
    ):
        vllm_video_options(encode_prompt(processor, rows[0]), processor)


def test_the_report_keeps_the_sound_of_a_video(tmp_path):
    sample = encode_prompt(
        family_processors.processor(OMNI[0]),
        {"question": "?", "video": Video(FRAMES, 2.0, Audio(tone(1.0).astype("float32"), 16000))},
    )
    record = prompt_record(tmp_path, [sample], "training", 1)
    assert [one["seconds"] for one in record["audios"]] == [1.0] and len(record["images"]) == 1
