"""Recipes that train SmolLM2-135M-Instruct on real text and on sums, as a user runs them: `make pretrained`.

The commands are those of the table benchmarks/results/smollm2_recipes.md.
"""

import functools
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import until

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]

import helpers  # noqa: E402
import smollm2  # noqa: E402
from helpers import evaluation, numbers  # noqa: E402

# How far each number moves at least: about half of the least of three seeds in the table (grpo_vlm has one).
# A loss and a divergence fall.
MOVES = {
    "sft": {"heldout_loss": -0.4},
    "dpo": {"heldout_loss": -0.06, "preference_accuracy": 0.5},
    "reward_model": {"heldout_loss": -0.015, "accuracy": 0.6},
    "kto": {"heldout_loss": -0.01},
    "distill": {"divergence": -1.2},
    "grpo_vlm": {"accuracy": 0.25},
    "ppo": {"accuracy": 0.25},
}
# Short runs, with these options in place of those of the table: sft in float32, and recipes that sample. The engine of
# ppo's critic has a checkpoint of its own.
FEW = "--task helpers:even_sums --heldout 0.001 --steps 4 --prompts_per_step 2 --group_size 4 --max_new_tokens 6"
SHORT = {
    "sft": "--steps 4 --prompts_per_step 4 --compute_dtype float32 --export_dtype float32",
    "grpo_vlm": FEW,
    "ppo": FEW,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Runs a recipe with the options of the table, once, and returns the directory of the run."""

    @functools.cache
    def run(name):
        out = tmp_path_factory.mktemp("smollm2") / name
        assert smollm2.run(name, smollm2.RECIPES[name], 0, out, None, []), f"{name} has not finished: see above"
        return out

    return run


@pytest.mark.parametrize("name", MOVES)
def test_a_recipe_moves_the_number_that_it_should(finished, name):
    out = finished(name)
    for number, least in MOVES[name].items():
        before, after = smollm2.before_and_after(out, number)
        assert (after - before) / least > 1, (number, before, after)


def short(name):
    """The script and the options of a short run, which saves a checkpoint after two of its four steps."""
    options = shlex.split(f"{smollm2.RECIPES[name].options} {SHORT[name]} --save_every 2")
    return [helpers.RECIPES / f"{name}.py", *options]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs a short run, once, and returns its directory."""

    @functools.cache
    def run(name):
        out = tmp_path_factory.mktemp("smollm2") / f"whole-{name}"
        helpers.launch(*short(name), "--out", out)
        return out

    return run


@pytest.mark.parametrize("name", SHORT)
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(whole, name, tmp_path):
    """Killed in its fourth step; it goes on from the checkpoint after the second."""
    out = tmp_path / "run"
    process = subprocess.Popen(helpers.command(*short(name), "--out", out), env=helpers.environment())
    until(lambda: process.poll() is not None or len(helpers.rows(out)) == 3, 600)
    process.kill()
    assert process.wait() == -signal.SIGKILL and not (out / "checkpoints" / "step_4").exists()
    helpers.launch(*short(name), "--out", out, "--resume")
    expected = numbers(whole(name))
    assert len(expected) == 4 and expected[2]["grad_norm"] > 0
    assert numbers(out) == expected and evaluation(out) == evaluation(whole(name))


def test_transformers_finds_the_held_out_loss_of_an_export(whole):
    """From the texts of the rows, one at a time; the template is in the export."""
    out = whole("sft")
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    logprobs = []
    for row in smollm2.continuations().heldout:
        question = [{"role": "user", "content": row["question"]}]
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt + row["answer"] + "<|im_end|>", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            found = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        logprobs.append(found[len(tokenizer(prompt)["input_ids"]) - 1 :])
    before, after = smollm2.before_and_after(out, "heldout_loss")
    assert -torch.cat(logprobs).mean().item() == pytest.approx(after, abs=1e-3) and after < before - 0.1


def test_vllm_reads_an_export_and_finds_the_held_out_accuracy(finished, tmp_path):
    """By evaluate.py. The export is in bfloat16 with the adapters merged, whose rounding changes a response or two."""
    out = finished("grpo_vlm")
    options = "--task addition --heldout 0.008 --max_new_tokens 16 --group_size 0 --rollout vllm --threads 1"
    options += " --rollout_options max_model_len 256 kv_cache_memory_bytes 67108864"
    helpers.run("evaluate", "--model", out / "model", *options.split(), "--out", tmp_path / "run")
    found = evaluation(tmp_path / "run")["tasks"]["addition"]["accuracy"]
    before, after = smollm2.before_and_after(out, "accuracy")
    assert found == pytest.approx(after, abs=0.1) and after > before + 0.25
