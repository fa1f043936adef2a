"""Rollouts on stand-ins for vLLM's servers."""

import pytest

from rlkit.rollout import make_rollout
from rlkit.vlm import load_processor


@pytest.fixture(scope="module")
def processor(tiny_dir):
    return load_processor(tiny_dir)


@pytest.fixture
def connect(tiny_dir, processor):
    """A rollout on stand-in servers."""
    made = []

    def connect(*servers, **options):
        options = {"model": tiny_dir, "processor": processor, "timeout": 100.0, **options}
        made.append(make_rollout("vllm_server", urls=[s if isinstance(s, str) else s.url for s in servers], **options))
        made[-1].pool.backoff = 0.01
        return made[-1]

    yield connect
    for rollout in made:
        rollout.close()
