r"""Rewards that plain rules can give: its form, exact and multiple-choice answers, numbers, words, boxes.

Each is `reward(text, row) -> float | None`, or a function that makes one from its settings. `row["answer"]` is the
right answer; a row without one is not scored. Each takes time linear in the length of the response: the regular
expressions have possessive quantifiers (`*+`) wherever two repetitions could share the same characters. Mathematics is
in `maths`, programs in `programs`, a model as judge in `judge`.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlkit.data.lookup import requires_extra
from rlkit.data.samples import Reward, Row
from rlkit.data.thinking_tags import THINKING_TAGS, thinking_tags_of

IS = r"\**\s*(?i:is|[:：])(?:\*\*)?[:：]?"
# what comes before a final answer: "answer is" or "**Answer**:"
ANSWER_IS = rf"(?i:\banswer){IS}"
# or, before a letter, "correct option is"
OPTION_IS = rf"(?i:\bcorrect[ \t]+(?:option|choice)){IS}"
# or a heading, "### Final answer", above a line that does not begin with a word other than "Option"
ANSWER_HEADING = (
    r"(?im:^[ \t]*+(?:#{1,6}|\*\*)[^a-z\n]*+(?:(?:final|correct)[ \t]++)*+answer[ \t\r*]*+$)"
    r"(?![\s*]*+(?:(?!(?i:option|choice)\b)[^\W\d_]{2}|[AaI][ \t]+[^\W\d_]))"
)

# --- the form of a response


def exact_match(text: str, row: Row) -> float | None:
    """1 if the response is the row's answer, or one of the row's list, up to case and white space at the ends; None for
    a row without an answer."""
    return best_match(lambda right: float(text.strip().lower() == right.strip().lower()), row["answer"])


def matches(pattern: str) -> Reward:
    """1 if the whole response, up to white space at its ends, matches a regular expression (`.` is any character)."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda text, row: float(compiled.fullmatch(text.strip()) is not None)


def think_answer_format(text: str, row: Row) -> float:
    """1 for `<think>...</think>` and then `<answer>...</answer>`, each of the four once, with nothing around them.

    DeepSeek-R1's format reward (https://arxiv.org/abs/2501.12948, section 2.2.2). A template that ends in `<think>`
    leaves the first tag to the prompt: use `matches` there.
    """
    once = all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    return float(once and re.fullmatch(r"<think>.*</think>\s*<answer>.*</answer>", text.strip(), re.DOTALL) is not None)


def split_thinking(text: str, *, opened: bool = False, tags: tuple[str, str] = THINKING_TAGS) -> tuple[str, str]:
    """The thinking of a response, and what follows it.

    Args:
        text: maybe with the tags; the last one that ends thinking counts.
        opened: the prompt ends with the first tag, so the text begins with thinking.
        tags: what begins and ends thinking.

    Returns:
        (thinking, answer). Without the second tag, a text with the first, or an opened one, is all thinking, and any
        other text is all answer.
    """
    begin, end = tags
    before, found, answer = text.rpartition(end)
    if not found:
        thinks = opened or begin in text
        before, answer = (text, "") if thinks else ("", text)
    return before.strip().removeprefix(begin).strip(), answer.strip()


def within_length(longest: int, buffer: int = 0, count: Callable[[str], int] = len) -> Reward:
    """0 up to `longest - buffer`, then falling linearly to -1 at `longest`, and -1 beyond.

    DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476, eq. 13), in any unit;
    `rlkit.advantages.overlong_penalty` does it on the tokens that were sampled.

    Args:
        longest: length at which the reward reaches -1, in the unit of `count`.
        buffer: width of the slope; with 0 the reward steps from 0 to -1 just beyond `longest`.
        count: the length of a text: `len` is characters, `lambda text: len(text.split())` words.

    Raises:
        ValueError: not 0 <= buffer <= longest.
    """
    if not 0 <= buffer <= longest:
        raise ValueError(f"buffer: expected 0 to longest ({longest}), got {buffer}")

    def reward(text: str, row: Row) -> float:
        excess = count(text) - (longest - buffer)
        return -1.0 if excess > buffer else -max(excess, 0) / buffer if buffer else 0.0

    return reward


