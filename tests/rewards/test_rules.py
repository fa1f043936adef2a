import math
import re
from itertools import permutations

import numpy as np
import pytest
import torch

from rlkit.advantages import overlong_penalty
from rlkit.rewards.maths import boxed_match
from rlkit.rewards.rules import (
    box_iou,
    boxes_iou,
    choice_letter,
    exact_match,
    matches,
    multiple_choice,
    numeric_match,
    parse_boxes,
    repetition,
    split_thinking,
    squad_exact,
    squad_f1,
    squad_normalise,
    think_answer_format,
    within_length,
)

ANY = {"answer": "x"}


# --- form


@pytest.mark.parametrize(
    ("text", "opened", "thinking", "answer"),
    [
        ("4", False, "", "4"),
        ("<think>\n2 + 2\n</think>\n\n4", False, "2 + 2", "4"),
        ("2 + 2</think> 4", False, "2 + 2", "4"),  # the prompt, or the template, has opened it
        ("<think>a</think>b</think> 4", False, "a</think>b", "4"),
        ("<think>2 + 2", False, "2 + 2", ""),
        ("2 + 2", True, "2 + 2", ""),
        ("", True, "", ""),
        ("x <think>2 + 2", False, "x <think>2 + 2", ""),
    ],
)
def test_split_thinking(text, opened, thinking, answer):
    assert split_thinking(text, opened=opened) == (thinking, answer)


MISTRAL, GEMMA = ("[THINK]", "[/THINK]"), ("<|channel>", "<channel|>")
GPT_OSS = ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>")


@pytest.mark.parametrize(
    ("tags", "text", "answer"),
    [
        (MISTRAL, "[THINK]2 + 2[/THINK]4", "4"),
        (MISTRAL, "[THINK]2 + 2", ""),
        (MISTRAL, "<think>2 + 2</think>4", "<think>2 + 2</think>4"),
        (GEMMA, "<|channel>thought\n2 + 2<channel|>4", "4"),
        (GPT_OSS, "<|channel|>analysis<|message|>2 + 2assistant<|channel|>final<|message|>4", "4"),
        (GPT_OSS, "<|channel|>analysis<|message|>2 + 2assistant<|channel|>commentary", ""),
        (GPT_OSS, "<|channel|>final<|message|>4", "4"),
    ],
)
def test_split_thinking_with_other_tags(tags, text, answer):
    assert split_thinking(text, tags=tags)[1] == answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>", 1), ("  <think></think><answer></answer>\n", 1),
        ("<think>a</think><answer>c", 0), ("<answer>c</answer><think>a</think>", 0), ("<answer>c</answer>", 0),
        ("<think>a</think> so <answer>c</answer>", 0), ("<think>a</think><answer>c</answer> done", 0),
        ("<think>a</think><answer>c</answer><answer>d</answer>", 0), ("<think><think>a</think><answer>c</answer>", 0),
        ("", 0),
    ],
)  # fmt: skip
def test_think_answer_format(text, expected):
    assert think_answer_format(text, ANY) == expected


def test_matches():
    reward = matches(r"[A-D]|\d+")
    assert [reward(text, ANY) for text in ("A", " 12\n", "AB", "1 2", "")] == [1, 1, 0, 0, 0]
    assert matches(".*")("a\nb", ANY) == 1


def test_within_length():
    reward = within_length(10, 4)
    assert [reward("x" * n, ANY) for n in (0, 6, 7, 8, 10, 11, 99)] == [0, 0, -0.25, -0.5, -1, -1, -1]
    words = within_length(3, count=lambda text: len(text.split()))
    assert [words(text, ANY) for text in ("a b c", "a b c d", "")] == [0, -1, 0]
    for longest, buffer in ((10, 4), (10, 10), (10, 0)):
        lengths = torch.arange(15)
        of_tokens = overlong_penalty(lengths, longest, buffer)
        penalties = [within_length(longest, buffer)("x" * n, ANY) for n in range(15)]
        assert of_tokens.tolist() == pytest.approx(penalties)
    for buffer in (-1, 11):
        with pytest.raises(ValueError, match=rf"buffer: expected 0 to longest \(10\), got {buffer}"):
            within_length(10, buffer)


