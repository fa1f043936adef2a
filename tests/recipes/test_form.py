"""How recipes are written: what all of them share, what is left in sight, and that a copy of one runs anywhere."""

import ast
import inspect
import re
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import helpers  # noqa: E402
from helpers import RECIPES, numbers, text_dir, warm_dir  # noqa: E402, F401

from rlkit import runs  # noqa: E402
from rlkit.runs import command_line, option_types, options  # noqa: E402

NAMES = sorted(path.stem for path in RECIPES.glob("*.py"))
TRAINING = [name for name in NAMES if name != "evaluate"]
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
SHARED = {
    "everywhere": (runs.RunOptions, runs.ModelOptions, runs.EngineOptions),
    "training": (runs.TaskOptions, runs.OptimizerOptions, runs.AdapterOptions, runs.TrainingOptions),
    "given responses": (runs.GivenResponseOptions,),
    "generating": (runs.GenerationOptions, runs.RewardOptions),
    "on policy": (runs.SamplingOptions, runs.PolicyOptions),
}
GIVEN_RESPONSES = ["dpo", "kto", "reward_model", "sft", "simpo"]
ON_POLICY = [
    "cispo", "dapo", "distill", "grpo_async", "grpo_tools", "grpo_vlm", "gspo", "pf_ppo", "ppo", "reinforce", "vapo",
]  # fmt: skip


def source(name):
    return (RECIPES / f"{name}.py").read_text()


def lines_of(node):
    return {*range(node.lineno, node.end_lineno + 1)}


def shares(text):
    """Lines of code of a recipe, and how many of them are its algorithm.

    Code is what is not blank, an import or the docstring of the file. The algorithm is the loop over the steps, with
    the recipe's own functions: loss, advantages, reference, update, evaluation. Options and set-up are not.
    """
    tree = ast.parse(text)
    code = {i for i, line in enumerate(text.splitlines(), 1) if line.strip()} - lines_of(tree.body[0])
    algorithm = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            code -= lines_of(node)
        elif isinstance(node, FUNCTIONS) and node.name != "main":
            algorithm |= lines_of(node)
        elif isinstance(node, FUNCTIONS):
            parts = [x for x in ast.walk(node) if x is not node and isinstance(x, FUNCTIONS | ast.For)]
            algorithm |= {line for part in parts for line in lines_of(part)}
    return len(code), len(algorithm & code)


# --- to be read


@pytest.mark.parametrize("name", NAMES)
def test_lines_are_short(name):
    text = source(name)
    assert [line for line in text.splitlines() if len(line) > 100] == [] and "fmt: skip" not in text


@pytest.mark.parametrize("name", NAMES)
def test_main_fits_on_a_screen(name):
    functions = [node for node in ast.parse(source(name)).body if isinstance(node, FUNCTIONS)]
    assert functions[-1].name == "main"  # the algorithm is read from top to bottom
    assert {function.name: n for function in functions if (n := len(lines_of(function))) > 60} == {}


@pytest.mark.parametrize("name", NAMES)
def test_most_of_a_recipe_is_its_algorithm(name):
    code, algorithm = shares(source(name))
    assert algorithm >= 0.4 * code


def test_shares():
    text = """\"\"\"A recipe.\"\"\"
import torch

class Config:
    lr: float = 1.0

def loss(x):

    return x

def main(cfg):
    start = 0
    for step in range(9):
        loss(step)
"""
    assert shares(text) == (8, 4)


@pytest.mark.parametrize("name", TRAINING)
def test_every_recipe_evaluates_during_training(name):
    """In its loop, after the step is saved."""
    loops = [node for node in ast.walk(ast.parse(source(name))) if isinstance(node, ast.For)]
    (loop,) = [loop for loop in loops if "run.steps(" in ast.unparse(loop.iter)]
    body = [ast.unparse(line) for line in loop.body]
    calls = ("save", "evaluate_when_due", "out_of_patience")
    saved, evaluated, ended = ([i for i, line in enumerate(body) if f"runs.{call}(" in line] for call in calls)
    assert saved < evaluated and ended == [evaluated[0] + 1] and body[ended[0]].endswith("break")


COMPARED = {
    **dict.fromkeys(("pf_ppo", "ppo", "vapo", "reinforce_plus_plus", "remax"), "batch"),
    "distill": "nothing",
}


