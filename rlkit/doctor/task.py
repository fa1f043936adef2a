"""Checks a task: its rows, rows that would be skipped, rewards of typical responses, prompts as the model sees them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from rlkit.data import Sample, Task, prompt_sample
from rlkit.data.formats import ANSWER_COLUMNS, AUDIO_COLUMNS, IMAGE_COLUMNS, PROMPT_COLUMNS, VIDEO_COLUMNS
from rlkit.data.messages import prompt_of, text_of
from rlkit.doctor.findings import Finding
from rlkit.rewards import score
from rlkit.rewards.maths import result
from rlkit.vlm import encode_prompt, load_image
from rlkit.vlm.audios import load_audios
from rlkit.vlm.videos import load_videos

Row = Mapping[str, Any]
LONGEST = 1500  # characters of a text to print
COLUMNS = {  # with a meaning of their own: those of prompts and answers, and options of a row
    *(*PROMPT_COLUMNS, "input", "system", "history", "tools", "text"),
    *(*IMAGE_COLUMNS, *VIDEO_COLUMNS, *AUDIO_COLUMNS),
    *(*ANSWER_COLUMNS, "reward_model", "completion", "output", "chosen", "rejected", "plain_text"),
    *("chat_template_kwargs", "thinking_tags", "response_prefix", "where", "read_as"),
}

# typical responses of a model, made from (right, wrong); the last two are wrong
FORMS: Mapping[str, Callable[[str, str], str]] = {
    "right": lambda right, wrong: right,
    "right, in a sentence": lambda right, wrong: f"The answer is {right}.",
    "right, in \\boxed{}": lambda right, wrong: f"So it is \\boxed{{{result(right) or right}}}.",
    "another row's answer": lambda right, wrong: wrong,
    "nothing": lambda right, wrong: "",
}


def check_rows(
    task: Task, processor: Any = None, *, max_tokens: int | None = None, most: int = 1000
) -> Iterator[Finding]:
    """Count the rows, and report lengths, rows that would be skipped with the reasons, and repeated prompts.

    Args:
        task: as `load_task` returns it.
        processor: processor of the model, for lengths in tokens; without it, lengths are in characters.
        max_tokens: longest allowed prompt.
        most: how many training rows, and how many held-out rows, to read.
    """
    yield Finding(
        "rows", f"{len(task.train)} to train on, {len(task.heldout)} held out", len(task.train) + len(task.heldout) > 0
    )
    if unused := sorted({name for row in _first(task, 1) for name in row} - COLUMNS):
        yield Finding("columns", f"not in the prompt, only for reward functions: {', '.join(unused)}", None)
    seen: dict[str, set[str]] = {"training": set(), "held-out": set()}
    for kind, rows in (("training", task.train), ("held-out", task.heldout)):
        chosen = [rows[i] for i in range(min(most, len(rows)))]
        if not chosen:
            continue
        lengths, skipped = list[int](), list[str]()
        counts: dict[str, list[int]] = {"images": [], "videos": [], "audios": []}
        for row in chosen:
            try:
                prompt = read_prompt(row, processor, max_tokens)
            except ValueError as error:
                skipped.append(str(error))
                continue
            lengths.append(len(prompt.token_ids) if processor else len(prompt.text))
            for name, numbers in counts.items():
                numbers.append(len(getattr(prompt, name)))
            contents = [image.tobytes() for image in prompt.images]
            contents += [video.frames.tobytes() for video in prompt.videos]
            contents += [audio.samples.tobytes() for audio in prompt.audios]
            seen[kind].add(repr((prompt.text, contents)))
        unit = "tokens" if processor else "characters"
        if lengths:
            spread = f"{min(lengths)} to {max(lengths)} {unit}, median {median(lengths):.0f}"
            shown = {name: numbers for name, numbers in counts.items() if name == "images" or any(numbers)}
            media = ", ".join(f"{min(numbers)} to {max(numbers)} {name}" for name, numbers in shown.items())
            yield Finding(f"{kind} prompts", f"{spread}; {media} each")
        yield _skipped(kind, skipped, len(chosen))
        if repeated := len(lengths) - len(seen[kind]):
            repetitions = "is a repetition" if repeated == 1 else "are repetitions"
            yield Finding(f"{kind} prompts", f"{repeated} of the first {len(chosen)} {repetitions}", None)
    if both := len(seen["training"] & seen["held-out"]):
        yield Finding(
            "held-out prompts", f"{both} also in the training rows: the held-out accuracy will be too high", None
        )


def _skipped(kind: str, skipped: Sequence[str], read: int) -> Finding:
    """How many rows cannot be used. For each reason, the number of rows and the first message."""
    if not skipped:
        return Finding(f"{kind} rows", f"all of the first {read} can be used")
    reasons: dict[str, list[str]] = defaultdict(list)
    for reason in skipped:
        # reasons that differ only in numbers and quoted names count as one
        reasons[re.sub(r"\d+|'[^']*'", "", reason)].append(reason)
    lines = [f"{len(texts)} x {texts[0][:300]}" for texts in sorted(reasons.values(), key=len, reverse=True)[:5]]
    text = "\n".join([f"{len(skipped)} of the first {read} would be skipped:", *lines])
    return Finding(f"{kind} rows", text, False if len(skipped) == read else None)


def read_prompt(row: Row, processor: Any = None, max_tokens: int | None = None) -> Sample:
    """The prompt of a row, with its media and text; with a processor, the text is that of the chat template.

    Raises:
        ValueError: a run would skip the row.
    """
    if processor is not None:
        prompt = encode_prompt(processor, row, max_tokens=max_tokens)
        text = getattr(processor, "tokenizer", processor).decode(prompt.compact_ids)
        return replace(prompt, text=text)
    where = row.get("where", "row")
    try:
        messages, image_sources, video_sources, audio_sources = prompt_of(row)
        images = [load_image(source) for source in image_sources]
        videos, audios = load_videos(None, video_sources), load_audios(None, audio_sources)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    text = "\n".join(f"{message['role']}: {text_of(message)}" for message in messages)
    return prompt_sample([], text=text, images=images, videos=videos, audios=audios, row=row)


def check_rewards(task: Task, count: int = 10) -> Iterator[Finding]:
    """Rewards of right and wrong responses to some rows, in the forms in which models write them.

    Args:
        task: the task; rows without an expected answer are left out.
        count: number of rows.
    """
    rows = [row for row in _first(task, 10 * count) if row.get("answer") is not None][:count]
    if not rows:
        yield Finding("rewards", "the rows have no answers to compare with", None)
        return
    answers = _right_answers(task, rows)
    means: dict[str, float] = {}
    for form, write in FORMS.items():
        samples = []
        for row, right in zip(rows, answers, strict=True):
            wrong = next((other for other in answers if other != right), f"not {right}")
            samples.append(prompt_sample([], text=write(right, wrong), row=row))
        rewards = score(task.reward, samples)
        scored = rewards[~rewards.isnan()]
        unscored = f", {len(rows) - len(scored)} not scored" if len(scored) < len(rows) else ""
        if len(scored):
            means[form] = scored.mean().item()
        mean = f"{means[form]:.3g}" if len(scored) else "none"
        yield Finding(f"reward: {form}", f"mean {mean} over {len(rows)} rows{unscored}: {samples[0].text[:60]!r}", None)
    highest, wrong_reward = max(means.values(), default=0.0), means.get("another row's answer")
    best = [form for form, reward in means.items() if reward == highest]
    if not means:
        yield Finding("rewards", "expected numbers, got none: the reward cannot score these responses", False)
    elif wrong_reward == highest:
        yield Finding("rewards", "expected more for a right response than for a wrong one, got the same", False)
    else:
        yield Finding("rewards", f"highest for: {', '.join(best)}; the prompt should ask for that form")


def _right_answers(task: Task, rows: Sequence[Row]) -> list[str]:
    """The answers of the rows as text. A list of answers is read as the task's reward reads it: it is the answer, such
    as a box, or one of its items is enough."""

    def total_reward(answers: list[str]) -> float:
        forms = [write for form, write in FORMS.items() if form.startswith("right")]
        pairs = list(zip(rows, answers, strict=True))
        samples = [prompt_sample([], text=write(right, ""), row=row) for write in forms for row, right in pairs]
        return score(task.reward, samples).nansum().item()

    whole, first = ([_text(row["answer"], first=first) for row in rows] for first in (False, True))
    return first if whole == first or total_reward(first) >= total_reward(whole) else whole


def show_rows(task: Task, processor: Any = None, count: int = 3) -> Iterator[str]:
    """The first usable rows as text: the prompt as the model sees it, its length, its images, the expected answer."""
    shown = 0
    for row in _first(task, 10 * count):
        try:
            prompt = read_prompt(row, processor)
        except ValueError:
            continue
        sizes = ", ".join(f"{image.width} x {image.height}" for image in prompt.images) or "none"
        tokens = f"{len(prompt.token_ids)} tokens; " if processor else ""
        shapes = [(*video.frames.shape[:3], video.fps) for video in prompt.videos]
        clips = ", ".join(
            f"{count} frames of {width} x {height}, {fps:g} a second" for count, height, width, fps in shapes
        )
        sounds = ", ".join(f"{len(audio.samples) / audio.rate:.1f} s" for audio in prompt.audios)
        media = f"images: {sizes}" + (f"; videos: {clips}" if clips else "") + (f"; audios: {sounds}" if sounds else "")
        yield f"--- {row.get('where', 'row')}: {tokens}{media}\n{_cut(prompt.text)}"
        for name in ("answer", "completion", "chosen", "rejected", "label"):
            if row.get(name) is not None:
                yield f"{name}: {_cut(_text(row[name]))}"
        shown += 1
        if shown == count:
            return


def _first(task: Task, count: int) -> list[Row]:
    rows = task.train if len(task.train) else task.heldout
    return [rows[i] for i in range(min(count, len(rows)))]


def _text(answer: Any, first: bool = False) -> str:
    """An expected answer as text: of a list all of it, or the first item; of messages the first."""
    if isinstance(answer, np.ndarray):
        answer = answer.tolist()
    if isinstance(answer, list | tuple) and answer and (first or isinstance(answer[0], Mapping)):
        answer = answer[0]
    return text_of(answer) if isinstance(answer, Mapping) and "content" in answer else str(answer)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... [{len(text)} characters]"
