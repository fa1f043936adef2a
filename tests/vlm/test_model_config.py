"""Models whose configuration is changed before they are made, with random weights or those of a directory."""

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig

from rlkit.plan.recipes import load_recipe, recipe_options, recipe_roles
from rlkit.vlm import load_model, load_processor
from rlkit.vlm.loading import empty_model
from rlkit.vlm.model_config import changed_config, write_model

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
import helpers  # noqa: E402
from helpers import text_dir  # noqa: E402, F401

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = ["text_config.num_hidden_layers=1", "text_config.rope_parameters.rope_theta=1e6"]


def test_a_configuration_file_gets_random_weights_of_a_seed(tiny_dir, tmp_path):
    file = f"{tiny_dir}/config.json"
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        write_model(file, SMALL, tmp_path / name, seed=seed)
    one, same, other = (
        {n: p for n, p in load_model(str(tmp_path / n)).named_parameters()} for n in ("one", "same", "other")
    )
    assert all(torch.equal(p, same[n]) for n, p in one.items())
    assert not torch.equal(
        one["model.language_model.embed_tokens.weight"], other["model.language_model.embed_tokens.weight"]
    )
    text = AutoConfig.from_pretrained(tmp_path / "one").text_config
    assert text.num_hidden_layers == len(text.layer_types) == 1 and text.rope_parameters["rope_theta"] == 1e6
    assert {n.split(".layers.")[1][0] for n in one if "language_model.layers." in n} == {"0"}
    assert load_processor(str(tmp_path / "one")).tokenizer.get_vocab() == load_processor(tiny_dir).tokenizer.get_vocab()


def test_weights_of_a_directory_are_kept(tiny_dir, tmp_path):
    write_model(tiny_dir, ["text_config.attention_dropout=0.5"], tmp_path / "kept")
    model, before = load_model(str(tmp_path / "kept")), load_model(tiny_dir)
    assert model.config.text_config.attention_dropout == 0.5 and before.config.text_config.attention_dropout == 0
    assert all(torch.equal(p, before.get_parameter(n)) for n, p in model.named_parameters())
    assert (tmp_path / "kept" / "model.safetensors").is_symlink()


def test_overrides_from_files_and_in_order(tiny_dir, tmp_path):
    (tmp_path / "a.yaml").write_text("text_config:\n  hidden_size: 64\n  rope_parameters: {rope_theta: 5000.0}\n")
    (tmp_path / "b.json").write_text(json.dumps({"vision_config": {"depth": 1}}))
    overrides = [
        str(tmp_path / "a.yaml"),
        str(tmp_path / "b.json"),
        "text_config.hidden_size=32",
        "tie_word_embeddings=false",
    ]
    content = changed_config(tiny_dir, overrides)
    assert (
        content["text_config"]["hidden_size"] == 32
        and content["text_config"]["rope_parameters"]["rope_theta"] == 5000.0
    )
    assert content["vision_config"]["depth"] == 1 and content["tie_word_embeddings"] is False
    assert content["text_config"]["num_hidden_layers"] == 2  # as before


@pytest.mark.parametrize("layers", [1, 3])
def test_the_order_of_overrides_does_not_matter(tiny_dir, layers):
    """Lists of layers that are given stay, whether the number of layers comes before or after; others are made anew."""
    kinds = ["sliding_attention"] * layers
    overrides = [f"text_config.num_hidden_layers={layers}", f"text_config.layer_types={json.dumps(kinds)}"]
    for given in (overrides, overrides[::-1]):
        assert changed_config(tiny_dir, given)["text_config"]["layer_types"] == kinds
    assert "layer_types" not in changed_config(tiny_dir, overrides[:1])["text_config"]
    for given in ([overrides[1], "text_config.num_hidden_layers=2"], ["text_config.num_hidden_layers=2", overrides[1]]):
        with pytest.raises(
            ValueError, match=f"text_config.layer_types: expected 2 entries, one per layer, got {layers}"
        ):
            changed_config(tiny_dir, given)


