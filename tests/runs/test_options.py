"""A recipe's options on the command line, and their help."""

import importlib
import inspect
import json
import os
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Annotated, Literal, get_args, get_type_hints

import pytest

import rlkit.runs
from rlkit.data import first_of_sources, load_unpaired
from rlkit.plan.recipes import load_recipe, recipe_options
from rlkit.runs import (
    Above,
    NonNegativeFloat,
    OptimizerOptions,
    PolicyOptions,
    PositiveInt,
    RewardOptions,
    RunOptions,
    TaskOptions,
    TrainingOptions,
    check_range,
    load_named_task,
    parse_options,
    start_run,
)
from rlkit.runs.command_line import changed_arguments, option_groups
from rlkit.runs.option_types import check_ranges
from rlkit.runs.tasks import with_epochs


@dataclass
class Config(OptimizerOptions, RunOptions):
    lr: float = 0.5
    steps: int = 20
    """Steps of
    this recipe."""
    loss: Literal["a", "b"] = "a"
    """Which loss."""
    names: tuple[str, ...] = ("x",)
    """Some names."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weights by name."""
    fused: bool = True
    """Use the fused kernel."""
    model: str | None = None
    """A model, or none."""


def shown_help(capsys, monkeypatch, config=Config):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit, match="0"):
        parse_options(config, "What the recipe does.", ["--help"])
    return re.sub(r"\s+", " ", re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out))


def test_the_command_line_gives_a_flat_object():
    assert parse_options(Config, "", []) == Config()
    arguments = "--lr 1e-3 --steps 3 --loss b --names p q --weights a 1 b 0.5 --no_fused --model m --seed 4 --resume"
    assert parse_options(Config, "", arguments.split()) == Config(
        lr=1e-3, steps=3, loss="b", names=("p", "q"), weights={"a": 1.0, "b": 0.5}, fused=False, model="m", seed=4,
        resume=True, threads=len(os.sched_getaffinity(0)),
    )  # fmt: skip


def test_help_is_grouped_by_the_class_that_declares_an_option(capsys, monkeypatch):
    shown = shown_help(capsys, monkeypatch)
    order = ["What the recipe does.", "recipe options", "--steps", "--loss", "run options", "--out", "--seed"]
    order += ["optimizer options", "--lr", "--max_grad_norm"]
    places = [shown.index(words) for words in order]
    assert places == sorted(places)
    assert "--steps INT Steps of this recipe. (default: 20)" in shown


def test_a_new_default_keeps_its_group_and_its_help(capsys, monkeypatch):
    """`lr` is named again in Config, without a help text."""
    assert "lr" not in option_groups(Config)[Config]
    text = option_groups(Config)[OptimizerOptions]["lr"]
    assert text == option_groups(TrainingOptions)[OptimizerOptions]["lr"] and text.startswith("Peak learning rate.")
    assert f"--lr FLOAT {text} (default: 0.5)" in shown_help(capsys, monkeypatch)


def test_an_option_without_help_is_an_error():
    @dataclass
    class Forgotten(RunOptions):
        beta: float = 0.1
        steps: int = 3
        """Steps."""

    with pytest.raises(ValueError, match="^Forgotten.beta: expected a help text under it, got none$"):
        parse_options(Forgotten, "", [])


def test_options_from_a_file_are_those_of_the_command_line(tmp_path):
    """Also when the file is the config.json of a run, whose directory stays its own."""
    cfg = Config(lr=1e-3, names=("p", "q"), weights={"a": 0.5}, fused=False, seed=4, trackers=("wandb",))
    written = {**asdict(cfg), "out": "elsewhere", "resume": True, "versions": {"torch": "2"}}
    (tmp_path / "config.json").write_text(json.dumps(written))
    file = ["--config", str(tmp_path / "config.json")]
    cfg.config = file[1]
    assert parse_options(Config, "", file) == cfg
    assert parse_options(Config, "", [*file, "--seed", "5", "--fused"]).seed == 5
    (tmp_path / "config.json").write_text(json.dumps({"stpes": 3}))
    with pytest.raises(ValueError, match="config '.*config.json': expected options of this recipe, got stpes"):
        parse_options(Config, "", file)


