"""Rollouts: sampling back ends behind one contract, from prompts to samples, with token ids throughout.

    rollout = make_rollout("hf", engine.gathered, processor=processor)
    rollout.update_weights(engine.get_per_tensor_param())
    samples = rollout.generate(prompts, Sampling(max_new_tokens=64, seed=(0, step)), n=8)

`register_rollout` adds a back end.
"""

import inspect
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rlkit.rollout.agent import Observation, run_episodes
from rlkit.rollout.sampling import Sampling, uniforms
from rlkit.rollout.shared_rows import SharedRowsRollout
from rlkit.rollout.weight_sync_check import WeightSyncCheck, measure_mismatch
from rlkit.vlm.loading import model_path

__all__ = [
    "Observation",
    "Sampling",
    "WeightSyncCheck",
    "make_rollout",
    "measure_mismatch",
    "register_rollout",
    "run_episodes",
    "uniforms",
]

_ROLLOUTS: dict[str, str] = {}


def register_rollout(backend: str, target: str) -> None:
    """Register a rollout class.

    Its instances have `generate(requests, sampling, n, on_finished=...)`, `update_weights(iterator)`, `sleep()`,
    `wake_up()` and `close()`. It is called with `processor`, with those of `gathered`, `model`, `urls`,
    `gpu_memory_utilization` and `trust_remote_code` that its signature names, and with the options of `make_rollout`.
    An attribute `collective = True` says that all ranks of a model-parallel group have to generate each sample
    together.

    Args:
        backend: the name that `make_rollout` is called with, and that recipes take as `--rollout`.
        target: "module:class", imported when the rollout is first made.
    """
    _ROLLOUTS[backend] = target


register_rollout("hf", "rlkit.rollout.hf:HfRollout")
register_rollout("vllm", "rlkit.rollout.vllm:VllmRollout")
register_rollout("vllm_server", "rlkit.rollout.servers.vllm:VllmServerRollout")
register_rollout("sglang", "rlkit.rollout.servers.sglang:SglangRollout")


def _registered() -> dict[str, str]:
    """All rollouts: the entry points of the group rlkit.rollouts, and `register_rollout`'s."""
    return {**{point.name: point.value for point in entry_points(group="rlkit.rollouts")}, **_ROLLOUTS}


def rollout_class_of(backend: str, options: Iterable[str] = ()) -> Any:
    """The class that is registered for a back end.

    Args:
        backend: as in `make_rollout`.
        options: names of options that the class has to take.

    Raises:
        ValueError: no such rollout, or an unknown option.
    """
    rollouts = _registered()
    if backend not in rollouts:
        raise ValueError(f"rollout: expected one of {', '.join(sorted(rollouts))}, got {backend!r}")
    module, _, name = rollouts[backend].partition(":")
    rollout_class: Any = getattr(import_module(module), name)
    parameters = inspect.signature(rollout_class).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not takes_any and (unknown := [option for option in options if option not in parameters]):
        raise ValueError(f"{backend} rollout: expected options {', '.join(parameters)}; got {', '.join(unknown)}")
    return rollout_class


def make_rollout(
    backend: str,
    gathered: Any = None,
    *,
    processor: Any,
    model: str | Path | None = None,
    urls: Sequence[str] = (),
    gpu_memory_utilization: float = 0.8,
    trust_remote_code: bool = False,
    model_parallel_group: Any = None,
    **options: Any,
) -> Any:
    """Make the rollout that is registered for a back end.

    A recipe passes all of these arguments; which of them a rollout uses depends on the back end.

    Args:
        backend: "hf" (the trained module itself), "vllm" (in this process), "vllm_server", "sglang", or a name given to
            `register_rollout`.
        gathered: context that yields the trained module with full weights, `engine.gathered`; for "hf".
        processor: the trainer's.
        model: directory, hub id or ModelScope name; for all others.
        urls: of the servers.
        gpu_memory_utilization: share of a GPU's memory that a rollout in this process may use.
        trust_remote_code: allow code from the model's repository to run.
        model_parallel_group: ranks that are given the same requests, `engine.model_parallel_group`: they
            split them, and each rank gets all samples. None if each rank has requests of its own.
        options: of the rollout's class.

    Raises:
        ValueError: no such rollout, or an unknown option.
    """
    rollout_class = rollout_class_of(backend, options)
    parameters = inspect.signature(rollout_class).parameters
    shared = {"gathered": gathered, "model": model and model_path(model), "urls": urls}
    shared |= {"gpu_memory_utilization": gpu_memory_utilization, "trust_remote_code": trust_remote_code}
    shared |= {"model_parallel_group": model_parallel_group}
    used = {name: value for name, value in shared.items() if name in parameters}
    rollout = rollout_class(processor=processor, **used, **options)
    if model_parallel_group is None:
        return rollout
    return SharedRowsRollout(rollout, model_parallel_group, collective=getattr(rollout_class, "collective", False))
