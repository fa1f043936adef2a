"""Images that a data set names: regular files of its own folder, of a size that can be decoded, and no URL."""

import base64
import io
import itertools
import json
import os
import struct
import threading
import zlib
from functools import partial
from types import SimpleNamespace

import pytest
from PIL import Image

from rlkit import runs
from rlkit.data import load_chats, load_pairs, load_task, load_unpaired, with_heldout
from rlkit.vlm import images, load_image, load_video
from rlkit.vlm.audios import load_audio

LIMIT = 3.0  # seconds that a test may hang before it fails


def png(size=(8, 8), kind="PNG"):
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, kind)
    return buffer.getvalue()


def bomb(width, height):
    """A PNG of some kilobytes whose header says that it has so many pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1 << 20))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def in_time(function):
    """What it raises as text; the test fails if it is still waiting after some seconds."""
    found = []

    def call():
        try:
            found.append(function())
        except ValueError as error:
            found.append(str(error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert found, "it hangs"
    return found[0]


# --- files that are no regular ones


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "pipe.png")
    for name in ("pipe.png", "link.png"):
        said = in_time(lambda name=name: load_image(tmp_path / name))
        assert said == f"image {str(tmp_path / name)!r}: cannot be read: expected a regular file, got a pipe"


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/tty"])
def test_a_device_is_not_opened(device, monkeypatch):
    if not os.path.exists(device):
        pytest.skip(f"no {device}")
    opened = []
    monkeypatch.setattr(os, "open", lambda path, *_: opened.append(path))
    said = in_time(partial(load_image, device))
    assert said == f"image {device!r}: cannot be read: expected a regular file, got a device" and not opened


def test_a_socket_and_a_folder_are_refused(tmp_path):
    import socket

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        assert in_time(partial(load_image, tmp_path / "s")).endswith("expected a regular file, got a socket")
    assert in_time(partial(load_image, tmp_path)).endswith("expected a regular file, got a folder")


# --- what decoding may cost


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(10_000, 10_000), (60_000, 60_000), (1, 2**31 - 1)])
def test_an_image_of_too_many_pixels_is_not_decoded(size, tmp_path):
    (tmp_path / "bomb.png").write_bytes(bomb(*size))
    for source in (bomb(*size), tmp_path / "bomb.png"):
        with pytest.raises(ValueError, match="pixels"):
            load_image(source)


def test_pillows_own_limit_is_kept(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert load_image(png((10, 10))).size == (10, 10)
    with pytest.warns(Image.DecompressionBombWarning):
        with pytest.raises(ValueError, match="expected at most 100 pixels, got 11x10"):
            load_image(png((11, 10)))


def test_a_format_that_starts_a_program_is_not_decoded():
    """PostScript is drawn by Ghostscript."""
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    assert Image.open(io.BytesIO(eps)).format == "EPS"
    with pytest.raises(ValueError, match="cannot be read: expected an image in one of the formats"):
        load_image(eps)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_the_usual_formats_are(kind):
    assert load_image(png(kind=kind)).size == (8, 8)


# --- paths of a data set


@pytest.fixture
def own(tmp_path):
    """A data set's folder with an image, and one outside of it."""
    (tmp_path / "set" / "images").mkdir(parents=True)
    (tmp_path / "set" / "images" / "a.png").write_bytes(png())
    (tmp_path / "outside.png").write_bytes(png())
    return tmp_path / "set"


def task_of(folder, *images, load=load_task, **row):
    lines = [{"question": "What?", "answer": "7", "images": [image], **row} for image in images]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load(str(folder / "train.jsonl"))


def test_paths_inside_are_read(own):
    (own / "link.png").symlink_to(own / "images" / "a.png")
    inside = ["images/a.png", "./images/../images/a.png", str(own / "images" / "a.png"), "link.png"]
    inside.append(f"data:image/png;base64,{base64.b64encode(png()).decode()}")
    for row in task_of(own, *inside).splits["train"]:
        assert load_image(row["images"][0]).size == (8, 8)


def outside(own):
    (own / "link.png").symlink_to(own.parent / "outside.png")
    (own / "up").symlink_to(own.parent)
    paths = [
        "../outside.png",
        str(own.parent / "outside.png"),
        "images/../../outside.png",
        "link.png",
        "up/outside.png",
    ]
    return [*paths, {"bytes": None, "path": "../outside.png"}]


def test_a_path_that_begins_like_a_data_url_is_not_opened(own, monkeypatch):
    monkeypatch.chdir(own)
    (own / "data:image").mkdir()
    assert (own / "data:image/../../outside.png").exists()
    with pytest.raises(ValueError, match="image: expected a data URL with base64"):
        load_image(task_of(own, "data:image/../../outside.png", "images/a.png").splits["train"][0]["images"][0])


