"""A fault in any part of the model is named, with the sampler `hf`; tests/rollout/on_vllm.py tries it with vLLM."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "rollout")]
from faults import faults, first_differences  # noqa: E402
from vllm_models import build  # noqa: E402

import rlkit.mismatch.__main__ as command  # noqa: E402
from rlkit.data import load_task  # noqa: E402
from rlkit.engines import make_engine  # noqa: E402
from rlkit.mismatch.__main__ import main  # noqa: E402
from rlkit.mismatch.compare import Part, describe, hf_parts  # noqa: E402
from rlkit.mismatch.trace import decoder_of  # noqa: E402
from rlkit.replay.bundles import Bundle, Draw, write_bundle  # noqa: E402
from rlkit.rollout import Sampling, make_rollout  # noqa: E402
from rlkit.vlm import encode_prompt, load_model, load_processor, suppressed_token_ids  # noqa: E402

PARTS = ["injected features", "layer 0: attention", "layer 0", "layer 1: attention", "layer 1"]
PARTS += ["final norm", "sampling transform"]
WANTED = {  # the head of the first one is its embedding
    "qwen2_5_vl": {*PARTS, "pixels", "positions", "vision tower"},
    "qwen3_moe": {*PARTS, "layer 1: router", "logits"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def built(folder, kind):
    if not (folder / kind).exists():
        build(kind, str(folder / kind))
    return str(folder / kind)


@pytest.mark.parametrize("kind", WANTED)
def test_a_fault_in_any_part_is_named(folder, kind):
    path = built(folder, kind)
    processor, sampled = load_processor(path), load_model(path)
    suppressed = suppressed_token_ids(sampled.config, getattr(processor, "tokenizer", processor))
    engine = make_engine("fsdp2", model=load_model(path), temperature=0.8, suppressed_token_ids=suppressed)
    rollout = make_rollout("hf", lambda: nullcontext(sampled), processor=processor)
    row = {"question": "What digit is this?"} if kind == "qwen3_moe" else load_task("digits").train[0]
    (sample,) = rollout.generate([encode_prompt(processor, row)], Sampling(4, 0.8))
    named = first_differences(hf_parts(rollout, sampled, sample), engine, sample)
    assert named == {part: part for part in ["", *faults(engine, sample)]}
    assert WANTED[kind] <= set(named)


def test_the_command(folder, tmp_path, capsys, monkeypatch):
    """On the model itself, and on a response of a bundle that other weights have sampled."""
    path = built(folder, "qwen2_5_vl")
    digits = load_task("digits")
    monkeypatch.setattr(command, "load_task", lambda name: replace(digits, train=()))  # a task of evaluation
    with pytest.raises(SystemExit) as end:
        main([path, "--rollout", "hf", "--max_new_tokens", "3"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and said.endswith("nothing differs beyond rounding\n")
    for part in ("pixels", "positions", "vision tower", "injected features", "layer 1", "logits", "sampling transform"):
        assert f"\n{part} " in said

    processor, model = load_processor(path), load_model(path)
    with torch.no_grad():
        decoder_of(model).layers[0].self_attn.o_proj.weight.mul_(2.0)
    rollout = make_rollout("hf", lambda: nullcontext(model), processor=processor)
    samples = rollout.generate([encode_prompt(processor, digits.train[0])], Sampling(3))
    write_bundle(tmp_path / "step_0", Bundle(0, draws=[Draw(samples)]))
    with pytest.raises(SystemExit) as end:
        main([path, "--rollout", "hf", "--bundle", str(tmp_path / "step_0")])
    last = capsys.readouterr().out.splitlines()[-1]
    assert end.value.code == 1 and last.startswith("first difference: sampling transform: token ")
    with pytest.raises(SystemExit, match=r"mismatch: bundle .*: expected a folder with rank_0.json, got none"):
        main([path, "--bundle", str(tmp_path)])


def test_the_exit_status_is_that_of_the_parts(monkeypatch, capsys):
    """Not of the words that are printed, where a difference may be described as one that DIFFERS."""
    for differs in (False, True):
        found = [Part("layer 3", 0.5, differs, "DIFFERS" if not differs else "row 1")]
        monkeypatch.setattr(command, "run", lambda _, found=found: found)
        monkeypatch.setattr(command, "describe", lambda found: found[0].where)
        with pytest.raises(SystemExit) as end:
            main(["model"])
        assert end.value.code == int(differs) and capsys.readouterr().out == f"{found[0].where}\n"


def test_the_first_difference_is_the_last_line():
    found = [Part("pixels", 0.0, False), Part("layer 3", 0.5, True, "row 7 of 9"), Part("logits", 0.4, True, "row 1")]
    text = describe(found)
    assert text.splitlines()[-1] == "first difference: layer 3: row 7 of 9" and text.count("DIFFERS") == 2
