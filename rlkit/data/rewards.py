r"""Rewards for text that plain code can judge, and rewards made of several parts.

    reward = combine({"right": (1.0, multiple_choice), "format": (0.1, think_answer_format)})
    rewards, parts = score_parts(reward, samples)              # [B], and {"right": [B], "format": [B]} for curves
    run.log(step, {**reward_stats(rewards, ids, engine.global_sum), **part_means(parts, engine.global_sum), ...})

Each is `reward(text, row) -> float | None`, or a function that makes one from its settings. `row["answer"]` is what is
right; a row without one is not judged. Elsewhere: mathematics in `maths`, programs in
`programs`, a model as judge in `judge`.
"""

from __future__ import annotations

import json
import logging
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.data.samples import Sample
from rlkit.data.tables import Row

Reward = Callable[[str, Row], float | None]

log = logging.getLogger(__name__)


# --- of a batch


def score(reward: Reward, samples: Sequence[Sample], *, threads: int = 1) -> Tensor:
    """[B] float32 rewards; nan where the reward function raised, or returned None, nan or an infinity: not judged.

    A failure is logged with its row, never turned into a 0. A sample that was aborted is not judged.

    Args:
        threads: rewards under way at once, for those that wait for a process or a server (maths, programs, a judge).
    """
    judge = partial(_judge, reward)
    if threads == 1:  # in this thread: a reward may use signals
        return torch.tensor([judge(sample) for sample in samples], dtype=torch.float32)
    with ThreadPoolExecutor(threads) as pool:
        return torch.tensor(list(pool.map(judge, samples)), dtype=torch.float32)


def _judge(reward: Reward, sample: Sample) -> float:
    if sample.finish_reason == "aborted":  # a tool failed, which says nothing about the policy
        return math.nan
    try:
        value = reward(sample.text, sample.row)
        value = math.nan if value is None else float(value)
        return value if math.isfinite(value) else math.nan  # an infinite one would spoil its whole group
    except Exception as error:  # whatever it is, it is the reward's, and it says nothing about the answer
        where = sample.row.get("where", f"group {sample.group_id}")
        log.warning("reward failed on %s, answer %r: %s: %s", where, sample.text[:80], type(error).__name__, error)
        return math.nan


def judged(samples: Sequence[Sample], rewards: Tensor) -> list[Sample]:
    """Those samples that could be judged, each with its reward."""
    pairs = zip(samples, rewards.tolist(), strict=True)
    return [replace(sample, reward=value) for sample, value in pairs if not math.isnan(value)]


# --- several parts


@dataclass(frozen=True)
class Combined:
    """A reward that is a weighted sum; see `combine`."""

    parts: Mapping[str, tuple[float, Reward]]

    def __call__(self, text: str, row: Row) -> float | None:
        total = 0.0
        for weight, reward in self.parts.values():
            if weight:
                value = reward(text, row)
                if value is None:
                    return None
                total += weight * value
        return total


def combine(parts: Mapping[str, tuple[float, Reward]]) -> Combined:
    """sum_k weight_k * reward_k(text, row); None as soon as one part with a weight could not be judged.

    Args:
        parts: for each name a weight and a reward. A part with weight 0 is a curve and nothing else: it is worked out
            by `score_parts` alone, and its failures do not count.

    Raises:
        ValueError: no part, or a weight that is not finite.
    """
    if not parts or not all(math.isfinite(weight) for weight, _ in parts.values()):
        weights = {name: weight for name, (weight, _) in parts.items()}
        raise ValueError(f"parts: at least one, with finite weights, expected, came {weights}")
    return Combined(dict(parts))


