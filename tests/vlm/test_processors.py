import base64
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFont

sys.path.insert(0, str(Path(__file__).parent))
import family_processors  # noqa: E402

from rlkit.data import collate, expand_placeholders  # noqa: E402
from rlkit.data.placeholders import Expansion  # noqa: E402
from rlkit.data.samples import check_sample  # noqa: E402
from rlkit.engines.value_head import load_value_model  # noqa: E402
from rlkit.vlm import (  # noqa: E402
    decode,
    encode_prompt,
    encode_prompts,
    load_image,
    load_model,
    load_processor,
    model_path,
    placeholder_ids,
    suppressed_token_ids,
)
from rlkit.vlm.expansions import expansions  # noqa: E402
from rlkit.vlm.loading import load_config  # noqa: E402


@pytest.fixture(scope="module")
def processor(tiny_dir):
    return load_processor(tiny_dir)


@pytest.fixture(scope="module")
def config(tiny_dir):
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(tiny_dir)


def image(width: int = 56, height: int = 56, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype="uint8"))


def saved(picture: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def ask(*images, question: str = "What digit is this?", **row) -> dict:
    return {"question": question, "images": list(images), "answer": "3", "where": "file.jsonl row 7", **row}


# --- load_image


def test_load_image_from_everything(tmp_path):
    picture, data = image(), saved(image())
    path = tmp_path / "a.png"
    path.write_bytes(data)
    encoded = f"data:image/png;base64,{base64.b64encode(data).decode()}"  # OpenAI's image_url
    structs = [encoded, {"bytes": data, "path": None}, {"bytes": None, "path": str(path)}, {"path": path}]
    for source in [path, str(path), data, bytearray(data), picture, *structs, {"bytes": data, "path": "gone.png"}]:
        came = load_image(source)
        assert came.mode == "RGB" and came.tobytes() == picture.tobytes()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_truncated_files_are_value_errors(kind, tmp_path):
    data = saved(image(40, 30), kind)
    for n in (0, 1, 10, 30, len(data) // 2):
        (tmp_path / "cut").write_bytes(data[:n])
        with pytest.raises(ValueError, match="cannot be read"):
            load_image(data[:n])
        with pytest.raises(ValueError, match=f"image '{tmp_path}/cut': cannot be read"):
            load_image(str(tmp_path / "cut"))


@pytest.mark.parametrize(
    "source", [None, 3, {}, {"bytes": None, "path": None}, [1], np.zeros((3, 3, 3), "uint8"), "a\0b"]
)
def test_what_is_no_image_is_refused(source):
    with pytest.raises(ValueError, match="^image .*: cannot be read"):
        load_image(source)


def test_missing_file_and_folder_are_named(tmp_path):
    for path in (tmp_path / "no.png", tmp_path):
        with pytest.raises(ValueError, match=f"{path}.*: cannot be read"):
            load_image(path)


@pytest.mark.parametrize("source", ["https://host/x.png", "file:///x.png", {"path": "s3://bucket/x.png"}])
def test_url_is_refused(source):
    with pytest.raises(ValueError, match="expected a local path, bytes or a PIL image, got the URL"):
        load_image(source)


def test_the_lines_of_a_data_url_are_joined():
    lines = base64.encodebytes(saved(image())).decode()
    assert "\n" in lines.strip() and load_image(f"data:image/png;base64,{lines}").size == image().size


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("data:image/png;base64,AAA", "image: expected a data URL with base64, got 'data:image/png;base64,AAA': Inc"),
        ("data:image/png;base64,AAA%", "expected a data URL with base64, got 'data:image/png;base64,AAA%': Only"),
        ("data:image/png;base64,AAAé", "expected a data URL with base64, got 'data:image/png;base64,AAAé': string"),
        ("data:image/png;base64,AAAA", "AAAA': cannot be read: expected an image in one of the formats PNG, JPEG, "),
        ("data:image/png;base64,%" + "A" * 10**6, "AAA...': Only base64 data is allowed"),
        ("data:image/png;base64," + "A" * 10**6, "AAA...': cannot be read: "),
        ("data:audio/wav;base64," + "A" * 10**6, "AAA...': cannot be read: expected an image in one of "),
        (
            "https://host/" + "x" * 10**6,
            "image: expected a local path, bytes or a PIL image, got the URL 'https://host/",
        ),
        ("A" * 10**6, "AAA...': expected a path, got 1000000 characters"),
        ("A" * 3000, "AAA...': expected a path, got 3000 characters"),
    ],
    ids=range(10),
)
def test_bad_texts_are_named_by_their_beginning(processor, source, error):
    """Base64 that is none, another URL, or base64 without the head of a data URL: the error has the row."""
    with pytest.raises(ValueError, match="^file.jsonl row 7: image") as caught:
        encode_prompt(processor, ask(source))
    assert error in str(caught.value) and len(str(caught.value)) < 300, str(caught.value)[:500]


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_zero_size_is_refused(size):
    with pytest.raises(ValueError, match=f"empty, {size[0]}x{size[1]} pixels"):
        load_image(Image.new("RGB", size))