@pytest.mark.parametrize(
    ("text", "n", "expected"),
    [
        ("a b c d", 2, 0.0), ("a a a a", 2, -2 / 3), ("A a a a", 1, -0.75), ("a b a b a b", 2, -0.6), ("a b", 3, 0.0),
        ("", 1, 0.0), ("the cat the cat", 3, 0.0), ("x " * 100, 4, -96 / 97),
    ],
)  # fmt: skip
def test_repetition(text, n, expected):
    assert repetition(n)(text, ANY) == pytest.approx(expected)


def test_repetition_cuts_as_it_is_told():
    assert repetition(1, list)("aab", ANY) == pytest.approx(-1 / 3) and repetition(1)("aab", ANY) == 0
    with pytest.raises(ValueError, match="n: expected at least 1, got 0"):
        repetition(0)


# --- choices, numbers, words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("B", "B"), (" (B) ", "B"), ("B.", "B"), ("**B**", "B"), ("B) because it is", "B"), ("B. Paris", "B"),
        ("The answer is B.", "B"), ("The answer is (b)", "B"), ("Answer: C", "C"), ("**Answer:** C", "C"),
        ("The correct answer is: **D**", "D"), (r"so \boxed{A}", "A"), (r"\boxed{\text{A}}", "A"),
        (r"\boxed{(A)}", "A"),
        (r"\boxed{\textbf{(A)}}", "A"), ("<answer>C</answer>", "C"), ("<answer> (c) </answer>", "C"),
        ("The answer is A. No: the answer is B.", "B"), (r"The answer is A, \boxed{C}", "C"), ("J", "J"),
        ("<think>answer: A</think>B", "B"), ("A</think>I do not know", None),
        ("A dog barks", None), ("b", None), ("a", None), ("I", "I"), ("I think it is so", None), ("K", None),
        ("", None), ("AB", None), ("The answer is Berlin", None), ("The answer is unknown", None), ("A or B", None),
        ("B'", None), ("Both A and B", None), ("answer is A's", None),
        ("The answer is a triangle.", None), ("The answer is a", "A"), ("Answer: a.", "A"), ("answer: a\nDone", "A"),
        ("The correct answer is (B), because the answer is a square.", "B"), ("Answer: I would choose (B).", None),
        ("The answer is A because", "A"), ("The answer is (a) triangle", "A"), ("Answer: I", "I"),
        ("A dog.\n**Answer**: C", "C"), ("**Final Answer**: (c)", "C"), ("**Answer** is **C**", "C"),
        ("### Answer\nC\n\nIt is a dog.", "C"), ("#### **Final Answer**\n\n**(C)** a dog", "C"),
        ("**Answer**\nC. a dog", "C"), ("So\r\n## 3. Answer\r\n$C$\r\nIt barks", "C"), ("### Answer:\nC", "C"),
        ("### Answer\n\n**Option C**", "C"), ("### Answer\nOptions C and D fit.", None),
        ("The correct option is C.", "C"), ("The correct choice is (C), a dog", "C"),
        ("The correct option is **C**.", "C"), ("The correct option is: C", "C"),
        ("### Answer\nA dog barks.", None), ("### Answer\nI think a dog does.", None), ("### Answer\nDogs do.", None),
        ("In my answer\nC is a dog", None), ("## How to answer\nC", None), ("**Wrong answer**\nC", None),
        ("Which correct option is there?", None), ("### Answer the question\nC", None),
    ],
)  # fmt: skip
def test_choice_letter(text, expected):
    assert choice_letter(text) == expected


def test_multiple_choice():
    assert multiple_choice("The answer is (C).", {"answer": "C"}) == 1
    assert multiple_choice("The answer is (C).", {"answer": "(c)"}) == 1
    assert multiple_choice("The answer is (B).", {"answer": "C"}) == 0
    assert multiple_choice("I cannot say", {"answer": "C"}) == 0
    assert multiple_choice("One might say the answer is A, but that is wrong.\n\nAnswer: $C$", {"answer": "A"}) == 0
    assert multiple_choice("C", {"answer": None}) is None
    with pytest.raises(ValueError, match="row 3: answer: expected a letter from A to J, got 2"):
        multiple_choice("C", {"answer": 2, "where": "row 3"})


