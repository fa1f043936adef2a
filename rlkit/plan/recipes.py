"""Reads a recipe's file and options, and finds out which models the recipe loads."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlkit.plan.rehearsal import Roles
from rlkit.runs.command_line import parse_options
from rlkit.runs.option_types import check_ranges
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
    if not hasattr(cfg, "micro_batch_tokens") or not hasattr(cfg, "lora_rank"):
        raise ValueError(f"recipe: expected one that trains a model, got {module.__name__}")
    if tiny := [name for name in ("model", "teacher") if getattr(cfg, name, "") == "tiny"]:
        raise ValueError(f'{tiny[0]}: expected a directory or hub id, got "tiny", which fits wherever it is started')
    return cfg


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
    """The models that a recipe loads with these options: its code is searched for calls of the `build_...` functions.

    A recipe that builds a reference loads it if its function `needs_reference(cfg)` says so; without one, unless
    `kl_coef` is 0.

    Raises:
        ValueError: a model's configuration cannot be read, or the recipe builds no engine.
    """
    functions = [x for x in vars(module).values() if inspect.isfunction(x) and x.__module__ == module.__name__]
    called_names = {name for function in functions for name in function.__code__.co_names}
    config = _model_config(cfg)
    needs_reference = getattr(module, "needs_reference", lambda cfg: getattr(cfg, "kl_coef", 1.0) > 0)
    has_reference = "build_reference" in called_names and needs_reference(cfg)
    reference = config if has_reference and not cfg.lora_rank else None
    teacher = getattr(cfg, "teacher", "")
    if teacher and not cfg.teacher_servers:
        reference = _trainable_config(teacher, cfg)
    whole_vocabulary = "output_layer" in called_names and cfg.loss != "sampled_token" and not cfg.teacher_top_k
    if whole_vocabulary and reference is None:
        raise ValueError(f"teacher_top_k: expected at least 1 for --loss {cfg.loss} without a teacher here, got 0")
    critic = None
    if "build_value_engine" in called_names:
        path = getattr(cfg, "critic_model", "")
        critic = _trainable_config(path, cfg) if path else config
    policy = config if "build_engine" in called_names else None
    if policy is None and critic is None:
        raise ValueError(f"recipe: expected one that builds an engine, got {module.__name__}")
    return Roles(
        policy,
        critic,
        reference,
        adapter_reference=has_reference and bool(cfg.lora_rank),
        whole_vocabulary=whole_vocabulary,
        rows_together=2 if "load_pairs" in called_names else 1,
    )