@pytest.mark.parametrize(
    "name", [*sorted({*ON_POLICY} - {"grpo_async", "reinforce"}), "rloo", "remax", "reinforce_plus_plus"]
)
def test_recipes_say_which_rewards_they_compare(name, monkeypatch):
    """So that a warning of equal rewards is given where nothing is learned from them, and not elsewhere."""

    class Built(Exception):
        pass

    def sampler(*_, compares="group", **__):
        raise Built(compares)

    module = helpers.load(name if name in NAMES else "reinforce")
    options = {"model": "some/model"} if name in NAMES else {"model": "some/model", "advantage": name}
    set_up = {"with_epochs": lambda cfg, task: cfg, "find_model": lambda *_: ("", None), "PolicySampler": sampler}
    monkeypatch.setattr(module, "runs", MagicMock(**set_up))
    with pytest.raises(Built, match=f"^{COMPARED.get(name, 'group')}$"):
        module.main(module.Config(**options))


# --- shared options


@pytest.mark.parametrize("name", NAMES)
def test_shared_options_are_all_there(name):
    config = helpers.load(name).Config
    wanted = {
        "everywhere": True,
        "training": name in TRAINING,
        "given responses": name in GIVEN_RESPONSES,
        "generating": name != "reward_model",  # it generates nothing
        "on policy": name in ON_POLICY,
    }
    for kind, groups in SHARED.items():
        if name != "evaluate":  # it samples and has tasks, and does not train on them
            assert [group.__name__ for group in groups if issubclass(config, group) != wanted[kind]] == []
    assert issubclass(config, runs.SamplingOptions) == (name in (*ON_POLICY, "evaluate"))


@pytest.mark.parametrize("name", NAMES)
def test_a_shared_option_has_one_help_text(name):
    """No recipe repeats the help of an option that it inherits, nor declares a shared one by itself."""
    config = helpers.load(name).Config
    shared = {
        option: text
        for group in vars(options).values()
        if isinstance(group, type) and group.__module__ == options.__name__
        for option, text in command_line._help_texts(group).items()
    }
    groups = command_line.option_groups(config)
    inherited = {
        option: text for owner, texts in groups.items() if owner is not config for option, text in texts.items()
    }
    assert inherited == {option: shared[option] for option in inherited} and len(inherited) > 15
    own = set(groups.get(config, {}))  # sft has none
    if name != "evaluate":  # its --task takes several
        assert own & set(shared) == set()
    assert set(command_line._help_texts(config)) == own  # a new default has no text of its own


IN_SIGHT = {"steps", "prompts_per_step", "group_size", "max_new_tokens", "temperature", "tis_cap"}


@pytest.mark.parametrize("name", TRAINING)
def test_the_numbers_of_the_algorithm_stand_in_the_file(name):
    """Shared options that the recipe itself reads, and lr; with the ranges that they have where they are declared."""
    own = inspect.get_annotations(helpers.load(name).Config, eval_str=True)
    read = set(re.findall(r"cfg\.(\w+)", source(name)))
    assert (read & IN_SIGHT) | {"lr"} <= own.keys()
    declared = {}
    for group in vars(options).values():
        if isinstance(group, type) and group.__module__ == options.__name__:
            declared |= inspect.get_annotations(group, eval_str=True)
    for option in (read & IN_SIGHT) | {"lr"}:
        notes = option_types._notes_of_type(own[option])
        assert notes and notes[0] in option_types._notes_of_type(declared[option]), option


@pytest.mark.parametrize("name", NAMES)
def test_help_is_grouped_by_subject(name, capsys):
    module = helpers.load(name)
    with pytest.raises(SystemExit, match="0"):
        runs.parse_options(module.Config, module.__doc__, ["--help"])
    titles = re.findall(r"^\W*(\w+) options\W*$", capsys.readouterr().out, re.MULTILINE)
    assert titles[:2] == ["recipe", "run"] or name == "sft" and titles[0] == "run"  # it has no options of its own
    assert len(set(titles)) == len(titles) and ("reward" in titles) == (name != "reward_model")
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
        "dapo": ["--gen_batch_size", 4, "--max_num_gen_batches", 1, "--mini_batches", 1, "--overlong_buffer", 0],
        "pf_ppo": ["--mini_batches", 1],
        "ppo": ["--mini_batches", 1],
        "vapo": ["--mini_batches", 1, "--critic_warmup", 1],
    }
    return [*found, *special.get(name, [])]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "grpo_async"])  # its own tests have a server
def test_a_copy_in_an_empty_folder_runs_two_steps(name, warm_dir, text_dir, tmp_path):  # noqa: F811
    out = helpers.run_a_copy(name, tmp_path, *small_options(name, text_dir if name == "evaluate" else warm_dir))
    assert out.name.startswith(f"{name}-") and len(numbers(out)) == 2
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {f"{name}.py", "runs"}
