"""Rewards take linear time, so that a policy cannot stall training with very long answers."""

import asyncio
import time

import pytest

from rlkit.data import prompt_sample
from rlkit.rewards import maths, rules
from rlkit.rewards.judge import last_score
from rlkit.rewards.named import REWARDS
from rlkit.rewards.programs import extract_program
from rlkit.rollout import image_tools

CHARACTERS = 100_000
SECONDS = 1.0  # processor time of this thread; each takes some milliseconds, and took minutes where it was quadratic

READS = {  # what each reward reads an answer with
    "exact_match": lambda text: rules.exact_match(text, {"answer": "x"}),
    "matches": lambda text: rules.matches(r"<b>.*</b>")(text, {}),
    "think_answer_format": lambda text: rules.think_answer_format(text, {}),
    "within_length": lambda text: rules.within_length(100, 50)(text, {}),
    "repetition": lambda text: rules.repetition()(text, {}),
    "multiple_choice": lambda text: rules.multiple_choice(text, {"answer": "B"}),
    "numeric_match": lambda text: rules.numeric_match()(text, {"answer": "3"}),
    "squad_exact": lambda text: rules.squad_exact(text, {"answer": "the cat"}),
    "squad_f1": lambda text: rules.squad_f1(text, {"answer": "the cat"}),
    "boxes_iou": lambda text: rules.boxes_iou(text, {"answer": [1, 2, 3, 4]}),
    "boxed_match": lambda text: maths.boxed_match(text, {"answer": "3"}),
    "maths_reward": maths.final_answer,  # the comparison is in a worker with limits of its own
    "last_score": last_score,
    "extract_program": extract_program,
    "zoom": image_tools.ZOOM_CALL.search,
}
# (beginning, what is repeated to the length, end)
WORST = [
    *[("", part, "!") for part in (" ", "\n", "1", "a", "A ", "(", "[", "*", "`", "\\", "$", ",", "-", "a the ")],
    *[("", part, "") for part in ("<think>", "</think>", "<answer>", "\\boxed{", "score ", "answer ", "answer is ")],
    *[("", part, "") for part in ("[0,0,1,1]", "[1,", "(1, ", "1,", "1e", "1.", "```\n", "```a ", "zoom(1,", "#### ")],
    *[("score", part, "!") for part in (" ", "\n", "\t ")],
    *[("score:", part, "!") for part in (" ", "1")],
    *[("score **", part, "") for part in (" ", "*")],
    *[("<answer>", part, "!") for part in ("(", " ", "*", "( ", "[{")],
    *[("\\boxed{\\text{", part, "!") for part in ("(", " ", "{", "A")],
    *[("answer is", part, "!") for part in (" ", "(", "*")],
    *[("answer", part, "!") for part in (" ", "\n")],
    *[("[", part, "!") for part in ("1", " ", "1.", ".")],
    *[("[1,2,3,", part, "!") for part in ("1", " ", "-")],
    *[("```", part, "!") for part in (" ", "a", " a", "\t")],
    *[("```py\n", part, "") for part in ("x\n", "`", " ```", "x``` ", "~~~ ", "~~~\n ```\n")],
    *[("", part, "") for part in (" ```\n", "x```\n", "  ~~~\n", " ~~~ ")],
    ("", "\n".join(" " * n + "```" for n in range(440)) + "\n", ""),
    *[("", part, "") for part in ("\\[ ", "$$ ", "\\[\n", "\\begin{a}\n", "\\begin{a", "\\begin{a} ")],
    *[("<think></think><answer>", part, "!") for part in (" ", "<", "x</answer")],
    *[("<think></think>", part, "<answer>x</answer>") for part in (" ", "\n")],
]


@pytest.mark.parametrize("name", READS)
def test_a_reward_is_linear_in_the_answer(name):
    read, slow = READS[name], {}
    read("an answer")  # what is imported and compiled at first
    for beginning, part, end in WORST:
        text = beginning + part * ((CHARACTERS - len(beginning + end)) // len(part)) + end
        start = time.thread_time()
        read(text)
        if (seconds := time.thread_time() - start) > SECONDS:
            slow[beginning, part, end] = seconds
            break  # the others may take minutes
    assert not slow


def test_all_named_rewards_are_tried():
    assert {reward.__name__ for reward in REWARDS.values()} <= READS.keys()


def test_numbers_that_no_float_can_hold():
    """They are wrong, and neither an error nor an answer that is not scored."""
    digits = "9" * 5000
    assert rules.parse_boxes(f"[0, 0, {digits}, 1] [1, 2, 3, 4]") == [[1, 2, 3, 4]]
    assert rules.boxes_iou(f"[0, 0, {digits}, 1]", {"answer": [1, 2, 3, 4]}) == 0.0
    assert rules.numeric_match(relative=0.05)(digits, {"answer": "3"}) == 0.0
    assert last_score(f"Score: {digits}") is None


def test_a_tool_call_with_a_number_of_any_length():
    assert asyncio.run(image_tools.zoom(prompt_sample([1], text=f"zoom(0, 0, {'9' * 5000}, 1)"))) is None
