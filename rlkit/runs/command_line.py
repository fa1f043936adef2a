"""Parses the options of a command line and of configuration files; help texts are the strings below the options."""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import os
import re
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass, make_dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, TypeVar, get_type_hints

from rlkit.runs.options import RUN_ONLY_OPTIONS

Config = TypeVar("Config")
NOT_OPTIONS = {"versions", "contents"}  # what else is in the config.json of a run
OTHER_NAMES = {  # of options in TRL and verl, or in other recipes -> names here, in recipes that have these
    "clip_ratio_high": "clip_high",
    "clip_ratio_low": "clip_low",
    "heldout_rows": "rows",
    "learning_rate": "lr",
    "max_completion_length": "max_new_tokens",
    "max_steps": "steps",
    "model_name_or_path": "model",
    "num_generations": "group_size",
    "num_train_epochs": "epochs",
    "output_dir": "out",
}
MODEL_DEPENDENT_OPTIONS = {"lr", "critic_lr", "enable_gradient_checkpointing", "threads"}  # see `model_defaults`


def option_value(text: str) -> bool | int | float | str:
    """Parse true, false and numbers; other text stays a string."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text


def command_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of `python -m MODULE`, which shows the description as it is written and takes no abbreviated options."""
    return argparse.ArgumentParser(
        f"python -m {module}",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parse_options(
    config: type[Config], description: str, arguments: Sequence[str] | None = None, *, program: str | None = None
) -> Config:
    """Parse the command line. `--help` shows options grouped by the class that declares them.

    Args:
        config: a flat dataclass. Each field has a help text under it, in the class itself or in a base class.
        description: text above the options in `--help`.
        arguments: arguments to parse instead of the command line's.
        program: name of the program in `--help`; by default the script's path.

    Raises:
        ValueError: a configuration file cannot be read, or has an unknown option; or an option has the name that it has
            in another library or recipe.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    given = {name.partition("=")[0].lstrip("-").replace("-", "_") for name in arguments if name.startswith("--")}
    _check_names(config, given)
    if file := _config_file(arguments):
        arguments = [*_file_arguments(file, config, given), *arguments]
    cfg = _parse(config, description, arguments, {}, program)
    defaults = {name: x for name, x in model_defaults(cfg).items() if hasattr(cfg, name)}
    if getattr(cfg, "from_rollouts", ""):
        defaults["max_mismatch"] = math.inf
    return _parse(config, description, arguments, defaults, program) if defaults else cfg


def _check_names(config: type, given: set[str]) -> None:
    """Raise a ValueError that says what an option of another library or recipe is called here."""
    names = {option.name for option in fields(config)}
    for name in given - names:
        if OTHER_NAMES.get(name) in names:
            raise ValueError(f"--{name}: expected --{OTHER_NAMES[name]}, its name here")


def model_defaults(cfg: Any) -> dict[str, Any]:
    """Defaults that depend on the model. Empty for the tiny model, for which the recipes' defaults are made.

    The tiny model's learning rate of 5e-4 would destroy a pretrained model, and without gradient checkpointing a real
    model's activations rarely fit.
    """
    from rlkit.vlm.tiny import is_tiny

    if is_tiny(getattr(cfg, "model", None) or "tiny"):
        return {}
    lr = 1e-5 if getattr(cfg, "lora_rank", 0) else 1e-6
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)  # a job may have some of the machine's cores only
    return {"lr": lr, "critic_lr": 1e-5, "enable_gradient_checkpointing": True, "threads": threads}


def _parse(
    config: type[Config], description: str, arguments: Sequence[str], changed: Mapping[str, Any], program: str | None
) -> Config:
    """`parse_options` with changed defaults of some options."""
    import tyro

    hints, defaults = get_type_hints(config), {f.name: f for f in fields(config)}  # type: ignore[arg-type]
    groups = []
    for owner, texts in option_groups(config).items():
        options = [
            (name, Annotated[hints[name], tyro.conf.arg(help=text)], changed.get(name, _default(defaults[name])))
            for name, text in texts.items()
        ]
        words = re.findall("[A-Z][a-z]+", owner.__name__.removesuffix("Options"))
        title = "recipe" if owner is config else "_".join(words).lower()
        group = make_dataclass(owner.__name__, options)
        groups.append((title, group, field(default_factory=group)))
    grouped = make_dataclass("Options", groups)
    # help texts are given above; to look for comments beside the fields takes a third of the time
    config_of_tyro = (tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff)
    parsed: Any = tyro.cli(
        grouped,
        prog=program,
        args=arguments,
        use_underscores=True,
        description=description,
        config=config_of_tyro,
    )
    return config(**{name: x for group in vars(parsed).values() for name, x in vars(group).items()})


def _file_arguments(file: str, config: type, given: Collection[str]) -> list[str]:
    """The options in a YAML or JSON file, as command-line arguments.

    Options of a config.json that concern only its own run are left out, such as `out` and `resume`. So are those that
    are defaults of its model, such as `lr`, because a run with another model has other ones. So is `epochs`, from which
    `steps` would be computed, if `steps` is given on the command line. An option of this recipe with the value null
    counts as not given.

    Raises:
        ValueError: the file cannot be read, is not a mapping, or has an option that `config` lacks.
    """
    import yaml

    try:
        options = yaml.safe_load(Path(file).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"config: expected a YAML or JSON file, got {file!r}: {error}") from error
    if not isinstance(options, dict):
        raise ValueError(f"config {file!r}: expected options by name, got a {type(options).__name__}")
    if "versions" in options:  # a run's config.json
        defaults = {f.name: f.default for f in fields(config)} | model_defaults(SimpleNamespace(**options))
        # as text, because YAML reads 1e-06 as text
        unset = {x for x in MODEL_DEPENDENT_OPTIONS & options.keys() if str(options[x]) == str(defaults.get(x))}
        options = {name: x for name, x in options.items() if name not in NOT_OPTIONS | RUN_ONLY_OPTIONS | unset}
    names = {option.name for option in fields(config)}
    if unknown := sorted(set(options) - names):
        raise ValueError(f"config {file!r}: expected options of this recipe, got {', '.join(unknown)}")
    for name, x in options.items():
        if found := re.search(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", " ".join(_as_arguments(name, x))):  # all but \n and \t
            raise ValueError(
                f"config {file!r}: {name}: expected text, got the control character {found[0]!r} in it; YAML reads "
                "\\b, \\f and \\r in double quotes as characters, so use single quotes"
            )
    if "steps" in given:
        options.pop("epochs", None)
    return [part for name, x in options.items() if x is not None for part in _as_arguments(name, x)]


def _as_arguments(name: str, x: Any) -> list[str]:
    if isinstance(x, bool):
        return [f"--{name}" if x else f"--no_{name}"]
    if isinstance(x, dict):
        x = [part for pair in x.items() for part in pair]
    if isinstance(x, list):
        return [f"--{name}", *map(str, x)]
    return [f"--{name}={x}"] if str(x).startswith("-") else [f"--{name}", str(x)]


def changed_arguments(cfg: Any, *, without: Collection[str] = ()) -> list[str]:
    """The options that differ from their defaults, as arguments of which `parse_options` makes the same options.

    Args:
        cfg: options of a recipe.
        without: names of options to leave out.
    """
    defaults = model_defaults(cfg)
    arguments = []
    for option in fields(cfg):
        default = option.default if option.default_factory is MISSING else option.default_factory()
        x = getattr(cfg, option.name)
        if option.name not in without and x != defaults.get(option.name, default):
            arguments += _as_arguments(option.name, list(x) if isinstance(x, tuple) else x)
    return arguments


def _config_file(arguments: Sequence[str]) -> str:
    """The value of --config; empty if it is not given."""
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--config":
            return value if equals else next(iter(arguments[i + 1 :]), "")
    return ""


def option_groups(config: type) -> dict[type, dict[str, str]]:
    """Help texts of the options, grouped by the class that first declares them, with the recipe's own options first.

    Raises:
        ValueError: an option without a help text.
    """
    groups: dict[type, dict[str, str]] = {}
    for owner in reversed(config.__mro__):
        if is_dataclass(owner):
            inherited = {name for texts in groups.values() for name in texts}
            texts = _help_texts(owner)
            added = [name for name in inspect.get_annotations(owner) if name not in inherited]
            if missing := [name for name in added if not texts.get(name)]:
                raise ValueError(f"{owner.__name__}.{missing[0]}: expected a help text under it, got none")
            if added:
                groups[owner] = {name: texts[name] for name in added}
    return {owner: groups[owner] for owner in sorted(groups, key=lambda owner: owner is not config)}


@cache
def _help_texts(owner: type) -> dict[str, str]:
    """The string under each field of a class, as one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for line, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(below, ast.Expr):
            texts[line.target.id] = " ".join(ast.literal_eval(below.value).split())
    return texts


def _default(option: Field) -> Any:
    if option.default_factory is not MISSING:
        return field(default_factory=option.default_factory)
    return option.default
