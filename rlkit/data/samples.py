"""`Sample`: one sequence, as it is sampled. `Batch`: rows of tensors, as they are trained on.

A prompt is a sample whose mask is all False; sampling appends tokens to it. Text that was sampled is never tokenized
again. `collate` makes a batch of samples.

With images, a `Sample` has its tokens twice. `token_ids` has one placeholder token per image feature, as the model's
forward expects. `compact_ids` has one placeholder per image, as samplers with an image processor of their own (vLLM)
expect. `collate` checks that the two agree, see rlkit.data.placeholders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.data.media import Audio, Video
from rlkit.data.placeholders import Expansion, expand_placeholders
from rlkit.data.vision_tensors import concatenate_vision

Row = Mapping[str, Any]
"""A row of a task; see `rlkit.data.tasks`."""

Reward = Callable[[str, Row], float | None]
"""A reward function: (response, row) -> reward; None means that the response could not be scored."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence: a prompt, and what has been sampled after it.

    Attributes:
        token_ids: prompt and response, with one placeholder token per feature of an image, video or audio.
        compact_ids: the same tokens with one placeholder token per image, video or audio.
        mask: for each of `token_ids`, whether the policy wrote it.
        logprobs: the sampler's log-probability of each of `token_ids`; 0 where `mask` is False.
        vision: the processor's tensors of this sample's media (`pixel_values`, `input_features`, ...).
        placeholders: placeholder token id -> for each image (or video, or audio), in order, the number of placeholders
            in `token_ids`, or the `Expansion` there.
        images: the decoded images, for samplers with an image processor of their own.
        videos, audios: the decoded videos and audios, likewise.
        row: the data row of the prompt; reward functions read it.
        group_id: the same integer for all samples of one prompt.
        number: index of this sample among those of its prompt, from 0; with `group_id` it seeds the sampler.
        text: the decoded response, for reward functions and people; training uses the tokens.
        reward: nan until scored, and if it could not be scored.
        finish_reason: "stop" (an end token) or "length"; after several turns also "turns" or "aborted".
        version: number of weight updates of the sampler before this sample.
        versions: the version for each of `response_ids`, if weights may change while a sample is generated; `version`
            is then the oldest.
        routed_experts: int16 [<= T, layers, K], the experts that the sampler's routers chose for the first tokens of
            `token_ids`, see rlkit.vlm.routers; -1 where unknown. They are unknown for all further tokens.
    """

    token_ids: list[int]
    compact_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    vision: Mapping[str, Tensor] = field(default_factory=dict)
    placeholders: Mapping[int, Sequence[int | Expansion]] = field(default_factory=dict)
    images: Sequence[Any] = ()
    videos: Sequence[Video] = ()
    audios: Sequence[Audio] = ()
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
        """The tokens that the policy wrote."""
        return [token for token, is_response in zip(self.token_ids, self.mask, strict=True) if is_response]


def prompt_sample(token_ids: Sequence[int], compact_ids: Sequence[int] | None = None, **facts: Any) -> Sample:
    """A sample without a response.

    Args:
        token_ids, compact_ids: as in `Sample`. Without images they are equal, and `compact_ids` may be left out.
        facts: further attributes of `Sample`.
    """
    ids = list(token_ids)
    compact = ids if compact_ids is None else list(compact_ids)
    return Sample(ids, compact, [False] * len(ids), [0.0] * len(ids), **facts)


def append_response(sample: Sample, token_ids: Sequence[int], logprobs: Sequence[float], **facts: Any) -> Sample:
    """Appends sampled tokens to both `token_ids` and `compact_ids`.

    Args:
        sample: a prompt, or a sample to continue.
        token_ids: the sampled tokens.
        logprobs: the sampler's log-probability of each.
        facts: attributes of `Sample` to replace, such as `text` and `finish_reason`.

    Raises:
        ValueError: numbers of tokens and log-probabilities that differ, or a sampled token that is an image
            placeholder, for which the next forward would expect an image.
    """
    if len(token_ids) != len(logprobs):
        raise ValueError(f"logprobs: expected one for each sampled token, got {len(logprobs)} for {len(token_ids)}")
    if stray := set(token_ids) & set(sample.placeholders):
        raise ValueError(
            f"token_ids: expected no image placeholder (suppress them in the sampler), got {sorted(stray)}"
        )
    return replace(
        sample,
        token_ids=[*sample.token_ids, *token_ids],
        compact_ids=[*sample.compact_ids, *token_ids],
        mask=[*sample.mask, *[True] * len(token_ids)],
        logprobs=[*sample.logprobs, *logprobs],
        **facts,
    )


def append_observation(sample: Sample, observation: Sample) -> Sample:
    """Appends an environment's observation, text and images; its tokens are not in the mask.

    Args:
        sample: the sample so far.
        observation: tokens and images, as `prompt_sample` or `encode_observation` returns them.
    """
    both = (sample, observation)
    vision, placeholders = sample.vision, sample.placeholders
    if observation.vision:  # otherwise keep the same object: responses to a prompt share its images
        vision = concatenate_vision([sample.vision, observation.vision], within_sample=True)
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
        videos=[*sample.videos, *observation.videos],
        audios=[*sample.audios, *observation.audios],
    )


def check_sample(sample: Sample) -> None:
    """Raise a ValueError unless the tokens, expanded and compact, mask and logprobs of a sample fit together."""
    name_of_sample = f"sample of group {sample.group_id}"
    n = len(sample.token_ids)
    for name in ("mask", "logprobs"):
        if (m := len(getattr(sample, name))) != n:
            raise ValueError(f"{name_of_sample}: {name}: expected {n} entries, one per token, got {m}")
    if (routing := sample.routed_experts) is not None and (routing.ndim != 3 or len(routing) > n):
        raise ValueError(
            f"{name_of_sample}: routed_experts: expected [up to {n} tokens, layers, experts], got {list(routing.shape)}"
        )
    if expand_placeholders(sample.compact_ids, sample.placeholders) != sample.token_ids:
        raise ValueError(
            f"{name_of_sample}: compact_ids: expected tokens that expand to token_ids ({n} tokens), got "
            f"{len(sample.compact_ids)} tokens with placeholders {dict(sample.placeholders)}; was text tokenized again?"
        )


class Batch:
    """Rows to train on or to score: tokens, and further tensors by name, available as attributes.

    Attributes:
        tokens: int64 [B, T], right-padded.
        mask: bool [B, T], True on the tokens that are trained on.
        lengths: B integers on the host, the tokens of each row.
        vision: for each row the vision tensors of its images and videos.
        total_tokens, total_sequences: the number of tokens in the mask, and of rows with such a token, over all
            micro-batches and data-parallel ranks. An engine sets them before the first micro-batch; until then they
            count this batch.
        routed_experts: [B, T, layers, K], if a sample has them.
        token_fields: tensors [N, ...] by name, for the N tokens of `mask`, row after row: what is too large to be
            padded, such as a teacher's top-k. A loss gets them together with the logits, see `train_batch`.
        Any other tensor ([B] or [B, T]): `batch.advantages`, `batch.ref_logprobs`, ...
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
            got = f"tokens {tuple(tokens.shape)}, mask {mask.dtype} {tuple(mask.shape)}"
            raise ValueError(f"tokens and mask: expected [B, T] and bool [B, T], got {got}")
        self.tokens, self.mask, self.lengths = tokens, mask, list(lengths)
        self.vision = [{} for _ in self.lengths] if vision is None else list(vision)
        if not len(self.lengths) == len(self.vision) == len(tokens):
            got = f"{len(self.lengths)} and {len(self.vision)}"
            raise ValueError(f"lengths, vision: expected {len(tokens)} rows, got {got}")
        self.fields: dict[str, Tensor] = {}
        self.token_fields: dict[str, Tensor] = {}
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

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("fields", {}):
            self.add(**{name: value})  # an attribute of that name would hide the field, which the engine uses
        else:
            super().__setattr__(name, value)

    def add(self, **fields: Tensor) -> Batch:
        """Adds tensors by name, each [B] or [B, T]; `routed_experts` is [B, T, layers, K].

        Raises:
            ValueError: another shape, or a name that the batch uses itself.
        """
        for name, x in fields.items():
            if name in self.__dict__ or hasattr(type(self), name):
                raise ValueError(f"fields: expected names that are no attributes of a batch, got {name!r}")
            shape = x.shape[:2] if name == "routed_experts" else x.shape
            if shape not in (self.tokens.shape, self.tokens.shape[:1]):
                b, t = self.tokens.shape
                raise ValueError(f"{name}: expected [{b}] or [{b}, {t}], got {tuple(x.shape)}")
            self.fields[name] = x
        return self

    def add_token_fields(self, **tensors: Tensor) -> Batch:
        """Adds tensors [N, ...] by name to `token_fields`, for the N tokens of `mask`.

        Raises:
            ValueError: another number of tokens.
        """
        count = int(self.mask.sum())
        for name, x in tensors.items():
            if not x.ndim or len(x) != count:
                raise ValueError(f"{name}: expected [{count}, ...], one for each token of mask, got {tuple(x.shape)}")
            self.token_fields[name] = x
        return self

    def trained_tokens_of_rows(self, rows: Sequence[int]) -> Tensor:
        """Indices into a tensor of `token_fields` of the tokens of these rows, row after row.

        Raises:
            ValueError: `mask` has changed since the tensors were added.
        """
        count = int(self.mask.sum())
        for name, x in self.token_fields.items():
            if len(x) != count:
                raise ValueError(
                    f"token_fields: expected {count} entries of {name}, one for each token of mask, got {len(x)}; "
                    "change mask before add_token_fields"
                )
        tokens = torch.arange(count).split(self.mask.sum(1).tolist())
        return torch.cat([tokens[0][:0], *(tokens[row] for row in rows)]) if tokens else torch.arange(0)

    def trained_token_index(self, indices: Tensor) -> Tensor:
        """Indices into a tensor of `token_fields` of tokens that are given by their indices in a flattened [B, T]."""
        return (self.mask.flatten().cumsum(0) - 1)[indices]

    @property
    def attention_mask(self) -> Tensor:
        """[B, T] bool, True on every token that is not padding."""
        lengths = torch.tensor(self.lengths, dtype=torch.long, device=self.tokens.device)
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < lengths[:, None]

    def select(self, rows: Sequence[int] | Sequence[bool] | np.ndarray | Tensor) -> Batch:
        """A batch of some rows, cut to the longest of them; `total_tokens` and `total_sequences` stay the same.

        Args:
            rows: their numbers in any order, or for each row whether it is one of them.

        Raises:
            ValueError: another number of bools than rows.
        """
        given = rows.tolist() if isinstance(rows, Tensor | np.ndarray) else rows
        numbers: list[Any] = [x.item() if isinstance(x, Tensor | np.generic) else x for x in given]
        if numbers and isinstance(numbers[0], bool):
            if len(numbers) != len(self):
                raise ValueError(f"rows: expected a bool for each of the {len(self)} rows, got {len(numbers)}")
            numbers = [i for i, selected in enumerate(numbers) if selected]
        index = torch.as_tensor(numbers, dtype=torch.long, device=self.tokens.device)
        lengths = [self.lengths[i] for i in numbers]
        width = max(lengths, default=1)

        def cut(x: Tensor) -> Tensor:
            return x[index] if x.ndim == 1 else x[index, :width]

        fields = {name: cut(x) for name, x in self.fields.items()}
        part = Batch(cut(self.tokens), cut(self.mask), lengths, [self.vision[i] for i in numbers], **fields)
        part.total_tokens, part.total_sequences = self.total_tokens, self.total_sequences
        if self.token_fields:
            tokens = self.trained_tokens_of_rows(numbers)
            part.add_token_fields(**{name: x[tokens] for name, x in self.token_fields.items()})
        return part

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device, without its vision and token fields, which engines move themselves."""

        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=torch.device(device).type != "cpu")

        fields = {name: move(x) for name, x in self.fields.items()}
        moved = Batch(move(self.tokens), move(self.mask), self.lengths, self.vision, **fields)
        moved.total_tokens, moved.total_sequences = move(self.total_tokens), move(self.total_sequences)
        return moved


def group_ids(samples: Iterable[Sample]) -> Tensor:
    """`group_id` of each sample: int64 [B]."""
    return torch.tensor([sample.group_id for sample in samples], dtype=torch.long)


def collate(samples: Sequence[Sample], *, pad_token_id: int = 0, **fields: Tensor) -> Batch:
    """Samples -> a batch of right-padded rows, with `rollout_logprobs`, `rewards`, `group_ids` and `numbers`.

    Args:
        samples: one row each; if any has `routed_experts`, the batch has them too.
        pad_token_id: fills the tokens of shorter rows.
        fields: further tensors of the batch, [B] or [B, T].

    Raises:
        ValueError: a sample whose `compact_ids` do not expand to its `token_ids`, or a field of another shape.
    """
    for sample in samples:
        check_sample(sample)
    lengths = [len(sample.token_ids) for sample in samples]
    width = max(lengths, default=1)

    def pad(rows: Iterable[Sequence[Any]], fill: Any, dtype: Any) -> Tensor:
        padded = np.full((len(lengths), width), fill, dtype)  # torch.tensor takes five times as long for lists
        for i, row in enumerate(rows):
            padded[i, : len(row)] = row
        return torch.tensor(padded.ravel()).view(padded.shape)  # so that strides are right without rows, too

    if any(s.routed_experts is not None for s in samples):
        fields["routed_experts"] = _pad_routing(samples, width)
    return Batch(
        pad((s.token_ids for s in samples), pad_token_id, np.int64),
        pad((s.mask for s in samples), False, np.bool_),
        lengths,
        [s.vision for s in samples],
        rollout_logprobs=pad((s.logprobs for s in samples), 0.0, np.float32),
        rewards=torch.tensor([s.reward for s in samples], dtype=torch.float32),
        group_ids=group_ids(samples),
        numbers=torch.tensor([s.number for s in samples], dtype=torch.long),
        **fields,
    )


def _pad_routing(samples: Sequence[Sample], width: int) -> Tensor:
    """[B, width, layers, K], -1 where the routing is unknown."""
    known = {i: s.routed_experts for i, s in enumerate(samples) if s.routed_experts is not None}
    if len(shapes := {tuple(routing.shape[1:]) for routing in known.values()}) != 1:
        raise ValueError(f"routed_experts: expected layers and experts of one model, got {sorted(shapes)}")
    padded = torch.full((len(samples), width, *shapes.pop()), -1, dtype=torch.int16)
    for i, routing in known.items():
        padded[i, : len(routing)] = routing
    return padded
