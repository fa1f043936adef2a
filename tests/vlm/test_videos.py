"""Videos of a row: frames and files, how many frames a model sees of them, and what is refused."""

import io
import json
import sys
from copy import deepcopy
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
from rope3d_families import QWEN2_5, VIDEO

from rlkit.data import load_task
from rlkit.data.media import Audio, Video
from rlkit.doctor.task import check_rows, show_rows
from rlkit.report.responses import frame_grid, prompt_record, save_image
from rlkit.rollout.vllm_requests import check_videos, vllm_prompt
from rlkit.vlm import encode_prompt, load_processor, load_video, tiny_processor, tiny_tokenizer
from rlkit.vlm.audios import VIDEO_FORMATS, open_container
from rlkit.vlm.inputs import position_ids
from rlkit.vlm.videos import load_videos

FRAMES = np.random.default_rng(0).integers(0, 256, (5, 48, 64, 3), dtype="uint8")


@pytest.fixture(scope="module")
def av():
    return pytest.importorskip("av", reason="needs PyAV, of the extra video")


@pytest.fixture(scope="module")
def processor():
    pytest.importorskip("torchvision")
    return tiny_processor(tiny_tokenizer(["What is this?"]), videos=True)


def film(av, frames=30, rate=10, *, size=(64, 48), container="mp4", codec="mpeg4"):
    """A video whose frame i is grey, with the value 8 i."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for i in range(frames):
            picture = np.full((size[1], size[0], 3), 8 * i, np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        out.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize("form", ["bytes", "struct", "several", "png frames", "frame structs", "frames and rate"])
def test_a_column_of_a_parquet_table(av, processor, tmp_path, form):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    data, png = film(av), io.BytesIO()
    Image.fromarray(FRAMES[0]).save(png, "PNG")
    (tmp_path / "a.mp4").write_bytes(data)
    file, path, frame = {"bytes": data, "path": None}, {"bytes": None, "path": "a.mp4"}, png.getvalue()
    column = {
        "bytes": [data, data],
        "struct": [file, path],
        "several": [[file], [path]],
        "png frames": [[frame] * 5, [frame] * 3],
        "frame structs": [[{"bytes": frame, "path": None}] * 3] * 2,
        "frames and rate": [{"frames": [frame] * 3, "fps": 4.0}] * 2,
    }[form]
    name = "videos" if form == "several" else "video"
    table = pyarrow.table({"question": ["What is this?"] * 2, "answer": ["a", "b"], name: column})
    parquet.write_table(table, tmp_path / "rows.parquet")
    task = load_task(str(tmp_path / "rows.parquet"))
    rows = sorted([*task.train, *task.heldout], key=lambda row: row["answer"])
    videos = [video for row in rows for video in encode_prompt(processor, row).videos]
    if "frame" in form:
        assert [len(video.frames) for video in videos] == [
            len(one["frames"] if "rate" in form else one) for one in column
        ]
        assert all(np.array_equal(video.frames[-1], FRAMES[0]) for video in videos)
        assert {video.fps for video in videos} == {4.0 if "rate" in form else 2.0}
    else:
        expected = load_video(data, fps=2.0)
        assert len(videos) == 2 and all(np.array_equal(video.frames, expected.frames) for video in videos)


def test_frames_are_used_as_they_are(tmp_path):
    images = [Image.fromarray(frame) for frame in FRAMES]
    for i, image in enumerate(images):
        image.save(tmp_path / f"{i}.png")
    paths = [str(tmp_path / f"{i}.png") for i in range(5)]
    for source in (images, paths, FRAMES, tuple(images)):
        video = load_video(source, max_frames=2)
        assert np.array_equal(video.frames, FRAMES) and video.fps == 2.0
    video = load_video({"frames": paths, "fps": 5})
    assert np.array_equal(video.frames, FRAMES) and video.fps == 5.0 and load_video(video) is video
    assert video.metadata == {"total_num_frames": 5, "fps": 5.0, "duration": 1.0, "frames_indices": [0, 1, 2, 3, 4]}


@pytest.mark.parametrize(("container", "codec"), [("mp4", "mpeg4"), ("matroska", "mpeg4"), ("gif", "gif")])
def test_frames_of_a_file_are_equally_far_apart(av, tmp_path, container, codec):
    """Three seconds at 10 frames a second, frame i with the value 8 i."""
    if codec == "gif":
        file = io.BytesIO()
        first, *more = [Image.new("RGB", (64, 48), (8 * i,) * 3) for i in range(30)]
        first.save(file, "GIF", save_all=True, append_images=more, duration=100)
        data = file.getvalue()
    else:
        data = film(av, container=container, codec=codec)
    (tmp_path / "film").write_bytes(data)
    for options, rate, times in (
        ({}, 2.0, [0, 0.5, 1, 1.5, 2, 2.5]),
        ({"max_frames": 3}, 1.0, [0, 1, 2]),
        ({"fps": 100.0}, 10.0, [i / 10 for i in range(30)]),
    ):
        for source in (data, str(tmp_path / "film"), {"bytes": None, "path": tmp_path / "film"}):
            video = load_video(source, **options)
            assert abs(video.fps - rate) < 0.05 * rate and video.frames.shape == (len(times), 48, 64, 3)
            assert np.abs(video.frames.mean((1, 2, 3)) - 80 * np.array(times)).max() < 6  # the next frame is 8 away


def test_each_frame_is_the_one_that_a_player_shows(av):
    """Variable frame rate: frames 0 to 2 begin at 0, 0.1 and 1.8 seconds, and frame 3 at 2 seconds."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for i, tenths in enumerate((0, 1, 18, 20)):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 50 * i, np.uint8), format="rgb24")
            frame.pts, frame.time_base = tenths, Fraction(1, 10)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    video = load_video(file.getvalue(), fps=1.0)
    assert video.fps == 1.0 and np.abs(video.frames.mean((1, 2, 3)) - [0, 50, 150]).max() < 6


