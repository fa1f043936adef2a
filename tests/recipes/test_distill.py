"""`recipes/distill.py` as a person runs it, and its gradient against that of the whole reverse KL."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import helpers  # noqa: E402
from helpers import evaluation, numbers, run_here, text_dir  # noqa: E402, F401

from rlkit.data import Batch  # noqa: E402
from rlkit.losses import reverse_kl_loss  # noqa: E402
from rlkit.replay.bundles import read_bundle  # noqa: E402
from rlkit.vlm import load_model, load_processor, suppressed_token_ids  # noqa: E402

LEARNING = [
    "--task", "helpers:few_digits", "--steps", 30, "--prompts_per_step", 16, "--group_size", 4, "--warmup_steps", 5,
    "--max_new_tokens", 3, "--save_every", 12,
]  # fmt: skip
NO_MODEL = ["--model", "/no/such/model"]
NO_SERVER = ["--teacher_servers", "http://127.0.0.1:9"]
SMALL = ["--steps", 3, "--prompts_per_step", 6, "--group_size", 2, "--max_new_tokens", 3, "--save_every", 2]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return helpers.built_start(tmp_path_factory)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Another model, which was shown right answers."""
    return helpers.built(
        tmp_path_factory, "teacher", helpers.few_digits, warm_up_steps=61, label_noise=0.0, lr=1e-3, seed=1
    )


@pytest.fixture(scope="module")
def whole(start, teacher, tmp_path_factory):
    out = tmp_path_factory.mktemp("distill") / "whole"
    arguments = ["--model", start, "--teacher", teacher, "--out", out, "--lr", 2e-3, *LEARNING]
    run_here("distill", *arguments)
    return out


def learned(out):
    kl, found = [row["kl"] for row in helpers.rows(out)], evaluation(out)
    return found["accuracy_after"] > found["accuracy_before"] + 0.2 and sum(kl[-3:]) < 0.5 * sum(kl[:3])


def test_learns(whole):
    # seen with AVX2, without it, and with two threads: held-out accuracy 0.462 -> 1.0; without a learning rate 0.462
    assert learned(whole), (evaluation(whole), [row["kl"] for row in helpers.rows(whole)])
    rows = helpers.rows(whole)
    assert [row["step"] for row in rows] == list(range(30))
    assert all(row["mismatch/abs_dlogp"] < 1e-5 and row["ratio/clip_fraction"] == 0 for row in rows)
    assert {"reward/mean", "entropy", "loss", "grad_norm", "tokens", "time/generate", "time/train"} <= rows[0].keys()
    assert [p.name for p in sorted((whole / "checkpoints").iterdir())] == ["step_24", "step_30"]
    assert (whole / "model" / "model.safetensors").exists()
    assert len(helpers.responses_on_page(whole)) == 40


def test_learning_rate_0_does_not_learn(start, teacher, tmp_path):
    arguments = ["--model", start, "--teacher", teacher, "--out", tmp_path / "run", *LEARNING]
    run_here("distill", *arguments, "--lr", 0.0, "--steps", 6)
    found = evaluation(tmp_path / "run")
    assert not learned(tmp_path / "run") and found["accuracy_after"] == found["accuracy_before"]


def test_resume_is_exact(start, teacher, tmp_path):
    """With several updates a batch."""
    arguments = ["--model", start, "--teacher", teacher, "--task", "helpers:few_digits", *SMALL, "--steps", 4]
    arguments += ["--ppo_epochs", 2, "--out"]
    run_here("distill", *arguments, tmp_path / "whole")
    helpers.stop_after(3, "distill", *arguments, tmp_path / "run")
    run_here("distill", *arguments, tmp_path / "run", "--resume")
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole") and len(numbers(tmp_path / "run")) == 4
    assert evaluation(tmp_path / "run") == evaluation(tmp_path / "whole")


@pytest.mark.parametrize(
    "options",
    [
        ["--loss", "forward_kl", "--teacher_top_k", 20],
        ["--loss", "reverse_kl", "--use_fused_kernels"],
        ["--loss", "jsd", "--teacher_top_k", 20],
    ],
    ids=["forward KL of the top 20", "reverse KL of the vocabulary", "JSD of the top 20"],
)
def test_divergence_from_the_teacher_falls(start, teacher, tmp_path, options):
    # seen: to 0.65 and 0.62 of the first steps' with this seed, to 0.74 and 0.74 with seed 1
    arguments = ["--model", start, "--teacher", teacher, "--out", tmp_path / "run", "--task", "helpers:seen_shortly"]
    arguments += ["--steps", 16, "--prompts_per_step", 16, "--group_size", 2, "--max_new_tokens", 3]
    run_here("distill", *arguments, "--warmup_steps", 5, "--lr", 1e-3, *options)
    rows = helpers.rows(tmp_path / "run")
    found = [row["divergence"] for row in rows]
    assert sum(found[-2:]) < 0.8 * sum(found[:2]), found
    assert all(row["mismatch/abs_dlogp"] < 1e-5 for row in rows)


def kl(p, q):
    """KL(p || q) of logprobs."""
    return (p.exp() * (p - q)).sum(-1)


def forward_kl(student, teacher):
    return kl(teacher, student)


def jsd_of_beta_03(student, teacher):
    mixture = (0.3 * teacher.exp() + 0.7 * student.exp()).log()
    return 0.3 * kl(teacher, mixture) + 0.7 * kl(student, mixture)


