"""The models that a plan finds in a recipe: also in a copy whose options have other names."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from rlkit.plan.recipes import is_used, load_recipe, recipe_options, recipe_roles

RECIPES = Path(__file__).parents[2] / "recipes"
LLAMA = LlamaConfig(
    hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=1000
)  # fmt: skip


@pytest.fixture
def model(tmp_path):
    LLAMA.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def copied(tmp_path, name, *changes):
    """A copy of a recipe with changed text."""
    text = (RECIPES / f"{name}.py").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "mine.py").write_text(text)
    return load_recipe(str(tmp_path / "mine.py"))


def test_the_coefficient_of_a_copied_recipe_may_have_any_name(tmp_path, model):
    """It was taken to load a reference always, and a run without one was refused."""
    module = copied(tmp_path, "grpo_vlm", ("kl_coef", "beta"))
    for beta, rank, expected in (("0", "0", (False, False)), ("0.1", "0", (True, False)), ("0.1", "8", (False, True))):
        cfg = recipe_options(module, ["--model", model, "--beta", beta, "--lora_rank", rank])
        roles = recipe_roles(module, cfg)
        assert (roles.reference is not None, roles.adapter_reference) == expected


def test_a_condition_that_a_plan_cannot_evaluate_is_named(tmp_path, model):
    call = "runs.build_reference(cfg, path, processor, engine) if cfg.kl_coef else None"
    module = copied(tmp_path, "grpo_vlm", (call, call.replace("cfg.kl_coef", "run.steps")))
    expected = (
        r"^recipe: expected a condition of cfg alone for build_reference, got `run.steps`, which a plan cannot "
        r"evaluate \(name 'run' is not defined\)$"
    )
    with pytest.raises(ValueError, match=expected):
        recipe_roles(module, recipe_options(module, ["--model", model]))


def test_a_wrong_option_that_a_condition_reads_keeps_its_sentence(tmp_path, model):
    call = "runs.build_reference(cfg, path, processor, engine)"
    module = copied(tmp_path, "dpo", (call, f"{call} if select_loss(cfg) else None"))
    with pytest.raises(ValueError, match="^loss: expected one of sigmoid, .* got 'dqo'$"):
        recipe_roles(module, recipe_options(module, ["--model", model, "--loss", "dqo"]))


def test_a_model_named_by_an_option_counts_if_it_is_built(tmp_path, model):
    """An option may be called teacher, and name something else."""
    module = copied(tmp_path, "sft", ("    train_on:", '    teacher: str = "a school"\n    """Mine."""\n    train_on:'))
    assert recipe_roles(module, recipe_options(module, ["--model", model])).reference is None


@pytest.mark.parametrize(
    ("body", "used"),
    [
        ("return runs.build(cfg)", {0, 1}),
        ("return runs.build(cfg) if cfg else None", {1}),
        ("return None if cfg > 0 else runs.build(cfg)", {0}),
        ("return cfg and runs.build(cfg)", {1}),
        ("return cfg or runs.build(cfg)", {0}),
        ("return [runs.build(cfg) for _ in range(2)]", {0, 1}),
        ("if wanted(cfg):\n        return runs.build(cfg)", {1}),
        ("if cfg > 0:\n        x = 1\n    else:\n        x = runs.build(cfg)", {0}),
        ("if cfg > 0:\n        x = 1\n    elif cfg == 0:\n        x = runs.build(cfg)", {0}),
        ("if cfg > 0:\n        if cfg < 1:\n            x = runs.build(cfg)", set()),
        ("if cfg > 0:\n        return None\n    with runs.timer():\n        return runs.build(cfg)", {0}),
        ("if cfg > 0:\n        x = 1\n    return runs.build(cfg)", {0, 1}),
        ("make = runs.build\n    return make(cfg)", {0, 1}),
        ("build = runs.other\n    return build(cfg)", set()),
    ],
)
def test_conditions_of_a_call_are_evaluated(body, used, tmp_path):
    text = f"from rlkit import runs\n\ndef wanted(cfg):\n    return cfg == 1\n\ndef main(cfg):\n    {body}\n"
    (tmp_path / "mine.py").write_text(text)
    module = load_recipe(str(tmp_path / "mine.py"))
    assert {cfg for cfg in (0, 1) if is_used("build", module, cfg)} == used


def test_an_imported_function_is_found_by_its_name(tmp_path):
    text = "from rlkit.runs import build_engine\n\ndef main(options):\n    return build_engine() if options else 0\n"
    (tmp_path / "mine.py").write_text(text)
    module = load_recipe(str(tmp_path / "mine.py"))
    assert [is_used("build_engine", module, cfg) for cfg in (0, 1)] == [False, True]