@pytest.mark.parametrize("tagged", [True, False])
def test_a_truncated_matroska_file_is_named(av, tmp_path, tagged):
    """PyAV reads what is there, without an error; the header has the duration, of the file and mostly of the video."""
    data = film(av, container="matroska")
    data = data if tagged else data.replace(b"DURATION", b"NOT_SAID")
    (tmp_path / "film.mkv").write_bytes(data[: int(0.6 * len(data))])
    error = r"film.mkv': cannot be read: expected a complete file of 3.0 s, got one that ends after \d.\d s"
    for options in ({}, {"max_frames": 3}):
        with pytest.raises(ValueError, match=error):
            load_video(str(tmp_path / "film.mkv"), **options)
    assert len(load_video(data).frames) == 6
    assert len(load_video(data[:-100]).frames) == 6  # without the end of its index, or its last frame


def test_a_truncated_mp4_or_avi_file_is_named(av, tmp_path):
    """Of an MP4 file with its index at the beginning, as on the web, PyAV reads what is there, and of AVI too."""
    for name, options in (("film.mp4", {"movflags": "faststart"}), ("film.avi", {})):
        path = tmp_path / name
        path.write_bytes(film(av, container=name[-3:]))
        with av.open(str(path)) as old, av.open(str(tmp_path / f"new.{name}"), "w", options=options) as new:
            stream = new.add_stream_from_template(old.streams.video[0])
            for packet in old.demux():
                if packet.dts is not None:
                    packet.stream = stream
                    new.mux(packet)
        data = (tmp_path / f"new.{name}").read_bytes()
        assert len(load_video(data).frames) == len(load_video(data[:-100]).frames) == 6
        path.write_bytes(data[: len(data) // 2])
        error = f"{name}': cannot be read: expected a complete file of {len(data)} bytes, got {len(data) // 2}"
        with pytest.raises(ValueError, match=error):
            load_video(str(path))


def test_a_file_without_a_rate_of_frames(av):
    """MPEG-TS has none in its header."""
    assert len(load_video(film(av, container="mpegts")).frames) == 6


def test_a_packet_of_a_stream_that_begins_later_is_named(av):
    """PyAV looks its stream up by a number that it does not have. Damaged MPEG-TS files have such packets."""
    with (
        pytest.raises(ValueError, match="expected streams that all begin with the file, got one that begins later"),
        open_container(io.BytesIO(film(av)), VIDEO_FORMATS, "video") as container,
    ):
        container.streams[1]


def test_times_that_a_file_rounds_to_milliseconds_choose_the_same_frames(av):
    """At 30 frames a second, frame 2 begins at 1/15 seconds, which Matroska rounds up to 0.067."""
    video = load_video(film(av, frames=12, rate=30, container="matroska"), fps=15.0)
    assert video.fps == 15.0 and np.abs(video.frames.mean((1, 2, 3)) - 16 * np.arange(6)).max() < 6


def test_a_video_that_cannot_be_used_is_named(av, tmp_path, monkeypatch):
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n/etc/hostname\n#EXT-X-ENDLIST\n"
    (tmp_path / "names.m3u8").write_bytes(playlist)
    Image.fromarray(FRAMES[0]).save(png := io.BytesIO(), "PNG")
    for source, error in (
        (b"no video", "video of type bytes: cannot be read: Invalid data found when processing input"),
        (playlist, "video of type bytes: cannot be read: "),
        (str(tmp_path / "names.m3u8"), "names.m3u8': cannot be read: "),
        (b"ffconcat version 1.0\nfile /etc/hostname\n", "video of type bytes: cannot be read: "),
        (str(tmp_path / "none.mp4"), "none.mp4': cannot be read: "),
        (str(tmp_path), "expected a regular file, got a folder"),
        ("", "video: expected a path, bytes or frames, got an empty text"),
        (png.getvalue(), "Invalid argument; expected one of the formats mov,mp4,"),
        ("https://example.org/a.mp4", "video: expected a local path, bytes or frames, got the URL"),
        (7, "video of type int: cannot be read: expected a path, bytes or a list of frames"),
        ([], "video: expected frames, got none"),
        ([FRAMES[0], FRAMES[0][:20]], "video: expected frames of one size"),
        ({"frames": list(map(Image.fromarray, FRAMES)), "fps": -1}, "video: expected frames per second above 0"),
        ({"frames": FRAMES, "fps": float("inf")}, "video: expected frames per second above 0, got inf"),
        ({"frames": FRAMES, "fps": [2.0]}, "video: expected frames per second above 0, got [2.0]"),
        ({"frames": FRAMES, "fps": "fast"}, "video: expected frames per second above 0, got 'fast'"),
        ({"frames": FRAMES, "fps": 0}, "video: expected frames per second above 0, got 0"),
        ({"frames": 7}, "video: expected a list of frames, got int"),
    ):
        if isinstance(source, list):
            source = [Image.fromarray(frame) for frame in source]
        with pytest.raises(ValueError, match="video") as caught:
            load_video(source)
        assert error in str(caught.value), str(caught.value)
    data = film(av)
    with pytest.raises(ValueError, match="expected a codec that FFmpeg knows, got another"):
        load_video(film(av, container="matroska").replace(b"V_MPEG4", b"V_NONE0"))
    times = data.index(b"stts") + 8  # a table of the times of frames, without entries: the frame rate is unknown
    with pytest.raises(ValueError, match="cannot be read: video: expected frames, got none"):
        load_video(data[:times] + bytes(4) + data[times + 4 :])
    monkeypatch.setattr("rlkit.vlm.videos.MAX_PIXELS", 5 * 64 * 48)
    with pytest.raises(ValueError, match="expected at most 15360 pixels, got 6 frames of 64x48"):
        load_video(data)
    assert len(load_video(data, max_frames=5).frames) == 5
    monkeypatch.setattr("rlkit.vlm.videos.DECODING_SECONDS", -1.0)
    with pytest.raises(ValueError, match="expected a video that is decoded within -1 s"):
        load_video(data)


def table(folder, *rows):
    for i, frame in enumerate(FRAMES):
        Image.fromarray(frame).save(folder / f"{i}.png")
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_of_a_file_have_videos(tmp_path, processor):
    """In a column `video` or `videos`, or in a message; paths are relative to the file, and lead nowhere else."""
    frames = [f"{i}.png" for i in range(5)]
    data = tmp_path / "data"
    data.mkdir()
    Image.fromarray(FRAMES[0]).save(tmp_path / "outside.png")
    rows = [
        {"question": "<video>What is this?", "videos": [{"frames": frames, "fps": 4}], "answer": "a"},
        {"question": "What is this?", "videos": [["0.png", "../outside.png"]], "answer": "b"},
        {"question": "What is this?", "videos": [["0.png", "none.png"]], "answer": "c"},
        {"question": "What is this?", "videos": [{"frames": 7}], "answer": "d"},
    ]
    part = {"type": "video", "video": frames}
    task = load_task(table(data, *rows))
    samples = [encode_prompt(processor, row) for row in [*task.train, *task.heldout] if row["answer"] == "a"]
    with_outside = load_task(table(data, *rows), allow_outside_files=True)
    samples += [
        encode_prompt(processor, row) for row in [*with_outside.train, *with_outside.heldout] if row["answer"] == "b"
    ]
    chats = load_task(table(data, *[{"messages": [{"role": "user", "content": [part]}], "answer": "a"}] * 2))
    columns = load_task(table(data, *[{"question": "What is this?", "video": frames, "answer": "a"}] * 2))
    samples += [encode_prompt(processor, one.train[0]) for one in (chats, columns)]
    assert [len(sample.videos[0].frames) for sample in samples] == [5, 2, 5, 5]
    assert [sample.videos[0].fps for sample in samples] == [4.0, 2.0, 2.0, 2.0]
    assert task.heldout[0]["question"] == "What is this?" or task.train[0]["question"] == "What is this?"
    errors = []
    for row in [*task.train, *task.heldout]:
        try:
            encode_prompt(processor, row)
        except ValueError as error:
            errors.append(str(error))
    assert any(
        "videos: expected a file in" in one and "outside.png" in one and "rows.jsonl row 2" in one for one in errors
    )
    assert any("none.png" in one and "rows.jsonl row 3" in one for one in errors)
    assert any("rows.jsonl row 4: video: expected a list of frames, got int" in one for one in errors)
    found = " ".join(finding.text for finding in check_rows(task, processor))
    assert "1 to 1 videos each" in found and "would be skipped" in found
    assert "videos: 5 frames of 64 x 48, 4 a second" in " ".join(show_rows(task, processor))


def test_options_set_the_rate_and_number_of_frames(tiny_dir, av):
    """Of the processor: every part of a run that encodes a prompt sees the same frames."""
    pytest.importorskip("torchvision")
    data = film(av)
    for options, count in (({}, 6), ({"video_fps": 1.0}, 3), ({"video_frames": 2}, 2)):
        processor = load_processor(tiny_dir, **options)
        assert len(encode_prompt(processor, {"question": "?", "video": data}).videos[0].frames) == count
    with pytest.raises(ValueError, match="video_fps, video_frames: expected more than 0, got 0 and 32"):
        load_processor(tiny_dir, video_fps=0)


def test_models_without_videos_are_named(processor):
    row = {"question": "What?", "video": FRAMES, "where": "row 4"}
    with pytest.raises(ValueError, match="^row 4: videos: expected none, as the model's processor is a tokenizer"):
        encode_prompt(processor.tokenizer, row)
    without = tiny_processor(processor.tokenizer)
    with pytest.raises(ValueError, match="^row 4: videos: expected the video processor of Qwen2_5_VLProcessor, which"):
        encode_prompt(without, row)


def test_kept_responses_have_a_grid_of_frames(processor, tmp_path):
    sample = encode_prompt(processor, {"question": "What?", "video": FRAMES, "answer": "x"})
    record = prompt_record(tmp_path, [sample], "training", 1)
    with Image.open(tmp_path / record["images"][0]) as grid:
        assert grid.size == (2 * 66 - 2, 3 * 50 - 2)
    shown = np.asarray(frame_grid(load_videos(None, [np.repeat(FRAMES, 4, axis=0)])[0]))
    assert shown.shape == (4 * 50 - 2, 2 * 66 - 2, 3) and np.array_equal(shown[:48, :64], FRAMES[0])
    assert np.array_equal(shown[-48:, -64:], FRAMES[-1]) and np.array_equal(shown[50:98, :64], FRAMES[1])


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (720, 1280)])
def test_frames_of_a_large_video_can_be_recognised_on_the_page(tmp_path, width, height):
    """In one row of eight, a saved frame of 16:9 had 63 x 36 pixels."""
    video = load_videos(None, [np.zeros((8, height, width, 3), np.uint8)])[0]
    name = save_image(tmp_path, frame_grid(video))
    with Image.open(tmp_path / name) as saved:
        saved_width, saved_height = saved.size
    assert saved_width * saved_height / 8 > 0.95 * 126**2 * 9 / 16 and saved_height <= 512 >= saved_width


