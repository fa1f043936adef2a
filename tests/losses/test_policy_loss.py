"""clipped_policy_loss."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.losses import clipped_policy_loss

FEW = settings(max_examples=25, deadline=None, derandomize=True)


def batch(seed=0, b=4, t=6):
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(b, t, generator=g, dtype=torch.float64) * 3
    lp = (old + torch.randn(b, t, generator=g, dtype=torch.float64) * 0.7).requires_grad_()
    adv = torch.randn(b, t, generator=g, dtype=torch.float64)
    mask = torch.rand(b, t, generator=g) < 0.7
    return lp, old, adv, mask


def test_golden():
    ratio = torch.tensor([[1.1, 1.5, 0.5, 1.5, 0.5, 4.0]])
    adv = torch.tensor([[2.0, 2.0, 2.0, -2.0, -2.0, -2.0]])
    mask = torch.ones(1, 6, dtype=torch.bool)
    lp, old = ratio.log() - 1, torch.full((1, 6), -1.0)
    torch.testing.assert_close(
        clipped_policy_loss(lp, old, adv, mask), torch.tensor([[-2.2, -2.4, -1.0, 3.0, 1.6, 8.0]])
    )
    torch.testing.assert_close(
        clipped_policy_loss(lp, old, adv, mask, 0.4, 0.3), torch.tensor([[-2.2, -2.6, -1.0, 3.0, 1.2, 8.0]])
    )
    torch.testing.assert_close(
        clipped_policy_loss(lp, old, adv, mask, dual_clip=3.0), torch.tensor([[-2.2, -2.4, -1.0, 3.0, 1.6, 6.0]])
    )


def test_gradient_golden():
    """The gradient is -A r where the clip does not bind, 0 where it does."""
    ratio = torch.tensor([[1.1, 1.5, 0.5, 1.5, 0.5, 4.0]])
    lp = ratio.log().requires_grad_()
    adv, mask = torch.tensor([[2.0, 2.0, 2.0, -2.0, -2.0, -2.0]]), torch.ones(1, 6, dtype=torch.bool)
    clipped_policy_loss(lp, torch.zeros(1, 6), adv, mask, dual_clip=3.0).sum().backward()
    torch.testing.assert_close(lp.grad, torch.tensor([[-2.2, 0.0, -1.0, 3.0, 0.0, 0.0]]))


def test_on_policy_gradient_is_the_policy_gradient():
    """At ratio 1 the loss is -A and its gradient -A, also where the minimum ties and nothing is detached."""
    lp, _, adv, mask = batch()
    for low, high in ((0.2, 0.2), (0.0, 0.0)):
        loss = clipped_policy_loss(lp, lp, adv, mask, low, high)
        (grad,) = torch.autograd.grad(loss.sum(), lp)
        torch.testing.assert_close(loss, torch.where(mask, -adv, 0.0))
        torch.testing.assert_close(grad, torch.where(mask, -adv, 0.0))


def test_only_logprobs_get_a_gradient():
    lp, old, adv, mask = batch()
    old.requires_grad_()
    adv.requires_grad_()
    clipped_policy_loss(lp, old, adv, mask).sum().backward()
    assert lp.grad is not None and old.grad is None and adv.grad is None


def test_mask_equals_slice():
    lp, old, adv, mask = batch()
    one = torch.ones(1, int(mask.sum()), dtype=torch.bool)
    sliced = clipped_policy_loss(lp[mask][None], old[mask][None], adv[mask][None], one, 0.2, 0.3, 2.0)
    torch.testing.assert_close(clipped_policy_loss(lp, old, adv, mask, 0.2, 0.3, 2.0)[mask], sliced[0])


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e4])
@pytest.mark.parametrize("where", ["logprobs", "old_logprobs", "advantages", "all"])
def test_masked_ratio_no_nan_gradient(bad, where):
    lp, old, adv, mask = batch()
    clean = clipped_policy_loss(lp, old, adv, mask, dual_clip=3.0)
    (clean_grad,) = torch.autograd.grad(clean.sum(), lp)
    dirty = [
        torch.where(mask, x.detach(), bad if where in (name, "all") else x.detach())
        for name, x in (("logprobs", lp), ("old_logprobs", old), ("advantages", adv))
    ]
    dirty[0].requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        loss = clipped_policy_loss(*dirty, mask, dual_clip=3.0)
        loss.sum().backward()
    assert torch.equal(loss, clean) and torch.equal(dirty[0].grad, clean_grad)
    assert loss[~mask].abs().max() == 0 and dirty[0].grad[~mask].abs().max() == 0


@pytest.mark.parametrize("log_ratio", [25.0, 100.0, 1e4, math.inf, -25.0, -1e4, -math.inf])
@pytest.mark.parametrize("adv", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("dual", [None, 3.0])
def test_extreme_unmasked_ratio(log_ratio, adv, dual):
    lp = torch.tensor([[log_ratio, 0.0]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss = clipped_policy_loss(lp, torch.zeros(1, 2), torch.tensor([adv]), mask, dual_clip=dual)
    loss.sum().backward()
    assert loss.isfinite().all() and lp.grad[0, 0] == 0 and lp.grad[0, 1] == -adv


@FEW
@given(seed=st.integers(0, 999), pad=st.integers(0, 5))
def test_rows_permute_and_padding_is_nothing(seed, pad):
    lp, old, adv, mask = batch(seed)
    loss = clipped_policy_loss(lp, old, adv, mask)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(clipped_policy_loss(lp[order], old[order], adv[order], mask[order]), loss[order])
    wide = [
        torch.nn.functional.pad(x, (0, pad), value=v) for x, v in ((lp, 9.0), (old, -9.0), (adv, 9.0), (mask, False))
    ]
    padded = clipped_policy_loss(*wide)
    torch.testing.assert_close(padded[:, :6], loss)
    assert padded[:, 6:].abs().sum() == 0


@FEW
@given(
    x=st.floats(-(2.0**100), 2.0**100, width=32),
    y=st.floats(-(2.0**100), 2.0**100, width=32),
    adv=st.floats(-1024, 1024, width=32),
    dual=st.sampled_from([None, 1.5]),
)
def test_any_finite_numbers_stay_finite(x, y, adv, dual):
    lp = torch.tensor([[x]], requires_grad=True)
    loss = clipped_policy_loss(
        lp, torch.tensor([[y]]), torch.tensor([[adv]]), torch.ones(1, 1, dtype=torch.bool), 0.2, 0.2, dual
    )
    loss.sum().backward()
    assert loss.isfinite().all() and lp.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_empty_batch(shape):
    lp = torch.zeros(shape, requires_grad=True)
    loss = clipped_policy_loss(lp, lp, torch.zeros(shape[0]), torch.zeros(shape, dtype=torch.bool))
    loss.sum().backward()
    assert loss.shape == shape and lp.grad.shape == shape


def test_bfloat16_inputs():
    lp, old, adv, mask = (x.detach().bfloat16() if x.is_floating_point() else x for x in batch())
    loss = clipped_policy_loss(lp, old, adv, mask)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, clipped_policy_loss(lp.float(), old.float(), adv.float(), mask))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"logprobs": torch.zeros(2)}, "logprobs"),
        ({"logprobs": torch.zeros(2, 3, dtype=torch.long)}, "logprobs"),
        ({"old_logprobs": torch.zeros(2, 2)}, "old_logprobs"),
        ({"advantages": torch.zeros(3)}, "advantages"),
        ({"advantages": torch.zeros(2, 1)}, "advantages"),
        ({"advantages": torch.zeros(2, dtype=torch.long)}, "advantages"),
        ({"mask": torch.ones(2, 3)}, "mask"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, "mask"),
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip"),
    ],
)
def test_errors_name_the_argument(change, name):
    arguments = {
        "logprobs": torch.zeros(2, 3),
        "old_logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2),
        "mask": torch.ones(2, 3, dtype=torch.bool),
    }
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        clipped_policy_loss(**(arguments | change))