@dataclass
class Named(OptimizerOptions, RunOptions):
    name: str = "x"
    """A text."""


def test_an_empty_value_in_a_file_is_not_given(tmp_path):
    """YAML's null; it became the text None."""
    (tmp_path / "run.yaml").write_text("name:\nseed: 4\n")
    assert parse_options(Named, "", ["--config", str(tmp_path / "run.yaml")]).name == "x"


@pytest.mark.parametrize("text", ["-", "--x", "-1 is less", "a=b", "--name=-y"])
def test_a_text_that_looks_like_an_option_survives_a_file(tmp_path, text):
    (tmp_path / "config.json").write_text(json.dumps({"name": text}))
    assert parse_options(Named, "", ["--config", str(tmp_path / "config.json")]).name == text
    assert parse_options(Named, "", changed_arguments(Named(name=text))).name == text


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "config: expected a YAML or JSON file, got '.*run.yaml': .*No such file"),
        ("lr: [1", "config: expected a YAML or JSON file, got '.*run.yaml': "),
        ("- lr", "config '.*run.yaml': expected options by name, got a list"),
        (
            r'loss: "\boxed{}"',
            r"config '.*run.yaml': loss: expected text, got the control character .*x08' in it; YAML reads .*",
        ),
        (r'loss: "\right"', r"config '.*run.yaml': loss: expected text, got the control character '\\r' in it"),
        (r'names: [x, "\frac"]', r"config '.*run.yaml': names: expected text, got the control character .*x0c' in it"),
        (r'weights: {"\alpha": 1}', r"config '.*run.yaml': weights: expected text, got the control character .*x07'"),
    ],
)
def test_a_file_that_holds_no_options_is_named(tmp_path, content, problem):
    if content is not None:
        (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(ValueError, match=f"^{problem}"):
        parse_options(Config, "", [f"--config={tmp_path / 'run.yaml'}"])


def test_values_of_another_type_are_refused(capsys):
    for arguments, expected in (("--steps 2.5", "steps"), ("--loss c", "loss"), ("--stpes 3", "stpes")):
        with pytest.raises(SystemExit, match="2"):
            parse_options(Config, "", arguments.split())
        shown = capsys.readouterr()
        assert expected in shown.out + shown.err


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("steps", -3, "at least 1, got -3"), ("save_every", 0, "at least 1, got 0"), ("seed", -1, "at least 0, got -1"),
        ("lr", -0.1, "at least 0, got -0.1"), ("min_lr_ratio", 1.5, "0 to 1, got 1.5"),
        ("max_failed_rewards", -0.5, "0 to 1, got -0.5"), ("temperature", 0.0, "a number above 0, got 0"),
        ("group_size", 0, "at least 1, got 0"),
        ("lr", float("nan"), "at least 0, got nan"), ("temperature", float("nan"), "a number above 0, got nan"),
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused_by_name(name, value, expected):
    @dataclass
    class Recipe(PolicyOptions, TrainingOptions):
        steps: int = 1
        """Steps."""

    check_ranges(Recipe())
    with pytest.raises(ValueError, match=f"^{name}: expected {expected}$"):
        check_ranges(replace(Recipe(), **{name: value}))


RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.py"))
WITHOUT_RANGE = {  # of recipes, by their names, or of all
    ("all", "profile_steps"): "steps that the run does not reach are not profiled",
    ("all", "parallel"): "the engines check it",
    ("distill", "beta"): "only read with --loss jsd, where the recipe checks it",
    ("dpo", "beta"): "the loss functions check it, and have different ranges",
    ("dpo", "loss_options"): "the loss functions check them",
    ("simpo", "beta"): "the loss functions check it",
    ("simpo", "loss_options"): "the loss functions check them",
    ("evaluate", "right"): "any reward can be the least that counts as right",
    ("evaluate", "pass_at"): "the recipe compares them with group_size",
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_number_has_a_range(recipe):
    """nan is in no range; the defaults are."""
    config = load_recipe(str(recipe)).Config
    cfg, unchecked = config(), set()
    check_ranges(cfg)
    for name, kind in get_type_hints(config).items():
        if {int, float} & {kind, *get_args(kind)}:
            try:
                check_ranges(replace(cfg, **{name: float("nan")}))
                unchecked.add(name)
            except ValueError as error:
                assert str(error).startswith(f"{name}: expected ")
    assert unchecked == {name for of, name in WITHOUT_RANGE if of in ("all", recipe.stem)}


def test_an_option_that_a_copy_of_a_recipe_adds_is_checked(tmp_path):
    copy = tmp_path / "mine.py"
    text = (Path(__file__).parents[2] / "recipes" / "grpo_vlm.py").read_text()
    head = "class Config(runs.PolicyOptions, runs.TrainingOptions):\n"
    copy.write_text(text.replace(head, head + '    delta: runs.NonNegativeFloat = 4.0\n    """Mine."""\n'))
    module = load_recipe(str(copy))
    assert recipe_options(module, ["--model", "M", "--delta", "0"]).delta == 0
    with pytest.raises(ValueError, match="^delta: expected at least 0, got -1$"):
        recipe_options(module, ["--model", "M", "--delta", "-1"])


def test_the_range_of_an_option_is_that_of_the_class_that_last_gives_one():
    @dataclass
    class Mine(OptimizerOptions, RunOptions):
        lr: float = 0.5  # a new default alone
        warmup_steps: PositiveInt = 10
        gap: Annotated[float, Above(1)] | None = None
        """An option that may have no value."""

    check_ranges(Mine())
    for name, value, expected in (
        ("lr", -1.0, "at least 0, got -1"),
        ("warmup_steps", 0, "at least 1, got 0"),
        ("gap", 1.0, "a number above 1, got 1"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected {expected}$"):
            check_ranges(replace(Mine(), **{name: value}))


def test_a_range_that_another_option_sets_says_so():
    check_range("critic_warmup", 1, 0, 1, "less than --steps")
    with pytest.raises(ValueError, match=r"^critic_warmup: expected 0 to 1 \(less than --steps\), got 10$"):
        check_range("critic_warmup", 10, 0, 1, "less than --steps")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"freeze": "("}, "freeze: expected a regular expression, got '(': missing ), unterminated subpattern"),
        ({"target_modules": "*"}, "target_modules: expected a regular expression, got '*': nothing to repeat"),
        (
            {"exclude_modules": "["},
            "exclude_modules: expected a regular expression, got '[': unterminated character set",
        ),
        ({"engine": "fsdp"}, "engine: expected one of fsdp1, fsdp2, megatron, "),
        ({"parallel": {"tensr": 2}}, "parallel: expected fsdp_size, tensor in the fsdp2 engine, got tensr"),
        (
            {"engine": "fsdp1", "parallel": {"tensor": 2}},
            "parallel: expected no option in the fsdp1 engine, got tensor; use --engine fsdp2",
        ),
    ],
)
def test_options_that_cannot_be_used_are_refused_before_anything_is_loaded(tmp_path, options, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        start_run(TrainingOptions(out=str(tmp_path / "run"), **options), "sorting")


@pytest.mark.parametrize(
    ("recipe", "theirs", "ours"),
    [
        ("evaluate", "heldout_rows", "rows"),
        ("grpo_vlm", "learning_rate", "lr"),
        ("dapo", "num-generations", "group_size"),
    ],
)
def test_names_of_options_elsewhere_get_a_hint(recipe, theirs, ours):
    config = load_recipe(str(Path(__file__).parents[2] / "recipes" / f"{recipe}.py")).Config
    theirs_here = theirs.replace("-", "_")
    with pytest.raises(ValueError, match=f"^--{theirs_here}: expected --{ours}, its name here$"):
        parse_options(config, "", [f"--{theirs}=3"])


def test_ranges_are_not_seen_in_help(capsys, monkeypatch):
    @dataclass
    class Mine(RunOptions):
        gap: NonNegativeFloat = 2.0
        """A gap."""

    assert "--gap FLOAT A gap. (default: 2.0)" in shown_help(capsys, monkeypatch, Mine)


def test_a_limit_itself_is_in_range():
    check_range("x", 0, 0, 1)
    check_range("x", 1, 0, 1)
    with pytest.raises(ValueError, match="^x: expected 0 to 1, got 1.01$"):
        check_range("x", 1.01, 0, 1)


@dataclass
class JudgedTaskOptions(RewardOptions, TaskOptions):
    """Options of a recipe that has responses scored."""


def test_options_of_the_chat_template_and_thinking_apart():
    words = "--task sorting --split_thinking --response_prefix <think> --chat_template_kwargs"
    values = "enable_thinking False thinking_budget 12 effort 0.5 style short"
    cfg = parse_options(JudgedTaskOptions, "", [*words.split(), *values.split()])
    task = load_named_task(cfg, cfg.task)
    expected = {"enable_thinking": False, "thinking_budget": 12, "effort": 0.5, "style": "short"}
    for row in (task.train[0], task.heldout[0]):
        assert row["chat_template_kwargs"] == expected
        assert type(row["chat_template_kwargs"]["thinking_budget"]) is int
        right = row["answer"]
        assert [task.reward(text, row) for text in (f"hm</think>{right}", f"<think>{right}")] == [1, 0]  # unfinished
    cfg = parse_options(
        JudgedTaskOptions, "", "--task sorting --split_thinking --thinking_tags [THINK] [/THINK]".split()
    )
    task = load_named_task(cfg, cfg.task)
    for row in (task.train[0], task.heldout[0]):
        assert [task.reward(f"{tag}hm[/THINK]{row['answer']}", row) for tag in ("", "[THINK]")] == [1, 1]
        assert task.reward(f"[THINK]{row['answer']}", row) == 0
    for wrong in (("[THINK]",), ("", "[/THINK]"), ("|", "|")):
        with pytest.raises(ValueError, match="^thinking_tags: expected two different texts, got"):
            load_named_task(replace(cfg, thinking_tags=wrong), cfg.task)
    plain = load_named_task(TaskOptions(task="sorting"), "sorting")
    assert (
        not {"chat_template_kwargs", "thinking_tags"} & {*plain.train[0]}
        and plain.reward("113", {"answer": "113"}) == 1
    )


def test_a_file_of_held_out_rows_needs_no_responses_for_a_reward_of_yours(tmp_path):
    (tmp_path / "mine.py").write_text("def long(text, row):\n    return float(len(text))\n")
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"question": "{name}"}}\n' * 3)
    cfg = JudgedTaskOptions(heldout=f"{tmp_path}/heldout.jsonl", reward=f"{tmp_path}/mine.py:long")
    task = load_named_task(cfg, f"{tmp_path}/train.jsonl")
    assert (len(task.train), len(task.heldout), task.reward("four", task.heldout[0])) == (3, 3, 4)


