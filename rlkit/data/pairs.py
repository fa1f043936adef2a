"""Rows that show answers: chats to imitate, pairs of answers of which one is better, and answers marked good or bad.

Rows stay as their file has them until they are used, so that one which cannot be read is a row skipped and not the end
of a run: `chat`, `pair` and `marked` then give its messages, or a ValueError that says what is wrong with it. Messages
are those of the chat format: {"role": "user", "content": ...}, a text or parts {"type": "image"}, {"type": "text",
"text": ...}.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlkit.data import tables
from rlkit.data.loading import load_task
from rlkit.data.samples import Row, Sample, expand, expanded_lengths, extend, in_parts
from rlkit.data.tasks import Task
from rlkit.rewards.rules import exact_match

Message = Mapping[str, Any]


def load_chats(name: str) -> Task:
    """Rows to imitate: a task of `load_task`, whose answers are shown, or a file with a `messages` column.

    Raises:
        ValueError: as `load_task`, or a file with neither messages nor questions and answers.
    """

    def fits(columns: set[str]) -> bool:
        return "messages" in columns or bool(
            columns & {*tables.QUESTION_COLUMNS} and columns & {*tables.ANSWER_COLUMNS}
        )

    return _from_file(Path(name), fits, "messages, or question and answer") if _is_file(name) else load_task(name)


def load_pairs(name: str) -> Task:
    """Rows with a chosen and a rejected answer: a file with columns of these names, see `pair`, or a task.

    A row of a task that has none gets them: chosen is its answer, rejected the answer of another row, the same one in
    every run.

    Raises:
        ValueError: as `load_task`, or a file without these columns.
    """
    if _is_file(name):
        return _from_file(Path(name), {"chosen", "rejected"}.issubset, "chosen and rejected")
    task = load_task(name)
    return replace(task, train=_with_wrong_answers(task.train), heldout=_with_wrong_answers(task.heldout))


def load_marked(name: str) -> Task:
    """Rows with one answer, good or bad: a file with columns `completion` and `label`, or what `load_pairs` takes.

    Of each pair there are two rows, the chosen answer marked good and the rejected one bad.

    Raises:
        ValueError: as `load_task`, or a file with columns of neither kind.
    """

    def fits(columns: set[str]) -> bool:
        return {"completion", "label"} <= columns or {"chosen", "rejected"} <= columns

    if not _is_file(name):
        task = load_pairs(name)
    else:
        answers = ("answer", "solution")  # a label is none
        task = _from_file(Path(name), fits, "completion and label, or chosen and rejected", answers)
    return replace(task, train=_one_by_one(task.train), heldout=_one_by_one(task.heldout))


def chat(row: Row) -> list[Message]:
    """The messages of a row, the last of which is the answer to imitate: its `messages`, or its question and answer.

    Images of which no message says where they belong go before the first user's text.

    Raises:
        ValueError: no question, no answer, or a last message that is not the assistant's.
    """
    if messages := row.get("messages"):
        return [*_placed(row, messages[:-1]), _said(_answer(row, messages[-1:]))]
    return [*_question(row), _said(_answer(row, row.get("answer")))]


def pair(row: Row) -> tuple[list[Message], str, str]:
    """The prompt and the chosen and rejected answers of a row, in the formats of TRL, UltraFeedback and RLAIF-V.

    An answer is a text or a list of messages. Two lists that begin with the same messages have the prompt in them, and
    a prompt of the row's own is not looked at; texts without a prompt beside them share it as their beginning, up to
    the last space.

    Raises:
        ValueError: no prompt, no answers, the same answer twice, or answers of several messages.
    """
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if chosen is not None and chosen == rejected:
        raise ValueError(f"{_where(row)}: its chosen and its rejected answer are the same")
    if isinstance(chosen, list) and isinstance(rejected, list):
        shared = next((i for i, two in enumerate(zip(chosen, rejected, strict=False)) if two[0] != two[1]), 0)
        messages = _placed(row, chosen[:shared]) if shared else _question(row)
        chosen, rejected = chosen[shared:], rejected[shared:]
    elif isinstance(chosen, str) and isinstance(rejected, str) and _prompt(row) is None:
        shared = commonprefix([chosen, rejected]).rfind(" ") + 1
        messages = _question({**row, "question": chosen[:shared] or None})
        chosen, rejected = chosen[shared:], rejected[shared:]
    else:
        messages = _question(row)
    return messages, _answer(row, chosen), _answer(row, rejected)


def marked(row: Row) -> tuple[list[Message], str, bool]:
    """The prompt of a row, its answer, and whether that is good: by `completion` and `label`, or one of a pair.

    Raises:
        ValueError: no prompt, no answer, a label that is neither true nor false; or as `pair`.
    """
    label = row.get("label")
    if label not in (True, False):
        raise ValueError(f"{_where(row)}: label: true or false expected, came {label!r}")
    if row.get("completion") is None and "chosen" in row:
        messages, chosen, rejected = pair(row)
        return messages, chosen if label else rejected, bool(label)
    return _question(row), _answer(row, row.get("completion")), bool(label)


def asking(row: Row, messages: Sequence[Message]) -> Row:
    """The row as `rlkit.vlm.encode` takes it: with these messages as its prompt, and the last question for people."""
    question = next((_text(message) for message in reversed(messages) if message.get("role") == "user"), "")
    return {**row, "messages": list(messages), "question": question}


def answered(
    asked: Sample, processor: Any, answers: Sequence[str], ends: Sequence[int], max_tokens: int
) -> list[Sample]:
    """A prompt with each of several answers behind it, as one sequence each, the answer in its mask.

    Args:
        asked: the prompt, encoded from a row of `asking`; its image tensors are shared.
        processor: a transformers processor or tokenizer with a chat template.
        answers: texts.
        ends: tokens that end an answer; one is in the mask, and where the template writes none, the tokenizer's own is
            added.
        max_tokens: longest sequence.

    Raises:
        ValueError: a longer sequence, or a chat template that changes the prompt when an answer follows.
    """
    written = [_turn(processor, asked.row, asked.row["messages"], answer, ends).ids for answer in answers]
    samples = [extend(asked, ids, [0.0] * len(ids), text=answer) for ids, answer in zip(written, answers, strict=True)]
    for sample in samples:
        _check_length(sample, max_tokens)
    return samples


def chat_sample(
    asked: Sample, processor: Any, messages: Sequence[Message], ends: Sequence[int], max_tokens: int
) -> Sample:
    """A whole chat as one sequence with all of the assistant's messages in its mask, each with the token that ends it.

    Args:
        asked: the messages before the last, encoded; its images are taken over.
        messages: the chat, the last message the assistant's.
        processor, ends, max_tokens: as in `answered`.

    Raises:
        ValueError: as `answered`; an earlier answer that the chat template changes when messages follow.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    compact: list[int] = []
    mask: list[bool] = []
    rest: list[int] = []
    done = ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        turn = _turn(processor, asked.row, messages[:i], _answer(asked.row, [message]), ends)
        if not turn.before.startswith(done):
            raise ValueError(f"{_where(asked.row)}: the chat template changes an answer when messages follow")
        question = rest + tokenizer(turn.before.removeprefix(done), add_special_tokens=False)["input_ids"]
        compact += question + turn.ids
        mask += [False] * len(question) + [True] * len(turn.ids)
        done, rest = turn.after, turn.rest
    ids = expand(compact, asked.placeholders)
    marks = np.repeat(mask, expanded_lengths(compact, asked.placeholders)).tolist()
    sample = replace(asked, token_ids=ids, compact_ids=compact, mask=marks, logprobs=[0.0] * len(ids))
    _check_length(sample, max_tokens)
    return sample


