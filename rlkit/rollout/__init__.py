"""Samplers behind one contract: prompts in, samples out, tokens all the way.

    rollout = make_rollout("hf", engine.gathered, processor=processor)
    rollout.update_weights(engine.get_per_tensor_param())
    samples = rollout.generate(prompts, Sampling(max_new_tokens=64, seed=(0, step)), n=8)
"""

from importlib import import_module
from typing import Any

from rlkit.rollout.sampling import Sampling, uniforms

__all__ = ["Sampling", "make_rollout", "uniforms"]

_ROLLOUTS = {"hf": "rlkit.rollout.hf:HfRollout", "vllm": "rlkit.rollout.vllm:VllmRollout"}


def make_rollout(backend: str, *args: Any, **options: Any) -> Any:
    """A sampler; `options` are its own, see its class.

    Every sampler has `generate(requests, sampling, n)`, `update_weights(iterator)`, `sleep()`, `wake_up()` and `close()`.
    """
    if backend not in _ROLLOUTS:
        raise ValueError(f"no rollout {backend!r}; there are: {', '.join(sorted(_ROLLOUTS))}")
    module, _, name = _ROLLOUTS[backend].partition(":")
    return getattr(import_module(module), name)(*args, **options)
