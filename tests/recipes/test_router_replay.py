"""`--router_replay`: the recipe's sampler records its choice of experts, and the engine trains with it."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))

from helpers import numbers, run_here, text_dir  # noqa: E402, F401

from rlkit.data import append_response  # noqa: E402
from rlkit.data.samples import prompt_sample  # noqa: E402
from rlkit.engines.fsdp.fsdp2 import Fsdp2Engine  # noqa: E402
from rlkit.runs import PolicySampler  # noqa: E402

STEP = [
    "--task",
    "sorting",
    "--steps",
    1,
    "--prompts_per_step",
    2,
    "--group_size",
    2,
    "--heldout_rows",
    2,
    "--lr",
    1e-3,
]


@pytest.fixture(scope="module")
def moe_dir(text_dir, tmp_path_factory):  # noqa: F811
    """A Qwen3 mixture of experts with random weights and the tokenizer of the tiny model."""
    path = tmp_path_factory.mktemp("router_replay") / "moe"
    shutil.copytree(text_dir, path)
    before = json.loads((text_dir / "config.json").read_text())
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=before["vocab_size"], hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16,
        eos_token_id=before["eos_token_id"], pad_token_id=before["pad_token_id"],
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("replays", [True, False])
def test_the_engine_trains_with_the_recorded_experts(moe_dir, tmp_path, replays):
    seen = []
    train_batch = Fsdp2Engine.train_batch

    def noted(engine, batch, *arguments, **options):
        seen.append((engine.router_replay, batch.fields.get("routed_experts")))
        return train_batch(engine, batch, *arguments, **options)

    with mock.patch.object(Fsdp2Engine, "train_batch", noted):
        options = ["--router_replay"] if replays else []
        run_here("grpo_vlm", "--model", moe_dir, "--out", tmp_path / "run", *STEP, *options)
    ((engine_replays, experts),) = seen
    assert engine_replays == replays
    if not replays:
        assert experts is None
        return
    assert experts.shape[2:] == (2, 3) and (experts >= 0).any()
    assert numbers(tmp_path / "run")[0]["mismatch/abs_dlogp"] < 1e-5


def test_a_sampler_that_records_nothing_ends_the_run():
    def stop(message):
        raise SystemExit(message)

    sampler = SimpleNamespace(
        cfg=SimpleNamespace(router_replay=True, rollout="vllm_server"), run=SimpleNamespace(stop=stop)
    )
    responses = [append_response(prompt_sample([3, 4]), [5], [-0.1])]
    with pytest.raises(SystemExit, match="router_replay: expected responses with the experts that vllm_server chose"):
        PolicySampler.check_routing(sampler, responses)
    sampler.cfg.router_replay = False
    PolicySampler.check_routing(sampler, responses)