def _check_length(sample: Sample, max_tokens: int) -> None:
    if (came := len(sample.token_ids)) > max_tokens:
        raise ValueError(f"{_where(sample.row)}: {came} tokens with its answer, more than the limit of {max_tokens}")


class _Turn(NamedTuple):
    """An answer in its chat."""

    before: str  # the text up to it
    ids: list[int]  # its tokens, with the one that ends it
    rest: list[int]  # what the template writes behind that
    after: str  # the text with all of it


def _turn(processor: Any, row: Row, messages: Sequence[Message], answer: str, ends: Sequence[int]) -> _Turn:
    template, tokenizer = processor.apply_chat_template, getattr(processor, "tokenizer", processor)
    before = template(in_parts(processor, messages), add_generation_prompt=True, tokenize=False)
    after = template(in_parts(processor, [*messages, _said(answer)]), tokenize=False)
    if not after.startswith(before):
        raise ValueError(f"{_where(row)}: the chat template changes the prompt when an answer follows")
    ids = tokenizer(after.removeprefix(before), add_special_tokens=False)["input_ids"]
    end = next((i + 1 for i, token in enumerate(ids) if token in ends), None)
    if end is None:
        return _Turn(before, [*ids, tokenizer.eos_token_id], [], after)
    return _Turn(before, ids[:end], ids[end:], after)


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _answer(row: Row, answer: Any) -> str:
    """The text of an answer, which may come as a list of the one message that it is."""
    if isinstance(answer, list) and len(answer) == 1 and answer[0].get("role") == "assistant":
        answer = _text(answer[0])
    if isinstance(answer, list | None):
        came = "none" if not answer else f"{len(answer)} messages, the first of role {answer[0].get('role')!r}"
        raise ValueError(f"{_where(row)}: a text or one message of the assistant's expected as its answer, came {came}")
    return str(answer)


