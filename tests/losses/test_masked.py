"""`masked` and what is made of it: nothing that is masked reaches a value or a gradient."""

import math

import pytest
import torch

from rlkit._numerics import LOG_RATIO_LIMIT, divide, masked, masked_log_ratio, mean_over_tokens

BAD = (math.nan, math.inf, -math.inf)


def inputs(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(5, 7, generator=g, dtype=torch.float64).to(dtype), torch.rand(5, 7, generator=g) < 0.5


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_float32_at_least(dtype):
    x, mask = inputs(dtype)
    assert masked(x, mask).dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(masked(x, mask), torch.where(mask, x, 0).to(masked(x, mask).dtype))
    assert torch.equal(masked(x, None), masked(x, torch.ones_like(mask)))


@pytest.mark.parametrize("bad", BAD)
def test_log_ratios_are_masked_and_then_bounded(bad):
    x, mask = inputs()
    base, _ = inputs(seed=3)
    x[0], x[1] = x[0] + 30, x[1] - 30  # beyond the bound on either side
    expected = torch.where(mask, (x - base).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0)
    inside = mask & ((x - base).abs() < LOG_RATIO_LIMIT)
    spoilt = torch.where(mask, x, bad).requires_grad_()
    came = masked_log_ratio(spoilt, base.requires_grad_(), mask)
    assert torch.equal(came, expected) and (expected.abs() == LOG_RATIO_LIMIT).any()
    came.square().sum().backward()
    torch.testing.assert_close(spoilt.grad, torch.where(inside, 2 * expected, 0.0), rtol=0, atol=0)
    assert base.grad is None


def test_mean_over_tokens():
    x, mask = inputs()
    mask[2] = False
    came = mean_over_tokens(torch.where(mask, x, 0.0), mask)
    assert came.shape == (5, 1) and came[2] == 0
    for b in (0, 1, 3, 4):
        torch.testing.assert_close(came[b, 0], x[b, mask[b]].mean())


@pytest.mark.parametrize("total", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_a_total_of_0_gives_0_with_gradient_0(total):
    x = torch.tensor(math.inf, requires_grad=True)
    divide(x, total).backward()
    assert divide(x, total) == 0 and x.grad == 0


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("total", [1001, 1001.0, torch.tensor(1001), torch.tensor(1001.0, dtype=torch.float64)])
def test_a_total_of_any_dtype_changes_neither_dtype_nor_value(total, default):
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        came = divide(torch.tensor(3.0, dtype=torch.float32), total)
    finally:
        torch.set_default_dtype(before)
    assert came.dtype == torch.float32 and came.item() == pytest.approx(3 / 1001, rel=1e-7)
