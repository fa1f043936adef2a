import importlib
import random
import re
import sys
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from einops import rearrange
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlkit.data.packing import unpad, unpad_like
from rlkit.vlm.naive_rope3d import naive_rope3d_position_ids
from rlkit.vlm.rope3d import Rope3DSpec, rope3d_position_ids, rope3d_spec

sys.path.insert(0, str(Path(__file__).parent))

from rope3d_families import (  # noqa: E402
    END,
    ERNIE,
    GLM,
    IMAGE,
    QWEN2,
    QWEN2_5,
    QWEN3,
    SPECS,
    START,
    VIDEO,
    VIDEO_END,
    VIDEO_START,
    VISION_TYPES,
    transformers_model,
)

each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
PADDINGS = ["left", "right", "none", "holes"]


# ---- golden literals, worked by hand


def test_golden_text_image_text():
    tokens = torch.tensor([[7, START, IMAGE, IMAGE, IMAGE, IMAGE, END, 8]])
    ids, delta = rope3d_position_ids(tokens, image_grid_thw=torch.tensor([[1, 4, 4]]), spec=QWEN2)
    assert ids[:, 0].tolist() == [
        [0, 1, 2, 2, 2, 2, 4, 5],
        [0, 1, 2, 2, 3, 3, 4, 5],
        [0, 1, 2, 3, 2, 3, 4, 5],
    ]
    assert delta.tolist() == [-2]  # largest id 5, 8 tokens
    assert ids.dtype == delta.dtype == torch.long


@pytest.mark.parametrize(("advance_over_time", "after", "delta"), [(False, [3, 4], -1), (True, [8, 9], 1)])
def test_golden_absolute_time_video(advance_over_time, after, delta):
    """3 frames of 1 x 2, 2 ids a second, 1.5 seconds a frame: 3 ids a frame."""
    spec = replace(QWEN2_5, advance_over_time=advance_over_time)
    tokens = torch.tensor([[START, *[VIDEO] * 6, END, 8]])
    grids = dict(video_grid_thw=torch.tensor([[3, 2, 4]]), second_per_grid_ts=[1.5])
    ids, got = rope3d_position_ids(tokens, **grids, spec=spec)
    assert ids[:, 0].tolist() == [
        [0, 1, 1, 4, 4, 7, 7, *after],
        [0, 1, 1, 1, 1, 1, 1, *after],
        [0, 1, 2, 1, 2, 1, 2, *after],
    ]
    assert got.tolist() == [delta]


@pytest.mark.parametrize(
    ("seconds", "last"),
    [([10 / 3], 250), (torch.tensor([10 / 3]), 249), (torch.tensor([10 / 3]).double(), 249), (torch.tensor([4]), 300)],
)
def test_time_is_floored_in_the_dtype_of_transformers(seconds, last):
    """25 ids a second, a frame every 10/3 seconds: frame 3 is at 250, or in another dtype just below it."""
    spec, tokens = replace(QWEN2_5, tokens_per_second=25), torch.full((1, 4), VIDEO)
    grid = torch.tensor([[4, 2, 2]])
    ids, _ = rope3d_position_ids(tokens, video_grid_thw=grid, second_per_grid_ts=seconds, spec=spec)
    assert ids[0, 0, -1] == last
    model = transformers_model("qwen2_5_vl", tokens_per_second=25)
    types = torch.full_like(tokens, 2)
    expected, _ = model.get_rope_index(
        tokens, mm_token_type_ids=types, video_grid_thw=grid, second_per_grid_ts=seconds, attention_mask=tokens > 0
    )
    assert torch.equal(ids, expected)


def test_golden_framewise_video():
    tokens = torch.tensor([[5, START, VIDEO, VIDEO, END, 6, START, VIDEO, VIDEO, END]])
    ids, delta = rope3d_position_ids(tokens, video_grid_thw=torch.tensor([[2, 2, 4]]), spec=QWEN3)
    assert ids[:, 0].tolist() == [
        [0, 1, 2, 2, 4, 5, 6, 7, 7, 9],
        [0, 1, 2, 2, 4, 5, 6, 7, 7, 9],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
    ]
    assert delta.tolist() == [0]


def test_golden_glm_image():
    """h x w = 4 x 6 patches are 2 x 3 tokens, from s = 2 on; the next id is 2 + max(2, 3) = 5."""
    tokens = torch.tensor([[7, START, *[IMAGE] * 6, END, 8]])
    ids, delta = rope3d_position_ids(tokens, image_grid_thw=torch.tensor([[1, 4, 6]]), spec=GLM)
    assert ids[:, 0].tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert delta.tolist() == [-3]  # largest id 6, so 7 ids for 10 tokens