def test_vllm_normalizes_videos_as_images(processor):
    """It would sample with other pixels than the trainer sees, without an error."""
    prompts = [
        encode_prompt(processor, {"question": "What?", "video": FRAMES}),
        encode_prompt(processor, {"question": "?"}),
    ]
    check_videos(prompts, processor)
    other = deepcopy(processor)
    other.video_processor.image_mean = [0.5, 0.5, 0.5]
    check_videos(prompts[1:], other)
    with pytest.raises(
        ValueError, match="^model: expected a processor with the same image_mean and image_std for images"
    ):
        check_videos(prompts, other)


def test_vllm_gets_the_frames_that_the_trainer_sees(processor):
    (video,) = encode_prompt(processor, {"question": "What?", "video": FRAMES}).videos
    with_sound = Video(video.frames, video.fps, Audio(np.zeros(16000, "float32"), 16000))  # which the model cannot hear
    prompt = vllm_prompt(encode_prompt(processor, {"question": "What?", "video": with_sound}), processor)
    assert prompt["multi_modal_data"].keys() == {"video"}
    ((frames, metadata),) = prompt["multi_modal_data"]["video"]
    assert np.array_equal(frames, video.frames) and metadata["do_sample_frames"] is False
    assert metadata["frames_indices"] == [0, 1, 2, 3, 4] and metadata["fps"] == 2.0


