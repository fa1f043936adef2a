"""How recipes are written: what all of them share, what is left in sight, and that a copy of one runs anywhere."""

import ast
import re
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import helpers  # noqa: E402
from helpers import RECIPES, numbers, text_dir, warm_dir  # noqa: E402, F401

from rlkit import runs  # noqa: E402
from rlkit.runs import options  # noqa: E402

NAMES = sorted(path.stem for path in RECIPES.glob("*.py"))
TRAINING = [name for name in NAMES if name != "evaluate"]
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
SHARED = {
    "everywhere": (runs.RunOptions, runs.ModelOptions, runs.EngineOptions),
    "training": (runs.TaskOptions, runs.OptimizerOptions, runs.AdapterOptions, runs.TrainingOptions),
    "generating": (runs.GenerationOptions,),
    "on policy": (runs.SamplingOptions, runs.PolicyOptions),
}
ON_POLICY = ["dapo", "distill", "grpo_async", "grpo_tools", "grpo_vlm", "ppo", "reinforce"]


def source(name):
    return (RECIPES / f"{name}.py").read_text()


def own_lines(function):
    """Lines of a function without those of the functions that it defines."""
    inner = [node for node in function.body if isinstance(node, FUNCTIONS)]
    lines = {*range(function.lineno, function.end_lineno + 1)}
    return len(lines - {line for node in inner for line in range(node.lineno, node.end_lineno + 1)})


# --- to be read


@pytest.mark.parametrize("name", NAMES)
def test_lines_are_short(name):
    text = source(name)
    assert [line for line in text.splitlines() if len(line) > 100] == [] and "fmt: skip" not in text


@pytest.mark.parametrize("name", NAMES)
def test_main_fits_on_a_screen(name):
    functions = [node for node in ast.parse(source(name)).body if isinstance(node, FUNCTIONS)]
    assert functions[-1].name in ("main", "run_on_servers")  # the algorithm is read from top to bottom
    assert {function.name: n for function in functions if (n := own_lines(function)) > 60} == {}


def test_lines_of_inner_functions_are_not_those_of_the_outer_one():
    (function,) = ast.parse("def f():\n    def g():\n        return 1\n\n    return g\n").body
    assert own_lines(function) == 3


# --- shared options


@pytest.mark.parametrize("name", NAMES)
def test_shared_options_are_all_there(name):
    config = helpers.load(name).Config
    expected = [*SHARED["everywhere"]]
    if name in TRAINING:
        expected += SHARED["training"]
    if name != "reward_model":  # it generates nothing
        expected += SHARED["generating"]
    if name in ON_POLICY:
        expected += SHARED["on policy"]
    assert [group.__name__ for group in expected if not issubclass(config, group)] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_shared_option_has_one_help_text(name):
    """No recipe repeats the help of an option that it inherits, nor declares a shared one by itself."""
    config = helpers.load(name).Config
    shared = {
        option: text
        for group in vars(options).values()
        if isinstance(group, type) and group.__module__ == options.__name__
        for option, text in options._help_texts(group).items()
    }
    groups = options.option_groups(config)
    inherited = {
        option: text for owner, texts in groups.items() if owner is not config for option, text in texts.items()
    }
    assert inherited == {option: shared[option] for option in inherited} and len(inherited) > 15
    if name != "evaluate":  # its --task takes several
        assert set(groups[config]) & set(shared) == set()
    assert set(options._help_texts(config)) == set(groups[config])  # a new default has no text of its own


@pytest.mark.parametrize("name", NAMES)
def test_help_is_grouped_by_subject(name, capsys):
    module = helpers.load(name)
    with pytest.raises(SystemExit, match="0"):
        runs.parse_options(module.Config, module.__doc__, ["--help"])
    titles = re.findall(r"^\W*(\w+) options\W*$", capsys.readouterr().out, re.MULTILINE)
    assert titles[0] == "recipe" and titles[1] == "run" and len(set(titles)) == len(titles)
    assert {"model", "engine"} < set(titles)
    if name in TRAINING:
        assert {"task", "adapter", "optimizer", "training"} < set(titles)


# --- copied to an empty folder


SMALL = {"--steps": 2, "--prompts_per_step": 4, "--group_size": 2, "--max_new_tokens": 3}


def small_options(name, model):
    has = {f"--{option}" for option in vars(helpers.load(name).Config())}
    found = [x for option, value in SMALL.items() if option in has for x in (option, value)]
    task = "helpers:seen_shortly" if name != "evaluate" else "sorting"
    found += ["--task", task, "--model", model]
    special = {
        "distill": ["--teacher", model],
        "evaluate": ["--rows", 8],
        "dapo": ["--prompts_per_draw", 4, "--max_num_gen_batches", 1, "--mini_batches", 1, "--overlong_buffer", 0],
        "ppo": ["--mini_batches", 1],
    }
    return [*found, *special.get(name, [])]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "grpo_async"])  # its own tests have a server
def test_a_copy_in_an_empty_folder_runs_two_steps(name, warm_dir, text_dir, tmp_path):  # noqa: F811
    out = helpers.run_a_copy(name, tmp_path, *small_options(name, text_dir if name == "evaluate" else warm_dir))
    assert out.name.startswith(f"{name}-") and len(numbers(out)) == 2
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.py", "runs"}