@pytest.mark.parametrize(("heldout", "beside"), [("all", " beside --heldout all"), ("", "")])
def test_a_task_without_rows_to_train_on_is_named(tmp_path, heldout, beside):
    """Before a model is loaded. evaluate.py, whose options have no steps, takes it."""
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\nfrom rlkit.data import load_task\n"
        "def given():\n    return replace(load_task('sorting'), train=())\n"
    )
    name = "sorting" if heldout else f"{tmp_path}/mine.py:given"
    with pytest.raises(ValueError, match=f"^task {name}: expected rows to train on, got none{beside};"):
        load_named_task(TrainingOptions(task=name, heldout=heldout), name)
    assert len(load_named_task(TaskOptions(task=name, heldout=heldout), name).heldout) >= 200


def test_a_large_test_split_is_bounded(capsys):
    """Its images stay in memory; evaluate.py, which has no such option, encodes them batch by batch."""
    every = load_named_task(TaskOptions(task="sorting"), "sorting")
    assert len(every.heldout) == 200 and not capsys.readouterr().out
    bounded = [
        load_named_task(TrainingOptions(task="sorting", heldout_rows=50, seed=seed), "sorting") for seed in (0, 1)
    ]
    chosen = [[row["question"] for row in task.heldout] for task in bounded]
    questions = [row["question"] for row in every.heldout]
    assert chosen[0] == chosen[1] == sorted(chosen[0], key=questions.index) and len(chosen[0]) == 50
    assert chosen[0] != questions[:50] and len(bounded[0].train) == 800
    assert "held-out rows: 50 of 200 (--heldout_rows; 0 for all)\n" in capsys.readouterr().out
    pairs = load_named_task(TrainingOptions(task="sorting", heldout_rows=399), "sorting", load_unpaired).heldout
    assert len(first_of_sources(pairs)) == 200  # of two rows each, but one
    capsys.readouterr()
    for count in (0, 200, 1000):
        task = load_named_task(TrainingOptions(task="sorting", heldout_rows=count), "sorting")
        assert len(task.heldout) == 200 and not capsys.readouterr().out