def test_exif_orientation_is_applied():
    picture = image(20, 10)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 270 degrees
    came = load_image(saved(picture, "PNG", exif=exif))
    assert came.size == (10, 20) and came.tobytes() == picture.transpose(Image.Transpose.ROTATE_270).tobytes()


@pytest.mark.parametrize("mode", ["L", "LA", "P", "PA", "RGBA", "CMYK", "1", "YCbCr"])
def test_every_mode_becomes_rgb(mode):
    grey = Image.new("RGB", (6, 4), (255, 255, 255))
    source = grey.convert("P").convert(mode) if mode == "PA" else grey.convert(mode)
    came = load_image(source)
    assert came.mode == "RGB" and came.size == (6, 4) and min(came.getpixel((2, 2))) > 250


@pytest.mark.parametrize(
    ("mode", "clear", "kind"),
    [
        ("RGBA", (0, 0, 0, 0), "PNG"),
        ("RGBA", (0, 0, 0, 0), "WEBP"),
        ("RGBA", (0, 0, 0, 0), "TIFF"),
        ("LA", (0, 0), "PNG"),
        ("L", 0, "PNG"),
        ("RGB", (1, 2, 3), "PNG"),
        ("P", 0, "PNG"),
        ("P", 0, "GIF"),
    ],
)
def test_transparent_pixels_are_white(mode, clear, kind):
    """As vLLM draws them. The colour of a transparent pixel is nearly always black, as that of the drawing."""
    source = Image.new(mode, (4, 4), clear)
    if mode == "P":
        source.putpalette([10, 20, 30, 40, 50, 60])
    drawn = {"RGBA": (10, 20, 30, 255), "LA": (40, 255), "L": 40, "RGB": (10, 20, 30), "P": 1}[mode]
    source.putpixel((2, 1), drawn)
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    if mode in ("L", "RGB", "P"):
        options["transparency"] = clear
    came = np.asarray(load_image(saved(source, kind, **options)))
    expected = np.full((4, 4, 3), 255)
    expected[1, 2] = {"L": 40, "LA": 40, "P": (40, 50, 60)}.get(mode, (10, 20, 30))
    assert np.array_equal(came, expected)


def test_half_transparent_pixels_are_mixed_with_white():
    for source in (Image.new("RGBA", (4, 4), (100, 0, 255, 51)), Image.new("LA", (4, 4), (100, 51))):
        expected = [round(0.2 * colour + 0.8 * 255) for colour in source.convert("RGBA").getpixel((0, 0))[:3]]
        assert np.abs(np.asarray(load_image(source)) - np.array(expected)).max() <= 1


def test_sixteen_bit_greyscale_is_scaled_not_saturated():
    ramp = np.linspace(0, 65535, 64).reshape(8, 8).astype("uint16")
    came = np.asarray(load_image(saved(Image.fromarray(ramp))))
    assert came.shape == (8, 8, 3) and np.abs(came[:, :, 0] - ramp / 257).max() <= 1
    with pytest.raises(ValueError, match="expected 8 or 16 bits a channel, got pixels of mode 'F'"):
        load_image(Image.fromarray(np.ones((4, 4), "float32")))


