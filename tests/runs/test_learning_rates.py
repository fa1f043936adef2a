"""Learning rates of a run; a resumed run has those, weight decay and betas of its own options."""

from dataclasses import dataclass

import pytest
import torch
from transformers import get_linear_schedule_with_warmup

from rlkit.runs.models import learning_rate_schedule


@dataclass
class Options:
    lr_schedule: str = "linear"
    min_lr_ratio: float = 0.0
    warmup_steps: int = 1


def start(updates, lr=1.0, weight_decay=0.0, betas=(0.9, 0.95), **options):
    parameters = [torch.nn.Parameter(torch.ones(1))]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, betas=betas)
    return optimizer, learning_rate_schedule(optimizer, Options(**options), updates)


def train(optimizer, schedule, updates):
    """The learning rate of each update."""
    rates = []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 3, 10])
def test_linear_decay_begins_at_the_peak_as_in_transformers(warmup):
    """As there, but without the first update there, which has a learning rate of 0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    published = get_linear_schedule_with_warmup(optimizer, max(1, warmup), 21)
    assert train(*start(20, warmup_steps=warmup), 20) == pytest.approx(train(optimizer, published, 21)[1:])


@pytest.mark.parametrize(("decay", "halfway"), [("linear", 0.6), ("cosine", 0.6), ("constant", 1.0)])
def test_the_peak_and_the_final_learning_rate_are_reached(decay, halfway):
    rates = train(*start(12, lr_schedule=decay, warmup_steps=5, min_lr_ratio=0.2), 14)
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0]) and rates[8] == pytest.approx(halfway)
    assert rates[12:] == pytest.approx([1.0, 1.0] if decay == "constant" else [0.2, 0.2])


def test_a_run_shorter_than_its_warm_up():
    assert train(*start(2, warmup_steps=4), 2) == [0.25, 0.5]


@pytest.mark.parametrize("options", [{}, {"lr": 10.0}, {"lr": 0.1, "weight_decay": 0.3, "betas": (0.8, 0.99)}])
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
    assert resumed.param_groups[0]["betas"] == options.get("betas", (0.9, 0.95))


def test_a_resumed_run_with_the_same_options_has_the_same_learning_rates():
    whole = train(*start(updates=7), 7)
    optimizer, schedule = start(updates=7)
    train(optimizer, schedule, 3)
    resumed, resumed_schedule = start(updates=7)
    resumed.load_state_dict(optimizer.state_dict())
    resumed_schedule.load_state_dict(schedule.state_dict())
    assert train(resumed, resumed_schedule, 4) == whole[3:]


def test_a_group_that_is_added_has_the_schedule_with_its_own_peak():
    """From its first update on; also if an update between was skipped."""
    optimizer, schedule = start(updates=4)
    assert train(optimizer, schedule, 1) == [1.0]
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.1})
    first = optimizer.param_groups[1]["params"][0]
    first.grad = torch.ones(1)
    before = first.item()
    train(optimizer, schedule, 1)
    assert before - first.item() == pytest.approx(0.075, rel=1e-5)  # AdamW's first step is the learning rate
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.2})
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.25, 0.025, 0.05])


def test_an_optimizer_without_the_options_of_adamw_has_a_schedule():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = learning_rate_schedule(optimizer, Options(), 2)
    assert train(optimizer, schedule, 1) == [1.0]
    schedule.load_state_dict(schedule.state_dict())
    assert train(optimizer, schedule, 1) == [0.5]
