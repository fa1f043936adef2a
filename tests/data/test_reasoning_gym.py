"""Tasks of reasoning-gym: its verifiers, its curricula, and held-out rows that are never trained on."""

import os
import subprocess
import sys

import pytest

from rlkit.data import load_task, prompt_sample, with_prompt
from rlkit.data.reasoning_gym import DEPEND_ON_HASHES, DRAWS_FROM_GLOBAL_RANDOM
from rlkit.rewards import isolated, score
from rlkit.rewards.sandbox import SandboxError, check_isolation

try:
    check_isolation()
    CAN_ISOLATE = True
except SandboxError:
    CAN_ISOLATE = False
needs_isolation = pytest.mark.skipif(not CAN_ISOLATE, reason="the machine has no sandbox")


@pytest.mark.parametrize("name", ["chain_sum", "leg_counting", "countdown"])
def test_rows_rewards_and_seeds(name):
    task, again = (load_task(f"reasoning_gym:{name},rows=50,heldout=20") for _ in range(2))
    assert (task.name, len(task.train), len(task.heldout)) == (name, 50, 20)
    assert [row["question"] for row in task.train] == [row["question"] for row in again.train]
    assert not {row["question"] for row in task.train} & {row["question"] for row in task.heldout}
    row = task.train[3]
    assert row["question"].endswith("\n\nPut your final answer between <answer> and </answer>.")
    assert row["where"] == f"reasoning_gym:{name},rows=50,heldout=20 row 4"
    right = row["answer"]
    for text in (right, f"I think <answer> {right}</answer>", f"<think>1</think>It is\n<answer>{right}</answer>."):
        assert task.reward(text, row) == 1
    for text in ("", "no idea", f"<answer>{right}</answer> or <answer>7.5</answer>", f"<think>{right}</think>none"):
        assert task.reward(text, row) < 0.2


def test_the_verifier_and_not_the_text_decides():
    """countdown has many right answers, of which the row names one."""
    task = load_task("reasoning_gym:countdown,rows=9,heldout=3")
    row = task.train[0]
    assert task.reward(f"<answer>({row['answer']})</answer>", row) == 1
    assert task.reward(f"<answer>({row['answer']}) + 1</answer>", row) < 0.2


def test_exact_rewards_are_all_or_nothing():
    shares, exact = (load_task(f"reasoning_gym:products,rows=9,heldout=3{more}") for more in ("", ",exact=True"))
    row = exact.train[0]
    answer = row["answer"]
    texts = [answer, f"<answer>{answer}</answer>", f"so {answer}", ""]
    assert [exact.reward(text, row) for text in texts] == [1, 1, 0, 0]
    assert 0 < shares.reward(f"so {answer}", row) < 1


def test_levels_and_settings():
    def terms(name):
        return {row["entry"]["metadata"]["num_terms"] for row in load_task(f"reasoning_gym:{name},rows=60").train}

    assert terms("chain_sum,level=0") == {2} and terms("chain_sum,level=3") == {2, 3, 4, 5}
    assert terms("chain_sum,level=3,max_terms=3") == {2, 3}
    assert terms("chain_sum,level=10") == set(range(2, 13))  # the number of digits has fewer levels


def test_few_questions_are_not_trained_on_if_they_are_held_out():
    """With one digit and two terms there are a few hundred questions, so most of them are drawn for both."""
    task = load_task("reasoning_gym:chain_sum,level=0,rows=400,heldout=100")
    held = {row["question"] for row in task.heldout}
    assert all(row["question"] not in held and "unreadable" not in row for row in task.train)
    every = load_task("reasoning_gym:chain_sum,level=0,rows=400,heldout=1")
    assert {row["question"] for row in every.train} & held


ONE_ANIMAL = "leg_counting,min_animals=1,max_animals=1,min_instances=1,max_instances=1,heldout=900"


@pytest.mark.parametrize("name", [f"reasoning_gym:{ONE_ANIMAL}", "reasoning_gym:coin_flip,level=0,heldout=48"])
def test_a_task_whose_questions_are_all_held_out_is_refused(name):
    with pytest.raises(ValueError, match=f"task '{name}': heldout: expected questions to be left for training, got "):
        load_task(name)


