"""token_sum, token_mean, sequence_mean, sequence_sum_mean, fixed_length_mean, prompt_mean."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.losses import (
    fixed_length_mean,
    group_token_counts,
    prompt_mean,
    reductions,
    sequence_mean,
    sequence_sum_mean,
    token_mean,
    token_sum,
)
from rlkit.losses.naive import reductions as naive

FEW = settings(max_examples=25, deadline=None, derandomize=True)
LENGTH = 8
fixed, naive_fixed = (partial(x.fixed_length_mean, length=LENGTH) for x in (reductions, naive))
BY_TOKENS, BY_SEQUENCES = [token_mean], [sequence_mean, sequence_sum_mean, fixed]
EVERY = [token_sum, *BY_TOKENS, *BY_SEQUENCES]


def batch(seed=0, b=6, t=7):
    g = torch.Generator().manual_seed(seed)
    loss = torch.randn(b, t, generator=g, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(b, t, generator=g) < torch.rand(b, 1, generator=g)
    mask[1] = False
    mask[2, 3] = True
    return loss, mask


def totals(function, mask):
    """The global count that an engine would pass."""
    return int(mask.sum()) if function in BY_TOKENS else int(mask.any(1).sum())


def test_golden():
    loss = torch.tensor([[1.0, 2.0, 3.0, 9.0], [4.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    assert token_sum(loss, mask) == 10
    assert token_mean(loss, mask) == 2.5
    assert sequence_mean(loss, mask) == 3
    assert sequence_sum_mean(loss, mask) == 5
    assert fixed_length_mean(loss, mask, 5) == 1
    assert token_mean(loss, mask, 5) == 2 and sequence_mean(loss, mask, 4) == 1.5
    assert sequence_sum_mean(loss, mask, 4) == 2.5 and fixed_length_mean(loss, mask, 5, total=1) == 2


def test_prompt_mean_golden():
    """Two prompts: (1 + 2 + 3 + 6) / 4 and 8 / 1."""
    loss = torch.tensor([[1.0, 2.0, 3.0], [8.0, math.nan, math.nan], [6.0, math.nan, math.nan]])
    mask, groups = torch.tensor([[True] * 3, [True, False, False], [True, False, False]]), torch.tensor([4, 9, 4])
    counts = group_token_counts(mask, groups)
    assert counts.tolist() == [4, 1, 4]
    assert prompt_mean(loss, mask, counts) == 5.5 and prompt_mean(loss, mask, counts, total=4) == 2.75
    assert prompt_mean(loss[:1], mask[:1], counts[:1], total=2) == 0.75  # this row's part of it


@FEW
@given(seed=st.integers(0, 999))
def test_prompt_mean_does_not_depend_on_the_cut(seed):
    loss, mask = batch(seed)
    groups = torch.tensor([0, 1, 0, 2, 1, 0])
    counts = group_token_counts(mask, groups)
    prompts = sum(bool(mask[groups == group].any()) for group in range(3))
    whole = prompt_mean(loss, mask, counts)
    means = [token_mean(loss[groups == group], mask[groups == group]) for group in range(3)]
    torch.testing.assert_close(whole, sum(means) / max(prompts, 1))
    parts = [prompt_mean(loss[i], mask[i], counts[i], prompts) for i in (slice(0, 1), slice(1, 4), slice(4, 6))]
    torch.testing.assert_close(sum(parts), whole)
    one_each = prompt_mean(loss, mask, group_token_counts(mask, torch.arange(6)))
    torch.testing.assert_close(one_each, sequence_mean(loss, mask))


def test_length_bias_modes():
    """A sequence of 1 token and one of 4: the weight of a token in each of the three losses, by hand."""
    mask = torch.tensor([[True, False, False, False], [True, True, True, True]])
    weight = {}
    for name, function in (("grpo", sequence_mean), ("dapo", token_mean), ("dr_grpo", fixed)):
        loss = torch.zeros(2, 4, requires_grad=True)
        function(loss, mask).backward()
        weight[name] = (loss.grad[0, 0].item(), loss.grad[1, 0].item())
    assert weight == {"grpo": (1 / 2, 1 / 8), "dapo": (pytest.approx(1 / 5),) * 2, "dr_grpo": (1 / 16, 1 / 16)}


@pytest.mark.parametrize("function", [*BY_TOKENS, *BY_SEQUENCES])
def test_token_mean_invariant_to_microbatch_and_dp(function):
    """Ranks get uneven rows, some get none; the sum of all parts is the loss and the gradient of the whole."""
    loss, mask = batch(b=9)
    total = totals(function, mask)
    whole = function(loss, mask)
    (whole_grad,) = torch.autograd.grad(whole, loss)
    cuts = [[slice(0, 9)], [slice(0, 1), slice(1, 9)], [slice(i, i + 1) for i in range(9)]]
    cuts += [[slice(0, 4), slice(4, 4), slice(4, 6), slice(6, 9)]]
    for parts in cuts:
        copy = loss.detach().clone().requires_grad_()
        value = 0.0
        for rows in parts:
            width = int(mask[rows].any(0).nonzero().max()) + 1 if mask[rows].any() else 1
            part = function(copy[rows, :width], mask[rows, :width], total=total)
            part.backward()  # gradients of micro-batches and ranks add up, with no further division
            value += part.item()
        assert value == pytest.approx(whole.item(), abs=1e-12)
        torch.testing.assert_close(copy.grad, whole_grad)


@pytest.mark.parametrize("function", [*BY_TOKENS, *BY_SEQUENCES])
def test_no_double_grad_accum_division(function):
    """A batch fed twice with the total of both has the gradient of the batch, not half of it."""
    loss, mask = batch()
    slow = naive_fixed if function is fixed else getattr(naive, function.__name__)
    (once,) = torch.autograd.grad(slow(loss, mask), loss)
    for _ in range(2):
        function(loss, mask, total=2 * totals(function, mask)).backward()
    torch.testing.assert_close(loss.grad, once)


def test_dr_grpo_constant_divisor():
    """More padding, or a longer neighbour, leaves a sequence's share as it is; the width never divides."""
    loss, mask = torch.tensor([[1.0, 2.0]]), torch.ones(1, 2, dtype=torch.bool)
    assert fixed_length_mean(loss, mask, 6) == 0.5
    for width in (3, 10):
        wide = [torch.nn.functional.pad(x, (0, width - 2)) for x in (loss, mask)]
        assert fixed_length_mean(*wide, 6) == 0.5
    neighbour = [torch.cat([torch.nn.functional.pad(x, (0, 8)), x.new_zeros(1, 10)]) for x in (loss, mask)]
    neighbour[1][1] = True
    assert fixed_length_mean(*neighbour, 6) == 0.25  # two sequences now, the same constant