@pytest.mark.parametrize(
    ("text", "answer", "tolerance", "expected"),
    [
        ("It is 42.", 42, {}, 1), ("It is 42.0", "42", {}, 1), ("42 or 43", 42, {}, 0), ("-42", 42, {}, 0),
        ("−42", "-42", {}, 1), ("1,234,567 people", 1234567, {}, 1), ("1e3", 1000, {}, 1), (".5", 0.5, {}, 1),
        ("none", 42, {}, 0), ("", 0, {}, 0), ("x2", 2, {}, 0), ("10.4", 10, {"relative": 0.05}, 1),
        ("10.6", 10, {"relative": 0.05}, 0), ("0.1", 0, {"relative": 0.05}, 0), ("0.1", 0, {"absolute": 0.1}, 1),
        ("-9.6", -10, {"relative": 0.05}, 1), ("1e999", 5, {"relative": 0.1}, 0), ("$5.00", 5, {}, 1),
        ("50%", 50, {}, 1), ("7", None, {}, None), ("1/2", 2, {}, 0), ("1/2", 1, {}, 0), ("12/5", 1, {}, 0),
        ("-1/2", 2, {}, 0),
        ("1.5/2", 1, {}, 0), ("60 km/h", "60 km/h", {}, 1), ("3, not 1/2", 3, {}, 1), ("1e3/2", 1, {}, 0),
        ("1 / 2", 2, {}, 0), (r"\frac{1}{2}", 2, {}, 0), (r"\dfrac 12", 2, {}, 0), (r"\frac{\sqrt{3}}{2}", 2, {}, 0),
        ("2 1/2", 2, {}, 0), (r"2\frac{1}{2}", 2, {}, 0), (r"2 \frac{1}{2}", 2, {}, 0), ("2½", 2, {}, 0),
        ("1⁄2", 2, {}, 0), ("½ or 3", 3, {}, 1), ("0.75 3/4", 0.75, {}, 1), ("2\n1/2", 2, {}, 1), ("3 / 4 5", 5, {}, 1),
        ("2 km/h", 2, {}, 1), ("4/2=2", 2, {}, 1), ("1/2→0.5", 0.5, {}, 1), ("It is 0.75 (3/4).", 0.75, {}, 1),
        (r"0.75 ($\frac{3}{4}$)", 0.75, {}, 1), ("It is 0.5\n(1/2)", 0.5, {}, 1), ("15 (kg)/(m)", 15, {}, 1),
        (r"\frac{4}{2} = 2", 2, {}, 1), ("<think>perhaps 42</think> I cannot tell.", 42, {}, 0),
        ("<think>7</think> 42", 42, {}, 1), (r"\boxed{12{,}345}", 12345, {}, 1), (r"1\,000\,000", 10**6, {}, 1),
        (r"1,\!000", 1000, {}, 1), (r"1\ 000", 1000, {}, 1), ("12~345", 12345, {}, 1), ("12\u202f345", 12345, {}, 1),
        (r"5\,000", r"5{,}000", {}, 1), (r"1\,000", 0, {}, 0), (r"(1,\,200)", 200, {}, 1), (r"10~m", 10, {}, 1),
        ("–5", -5, {}, 1), ("–5", 5, {}, 0), ("It is **–.5**", -0.5, {}, 1), ("-5", "–5", {}, 1), ("3–5", 5, {}, 1),
        ("3%–5%", 5, {}, 1), ("20°–25°", 25, {}, 1), ("3 – 5", 5, {}, 1), ("__42__", 42, {}, 1),
        ("__–4,200__", -4200, {}, 1), ("x_2", 2, {}, 0), ("(1010)_2", 1010, {}, 1), ("pages 10 –20", 20, {}, 1),
        ("between 2010 –2015", 2015, {}, 1), ("10% –20%", 20, {}, 1), ("20°\u00a0–25°", 25, {}, 1),
        ("3\n–5", -5, {}, 1), ("x = –5", -5, {}, 1), ("3, –5", -5, {}, 1), ("It fell to –5", -5, {}, 1),
    ],
)  # fmt: skip
def test_numeric_match(text, answer, tolerance, expected):
    assert numeric_match(**tolerance)(text, {"answer": answer}) == expected


@pytest.mark.parametrize(
    "text",
    [
        "The answer is $B$.", "Answer: $B$", r"\boxed{$B$}", r"\boxed{\textrm{B}}", r"\boxed{\textit{B}}",
        r"\boxed{\text{Option B}}", "The correct answer is option B.", r"the answer is \(B\)", 'The answer is "B"',
        "answer is `B`", "Answer：B", "The answer is **Choice (B)**", "The answer is 'B'.",
        "The answer is choice 'b'", r"The answer is **$\text{(B)}$**", "Answer: B. Check: the answer is $a+b$.",
        "Answer: B\nThe answer is $E = mc^2$.",
        r"The answer is $\textbf{(B)}\ 5$.", 'The answer is "B. Paris".', "The answer is $$B$$", r"\boxed{\textup{B}}",
    ],
)  # fmt: skip
def test_a_letter_in_dollars_quotes_and_words(text):
    assert choice_letter(text) == "B"