def test_times_stay_in_float32(processor):
    """In bfloat16 a time index may be rounded to another integer."""
    row = {"question": "What?", "video": {"frames": FRAMES, "fps": 3}}
    vision = encode_prompt(processor, row, dtype=torch.bfloat16).vision
    assert vision["pixel_values_videos"].dtype == torch.bfloat16
    assert vision["second_per_grid_ts"].dtype == torch.float32 and vision["second_per_grid_ts"].item() == pytest.approx(
        2 / 3
    )


@pytest.mark.parametrize("fps", [1.2, 2.3, 3.0, 12.5])
def test_time_indices_are_those_of_vllm(fps):
    """vLLM multiplies in float64. In float32 the products of the rates 1.2, 2.3 and 12.5 are rounded up to integers."""
    seconds, frames = torch.tensor([2 / fps]), 64
    vision = {"video_grid_thw": torch.tensor([[frames, 2, 2]]), "second_per_grid_ts": seconds}
    tokens = torch.full((1, frames), VIDEO)
    ids = position_ids(tokens, tokens > 0, [vision], QWEN2_5)
    assert ids[0, 0].tolist() == [int(t * (seconds.item() * 2)) for t in range(frames)]  # 2 ids a second


def test_reading_files_without_pyav_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match=r"package av: expected it to be installed, got none; .*\[video\]"):
        load_video(b"a file")