def repetition(n: int = 4, words: Callable[[str], Sequence[str]] | None = None) -> Reward:
    """-(1 - distinct n-grams / all n-grams): 0 without repetition, towards -1; 0 for fewer than n words.

    open-r1's form of the n-gram penalty of Yeo et al. (https://arxiv.org/abs/2502.03373, appendix C.2, which penalises
    each repeated token separately). Its `max_penalty` is the weight in `combine`.

    Args:
        n: words of an n-gram.
        words: splits a text into words; by default at white space, in lower case. Use `list` for scripts without
            spaces.

    Raises:
        ValueError: n is less than 1.
    """
    if n < 1:
        raise ValueError(f"n: expected at least 1, got {n}")

    def reward(text: str, row: Row) -> float:
        tokens = words(text) if words else text.lower().split()
        grams = list(zip(*(tokens[i:] for i in range(n)), strict=False))
        return len(set(grams)) / len(grams) - 1 if grams else 0.0

    return reward


# --- the answer


def choice_letter(text: str, closing_tag: str = THINKING_TAGS[1]) -> str | None:
    r"""The letter, A to J in upper case, that a text chooses; None if there is none.

    Only the text after the last `closing_tag` counts. Its last `<answer>B</answer>`, `\boxed{B}`, `answer is B`,
    `answer: B` or `correct option is B`, or a heading `### Answer` above B, decides. There the letter may be in
    brackets, `\text{}`, quotes, backticks, `$B$` or `\(B\)`, and may follow `option` or `choice`; a formula such as
    `$a+b$` is no letter. Without any of these, the whole text decides if it is `B`, `(B)` or `B.`, or begins with `B)`,
    `B.` or `B:` followed by more text. Lower-case letters count in the first forms, not in the last. `a` and `I` before
    another word are words: `the answer is a triangle`.
    """
    text = text.rpartition(closing_tag)[2]
    is_word = r"(?-i:[aiI])[ \t]+\w"
    before = r"(?:[\s*(\[{]|\\(?:text|math)(?:bf|rm|it|sf|tt|up)?\{|\b(?:option|choice)\b)*+"
    closing = r"""(?:[\s*.)}\]]*(?:\$|\\[)\]]|["'`”’])|[)}\]](?![\^_(])|[.:]\s)"""
    quoted = rf"""(?:\$\$?|\\[(\[]|["'`“‘]){before}([A-J]){closing}"""
    letter = rf"{before}(?:{quoted}|(?!{is_word})([A-J])(?![\w']))"
    marked = "|".join(mark + letter for mark in ("<answer>", r"\\boxed\{", ANSWER_HEADING, ANSWER_IS, OPTION_IS))
    if matches := list(re.finditer(marked, text, re.IGNORECASE)):
        return next(group for group in matches[-1].groups() if group).upper()
    alone = re.match(r"[\s*(]*([A-J])(?:[\s*).]*$|[).:]\**\s)", text)
    return alone[1] if alone else None


def multiple_choice(text: str, row: Row) -> float | None:
    """1 if `choice_letter` of the response is the row's letter, 0 if it is another one or there is none.

    Raises:
        ValueError: the row's answer is no letter from A to J.
    """
    if row["answer"] is None:
        return None
    right = choice_letter(str(row["answer"]).strip().upper())
    if right is None:
        raise ValueError(f"{row.get('where', 'row')}: answer: expected a letter from A to J, got {row['answer']!r}")
    return float(choice_letter(text, thinking_tags_of(row)[1]) == right)


