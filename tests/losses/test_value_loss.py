"""clipped_value_loss."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from rlkit.losses.value import clipped_value_loss

FEW = settings(max_examples=25, deadline=None, derandomize=True)


def batch(seed=0, b=4, t=6):
    g = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, b, t, generator=g, dtype=torch.float64)
    return values.requires_grad_(), old, returns, torch.rand(b, t, generator=g) < 0.7


def test_golden():
    """Return 1, old value 0, bound 0.5: inside; towards the return; past it; away; far past it."""
    values = torch.tensor([[0.25, 0.75, 1.25, -1.0, 3.0]], requires_grad=True)
    mask = torch.ones(1, 5, dtype=torch.bool)
    loss = clipped_value_loss(values, torch.zeros(1, 5), torch.ones(1, 5), mask)
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.tensor([[0.28125, 0.125, 0.125, 2.0, 2.0]]))
    torch.testing.assert_close(values.grad, torch.tensor([[-0.75, 0.0, 0.0, -2.0, 2.0]]))


def test_is_the_squared_error_where_nothing_is_clipped():
    values, old, returns, mask = batch()
    half = torch.where(mask, (values - returns).square() / 2, 0.0)
    torch.testing.assert_close(clipped_value_loss(values, old, returns, mask, math.inf), half)
    same = clipped_value_loss(values, values, returns, mask, 0.1)  # the first pass over a batch
    torch.testing.assert_close(same, half)
    (grad,) = torch.autograd.grad(same.sum(), values)
    torch.testing.assert_close(grad, torch.where(mask, values - returns, 0.0).detach())


@FEW
@given(seed=st.integers(0, 999), clip=st.floats(0, 3), pad=st.integers(0, 4))
def test_never_below_the_squared_error_and_padding_is_nothing(seed, clip, pad):
    values, old, returns, mask = batch(seed)
    loss = clipped_value_loss(values, old, returns, mask, clip)
    assert (loss - torch.where(mask, (values - returns).square() / 2, 0.0)).min() >= -1e-12
    filled = ((values, 9.0), (old, 5.0), (returns, -9.0), (mask, False))
    padded = clipped_value_loss(*(torch.nn.functional.pad(x, (0, pad), value=v) for x, v in filled), clip)
    assert torch.equal(padded[:, :6], loss) and padded[:, 6:].abs().sum() == 0


def test_mask_equals_slice():
    values, old, returns, mask = batch()
    one = torch.ones(1, int(mask.sum()), dtype=torch.bool)
    sliced = clipped_value_loss(values[mask][None], old[mask][None], returns[mask][None], one)
    torch.testing.assert_close(clipped_value_loss(values, old, returns, mask)[mask], sliced[0])


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e30])
@pytest.mark.parametrize("where", [0, 1, 2, None])
def test_masked_values_never_leak(bad, where):
    *tensors, mask = batch()
    clean = clipped_value_loss(*tensors, mask)
    (clean_grad,) = torch.autograd.grad(clean.sum(), tensors[0])
    dirty = [torch.where(mask, x.detach(), bad if where in (k, None) else x.detach()) for k, x in enumerate(tensors)]
    dirty[0].requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        loss = clipped_value_loss(*dirty, mask)
        loss.sum().backward()
    assert torch.equal(loss, clean) and torch.equal(dirty[0].grad, clean_grad)
    assert loss[~mask].abs().max() == 0 and dirty[0].grad[~mask].abs().max() == 0


def test_only_values_get_a_gradient():
    values, old, returns, mask = batch()
    old.requires_grad_()
    returns.requires_grad_()
    clipped_value_loss(values, old, returns, mask).sum().backward()
    assert values.grad is not None and old.grad is None and returns.grad is None


def test_empty_and_bfloat16():
    for shape in ((0, 3), (2, 0)):
        zeros = torch.zeros(shape, requires_grad=True)
        loss = clipped_value_loss(zeros, zeros, zeros, torch.zeros(shape, dtype=torch.bool))
        loss.sum().backward()
        assert loss.shape == shape and zeros.grad.shape == shape
    *tensors, mask = batch()
    low = [x.detach().bfloat16() for x in tensors]
    loss = clipped_value_loss(*low, mask)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, clipped_value_loss(*(x.float() for x in low), mask))


def test_no_value_is_read_on_the_host():
    with FakeTensorMode():
        x = torch.zeros(2, 3, requires_grad=True)
        clipped_value_loss(x, x, x, torch.ones(2, 3, dtype=torch.bool)).sum().backward()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"values": torch.zeros(2)}, "values"),
        ({"old_values": torch.zeros(2, 2)}, "old_values"),
        ({"returns": torch.zeros(2, 3, dtype=torch.long)}, "returns"),
        ({"mask": torch.ones(2, 3)}, "mask"),
        ({"clip": -0.1}, "clip"),
        ({"clip": math.nan}, "clip"),
    ],
)
def test_errors_name_the_argument(change, name):
    zeros = torch.zeros(2, 3)
    arguments = {"values": zeros, "old_values": zeros, "returns": zeros, "mask": torch.ones(2, 3, dtype=torch.bool)}
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        clipped_value_loss(**(arguments | change))