# --- encode


def counts(sample, processor) -> tuple[int, int]:
    token = processor.image_token_id
    return sample.compact_ids.count(token), sample.token_ids.count(token)


def test_compact_ids_expand_to_token_ids(processor):
    sample = encode_prompt(processor, ask(image(56, 56), image(112, 84, 1)), group_id=5)
    check_sample(sample)
    assert counts(sample, processor) == (2, 4 + 12)
    assert sample.placeholders == {processor.image_token_id: [4, 12]} and sample.group_id == 5
    assert sample.vision["image_grid_thw"].tolist() == [[1, 4, 4], [1, 6, 8]]
    assert set(sample.vision) == {"pixel_values", "image_grid_thw"} and len(sample.vision["pixel_values"]) == 16 + 48
    assert not any(sample.mask) and [i.size for i in sample.images] == [(56, 56), (112, 84)]
    text = "<|im_start|>user\n" + "<|vision_start|><|image_pad|><|vision_end|>" * 2
    text += "What digit is this?<|im_end|>\n<|im_start|>assistant\n"
    assert processor.tokenizer.decode(sample.compact_ids) == text


def test_encode_keeps_images_in_order(processor):
    first, second = image(seed=1), image(seed=2)
    both = encode_prompt(processor, ask(first, second)).vision["pixel_values"]
    apart = [encode_prompt(processor, ask(one)).vision["pixel_values"] for one in (first, second)]
    torch.testing.assert_close(both, torch.cat(apart), rtol=0, atol=0)
    assert not torch.equal(apart[0], apart[1])


@pytest.mark.parametrize("row", [{"images": []}, {"images": None}, {}])
def test_encode_without_images(processor, row):
    for reader in (processor, processor.tokenizer):
        sample = encode_prompt(reader, {"question": "Why?", **row})
        assert sample.token_ids == sample.compact_ids and not sample.vision and not sample.placeholders
        shown = processor.tokenizer.decode(sample.token_ids)
        assert shown == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert len(collate([sample])) == 1


def test_encode_messages(processor):
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "image"}, {"type": "text", "text": "B"}]},
    ]
    sample = encode_prompt(processor, ask(image(), messages=messages))
    check_sample(sample)
    shown = processor.tokenizer.decode(sample.compact_ids)
    assert "system\nBe short." in shown and "A<|vision_start|><|image_pad|><|vision_end|>B" in shown


@given(st.lists(st.tuples(st.integers(8, 300), st.integers(8, 300)), min_size=1, max_size=3))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_expansion_is_the_processors_own(processor, sizes):
    images = [Image.new("RGB", size) for size in sizes]
    sample = encode_prompt(processor, ask(*images))
    text = processor.tokenizer.decode(sample.compact_ids)
    own = processor(text=[text], images=images)["input_ids"][0]
    assert sample.token_ids == list(own) == expand_placeholders(sample.compact_ids, sample.placeholders)
    check_sample(sample)


def test_image_tokens_never_truncated(processor):
    row = ask(image(112, 112))
    whole = encode_prompt(processor, row)
    n = len(whole.token_ids)
    assert encode_prompt(processor, row, max_tokens=n).token_ids == whole.token_ids
    for limit in (n - 1, len(whole.compact_ids), 3, 0):  # the limit is on expanded tokens
        with pytest.raises(
            ValueError, match=f"file.jsonl row 7: expected a prompt of at most {limit} tokens, got {n}$"
        ):
            encode_prompt(processor, row, max_tokens=limit)
    samples, skipped = encode_prompts(processor, [(0, row), (1, ask())], max_tokens=n - 1)
    assert [s.group_id for s in samples] == [1] and len(skipped) == 1
    processor.tokenizer.model_max_length, before = 4, processor.tokenizer.model_max_length
    try:
        assert encode_prompt(processor, row).token_ids == whole.token_ids
    finally:
        processor.tokenizer.model_max_length = before