def numeric_match(relative: float = 0.0, absolute: float = 0.0) -> Reward:
    r"""1 if the last number in the response is the row's: |x - y| <= max(relative * |y|, absolute).

    Only the text after the closing thinking tag counts. Numbers are decimal, with an exponent or not; commas and
    LaTeX's spaces between thousands are left out, units are not looked at. An en dash is a minus, except between two
    numbers. Fractions (1/2, 2 1/2, \frac{1}{2}, 2½) do not count as numbers.
    relative=0.05 is ChartQA's relaxed accuracy (https://arxiv.org/abs/2203.10244, section 5.1).
    """

    def reward(text: str, row: Row) -> float | None:
        if row["answer"] is None:
            return None
        answer = row["answer"]
        if isinstance(answer, Mapping) or len(answer_numbers := _numbers(str(answer))) != 1:
            raise ValueError(f"{row.get('where', 'row')}: answer: expected a number, got {answer!r}")
        (right,), numbers = answer_numbers, _numbers(text.rpartition(thinking_tags_of(row)[1])[2])
        return float(bool(numbers) and abs(numbers[-1] - right) <= max(relative * abs(right), absolute))

    return reward


def _numbers(text: str) -> list[float]:
    """The decimal numbers of a text, without those of fractions and mixed numbers."""
    number = r"[-+]?(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][-+]?\d++)?+"
    whole = r"(?:(?<![\w.])\d++ *+)?"  # of a mixed number
    part = r"\s*(?:\d|\{(?:[^{}]|\{[^{}]*\})*\})"  # of \frac: a digit, or braces with braces inside
    fraction = (
        rf"{whole}\\[dtc]?frac{part}{part}"  # \frac{1}{2}, 2\frac{1}{2}
        rf"|{whole}(?<![\w.]){number}(?:\s*[/⁄]\s*{number})+"  # 1/2, 2 1/2
        r"|(?<!\d)\d*+[¼-¾⅐-⅞]"  # ½, 2½
    )
    text = join_thousands(text.replace("−", "-").replace("__", " "))  # __5__ is 5 in bold
    text = re.sub(r"(?<![\w.%°)\]}])(?<![\d%°][^\S\n])–(?=[\d.])", "-", text)  # not in 3–5 or 3 –5
    return [float(found) for found in re.findall(rf"(?<![\w./]){number}", re.sub(fraction, " ", text))]


def join_thousands(text: str) -> str:
    r"""The text without what stands between the thousands of numbers: `1,500`, `1{,}500`, `1\,500`, `1~500`."""
    return re.sub(r"(?<=\d)(?:,(?:\\!)?|\{,\}|\\[,!;: ]|[~\u00a0\u2009\u202f])(?=\d{3}(?!\d))", "", text)