def test_a_prefix_may_open_the_answer():
    task = with_prompt(load_task("reasoning_gym:chain_sum,rows=5,heldout=2"), response_prefix="<answer>")
    row = task.train[0]
    assert row["response_prefix"] == "<answer>" and task.reward(f"{row['answer']}</answer>", row) == 1
    assert task.reward(f"{row['answer']}</answer> b", row) == 1


@pytest.mark.parametrize(
    "name, message",
    [
        ("no_such", r"expected one of reasoning-gym's \(ab, acre, .*\), got 'no_such'"),
        ("", r"expected one of reasoning-gym's \(.*\), got ''"),
        ("chain_sum,level", "expected settings NAME=VALUE behind the commas, got 'level'"),
        ("chain_sum,level=99", "level: expected 0 to 10, got 99"),
        ("chain_sum,level=hard", "level: expected 0 to 10, got 'hard'"),
        ("chain_sum,rows=0", "rows: expected a whole number of at least 1, got 0"),
        (
            "chain_sum,terms=3",
            "expected settings among level, rows, heldout, exact, sandbox, min_terms, .*, got 'terms'",
        ),
        ("chain_sum,exact=1", "exact: expected True or False, got 1"),
        ("chain_sum,sandbox=no", "sandbox: expected True or False, got 'no'"),
        ("chain_sum,seed=3", "expected settings among .*, got 'seed'"),
        ("chain_sum,min_terms=9", "expected settings that fit together, got: max_terms must be >= min_terms"),
    ],
)
def test_what_cannot_be_used_is_named(name, message):
    with pytest.raises(ValueError, match=f"^task 'reasoning_gym:{name}': {message}$"):
        load_task(f"reasoning_gym:{name}")


# --- verifiers that execute the answer

EXECUTING = (
    "binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24 simple_integration "
    "spiral_matrix string_insertion"
).split()


