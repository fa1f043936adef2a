"""With `--offload_between_phases` a recipe copies weights and optimizer state once in each phase of a step."""

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import helpers
from helpers import numbers, run_here

from rlkit.engines.offload import Offloaded
from rlkit.tracking import Run

warm_dir, text_dir = helpers.warm_dir, helpers.text_dir
SMALL = [
    "--task", "helpers:few_digits", "--seed", 0, "--steps", 2, "--prompts_per_step", 4, "--group_size", 4,
    "--max_new_tokens", 3, "--lr", 1e-3, "--kl_coef", 0.01, "--micro_batch_tokens", 64,
]  # fmt: skip
CASES = {  # options; how often each part came to the device in the second step
    # weights of policy (sampling, estimates, update), critic (estimates, update) and reference; two optimizer states
    "ppo": (["--mini_batches", 2, "--ppo_epochs", 2, "--critic_lr", 1e-3], [3, 2, 1, 1, 1]),
    # weights of policy (sampling, update) and reference; one optimizer state
    "grpo_vlm": (["--ppo_epochs", 3], [2, 1, 1]),
    # the policy without its adapters is the reference
    "grpo_vlm, LoRA": (["--ppo_epochs", 3, "--lora_rank", 4], [2, 1]),
}


@pytest.mark.parametrize("case", CASES)
def test_copies_do_not_grow_with_the_number_of_updates(case, warm_dir, tmp_path, monkeypatch):
    recipe, (options, expected) = case.partition(",")[0], CASES[case]
    start_loading, log, loaded, loads = Offloaded.start_loading, Run.log, [], []

    def counted(self):
        loaded.extend([id(self)] if self._is_unloaded and self._storages else [])
        start_loading(self)

    def counted_log(self, *args, **kwargs):
        log(self, *args, **kwargs)
        loads.append(sorted(Counter(loaded).values(), reverse=True))
        loaded.clear()

    monkeypatch.setattr(Offloaded, "start_loading", counted)
    monkeypatch.setattr(Run, "log", counted_log)
    for name, offloads in (("plain", []), ("offloaded", ["--offload_between_phases"])):
        run_here(recipe, "--model", warm_dir, *SMALL, *options, *offloads, "--out", tmp_path / name)
    assert loads == [[], [], loads[2], expected]
    assert numbers(tmp_path / "plain") == numbers(tmp_path / "offloaded")