def squad_normalise(text: str) -> str:
    """Lower case, no punctuation, none of the words a, an and the, single spaces: in this order, as in the evaluation
    script of SQuAD (https://arxiv.org/abs/1606.05250)."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def squad_exact(text: str, row: Row) -> float | None:
    """1 if the response, normalised as by `squad_normalise`, is the row's answer, or one of the row's list."""
    return best_match(lambda right: float(squad_normalise(text) == squad_normalise(right)), row["answer"])


def squad_f1(text: str, row: Row) -> float | None:
    """2PR / (P + R) over the words that both have in common, normalised; the best over the row's answers.

    SQuAD (https://arxiv.org/abs/1606.05250, section 6.1). With an empty text on one side it is 1 if both are empty,
    else 0, as for SQuAD 2's questions without an answer.
    """

    def f1(right: str) -> float:
        words, right_words = squad_normalise(text).split(), squad_normalise(right).split()
        if not words or not right_words:
            return float(words == right_words)
        common = (Counter(words) & Counter(right_words)).total()
        return 2 * common / (len(words) + len(right_words))

    return best_match(f1, row["answer"])


def best_match(compare: Callable[[str], float], answer: Any) -> float | None:
    """The best of `compare` over a row's answer, or over each of a list of answers, as text; None without an answer.

    42.0 is both 42.0 and 42, because tables with missing numbers have 42.0 for 42.

    Raises:
        ValueError: an answer is a mapping.
    """
    if answer is None:
        return None
    answers = accepted_answers(answer)
    answers += [int(right) for right in answers if isinstance(right, float) and right.is_integer()]
    return max((compare(str(right)) for right in answers), default=None)


def accepted_answers(answer: Any) -> list[Any]:
    """A row's answer, or each of its list, as a list.

    Raises:
        ValueError: an answer is a mapping.
    """
    answers = list(answer) if isinstance(answer, list | tuple | np.ndarray) else [answer]
    for right in answers:
        if isinstance(right, Mapping):
            raise ValueError(f"answer: expected text, a number or a list of these, got fields {', '.join(right)}")
    return answers


# --- boxes


def parse_boxes(text: str, closing_tag: str = THINKING_TAGS[1]) -> list[list[float]]:
    """Every `[x1, y1, x2, y2]` or `(x1, y1, x2, y2)` in a text, in order; four numbers and nothing else between.

    Only the text after the last `closing_tag` counts. A box with a number that is too large for a float
    is left out.
    """
    number = r"\s*+([-+]?(?:\d++(?:\.\d*+)?|\.\d++))\s*+"
    matches = re.findall(rf"[\[(]{','.join([number] * 4)}[\])]", text.rpartition(closing_tag)[2])
    boxes = ([float(x) for x in match] for match in matches)
    return [box for box in boxes if all(map(math.isfinite, box))]


def box_iou(a: Any, b: Any) -> np.ndarray:
    """[N, 4] and [M, 4] boxes as x1, y1, x2, y2 -> [N, M] intersection over union; a box with x2 <= x1 is empty."""
    a, b = np.asarray(a, float).reshape(-1, 1, 4), np.asarray(b, float).reshape(1, -1, 4)

    def area(box: np.ndarray) -> np.ndarray:
        return (box[..., 2:] - box[..., :2]).clip(0).prod(-1)

    both = np.concatenate([np.maximum(a[..., :2], b[..., :2]), np.minimum(a[..., 2:], b[..., 2:])], -1)
    shared = area(both)
    return shared / np.maximum(area(a) + area(b) - shared, np.finfo(float).tiny)


def boxes_iou(text: str, row: Row) -> float | None:
    """The IoU of the response's boxes with the row's, in the row's own coordinates, between 0 and 1.

    The sum of IoU over the best one-to-one matching, over max(boxes in the response, boxes in the row). For one box on
    each side this is their IoU. An extra box costs as much as a missing one. With no box on either side it is 1.

    Args:
        text: a response with boxes as in `parse_boxes`.
        row: its `answer` is one box, a list of boxes, or either as text.

    Raises:
        ValueError: the row's answer has another form.
    """
    with requires_extra("rewards"):
        from scipy.optimize import linear_sum_assignment

    answer = row["answer"]
    if answer is None:
        return None
    try:
        wanted = np.asarray(json.loads(answer) if isinstance(answer, str) else answer, float)
        wanted = wanted.reshape(-1, 4) if wanted.shape in ((0,), (4,)) else wanted
    except (TypeError, ValueError):
        wanted = np.empty(0)
    if wanted.ndim != 2 or wanted.shape[1] != 4:
        raise ValueError(f"{row.get('where', 'row')}: answer: expected boxes [x1, y1, x2, y2], got {answer!r}")
    boxes = parse_boxes(text, thinking_tags_of(row)[1])
    if not boxes or not len(wanted):
        return float(len(boxes) == len(wanted))
    overlaps = box_iou(boxes, wanted)
    return float(overlaps[linear_sum_assignment(overlaps, maximize=True)].sum() / max(overlaps.shape))
