"""Shared by all tests: no network, one thread, and a tiny model directory."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

torch.set_num_threads(1)


def pytest_configure(config):
    """Where there are GPUs, tests run on the CPU all the same, whose numbers they expect; `-m gpu` runs the others."""
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    """A tiny Qwen2.5-VL with random weights, its tokenizer and its processor."""
    from rlkit.data import load_task
    from rlkit.vlm import build_tiny

    path = tmp_path_factory.mktemp("model") / "tiny"
    build_tiny(path, load_task("digits").train, warm_up_steps=0)
    return str(path)