def test_fields_of_a_thinker_lie_in_the_configuration_of_the_whole_model(tmp_path):
    transformers.Qwen2_5OmniConfig().save_pretrained(tmp_path)
    content = changed_config(str(tmp_path), ["text_config.hidden_size=64"])
    assert content["thinker_config"]["text_config"]["hidden_size"] == 64 and "text_config" not in content


def test_bad_input_is_named(tiny_dir, text_dir, tmp_path):  # noqa: F811
    for override, message in {
        "text_config.hiden_size=3": "got 'text_config.hiden_size'; the nearest is 'text_config.hidden_size'",
        "text_config.rope_theta=1e6": "the nearest is 'text_config.rope_parameters.rope_theta'",
        "text_config.hidden_size=big": "text_config.hidden_size: expected an integer, such as 128, got 'big'",
        "text_config.hidden_size=1.5": "expected an integer, such as 128, got 1.5",
        "tie_word_embeddings=1": "tie_word_embeddings: expected true or false, such as True, got 1",
        "nowhere.yaml": "expected name=value or a JSON or YAML file, got 'nowhere.yaml'",
    }.items():
        with pytest.raises(ValueError, match=message):
            changed_config(tiny_dir, [override])
    with pytest.raises(ValueError, match="config.json: ValueError: .*divisible"):
        write_model(f"{tiny_dir}/config.json", ["text_config.num_attention_heads=3"], tmp_path / "odd")
    with pytest.raises(
        ValueError,
        match="model: expected a directory or a config.json on this machine, got 'owner/name'; download it "
        "first by hf download owner/name, and pass the directory that this prints",
    ):
        changed_config("owner/name", ["hidden_size=3"])
    run = ["--out", tmp_path / "run", "--task", "sorting"]
    with pytest.raises(
        SystemExit, match="sft: vocab_size: expected at least 287 for the tokens of the model's tokenizer, got 3"
    ):
        helpers.run_here("sft", "--model", f"{text_dir}/config.json", "--model_config", "vocab_size=3", *run)
    with pytest.raises(SystemExit, match="sft: model_config: expected none with the model tiny"):
        helpers.run_here("sft", "--model_config", "hidden_size=3", *run)


def test_a_run_trains_samples_and_exports_the_changed_model(text_dir, tmp_path):  # noqa: F811
    changes = ["--model_config", "num_hidden_layers=1", "intermediate_size=48"]
    options = ["--model", f"{text_dir}/config.json", *changes, "--task", "sorting", "--steps", 1]
    options += ["--prompts_per_step", 4, "--group_size", 2, "--heldout", "0.01", "--max_new_tokens", 3]
    helpers.run_here("reinforce", *options, "--out", tmp_path / "run", "--lr", 1e-3)
    exported = AutoConfig.from_pretrained(tmp_path / "run" / "model")
    assert exported.num_hidden_layers == 1 and exported.intermediate_size == 48
    assert helpers.rows(tmp_path / "run")[0]["mismatch/abs_dlogp"] < 1e-5
    module = load_recipe(str(RECIPES / "reinforce.py"))
    planned = ["--model", f"{text_dir}/config.json", *changes, "--max_prompt_tokens", "8"]
    roles = recipe_roles(module, recipe_options(module, planned))
    assert roles.policy.num_hidden_layers == 1 and roles.policy.intermediate_size == 48


def test_a_layer_larger_than_memory_is_made_on_the_meta_device():
    """The experts of the layer would take a terabyte."""
    sizes = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "n_routed_experts": 8192}
    model = empty_model("", AutoConfig.for_model("deepseek_v3", **sizes), dtype=torch.float32)
    assert max(p.numel() for p in model.parameters()) == 8192 * 2 * 2048 * 7168
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {b.device.type for b in model.buffers()} == {"cpu"}
