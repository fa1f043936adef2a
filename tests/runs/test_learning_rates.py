"""Learning rates and weight decay of a resumed run: those of its own options, not those of the checkpoint."""

from dataclasses import dataclass

import pytest
import torch

from rlkit.runs.models import learning_rate_schedule


@dataclass
class Options:
    lr_schedule: str = "linear"
    min_lr_ratio: float = 0.05
    warmup_steps: int = 1


def start(updates, lr=1.0, weight_decay=0.0):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=lr, weight_decay=weight_decay)
    return optimizer, learning_rate_schedule(optimizer, Options(), updates)


def train(optimizer, schedule, updates):
    """The learning rate of each update."""
    rates = []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("options", [{}, {"lr": 10.0}, {"lr": 0.1, "weight_decay": 0.3}])
def test_a_resumed_run_has_the_learning_rates_of_its_own_options(options):
    """It is stopped after 2 of 2 steps and continued up to 4, with other options."""
    optimizer, schedule = start(updates=2)
    assert train(optimizer, schedule, 2) == [1.0, 0.5]
    resumed, resumed_schedule = start(updates=4, **options)
    resumed.load_state_dict(optimizer.state_dict())
    resumed_schedule.load_state_dict(schedule.state_dict())
    peak = options.get("lr", 1.0)
    assert resumed_schedule.get_last_lr() == [0.5 * peak]
    assert train(resumed, resumed_schedule, 2) == [0.5 * peak, 0.25 * peak]
    assert resumed.param_groups[0]["weight_decay"] == options.get("weight_decay", 0.0)


def test_a_resumed_run_with_the_same_options_has_the_same_learning_rates():
    whole = train(*start(updates=7), 7)
    optimizer, schedule = start(updates=7)
    train(optimizer, schedule, 3)
    resumed, resumed_schedule = start(updates=7)
    resumed.load_state_dict(optimizer.state_dict())
    resumed_schedule.load_state_dict(schedule.state_dict())
    assert train(resumed, resumed_schedule, 4) == whole[3:]
