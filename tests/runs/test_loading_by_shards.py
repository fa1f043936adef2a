"""Recipes read each rank's part of the weights, with the numbers of a run that reads them whole."""

import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from helpers import load, numbers, run_here, text_dir, warm_dir  # noqa: F401  (a fixture)

from rlkit.data import append_response, collate
from rlkit.data.samples import prompt_sample
from rlkit.engines.distributed import init_distributed
from rlkit.engines.fsdp import fsdp1, fsdp2
from rlkit.engines.model_files import NotInShardsError
from rlkit.runs import build_engine, build_scorer, build_value_engine, parse_options
from rlkit.vlm import load_model, load_processor

SMALL = [
    "--task", "helpers:seen_shortly", "--prompts_per_step", 4, "--group_size", 8, "--steps", 2, "--max_new_tokens", 3,
    "--warmup_steps", 0,
]  # fmt: skip


def refuse(base, device):
    raise NotInShardsError("model 'x': expected weights that can be read in slices, got others")


@pytest.mark.parametrize("adapters", [[], ["--lora_rank", 4], ["--lora_rank", 4, "--quantize_base"]])
def test_same_numbers_as_reading_whole(warm_dir, tmp_path, monkeypatch, capsys, adapters):  # noqa: F811
    run_here("grpo_vlm", "--model", warm_dir, "--out", tmp_path / "shards", *SMALL, *adapters)
    assert "reads the whole model" not in capsys.readouterr().out
    monkeypatch.setattr(fsdp2, "load_sharded_weights", refuse)
    run_here("grpo_vlm", "--model", warm_dir, "--out", tmp_path / "whole", *SMALL, *adapters)
    said = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("got others; each rank reads the whole model") for line in said) == 2 - bool(adapters)
    assert numbers(tmp_path / "shards") == numbers(tmp_path / "whole")
    assert any(row["grad_norm"] > 0 for row in numbers(tmp_path / "whole"))


def test_dropout_of_the_configuration_is_off_unless_asked_for(warm_dir, tmp_path):  # noqa: F811
    """The log-probabilities of training are those of sampling, in a model whose configuration has dropout."""
    arguments = ["--model", warm_dir, "--model_config", "text_config.attention_dropout=0.5", *SMALL]
    run_here("grpo_vlm", "--out", tmp_path / "off", *arguments)
    assert numbers(tmp_path / "off")[0]["mismatch/abs_dlogp"] < 1e-6
    with pytest.raises(SystemExit, match="mismatch/abs_dlogp"):
        run_here("grpo_vlm", "--out", tmp_path / "on", *arguments, "--no_disable_dropout")


def options(path, *arguments):
    return parse_options(load("ppo").Config, "", ["--model", str(path), *map(str, arguments)])


@pytest.mark.parametrize("build", [build_engine, build_value_engine])
@pytest.mark.parametrize("engine", [["fsdp2"], ["fsdp2", "--parallel", "tensor", 1], ["fsdp1"]])
def test_no_weight_is_read_before_it_is_sharded(text_dir, monkeypatch, build, engine):  # noqa: F811
    """All parameters are on the meta device when FSDP shards them."""
    init_distributed("cpu")
    seen = []
    engine_class = fsdp1.Fsdp1Engine if engine[0] == "fsdp1" else fsdp2.Fsdp2Engine
    shard = engine_class._shard

    def look(self, model, *rest, **options):
        seen.extend(p.is_meta for p in model.parameters() if p.shape[0] != 1)
        return shard(self, model, *rest, **options)

    monkeypatch.setattr(engine_class, "_shard", look)
    cfg = options(text_dir, "--engine", *engine)
    build(cfg, str(text_dir), load_processor(str(text_dir)), optimizer_steps=1)
    assert len(seen) > 10 and all(seen)


def test_reference_keeps_the_dtype_of_its_files(text_dir, tmp_path):  # noqa: F811
    """In bfloat16 it takes half the memory, and gives the numbers of a reference in float32."""
    init_distributed("cpu")
    load_model(str(text_dir), dtype=torch.bfloat16).save_pretrained(tmp_path)
    processor, cfg = load_processor(str(text_dir)), options(tmp_path)
    assert asdict(cfg)["dtype"] == "float32"
    halves = [build_scorer(cfg, str(tmp_path), processor, only_scores=x) for x in (False, True)]
    for half in halves:
        assert {p.dtype for p in half.module.parameters()} == {torch.bfloat16}
        assert all(isinstance(p, DTensor) for p in half.module.parameters())  # cast when they are gathered
    single = fsdp2.Fsdp2Engine(model=load_model(str(tmp_path)), device="cpu")
    batch = collate([append_response(prompt_sample([5, 6, 7]), [8, 9, 10, 11], [-1.0] * 4)])
    scores, *others = [engine.infer_batch(batch)["logprobs"] for engine in (single, *halves)]
    assert scores.any() and all(torch.equal(scores, other) for other in others)


def test_a_float32_reference_is_held_in_the_dtype_of_the_computation(text_dir):  # noqa: F811
    init_distributed("cpu")
    processor, cfg = load_processor(str(text_dir)), options(text_dir, "--compute_dtype", "bfloat16")
    scorer = build_scorer(cfg, str(text_dir), processor)
    reference = build_scorer(cfg, str(text_dir), processor, only_scores=True)
    dtypes = [{p.dtype for p in engine.module.parameters()} for engine in (scorer, reference)]
    assert dtypes == [{torch.float32}, {torch.bfloat16}]
