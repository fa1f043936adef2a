"""Distillation from a teacher's k likeliest tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from teachers import FEW, FULL, INF, TOPK, batch, check_against, open_and_shut, top

from rlkit.losses.distillation import forward_kl_loss


@pytest.mark.parametrize("name", TOPK)
def test_topk_of_all_is_the_whole_form(name):
    for dtype in (torch.float32, torch.float64):
        student, teacher, mask = batch(dtype=dtype)
        one, two = TOPK[name](student, *top(teacher, 6), mask), FULL[name](student, teacher, mask)
        torch.testing.assert_close(one, two)
        torch.testing.assert_close(*(torch.autograd.grad(x.sum(), student)[0] for x in (one, two)))


@FEW
@given(seed=st.integers(0, 999))
def test_topk_is_a_lower_bound_that_grows_with_k(seed):
    student, teacher, mask = batch(seed, v=7)
    for name, loss in TOPK.items():
        values = torch.stack([loss(student, *top(teacher, k), mask) for k in range(8)])
        assert values[0].abs().max() < 1e-12 and (values.diff(dim=0) > -1e-12).all()
        torch.testing.assert_close(values[-1], FULL[name](student, teacher, mask))


def test_topk_takes_its_tokens_in_any_order_and_skips_unnamed_ones():
    student, teacher, mask = batch()
    logprobs, ids = top(teacher, 3)
    order = torch.tensor([2, 0, 1])
    for loss in TOPK.values():
        expected = loss(student, logprobs, ids, mask)
        torch.testing.assert_close(loss(student, logprobs[..., order], ids[..., order], mask), expected)
        for junk in (-1, 0, 10**9):  # a server that knew fewer than K tokens
            wide = (
                torch.nn.functional.pad(logprobs, (1, 1), value=-INF),
                torch.nn.functional.pad(ids, (1, 1), value=junk),
            )
            torch.testing.assert_close(loss(student, *wide, mask), expected)
        torch.testing.assert_close(loss(student, logprobs, ids.int(), mask), expected)


def test_renormalised_topk_is_what_the_docstring_says():
    student, teacher, mask = batch()
    logprobs, ids = top(teacher, 3)
    loss = forward_kl_loss(student.gather(2, ids), logprobs, mask)
    p, q = (x.softmax(-1).gather(-1, ids) for x in (teacher, student))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    loops = (p * (p / q).log()).sum(-1)
    check_against(loss, loops, student, mask)


@pytest.mark.parametrize("name", TOPK)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_topk_with_nothing_outside(name, dtype):
    """Both sides allow three tokens alone: the last bucket is empty, and rounding in 1 - sum(p) makes no inf."""
    student, shut_student, shut_teacher, mask = open_and_shut([0, 2, 3], [0, 2, 3])
    student, shut_student, shut_teacher = (x.to(dtype) for x in (student, shut_student, shut_teacher))
    ids = torch.tensor([5, 1, 4]).expand(2, 3, 3)
    logprobs = shut_teacher.log_softmax(-1).gather(-1, ids) - 1e-7 * (dtype == torch.float32)
    loss = TOPK[name](shut_student, logprobs, ids, mask)
    (grad,) = torch.autograd.grad(loss.sum(), shut_student)
    expected = FULL[name](shut_student.gather(-1, ids), logprobs, mask)
    torch.testing.assert_close(loss, expected)
    assert grad.isfinite().all() and grad[..., [0, 2, 3]].abs().max() == 0


@pytest.mark.parametrize("name", TOPK)
@pytest.mark.parametrize("where", [0, 5])  # among the teacher's tokens, and outside
def test_a_logit_that_is_nan_shows(name, where):
    student, teacher = torch.zeros(1, 2, 6), -torch.arange(6.0).expand(1, 2, 6)
    mask = torch.ones(1, 2, dtype=torch.bool)
    student[0, 1, where] = torch.nan
    loss = TOPK[name](student, *top(teacher, 3), mask)
    assert loss[0, 0].isfinite() and loss[0, 1].isnan()


@pytest.mark.parametrize("name", TOPK)
def test_topk_of_all_leaves_no_rest_even_where_the_sum_is_rounded(name):
    """Log-probabilities in bfloat16 sum to 0.98 or so; what is missing is no token's."""
    student, teacher, mask = batch(dtype=torch.float32)
    logprobs, ids = top(teacher, 6)
    logprobs = (logprobs - 0.02).bfloat16()
    assert (1 - logprobs.float().exp().sum(-1)).min() > 1e-3
    loss = TOPK[name](student, logprobs, ids, mask)
    (grad,) = torch.autograd.grad(loss.sum(), student)
    assert loss.isfinite().all() and grad.isfinite().all()