def test_paths_that_lead_out_are_refused(own):
    paths = outside(own)
    rows = task_of(own, "images/a.png", *paths).splits["train"]
    assert "unreadable" not in rows[0]
    for i, row in enumerate(list(rows)[1:]):
        assert "--allow_outside_files" in row["unreadable"] and row["images"] == [], paths[i]
    expected = f"images: expected a file in {str(own)!r}, got '{own}/../outside.png', which leads out of it"
    assert rows[1]["unreadable"].startswith(expected) and rows[1]["where"] == f"{own}/train.jsonl row 2"


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("column", ["image", "video", "frames", "audio"])
def test_a_path_in_place_of_bytes_is_not_opened(own, column, allowed):
    struct = {"bytes": str(own.parent / "outside.png")}
    picture = {"frames": [struct]} if column == "frames" else struct
    name = "video" if column == "frames" else column
    line = {"question": "What?", "answer": "7", name: picture}
    (own / "train.jsonl").write_text(json.dumps({"question": "What?", "answer": "7"}) + "\n" + json.dumps(line))
    row = load_task(str(own / "train.jsonl"), allow_outside_files=allowed).splits["train"][1]
    if allowed:
        with pytest.raises(ValueError, match="expected bytes under 'bytes', got str"):
            (load_video if name == "video" else load_audio if name == "audio" else load_image)(row[f"{name}s"][0])
    else:
        assert row["unreadable"].startswith(f"{name}s: expected bytes under 'bytes', got str")


def test_a_set_of_which_all_lead_out_ends_the_run_with_the_options_name(own):
    with pytest.raises(ValueError, match="train.jsonl row 1: images: expected a file in .*--allow_outside_files"):
        task_of(own, *outside(own))


PAIR = {"chosen": "good", "rejected": "bad"}


@pytest.mark.parametrize(
    ("load", "row"), [(load_task, {}), (load_chats, {}), (load_pairs, PAIR), (load_unpaired, PAIR)]
)  # fmt: skip
def test_with_the_option_they_are_read(load, row, own):
    paths = outside(own)
    with pytest.raises(ValueError, match="allow_outside_files"):
        task_of(own, *paths, load=load, **row)
    task = task_of(own, *paths, load=partial(load, allow_outside_files=True), **row)
    for row in task.splits["train"]:
        assert load_image(row["images"][0]).size == (8, 8)


def test_held_out_files_are_held_to_it_too(own):
    task = task_of(own, "images/a.png", "images/a.png")
    line = {"question": "What?", "answer": "7", "images": ["../outside.png"]}
    (own / "held.jsonl").write_text(json.dumps(line))
    with pytest.raises(ValueError, match="allow_outside_files"):
        with_heldout(task, str(own / "held.jsonl"))


@pytest.mark.parametrize("allowed", [False, True])
def test_the_option_of_a_run(allowed, own):
    task_of(own, "images/a.png", *outside(own))
    cfg = runs.TaskOptions(allow_outside_files=allowed)
    for load in (load_task, load_chats):
        rows = runs.load_named_task(cfg, str(own / "train.jsonl"), load).splits["train"]
        assert [("unreadable" in row) for row in rows] == [False] + [not allowed] * 6
    assert runs.TaskOptions().allow_outside_files is False


def test_a_url_is_refused_by_name(own):
    for url in ("https://host/x.png", "HTTP://host/x.png", "file:///etc/passwd", "ftp://host/x", "hf://datasets/x"):
        rows = task_of(own, "images/a.png", url).splits["train"]
        assert "unreadable" not in rows[1] or url in rows[1]["unreadable"]
        with pytest.raises(ValueError, match=f"got the URL '{url}'"):
            load_image(rows[1]["images"][0])


def test_folders_of_datasets_keep_to_their_folder(own):
    """A directory of images, as datasets reads it, gives absolute paths."""
    (own / "metadata.jsonl").write_text(
        json.dumps({"file_name": "images/a.png", "question": "?", "answer": "7"}) + "\n"
    )
    row = load_task(str(own)).splits["train"][0]
    assert "unreadable" not in row and load_image(row["images"][0]).size == (8, 8)


def test_decoding_has_a_limit_of_time(monkeypatch, tmp_path):
    """A JPEG of 52 kB that takes seconds to decode: its last scan, which changes nothing, is repeated 2,000 times.

    A fake clock advances one second per call, so the machine's speed does not matter. The limit is what the file
    without the repeats needs.
    """
    written = io.BytesIO()
    Image.new("L", (2000, 2000), 77).save(written, "JPEG", progressive=True)
    whole, end = written.getvalue(), written.getvalue().rindex(b"\xff\xd9")
    scans = whole[whole.rindex(b"\xff\xda") : end] * 2000
    path = tmp_path / "scans.jpg"
    path.write_bytes(whole[:end] + scans + whole[end:])
    clock = itertools.count()
    monkeypatch.setattr(images, "time", SimpleNamespace(thread_time=clock.__next__))
    monkeypatch.setattr(images, "DECODING_SECONDS", 1000)
    assert load_image(whole).size == (2000, 2000)
    needed = next(clock)  # calls so far
    monkeypatch.setattr(images, "DECODING_SECONDS", needed)
    for source in (path, path.read_bytes()):
        with pytest.raises(ValueError, match=f"cannot be read: expected an image that is decoded within {needed} s"):
            load_image(source)
    opened = images._open_image(io.BytesIO(whole))
    assert opened.decodermaxblock <= 4096  # larger blocks take seconds between two looks at the clock
