import json
import math
from collections import Counter
from dataclasses import replace

import pytest

from rlkit.data import Task, first_of_sources, load_task, load_unpaired, step_rows, with_heldout, with_prompt
from rlkit.data.loading import BUILT_IN
from rlkit.data.mixing import easiest_rows, mix_tasks, sort_by_difficulty, widen_share
from rlkit.data.samples import append_response, prompt_sample
from rlkit.rewards import score


def task(name: str, count: int, reward=1.0, held: int = 2) -> Task:
    rows = [{"question": f"{name}{i}", "images": [], "answer": str(i), "level": i % 3} for i in range(count)]
    return Task(name, rows[held:], rows[:held], lambda text, row: reward)


def questions(rows) -> list[str]:
    return [row["question"] for row in rows]


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((3, 1), (0.75, 0.25)), ((1, 1), (0.5, 0.5)), ((0.1, 0.9), (0.1, 0.9)), ((1, 99), (0.01, 0.99)),
        (None, (2 / 3, 1 / 3)),
    ],
)  # fmt: skip
def test_rows_come_in_proportion_to_the_weights(weights, shares):
    mixture = mix_tasks([task("a", 22), task("b", 12)], weights)
    counts = Counter(row["task"] for row in mixture.train)
    for name, share in zip("ab", shares, strict=True):
        assert counts[name] / len(mixture.train) == pytest.approx(share, abs=1 / len(mixture.train))
    seen = Counter(questions(mixture.train))
    assert set(seen) == {f"a{i}" for i in range(2, 22)} | {f"b{i}" for i in range(2, 12)}  # none is left out
    for name in "ab":  # and none is favoured
        times = [count for question, count in seen.items() if question.startswith(name)]
        assert max(times) - min(times) <= 1
    assert min(seen.values()) == 1  # no longer than it need be


def test_a_mixture_is_a_task_like_any_other():
    mixture = mix_tasks([task("a", 12), task("b", 7)], [1, 2])
    assert mixture.name == "a+b" and questions(mixture.heldout) == ["a0", "a1", "b0", "b1"]
    steps = [step_rows(mixture.train, step, 4, seed=3) for step in range(20)]
    for step in (19, 7, 0):
        assert step_rows(mixture.train, step, 4, seed=3) == steps[step]
    share = sum(row["task"] == "b" for step in steps for _, row in step) / 80
    assert share == pytest.approx(2 / 3, abs=0.1)


def test_no_file_of_a_mixture_can_be_held_out(tmp_path):
    """Also if its rows were changed, ordered or copied to a list after they were read."""
    files = [tmp_path / f"{name}.jsonl" for name in "abc"]
    for file in files:
        file.write_text("".join(json.dumps({"question": f"{file.stem}{i}", "answer": "1"}) + "\n" for i in range(5)))
    mixture = with_prompt(mix_tasks([load_task(str(file)) for file in files[:2]]), system_prompt="Add.")
    ordered = replace(mixture, train=sort_by_difficulty(mixture.train, lambda row: len(row["where"])))
    for trained_on in (mixture, ordered, replace(mixture, train=list(mixture.train))):
        for file in files[:2]:
            with pytest.raises(ValueError, match="^heldout: expected another file than those to train on, got "):
                with_heldout(trained_on, str(file))
        assert len(with_heldout(trained_on, str(files[2])).heldout) == 5


