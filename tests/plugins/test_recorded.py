"""What verl and TRL computed with our functions, repeated by our engine: losses and weights after two steps.

The files are written by live_verl.py and live_trl.py, in the environment of `make peers`.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from two_steps import our_trl_dpo_steps, our_trl_steps, our_verl_steps, recorded, same_training

RUNS = {
    "recorded_verl": our_verl_steps,
    "recorded_trl_grpo": our_trl_steps,
    "recorded_trl_dpo": our_trl_dpo_steps,
}


@pytest.mark.parametrize("name", RUNS)
def test_our_engine_gives_the_losses_and_weights_of_the_other_trainer(name):
    start, end, steps, losses = recorded(name)
    same_training(RUNS[name](start, steps), start, end, losses)
