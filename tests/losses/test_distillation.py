"""forward_kl_loss, reverse_kl_loss, jsd_loss and the top-k forms."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from teachers import FEW, FULL, INF, NAIVE, TOPK, batch, check_against, open_and_shut, top

from rlkit.losses.distillation import (
    forward_kl_loss,
    jsd_loss,
    reverse_kl_loss,
    topk_forward_kl_loss,
    topk_reverse_kl_loss,
)

# --- values and gradients


def test_golden():
    """P = (1/2, 1/4, 1/4) and Q = (1/4, 1/2, 1/4): both KLs are log(2) / 4."""
    teacher, student = torch.tensor([[[0.5, 0.25, 0.25]]]).log(), torch.tensor([[[0.25, 0.5, 0.25]]]).log()
    mask = torch.ones(1, 1, dtype=torch.bool)
    quarter = torch.tensor([[math.log(2) / 4]])
    torch.testing.assert_close(forward_kl_loss(student, teacher, mask), quarter)
    torch.testing.assert_close(reverse_kl_loss(student, teacher, mask), quarter)
    golden = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)  # M = (3/8, 3/8, 1/4)
    torch.testing.assert_close(jsd_loss(student, teacher, mask), torch.tensor([[golden]]))
    top1 = teacher[..., :1], torch.zeros(1, 1, 1, dtype=torch.long)  # buckets: P = (1/2, 1/2), Q = (1/4, 3/4)
    torch.testing.assert_close(topk_forward_kl_loss(student, *top1, mask), torch.tensor([[0.5 * math.log(4 / 3)]]))
    golden = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    torch.testing.assert_close(topk_reverse_kl_loss(student, *top1, mask), torch.tensor([[golden]]))


def test_directions_and_betas_share_golden():
    """Teacher (3/4, 1/4), student (1/2, 1/2): which KL is which, and whose share beta is."""
    teacher, student = torch.tensor([[[0.75, 0.25]]]).log(), torch.zeros(1, 1, 2)
    mask = torch.ones(1, 1, dtype=torch.bool)
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    reverse = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    assert forward_kl_loss(student, teacher, mask).item() == pytest.approx(forward, abs=1e-6)
    assert reverse_kl_loss(student, teacher, mask).item() == pytest.approx(reverse, abs=1e-6)
    m = 0.2 * 0.75 + 0.8 * 0.5  # 0.55
    golden = 0.2 * (0.75 * math.log(0.75 / m) + 0.25 * math.log(0.25 / (1 - m)))
    golden += 0.8 * (0.5 * math.log(0.5 / m) + 0.5 * math.log(0.5 / (1 - m)))
    assert jsd_loss(student, teacher, mask, 0.2).item() == pytest.approx(golden, abs=1e-6)


def test_gradient_formulas():
    student, teacher, mask = batch()
    p, q = (teacher / 0.7).softmax(-1), (student / 0.7).softmax(-1).detach()
    (grad,) = torch.autograd.grad(forward_kl_loss(student, teacher, mask, 0.7).sum(), student)
    torch.testing.assert_close(grad, torch.where(mask[..., None], (q - p) / 0.7, 0.0))
    loss = reverse_kl_loss(student, teacher, mask, 0.7)
    (grad,) = torch.autograd.grad(loss.sum(), student)
    expected = q * (q.log() - p.log() - loss.detach()[..., None]) / 0.7
    torch.testing.assert_close(grad, torch.where(mask[..., None], expected, 0.0))


def test_gradcheck():
    student, teacher, mask = batch(b=1, t=2, v=4)
    for loss in FULL.values():
        assert torch.autograd.gradcheck(lambda x, loss=loss: loss(x, teacher, mask), student)
    for loss in TOPK.values():
        assert torch.autograd.gradcheck(lambda x, loss=loss: loss(x, *top(teacher, 2), mask), student)


def test_only_the_student_gets_a_gradient():
    for loss in FULL.values():
        student, teacher, mask = batch()
        teacher.requires_grad_()
        loss(student, teacher, mask).sum().backward()
        assert student.grad is not None and teacher.grad is None
    for loss in TOPK.values():
        student, teacher, mask = batch()
        logprobs, ids = top(teacher, 2)
        logprobs.requires_grad_()
        loss(student, logprobs, ids, mask).sum().backward()
        assert student.grad is not None and logprobs.grad is None


# --- identities


@FEW
@given(seed=st.integers(0, 999), beta=st.floats(0.01, 0.99), shift=st.floats(-50, 50))
def test_divergence_identities(seed, beta, shift):
    student, teacher, mask = batch(seed)
    mask = torch.ones_like(mask)
    one, two = jsd_loss(student, teacher, mask, beta), jsd_loss(teacher, student, mask, 1 - beta)
    torch.testing.assert_close(one, two)  # symmetric at 0.5, mirrored elsewhere
    assert one.min() >= 0 and one.max() <= -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    torch.testing.assert_close(forward_kl_loss(student, teacher, mask), reverse_kl_loss(teacher, student, mask))
    for loss in FULL.values():
        torch.testing.assert_close(loss(student + shift, teacher, mask), loss(student, teacher, mask))
        torch.testing.assert_close(loss(2 * student, 2 * teacher, mask, temperature=2.0), loss(student, teacher, mask))
        same = loss(student, student.detach(), mask)
        (grad,) = torch.autograd.grad(same.sum(), student)
        assert same.abs().max() < 1e-12 and grad.abs().max() < 1e-12


@pytest.mark.parametrize(("end", "limit"), [(0, forward_kl_loss), (1, reverse_kl_loss)])
def test_jsd_at_its_ends(end, limit):
    student, teacher, mask = batch()
    near = 1e-7
    scaled = jsd_loss(student, teacher, mask, abs(end - near)) / near
    torch.testing.assert_close(scaled, limit(student, teacher, mask), rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(x.sum(), student)[0] for x in (scaled, limit(student, teacher, mask))]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


# --- zeros of probability


@pytest.mark.parametrize(
    ("name", "student_ids", "teacher_ids"),
    [
        ("forward", [1, 4], [1, 4]),
        ("forward", [1], [1, 4]),
        ("forward", [], [0, 4, 5]),
        ("reverse", [1, 4], [1, 4]),
        ("reverse", [1, 4], [1]),
        ("jsd", [1, 4], [1, 4]),
        ("jsd", [1, 2], [2, 4]),
        ("jsd0.2", [0, 1, 2], [3, 4, 5]),
        ("jsd0.9", [], [0, 1, 2, 3, 4]),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_suppressed_tokens_where_the_formula_is_finite(name, student_ids, teacher_ids):
    student, shut_student, shut_teacher, mask = open_and_shut(student_ids, teacher_ids)
    with torch.autograd.detect_anomaly(check_nan=True):
        loss = FULL[name](shut_student, shut_teacher, mask)
        (grad,) = torch.autograd.grad(loss.sum(), student, retain_graph=True)
    assert loss.isfinite().all() and grad.isfinite().all()
    assert not student_ids or grad[..., student_ids].abs().max() == 0
    loops = NAIVE[name](shut_student, shut_teacher, mask)
    check_against(loss, loops, student, mask)


def test_disjoint_jsd_is_its_bound():
    student, shut_student, shut_teacher, mask = open_and_shut([0, 1, 2], [3, 4, 5])
    torch.testing.assert_close(
        jsd_loss(shut_student, shut_teacher, mask), torch.full((2, 3), math.log(2), dtype=torch.float64)
    )


def test_an_infinite_divergence_is_inf():
    _, shut_student, shut_teacher, mask = open_and_shut([1], [4])
    assert (forward_kl_loss(shut_student, shut_teacher, mask) == INF).all()
    assert (reverse_kl_loss(shut_student, shut_teacher, mask) == INF).all()


def test_a_certain_teacher_leaves_the_reverse_form_finite():
    """A top probability that rounds to 1: its rest is held at 16 eps."""
    student = torch.zeros(1, 1, 4, requires_grad=True)
    certain = torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.long)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss = topk_reverse_kl_loss(student, *certain, mask)
    loss.sum().backward()
    golden = 0.25 * math.log(0.25) + 0.75 * (math.log(0.75) - math.log(16 * 2.0**-23))
    torch.testing.assert_close(loss, torch.tensor([[golden]]))
    assert student.grad.isfinite().all() and student.grad[0, 0, 0] < 0
    torch.testing.assert_close(topk_forward_kl_loss(student, *certain, mask), torch.tensor([[math.log(4)]]))


@FEW
@given(scale=st.sampled_from([1.0, 30.0, 1e4]), seed=st.integers(0, 99), k=st.integers(1, 5))
def test_extreme_logits(scale, seed, k):
    student, teacher, mask = batch(seed, dtype=torch.float32, scale=scale)
    losses = [loss(student, teacher, mask) for loss in FULL.values()]
    losses += [loss(student, *top(teacher, k), mask) for loss in TOPK.values()]
    for loss in losses:
        (grad,) = torch.autograd.grad(loss.sum(), student)
        assert loss.isfinite().all() and grad.isfinite().all() and loss.min() > -1e-5


# --- masks


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("bad", [INF, -INF, math.nan, 1e30])
@pytest.mark.parametrize("where", ["student", "teacher", "both"])
def test_masked_values_leak_nowhere(bad, where):
    student, teacher, mask = batch(seed=2)
    assert mask.any() and not mask.all()
    logprobs, ids = top(teacher, 3)
    dirty_student, dirty_teacher, dirty_logprobs = (
        torch.where(mask[..., None], x.detach(), bad if where in (name, "both") else x.detach())
        for name, x in (("student", student), ("teacher", teacher), ("teacher", logprobs))
    )
    dirty_ids = torch.where(mask[..., None], ids, -1)
    dirty_student.requires_grad_()
    cases = [(loss(student, teacher, mask), loss(dirty_student, dirty_teacher, mask)) for loss in FULL.values()]
    cases += [
        (loss(student, logprobs, ids, mask), loss(dirty_student, dirty_logprobs, dirty_ids, mask))
        for loss in TOPK.values()
    ]
    with torch.autograd.detect_anomaly(check_nan=True):
        for clean, dirty in cases:
            (clean_grad,) = torch.autograd.grad(clean.sum(), student)
            (dirty_grad,) = torch.autograd.grad(dirty.sum(), dirty_student)
            assert torch.equal(clean, dirty) and torch.equal(clean_grad, dirty_grad)
            assert dirty[~mask].abs().max() == 0 and dirty_grad[~mask].abs().max() == 0


def test_mask_equals_slice():
    student, teacher, mask = batch(seed=2)
    one = torch.ones(1, int(mask.sum()), dtype=torch.bool)
    logprobs, ids = top(teacher, 3)
    for loss in FULL.values():
        torch.testing.assert_close(
            loss(student, teacher, mask)[mask], loss(student[mask][None], teacher[mask][None], one)[0]
        )
    for loss in TOPK.values():
        sliced = loss(student[mask][None], logprobs[mask][None], ids[mask][None], one)
        torch.testing.assert_close(loss(student, logprobs, ids, mask)[mask], sliced[0])


def test_without_a_mask_every_position_counts():
    """Of logits [B, T, V] and of logits [n, V], in value and gradient."""
    student, teacher, _ = batch(seed=3)
    everywhere = torch.ones(student.shape[:2], dtype=torch.bool)
    logprobs, ids = top(teacher, 3)
    given = [(loss, (teacher,)) for loss in FULL.values()] + [(loss, (logprobs, ids)) for loss in TOPK.values()]
    for loss, theirs in given:
        expected = loss(student, *theirs, everywhere, temperature=0.7)
        (gradient,) = torch.autograd.grad(expected.sum(), student)
        flat = loss(student.flatten(0, 1), *(x.flatten(0, 1) for x in theirs), temperature=0.7)
        for found in (loss(student, *theirs, temperature=0.7), flat.view(expected.shape)):
            assert torch.equal(found, expected)
            assert torch.equal(torch.autograd.grad(found.sum(), student)[0], gradient)
    with pytest.raises(ValueError, match="^teacher_logits: expected shape .* as student_logits, got "):
        forward_kl_loss(student, teacher[:, :1])
    with pytest.raises(ValueError, match="^teacher_logprobs: expected shape .*, got "):
        topk_forward_kl_loss(student, logprobs[:, :1], ids[:, :1])


# --- shapes and dtypes


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_empty_batch(shape):
    student, mask = torch.zeros(*shape, 5, requires_grad=True), torch.zeros(shape, dtype=torch.bool)
    outputs = [loss(student, student, mask) for loss in FULL.values()]
    outputs += [loss(student, torch.zeros(*shape, 2), torch.zeros(*shape, 2).long(), mask) for loss in TOPK.values()]
    for loss in outputs:
        loss.sum().backward()
        assert loss.shape == shape and student.grad.shape == (*shape, 5)


def test_bfloat16_inputs():
    student, teacher, mask = batch(dtype=torch.bfloat16)
    logprobs, ids = top(teacher, 3)
    for loss in FULL.values():
        out = loss(student, teacher, mask)
        assert out.dtype == torch.float32 and torch.autograd.grad(out.sum(), student)[0].dtype == torch.bfloat16
        torch.testing.assert_close(out, loss(student.float(), teacher.float(), mask))
    for loss in TOPK.values():
        assert loss(student, logprobs, ids, mask).dtype == torch.float32
        torch.testing.assert_close(
            loss(student, logprobs, ids, mask), loss(student.float(), logprobs.float(), ids, mask)
        )


@pytest.mark.parametrize("name", [*FULL, "topk forward", "topk reverse"])
def test_compiles_without_a_graph_break(name):
    student, teacher, mask = batch()
    given_to = (teacher,) if name in FULL else top(teacher, 3)
    loss = FULL[name] if name in FULL else TOPK[name.split()[1]]
    outputs = (
        torch.compile(loss, backend="eager", fullgraph=True)(student, *given_to, mask),
        loss(student, *given_to, mask),
    )
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), student) for x in outputs))


LOGITS, MASK = torch.zeros(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
TOP = {"teacher_logprobs": torch.zeros(2, 3, 2), "teacher_indices": torch.zeros(2, 3, 2, dtype=torch.long)}


@pytest.mark.parametrize("loss", [*FULL.values()][:3])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"student_logits": LOGITS[0]}, "student_logits"),
        ({"student_logits": LOGITS.long()}, "student_logits"),
        ({"student_logits": LOGITS[:1]}, "student_logits"),
        ({"teacher_logits": LOGITS[..., :3]}, "teacher_logits"),
        ({"teacher_logits": LOGITS.long()}, "teacher_logits"),
        ({"mask": MASK.float()}, "mask"),
        ({"mask": MASK[0]}, "mask"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_errors_name_the_argument(loss, change, name):
    arguments = {"student_logits": LOGITS, "teacher_logits": LOGITS, "mask": MASK}
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        loss(**(arguments | change))


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.5, 2.0, math.nan])
def test_beta_is_strictly_between(beta):
    with pytest.raises(ValueError, match=r"^beta: expected .*forward_kl_loss.*reverse_kl_loss.*, got "):
        jsd_loss(LOGITS, LOGITS, MASK, beta)


@pytest.mark.parametrize("loss", TOPK.values())
@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"student_logits": LOGITS[0]}, "student_logits"),
        ({"teacher_logprobs": torch.zeros(2, 3)}, "teacher_logprobs"),
        ({"teacher_logprobs": torch.zeros(2, 2, 2)}, "teacher_logprobs"),
        ({"teacher_logprobs": torch.zeros(2, 3, 2).long()}, "teacher_logprobs"),
        ({"teacher_indices": torch.zeros(2, 3, 2)}, "teacher_indices"),
        ({"teacher_indices": torch.zeros(2, 3, 1).long()}, "teacher_indices"),
        ({"mask": MASK.float()}, "mask"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_topk_errors_name_the_argument(loss, change, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        loss(**({"student_logits": LOGITS, **TOP, "mask": MASK} | change))