@pytest.mark.parametrize("function", [*BY_TOKENS, *BY_SEQUENCES])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16])
def test_a_total_of_any_dtype_leaves_the_dtype_and_the_value(function, dtype):
    """1001 is no bfloat16, also not where that is the default: a total of 1001 would be one of 1000."""
    loss, mask = batch()
    loss, total = loss.detach().float(), 1024 if dtype == torch.bfloat16 else 1001
    expected = function(loss, mask, total=float(total))
    assert expected.dtype == torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = function(loss, mask, total=torch.tensor(total, dtype=dtype))
        plain = function(loss, mask, total=total)
    finally:
        torch.set_default_dtype(before)
    for value in (found, plain):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("function", [token_sum, *BY_TOKENS, *BY_SEQUENCES])
def test_fully_masked_row_does_not_count(function):
    loss, mask = batch()
    kept = mask.any(1)
    assert not kept.all()
    dirty = torch.where(kept[:, None], loss.detach(), math.nan).requires_grad_()
    value = function(dirty, mask)
    value.backward()
    assert value.item() == pytest.approx(function(loss[kept], mask[kept]).item())
    assert dirty.grad.isfinite().all() and dirty.grad[~kept].abs().sum() == 0


@pytest.mark.parametrize("function", BY_SEQUENCES)
def test_per_sequence_loss(function):
    _, mask = batch()
    loss = torch.arange(1.0, 7.0).requires_grad_()
    scale = LENGTH if function is fixed else 1
    rows = [x for x, m in zip(range(1, 7), mask.tolist(), strict=True) if any(m)]
    value = function(loss, mask)
    value.backward()
    assert value.item() == pytest.approx(sum(rows) / len(rows) / scale)
    torch.testing.assert_close(loss.grad, mask.any(1) / (len(rows) * scale))
    dirty = torch.where(mask.any(1), loss.detach(), math.inf).requires_grad_()
    assert function(dirty, mask).item() == value.item()
    assert function(loss, mask, total=10).item() == pytest.approx(sum(rows) / 10 / scale)