@needs_isolation
@pytest.mark.parametrize("name", EXECUTING)
def test_an_answer_cannot_act_in_the_trainer(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    task = load_task(f"reasoning_gym:{name},rows=2,heldout=1")
    row, touch = task.train[0], f"__import__('os').system('touch {tmp_path}/made')"
    assert max(task.reward(text, row) for text in (touch, f"[{touch}]", f"{{1: {touch}}}")) < 0.2
    assert not list(tmp_path.iterdir())
    assert task.reward(f"<answer>{row['answer']}</answer>", row) == 1


@needs_isolation
def test_an_answer_that_takes_forever_scores_0():
    task = load_task("reasoning_gym:countdown,rows=2,heldout=1")
    task.reward.score_answer.seconds = 0.5
    rewards = [task.reward(text, task.train[0]) for text in ("9**9**9**9", task.train[0]["answer"])]
    assert rewards == [0, 1]


@needs_isolation
def test_a_worker_that_does_not_start_is_no_fault_of_the_answer(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text("print('\"no memory\"')")
    monkeypatch.setattr(sys.modules["rlkit.rewards.isolated"], "WORKER", str(tmp_path / "worker.py"))
    task = load_task("reasoning_gym:countdown,rows=2,heldout=1")
    with pytest.raises(ValueError, match="expected a reward that a worker can import, got: no memory"):
        task.reward("1 + 1", task.train[0])


SEES_WHAT_IS_EXECUTED = """
import sys
from reasoning_gym.factory import DATASETS
from rlkit.data import reasoning_gym
from rlkit.rewards.isolated import SandboxedReward

executed, sandboxed = set(), set()
reasoning_gym.check_isolation = lambda: None  # nothing is scored in the sandbox here

def hook(event, arguments):
    if event == "exec" and isinstance(arguments[0], type(hook.__code__)):
        if "the_answer" in (*arguments[0].co_names, *arguments[0].co_consts):  # sympy makes Symbol('the_answer') of it
            executed.add(task)

sys.addaudithook(hook)
for task in sorted(set(DATASETS) - set(sys.argv[1:])):
    made = reasoning_gym.reasoning_gym_task(f"reasoning_gym:{task},rows=2,heldout=1,sandbox=False")
    row = made.train[0]
    for answer in ("the_answer", "[the_answer]", "{1: the_answer}", "the_answer + x", f"{row['answer']} + the_answer"):
        made.reward(answer, row)
    arguments = made.reward.arguments[:3]
    if isinstance(reasoning_gym.Verifier(*arguments).score_answer, SandboxedReward):
        sandboxed.add(task)
print()  # some tasks print dots
print(*sorted(executed))
print(*sorted(sandboxed))
"""


def test_the_verifiers_that_execute_answers_are_found_and_no_others():
    """Python itself reports, for every task of the installed reasoning-gym, whether a name in an answer is executed."""
    cannot_be_made = {"composite", *DRAWS_FROM_GLOBAL_RANDOM}
    done = subprocess.run(
        [sys.executable, "-c", SEES_WHAT_IS_EXECUTED, *cannot_be_made],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
    )
    executed, sandboxed = done.stdout.splitlines()[-2:]
    assert executed.split() == sandboxed.split() == EXECUTING, done.stderr


def test_a_machine_without_a_sandbox_refuses_such_a_task(monkeypatch):
    def cannot():
        raise SandboxError("cannot isolate programs: expected Linux on x86-64, got darwin arm64")

    monkeypatch.setattr("rlkit.data.reasoning_gym.check_isolation", cannot)
    load_task("reasoning_gym:chain_sum,rows=2,heldout=1")
    said = "'reasoning_gym:countdown': .* executes answers as Python, got: .* darwin arm64; the setting sandbox=False"
    with pytest.raises(ValueError, match=said):
        load_task("reasoning_gym:countdown")
    task = load_task("reasoning_gym:countdown,rows=2,heldout=1,sandbox=False")
    assert task.reward(task.train[0]["answer"], task.train[0]) == 1


@pytest.mark.parametrize("name", ["chain_sum", pytest.param("countdown", marks=needs_isolation)])
def test_the_reward_can_be_isolated(name):
    task = load_task(f"reasoning_gym:{name},rows=2,heldout=1")
    reward, row = isolated(task.reward), task.train[0]
    assert [reward(text, row) for text in (row["answer"], f"<answer>{row['answer']}</answer>")] == [1, 1]
    assert reward("nothing", row) < 0.2


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("prime_factorization", ["2 x 3", "2^3", "It is prime.", "7"]),
        ("boxnet", ["[1]", "0", "{}"]),
        ("game_of_life", ["{}", "[]", "1"]),
    ],
)
def test_an_answer_of_another_form_scores_0(name, answers):
    task = load_task(f"reasoning_gym:{name},rows=2,heldout=1")
    samples = [prompt_sample([1], text=f"<answer>{text}</answer>", row=task.train[0]) for text in answers]
    rewards = score(task.reward, samples)
    assert rewards.nan_to_num(-1).min() >= 0 and rewards.max() < 0.2
    with pytest.raises(KeyError, match="entry"):
        task.reward("7", {"question": "?"})  # what is missing in the row is no fault of the answer


def test_tasks_whose_rows_differ_between_processes_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="expected a task whose rows depend on a seed alone, got 'list_functions'"):
        load_task("reasoning_gym:list_functions")
    for value in ("", "random"):
        monkeypatch.setenv("PYTHONHASHSEED", value)
        with pytest.raises(ValueError, match=f"PYTHONHASHSEED, such as 0, as rows of 'ransom_note' .*, got '{value}'$"):
            load_task("reasoning_gym:ransom_note")


def test_rows_are_the_same_in_processes_with_equal_hashes():
    code = (
        "from rlkit.data import load_task\n"
        f"tasks = [load_task(f'reasoning_gym:{{name}},rows=2,heldout=1') for name in {sorted(DEPEND_ON_HASHES)}]\n"
        "print([(row['question'], row['answer']) for task in tasks for row in (*task.train, *task.heldout)])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    first, second = (
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    )
    assert first.stdout == second.stdout != ""


def test_the_package_is_named_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ImportError, match=r"^package reasoning_gym.*: .* pip install -e '\.\[reasoning-gym\]'$"):
        load_task("reasoning_gym:chain_sum")
