"""TRL's trainers without a model or data: their own methods, their own configurations, and what these methods read."""

from collections import defaultdict
from types import SimpleNamespace

import torch
from case import Case
from torch import Tensor


def stand_in(trainer_class: type, config_class: type, attributes: dict | None = None, **options):
    """An object of the class that skipped its __init__, which mostly copies the configuration to attributes."""
    from accelerate import Accelerator

    trainer = object.__new__(trainer_class)
    trainer.args = config_class(use_cpu=True, bf16=False, report_to="none", **options)
    trainer.__dict__.update(vars(trainer.args))
    trainer.accelerator = Accelerator(cpu=True)
    trainer.model = torch.nn.Module()
    trainer.model.is_gradient_checkpointing = False
    trainer.aux_loss_enabled, trainer._tp_size, trainer._total_train_tokens = False, 1, 0
    trainer._metrics = {"train": defaultdict(list)}
    trainer.__dict__.update(attributes or {})
    return trainer


def last_metrics(trainer, names) -> dict[str, Tensor]:
    """What the trainer has logged, by name with a dot for a slash."""
    return {name.replace("/", "."): torch.tensor(trainer._metrics["train"][name][-1]) for name in names}


def fused_head_output(log_probs: Tensor, mask: Tensor) -> SimpleNamespace:
    """What a model with TRL's fused head returns: [B, T - 1], and 0 where there is no label."""
    mask = mask[:, 1:]
    log_probs = torch.where(mask, log_probs[:, 1:], 0.0)
    zeros = torch.zeros_like(log_probs).detach()
    return SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=mask)


def case(name, inputs, peer, ours, grad=("logprobs",), why="", **tolerance):
    """A case whose `ours` takes one object with the inputs as attributes and may return a bare tensor, named "out"."""

    def outputs(**tensors):
        found = ours(SimpleNamespace(**tensors))
        return found if isinstance(found, dict) else {"out": found}

    return Case(name, inputs, peer, outputs, grad, why, **tolerance)