def _text(message: Message) -> str | None:
    """The text of a message; None if it has none."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content


def _prompt(row: Row) -> Any:
    return next((row[name] for name in tables.QUESTION_COLUMNS if row.get(name) is not None), None)


def _question(row: Row) -> list[Message]:
    """The messages of a row's question, which is a text or messages."""
    question = _prompt(row)
    if question is None or question == []:
        raise ValueError(f"{_where(row)}: it has no question")
    messages = question if isinstance(question, list) else [{"role": "user", "content": str(question)}]
    return _placed(row, messages)


def _placed(row: Row, messages: Sequence[Message]) -> list[Message]:
    """The messages with the row's images before the first user's text, unless they say themselves where these are."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    images = [{"type": "image"} for _ in row.get("images") or ()]
    first = next((i for i, message in enumerate(messages) if message.get("role") == "user"), None)
    if first is None or not images or any(part.get("type") == "image" for part in parts):
        return list(messages)
    text = {"type": "text", "text": _text(messages[first]) or ""}
    return [*messages[:first], {"role": "user", "content": [*images, text]}, *messages[first + 1 :]]


def _where(row: Row) -> str:
    return str(row.get("where", "row"))


def _is_file(name: str) -> bool:
    return Path(name).suffix in {".jsonl", ".json", ".parquet"}


def _from_file(
    path: Path, fits: Callable[[set[str]], bool], wanted: str, answers: Sequence[str] = tables.ANSWER_COLUMNS
) -> Task:
    """Rows as they are, with `images` (paths made absolute) and `answer` (for rewards; None if it has none)."""
    table = tables.read_table(path)
    columns = tables.columns_of(table)
    if not fits(set(columns)):
        raise ValueError(f"task {str(path)!r}: columns {wanted} expected; it has {columns}")

    def row(i: int) -> Row:
        raw = table[i]
        found: Any = next((raw[name] for name in tables.IMAGE_COLUMNS if raw.get(name)), [])
        images = [tables.beside(path, image) for image in (found if isinstance(found, list) else [found])]
        answer = next((raw[name] for name in answers if raw.get(name) is not None), None)
        if answer is None and raw.get("messages"):
            answer = _text(raw["messages"][-1])
        return {**raw, "answer": answer, "images": images, "where": f"{path} row {i + 1}"}

    return Task(path.stem, *tables.a_tenth_held_out(row, len(table)), exact_match)


def _one_by_one(rows: Sequence[Row]) -> Sequence[Row]:
    """Of each pair two rows, that of its chosen answer first; rows that are marked already stay."""
    if not len(rows) or "chosen" not in rows[0]:
        return rows
    return tables.Rows(lambda i: {**rows[i // 2], "label": i % 2 == 0}, np.arange(2 * len(rows)))


def _with_wrong_answers(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows, each with its answer as `chosen` and another row's as `rejected`, unless they are pairs already."""

    def row(i: int) -> Row:
        right = rows[i]
        if "chosen" in right:
            return right
        others = np.random.default_rng((tables.HELD_OUT_SEED, i)).permutation(len(rows))[:100]
        answers = (str(rows[int(j)]["answer"]) for j in others)
        wrong = next((answer for answer in answers if answer != str(right["answer"])), None)
        return {**right, "chosen": str(right["answer"]), "rejected": wrong}

    return tables.Rows(row, np.arange(len(rows)))
