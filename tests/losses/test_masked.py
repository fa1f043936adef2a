"""`masked`, its row sums and `choose` are `torch.where`, made for a CPU: same values and derivatives, nothing leaks."""

import math

import pytest
import torch

from rlkit.losses._numerics import LOG_RATIO_LIMIT, choose, masked, masked_log_ratio, masked_rows, masked_sums

BAD = (math.nan, math.inf, -math.inf)


def inputs(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(5, 7, generator=g, dtype=torch.float64).to(dtype), torch.rand(5, 7, generator=g) < 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64])
def test_is_where(dtype):
    x, mask = inputs(dtype)
    for y, m in ((x, mask), (x[:, :1], mask), (x.T, mask.T), (x[:, ::2], mask[:, ::2]), (x[:0], mask[:0])):
        came = masked(y, m)
        assert came.dtype == dtype and torch.equal(came, torch.where(m, y, 0))


@pytest.mark.parametrize("bad", BAD)
def test_what_is_masked_reaches_neither_value_nor_gradient(bad):
    x, mask = inputs()
    spoilt = torch.where(mask, x, bad).requires_grad_()
    came = masked(spoilt, mask)
    (grad,) = torch.autograd.grad(came.square().sum(), spoilt)
    assert torch.equal(came, torch.where(mask, x, 0.0))
    assert torch.equal(grad, torch.where(mask, 2 * x, 0.0))
    (grad,) = torch.autograd.grad(masked(spoilt, mask), spoilt, torch.full_like(x, bad))
    assert torch.equal(grad.isfinite(), ~mask)  # nor does what comes back for it


@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_masked_is_kept_as_it_is(bad):
    x, mask = inputs()
    came = masked(torch.full_like(x, bad), mask)
    torch.testing.assert_close(came, torch.where(mask, bad, torch.zeros_like(x)), equal_nan=True, rtol=0, atol=0)


def test_derivatives_of_both_orders_and_modes():
    x, mask = inputs()
    x.requires_grad_()
    for y in (x, x[:, :1].detach().requires_grad_()):  # the second broadcasts, so its gradient is a sum
        torch.autograd.gradcheck(lambda y: masked(y, mask), y, check_forward_ad=True)
        torch.autograd.gradgradcheck(lambda y: masked(y, mask) * y, y)
    with_where = torch.func.hessian(lambda x: torch.where(mask, x**3, 0.0).sum())(x.detach())
    torch.testing.assert_close(torch.func.hessian(lambda x: masked(x**3, mask).sum())(x.detach()), with_where)


@pytest.mark.parametrize("dims", [(0, 0), (1, 1), (0, None), (None, 1)])
def test_vmap(dims):
    (x, mask), (y, other) = inputs(seed=1), inputs(seed=2)
    stacks = [a if d is None else torch.stack([a, b], d) for a, b, d in zip((x, mask), (y, other), dims, strict=True)]
    came = torch.func.vmap(masked, in_dims=dims)(*stacks)
    for i, each in enumerate(came):
        one = [s if d is None else s.select(d, i) for s, d in zip(stacks, dims, strict=True)]
        assert torch.equal(each, torch.where(one[1], one[0], 0.0))


def test_choose_is_where_with_finite_gradients():
    (x, condition), (y, _) = inputs(seed=3), inputs(seed=4)
    x, y = torch.where(condition, x, math.inf).requires_grad_(), torch.where(condition, math.nan, y).requires_grad_()
    came = choose(condition, x, y)
    assert torch.equal(came, torch.where(condition, x, y))
    grads = torch.autograd.grad(came.sum(), (x, y))
    assert torch.equal(grads[0], condition.double()) and torch.equal(grads[1], (~condition).double())


@pytest.mark.parametrize("bad", BAD)
def test_sums_are_those_of_where_whatever_is_masked(bad):
    x, mask = inputs()
    mask[2] = False
    spoilt = torch.where(mask, x, bad).requires_grad_()
    for y, m in ((spoilt, mask), (spoilt.T, mask.T), (spoilt[:, ::2], mask[:, ::2]), (spoilt[:0], mask[:0])):
        sums, lengths = masked_sums(y, m)
        torch.testing.assert_close(sums, torch.where(m, y, 0.0).sum(1))
        assert torch.equal(lengths, m.sum(1, dtype=torch.int32)) and not lengths.requires_grad
        (grad,) = torch.autograd.grad(sums.square().sum(), y)
        torch.testing.assert_close(grad, m * 2 * sums.detach()[:, None])
    came = masked_sums(torch.full_like(x, bad), mask)[0]  # what is not masked is kept
    torch.testing.assert_close(came, torch.where(mask, bad, torch.zeros_like(x)).sum(1), equal_nan=True)


def test_derivatives_of_sums_of_both_orders_and_modes():
    x, mask = inputs()
    x.requires_grad_()
    torch.autograd.gradcheck(lambda y: masked_sums(y, mask)[0], x, check_forward_ad=True)
    torch.autograd.gradgradcheck(lambda y: masked_sums(y, mask)[0].exp(), x)
    came = torch.func.vmap(lambda y, m: masked_sums(y, m)[0])(x[None].detach(), mask[None])
    torch.testing.assert_close(came[0], torch.where(mask, x.detach(), 0.0).sum(1))


@pytest.mark.parametrize("bad", BAD)
def test_log_ratios_are_masked_and_then_bounded(bad):
    x, mask = inputs()
    base, _ = inputs(seed=3)
    x[0], x[1] = x[0] + 30, x[1] - 30  # beyond the bound on either side
    expected = torch.where(mask, (x - base).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0)
    inside = mask & ((x - base).abs() < LOG_RATIO_LIMIT)
    spoilt = torch.where(mask, x, bad).requires_grad_()
    came = masked_log_ratio(spoilt, base, mask)
    assert torch.equal(came, expected) and (expected.abs() == LOG_RATIO_LIMIT).any()
    kept = came.detach().clone()
    (grad,) = torch.autograd.grad(came.square().sum(), spoilt)
    torch.testing.assert_close(grad, torch.where(inside, 2 * expected, 0.0), rtol=0, atol=0)
    assert torch.equal(came, kept)  # what is made in place is nobody else's
    given = torch.full_like(x, 3.0)
    torch.autograd.grad(masked_log_ratio(spoilt, base, mask), spoilt, given)
    assert torch.equal(given, torch.full_like(x, 3.0))


def test_derivatives_of_log_ratios_of_both_orders_and_modes():
    x, mask = inputs()
    base, _ = inputs(seed=3)
    x[0] += 30
    for m in (mask, None):
        y, z = x.clone().requires_grad_(), base.clone().requires_grad_()
        torch.autograd.gradcheck(lambda y, z, m=m: masked_log_ratio(y, z, m), (y, z), check_forward_ad=True)
        torch.autograd.gradgradcheck(lambda y, z, m=m: masked_log_ratio(y, z, m).exp(), (y, z))
    came = torch.func.vmap(masked_log_ratio)(x[None], base[None], mask[None])
    assert torch.equal(came[0], masked_log_ratio(x, base, mask))


def test_rows_of_a_mask():
    x, mask = inputs()
    for keep in (mask[:, :1], x > 0, (x > 0)[:, ::7]):
        assert torch.equal(masked_rows(mask, keep), mask & keep)
    assert masked_rows(mask[:0], mask[:0, :1]).shape == (0, 7)
