"""Shared by all tests: no network, one thread, and a tiny model directory."""

import atexit
import gc
import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"
# a thread of OpenMP that waits for work keeps its core busy; a vLLM server with two took three times as long
os.environ["OMP_NUM_THREADS"] = "1"
# processes that tests start import this rlkit, and read startup/sitecustomize.py
HERE = os.path.dirname(__file__)
PATHS = [os.path.join(HERE, "startup"), os.path.dirname(HERE), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, PATHS))
gc.disable()  # until everything is imported
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a shell; what tests start would ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)

# files that take more than half a minute, the longest first
LONGEST = """
ulysses grpo_tools ranks grpo_async two_ranks grpo_vlm megatron vllm plan fused_kernels vllm_server smollm2
every_family sharded_loading simulated_gpu own_images ppo isolated_cases stories misbehaving_rewards sandbox maths
records kto evaluate
""".split()


def pytest_configure(config):
    """Where there are GPUs, tests run on the CPU all the same, whose numbers they expect; `-m gpu` runs the others."""
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items):
    """The longest files come first, so that at the end no worker waits for another one's longest file."""
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish():
    """The million objects of the imported libraries live on; looking through them again took 9 % of the time."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # not earlier, as pytest collects garbage five times at its end
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    """A tiny Qwen2.5-VL with random weights, its tokenizer and its processor."""
    from rlkit.data import load_task
    from rlkit.vlm import build_tiny

    path = tmp_path_factory.mktemp("model") / "tiny"
    build_tiny(path, load_task("digits").train, warm_up_steps=0)
    return str(path)
