import random
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from einops import rearrange
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlkit.data.packing import unpad, unpad_like
from rlkit.vlm.rope3d import ROPE3D_MODEL_TYPES, Rope3DSpec, rope3d_position_ids, rope3d_spec

IMAGE, VIDEO, START, END = 90, 91, 92, 93
QWEN2 = Rope3DSpec(IMAGE, VIDEO, START)
QWEN2_5 = replace(QWEN2, tokens_per_second=2)
QWEN3 = replace(QWEN2, framewise_video=True)
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
    model, _ = tiny_model("qwen2_5_vl", tokens_per_second=25)
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


def random_layout(rng: random.Random, framewise: bool, adjacent: bool = False) -> Layout:
    layout = Layout()

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
                layout.videos.append([t, 2 * h, 2 * w])
                for _ in range(t if framewise else 1):
                    row += text() + wrap([VIDEO] * (h * w if framewise else t * h * w))
            row += text()
        layout.rows.append(row)
    return layout


def padded(layout: Layout, padding: str, rng: random.Random) -> tuple[Tensor, Tensor | None]:
    """[B, T] tokens and a mask. Padding holds placeholder ids too: what is not attended must not count."""
    rows, masks = [], []
    width = max(map(len, layout.rows)) + (0 if padding == "none" else rng.randint(0, 5))
    for row in layout.rows:
        fill = width - len(row)
        junk = rng.choices([0, IMAGE, VIDEO, 3], k=fill)
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


def tiny_model(model_type: str, tokens_per_second: int):
    """(the transformers model that owns `get_rope_index`, its config), on the meta device."""
    import transformers
    ids = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
    config = transformers.AutoConfig.for_model(model_type, **ids)
    text, vision = config.text_config, config.vision_config
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    sizes |= dict(vocab_size=100, layer_types=["full_attention"], num_experts=1, moe_intermediate_size=8)
    for name, value in sizes.items():
        if hasattr(text, name):
            setattr(text, name, value)
    for name, value in dict(depth=1, hidden_size=8, embed_dim=8, num_heads=1, intermediate_size=8).items():
        if hasattr(vision, name):
            setattr(vision, name, value)
    if hasattr(vision, "deepstack_visual_indexes"):
        vision.deepstack_visual_indexes = [0]
    if hasattr(vision, "tokens_per_second"):
        vision.tokens_per_second = tokens_per_second
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config), config


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("model_type", ROPE3D_MODEL_TYPES)
def test_rope3d_equals_transformers(model_type, padding):
    rng = random.Random(f"{model_type} {padding}")
    for tokens_per_second in (2, 4, 25):
        model, config = tiny_model(model_type, tokens_per_second)
        spec = rope3d_spec(config)
        for _ in range(20):
            layout = random_layout(rng, spec.framewise_video)
            tokens, mask = padded(layout, padding, rng)
            grids = dict(image_grid_thw=grid_tensor(layout.images), video_grid_thw=grid_tensor(layout.videos))
            if layout.videos and model_type == "qwen2_5_vl":
                grids["second_per_grid_ts"] = random_seconds(rng, len(layout.videos))
            types = (tokens == IMAGE) * 1 + (tokens == VIDEO) * 2
            expected = model.get_rope_index(tokens, mm_token_type_ids=types, attention_mask=mask, **grids)
            ids, delta = rope3d_position_ids(tokens, mask, **grids, spec=spec)
            assert torch.equal(ids, expected[0]), (layout, mask, grids)
            assert torch.equal(delta, expected[1].squeeze(1))


