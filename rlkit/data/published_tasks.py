r"""Tasks on published data sets, with fixed prompts and graders, so that results can be compared.

    load_task("gsm8k")                 # from the hub
    load_task("gsm8k@/data/gsm8k")     # from a copy of the data set's repository, or what `save_to_disk` wrote

| task | data set | trained on | held out | prompt | grader |
|---|---|---|---|---|---|
| gsm8k | openai/gsm8k, main | train, 7,473 | test, 1,319 | question + BOXED | maths_reward |
| math | DigitalLearningGmbH/MATH-lighteval | train, 7,500 | test, 5,000 | problem + BOXED | maths_reward |
| math500 | HuggingFaceH4/MATH-500 | none | test, 500 | problem + BOXED | maths_reward |
| dapo17k | BytedTsinghua-SIA/DAPO-Math-17k | train, 17k | 300 of them | its own | maths_reward |
| aime24 | BytedTsinghua-SIA/AIME-2024 | none | train, 30 | as dapo17k | maths_reward |
| geometry3k | hiyouga/geometry3k | train, 2,101 | test, 601 | image, problem + BOXED | maths_reward |
| clevr_counting | BUAADreamer/clevr_count_70k | train, 70,000 | test | image, problem + BOXED | maths_reward |
| scienceqa | derek-thomas/ScienceQA | train, 12,726 | test, 4,241 | image, hint, options + LETTER | multiple_choice |
| mmstar | Lin-Chen/MMStar | none | val, 1,500 | image, question with its options + LETTER | multiple_choice |

A task without training rows is for evaluation. BOXED and LETTER are constants below. The prompts of dapo17k and aime24
are in the data sets, and ask for a last line "Answer: ...". Published results often use other prompts and graders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from rlkit.data.hub import map_table, read_split, read_splits
from rlkit.data.samples import Row
from rlkit.data.tables import Rows, split_heldout
from rlkit.data.tasks import Task
from rlkit.rewards.maths import final_answer, maths_reward
from rlkit.rewards.rules import multiple_choice

BOXED = "Reason step by step, and put your final answer within \\boxed{}."
LETTER = "Reason step by step, and put the letter of the correct option within \\boxed{}."
LETTERS = "ABCDEFGHIJ"


def gsm8k(source: str = "openai/gsm8k") -> Task:
    """Grade-school word problems, https://huggingface.co/datasets/openai/gsm8k, arXiv 2110.14168.

    Columns `question` and `answer`, a worked solution that ends in `#### 72`.
    """

    def row(raw: Row) -> Row:
        return _row(raw["question"], _final_answer(raw["answer"].replace(",", "")), BOXED)

    return _split_task("gsm8k", source, row, maths_reward, "train", "test", subset="main")


def math(source: str = "DigitalLearningGmbH/MATH-lighteval") -> Task:
    """Competition problems, https://huggingface.co/datasets/DigitalLearningGmbH/MATH-lighteval, arXiv 2103.03874.

    Columns `problem`, `level` ("Level 1" to "Level 5", the row's `difficulty`), `type` and `solution`, with the answer
    in its last box.
    """
    return _split_task("math", source, _math_row, maths_reward, "train", "test")


def math500(source: str = "HuggingFaceH4/MATH-500") -> Task:
    """500 of MATH's test problems, https://huggingface.co/datasets/HuggingFaceH4/MATH-500, to evaluate.

    Columns `problem`, `solution`, `answer`, `subject`, `level` (1 to 5) and `unique_id`.
    """
    return _split_task("math500", source, _math_row, maths_reward, None, "test")


def dapo17k(source: str = "BytedTsinghua-SIA/DAPO-Math-17k") -> Task:
    """DAPO's problems, https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k, arXiv 2503.14476.

    Columns `prompt` (a chat of one message with its own instructions: the last line is to be "Answer: ..."),
    `reward_model` ({"ground_truth", "style"}), `data_source`, `ability` and `extra_info`. The file holds each problem a
    hundred times; here it is there once. A fixed 300 are held out; the paper evaluates on `aime24`.
    """
    rows = _dapo_rows(source)
    return Task("dapo17k", *split_heldout(rows), maths_reward, {"train": rows})


def aime24(source: str = "BytedTsinghua-SIA/AIME-2024") -> Task:
    """The 30 problems of AIME 2024 as DAPO asks them, https://huggingface.co/datasets/BytedTsinghua-SIA/AIME-2024.

    Columns as of `dapo17k`; each problem, which the file holds 32 times, is there once.
    """
    return Task("aime24", (), _dapo_rows(source), maths_reward)


def geometry3k(source: str = "hiyouga/geometry3k") -> Task:
    """Geometry problems with a figure, https://huggingface.co/datasets/hiyouga/geometry3k, arXiv 2105.04165.

    Columns `images`, `problem` (with `<image>` where the figure goes: in front) and `answer`.
    """

    def row(raw: Row) -> Row:
        return _row(raw["problem"], raw["answer"], BOXED, raw["images"])

    return _split_task("geometry3k", source, row, maths_reward, "train", "test")


def clevr_counting(source: str = "BUAADreamer/clevr_count_70k") -> Task:
    """How many objects are in a scene, https://huggingface.co/datasets/BUAADreamer/clevr_count_70k, arXiv 1612.06890.

    Columns `images`, `problem` (with `<image>` in front) and `answer`, a number in digits.
    """

    def row(raw: Row) -> Row:
        return _row(raw["problem"], raw["answer"], BOXED, raw["images"])

    return _split_task("clevr_counting", source, row, maths_reward, "train", "test")


def scienceqa(source: str = "derek-thomas/ScienceQA") -> Task:
    """School science by multiple choice, https://huggingface.co/datasets/derek-thomas/ScienceQA, arXiv 2209.09513.

    Columns `image` (or none), `question`, `choices` (a list), `answer` (its index), `hint` and others, which are not
    shown: `lecture` and `solution` would tell.
    """

    def row(raw: Row) -> Row:
        options = [f"{letter}. {text}" for letter, text in zip(LETTERS, raw["choices"], strict=False)]
        question = "\n".join([*filter(None, [raw["hint"]]), raw["question"], *options])
        return _row(question, LETTERS[raw["answer"]], LETTER, [raw["image"]] if raw["image"] else [])

    return _split_task("scienceqa", source, row, multiple_choice, "train", "test")


def mmstar(source: str = "Lin-Chen/MMStar") -> Task:
    """Multiple choice that needs the image, https://huggingface.co/datasets/Lin-Chen/MMStar, arXiv 2403.20330.

    To evaluate. Columns `index`, `question` (its options "A: ..., B: ..." included), `image`, `answer` (a letter),
    `category`, `l2_category` and `meta_info`.
    """

    def row(raw: Row) -> Row:
        return _row(raw["question"], raw["answer"].strip(), LETTER, [raw["image"]])

    return _split_task("mmstar", source, row, multiple_choice, None, "val")


PUBLISHED_TASKS: Mapping[str, Callable[..., Task]] = {
    function.__name__: function
    for function in (gsm8k, math, math500, dapo17k, aime24, geometry3k, clevr_counting, scienceqa, mmstar)
}


def _split_task(
    name: str,
    source: str,
    row: Callable[[Row], Row],
    reward: Callable[[str, Row], float | None],
    train: str | None,
    heldout: str,
    subset: str | None = None,
) -> Task:
    splits = read_splits(source, subset)
    if missing := [split for split in (train, heldout) if split is not None and split not in splits]:
        raise ValueError(f"task {name!r}: expected a split {missing[0]!r} of {source!r}, got {sorted(splits)}")
    rows = {
        split: map_table(splits[split], row, f"{source} {split}") for split in (train, heldout) if split is not None
    }
    return Task(name, rows[train] if train is not None else (), rows[heldout], reward, rows)


def _row(question: str, answer: str | None, instruction: str, images: Any = ()) -> dict[str, Any]:
    """A row with the instruction after the question; images go before it, so `<image>` is removed from its text."""
    question = question.replace("<image>", "").strip()
    return {"question": f"{question}\n\n{instruction}", "images": list(images), "answer": answer}


def _final_answer(solution: str) -> str | None:
    found = final_answer(solution)
    return None if found is None else found[0]


def _math_row(raw: Row) -> Row:
    answer = raw["answer"] if "answer" in raw else _final_answer(raw["solution"])
    level = re.search(r"\d", str(raw["level"]))  # a few rows have "Level ?"
    return {**_row(raw["problem"], answer, BOXED), "difficulty": int(level.group()) if level else 5}


def _dapo_rows(source: str) -> Rows:
    """The rows without repeated prompts: of each prompt the first."""
    table = read_split(source, "train")
    first: dict[str, int] = {}
    if isinstance(table, list):
        chats = (raw["prompt"] for raw in table)
    else:
        chats = (chat for part in table.select_columns("prompt").iter(1000) for chat in part["prompt"])
    for place, chat in enumerate(chats):
        first.setdefault(chat[0]["content"], place)

    def row(raw: Row) -> Row:
        return {"question": raw["prompt"][0]["content"], "images": [], "answer": raw["reward_model"]["ground_truth"]}

    return map_table(table, row, f"{source} train")[list(first.values())]
