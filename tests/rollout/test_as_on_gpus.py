"""What samplers ask for on a GPU, in which order; what it does there is in test_on_gpus.py."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rlkit.engines.distributed import TIMEOUT
from rlkit.rollout import vllm
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


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("memory_is_there", [True, False])
def test_an_engine_that_is_shut_down_is_awake(sleeps, memory_is_there, monkeypatch):
    """vLLM's allocator frees memory by unmapping it, which fails for memory of a sleeping engine."""
    calls = []

    def wake_up():
        calls.append("awake")
        if not memory_is_there:
            raise RuntimeError("out of memory")

    core = SimpleNamespace(shutdown=lambda: calls.append("shut down"))
    engine = SimpleNamespace(is_sleeping=lambda: sleeps, engine_core=core)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("given back"))
    fails = sleeps and not memory_is_there
    with pytest.raises(RuntimeError, match="out of memory") if fails else nullcontext():
        vllm._shut_down_engine(SimpleNamespace(llm_engine=engine, wake_up=wake_up))
    assert calls == (["given back", "awake", "shut down"] if sleeps else ["shut down"])


def test_ranks_that_share_an_engine_wait_as_long_as_the_trainer(monkeypatch):
    made = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout: made.append((list(ranks), timeout)) or made[-1])
    assert vllm._tensor_parallel_group(2) == ([2, 3], TIMEOUT)
    assert made == [([0, 1], TIMEOUT), ([2, 3], TIMEOUT)]