def test_golden_glm_video_before_an_image():
    """2 frames of 1 x 2 tokens, each in brackets and with a timestamp (40, 41) behind it; then an image of 1 x 1.

    Frame 0 starts at s = 2 and is max(1, 2) = 2 wide: its bracket closes at 4, 5 is the timestamp, 6 a bracket, frame 1
    starts at 7, its bracket closes at 9. The image has the id of its only token: 14.
    """
    frame = [START, IMAGE, IMAGE, END]
    tokens = torch.tensor([[VIDEO_START, *frame, 40, *frame, 41, VIDEO_END, 9, START, IMAGE, END]])
    grids = dict(video_grid_thw=torch.tensor([[2, 2, 4]]), image_grid_thw=torch.tensor([[1, 2, 2]]))
    ids, delta = rope3d_position_ids(tokens, **grids, spec=GLM)
    assert ids[:, 0].tolist() == [
        [0, 1, 2, 2, 4, 5, 6, 7, 7, 9, 10, 11, 12, 13, 14, 15],
        [0, 1, 2, 2, 4, 5, 6, 7, 7, 9, 10, 11, 12, 13, 14, 15],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
    ]
    assert delta.tolist() == [0]


def test_golden_merged_frames():
    """4 frames of 1 x 2 are 2 frames of tokens, 1 apart; the next id is s + max(1, 2) = 1 + 2."""
    tokens = torch.tensor([[START, *[VIDEO] * 4, END]])
    ids, delta = rope3d_position_ids(tokens, video_grid_thw=torch.tensor([[4, 2, 4]]), spec=ERNIE)
    assert ids[:, 0].tolist() == [[0, 1, 1, 2, 2, 3], [0, 1, 1, 1, 1, 3], [0, 1, 2, 1, 2, 3]]
    assert delta.tolist() == [-2]


@pytest.mark.parametrize(("t", "h", "w"), [(7, 301, 499), (1, 1, 300_001), (1, 300_001, 1), (90_001, 3, 1)])
def test_large_grid(t, h, w):
    """A million tokens: rows and columns of float32 quotients are those of integers."""
    tokens, grid = torch.full((1, t * h * w), VIDEO), torch.tensor([[t, 2 * h, 2 * w]])
    ids, _ = rope3d_position_ids(tokens, video_grid_thw=grid, spec=QWEN2)
    expected = torch.cartesian_prod(torch.arange(t), torch.arange(h), torch.arange(w))
    assert torch.equal(ids[:, 0], expected.T)


def test_left_pad_position_ids():
    tokens = torch.tensor([[0, 0, 7, IMAGE, 8], [1, 2, 3, 4, 5], [0, 0, 0, 0, 9]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
    ids, delta = rope3d_position_ids(tokens, mask, image_grid_thw=torch.tensor([[1, 2, 2]]), spec=QWEN2)
    expected = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]])
    assert torch.equal(ids, expected.expand(3, 3, 5))
    assert delta.tolist() == [0, 0, 0]


def test_row_with_nothing_attended_and_empty_batches():
    tokens = torch.tensor([[1, 2], [IMAGE, 4]])
    ids, delta = rope3d_position_ids(tokens, torch.zeros(2, 2, dtype=torch.bool), spec=QWEN2)
    assert ids.tolist() == [[[0, 0], [0, 0]]] * 3 and delta.tolist() == [0, 0]
    for shape in [(0, 4), (2, 0), (0, 0)]:
        ids, delta = rope3d_position_ids(torch.zeros(shape, dtype=torch.long), spec=QWEN2_5)
        assert ids.shape == (3, *shape) and delta.tolist() == [0] * shape[0]


# ---- random layouts


@dataclass
class Layout:
    """Rows of tokens with their grids; unless `adjacent`, every visual run is wrapped in text, as in a Qwen prompt."""

    rows: list[list[int]] = field(default_factory=list)
    images: list[list[int]] = field(default_factory=list)
    videos: list[list[int]] = field(default_factory=list)


def random_layout(rng: random.Random, spec: Rope3DSpec, adjacent: bool = False) -> Layout:
    layout = Layout()
    of_video = VIDEO if spec.video_start_token_id is None else IMAGE

    def text() -> list[int]:
        return rng.choices(range(1, 50), k=rng.choice([0, 0, 1, 2, 7]))

    def wrap(run: list[int]) -> list[int]:
        return run if adjacent else [START, *run, END]

    for _ in range(rng.randint(1, 4)):
        row = rng.choices(range(1, 50), k=rng.randint(1, 5))
        for kind in rng.choices(["image", "video"], weights=[2, 1], k=rng.choice([0, 1, 2, 4])):
            h, w = rng.randint(1, 4), rng.randint(1, 4)
            if kind == "image":
                t = rng.choice([1, 1, 1, 2])
                layout.images.append([t, 2 * h, 2 * w])
                row += wrap([IMAGE] * (t * h * w))
            else:
                t = rng.choice([1, 2, 3, 8])
                layout.videos.append([t * spec.temporal_merge_size, 2 * h, 2 * w])
                row += [VIDEO_START] * (of_video == IMAGE)
                for _ in range(t if spec.framewise_video else 1):
                    row += text() + wrap([of_video] * (h * w if spec.framewise_video else t * h * w))
                row += [VIDEO_END] * (of_video == IMAGE)
            row += text()
        layout.rows.append(row)
    return layout


