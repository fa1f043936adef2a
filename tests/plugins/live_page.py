"""The blocks of docs/other_trainers.md for TRL, verl and Lightning, in those trainers; `make peers` runs it."""

import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import datasets
import lightning
import pytest
import torch
import trl
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from pages import blocks  # noqa: E402
from two_steps import WORDS, copy_of, tiny_model  # noqa: E402

from rlkit.vlm.tiny import tiny_text_tokenizer  # noqa: E402

SMALL = {"use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 2, "save_strategy": "no"}
DATA = {
    "trl-lib/tldr": {"prompt": ["add 1 and 2", "what is 3"] * 4},
    "trl-lib/ultrafeedback_binarized": {"prompt": ["a", "b"] * 8, "chosen": ["c", "d"] * 8, "rejected": ["e", "f"] * 8},
}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A directory with a tiny model under the name of the page's, small data sets, and runs of two steps on the CPU."""
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_text_tokenizer(["a b c"])
    tokenizer.save_pretrained("Qwen/Qwen2.5-0.5B-Instruct")
    tiny_model(len(tokenizer)).save_pretrained("Qwen/Qwen2.5-0.5B-Instruct")
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: datasets.Dataset.from_dict(DATA[name]))
    monkeypatch.setattr(trl, "GRPOConfig", partial(trl.GRPOConfig, max_completion_length=4, **SMALL))
    monkeypatch.setattr(trl, "DPOConfig", partial(trl.DPOConfig, **SMALL))


def test_grpo(small):
    names = {}
    block = blocks("TRL")[0]
    exec(block, names)
    assert names["trainer"].state.global_step == 2
    lines = [line for line in block.splitlines() if line.strip() and not re.match(r"from|import", line)]
    assert len(lines) <= 6


def test_dpo(small, capsys):
    exec(blocks("TRL")[1], {})
    assert "train_loss" in capsys.readouterr().out


def test_verls_commands_and_functions():
    """The commands' options and functions exist; live_verl_run.py runs them."""
    folder = Path(find_spec("verl").submodule_search_locations[0]) / "trainer" / "config"
    tree = yaml.safe_load((folder / "_generated_ppo_trainer.yaml").read_text())
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn

    exec(blocks("verl")[0], {})
    for command in blocks("verl", "bash"):
        given = dict(re.findall(r"([a-z_]+\.[\w.]+)=(\w+)", command))
        for option in given:
            value = tree
            for part in option.split("."):
                value = value[part]
            assert value is not None, option
        get_policy_loss_fn(given["actor_rollout_ref.actor.policy_loss.loss_mode"])
        get_adv_estimator_fn(given["algorithm.adv_estimator"])


def test_lightning(tmp_path):
    names = {}
    exec(blocks("Lightning, and loops of your own")[0], names)
    g = torch.Generator().manual_seed(0)
    rows = [
        {
            "tokens": torch.randint(2, WORDS, (7,), generator=g),
            "attended": torch.ones(7),
            "old_logprobs": -3 * torch.rand(7, generator=g),
            "advantages": torch.randn((), generator=g),
            "mask": torch.arange(7) > 2,
        }
        for _ in range(4)
    ]
    model = tiny_model()
    start = copy_of(model)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    trainer.fit(names["Policy"](model), torch.utils.data.DataLoader(rows, batch_size=2))
    assert trainer.global_step == 2
    assert any((x - start[name]).abs().max() > 1e-6 for name, x in copy_of(model).items())
