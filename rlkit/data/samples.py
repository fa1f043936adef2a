"""One type for what is sampled, and one for what is trained on.

A `Sample` carries two token tracks. The **expanded** one (`token_ids`) is what the model's forward sees: an image takes
as many placeholder tokens as it has features. The **compact** one (`compact_ids`) has one placeholder an image: what a
sampler with its own image processor (vLLM) is given. They are checked against each other whenever a batch is made.
A prompt is a sample whose mask is all False; a sampler extends it, and text that was sampled is never tokenised again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Row = Mapping[str, Any]
"""A row of a task; see `rlkit.data.tasks`."""

Reward = Callable[[str, Row], float | None]
"""What judges an answer to a row; None means that it could not be judged."""


class Expansion(NamedTuple):
    """What stands in the expanded track for an image whose placeholder is not just repeated: brackets, rows, crops.

    Attributes:
        tokens: all of them.
        before, after: how many compact tokens beside the placeholder they take in, because the tokenizer joins what
            the processor puts there with the text around it (Gemma3's line ends).
    """

    tokens: Sequence[int]
    before: int = 0
    after: int = 0


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence: a prompt, and what has been sampled after it.

    Attributes:
        token_ids: expanded track, prompt and response.
        compact_ids: the same with one placeholder token an image or video.
        mask: True on the tokens that the policy wrote, one entry for each of `token_ids`.
        logprobs: the sampler's log-probability of each of `token_ids`; 0 where `mask` is False.
        vision: what the processor made of this sample's own images (`pixel_values`, `image_grid_thw`, ...).
        placeholders: placeholder token id -> for each image, in order, how often the placeholder stands in the expanded
            track, or the `Expansion` that stands there instead.
        images: the decoded images, for samplers that process them themselves.
        row: the data row that the prompt was made of; rewards read it.
        group_id: the same integer for all samples of one prompt.
        number: of this sample among those of its prompt, from 0; with `group_id` it is the key of the sampler's noise.
        text: the response decoded, for rewards and people; training reads the tokens.
        reward: nan until judged, and when it could not be judged.
        finish_reason: "stop" (an end token) or "length"; of several turns also "turns" or "aborted".
        version: how often the sampler's weights had been updated.
        versions: where weights may arrive while a sample is written: of each of `response_ids`, the weights that wrote
            it; `version` is then the oldest.
        routed_experts: [<= T, layers, K] int16, the experts that the sampler's routers chose for the first of
            `token_ids`, see rlkit.vlm.routers; -1 where that is not known, nor is it of the tokens behind.
    """

    token_ids: list[int]
    compact_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    vision: Mapping[str, Tensor] = field(default_factory=dict)
    placeholders: Mapping[int, Sequence[int | Expansion]] = field(default_factory=dict)
    images: Sequence[Any] = ()
    row: Mapping[str, Any] = field(default_factory=dict)
    group_id: int = 0
    number: int = 0
    text: str = ""
    reward: float = math.nan
    finish_reason: str = ""
    version: int = 0
    versions: Sequence[int] = ()
    routed_experts: Tensor | None = None

    @property
    def response_ids(self) -> list[int]:
        return [token for token, mine in zip(self.token_ids, self.mask, strict=True) if mine]


def prompt_sample(token_ids: Sequence[int], compact_ids: Sequence[int] | None = None, **facts: Any) -> Sample:
    """A sample of which nothing has been sampled yet; without images the two tracks are the same."""
    ids = list(token_ids)
    compact = ids if compact_ids is None else list(compact_ids)
    return Sample(ids, compact, [False] * len(ids), [0.0] * len(ids), **facts)


def append_response(sample: Sample, token_ids: Sequence[int], logprobs: Sequence[float], **facts: Any) -> Sample:
    """The sample with sampled tokens behind it, on both tracks.

    Raises:
        ValueError: a sampled token is an image placeholder: the next forward would look for an image that is not there.
    """
    if len(token_ids) != len(logprobs):
        raise ValueError(f"logprobs: expected one for each sampled token, got {len(logprobs)} for {len(token_ids)}")
    if stray := set(token_ids) & set(sample.placeholders):
        raise ValueError(f"token_ids: sampled the image placeholder {sorted(stray)}; suppress it in the sampler")
    return replace(
        sample,
        token_ids=[*sample.token_ids, *token_ids],
        compact_ids=[*sample.compact_ids, *token_ids],
        mask=[*sample.mask, *[True] * len(token_ids)],
        logprobs=[*sample.logprobs, *logprobs],
        **facts,
    )


def append_observation(sample: Sample, observation: Sample) -> Sample:
    """The sample with what its environment said behind it, on both tracks: tokens that the policy did not write.

    Args:
        observation: its tokens and its own images, as `prompt` makes it.
    """
    both = (sample, observation)
    vision, placeholders = sample.vision, sample.placeholders
    if observation.vision:  # else the very same: rows that answer a prompt share its images
        names = {**sample.vision, **observation.vision}
        apart = int("pixel_attention_mask" in names)  # SmolVLM, Idefics3: [1, images, ...]
        vision = {name: torch.cat([one.vision[name] for one in both if name in one.vision], apart) for name in names}
        kinds = {**sample.placeholders, **observation.placeholders}
        placeholders = {kind: [count for one in both for count in one.placeholders.get(kind, ())] for kind in kinds}
    return replace(
        sample,
        token_ids=[*sample.token_ids, *observation.token_ids],
        compact_ids=[*sample.compact_ids, *observation.compact_ids],
        mask=[*sample.mask, *observation.mask],
        logprobs=[*sample.logprobs, *observation.logprobs],
        vision=vision,
        placeholders=placeholders,
        images=[*sample.images, *observation.images],
    )


def expand_placeholders(compact_ids: Sequence[int], placeholders: Mapping[int, Sequence[int | Expansion]]) -> list[int]:
    """Put in the place of each placeholder token what stands for its image: compact track -> expanded track."""
    ids = np.asarray(compact_ids, dtype=np.int64)
    repeats = expanded_lengths(compact_ids, placeholders)
    expanded, first = ids.repeat(repeats), repeats.cumsum() - repeats
    for token, images in placeholders.items():
        for place, image in zip(np.flatnonzero(ids == token), images, strict=True):
            if isinstance(image, Expansion):
                expanded[first[place] : first[place] + len(image.tokens)] = image.tokens
    return expanded.tolist()


def expanded_lengths(compact_ids: Sequence[int], placeholders: Mapping[int, Sequence[int | Expansion]]) -> np.ndarray:
    """How many tokens of the expanded track stand for each of the compact one; in sum all of them."""
    ids = np.asarray(compact_ids, dtype=np.int64)
    repeats = np.ones_like(ids)
    for token, images in placeholders.items():
        at = np.flatnonzero(ids == token)
        if len(at) != len(images):
            raise ValueError(f"compact_ids: expected {len(images)} placeholders of token {token}, got {len(at)}")
        for place, image in zip(at, images, strict=True):
            if isinstance(image, Expansion):
                repeats[place - image.before : place + image.after + 1] = 0
                repeats[place] = len(image.tokens)
            else:
                repeats[place] = image
    return repeats


def check_tracks(sample: Sample) -> None:
    """Raise a ValueError unless both tracks, the mask and the logprobs speak of the same tokens and images."""
    n = len(sample.token_ids)
    for name in ("mask", "logprobs"):
        if (m := len(getattr(sample, name))) != n:
            raise ValueError(f"sample of group {sample.group_id}: {name} has {m} entries, token_ids {n}")
    if (routing := sample.routed_experts) is not None and (routing.ndim != 3 or len(routing) > n):
        raise ValueError(
            f"sample of group {sample.group_id}: routed_experts: expected [up to {n} tokens, layers, experts], got "
            f"{list(routing.shape)}"
        )
    if expand_placeholders(sample.compact_ids, sample.placeholders) != sample.token_ids:
        raise ValueError(
            f"sample of group {sample.group_id}: the compact track ({len(sample.compact_ids)} tokens), placeholders "
            f"{dict(sample.placeholders)} does not expand to the expanded one ({n}): was text tokenised again?"
        )


class Batch:
    """Rows to train or score: tokens, and any tensor named by the caller, reached as an attribute.

    Attributes:
        tokens: [B, T] int64, right-padded.
        mask: [B, T] bool, True on the tokens that are trained on.
        lengths: B host integers, tokens a row.
        vision: for each row the vision tensors of its own images; they go where the row goes.
        total_tokens, total_sequences: counts of masked tokens, and of rows that have one, over all micro-batches and
            data-parallel ranks; an engine sets them before the first micro-batch. Until then they are this batch's own.
        routed_experts: [B, T, layers, K], where a sample has them.
        Anything else ([B] or [B, T]): `batch.advantages`, `batch.ref_logprobs`, ...
    """

    def __init__(
        self,
        tokens: Tensor,
        mask: Tensor,
        lengths: Sequence[int],
        vision: Sequence[Mapping[str, Tensor]] | None = None,
        **fields: Tensor,
    ) -> None:
        if tokens.ndim != 2 or mask.shape != tokens.shape or mask.dtype != torch.bool:
            came = f"tokens {tuple(tokens.shape)}, mask {mask.dtype} {tuple(mask.shape)}"
            raise ValueError(f"tokens and mask: expected [B, T] and bool [B, T], got {came}")
        self.tokens, self.mask, self.lengths = tokens, mask, list(lengths)
        self.vision = [{} for _ in self.lengths] if vision is None else list(vision)
        if not len(self.lengths) == len(self.vision) == len(tokens):
            came = f"{len(self.lengths)} and {len(self.vision)}"
            raise ValueError(f"lengths, vision: expected {len(tokens)} rows, got {came}")
        self.fields: dict[str, Tensor] = {}
        self.add(**fields)
        self.total_tokens = mask.sum()
        self.total_sequences = mask.any(1).sum()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getattr__(self, name: str) -> Tensor:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"batch: expected one of its fields {sorted(fields)}, got {name!r}")

    def add(self, **fields: Tensor) -> Batch:
        """Carry more tensors, each [B] or [B, T]; `routed_experts` is [B, T, layers, K]."""
        for name, x in fields.items():
            if name in self.__dict__ or hasattr(type(self), name):
                raise ValueError(f"{name}: the batch's own; a field of that name would never be read")
            shape = x.shape[:2] if name == "routed_experts" else x.shape
            if shape not in (self.tokens.shape, self.tokens.shape[:1]):
                b, t = self.tokens.shape
                raise ValueError(f"{name}: expected [{b}] or [{b}, {t}], got {tuple(x.shape)}")
            self.fields[name] = x
        return self

    @property
    def attention_mask(self) -> Tensor:
        """[B, T] bool, True on every token that is not padding."""
        lengths = torch.tensor(self.lengths, dtype=torch.long, device=self.tokens.device)
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < lengths[:, None]

    def select(self, rows: Sequence[int]) -> Batch:
        """These rows, no wider than their longest; the totals stay those of the whole."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.tokens.device)
        lengths = [self.lengths[i] for i in rows]
        width = max(lengths, default=1)

        def cut(x: Tensor) -> Tensor:
            return x[index] if x.ndim == 1 else x[index, :width]

        fields = {name: cut(x) for name, x in self.fields.items()}
        part = Batch(cut(self.tokens), cut(self.mask), lengths, [self.vision[i] for i in rows], **fields)
        part.total_tokens, part.total_sequences = self.total_tokens, self.total_sequences
        return part

    def to(self, device: torch.device | str) -> Batch:
        """On another device; the vision tensors follow when a micro-batch is packed."""
        fields = {name: x.to(device) for name, x in self.fields.items()}
        moved = Batch(self.tokens.to(device), self.mask.to(device), self.lengths, self.vision, **fields)
        moved.total_tokens, moved.total_sequences = self.total_tokens.to(device), self.total_sequences.to(device)
        return moved


def group_ids(samples: Iterable[Sample]) -> Tensor:
    """[B] int64: the prompt each sample answers."""
    return torch.tensor([sample.group_id for sample in samples], dtype=torch.long)


def collate(samples: Sequence[Sample], *, pad_token_id: int = 0, **fields: Tensor) -> Batch:
    """Samples -> right-padded rows with `rollout_logprobs`, `rewards`, `group_ids` and the given [B] or [B, T] tensors;
    `routed_experts` where a sample has them.

    Raises:
        ValueError: a sample's tracks disagree, or a field has neither shape.
    """
    for sample in samples:
        check_tracks(sample)
    lengths = [len(sample.token_ids) for sample in samples]
    width = max(lengths, default=1)

    def pad(rows: Iterable[Sequence[Any]], fill: Any, dtype: torch.dtype) -> Tensor:
        padded = [[*row, *[fill] * (width - len(row))] for row in rows]
        return torch.tensor(padded, dtype=dtype).reshape(len(lengths), width)

    if any(s.routed_experts is not None for s in samples):
        fields["routed_experts"] = _pad_routing(samples, width)
    return Batch(
        pad((s.token_ids for s in samples), pad_token_id, torch.long),
        pad((s.mask for s in samples), False, torch.bool),
        lengths,
        [s.vision for s in samples],
        rollout_logprobs=pad((s.logprobs for s in samples), 0.0, torch.float32),
        rewards=torch.tensor([s.reward for s in samples], dtype=torch.float32),
        group_ids=group_ids(samples),
        **fields,
    )


def _pad_routing(samples: Sequence[Sample], width: int) -> Tensor:
    """[B, width, layers, K], -1 where no routing is known."""
    known = {i: s.routed_experts for i, s in enumerate(samples) if s.routed_experts is not None}
    if len(shapes := {tuple(routing.shape[1:]) for routing in known.values()}) != 1:
        raise ValueError(f"routed_experts: expected layers and experts of one model, got {sorted(shapes)}")
    padded = torch.full((len(samples), width, *shapes.pop()), -1, dtype=torch.int16)
    for i, routing in known.items():
        padded[i, : len(routing)] = routing
    return padded