@pytest.mark.parametrize("function", EVERY)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_masked_values_never_leak(function, bad):
    loss, mask = batch()
    clean = function(loss, mask)
    (clean_grad,) = torch.autograd.grad(clean, loss)
    dirty = torch.where(mask, loss.detach(), bad).requires_grad_()
    value = function(dirty, mask)
    value.backward()
    assert torch.equal(value, clean) and torch.equal(dirty.grad, clean_grad)
    assert dirty.grad[~mask].abs().max() == 0


def test_mask_equals_slice():
    loss, mask = batch()
    every = torch.ones(1, int(mask.sum()), dtype=torch.bool)
    for function in (token_sum, token_mean):
        torch.testing.assert_close(function(loss, mask), function(loss[mask][None], every))
    for function in BY_SEQUENCES:
        rows = [function(x[m][None], m[m][None]) for x, m in zip(loss, mask, strict=True) if m.any()]
        torch.testing.assert_close(function(loss, mask), torch.stack(rows).mean())


@pytest.mark.parametrize("function", [*BY_TOKENS, *BY_SEQUENCES])
@pytest.mark.parametrize("total", [None, 0, 0.0, torch.tensor(0), torch.tensor(0.0)])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 3)])
def test_nothing_gives_zero_with_a_gradient(function, total, shape):
    loss = torch.full(shape, math.nan, requires_grad=True)
    value = function(loss, torch.zeros(shape, dtype=torch.bool), total=total)
    value.backward()
    assert value.item() == 0 and loss.grad.shape == shape and loss.grad.abs().sum() == 0


@pytest.mark.parametrize("function", [*BY_TOKENS, *BY_SEQUENCES])
def test_total_of_zero_gives_zero_even_with_tokens(function):
    loss = torch.tensor([[1.0, math.inf]], requires_grad=True)
    value = function(loss, torch.ones(1, 2, dtype=torch.bool), total=0)
    value.backward()
    assert value.item() == 0 and loss.grad.abs().max() == 0


@pytest.mark.parametrize("function", EVERY)
@FEW
@given(seed=st.integers(0, 999), pad=st.integers(0, 5))
def test_order_and_padding_do_not_matter(function, seed, pad):
    loss, mask = batch(seed)
    value = function(loss, mask)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(function(loss[order], mask[order]), value)
    wide = torch.nn.functional.pad(loss, (0, pad), value=math.nan)
    torch.testing.assert_close(function(wide, torch.nn.functional.pad(mask, (0, pad))), value)


@pytest.mark.parametrize("function", EVERY)
def test_bfloat16_is_summed_in_float32(function):
    loss, mask = torch.ones(1, 1001).bfloat16(), torch.ones(1, 1001, dtype=torch.bool)
    value = function(loss, mask)
    assert value.dtype == torch.float32
    assert value.item() == {token_sum: 1001, sequence_sum_mean: 1001, fixed: 1001 / 8}.get(function, 1.0)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: token_mean(torch.zeros(3), torch.ones(3, 2, dtype=torch.bool)), "loss"),
        (lambda: token_sum(torch.zeros(3, 2), torch.ones(2, 3, dtype=torch.bool)), "loss"),
        (lambda: sequence_mean(torch.zeros(2), torch.ones(3, 2, dtype=torch.bool)), "loss"),
        (lambda: sequence_mean(torch.zeros(2, 2, 2), torch.ones(2, 2, dtype=torch.bool)), "loss"),
        (lambda: sequence_sum_mean(torch.zeros(2, 2, dtype=torch.long), torch.ones(2, 2, dtype=torch.bool)), "loss"),
        (lambda: token_mean(torch.zeros(2, 2), torch.ones(2, 2)), "mask"),
        (lambda: token_mean(torch.zeros(2, 2), torch.ones(2, dtype=torch.bool)), "mask"),
        (lambda: token_mean(torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool), -1), "total"),
        (lambda: token_mean(torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool), torch.ones(1)), "total"),
        (lambda: fixed_length_mean(torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool), 0), "length"),
        (lambda: prompt_mean(torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool), torch.ones(3)), "group_tokens"),
        (lambda: prompt_mean(torch.zeros(2), torch.ones(2, 2, dtype=torch.bool), torch.ones(2)), "loss"),
        (lambda: group_token_counts(torch.ones(2, 2, dtype=torch.bool), torch.zeros(2)), "group_ids"),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        call()