def response_logprobs(model, sample, temperature, suppressed):
    """[n, V] float64 for the n tokens of a response, by transformers' forward of this row alone."""
    ids = torch.tensor([sample.token_ids])
    kinds = (ids == model.config.image_token_id).int()
    logits = model(ids, mm_token_type_ids=kinds, **sample.vision, use_cache=False).logits[0, :-1].double()
    sampled = [token for token in range(logits.shape[1]) if token not in suppressed]
    return (logits[sample.mask[1:]][:, sampled] / temperature).log_softmax(-1)


@pytest.mark.parametrize(
    ("options", "divergence"),
    [(["--loss", "forward_kl"], forward_kl), (["--loss", "jsd", "--beta", 0.3], jsd_of_beta_03)],
    ids=["forward KL", "JSD"],
)
def test_divergence_of_the_vocabulary_and_its_gradient(start, teacher, tmp_path, options, divergence):
    """Those of plain forwards of student and teacher, at another temperature than 1."""
    arguments = ["--model", start, "--teacher", teacher, "--out", tmp_path / "run", "--task", "helpers:seen_shortly"]
    arguments += [*SMALL, "--steps", 1, "--temperature", 0.8, "--save_rollouts", *options]
    run_here("distill", *arguments)
    (row,) = helpers.rows(tmp_path / "run")
    samples = read_bundle(tmp_path / "run" / "rollouts" / "step_0").draws[0].samples
    models = load_model(str(start)), load_model(str(teacher))
    suppressed = suppressed_token_ids(models[0].config, load_processor(str(start)).tokenizer).tolist()
    found = []
    for sample in samples:
        student, target = (response_logprobs(model, sample, 0.8, suppressed) for model in models)
        found.append(divergence(student, target.detach()))
    loss = torch.cat(found).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in models[0].parameters() if p.grad is not None]).norm()
    assert row["divergence"] == pytest.approx(loss.item(), rel=1e-4) and loss > 0.01, (row["divergence"], loss)
    assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-3) and norm > 0.01, (row["grad_norm"], norm)


def test_expected_gradient_is_that_of_the_reverse_kl():
    """Summed over all tokens that might be sampled, each with the student's probability for it."""
    recipe, g = helpers.load("distill"), torch.Generator().manual_seed(0)
    student, teacher = torch.randn(5, generator=g).requires_grad_(), torch.randn(5, generator=g)
    mask = torch.tensor([[False, True]])
    reverse = reverse_kl_loss(student.expand(1, 2, 5), teacher.expand(1, 2, 5), mask).sum()
    (expected,) = torch.autograd.grad(reverse, student)
    came, kl = torch.zeros(5), 0.0
    for token in range(5):
        logprobs, theirs = (torch.stack([x[0] * 0, x.log_softmax(0)[token]])[None] for x in (student, teacher))
        batch = Batch(
            torch.tensor([[0, token]]), mask, [2], teacher_logprobs=theirs, rollout_logprobs=logprobs.detach()
        )
        out = SimpleNamespace(logprobs=logprobs, entropy=logprobs.detach())
        loss, metrics = recipe.policy_loss(out, batch, recipe.Config())
        weight = student.detach().softmax(0)[token]
        came += weight * torch.autograd.grad(loss, student)[0]
        kl += weight * metrics["kl"]
    torch.testing.assert_close(came, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(kl, reverse.detach(), rtol=1e-4, atol=1e-6)


def test_a_text_student_with_lora_learns_nothing_from_itself(text_dir, tmp_path):  # noqa: F811
    """The teacher is the student: the advantages are 0, and so is the gradient."""
    arguments = ["--model", text_dir, "--teacher", text_dir, "--task", "sorting", "--out", tmp_path / "run", *SMALL]
    run_here("distill", *arguments, "--lora_rank", 4, "--use_fused_kernels", "--enable_gradient_checkpointing")
    for row in numbers(tmp_path / "run"):
        assert abs(row["kl"]) < 1e-5 and row["grad_norm"] < 1e-4


def test_help_names_every_option(capsys):
    helpers.assert_help_names_every_option("distill", capsys)


def test_bad_input_is_one_clear_message(whole, start, text_dir, tmp_path):  # noqa: F811
    for message, arguments in {
        "distill: teacher .*: expected the tokens of the trained model's tokenizer": ["--teacher", text_dir],
        "distill: task: expected a built-in": ["--task", "digit"],
        # before a model is loaded
        "distill: teacher_top_k: expected 0 with sampled_token, got 5": ["--teacher_top_k", 5, *NO_MODEL],
        "distill: teacher_top_k: expected at least 1 with --teacher_s": ["--loss", "jsd", *NO_SERVER, *NO_MODEL],
        "distill: beta: expected a number above 0 and below 1, got 1": ["--loss", "jsd", "--beta", 1, *NO_MODEL],
        "distill: temperature: expected 1 with --teacher_servers, .* got 0.5": [*NO_SERVER, "--temperature", 0.5],
        "distill: teacher: expected the directory or hub id .*, got 'tiny'": [*NO_SERVER, "--teacher", "tiny"],
        "distill: out .*holds a run already; continue it with --resume": ["--out", whole],
        "distill-.*: step 0: no response of this batch can be scored by the teacher": ["--max_prompt_tokens", 5],
    }.items():
        with pytest.raises(SystemExit, match=message):
            run_here("distill", "--model", start, "--teacher", start, "--out", tmp_path / "run", *SMALL, *arguments)