def public_names(module):
    """The functions and classes that a module defines for others."""
    found = inspect.getmembers(module, lambda x: inspect.isfunction(x) or inspect.isclass(x))
    return [name for name, x in found if x.__module__ == module.__name__ and not name.startswith("_")]


MODULES = [importlib.import_module(f"rlkit.runs.{found.name}") for found in iter_modules(rlkit.runs.__path__)]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_is_described(module):
    names = public_names(module)
    assert names
    for name in names:
        text = inspect.getdoc(getattr(module, name)) or ""
        assert text and not text.startswith(f"{name}("), f"{name}: a docstring, other than the one dataclasses make"


def test_epochs_of_no_prompts_are_refused():
    """Steps of an epoch are counted before the ranges of options are checked."""
    cfg = replace(TrainingOptions(), epochs=1.0, prompts_per_step=0)
    with pytest.raises(ValueError, match="^prompts_per_step: expected at least 1, got 0$"):
        with_epochs(cfg, SimpleNamespace(train=range(10)))
    assert with_epochs(replace(cfg, prompts_per_step=4), SimpleNamespace(train=range(10))).steps == 3
    for epochs, rows, per_step, steps in ((2.2, 100, 10, 22), (1.1, 70, 7, 11), (0.1, 30, 1, 3), (1.1, 101, 10, 12)):
        found = with_epochs(replace(cfg, epochs=epochs, prompts_per_step=per_step), SimpleNamespace(train=range(rows)))
        assert found.steps == steps  # in floats 2.2 * 100 / 10 is above 22


def test_steps_of_the_command_line_take_the_place_of_epochs_of_a_file(tmp_path):
    (tmp_path / "run.yaml").write_text("epochs: 2.5\nlr: 0.1\n")
    file = ["--config", str(tmp_path / "run.yaml")]
    cfg = parse_options(TrainingOptions, "", [*file, "--steps", "7"])
    assert (cfg.steps, cfg.epochs, cfg.lr) == (7, 0.0, 0.1)
    assert parse_options(TrainingOptions, "", [*file, "--steps=7"]).epochs == 0
    assert parse_options(TrainingOptions, "", file).epochs == 2.5
    assert parse_options(TrainingOptions, "", [*file, "--steps", "7", "--epochs", "1"]).epochs == 1
