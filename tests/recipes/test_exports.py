"""What a run exports: the dtype that the model came with, adapters beside the merged model, classifiers."""

import json
import re
import sys
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))

from helpers import run_here, text_dir  # noqa: E402, F401

from rlkit import runs  # noqa: E402
from rlkit.vlm import load_model  # noqa: E402

SMALL = ["--task", "sorting", "--steps", 1, "--prompts_per_step", 4, "--max_new_tokens", 2]


def dtypes(path):
    return {str(x.dtype) for file in Path(path).glob("*.safetensors") for x in load_file(file).values()}


def half(text_dir, tmp_path):  # noqa: F811
    """The same model in bfloat16, as most are on the hub."""
    load_model(str(text_dir), dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(text_dir).save_pretrained(tmp_path / "half")
    return tmp_path / "half"


def test_bfloat16_in_and_out_with_adapters(text_dir, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Trained in float32, exported in bfloat16; the adapters keep what training found. A second engine has its own."""
    finish = runs.finish
    monkeypatch.setattr(runs, "finish", lambda *args, model: finish(*args, model=model, second=model))
    model, out = half(text_dir, tmp_path), tmp_path / "run"
    run_here("sft", "--model", model, "--out", out, "--lora_rank", 4, "--lr", 1e-2, *SMALL)
    assert dtypes(out / "model") == {"torch.bfloat16"} and dtypes(out / "adapter") == {"torch.float32"}
    assert dtypes(out / "second") == {"torch.bfloat16"} and dtypes(out / "second_adapter") == {"torch.float32"}
    assert len(re.findall(r"/(?:second_)?adapter +adapters alone, for peft and vLLM", capsys.readouterr().out)) == 2
    assert json.loads((out / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), out / "adapter"
    )
    merged = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    tokens = torch.arange(3, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits, atol=0.03, rtol=0.03)


def test_dtypes_by_option(text_dir, tmp_path):  # noqa: F811
    run_here("sft", "--model", half(text_dir, tmp_path), "--out", tmp_path / "run", "--dtype", "bfloat16",
             "--compute_dtype", "bfloat16", "--export_dtype", "float16", *SMALL)  # fmt: skip
    assert dtypes(tmp_path / "run" / "model") == {"torch.float16"}
    [shards] = (tmp_path / "run" / "checkpoints").glob("step_1")
    assert sum(file.stat().st_size for file in shards.iterdir()) < 3.5 * 2 * load_model(str(text_dir)).num_parameters()


def test_a_reward_model_of_texts_is_a_classifier(text_dir, tmp_path):  # noqa: F811
    run_here("reward_model", "--model", text_dir, "--out", tmp_path / "run", *SMALL[:-2])
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert classifier.config.num_labels == 1 and classifier.config.pad_token_id is not None
    assert classifier.score.weight.any()
