"""`recipes/simpo.py` as a person runs it, and its losses against TRL's and the papers'."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import helpers  # noqa: E402
from helpers import evaluation, numbers, run_here, text_dir  # noqa: E402, F401

from rlkit.data import Batch  # noqa: E402
from rlkit.losses import orpo_loss, token_logprobs  # noqa: E402

LEARNING = [
    "--task", "helpers:few_digits", "--steps", 24, "--prompts_per_step", 16, "--warmup_steps", 5,
    "--max_new_tokens", 3,
]  # fmt: skip
SMALL = ["--task", "helpers:few_digits", "--steps", 2, "--prompts_per_step", 6, "--max_new_tokens", 3]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return helpers.built_start(tmp_path_factory)


def learned(found):
    return (
        found["accuracy_after"] > found["accuracy_before"] + 0.2
        and found["heldout_loss_after"] < 0.8 * found["heldout_loss_before"]
        and found["preference_accuracy_after"] > 0.9
    )


def test_learns_and_not_without_a_learning_rate(start, tmp_path):
    run_here("simpo", "--model", start, "--out", tmp_path / "run", "--lr", 1.3e-3, *LEARNING)
    assert learned(evaluation(tmp_path / "run")), evaluation(tmp_path / "run")
    run_here("simpo", "--model", start, "--out", tmp_path / "still", *LEARNING, "--lr", 0.0, "--steps", 2)
    found = evaluation(tmp_path / "still")
    assert not learned(found) and found["heldout_loss_after"] == found["heldout_loss_before"]  # however long
    assert numbers(tmp_path / "still")[0]["loss"] == numbers(tmp_path / "run")[0]["loss"]


def test_resume_is_exact(start, tmp_path):
    helpers.assert_resume_is_exact(tmp_path, "simpo", "--model", start, *SMALL, "--lr", 2e-3)


def loss_of(logprobs, mask, **options):
    """Loss and metrics of pairs in neighbouring rows."""
    recipe = helpers.load("simpo")
    cfg = recipe.Config(**options)
    batch = Batch(torch.zeros(mask.shape, dtype=torch.long), mask, [mask.shape[1]] * len(mask))
    return recipe.pair_loss(SimpleNamespace(logprobs=logprobs), batch, recipe.select_loss(cfg), cfg)


def test_simpo_equals_trls():
    """TRL adds 0.3 times the mean over the chosen tokens of the batch, where ours is the mean of each response's
    mean."""
    golden = load_file(HERE.parent / "peers" / "golden_trl.safetensors")
    x = {key.rsplit("/", 1)[1]: value for key, value in golden.items() if key.startswith("cpo_simpo/in/")}
    logprobs = token_logprobs(x["logits"], x["tokens"]) if "logits" in x else x["logprobs"]
    order = torch.arange(len(logprobs)).view(2, -1).T.flatten()  # TRL has all chosen responses first
    logprobs, mask = logprobs[order].detach(), x["mask"][order]
    simpo = {"loss": "simpo", "beta": 0.5, "loss_options": {"gamma": 0.7}}
    loss, _ = loss_of(logprobs, mask, **simpo, sft_coef=0.0)
    nll = -logprobs[0::2][mask[0::2]].mean()
    torch.testing.assert_close(loss + 0.3 * nll, golden["cpo_simpo/out/out"], rtol=1e-5, atol=1e-6)
    more, _ = loss_of(logprobs, mask, **simpo, sft_coef=0.3)
    means = [-row[kept].mean() for row, kept in zip(logprobs[0::2], mask[0::2], strict=True)]
    torch.testing.assert_close(more, loss + 0.3 * torch.stack(means).mean())


def test_orpo_is_weighted_as_in_its_paper():
    """arXiv 2403.07691, eq. 6, with its lambda of 0.1."""
    logprobs = -torch.rand(2, 6, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[False, False, True, True, True, True]]).expand(2, 6)
    (chosen, rejected), four = (logprobs * mask).sum(1, keepdim=True), torch.tensor([4])
    odds = orpo_loss(chosen, rejected, four, four)
    torch.testing.assert_close(loss_of(logprobs, mask, loss="orpo")[0], (-chosen / 4 + 0.1 * odds).squeeze())
    given, _ = loss_of(logprobs, mask, loss="orpo", loss_coef=0.5, sft_coef=2.0)
    torch.testing.assert_close(given, (-2 * chosen / 4 + 0.5 * odds).squeeze())


@pytest.mark.parametrize("name", sorted(helpers.load("simpo").LOSSES))
def test_every_loss_prefers_the_chosen_response(name):
    logprobs = torch.full((4, 3), -1.0, requires_grad=True)
    loss, _ = loss_of(logprobs, torch.tensor([[False, True, True]]).expand(4, 3), loss=name, sft_coef=0.0)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert (gradient[1::2, 1:] > gradient[0::2, 1:]).all() and (gradient[:, 0] == 0).all()


@pytest.mark.parametrize(("name", "is_preferred"), [("simpo", 1), ("alphapo", 1), ("orpo", 1), ("slic", 0)])
def test_pairs_are_ranked_as_the_loss_ranks_them(name, is_preferred):
    """The chosen response is likelier per token, and less likely as a whole, because it is longer."""
    logprobs = torch.tensor([[0.0, -1.0, -1.0, -1.0], [0.0, -2.0, 0.0, 0.0]])
    mask = torch.tensor([[False, True, True, True], [False, True, False, False]])
    _, stats = loss_of(logprobs, mask, loss=name)
    assert stats["preference/accuracy"] == is_preferred
    assert stats["preference/margin"] == (1 if is_preferred else -1)


@pytest.mark.parametrize("options", [["alphapo", "--beta", 2], ["orpo"], ["slic", "--loss_options", "margin", 2]])
def test_other_losses_on_text(options, text_dir, tmp_path):  # noqa: F811
    options = ["--model", text_dir, *SMALL, "--task", "sorting", "--max_new_tokens", 0, "--loss", *options]
    run_here("simpo", *options, "--out", tmp_path / "run")
    assert all(row["grad_norm"] > 0 for row in numbers(tmp_path / "run"))


def test_help_names_every_option(capsys):
    helpers.assert_help_names_every_option("simpo", capsys)


def test_bad_input_is_one_clear_message(start, tmp_path):
    for message, arguments in {
        "simpo: loss 'orpo': .*got an unexpected keyword argument 'beta'": ["--loss", "orpo", "--beta", 0.1],
        "simpo: loss 'simpo': beta: expected a number > 0, got -1": ["--beta", -1],
        "simpo: loss 'slic': margin: expected .*, got -1": ["--loss", "slic", "--loss_options", "margin", -1],
        "simpo-.*: step 0: no row of this batch can be trained on": ["--max_tokens", 5],
    }.items():
        with pytest.raises(SystemExit, match=message):
            run_here("simpo", "--model", start, "--out", tmp_path / "run", *SMALL, *arguments)
