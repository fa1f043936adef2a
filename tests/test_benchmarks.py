"""Every function of rlkit.losses and rlkit.advantages has a benchmark, and each benchmark still runs: here, small."""

import inspect
import sys
from pathlib import Path

import pytest

import rlkit.advantages
import rlkit.losses

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import functions_distillation
import functions_logits
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
