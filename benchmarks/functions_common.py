"""What the function benchmarks share: inputs, the list of groups, the peers that are installed, two measures."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

PEERS = [name for name in ("verl", "trl") if find_spec(name)]
SMALL, LARGE = (256, 2048), (1024, 4096)
GROUP = 8
Contestants = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Group:
    """One function, or one use of it, and who can do it."""

    name: str
    build: Callable[["Batch"], Contestants]  # makes the inputs of each contestant's own convention, outside the timing
    contestants: tuple[str, ...]
    mask: str
    size: tuple[int, int]
    tolerance: float
    memory: bool


GROUPS: dict[str, Group] = {}


def every_group() -> dict[str, Group]:
    """All groups, of all files functions_*.py beside this one."""
    for file in sorted(Path(__file__).parent.glob("functions_*.py")):
        import_module(file.stem)
    return GROUPS


def group(name: str, *others: str, mask="gaps", size=SMALL, tolerance=1e-4, memory=False) -> Callable:
    """Enter a group. Beside rlkit and the loop there are `others`; a peer that is not installed is left out."""
    there = [x for x in others if x.split("_")[0] in PEERS or x.split("_")[0] not in ("verl", "trl")]

    def enter(build):
        assert name not in GROUPS, name
        GROUPS[name] = Group(name, build, ("rlkit", "loop", *there), mask, size, tolerance, memory)
        return build

    return enter


class Batch:
    """Random inputs [B, T] in groups of 8 in any order; the bool mask is full, or has tool turns and right padding."""

    def __init__(self, size: tuple[int, int], kind: str):
        self.b, self.t = b, t = size
        self.known: dict[str, list] = {}
        g = torch.Generator().manual_seed(0)
        self.ids = torch.arange(b // GROUP).repeat_interleave(GROUP)[torch.randperm(b, generator=g)]
        self.rewards = torch.randn(b, generator=g)
        self.values, self.dense, self.advantages = (torch.randn(b, t, generator=g) for _ in range(3))
        # multiples of 1/1024: log-ratios are then exact, and no rounding decides on which side of a clip a token falls
        self.old = torch.rand(b, t, generator=g).log_().mul_(256).round_().div_(1024)
        step = torch.randn(b, t, generator=g).mul_(100).round_().div_(1024)
        self.logprobs = (self.old + step).clamp_(max=0.0).requires_grad_()
        self.lengths = torch.randint(t // 2, t + 1, (b, 1), generator=g) if kind == "gaps" else torch.full((b, 1), t)
        place = torch.arange(t)
        self.attended = place < self.lengths
        tool = (place // 64 + torch.arange(b)[:, None]) % 4 == 3
        self.mask = self.attended & ~tool if kind == "gaps" else self.attended
        last = self.mask.long().cumsum(1).argmax(1, keepdim=True)
        self.outcome = torch.zeros(b, t).scatter_(1, last, self.rewards[:, None])  # as peers take a reward of a sample

    @cached_property
    def long_mask(self) -> torch.Tensor:
        """The mask as TRL and verl's advantages have it; verl's losses are given a bool one, as ours are."""
        return self.mask.long()

    @cached_property
    def sampler(self) -> torch.Tensor:
        """Other log-probabilities, near to `old`, and multiples of 1/1024 as well."""
        return (self.old + self.dense.mul(100).round_().div_(1024)).clamp_(max=0.0)

    @cached_property
    def uid(self) -> np.ndarray:
        """Groups as verl has them: one string a sample."""
        return np.array([f"{i:08x}-7c6d-4a3e-9b1f-{i:012x}" for i in self.ids.tolist()], dtype=object)

    def nested(self, *names: str) -> list:
        """Inputs as nested lists, for the loops; one name gives one input."""
        for name in names:
            if name not in self.known:
                self.known[name] = getattr(self, name).tolist()
        return self.known[names[0]] if len(names) == 1 else [self.known[name] for name in names]


@lru_cache(maxsize=2)
def batch(size: tuple[int, int], kind: str) -> Batch:
    return Batch(size, kind)


def as_tensors(result: Any) -> list[torch.Tensor]:
    parts = result if isinstance(result, tuple) else (result,)
    return [torch.as_tensor(x).detach().double() for x in parts]


def differences(came: Any, expected: Any, mask: torch.Tensor) -> tuple[float, float]:
    """The largest difference, absolute and as a share of the output's largest value; [B, T] outputs inside the mask."""
    absolute = relative = 0.0
    came, expected = as_tensors(came), as_tensors(expected)
    assert len(came) == len(expected)
    for x, y in zip(came, expected, strict=True):
        assert x.shape == y.shape, f"{list(x.shape)} beside {list(y.shape)}"
        if x.shape == mask.shape:
            x, y = x[mask], y[mask]
        difference = (x - y).abs().max().item()
        absolute, relative = max(absolute, difference), max(relative, difference / max(y.abs().max().item(), 1e-30))
    return absolute, relative


def peak_bytes(function: Callable[[], Any]) -> tuple[int, int]:
    """Bytes of tensors alive at the most beyond those alive before (results included), and those of the largest one."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        result = function()
    del result
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = largest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak, largest = max(peak, held), max(largest, event.nbytes())
    return peak, largest


def seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def with_gradient(loss: torch.Tensor, leaf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return loss, torch.autograd.grad(loss, leaf)[0]


def verl_config(policy_loss: dict | None = None, **settings) -> Any:
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    settings["policy_loss"] = PolicyLossConfig(**(policy_loss or {}))
    return ActorConfig(strategy="fsdp", rollout_n=GROUP, ppo_micro_batch_size_per_gpu=GROUP, **settings)


def trl_trainer(logprobs: torch.Tensor, **settings) -> Callable[[dict], torch.Tensor]:
    """TRL's losses are branches inside one method of its trainer: that method, with what it reads of a trainer."""
    from trl import GRPOTrainer

    same = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x)
    same.num_processes, same.sync_gradients = 1, True
    args = SimpleNamespace(delta=None, steps_per_generation=1, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)
    args.vespo_k_pos, args.vespo_lambda_pos, args.vespo_k_neg, args.vespo_lambda_neg = 2.0, 3.0, 3.0, 2.0
    entropies = torch.zeros_like(logprobs)
    defaults = dict(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
        get_gamma_weights=GRPOTrainer.get_gamma_weights, aux_loss_enabled=False, top_entropy_quantile=1.0, beta=0.0,
        off_policy_mask_threshold=None, importance_sampling_level="token", loss_type="bnpo", epsilon_low=0.2,
        epsilon_high=0.2, use_vllm=False, vllm_importance_sampling_correction=False, accelerator=same, args=args,
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    trainer = SimpleNamespace(**{**defaults, **settings})
    return lambda inputs: GRPOTrainer._compute_loss(trainer, None, inputs)
