"""3D RoPE ids of Qwen2.5-Omni and Qwen3-Omni: sound, video, and video with its sound between the frames."""

import importlib
import random
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from rlkit.vlm.naive_rope3d import naive_rope3d_position_ids
from rlkit.vlm.rope3d import Rope3DSpec, rope3d_position_ids, rope3d_spec

IMAGE, VIDEO, AUDIO, VISION_START, VISION_END, AUDIO_START, AUDIO_END = range(90, 97)
IDS = dict(zip("IVAsebd", range(90, 97), strict=True))  # a letter a special token, so that layouts can be strings
OMNI3 = Rope3DSpec(IMAGE, VIDEO, tokens_per_second=13, advance_over_time=True, audio_token_id=AUDIO, whole_times=True)
OMNI2_5 = replace(OMNI3, tokens_per_second=25, shared_brackets=True, whole_times=False)
PACKAGES = {"qwen2_5_omni": OMNI2_5, "qwen3_omni_moe": OMNI3}
PADDINGS = ["left", "right", "none", "holes"]


def ids_of(text: str) -> list[int]:
    return [IDS.get(letter, 1 + i % 50) for i, letter in enumerate(text)]


# ---- golden literals, worked by hand


def golden(text: str, spec: Rope3DSpec, **grids: list) -> tuple[list, int]:
    ids, delta = rope3d_position_ids(
        torch.tensor([ids_of(text)]), **{name: torch.tensor(grid) for name, grid in grids.items()}, spec=spec
    )
    return ids[:, 0].tolist(), int(delta)


@pytest.mark.parametrize("spec", [OMNI2_5, OMNI3])
def test_sound_alone_counts_like_text(spec):
    assert golden("tbAAAdt", spec) == ([list(range(7))] * 3, 0)


def test_golden_video_without_sound():
    """2 frames of 1 x 2, 1 second apart, so 25 ids; the video starts at s = 1 and what follows at 1 + 25 + 1."""
    video = dict(video_grid_thw=[[2, 2, 4]], second_per_grid_ts=[1.0])
    assert golden("sVVVVet", OMNI2_5, **video) == (
        [[0, 1, 1, 26, 26, 27, 28], [0, 1, 1, 1, 1, 27, 28], [0, 1, 2, 1, 2, 27, 28]],
        22,
    )


def test_golden_sound_that_ends_a_video():
    """1 frame of 1 x 2 and 3 pieces of sound; 2.5: both brackets before at 1 and both after at 2 + 3, 3: one by one."""
    video = dict(video_grid_thw=[[1, 2, 4]])
    assert golden("tsbVVAAAdet", OMNI2_5, **video) == (
        [
            [0, 1, 1, 2, 2, 2, 3, 4, 5, 5, 6],
            [0, 1, 1, 2, 2, 2, 3, 4, 5, 5, 6],
            [0, 1, 1, 2, 3, 2, 3, 4, 5, 5, 6],
        ],
        -4,
    )
    assert golden("tsbVVAAAdet", OMNI3, **video) == (
        [
            [0, 1, 2, 3, 3, 3, 4, 5, 6, 7, 8],
            [0, 1, 2, 3, 3, 3, 4, 5, 6, 7, 8],
            [0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 8],
        ],
        -2,
    )


def test_golden_frames_that_end_a_video():
    """2 frames of 1 x 1, 13 ids apart, with 2 pieces of sound between them; what follows starts at s + 13 + 1."""
    video = dict(video_grid_thw=[[2, 2, 2]], second_per_grid_ts=[1.0])
    assert golden("sbVAAVde", OMNI3, **video) == (
        [[0, 1, 2, 2, 3, 15, 16, 17], [0, 1, 2, 2, 3, 2, 16, 17], [0, 1, 2, 2, 3, 2, 16, 17]],
        10,
    )


def test_golden_sound_shorter_than_the_frame_is_wide():
    """1 x 4 tokens at 2..5, then one piece of sound at 2: it is the last, so what follows starts at 3."""
    ids, delta = golden("sbVVVVAdet", OMNI3, video_grid_thw=[[1, 2, 8]])
    assert ids[2] == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5] and delta == -4


@pytest.mark.parametrize(("text", "time"), [("VA", [0, 0]), ("bVAd", [0, 1, 1, 2]), ("sIbVA", [0, 1, 2, 3, 3])])
def test_only_two_text_tokens_share_an_id(text, time):
    """Fewer than two before a video with sound, or after it: no prompt of Qwen-Omni, but no id below 0 either."""
    grids = dict(video_grid_thw=[[1, 2, 2]]) | (dict(image_grid_thw=[[1, 2, 2]]) if "I" in text else {})
    assert golden(text, OMNI2_5, **grids)[0] == [time] * 3


