"""Rewards by name, as options have them."""

import pytest

from rlkit.rewards import boxed_match, combine, exact_match, maths_reward, reward_named

MINE = """
def good(text, row):
    return float("good" in text)

def with_more(text, row, weight=2.0):
    return weight

def only_text(text):
    return 1.0

number = 5
"""


@pytest.mark.parametrize(
    ("name", "answer", "right", "wrong"),
    [
        ("exact", "Paris", " paris\n", "Paris, France"),
        ("maths", "1/2", "So it is \\boxed{0.5}.", "So it is \\boxed{2}."),
        ("choice", "B", "The answer is (B).", "The answer is (C)."),
        ("boxed", "Paris", "\\boxed{\\text{Paris}}", "Paris"),
        ("f1", "the Eiffel tower", "Eiffel tower", "a bridge"),
    ],
)
def test_rewards_of_every_name(name, answer, right, wrong):
    reward = reward_named(name)
    row = {"answer": answer, "where": "row 1"}
    assert reward(right, row) == 1 and reward(wrong, row) == 0
    if name == "maths":
        with pytest.raises(ValueError, match="row 1: answer"):
            reward(right, {**row, "answer": None})
    else:
        assert reward(right, {**row, "answer": None}) is None


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        (r"\boxed{42}", 42, 1),
        (r"\boxed{ $42$ }", "42", 1),
        (r"\boxed{42.0}", "42", 0),  # as text, not as a number
        (r"\boxed{1} no, \boxed{2}", "2", 1),
        (r"\boxed{\textbf{New  York}}", "new york", 1),
        (r"<think>\boxed{1}</think> \boxed{2}", "1", 0),
        (r"\boxed{2", "2", 0),
        ("2", "2", 0),
        (r"\boxed{\frac{1}{2}}", r"Half: \boxed{\frac{1}{2}}", 1),
        (r"\boxed{2,005}", "We add.\n#### 2,005", 1),
        (r"\boxed{2005}", "We add.\n#### 2,005", 1),
        (r"\boxed{2}", "We add 2.\n#### 3", 0),
        (r"\boxed{20,05}", "2005", 0),
        (r"\boxed{(1,234)}", "(1234)", 0),
    ],
)
def test_boxed_match(text, answer, value):
    assert boxed_match(text, {"answer": answer}) == value


def test_a_function_of_the_user(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    assert reward_named(f"{tmp_path}/mine.py:good")("a good one", {}) == 1
    assert reward_named(f"{tmp_path}/mine.py:with_more")("", {}) == 2
    (tmp_path / "parts.py").write_text(
        "from rlkit.rewards import combine, exact_match\nreward = combine({'right': (1.0, exact_match)})\n"
    )
    assert isinstance(reward_named(f"{tmp_path}/parts.py:reward"), type(combine({"right": (1.0, exact_match)})))


def test_what_is_no_reward_is_one_sentence(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(ValueError) as caught:
        reward_named("rouge")
    assert str(caught.value) == ("reward: expected exact, maths, choice, boxed, f1 or module:function, got 'rouge'")
    for name in ("only_text", "number"):
        with pytest.raises(ValueError, match=f"^reward '.*:{name}': expected a function of a text and a row, got "):
            reward_named(f"{tmp_path}/mine.py:{name}")
    assert reward_named("maths") is maths_reward and reward_named("exact") is exact_match