@pytest.mark.parametrize(
    "text",
    [
        "The answer is optional.", "the answer is 'Because'", "The answer is $b^2$", r"\boxed{\mathbb{E}[X]}",
        "The answer is `a + b`", r"the answer is \(A \cup B\)",
        "Answer: $(a+b)$", "Answer: $f(a)$", "Answer: ${a}^2$", "Answer: $(a)(b)$",
    ],
)  # fmt: skip
def test_what_looks_like_a_letter(text):
    assert choice_letter(text) is None


def test_numeric_match_leaves_out_thinking_in_the_tags_of_the_row():
    row = {"answer": 42, "thinking_tags": ["[THINK]", "[/THINK]"]}
    assert numeric_match()("[THINK]42[/THINK] none", row) == 0 and numeric_match()("[THINK]7[/THINK] 42", row) == 1


def test_numeric_match_wants_a_number():
    for answer in ("many", "1/2", "1.5/2", "3 and 4", "5 m^2"):
        with pytest.raises(ValueError, match=rf"row 3: answer: expected a number, got '{re.escape(answer)}'"):
            numeric_match()("7", {"answer": answer, "where": "row 3"})


def test_numeric_match_wants_no_fields():
    with pytest.raises(ValueError, match=r"row 3: answer: expected a number, got \{'value': 5\}"):
        numeric_match()("5", {"answer": {"value": 5}, "where": "row 3"})


def test_an_answer_may_be_a_number_or_a_list():
    for text, answer, same in (
        ("42", 42.0, 1),
        ("42.0", 42.0, 1),
        ("4", 4.5, 0),
        ("4.5", 4.5, 1),
        ("inf", math.inf, 1),
    ):
        assert exact_match(text, {"answer": answer}) == boxed_match(rf"\boxed{{{text}}}", {"answer": answer}) == same
        assert exact_match(text, {"answer": ["x", answer]}) == boxed_match(f"\\boxed{{{text}}}", {"answer": [answer]})
        assert exact_match(text, {"answer": ["x", answer]}) == same
    for answer in ([], None):
        assert exact_match("[]", {"answer": answer}) is None and boxed_match(r"\boxed{}", {"answer": answer}) is None
    for reward in (exact_match, boxed_match, squad_f1):
        with pytest.raises(
            ValueError, match="answer: expected text, a number or a list of these, got fields value, aliases"
        ):
            reward("Bob", {"answer": {"value": "Bob", "aliases": ["Robert"]}})
        with pytest.raises(ValueError, match="answer: expected .*, got fields text$"):
            reward("Bob", {"answer": ["Bob", {"text": "Bob"}]})
    assert exact_match("['5']", {"answer": ["5"]}) == 0 and squad_f1("1912", {"answer": 1912.0}) == 1


@pytest.mark.parametrize(
    ("text", "answer", "same"),
    [
        ("1,234,567", "1234567", 1), ("12,345,678", 12345678, 1), ("1{,}500", "1500", 1), (r"1\,500", "1500", 1),
        (r"\text{-1,234,567.5 m}", "-1234567.5 M", 1), ("1234567", "1,234,567", 1), ("1,500", "#### 1{,}500", 1),
        ("1,234,568", "1234567", 0), ("1, 500", "1500", 0), ("1,50", "150", 0), ("1,5000", "15000", 0),
    ],
)  # fmt: skip
def test_thousands_in_a_box(text, answer, same):
    assert boxed_match(rf"\boxed{{{text}}}", {"answer": answer}) == same


def test_squad():
    """Values worked out by hand with the rules of the evaluation script."""
    assert squad_normalise("The  U.S.A.'s,\n an Ant a-b; theatre") == "usas ant ab theatre"
    assert squad_exact("the Eiffel Tower!", {"answer": "Eiffel tower"}) == 1
    assert squad_exact("tower", {"answer": ["Eiffel", "A tower"]}) == 1 and squad_exact("t", {"answer": "tower"}) == 0
    assert squad_f1("the big red dog", {"answer": "a red dog"}) == pytest.approx(0.8)  # P 2/3, R 1
    assert squad_f1("dog dog cat", {"answer": "dog dog dog"}) == pytest.approx(
        2 / 3
    )  # a word counts as often as shared
    assert squad_f1("cat", {"answer": "dog"}) == 0 and squad_f1("dog", {"answer": ["cat", "the dog"]}) == 1
    assert (
        squad_f1("", {"answer": ""}) == 1
        and squad_f1("the", {"answer": ""}) == 1
        and squad_f1("", {"answer": "x"}) == 0
    )
    assert squad_f1("1912", {"answer": 1912}) == 1 and squad_f1("b", {"answer": np.array(["a b", "b"])}) == 1
    for reward in (squad_f1, squad_exact):
        assert reward("x", {"answer": None}) is None and reward("x", {"answer": []}) is None


