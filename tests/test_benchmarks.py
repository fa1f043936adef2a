"""Every function of rlkit.losses and rlkit.advantages has a benchmark, and each benchmark still runs: here, small."""

import inspect
import json
import shutil
import sys
from pathlib import Path

import pytest

import rlkit.advantages
import rlkit.losses

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import functions_distillation
import functions_logits
import smollm2
from functions_common import Batch, differences, every_group

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
GROUPS = every_group()
WITHOUT = {
    "AdaptiveKL": "Python floats",
    "FixedKL": "Python floats",
    "adaptive_kl_coef": "Python floats",
    "adaptive_entropy_coef": "Python floats",
    "chord_mu": "Python floats",
    "pf_ppo_indices": "a random draw, torch.multinomial's own",
}
INPUTS = {kind: Batch((32, 512), kind) for kind in ("full", "gaps")}
SMALL = {functions_logits: dict(N=64, H=8, V=50), functions_distillation: dict(V=50, K=8)}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for module, numbers in SMALL.items():
        for name, number in numbers.items():
            assert getattr(module, name) > number
            monkeypatch.setattr(module, name, number)


def contestants(name):
    return GROUPS[name].build(INPUTS[GROUPS[name].mask])


def code(function):
    return inspect.unwrap(function.update if inspect.isclass(function) else function).__code__


def is_result(x):
    """A named tuple: what a function returns."""
    return inspect.isclass(x) and issubclass(x, tuple)


def called(run):
    """Code that `run` calls from a file of the benchmarks, not by way of another function of ours."""
    found = set()

    def watch(frame, event, _):
        caller = frame.f_back
        while caller and caller.f_code.co_filename.endswith("_contextlib.py"):  # torch.no_grad's
            caller = caller.f_back
        if event == "call" and caller and Path(caller.f_code.co_filename).parent == BENCHMARKS:
            found.add(frame.f_code)

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def test_every_function_has_a_group():
    found = set().union(*(called(contestants(name)["rlkit"]) for name in GROUPS))
    packages = (rlkit.losses, rlkit.advantages)
    public = {name: getattr(x, name) for x in packages for name in x.__all__ if not is_result(getattr(x, name))}
    missing = [name for name, x in public.items() if code(x) not in found]
    assert sorted(missing) == sorted(WITHOUT)


@pytest.mark.parametrize("name", GROUPS)
def test_the_loop_agrees(name):
    both, mask = contestants(name), INPUTS[GROUPS[name].mask].mask
    absolute, relative = differences(both["loop"](), both["rlkit"](), mask)
    assert relative <= GROUPS[name].tolerance, absolute


@pytest.mark.parametrize("name", [name for name in GROUPS if "formula" in GROUPS[name].contestants])
def test_the_formula_agrees(name):
    both, mask = contestants(name), INPUTS[GROUPS[name].mask].mask
    absolute, relative = differences(both["formula"](), both["rlkit"](), mask)
    assert relative <= GROUPS[name].tolerance, absolute


@pytest.fixture
def finished(tmp_path):
    """The directory of a run of benchmarks/smollm2.py that has ended."""
    out = tmp_path / "gcd-seed0"
    out.mkdir()
    (out / "eval.json").write_text(json.dumps({"accuracy_before": 0.125, "accuracy_after": 0.5}))
    rows = [{"step": step, "reward/mean": step / 10} for step in range(8)]
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (out / smollm2.FINISHED).write_text(json.dumps({"name": "gcd", "seed": 0, "seconds": 90.4, "cpu": 60.0}))
    return out


def test_a_finished_run_is_in_the_table_and_not_repeated(finished, monkeypatch):
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *_, **__: pytest.fail("the run was started again"))
    assert smollm2.run("gcd", smollm2.REASONING_GYM["gcd"], 0, finished, None, [])
    (finished.parent / "lcm-seed0").mkdir()  # has not ended
    lines = smollm2.table("reasoning_gym", finished.parent).splitlines()
    assert lines[2:4] == ["| gcd | 0 | 8 | mean score | 0.125 | 0.500 | 0.15 | 0.55 | 90 | 60 |", ""]
    assert lines[-1].strip() == "python benchmarks/smollm2.py reasoning_gym --only gcd --seeds 0"
    assert "one thread. gcd: more than 1.5 times as many seconds as CPU seconds, so compare" in lines[-3]