def score_parts(reward: Reward, samples: Sequence[Sample], *, threads: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    """`score`, and each part of a combined reward by itself; every part judges every sample once.

    Args:
        threads: rewards under way at once, as in `score`.

    Returns:
        rewards [B] float32, nan where one part with a weight could not be judged; and parts, name -> [B] before its
        weight (empty for a reward that is not combined): a run logs their means, GDPO takes them as they are.
    """
    if not isinstance(reward, Combined):
        return score(reward, samples, threads=threads), {}
    parts = {name: score(part, samples, threads=threads) for name, (_, part) in reward.parts.items()}
    total = torch.zeros(len(samples), dtype=torch.float64)
    for name, (weight, _) in reward.parts.items():
        if weight:
            total += weight * parts[name]
    return total.float(), parts


def part_means(parts: Mapping[str, Tensor], global_sum: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """`reward_part/<name>` -> mean of a part over all samples of all ranks that it could judge, for a run's curves.

    Args:
        parts: of `score_parts`, for this rank's samples; all ranks call this together.
        global_sum: the engine's.
    """
    if not parts:
        return {}
    sums = [torch.stack([part.nansum(), (~part.isnan()).sum()]).double() for part in parts.values()]
    means = [total / count if count else math.nan for total, count in global_sum(torch.stack(sums)).tolist()]
    return {f"reward_part/{name}": mean for name, mean in zip(parts, means, strict=True)}


def reward_stats(rewards: Tensor, group_ids: Tensor, global_sum: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """How the rewards of a batch are distributed, over all ranks, for a run's curves.

    `reward/mean`; `reward/std`, the population's; and over prompts, the mean of the best answer's reward `reward/best`
    and of the worst one's `reward/worst`, and `reward/equal`, the share of prompts whose answers all have the same
    reward, which teach nothing where answers are compared with each other.

    Args:
        rewards: [B], of this rank's answers; those that are nan (not judged) are left out.
        group_ids: [B], the same integer for all answers to one prompt, which are all on one rank.
        global_sum: the engine's; all ranks call this together.

    Returns:
        Nothing where no rank has an answer that was judged.
    """
    judged = ~rewards.isnan()
    rewards, ids = rewards[judged].double(), group_ids[judged].unique(return_inverse=True)[1]
    groups = torch.zeros(int(ids.max()) + 1 if len(ids) else 0, dtype=torch.float64)
    best, worst = (groups.scatter_reduce(0, ids, rewards, how, include_self=False) for how in ("amax", "amin"))
    sums = [len(rewards), rewards.sum(), rewards.square().sum(), len(groups)]
    sums += [best.sum(), worst.sum(), (best == worst).sum()]
    count, total, squares, prompts, *by_prompt = global_sum(torch.tensor(sums, dtype=torch.float64)).tolist()
    if not count:
        return {}
    mean = total / count
    shares = zip(("best", "worst", "equal"), by_prompt, strict=True)
    std = max(squares / count - mean**2, 0.0) ** 0.5
    return {"reward/mean": mean, "reward/std": std, **{f"reward/{name}": x / prompts for name, x in shares}}


# --- the form of an answer


def exact_match(text: str, row: Row) -> float | None:
    """1 if the answer is the row's, up to case and white space at the ends; None for a row without an answer."""
    if row["answer"] is None:
        return None
    return float(text.strip().lower() == str(row["answer"]).strip().lower())


def matches(pattern: str) -> Reward:
    """1 if the whole answer, up to white space at its ends, matches a regular expression (`.` is any character)."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda text, row: float(compiled.fullmatch(text.strip()) is not None)


def think_answer_format(text: str, row: Row) -> float:
    """1 for `<think>...</think>` and then `<answer>...</answer>`, each of the four once, with nothing around them.

    DeepSeek-R1's format reward (https://arxiv.org/abs/2501.12948, section 2.2.2). A template that ends in `<think>`
    leaves the first tag to the prompt: use `matches` there.
    """
    once = all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    return float(once and re.fullmatch(r"<think>.*</think>\s*<answer>.*</answer>", text.strip(), re.DOTALL) is not None)


def within_length(longest: int, buffer: int = 0, count: Callable[[str], int] = len) -> Reward:
    """0 up to `longest - buffer`, then falling linearly to -1 at `longest`, and -1 beyond.

    DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476, eq. 13), in any unit;
    `rlkit.advantages.overlong_penalty` does it on the tokens that were sampled.

    Args:
        longest: from here on it is -1, in the unit of `count`.
        buffer: width of the slope; 0 is a step behind `longest`.
        count: the length of a text: `len` is characters, `lambda text: len(text.split())` words.

    Raises:
        ValueError: not 0 <= buffer <= longest.
    """
    if not 0 <= buffer <= longest:
        raise ValueError(f"buffer: 0 to longest ({longest}) expected, came {buffer}")

    def reward(text: str, row: Row) -> float:
        over = count(text) - (longest - buffer)
        return -1.0 if over > buffer else -max(over, 0) / buffer if buffer else 0.0

    return reward


def repetition(n: int = 4, words: Callable[[str], Sequence[str]] | None = None) -> Reward:
    """-(1 - distinct n-grams / all n-grams): 0 without repetition, towards -1; 0 for fewer than n words.

    What open-r1 makes of the n-gram penalty of Yeo et al. (https://arxiv.org/abs/2502.03373, appendix C.2, where each
    repeated token is punished by itself). Its `max_penalty` is the weight in `combine`.

    Args:
        n: words of an n-gram.
        words: cuts a text; by default lower case, at white space. `list` is for scripts without spaces.

    Raises:
        ValueError: n is less than 1.
    """
    if n < 1:
        raise ValueError(f"n: at least 1 expected, came {n}")

    def reward(text: str, row: Row) -> float:
        cut = words(text) if words else text.lower().split()
        grams = list(zip(*(cut[i:] for i in range(n)), strict=False))
        return len(set(grams)) / len(grams) - 1 if grams else 0.0

    return reward


# --- the answer


def choice_letter(text: str) -> str | None:
    r"""The letter, A to J in upper case, that a text chooses; None if there is none.

    Of what follows the last `</think>`, the last of: `<answer>B</answer>`, `\boxed{B}` (with or without `\text{}` and
    brackets), `answer is B` or `answer: (B)`; without one of them, the text as a whole if it is `B`, `(B)`, `B.` or
    begins with `B)`, `B.` or `B:` and goes on. Lower-case letters count in the first forms, not in the last.
    """
    text = text.rpartition("</think>")[2]
    letter = r"[\s*(\[{]*(?:\\(?:text|textbf|mathrm|mathbf)\{)?[\s(]*([A-J])(?![\w'])"
    marked = rf"<answer>{letter}|\\boxed\{{{letter}|\banswer\s*(?:is|:)(?:\*\*)?:?{letter}"
    if found := list(re.finditer(marked, text, re.IGNORECASE)):
        return next(group for group in found[-1].groups() if group).upper()
    alone = re.match(r"[\s*(]*([A-J])(?:[\s*).]*$|[).:]\**\s)", text)
    return alone[1] if alone else None


def multiple_choice(text: str, row: Row) -> float | None:
    """1 if `choice_letter` of the answer is the row's letter, 0 if it is another one or there is none.

    Raises:
        ValueError: the row's answer is no letter from A to J.
    """
    if row["answer"] is None:
        return None
    right = choice_letter(str(row["answer"]).strip().upper())
    if right is None:
        raise ValueError(f"{row.get('where', 'row')}: answer: a letter from A to J expected, came {row['answer']!r}")
    return float(choice_letter(text) == right)


def numeric_match(relative: float = 0.0, absolute: float = 0.0) -> Reward:
    """1 if the last number in the answer is the row's: |x - y| <= max(relative * |y|, absolute).

    Numbers are decimal, with an exponent or not; commas between thousands are left out, units are not looked at.
    relative=0.05 is ChartQA's relaxed accuracy (https://arxiv.org/abs/2203.10244, section 5.1).
    """

    def reward(text: str, row: Row) -> float | None:
        if row["answer"] is None:
            return None
        right = _last_number(str(row["answer"]))
        if right is None:
            raise ValueError(f"{row.get('where', 'row')}: answer: a number expected, came {row['answer']!r}")
        found = _last_number(text)
        return float(found is not None and abs(found - right) <= max(relative * abs(right), absolute))

    return reward


def _last_number(text: str) -> float | None:
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text.replace("−", "-"))
    found = re.findall(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", text)
    return float(found[-1]) if found else None


def squad_normalise(text: str) -> str:
    """Lower case, no punctuation, none of the words a, an and the, single spaces: in this order, as in the evaluation
    script of SQuAD (https://arxiv.org/abs/1606.05250)."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def squad_exact(text: str, row: Row) -> float | None:
    """1 if the answer, normalised as by `squad_normalise`, is the row's, or one of the row's list."""
    return _best(lambda right: float(squad_normalise(text) == squad_normalise(right)), row)


def squad_f1(text: str, row: Row) -> float | None:
    """2PR / (P + R) over the words that both have in common, normalised; the best over the row's answers.

    SQuAD (https://arxiv.org/abs/1606.05250, section 6.1). With an empty answer on one side it is 1 if both are empty,
    else 0, as for SQuAD 2's questions without an answer.
    """

    def f1(right: str) -> float:
        mine, theirs = squad_normalise(text).split(), squad_normalise(right).split()
        if not mine or not theirs:
            return float(mine == theirs)
        common = (Counter(mine) & Counter(theirs)).total()
        return 2 * common / (len(mine) + len(theirs))

    return _best(f1, row)


def _best(compare: Callable[[str], float], row: Row) -> float | None:
    answer = row["answer"]
    answers = list(answer) if isinstance(answer, list | tuple | np.ndarray) else [answer]
    return None if answer is None or not answers else max(compare(str(right)) for right in answers)


# --- boxes


def parse_boxes(text: str) -> list[list[float]]:
    """Every `[x1, y1, x2, y2]` or `(x1, y1, x2, y2)` in a text, in order; four numbers and nothing else between."""
    number = r"\s*([-+]?(?:\d+\.?\d*|\.\d+))\s*"
    boxes = re.findall(rf"[\[(]{','.join([number] * 4)}[\])]", text.rpartition("</think>")[2])
    return [[float(x) for x in box] for box in boxes]


def box_iou(a: Any, b: Any) -> np.ndarray:
    """[N, 4] and [M, 4] boxes as x1, y1, x2, y2 -> [N, M] intersection over union; a box with x2 <= x1 is empty."""
    a, b = np.asarray(a, float).reshape(-1, 1, 4), np.asarray(b, float).reshape(1, -1, 4)

    def area(box: np.ndarray) -> np.ndarray:
        return (box[..., 2:] - box[..., :2]).clip(0).prod(-1)

    both = np.concatenate([np.maximum(a[..., :2], b[..., :2]), np.minimum(a[..., 2:], b[..., 2:])], -1)
    shared = area(both)
    return shared / np.maximum(area(a) + area(b) - shared, np.finfo(float).tiny)


def boxes_iou(text: str, row: Row) -> float | None:
    """The IoU of the answer's boxes with the row's, in the row's own coordinates, between 0 and 1.

    sum of IoU over the best one-to-one matching / max(boxes found, boxes wanted): with one box on each side their IoU;
    a box too many costs as much as one that is missing. No box on either side is 1.

    Args:
        text: an answer with boxes as in `parse_boxes`.
        row: its `answer` is one box, a list of boxes, or either as text.

    Raises:
        ValueError: the row's answer is nothing of that.
    """
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
        raise ValueError(f"{row.get('where', 'row')}: answer: boxes [x1, y1, x2, y2] expected, came {answer!r}")
    found = parse_boxes(text)
    if not found or not len(wanted):
        return float(len(found) == len(wanted))
    overlaps = box_iou(found, wanted)
    return float(overlaps[linear_sum_assignment(overlaps, maximize=True)].sum() / max(overlaps.shape))
