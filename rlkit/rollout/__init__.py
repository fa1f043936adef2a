"""Samplers behind one contract: prompts in, samples out, tokens all the way.

rollout = make_rollout("hf", engine.gathered, processor=processor)
rollout.update_weights(engine.get_per_tensor_param())
samples = rollout.generate(prompts, Sampling(max_new_tokens=64, seed=(0, step)), n=8)
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from rlkit.rollout.agent import Observation, run_episodes
from rlkit.rollout.asynchronous import Ahead
from rlkit.rollout.canary import Canary, fresh_gap
from rlkit.rollout.same_rows import SameRows
from rlkit.rollout.sampling import Sampling, uniforms
from rlkit.vlm.loading import model_path

__all__ = ["Ahead", "Canary", "Observation", "Sampling", "fresh_gap", "make_rollout", "run_episodes", "uniforms"]

_ROLLOUTS = {  # the class, and what it is given of the things that every recipe has at hand
    "hf": ("rlkit.rollout.hf:HfRollout", ("gathered", "gpu_memory_utilization")),
    "vllm": ("rlkit.rollout.vllm:VllmRollout", ("model", "gpu_memory_utilization")),
    "vllm_server": ("rlkit.rollout.vllm_server:VllmServerRollout", ("model", "urls")),
    "sglang": ("rlkit.rollout.sglang_server:SglangRollout", ("model", "urls")),
}


def make_rollout(
    backend: str,
    gathered: Any = None,
    *,
    processor: Any,
    model: str | None = None,
    urls: Sequence[str] = (),
    gpu_memory_utilization: float = 0.8,
    model_parallel_group: Any = None,
    **options: Any,
) -> Any:
    """A sampler. A recipe hands over all of these and changes one word to sample with another.

    Every sampler has `generate(requests, sampling, n)`, `update_weights(iterator)`, `sleep()`, `wake_up()` and
    `close()`.

    Args:
        backend: "hf" (the trained module itself), "vllm" (in this process), "vllm_server", or "sglang".
        gathered: context that yields the trained module with whole weights, `engine.gathered`; "hf" samples from it.
        processor: the trainer's.
        model: directory, hub id or ModelScope's name, which the other samplers load, or serve already.
        urls: of the servers.
        gpu_memory_utilization: share of a GPU's memory that a sampler in this process may use.
        model_parallel_group: ranks that are given the same requests, `engine.model_parallel_group`: they share them,
            and all get all answers; None where each has its own.
        options: the sampler's own; see its class.

    Raises:
        ValueError: no such sampler.
    """
    if backend not in _ROLLOUTS:
        raise ValueError(f"no rollout {backend!r}; there are: {', '.join(sorted(_ROLLOUTS))}")
    (target, takes), at_hand = _ROLLOUTS[backend], {"gathered": gathered, "urls": urls}
    at_hand |= {"model": model and model_path(model), "gpu_memory_utilization": gpu_memory_utilization}
    module, _, name = target.partition(":")
    given = {k: at_hand[k] for k in takes}
    rollout: Any = getattr(import_module(module), name)(processor=processor, **given, **options)
    if model_parallel_group is None:
        return rollout
    return SameRows(rollout, model_parallel_group, together=backend == "hf")