def walk(tokens, mask, images, videos, seconds, spec):
    """Oracle: token by token, one grid after the other, all in Python integers and float32 tensors."""
    images, videos = iter(images), iter(zip(videos, seconds, strict=True))
    all_ids, deltas = [], []
    for row, attended in zip(tokens.tolist(), mask.tolist(), strict=True):
        here, ids, pending, left = 0, [], [], 0
        for token, keep in zip(row, attended, strict=True):
            if not keep:
                ids.append((0, 0, 0))
                continue
            if token not in (IMAGE, VIDEO):
                ids.append((here, here, here))
                here += 1
                continue
            if not pending and not left:
                (t, h, w), step = (next(images), 1) if token == IMAGE else next(videos)
                left = t
            if not pending:  # a new frame
                if left == t or (spec.framewise_video and token == VIDEO):
                    start, last = here, 0
                index = 0 if spec.framewise_video and token == VIDEO else t - left
                time = int(torch.tensor(float(index)) * torch.tensor(float(step)))
                pending = [(start + time, start + y, start + x) for y in range(h // 2) for x in range(w // 2)]
                last = max(last, time)
                here = start + max(h // 2, w // 2)
                if spec.advance_over_time:
                    here = max(here, start + last + 1)
                left -= 1
            ids.append(pending.pop(0))
        all_ids.append(ids)
        real = [max(i) for i, keep in zip(ids, attended, strict=True) if keep]
        deltas.append(max(real) + 1 - len(real) if real else 0)
    return rearrange(torch.tensor(all_ids), "b t a -> a b t"), torch.tensor(deltas)


@pytest.mark.parametrize("spec", [QWEN2, QWEN2_5, QWEN3], ids=["qwen2", "qwen2_5", "qwen3"])
@pytest.mark.parametrize("advance_over_time", [False, True])
@given(seed=st.integers(0, 2**32), padding=st.sampled_from(["left", "right", "holes"]), adjacent=st.booleans())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_rope3d_equals_a_walk_over_the_tokens(spec, advance_over_time, seed, padding, adjacent):
    """Also what transformers cannot do: adjacent images, empty rows, and the rule of vLLM."""
    spec, rng = replace(spec, advance_over_time=advance_over_time), random.Random(seed)
    layout = random_layout(rng, spec.framewise_video, adjacent)
    layout.rows.insert(rng.randint(0, len(layout.rows)), [])
    tokens, mask = padded(layout, padding, rng)
    seconds = torch.tensor([rng.choice([0.5, 1.0, 2.5, 1 / 3, 2 / 23.976]) for _ in layout.videos])
    steps = (seconds * spec.tokens_per_second).tolist() if spec.tokens_per_second else [1] * len(layout.videos)
    expected = walk(tokens, mask, layout.images, layout.videos, steps, spec)
    grids = dict(image_grid_thw=grid_tensor(layout.images), video_grid_thw=grid_tensor(layout.videos))
    got = rope3d_position_ids(tokens, mask, **grids, second_per_grid_ts=seconds, spec=spec)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("spec", [QWEN2, QWEN2_5, QWEN3], ids=["qwen2", "qwen2_5", "qwen3"])
def test_rope3d_packed_equals_padded(spec):
    rng = random.Random(3)
    for _ in range(20):
        layout = random_layout(rng, spec.framewise_video)
        tokens, mask = padded(layout, "right", rng)
        grids = dict(image_grid_thw=grid_tensor(layout.images), video_grid_thw=grid_tensor(layout.videos))
        ids, _ = rope3d_position_ids(tokens, mask, **grids, spec=spec)
        packed = unpad(tokens, mask)
        got = unpad_like(rearrange(ids, "a b t -> b t a"), packed)

        images, videos, alone = list(layout.images), list(layout.videos), []
        for row in layout.rows:
            mine: dict[str, list] = {"image_grid_thw": [], "video_grid_thw": []}
            for name, token, rest in (("image_grid_thw", IMAGE, images), ("video_grid_thw", VIDEO, videos)):
                left = row.count(token)
                while left:
                    t, h, w = rest.pop(0)
                    left -= t * h * w // 4
                    mine[name].append([t, h, w])
            row_grids = {name: grid_tensor(grid) for name, grid in mine.items()}
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


@pytest.mark.parametrize("spec", [QWEN2, QWEN2_5, QWEN3], ids=["qwen2", "qwen2_5", "qwen3"])
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
@pytest.mark.parametrize("spec", [QWEN2, QWEN2_5, QWEN3], ids=["qwen2", "qwen2_5", "qwen3"])
def test_nothing_synchronises_on_cuda(spec):
    layout = Layout([[1, *[IMAGE] * 4, 2], [3, *[VIDEO] * 8, 4]], [[1, 4, 4]], [[2, 4, 4]])
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


# ---- specs and errors


def test_spec_of_each_family():
    for model_type in ROPE3D_MODEL_TYPES:
        _, config = tiny_model(model_type, tokens_per_second=4)
        seconds = 4 if model_type == "qwen2_5_vl" else None
        framewise = model_type not in ("qwen2_vl", "qwen2_5_vl")
        assert rope3d_spec(config) == Rope3DSpec(IMAGE, VIDEO, START, 2, seconds, framewise)


@pytest.mark.parametrize("model_type", ["llava", "qwen2_5_vl_text", None])
def test_unknown_family_is_named(model_type):
    with pytest.raises(ValueError, match=f"model_type {model_type!r}; known are qwen2_vl, "):
        rope3d_spec(SimpleNamespace(model_type=model_type))


TOKENS, GRID = torch.tensor([[7, *[IMAGE] * 4, 8]]), torch.tensor([[1, 4, 4]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(input_ids=TOKENS[0]), r"input_ids: expected integer \[B, T\], got torch.int64 \[6\]"),
        (dict(input_ids=TOKENS.float()), r"input_ids: .* got torch.float32 \[1, 6\]"),
        (dict(attention_mask=torch.ones(1, 5)), r"attention_mask: expected \[1, 6\], got \[1, 5\]"),
        (dict(attention_mask=torch.ones(1, 6)), "attention_mask: expected bool or integer, got torch.float32"),
        (dict(image_grid_thw=GRID[0]), r"image_grid_thw: expected integer \[n, 3\] .* got torch.int64 \[3\]"),
        (dict(image_grid_thw=GRID.float()), r"image_grid_thw: .* got torch.float32 \[1, 3\]"),
        (dict(image_grid_thw=torch.tensor([[1, 4, 5]])), r"image_grid_thw: .* merge_size 2 divides, .* \(1, 4, 5\)"),
        (dict(video_grid_thw=torch.tensor([[1, 3, 4]])), r"video_grid_thw: .* merge_size 2 divides"),
        (dict(image_grid_thw=torch.tensor([[1, 4, 6]])), "1 grids stand for 6 tokens, but input_ids has 4 attended"),
        (dict(image_grid_thw=None), "image_grid_thw: .* 0 tokens, but input_ids has 4 attended image"),
        (dict(video_grid_thw=GRID), "video_grid_thw: .* 4 tokens, but input_ids has 0 attended video"),
        (dict(attention_mask=torch.tensor([[1, 1, 1, 0, 1, 1]])), "input_ids has 3 attended image tokens"),
        (
            dict(input_ids=TOKENS.view(2, 3)),
            r"image_grid_thw: .* a grid that begins in row 0 of input_ids \(2 attended image tokens there\)",
        ),
        (dict(second_per_grid_ts=[1.0]), r"second_per_grid_ts: expected \[0\], .* got \[1\]"),
        (dict(second_per_grid_ts=torch.ones(0, 1)), r"second_per_grid_ts: expected \[0\], .* got \[0, 1\]"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        rope3d_position_ids(**(dict(input_ids=TOKENS, image_grid_thw=GRID, spec=QWEN2_5) | change))