NO_PLACE = {"messages": [{"role": "assistant", "content": "no place for it"}]}
TWO_PLACES = {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}]}
BAD_ROWS = {
    "broken image": (ask(b"broken"), "image of type bytes: cannot be read"),
    "missing image": (ask("gone.png"), "image 'gone.png': cannot be read"),
    "url": (ask("http://host/a.png"), "got the URL"),
    "strip": (ask(Image.new("RGB", (1, 400))), "aspect ratio"),
    "no place": (ask(image(), **NO_PLACE), "images: expected one for each place, got 1 for no place"),
    "two places": (ask(image(), **TWO_PLACES), "images: expected one for each place, got 1 for 2 image parts"),
    "place without image": (ask(**TWO_PLACES), "images: expected one for each place, got 0 for 2 image parts"),
    "spelled out": (
        ask(image(), question="<|image_pad|>?"),
        "images: expected 2, one per placeholder in the prompt, got 1",
    ),
    "spelled out, no image": (
        ask(question="<|image_pad|>?"),
        "images: expected 1, one per placeholder in the prompt, got 0",
    ),
    "video": (ask(question="<|video_pad|>?"), "videos: expected 1, one per placeholder in the prompt, got 0"),
    "null question": (ask(question=None), "question: expected text or a list of messages, got None"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_is_named(processor, name):
    row, message = BAD_ROWS[name]
    with pytest.raises(ValueError, match=f"^file.jsonl row 7: .*{message}"):
        encode_prompt(processor, row)


def test_encode_rows_keeps_the_good_ones(processor):
    rows = [(4, ask(image())), (2, ask(b"broken", where="row 2")), (9, ask()), (1, {"images": [], "where": "row 1"})]
    samples, skipped = encode_prompts(processor, rows)
    assert [sample.group_id for sample in samples] == [4, 9]
    assert [message.partition(":")[0] for message in skipped] == ["row 2", "row 1"]
    assert encode_prompts(processor, []) == ([], [])


def test_a_tokenizer_cannot_see(processor):
    with pytest.raises(ValueError, match="row 7: images: expected none, as the model's processor is a tokenizer"):
        encode_prompt(processor.tokenizer, ask(image()))


def test_a_processor_that_does_not_say_what_it_puts_where_is_refused(processor):
    class Silent:
        def __getattr__(self, name):
            return getattr(processor, name)

        def __call__(self, **kwargs):
            return {name: x for name, x in processor(**kwargs).items() if name != "text_replacement_offsets"}

    error = "row 7: processor: expected text_replacement_offsets .* got a Silent .* the images of"
    with pytest.raises(ValueError, match=error):
        encode_prompt(Silent(), ask(image()))


def test_decode_leaves_special_tokens_out(processor):
    ids = processor.tokenizer("digit<|im_end|><|endoftext|>")["input_ids"]
    assert decode(processor, ids) == decode(processor.tokenizer, ids) == "digit"


# --- what is never sampled


def test_placeholder_ids(config, processor):
    ids = processor.tokenizer.convert_tokens_to_ids
    names = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    assert placeholder_ids(config) == sorted(ids(names))
    assert placeholder_ids(SimpleNamespace(audio_token_id=7, image_token_id=None, image_start_token_id=3)) == [3, 7]
    assert placeholder_ids(SimpleNamespace(boi_token_index=7, eoi_token_id=3)) == [3, 7]  # Gemma's brackets
    assert placeholder_ids(SimpleNamespace()) == []


def test_unsampled_ids_end_with_rows_beyond_the_vocabulary(config, processor):
    tokenizer = processor.tokenizer
    found = suppressed_token_ids(config, tokenizer)
    assert found.dtype == torch.long and found.tolist() == placeholder_ids(config)
    assert tokenizer.eos_token_id not in found.tolist()
    text = SimpleNamespace(vocab_size=len(tokenizer) + 3)
    wide = SimpleNamespace(model_type="wide", text_config=text, image_token_id=5)
    assert suppressed_token_ids(wide, tokenizer).tolist() == [5, *range(len(tokenizer), len(tokenizer) + 3)]
    exact = SimpleNamespace(model_type="exact", vocab_size=len(tokenizer))
    assert suppressed_token_ids(exact, tokenizer).tolist() == []
    gone = SimpleNamespace(**vars(exact), image_token_id=len(tokenizer))  # not in this vocabulary
    assert suppressed_token_ids(gone, tokenizer).tolist() == []


def test_unsampled_ids_are_those_without_a_token(processor):
    """Ids of a vocabulary may have holes, so that its size is not the number of its tokens."""
    config = SimpleNamespace(model_type="holes", vocab_size=8, image_token_id=5)
    holes = Mock(get_vocab=lambda: {"a": 0, "b": 1, "c": 4, "<image>": 5, "</s>": 6}, __len__=lambda self: 5)
    assert suppressed_token_ids(config, holes).tolist() == [2, 3, 5, 7]
    bytes_of_one_text = Mock(get_vocab=lambda: {"a": 0, "?": 3}, __len__=lambda self: 4)  # as in Mistral's tokenizers
    assert suppressed_token_ids(config, bytes_of_one_text).tolist() == [4, 5, 6, 7]


# --- load_processor and load_model


HIDDEN = """
import sys
sys.modules["torchvision"] = None  # as if it were not installed
import torch
from PIL import Image
from rlkit.vlm import encode_prompt, load_processor
processor = load_processor(sys.argv[1])
row = {"question": "q", "images": [Image.open(sys.argv[2])]}
print(type(processor).__name__, processor.image_processor.merge_size, getattr(processor, "video_processor", None))
torch.save(encode_prompt(processor, row).vision["pixel_values"], sys.argv[3])
other = load_processor(sys.argv[4])
print(type(other).__name__, len(encode_prompt(other, row).token_ids))
"""


def test_load_processor_without_torchvision(processor, tiny_dir, tmp_path):
    """It sees what the processor of this process sees, which resizes with torchvision where that is installed: to the
    rounding of a pixel, one in 255 over a standard deviation of 0.26."""
    image(70, 90).save(tmp_path / "image.png")
    internvl = family_processors.processor("internvl")  # its constructor has more arguments
    for part in (internvl, family_processors.model("internvl").config):
        part.save_pretrained(tmp_path / "internvl")
    tokens = len(encode_prompt(internvl, ask(image(70, 90), question="q")).token_ids)
    paths = [tiny_dir, *(str(tmp_path / name) for name in ("image.png", "pixels.pt", "internvl"))]
    done = subprocess.run([sys.executable, "-c", HIDDEN, *paths], capture_output=True, text=True, timeout=1000)
    said = ["Qwen2_5_VLProcessor", "2", "None", "InternVLProcessor", str(tokens)]
    assert done.stdout.split() == said, done.stderr[-2000:]
    ours = encode_prompt(processor, ask(image(70, 90))).vision["pixel_values"]
    torch.testing.assert_close(torch.load(tmp_path / "pixels.pt"), ours, atol=0.016, rtol=0)


def test_saved_and_loaded_again_is_the_whole_processor(processor, tiny_dir, tmp_path):
    for turn in range(2):
        path = tmp_path / str(turn)
        (processor if turn == 0 else load_processor(str(tmp_path / "0"))).save_pretrained(path)
        shutil.copy(Path(tiny_dir) / "config.json", path)
        written = json.loads((path / "processor_config.json").read_text())
        assert written["processor_class"] == "Qwen2_5_VLProcessor"
        video = written["video_processor"]
        before = json.loads((Path(tiny_dir) / "processor_config.json").read_text())
        assert before.pop("video_processor").items() <= video.items()  # torchvision's part adds its defaults
        assert before == {name: part for name, part in written.items() if name != "video_processor"}
    again = encode_prompt(load_processor(str(path)), ask(image()))
    before = encode_prompt(processor, ask(image()))
    assert again.token_ids == before.token_ids
    assert torch.equal(again.vision["pixel_values"], before.vision["pixel_values"])


@pytest.mark.parametrize("torchvision", [True, False])
def test_the_font_of_ernie_is_saved_with_its_processor(tmp_path, monkeypatch, torchvision):
    """Without torchvision, `save_pretrained` of transformers fails, as that processor has no part for videos."""
    font, config = ImageFont.load_default(10).font_bytes, family_processors.model("ernie4_5_vl_moe").config
    given = family_processors.ernie4_5_vl_moe()
    (tmp_path / "given.ttf").write_bytes(font)
    given.video_processor.draw_on_frames, given.video_processor.font = True, str(tmp_path / "given.ttf")
    given.save_pretrained(tmp_path / "first")
    if not torchvision:
        monkeypatch.setattr("transformers.utils.is_torchvision_available", lambda: False)
        monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", Mock(side_effect=ImportError))
    for source, target in (("first", "second"), ("second", "third")):
        config.save_pretrained(tmp_path / source)
        load_processor(str(tmp_path / source)).save_pretrained(tmp_path / target)
        assert (tmp_path / target / "given.ttf").read_bytes() == font
        written = json.loads((tmp_path / target / "processor_config.json").read_text())["video_processor"]
        assert written["font"] == "given.ttf" and written["draw_on_frames"]
    (tmp_path / "second" / "given.ttf").unlink()
    with pytest.raises(ValueError, match="^model '.*second': expected the file given.ttf of the font"):
        load_processor(str(tmp_path / "second"))


@pytest.mark.filterwarnings("ignore:Passing `min_pixels`")
def test_pixel_budget_reaches_the_image_processor(tiny_dir):
    small = load_processor(tiny_dir, min_pixels=28 * 28, max_pixels=56 * 56)
    assert encode_prompt(small, ask(image(224, 224))).placeholders == {small.image_token_id: [4]}


@pytest.mark.filterwarnings("ignore:Passing `min_pixels`")
def test_an_option_that_an_image_processor_does_not_have_is_named(tiny_dir, tmp_path):
    """transformers ignores it, and the images stay as large as they were."""
    with pytest.raises(
        ValueError, match="^image processor options: .* of Qwen2VLImageProcessor.*max_pixels.*, got 'max_pixel'"
    ):
        load_processor(tiny_dir, min_pixels=28 * 28, max_pixel=56 * 56)
    glm = family_processors.processor("glm4v")
    for part in (glm, family_processors.model("glm4v").config):
        part.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="^image processor options: .* of Glm4vImageProcessor.*size.*, got 'max_pixels'"
    ):
        load_processor(str(tmp_path), max_pixels=56 * 56)
    for longest, tokens in ((32 * 32 * 2, 4), (64 * 64 * 2, 16)):  # in GLM of two frames together
        wide = load_processor(str(tmp_path), size={"shortest_edge": 64, "longest_edge": longest})
        placeholders = encode_prompt(wide, ask(image(224, 224))).placeholders
        assert placeholders == {wide.image_token_id: [tokens * 4]}


@pytest.mark.parametrize("gone", [["processor_config.json"], ["processor_config.json", "chat_template.jinja"]])
def test_directory_without_a_processor(tiny_dir, tmp_path, gone):
    path = tmp_path / "bare"
    shutil.copytree(tiny_dir, path)
    for name in gone:
        (path / name).unlink()
    with pytest.raises(ValueError, match=f"model '{path}': .*processor"):
        load_processor(str(path))


def test_no_model_is_a_value_error_that_names_it(tmp_path):
    (tmp_path / "empty").mkdir()
    for load in (load_processor, load_model):
        for path in (str(tmp_path / "empty"), str(tmp_path / "gone"), "no_such_model_here"):
            with pytest.raises(ValueError, match=f"^model.* '{path}'"):
                load(path)


def test_modelscope_gives_config_processor_and_model(tiny_dir, monkeypatch):
    """`modelscope.snapshot_download` is stood in for: it fetches a model by its name and returns its directory."""
    requested = []

    def snapshot_download(model_id: str) -> str:
        requested.append(model_id)
        if model_id != "owner/tiny":
            raise RuntimeError(f"{model_id} does not exist")
        return tiny_dir

    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(snapshot_download=snapshot_download))
    model_path.cache_clear()
    name = "modelscope:owner/tiny"
    assert model_path(name) == load_config(name).name_or_path == load_model(name).name_or_path == tiny_dir
    assert len({tuple(encode_prompt(load_processor(path), ask(image())).token_ids) for path in (name, tiny_dir)}) == 1
    assert requested == ["owner/tiny"]  # once
    with pytest.raises(ValueError, match="model 'modelscope:owner/gone': owner/gone does not exist"):
        load_model("modelscope:owner/gone")
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ImportError, match=r"^package modelscope: .* pip install -e '\.\[modelscope\]'$"):
        load_processor("modelscope:a/b")
    assert model_path("owner/tiny") == "owner/tiny"


