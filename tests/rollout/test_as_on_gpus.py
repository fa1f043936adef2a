"""What samplers ask for on a GPU, in which order; what it does there is in test_on_gpus.py."""

from types import SimpleNamespace

import torch

from rlkit.rollout.vllm import VllmRollout


def test_a_sampler_wakes_up_to_memory_that_the_trainer_has_given_back(monkeypatch):
    """Otherwise the trainer's allocator keeps the memory of a step, and vLLM cannot allocate its cache."""
    calls = []
    rollout = VllmRollout.__new__(VllmRollout)
    rollout._shut_down, rollout.asleep, rollout.version = None, True, 0
    rollout.llm = SimpleNamespace(
        wake_up=lambda tags: calls.extend(tags),
        reset_prefix_cache=lambda: True,
        llm_engine=SimpleNamespace(reset_encoder_cache=lambda: None),
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("given back"))
    rollout.wake_up()
    assert rollout.asleep  # there are no weights yet
    rollout._finish_update()
    assert calls == ["given back", "weights", "given back", "kv_cache"] and not rollout.asleep