# --- boxes


def slow_iou(a, b):
    """On a grid of unit cells."""
    cells = [{(x, y) for x in range(box[0], box[2]) for y in range(box[1], box[3])} for box in (a, b)]
    return len(cells[0] & cells[1]) / len(cells[0] | cells[1]) if all(cells) else 0.0


def test_box_iou_equals_counting_cells():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 9, (30, 4)), rng.integers(0, 9, (25, 4))
    expected = [[slow_iou(x, y) for y in b] for x in a]
    np.testing.assert_allclose(box_iou(a, b), expected, atol=1e-12)
    assert box_iou(np.empty((0, 4)), b).shape == (0, 25)
    assert box_iou([0, 0, 2, 2], [1, 1, 3, 3]).item() == pytest.approx(1 / 7)


def test_boxes_iou_takes_the_best_matching():
    rng = np.random.default_rng(1)
    for n, m in ((1, 1), (2, 2), (3, 2), (2, 4), (4, 4)):
        found, wanted = (rng.integers(0, 4, (k, 4)) + [0, 0, 4, 4] for k in (n, m))
        overlap = box_iou(found, wanted)
        wide = overlap if n <= m else overlap.T
        best = max(sum(wide[i, j] for i, j in enumerate(order)) for order in permutations(range(max(n, m)), min(n, m)))
        text = "boxes: " + ", ".join(str(box) for box in found.tolist())
        assert boxes_iou(text, {"answer": wanted.tolist()}) == pytest.approx(best / max(n, m))
    # taking the best pair first would give (0.5 + 0) / 2
    greedy = {"answer": [[0, 0, 4, 1], [0, 0, 2, 1]]}
    assert boxes_iou("[0, 0, 2, 1] [2, 0, 4, 1]", greedy) == pytest.approx((0.5 + 1) / 2)


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("[0, 0, 2, 2]", [0, 0, 2, 2], 1), ("(0,0,2,2)", "[0, 0, 2, 2]", 1), ("[0, 0, 2, 2]", [[0, 0, 2, 2]], 1),
        ('{"bbox_2d": [0, 0, 2, 1], "label": "dog"}', "[[0, 0, 2, 2]]", 0.5), ("nothing", [0, 0, 2, 2], 0),
        ("[0, 0, 2, 2] [0, 0, 2, 2]", [0, 0, 2, 2], 0.5), ("[2, 2, 0, 0]", [0, 0, 2, 2], 0), ("nothing", [], 1),
        ("[0, 0, 2, 2]", [], 0), ("[0.0, -1, 2.5, +2]", [0, -1, 2.5, 2], 1), ("[0, 0, 2]", [0, 0, 2, 2], 0),
        ("[0, 0, 2, 2, 2]", [0, 0, 2, 2], 0), ("<think>[5, 5, 6, 6]</think>[0, 0, 2, 2]", [0, 0, 2, 2], 1),
        ("[0, 0, 2, 2]", None, None), ("[1, 1, 1, 1]", [1, 1, 1, 1], 0),
    ],
)  # fmt: skip
def test_boxes_iou(text, answer, expected):
    assert boxes_iou(text, {"answer": answer}) == expected


@pytest.mark.parametrize("answer", ["a dog", [1, 2, 3], [[1, 2, 3]], "[1, 2", 7, {"box": 1}, [[[0, 0, 1, 1]]], "null"])
def test_bad_boxes_are_named(answer):
    with pytest.raises(ValueError, match="row 3: answer: expected boxes"):
        boxes_iou("[0, 0, 2, 2]", {"answer": answer, "where": "row 3"})


def test_parse_boxes():
    assert parse_boxes("a [1, 2, 3, 4] b (5,6,7.5,8) [1 2 3 4] [a, 1, 2, 3]") == [[1, 2, 3, 4], [5, 6, 7.5, 8]]