def word_tokenizer(text: str, **_) -> dict:
    """Marks, runs of line ends and words; the id of a token is the number of its text in IDS."""
    found = [*re.finditer(r"<\w+>|\n+|\w+", text)]
    return {"input_ids": [IDS.index(one[0]) for one in found], "offset_mapping": [one.span() for one in found]}


IDS = ["Look", "Done", "<image>", "<i>", "\n", "\n\n", "\n\n\n"]
MARK, PATCH, END, TWO_ENDS, THREE_ENDS = range(2, 7)


@pytest.mark.parametrize(
    ("text", "inserted", "expected"),
    [
        ("Look<image>Done", "<i><i>", [Expansion([PATCH, PATCH])]),
        ("Look<image>\nDone", "<i><i>\n", [Expansion([PATCH, PATCH, TWO_ENDS], before=0, after=1)]),
        (
            "<image>\n<image>Done",
            "\n<i>\n",
            [Expansion([END, PATCH, THREE_ENDS, PATCH, END], after=2), Expansion([])],
        ),
        ("Look<image>Done", "<image><image><image>", [3]),
    ],
)
def test_an_image_has_the_tokens_between_two_boundaries(text, inserted, expected):
    replacements, shift = [], 0
    for mark in re.finditer("<image>", text):
        span = mark.span()
        new_span = (span[0] + shift, span[0] + shift + len(inserted))
        replacements.append({"span": span, "new_span": new_span, "replacement": inserted})
        shift += len(inserted) - len("<image>")
    found = expansions(word_tokenizer, text, replacements, [MARK] * len(replacements))
    assert found == expected
    compact = word_tokenizer(text)["input_ids"]
    assert expand_placeholders(compact, {MARK: found}) == word_tokenizer(text.replace("<image>", inserted))["input_ids"]