def padded(layout: Layout, padding: str, rng: random.Random) -> tuple[Tensor, Tensor | None]:
    """[B, T] tokens and a mask. Padding holds placeholder ids too: what is not attended must not count."""
    rows, masks = [], []
    width = max(map(len, layout.rows)) + (0 if padding == "none" else rng.randint(0, 5))
    for row in layout.rows:
        fill = width - len(row)
        junk = rng.choices([0, IMAGE, VIDEO, VIDEO_START, VIDEO_END, 3], k=fill)
        if padding == "none":
            rows.append(row + [3] * fill)
            masks.append([1] * width)
        elif padding == "holes":
            where = set(rng.sample(range(width), fill))
            attended, holes = iter(row), iter(junk)
            rows.append([next(holes) if i in where else next(attended) for i in range(width)])
            masks.append([int(i not in where) for i in range(width)])
        else:
            rows.append(junk + row if padding == "left" else row + junk)
            masks.append([0] * fill + [1] * len(row) if padding == "left" else [1] * len(row) + [0] * fill)
    mask = torch.tensor(masks)
    return torch.tensor(rows), None if padding == "none" else mask if rng.random() < 0.5 else mask.bool()


def grid_tensor(grids: list[list[int]]) -> Tensor | None:
    return torch.tensor(grids) if grids else None


def random_seconds(rng: random.Random, n: int) -> Tensor | list[float] | None:
    some = [0.5, 1.0, 10 / 3, 2 / 3, 0.1, 2 / 1.7, 2 / 23.976, 2 / 29.97, rng.random()]
    seconds = rng.choices(some, k=n)
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    return rng.choice([None, seconds, *(torch.tensor(seconds, dtype=dtype) for dtype in dtypes)])


