"""Loads the task of a run, and applies the options for rewards, held-out rows and prompts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar

import numpy as np

from rlkit.data import Task, load_task, with_heldout, with_prompt
from rlkit.data.samples import Row
from rlkit.data.tables import HELD_OUT_SEED, as_rows
from rlkit.rewards import isolated, reward_named, without_thinking
from rlkit.runs.command_line import option_value
from rlkit.runs.option_types import check_range
from rlkit.runs.options import RewardOptions, TaskOptions, TrainingOptions

Config = TypeVar("Config", bound=Any)


def load_named_task(cfg: TaskOptions, name: str, load: Callable[..., Task] = load_task) -> Task:
    """Load a task, and apply the options for its held-out rows, prompts and reward.

    In recipes that train, `cfg.heldout_rows` bounds the number of held-out rows.

    Args:
        cfg: options; they include `RewardOptions` in recipes that score responses.
        name: name of the task: `cfg.task`, or one of several.
        load: `load_task`, `load_chats`, `load_pairs` or `load_unpaired`.

    Raises:
        ValueError: there is no such task, it has no rows for a recipe that trains, or an option does not fit it.
    """
    named = getattr(cfg, "reward", "")
    options = {"reward": named} if named and load is load_task else {}  # also for a file of held-out rows
    load_any = partial(load, allow_outside_files=cfg.allow_outside_files, **options)
    task = load_any(name)
    if named and load is not load_task:
        task = replace(task, reward=reward_named(named))
    if cfg.heldout:
        task = with_heldout(task, cfg.heldout, load_any)
    if isinstance(cfg, TrainingOptions):
        if not len(task.train):
            without = f" beside --heldout {cfg.heldout}" if cfg.heldout else ""
            raise ValueError(
                f"task {name}: expected rows to train on, got none{without}; "
                "recipes/evaluate.py needs held-out rows alone"
            )
        task = replace(task, heldout=_at_most(cfg.heldout_rows, task.heldout))
    if isinstance(cfg, RewardOptions):
        task = replace(task, reward=_scored_as_asked(cfg, task.reward))
    return with_prompt(
        task,
        system_prompt=cfg.system_prompt,
        prompt_template=cfg.prompt_template,
        response_prefix=cfg.response_prefix,
        chat_template_kwargs={name: option_value(text) for name, text in cfg.chat_template_kwargs.items()},
        thinking_tags=getattr(cfg, "thinking_tags", ()),
    )


def _at_most(count: int, heldout: Sequence[Row]) -> Sequence[Row]:
    """`count` rows, chosen at random and in order; all of them if there are no more, or for a count of 0."""
    if not 0 < count < len(heldout):
        return heldout
    if os.environ.get("RANK", "0") == "0":
        print(f"held-out rows: {count} of {len(heldout)} (--heldout_rows; 0 for all)", flush=True)
    order = np.random.default_rng(HELD_OUT_SEED).permutation(len(heldout))[:count]
    return as_rows(heldout)[np.sort(order).tolist()]


def _scored_as_asked(cfg: RewardOptions, reward: Callable[..., Any]) -> Callable[..., Any]:
    """The reward, with --isolate_reward in worker processes, and with --split_thinking without a response's
    thinking."""
    if cfg.isolate_reward:
        reward = isolated(reward, seconds=cfg.reward_seconds, memory=int(cfg.reward_memory * 2**30))
    return without_thinking(reward) if cfg.split_thinking else reward


def with_epochs(cfg: Config, task: Task) -> Config:
    """The options; if `epochs` is given, `steps` is set to that many passes over the task's rows."""
    if not cfg.epochs:
        return cfg
    check_range("prompts_per_step", cfg.prompts_per_step, 1)
    epochs = Fraction(str(cfg.epochs))  # as typed: in floats, 2.2 * 100 / 10 is above 22
    return replace(cfg, steps=math.ceil(epochs * len(task.train) / cfg.prompts_per_step))