# ---- random layouts, expanded by the processors of transformers


@dataclass
class Layout:
    rows: list[str] = field(default_factory=list)
    images: list[list[int]] = field(default_factory=list)
    videos: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sounds: list[int] = field(default_factory=list)  # lengths before the audio encoder

    def grids(self) -> dict[str, Tensor]:
        found = dict(image_grid_thw=torch.tensor(self.images), video_grid_thw=torch.tensor(self.videos))
        if self.videos:
            found["second_per_grid_ts"] = torch.tensor(self.seconds)
        return {name: grid for name, grid in found.items() if len(grid)}


def omni(package: str, tokens_per_second: int) -> tuple:
    """(the class that owns `get_rope_index` with a configuration alone, what expands placeholders, sound lengths)."""
    import transformers

    config = transformers.AutoConfig.for_model(f"{package}_thinker")
    config.image_token_id, config.video_token_id, config.audio_token_id = IMAGE, VIDEO, AUDIO
    config.vision_start_token_id, config.audio_start_token_id = VISION_START, AUDIO_START
    config.position_id_per_seconds = tokens_per_second
    modeling, processing = (
        importlib.import_module(f"transformers.models.{package}.{part}_{package}")
        for part in ("modeling", "processing")
    )
    name = "Qwen2_5Omni" if package == "qwen2_5_omni" else "Qwen3OmniMoe"
    model_class = getattr(modeling, f"{name}PreTrainedModelForConditionalGeneration")
    processor = getattr(processing, f"{name}Processor")
    model = model_class.__new__(model_class)
    model.config, model.spatial_merge_size = config, 2
    merge = SimpleNamespace(merge_size=2)
    words = ("image_token", "video_token", "audio_token")
    words += ("vision_bos_token", "vision_eos_token", "audio_bos_token", "audio_eos_token")
    parts = SimpleNamespace(image_processor=merge, video_processor=merge, **dict(zip(words, IDS, strict=True)))
    parts.get_chunked_index = partial(processor.get_chunked_index, parts)
    expand = partial(
        processor.replace_multimodal_special_tokens, parts,
        position_id_per_seconds=tokens_per_second, seconds_per_chunk=getattr(config, "seconds_per_chunk", 2),
    )  # fmt: skip

    def pieces(sound: int) -> int:
        if package == "qwen2_5_omni":
            return ((sound - 1) // 2 + 1 - 2) // 2 + 1
        return int(modeling._get_feat_extract_output_lengths(torch.tensor(sound), config.audio_config.n_window))

    return model, expand, pieces


def rounded_alike(t: int, seconds: float, rate: int) -> bool:
    """Does the processor (float64) find every frame at the id that the model (float32) does?"""
    second = torch.tensor(seconds)
    return (torch.arange(t) * second * rate).long().tolist() == [int(f * float(second) * rate) for f in range(t)]


def random_layout(rng: random.Random, package: str, with_sound: bool, expand, pieces, rate: int) -> Layout:
    layout, rows = Layout(), []
    uneven = [0.1, 2 / 3, 1.5, 2 / 23.976, 10 / 3, rng.random()]
    for _ in range(rng.randint(1, 4)):
        row = "t" * rng.randint(2, 5)
        for kind in rng.choices(["sIe", "sVe", "bAd"], k=rng.choice([0, 1, 2, 4])):
            row += kind + "t" * rng.choice([0, 0, 1, 3])
            h, w = 2 * rng.randint(1, 4), 2 * rng.randint(1, 4)
            if kind == "sIe":
                layout.images.append([rng.choice([1, 1, 1, 2]), h, w])
            if kind == "sVe":
                t = rng.choice([1, 2, 3, 8])
                layout.videos.append([t, h, w])
                whole = [1.0, 2.0, 4.0, *[0.25, 0.5] * (rate == 16)]
                seconds = rng.choice(whole if package == "qwen3_omni_moe" else whole + uneven)
                if with_sound and not rounded_alike(t, seconds, rate):
                    seconds = 1.0
                layout.seconds.append(float(torch.tensor(seconds)))
            if kind == "bAd" or kind == "sVe" and with_sound:
                layout.sounds.append(rng.choice([3, 9, 30, 100, 207, 640]))
        rows.append(row)
    layout.rows = expand(
        rows, iter([pieces(sound) for sound in layout.sounds]), iter(np.array(layout.images)),
        iter(np.array(layout.videos)), iter(layout.seconds), use_audio_in_video=with_sound,
    )  # fmt: skip
    return layout


def padded(rows: list[list[int]], padding: str, rng: random.Random) -> tuple[Tensor, Tensor]:
    """[B, T] tokens and a mask; padding holds placeholders too, which must not count."""
    width = max(map(len, rows)) + (0 if padding == "none" else rng.randint(0, 5))
    tokens, mask = [], []
    for row in rows:
        fill = width - len(row)
        if padding == "none":
            row, fill = row + [3] * fill, 0
        holes = {"left": range(fill), "right": range(len(row), width)}.get(padding) or rng.sample(range(width), fill)
        junk, attended = iter(rng.choices([0, IMAGE, VIDEO, AUDIO, 3], k=width)), iter(row)
        tokens.append([next(junk if i in holes else attended) for i in range(width)])
        mask.append([int(i not in holes) for i in range(width)])
    return torch.tensor(tokens), torch.tensor(mask)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("with_sound", [False, True])
@pytest.mark.parametrize("package", PACKAGES)
def test_rope3d_equals_transformers(package, with_sound, padding):
    """On attended tokens: elsewhere transformers has 1 or 0, and ours are 0. It cannot do a row without any of them."""
    rng = random.Random(f"{package} {with_sound} {padding}")
    for rate in (13, 16, 25):
        model, expand, pieces = omni(package, rate)
        spec = rope3d_spec(model.config)
        for _ in range(20):
            layout = random_layout(rng, package, with_sound, expand, pieces, rate)
            rows, real = [ids_of(row) for row in layout.rows], [True] * len(layout.rows)
            if padding != "none" and rng.random() < 0.3:
                empty = rng.randint(0, len(rows))
                rows.insert(empty, [])
                real.insert(empty, False)
            tokens, mask = padded(rows, padding, rng)
            grids = layout.grids()
            theirs = {name: grids.get(name) for name in ("image_grid_thw", "video_grid_thw")}
            expected, expected_delta = model.get_rope_index(
                tokens[real], attention_mask=mask[real], use_audio_in_video=with_sound,
                audio_seqlens=torch.tensor(layout.sounds), second_per_grids=grids.get("second_per_grid_ts"), **theirs,
            )  # fmt: skip
            if "second_per_grid_ts" in grids and rng.random() < 0.5:
                grids["second_per_grid_ts"] = layout.seconds
            ids, delta = rope3d_position_ids(tokens, None if padding == "none" else mask, **grids, spec=spec)
            keep = mask[real].bool()
            assert torch.equal(ids[:, real][:, keep].to(expected.dtype), expected[:, keep]), layout
            assert torch.equal(delta[real].to(expected_delta.dtype), expected_delta.squeeze(1)), layout
            assert ids[:, mask == 0].abs().sum() == 0 and delta[~torch.tensor(real)].abs().sum() == 0
            assert ids.dtype == delta.dtype == torch.long
            naive = naive_rope3d_position_ids(tokens, None if padding == "none" else mask, **grids, spec=spec)
            assert torch.equal(naive[0], ids) and torch.equal(naive[1], delta), layout


@pytest.mark.parametrize("spec", [OMNI2_5, OMNI3])
def test_naive_loops_on_layouts_without_a_processor(spec):
    """Letters in any order: sound beside images, videos beside each other, brackets that are missing."""
    rng = random.Random(0)
    for _ in range(200):
        row, videos = "", []
        for part in rng.choices("tVIA", k=rng.randint(1, 8)):
            row += {"V": "VAVVAV", "I": "I", "A": "A" * rng.randint(1, 3), "t": "t"}[part]
            videos += [[2, 2, 4]] * (part == "V")
        if "I" in row:
            images = dict(image_grid_thw=torch.tensor([[1, 2, 2]] * row.count("I")))
        grids = (images if "I" in row else {}) | (dict(video_grid_thw=torch.tensor(videos)) if videos else {})
        tokens = torch.tensor([ids_of(row)])
        got = rope3d_position_ids(tokens, **grids, spec=spec)
        naive = naive_rope3d_position_ids(tokens, **grids, spec=spec)
        assert torch.equal(naive[0], got[0]) and torch.equal(naive[1], got[1]), row


def test_order_of_the_tokens_decides():
    """Frame 3 is at 3 * float32(10 / 3) * 13 = 130 in float32, where a chunk of sound starts, and below it in float64.

    So three tokens that the processor of Qwen2.5-Omni puts before a chunk of sound are behind it to the model, and it
    gives them the ids of pieces of sound 104 to 106, and those the ids of others. Ours go by what the tokens are.
    """
    model, expand, _ = omni("qwen2_5_omni", 13)
    seconds, video = torch.tensor([10 / 3]), torch.tensor([[4, 4, 4]])
    (row,) = expand(
        ["sVe"], iter([150]), iter([]), iter(video.numpy()), iter(seconds.tolist()), use_audio_in_video=True
    )
    tokens, spec = torch.tensor([ids_of(row)]), rope3d_spec(model.config)
    ids = rope3d_position_ids(tokens, video_grid_thw=video, second_per_grid_ts=seconds, spec=spec)[0][0]
    assert ids[tokens == VIDEO].tolist() == [1 + time for time in (0, 43, 86, 130) for _ in range(4)]
    assert ids[tokens == AUDIO].tolist() == [1 + k for k in range(150)]
    theirs, _ = model.get_rope_index(tokens, None, video, torch.ones_like(tokens), True, torch.tensor([600]), seconds)
    assert theirs[0][tokens == VIDEO].tolist()[-4:] == [1 + 130, 1 + 104, 1 + 105, 1 + 106]


# ---- specs and errors


@pytest.mark.parametrize("package", PACKAGES)
def test_spec_of_the_whole_model_and_of_its_thinker(package):
    model, *_ = omni(package, PACKAGES[package].tokens_per_second)
    expected = replace(PACKAGES[package], vision_start_token_id=VISION_START)
    assert rope3d_spec(model.config) == expected
    assert rope3d_spec(SimpleNamespace(model_type=package, thinker_config=model.config)) == expected


@pytest.mark.parametrize("spec", [OMNI2_5, OMNI3])
def test_nothing_synchronises(spec):
    grids = dict(image_grid_thw=torch.tensor([[1, 4, 4]]), video_grid_thw=torch.tensor([[2, 4, 4]]))
    grids = {name: grid.to("meta") for name, grid in grids.items()}
    tokens = torch.full((3, 16), 7, device="meta")
    ids, delta = rope3d_position_ids(tokens, tokens > 0, **grids, second_per_grid_ts=[2.0], spec=spec)
    assert ids.shape == (3, 3, 16) and delta.shape == (3,) and ids.device.type == "meta"


@pytest.mark.parametrize("spec", [OMNI2_5, OMNI3])
@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 0)])
def test_empty_batches(spec, shape):
    ids, delta = rope3d_position_ids(torch.zeros(shape, dtype=torch.long), spec=spec)
    assert ids.shape == (3, *shape) and delta.tolist() == [0] * shape[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("spec", [OMNI2_5, OMNI3])
def test_nothing_synchronises_on_cuda(spec):
    rows = [ids_of("tsbVVAAAVVAdettsIIIIet"), ids_of("ttsVVVVetbAAdsbVAAde")]
    tokens, mask = padded(rows, "left", random.Random(0))
    grids = dict(image_grid_thw=torch.tensor([[1, 4, 4]]), second_per_grid_ts=[1.0, 2.0, 1.0])
    videos = torch.tensor([[2, 2, 4], [2, 2, 4], [1, 2, 2]])
    expected = rope3d_position_ids(tokens, mask, video_grid_thw=videos, **grids, spec=spec)
    tokens, mask, videos = tokens.cuda(), mask.cuda(), videos.cuda()
    grids["image_grid_thw"] = grids["image_grid_thw"].cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = rope3d_position_ids(tokens, mask, video_grid_thw=videos, **grids, spec=spec)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got[0].cpu(), expected[0]) and torch.equal(got[1].cpu(), expected[1])


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        ([2.0, 0.5], "expected seconds that times 13 ids a second are whole .* got 0.5 s in video 1"),
        (torch.tensor([2 / 13, 1.0]), "got 0.153846 s in video 0"),
        ([1.0, float("nan")], "got nan s in video 1"),
        (torch.ones(2, device="meta"), "expected floats or a tensor on the CPU .*, got one on meta"),
        ([1.0], r"expected \[2\], one per row of video_grid_thw, got \[1\]"),
    ],
)
def test_times_between_whole_ids_are_refused(seconds, message):
    """Qwen3-Omni puts them where they are, 6.5 say, and what follows too."""
    tokens, videos = torch.tensor([ids_of("sVesVe")]), torch.tensor([[1, 2, 2]] * 2)
    with pytest.raises(ValueError, match=f"second_per_grid_ts: .*{message}"):
        rope3d_position_ids(tokens, video_grid_thw=videos, second_per_grid_ts=seconds, spec=OMNI3)


def test_video_tokens_that_do_not_match_are_named():
    with pytest.raises(ValueError, match="input_ids: expected 2 attended video tokens for the 1 grids .* got 3"):
        rope3d_position_ids(torch.tensor([ids_of("sbVVAVAde")]), video_grid_thw=torch.tensor([[1, 2, 4]]), spec=OMNI3)
