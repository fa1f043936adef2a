"""Reads a recipe's file and options, and finds out which models the recipe loads."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlkit.plan.rehearsal import Roles
from rlkit.runs.command_line import parse_options
from rlkit.runs.option_types import check_ranges
from rlkit.runs.options import TrainingOptions
from rlkit.vlm.loading import load_config
from rlkit.vlm.model_config import changed_config, config_file, is_config_file
from rlkit.vlm.weight_files import quantization_method, quantized_message


def load_recipe(path: str) -> Any:
    """Import a recipe's file as a module, with modules beside it, as Python does for a script.

    Raises:
        ValueError: there is no such Python file, or it has no function `main`.
    """
    if not Path(path).is_file() or Path(path).suffix != ".py":
        raise ValueError(f"recipe: expected a file such as recipes/grpo_vlm.py, got {path!r}")
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look up their module there
    folder = str(Path(path).resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    if not hasattr(module, "main"):
        raise ValueError(f"recipe {path!r}: expected a function main(cfg), got none")
    return module


def recipe_options(module: Any, arguments: Sequence[str]) -> Any:
    """The options of a recipe, as `rlkit.runs.run_recipe` reads them.

    Raises:
        ValueError: an option is out of range, a model is "tiny", or the recipe trains no model.
    """
    (config,) = inspect.signature(module.main, eval_str=True).parameters.values()
    cfg = parse_options(config.annotation, module.__doc__ or "", arguments)
    check_ranges(cfg)
    if not isinstance(cfg, TrainingOptions):
        raise ValueError(f"recipe: expected one that trains a model, got {module.__name__}")
    if tiny := [name for name in ("model", "teacher") if getattr(cfg, name, "") == "tiny"]:
        raise ValueError(f'{tiny[0]}: expected a directory or hub id, got "tiny", which fits wherever it is started')
    return cfg


def check_recipe_options(module: Any, cfg: Any) -> None:
    """Check options as a recipe's `main` does before it loads its task: by `runs.check_...`, or `raise` in an `if`.

    Other statements are not run, so checks that need their results are left to the run.

    Raises:
        ValueError: by such a check.
    """
    (main_argument,) = inspect.signature(module.main).parameters
    names = {**vars(module), main_argument: cfg}
    main = ast.parse(inspect.getsource(module.main)).body[0]
    statements = list(getattr(main, "body", ()))
    while statements and "load_named_task" not in ast.unparse(statements[0]):
        statement = statements.pop(0)
        try:
            if isinstance(statement, ast.If):
                branch = statement.body if eval(ast.unparse(statement.test), names) else statement.orelse
                statements = [*branch, *statements]
            elif isinstance(statement, ast.Raise) or ast.unparse(statement).startswith("runs.check_"):
                exec(ast.unparse(statement), names)
        except ValueError:  # of the recipe: an option is wrong
            raise
        except Exception:  # more than cfg is needed: the run will check it
            continue


def _model_config(cfg: Any) -> Any:
    """The configuration of the policy, with `--model_config`; the weights of a directory may not be quantized."""
    if not is_config_file(cfg.model):
        trainable = _trainable_config(cfg.model, cfg)
        if not cfg.model_config:
            return trainable
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(changed_config(cfg.model, cfg.model_config)))
        config = load_config(folder, trust_remote_code=cfg.trust_remote_code)
    config.name_or_path = cfg.model if is_config_file(cfg.model) else str(config_file(cfg.model).parent)
    return config


def _trainable_config(path: str, cfg: Any) -> Any:
    """The configuration of a model whose weights are not quantized."""
    config = load_config(path, trust_remote_code=cfg.trust_remote_code)
    if method := quantization_method(config):
        raise ValueError(quantized_message(path, method))
    return config


def recipe_roles(module: Any, cfg: Any) -> Roles:
    """The models that a recipe loads with these options: those whose `rlkit.runs.build_...` function it calls.

    Raises:
        ValueError: a model's configuration cannot be read, the recipe builds no engine, or a condition of a call cannot
            be evaluated, see `is_used`.
    """
    config = _model_config(cfg)
    has_reference = is_used("build_reference", module, cfg)
    reference = config if has_reference and not cfg.lora_rank else None
    if is_used("build_teacher", module, cfg) and not cfg.teacher_servers:
        reference = _trainable_config(cfg.teacher, cfg)
    whole_vocabulary = is_used("output_layer", module, cfg)
    if whole_vocabulary and reference is None:
        raise ValueError(f"teacher_top_k: expected at least 1 for --loss {cfg.loss} without a teacher here, got 0")
    critic = None
    if is_used("build_value_engine", module, cfg):
        path = getattr(cfg, "critic_model", "")
        critic = _trainable_config(path, cfg) if path else config
    policy = config if is_used("build_engine", module, cfg) else None
    if policy is None and critic is None:
        raise ValueError(f"recipe: expected one that builds an engine, got {module.__name__}")
    return Roles(
        policy,
        critic,
        reference,
        adapter_reference=has_reference and bool(cfg.lora_rank),
        whole_vocabulary=whole_vocabulary,
        kl_in_reward=has_reference and hasattr(module, "kl_in_reward"),
        rows_together=2 if is_used("load_pairs", module, cfg) else 1,
    )


def is_used(name: str, module: Any, cfg: Any) -> bool:
    """Whether a recipe uses a function with these options, for example `build_reference`.

    The source is searched for the name, and the conditions around it are evaluated: `X if cfg.kl_coef else None`, `if`
    and `else`, `and` and `or`, and an earlier `if ...: return`. A loop or a function around it is taken to run.

    Raises:
        ValueError: a condition depends on more than `cfg` and what the module defines.
    """
    kinds = (ast.Name, ast.Attribute) if hasattr(module, name) else (ast.Attribute,)  # not a local variable
    (main_argument,) = inspect.signature(module.main).parameters
    names = {**vars(module), "cfg": cfg, main_argument: cfg}

    def holds(condition: ast.expr) -> bool:
        text = ast.unparse(condition)
        try:
            return bool(eval(text, names))
        except ValueError:  # of the recipe: an option is wrong
            raise
        except Exception as error:
            raise ValueError(
                f"recipe: expected a condition of cfg alone for {name}, got `{text}`, which a plan cannot evaluate "
                f"({error})"
            ) from error

    uses = _conditions_of_uses(ast.parse(inspect.getsource(module)), name, kinds)
    return any(all(holds(condition) == outcome for condition, outcome in conditions) for conditions in uses)


Conditions = tuple[tuple[ast.expr, bool], ...]  # expressions, each with the outcome that leads to a place in the source


def _conditions_of_uses(
    node: ast.AST, name: str, kinds: tuple[type[ast.AST], ...], around: Conditions = ()
) -> Iterator[Conditions]:
    """The conditions of each use of a name below a node of the syntax tree."""
    if isinstance(node, kinds) and name in (getattr(node, "id", ""), getattr(node, "attr", "")):
        yield around
    for field, x in ast.iter_fields(node):
        inside = around
        if isinstance(node, ast.If | ast.IfExp) and field != "test":
            inside += ((node.test, field == "body"),)
        for child in x if isinstance(x, list) else [x]:
            if isinstance(child, ast.AST):
                yield from _conditions_of_uses(child, name, kinds, inside)
            if isinstance(child, ast.If) and isinstance(child.body[-1], ast.Return):
                inside += ((child.test, False),)
            elif isinstance(node, ast.BoolOp) and isinstance(child, ast.expr):
                inside += ((child, isinstance(node.op, ast.And)),)