def test_rows_of_a_held_out_file_name_their_task(tmp_path):
    file = tmp_path / "held.jsonl"
    rows = [{"question": "q", "answer": "1", "task": "b"}, {"question": "q", "answer": "1"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixture = with_heldout(mix_tasks([task("a", 3, 0.0), task("b", 3, 1.0)]), str(file))
    first, second = mixture.heldout
    assert mixture.reward("1", first) == 1.0
    with pytest.raises(ValueError, match=r"held.jsonl row 2: task: expected one of \['a', 'b'\] in the column `task`"):
        mixture.reward("1", second)


@pytest.mark.parametrize("share", ["0.001", "0.1", "0.5"])
def test_repeated_rows_are_held_out_together_and_once(share):
    mixture = mix_tasks([task("a", 12), task("b", 102)], [1, 1])
    held = with_heldout(mixture, share)
    trained, heldout, times = questions(held.train), questions(held.heldout), Counter(questions(mixture.train))
    assert not set(trained) & set(heldout) and {*trained, *heldout} == times.keys()
    assert len(set(heldout)) == len(heldout)
    assert len(trained) == 200 - sum(times[question] for question in heldout)
    assert len(trained) == pytest.approx((1 - float(share)) * 200, abs=10)
    with pytest.raises(ValueError, match="expected a share that leaves rows to train on"):
        with_heldout(mix_tasks([task("a", 3)], [1]), "0.9")


def test_both_answers_of_a_repeated_pair_are_held_out_once(monkeypatch):
    """Also in a mixture of mixtures."""
    mixture = mix_tasks([mix_tasks([task("a", 4), task("b", 32)], [1, 1]), task("c", 62)], [1, 1])
    monkeypatch.setitem(BUILT_IN, "mixture", lambda: mixture)
    unpaired = load_unpaired("mixture")
    assert len(unpaired.train) == 2 * len(mixture.train) == 240

    def answers(rows):
        return [(row["question"], row["completion"], row["label"]) for row in rows]

    every = {*answers(unpaired.train)}
    assert len(every) == 2 * (2 + 30 + 60)
    for share in ("0.2", "0.5"):
        held = with_heldout(unpaired, share)
        trained, heldout = answers(held.train), answers(held.heldout)
        assert len({*heldout}) == len(heldout) and not {*trained} & {*heldout} and {*trained, *heldout} == every
    of_all = answers(with_heldout(unpaired, "all").heldout)
    assert sorted(of_all) == sorted([*every, *answers(unpaired.heldout)])
    assert [unpaired.heldout[i]["question"] for i in first_of_sources(unpaired.heldout)] == questions(mixture.heldout)
    several = mix_tasks([replace(unpaired, name=name) for name in "xy"])  # each has pairs already
    assert len(first_of_sources(several.heldout)) == 2 * len(mixture.heldout) == len(several.heldout) / 2


def test_each_row_is_scored_by_its_own_task():
    rewards = {"a": 0.25, "b": None, "c": 1.0}
    mixture = mix_tasks([task(name, 5, reward) for name, reward in rewards.items()])
    for row in [*mixture.train, *mixture.heldout]:
        assert mixture.reward("text", row) == rewards[row["task"]]
    samples = [append_response(prompt_sample([1], row=row), [2], [-0.1]) for row in mixture.heldout]
    assert score(mixture.reward, samples).nan_to_num(-1).tolist() == [0.25, 0.25, -1, -1, 1, 1]


def test_rewards_see_the_column_task_of_their_rows():
    """Also those of a mixture in a mixture, which has such a column itself."""
    kinds = task("kinds", 4, reward=0.0)
    kinds = replace(
        kinds,
        train=[{**row, "task": "ocr"} for row in kinds.train],
        reward=lambda text, row: {"ocr": 0.5}[row["task"]],
    )
    plain = replace(task("plain", 4), reward=lambda text, row: {"plain": 0.25}[row["task"]])
    mixture = mix_tasks([mix_tasks([kinds, plain]), task("c", 4, reward=0.75)])
    scores = {(row["task"], mixture.reward("text", row)) for row in mixture.train}
    assert scores == {("kinds+plain", 0.5), ("kinds+plain", 0.25), ("c", 0.75)}


def test_images_and_text_together():
    mixture = mix_tasks([load_task("digits"), load_task("sorting")], [1, 1])
    rows = [row for _, row in step_rows(mixture.train, 0, 64, seed=0)]
    assert {(row["task"], len(row["images"])) for row in rows} == {("digits", 1), ("sorting", 0)}
    assert all(mixture.reward(row["answer"], row) == 1 for row in rows)


@pytest.mark.parametrize(
    ("tasks", "weights", "message"),
    [
        ([], None, "tasks: expected at least one"), ([task("a", 5), task("a", 6)], None, "different names"),
        ([task("a", 2)], None, "got none in 'a'"), ([task("a", 5)], [1, 1], "weights: expected 1 num"),
        ([task("a", 5), task("b", 5)], [1, 0], "weights: expected 2 numbers above 0, got \\[1, 0\\]"),
        ([task("a", 5)], [math.nan], "weights"), ([task("a", 5)], [math.inf], "weights"),
    ],
)  # fmt: skip
def test_mixtures_that_cannot_be(tasks, weights, message):
    with pytest.raises(ValueError, match=message):
        mix_tasks(tasks, weights)


# --- curricula


def test_easy_rows_first():
    rows = task("a", 12, held=0).train
    ordered = sort_by_difficulty(rows, lambda row: row["level"])
    assert questions(ordered) == [f"a{i}" for level in range(3) for i in range(level, 12, 3)]
    assert questions(easiest_rows(ordered, 0.5)) == questions(ordered)[:6] and questions(
        easiest_rows(ordered, 1)
    ) == questions(ordered)
    assert (
        questions(easiest_rows(ordered, 0)) == ["a0"]
        and questions(easiest_rows(ordered, 0.51)) == questions(ordered)[:7]
    )
    for step in range(6):
        assert {row["level"] for _, row in step_rows(easiest_rows(ordered, 1 / 3), step, 4, seed=0)} == {0}
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"share: expected in \[0, 1\]"):
            easiest_rows(ordered, share)
    with pytest.raises(ValueError, match="difficulty: expected a number, got nan in row 2"):
        sort_by_difficulty(rows, lambda row: math.nan if row["question"] == "a2" else 0.0)


def test_a_curriculum_of_measured_accuracy_resumes_from_its_share():
    ordered = sort_by_difficulty(task("a", 42).train, lambda row: row["level"])
    accuracies = [0.2, 0.7, 0.9, math.nan, 0.6, 0.8, 1.0, 0.1]

    def run(extra: dict, stop: int) -> tuple[list, dict]:
        """What a recipe does; `extra` is what its checkpoint carries."""
        step, share, seen = extra["step"], extra["share"], []
        while step < stop:
            seen.append(questions(row for _, row in step_rows(easiest_rows(ordered, share), step, 5, seed=0)))
            share = widen_share(share, accuracies[step], target=0.7, by=0.2)
            step += 1
        return seen, {"step": step, "share": share}

    whole, end = run({"step": 0, "share": 0.2}, 8)
    first, saved = run({"step": 0, "share": 0.2}, 5)
    second, again = run(saved, 8)
    assert first + second == whole and again == end
    assert saved["share"] == pytest.approx(0.6) and end["share"] == pytest.approx(1.0)


def test_widening_ends_at_everything():
    assert widen_share(0.98, 1.0) == 1.0 and widen_share(0.5, 0.69) == 0.5 and widen_share(0.5, math.nan) == 0.5
