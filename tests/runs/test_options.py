"""A recipe's options on the command line, and their help."""

import importlib
import inspect
import json
import re
from dataclasses import asdict, dataclass, field
from pkgutil import iter_modules
from typing import Literal

import pytest

import rlkit.runs
from rlkit.runs import OptimizerOptions, RunOptions, TrainingOptions, parse_options
from rlkit.runs.options import option_groups


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
        resume=True,
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


def public_names(module):
    """The functions and classes that a module defines for others."""
    found = inspect.getmembers(module, lambda x: inspect.isfunction(x) or inspect.isclass(x))
    return [name for name, x in found if x.__module__ == module.__name__ and not name.startswith("_")]


MODULES = [importlib.import_module(f"rlkit.runs.{found.name}") for found in iter_modules(rlkit.runs.__path__)]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_is_exported_and_described(module):
    names = public_names(module)
    assert names
    if module.__name__ != "rlkit.runs.tiny_tool_user":  # the one function of one recipe, which imports transformers
        assert set(names) <= set(rlkit.runs.__all__)
    for name in names:
        text = inspect.getdoc(getattr(module, name)) or ""
        assert text and not text.startswith(f"{name}("), f"{name}: a docstring, other than the one dataclasses make"