def test_the_commands_below_a_table_repeat_its_runs():
    runs = [{"name": name, "seed": seed} for name in smollm2.RECIPES for seed in (1, 0)]
    longer = {"name": "dpo", "seed": 2, "steps": 200, "options": ["--task", "my data.jsonl"]}
    assert smollm2.commands("recipes", [*runs, longer, {**longer, "name": "sft"}]) == [
        "python benchmarks/smollm2.py recipes --seeds 0 1",
        "python benchmarks/smollm2.py recipes --only dpo sft --seeds 2 --steps 200 --task 'my data.jsonl'",
    ]


def test_the_time_of_a_run_is_that_of_all_its_processes(tmp_path, monkeypatch):
    given = []

    def process(command, env):
        given.append(command)
        (tmp_path / "eval.json").write_text(json.dumps({"accuracy_after": 0.5} if len(given) == 2 else {}))

    monkeypatch.setattr(smollm2.subprocess, "run", process)
    ticks = iter([0.0, 30.0, 100.0, 105.0])
    monkeypatch.setattr(smollm2.time, "perf_counter", lambda: next(ticks))
    measured = smollm2.Measured("sft", "--task 'a folder/b.jsonl' --model {smollm2}", {})
    monkeypatch.setattr("rlkit.vlm.loading.model_path", lambda name: "/a cache/smollm2")
    ended = [smollm2.run("sft", measured, 0, tmp_path, 9, ["--lr", "1e-4"]) for _ in range(2)]
    assert ended == [False, True] and given[0] == given[1]
    assert given[0][-8:] == [
        "--task",
        "a folder/b.jsonl",
        "--model",
        "/a cache/smollm2",
        "--steps",
        "9",
        "--lr",
        "1e-4",
    ]
    found = json.loads((tmp_path / smollm2.FINISHED).read_text())
    assert found["seconds"] == 35.0 and found["steps"] == 9 and found["options"] == ["--lr", "1e-4"]


@pytest.mark.parametrize("elsewhere", [True, False])
def test_only_runs_in_the_default_folder_write_the_committed_table(elsewhere, finished, monkeypatch):
    monkeypatch.setattr(smollm2, "ROOT", finished.parent / "checkout")
    default = smollm2.ROOT / "runs" / "smollm2_reasoning_gym"
    (results := smollm2.ROOT / "benchmarks" / "results").mkdir(parents=True)
    default.parent.mkdir()
    out = ["--out", str(finished.parent)] if elsewhere else []
    if not elsewhere:
        shutil.copytree(finished, default / finished.name)
    monkeypatch.setattr(sys, "argv", ["smollm2.py", "reasoning_gym", "--only", "gcd", *out])
    smollm2.main()
    name = "smollm2_reasoning_gym.md"
    assert (results / name).exists() is not elsewhere and (finished.parent / name).exists() is elsewhere


def test_an_interrupted_run_is_not_in_the_table(tmp_path, monkeypatch):
    (tmp_path / "eval.json").write_text(json.dumps({"accuracy_before": 0.125}))
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *_, **__: None)
    assert not smollm2.run("gcd", smollm2.REASONING_GYM["gcd"], 0, tmp_path, None, [])
    assert not (tmp_path / smollm2.FINISHED).exists()


def test_continuations_are_the_words_that_follow():
    task = smollm2.continuations()
    rows = [*task.train, *task.heldout]
    assert len({row["question"] for row in rows}) == len(rows) > 500
    for row in rows:
        assert sorted(row["rejected"].split()) == sorted(row["chosen"].split())
        assert row["rejected"] != row["chosen"]
