"""Look at a task's data before a run: python -m rlkit.data check TASK [options].

    python -m rlkit.data check train.jsonl --reward boxed
    python -m rlkit.data check train.jsonl --reward boxed --model DIR     # prompts as this model reads them

It says how many rows there are, which would be skipped and why, what right and wrong answers are rewarded, and shows
prompts with their images. The exit status is 1 if a line says FAIL.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlkit.data.loading import load_chats, load_pairs, load_task, load_unpaired
from rlkit.doctor.__main__ import show
from rlkit.doctor.task import check_rewards, check_rows, show_rows
from rlkit.runs import ModelOptions, RewardOptions, TaskOptions, load_named_task, one_sentence_errors, parse_options
from rlkit.runs.models import processor_of

KINDS = {"task": load_task, "chats": load_chats, "pairs": load_pairs, "unpaired": load_unpaired}


@dataclass
class Options(TaskOptions, RewardOptions, ModelOptions):
    model: str = ""
    kind: Literal["task", "chats", "pairs", "unpaired"] = "task"
    """How the rows are read: task, for recipes that sample responses; chats, for sft.py; pairs, for dpo.py,
    simpo.py and reward_model.py; unpaired, for kto.py."""
    max_prompt_tokens: int = 0
    """With --model: maximum number of tokens per prompt. Longer prompts are skipped. 0: no limit."""
    rows: int = 1000
    """Rows to read, of the training rows and of the held-out ones."""
    prompts: int = 3
    """Prompts to show."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what is in a task; the exit status is 1 if it cannot be trained on."""
    command, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or [""]
    if command in ("-h", "--help"):
        command, rest = "check", ["--help"]
    if command != "check":
        sys.exit(__doc__)
    if rest and not rest[0].startswith("-"):
        rest = ["--task", *rest]
    with one_sentence_errors("rlkit.data"):
        cfg = parse_options(Options, __doc__ or "", rest, program="python -m rlkit.data check")
        task = load_named_task(cfg, cfg.task, KINDS[cfg.kind])
        processor = processor_of(cfg, cfg.model) if cfg.model else None
        limit = cfg.max_prompt_tokens or None
        passed = show(f"Task {task.name}", check_rows(task, processor, max_tokens=limit, most=cfg.rows))
        if cfg.kind == "task":
            passed = show("Rewards", check_rewards(task)) and passed
        print(f"\nPrompts{'' if cfg.model else '; with --model as the model reads them'}")
        for text in show_rows(task, processor, cfg.prompts):
            print(text)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