def kinds(row: list[int], spec: Rope3DSpec) -> list[int]:
    """Of each token, 0 text, 1 image, 2 video: `mm_token_type_ids`."""
    if spec.video_start_token_id is None:
        return [{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in row]
    inside, found = 0, []
    for token in row:
        inside += (token == VIDEO_START) - (token == VIDEO_END)
        found.append((1 + (inside > 0)) * (token == IMAGE))
    return found


@cache
def glm_processor(model_type: str):
    """The one that tells GLM's frames from images, where transformers has it under this name."""
    name = "glm46v" if model_type in ("glm46v", "glm_ocr") else "glm4v"
    module = importlib.import_module(f"transformers.models.{name}.processing_{name}")
    processor = next(x for key, x in vars(module).items() if re.fullmatch(r"Glm4\w*Processor", key))
    ids = SimpleNamespace(image_token_id=IMAGE, video_start_id=VIDEO_START, video_end_id=VIDEO_END)
    return lambda rows: processor.create_mm_token_type_ids(ids, rows)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("model_type", VISION_TYPES)
def test_rope3d_equals_transformers(model_type, padding):
    rng = random.Random(f"{model_type} {padding}")
    layouts = 20 if model_type == "qwen2_5_vl" else 7  # of each rate, which the other families do not read
    for tokens_per_second in (2, 4, 25):
        model = transformers_model(model_type, tokens_per_second)
        spec = rope3d_spec(model.config)
        for _ in range(layouts):
            layout = random_layout(rng, spec)
            tokens, mask = padded(layout, padding, rng)
            grids = dict(image_grid_thw=grid_tensor(layout.images), video_grid_thw=grid_tensor(layout.videos))
            if layout.videos and model_type == "qwen2_5_vl":
                grids["second_per_grid_ts"] = random_seconds(rng, len(layout.videos))
            kept = tokens if mask is None else tokens * mask
            types = [kinds(row, spec) for row in kept.tolist()]
            if spec.video_start_token_id is not None:
                assert types == glm_processor(model_type)(kept.tolist())
            expected = model.get_rope_index(tokens, mm_token_type_ids=torch.tensor(types), attention_mask=mask, **grids)
            ids, delta = rope3d_position_ids(tokens, mask, **grids, spec=spec)
            assert torch.equal(ids, expected[0]), (layout, mask, grids)
            assert torch.equal(delta, expected[1].squeeze(1))
            naive = naive_rope3d_position_ids(tokens, mask, **grids, spec=spec)
            assert torch.equal(naive[0], ids) and torch.equal(naive[1], delta), (layout, mask, grids)


@each_spec
@pytest.mark.parametrize("advance_over_time", [False, True])
@given(seed=st.integers(0, 2**32), padding=st.sampled_from(["left", "right", "holes"]), adjacent=st.booleans())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_rope3d_equals_the_naive_loops(spec, advance_over_time, seed, padding, adjacent):
    """Also what transformers cannot do: adjacent images, empty rows, and the rule of vLLM."""
    spec, rng = replace(spec, advance_over_time=advance_over_time), random.Random(seed)
    layout = random_layout(rng, spec, adjacent)
    layout.rows.insert(rng.randint(0, len(layout.rows)), [])
    tokens, mask = padded(layout, padding, rng)
    seconds = torch.tensor([rng.choice([0.5, 1.0, 2.5, 1 / 3, 2 / 23.976]) for _ in layout.videos])
    grids = dict(image_grid_thw=grid_tensor(layout.images), video_grid_thw=grid_tensor(layout.videos))
    expected = naive_rope3d_position_ids(tokens, mask, **grids, second_per_grid_ts=seconds, spec=spec)
    got = rope3d_position_ids(tokens, mask, **grids, second_per_grid_ts=seconds, spec=spec)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@each_spec
def test_rope3d_packed_equals_padded(spec):
    rng = random.Random(3)
    for _ in range(20):
        layout = random_layout(rng, spec)
        tokens, mask = padded(layout, "right", rng)
        grids = dict(image_grid_thw=grid_tensor(layout.images), video_grid_thw=grid_tensor(layout.videos))
        ids, _ = rope3d_position_ids(tokens, mask, **grids, spec=spec)
        packed = unpad(tokens, mask)
        got = unpad_like(rearrange(ids, "a b t -> b t a"), packed)

        images, videos, alone = list(layout.images), list(layout.videos), []
        for row in layout.rows:
            grids: dict[str, list] = {"image_grid_thw": [], "video_grid_thw": []}
            for name, kind, rest in (("image_grid_thw", 1, images), ("video_grid_thw", 2, videos)):
                left = kinds(row, spec).count(kind)
                while left:
                    t, h, w = rest.pop(0)
                    left -= t * h * w // 4 // (spec.temporal_merge_size if kind == 2 else 1)
                    grids[name].append([t, h, w])
            row_grids = {name: grid_tensor(grid) for name, grid in grids.items()}
            alone.append(rope3d_position_ids(torch.tensor([row]), **row_grids, spec=spec)[0][:, 0].T)
        assert torch.equal(got, torch.cat(alone))
        assert packed.cu_seqlens.tolist() == [sum(map(len, layout.rows[:b])) for b in range(len(layout.rows) + 1)]


# ---- nothing waits for the accelerator


def _batch(device: str) -> dict:
    grids = dict(
        image_grid_thw=torch.tensor([[1, 4, 4], [1, 2, 4]], device=device),
        video_grid_thw=torch.tensor([[2, 4, 4]], device=device),
    )
    return dict(
        input_ids=torch.full((3, 16), 7, device=device), attention_mask=torch.ones(3, 16, device=device).bool(), **grids
    )


@each_spec
@pytest.mark.parametrize("seconds", [None, [0.5], "tensor"])
def test_nothing_synchronises(spec, seconds):
    """On tensors without data anything that reads a value on the host raises: item, tolist, nonzero, x[mask]."""
    seconds = torch.ones(1, device="meta") if seconds == "tensor" else seconds
    ids, delta = rope3d_position_ids(**_batch("meta"), second_per_grid_ts=seconds, spec=spec)
    assert ids.shape == (3, 3, 16) and delta.shape == (3,) and ids.device.type == "meta"


@pytest.mark.parametrize(
    "read",
    [lambda x: x[0].item(), Tensor.tolist, Tensor.cpu, Tensor.nonzero, lambda x: x[x > 0], torch.repeat_interleave],
)
def test_meta_tensors_cannot_be_read(read):
    """So that the test above can tell."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        read(torch.ones(3, dtype=torch.long, device="meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_spec
def test_nothing_synchronises_on_cuda(spec):
    layout = random_layout(random.Random(2), spec)  # has images and videos
    tokens, mask = padded(layout, "right", random.Random(0))
    grids = dict(image_grid_thw=torch.tensor(layout.images), video_grid_thw=torch.tensor(layout.videos))
    expected = rope3d_position_ids(tokens, mask, **grids, second_per_grid_ts=[1 / 3], spec=spec)
    tokens, mask, grids = tokens.cuda(), mask.cuda(), {name: grid.cuda() for name, grid in grids.items()}
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = rope3d_position_ids(tokens, mask, **grids, second_per_grid_ts=[1 / 3], spec=spec)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got[0].cpu(), expected[0]) and torch.equal(got[1].cpu(), expected[1])