def test_a_model_may_be_named_by_a_path(tiny_dir):
    place = Path(tiny_dir)
    assert model_path(place) == load_config(place).name_or_path == load_model(place).name_or_path == tiny_dir
    assert load_value_model(place).name_or_path == tiny_dir
    assert type(load_processor(place)) is type(load_processor(tiny_dir))
    for load in (load_config, load_model, load_processor):
        with pytest.raises(ValueError, match="model: expected a directory that exists .*, got '/gone/model'"):
            load(Path("/gone/model"))


def test_text_model_has_a_tokenizer_and_its_own_class(processor, tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    size = {"vocab_size": 400, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    Qwen2ForCausalLM(Qwen2Config(num_attention_heads=2, num_key_value_heads=1, **size)).save_pretrained(tmp_path)
    processor.tokenizer.save_pretrained(tmp_path)
    tokenizer = load_processor(str(tmp_path))
    assert not hasattr(tokenizer, "image_processor") and len(tokenizer) == len(processor.tokenizer)
    assert isinstance(load_model(str(tmp_path)), Qwen2ForCausalLM)
    assert encode_prompt(tokenizer, ask()).token_ids == encode_prompt(processor, ask()).token_ids


def test_load_model(tiny_dir):
    model = load_model(tiny_dir, dtype=torch.bfloat16)
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert load_model(tiny_dir).dtype == torch.float32
