"""kl_k1, kl_k2, kl_abs, kl_straight_through, kl_k3_weighted, full_vocabulary_kl; kl_k3 itself is in test_kl.py."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from rlkit.losses import (
    align_with_tokens,
    full_vocabulary_kl,
    kl_abs,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_k3_weighted,
    kl_straight_through,
)

FEW = settings(max_examples=25, deadline=None, derandomize=True)
V = 6


def aligned_kl(logits, ref_logits, mask=None, temperature=1.0):
    """The divergence at the token that the logits predict, where a mask of tokens belongs."""
    before = None if mask is None else torch.nn.functional.pad(mask[:, 1:], (0, 1))[:, : mask.shape[1]]
    return align_with_tokens(full_vocabulary_kl(logits, ref_logits, before, temperature))


def k3_straight_through(logprobs, ref_logprobs, mask=None):
    return kl_straight_through(logprobs, ref_logprobs, kl_k3(logprobs, ref_logprobs, mask), mask)


def k1_straight_through(logprobs, ref_logprobs, mask=None):
    return kl_straight_through(logprobs, ref_logprobs, kl_k1(logprobs, ref_logprobs, mask), mask)


def k3_weighted_on_policy(logprobs, ref_logprobs, mask=None):
    return kl_k3_weighted(logprobs, ref_logprobs, logprobs, mask)


SIMPLE = [kl_k1, kl_k2, kl_abs, k1_straight_through, k3_straight_through, k3_weighted_on_policy]


def three(seed=0):
    """Logits of the policy (a leaf), log-probabilities of a reference and of an older policy, over V tokens."""
    g = torch.Generator().manual_seed(seed)
    theta = torch.randn(V, generator=g, dtype=torch.float64, requires_grad=True)
    ref, old = (theta.detach() + torch.randn(2, V, generator=g, dtype=torch.float64)).log_softmax(1)
    return theta, ref, old


def exact(theta, ref, which="policy||ref"):
    """A divergence as a scalar sum over the vocabulary, and its gradient."""
    logp = theta - theta.exp().sum().log()
    total = 0 * theta.sum()
    for v in range(V):
        p, q = logp[v].exp(), ref[v].exp()
        if which == "policy||ref":
            total = total + p * (logp[v] - ref[v])
        elif which == "ref||policy":
            total = total + q * (ref[v] - logp[v])
        else:
            total = total + (p - q if p > q else q - p)
    return total.item(), torch.autograd.grad(total, theta)[0]


def expectation(function, theta, *others, sampler=None):
    """Value and gradient of the mean loss over tokens of the sampler (the policy itself), by enumeration."""
    logp = theta.log_softmax(0)
    weights = (logp.detach() if sampler is None else sampler).exp()
    mean = (weights * function(logp[None], *(x[None] for x in others))[0]).sum()
    return mean.item(), torch.autograd.grad(mean, theta)[0]


@pytest.mark.parametrize("seed", range(3))
def test_kl_gradient_matches_exact(seed):
    theta, ref, old = three(seed)
    kl, gradient = exact(theta, ref)
    other_kl, other = exact(theta, ref, "ref||policy")
    _, l1 = exact(theta, ref, "L1")
    zero = torch.zeros(V, dtype=torch.float64)
    for wrong in (zero, other, l1):  # what is told apart can be told apart
        assert (gradient - wrong).norm() > 0.05 * gradient.norm()

    expected_value_and_gradient = {
        kl_k1: (kl, zero),
        kl_k2: (None, gradient),
        kl_k3: (kl, other),
        kl_abs: (None, l1),
        k1_straight_through: (kl, gradient),
        k3_straight_through: (kl, gradient),
        k3_weighted_on_policy: (kl, gradient),
    }
    for function, (value, wanted) in expected_value_and_gradient.items():
        mean, found = expectation(function, theta, ref)
        torch.testing.assert_close(found, wanted, msg=f"gradient of {function.__name__}", atol=1e-9, rtol=1e-9)
        if value is None:
            assert abs(mean - kl) > 0.01 * kl, function.__name__  # biased, as its docstring says
        else:
            assert mean == pytest.approx(value), function.__name__

    mean, found = expectation(kl_k3_weighted, theta, ref, old, sampler=old)  # off-policy
    assert mean == pytest.approx(kl)
    torch.testing.assert_close(found, gradient)
    for function in (kl_k2, k3_straight_through, kl_k3):
        assert (expectation(function, theta, ref, sampler=old)[1] - gradient).norm() > 0.05 * gradient.norm()

    logits, ref_logits = theta.expand(1, 2, V), ref.expand(1, 2, V) + 3.0
    whole = aligned_kl(logits, ref_logits)
    assert whole[0, 0] == 0 and whole[0, 1].item() == pytest.approx(kl)
    torch.testing.assert_close(torch.autograd.grad(whole.sum(), theta)[0], gradient)
    assert other_kl != pytest.approx(kl)


def test_golden():
    two = math.log(2)
    lp, ref = torch.tensor([[0.0, -two, 0.0]]), torch.tensor([[0.0, 0.0, -two]])
    torch.testing.assert_close(kl_k1(lp, ref), torch.tensor([[0.0, -two, two]]))
    torch.testing.assert_close(kl_k2(lp, ref), torch.tensor([[0.0, two * two / 2, two * two / 2]]))
    torch.testing.assert_close(kl_abs(lp, ref), torch.tensor([[0.0, two, two]]))
    torch.testing.assert_close(k3_straight_through(lp, ref), torch.tensor([[0.0, 1 - two, two - 0.5]]))
    torch.testing.assert_close(
        kl_k3_weighted(lp, ref, torch.full((1, 3), -two)), torch.tensor([[0.0, 1 - two, 2 * two - 1]])
    )


def test_full_vocabulary_golden():
    """(1/2, 1/2) against (1/4, 3/4): half of log 2 and half of log 2/3. Row t speaks of token t + 1."""
    logits = torch.tensor([[[1.0, 1.0], [5.0, -5.0]]])
    ref = torch.tensor([[[0.0, math.log(3)], [-5.0, 5.0]]])
    expected = torch.tensor([[0.0, 0.5 * math.log(4 / 3)]])
    torch.testing.assert_close(aligned_kl(logits, ref), expected)
    torch.testing.assert_close(aligned_kl(3 * logits, 3 * ref, temperature=3.0), expected)
    assert aligned_kl(logits, ref, torch.tensor([[True, False]])).abs().max() == 0


def vocabulary_batch(seed=0, b=2, t=4):
    g = torch.Generator().manual_seed(seed)
    logits, ref = torch.randn(2, b, t, V, generator=g, dtype=torch.float64)
    return logits.requires_grad_(), ref, torch.rand(b, t, generator=g) < 0.6


def test_full_vocabulary_gradient_by_finite_differences():
    logits, ref, mask = vocabulary_batch(3)
    assert torch.autograd.gradcheck(lambda x: aligned_kl(x, ref, mask, 1.3), (logits,))


def test_suppressed_tokens():
    """-inf in both, or in the policy alone, is a token less; in the reference alone it is a large finite number."""
    logits, ref, _ = vocabulary_batch()
    column = torch.tensor([False] * 5 + [True])
    gone = logits.detach().masked_fill(column, -math.inf).requires_grad_()
    out = aligned_kl(gone, ref.masked_fill(column, -math.inf))
    (grad,) = torch.autograd.grad(out.sum(), gone)
    small = logits.detach()[..., :5].requires_grad_()
    five = aligned_kl(small, ref[..., :5])
    torch.testing.assert_close(out, five)
    torch.testing.assert_close(grad[..., :5], torch.autograd.grad(five.sum(), small)[0])
    assert grad[..., 5].abs().max() == 0
    for policy, reference in ((gone, ref), (logits, ref.masked_fill(column, -math.inf))):
        out = aligned_kl(policy, reference)
        (grad,) = torch.autograd.grad(out.sum(), policy)
        assert out.isfinite().all() and grad.isfinite().all()
    assert out[:, 1:].min() > 50  # the reference alone


def test_straight_through_shows_the_value_to_the_last_bit():
    g = torch.Generator().manual_seed(0)
    lp, ref, value = torch.randn(3, 3, 50, generator=g)
    lp.requires_grad_()
    value.requires_grad_()
    out = kl_straight_through(lp, ref, value)
    assert torch.equal(out, value)
    out.sum().backward()
    assert value.grad is None
    torch.testing.assert_close(lp.grad, (lp - ref).detach())


def test_on_policy_the_weight_is_one():
    lp, ref = torch.randn(2, 3, 4)
    assert torch.equal(kl_k3_weighted(lp, ref, lp), kl_k3(lp, ref))


@pytest.mark.parametrize("function", SIMPLE)
def test_mask_equals_slice(function):
    lp, ref = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True, False, True, True], [False] * 4, [True, True, False, False]])
    torch.testing.assert_close(function(lp, ref, mask)[mask], function(lp[mask][None], ref[mask][None])[0])
    torch.testing.assert_close(function(lp, ref), function(lp, ref, torch.ones(3, 4, dtype=torch.bool)))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e4])
@pytest.mark.parametrize(
    "function",
    [
        *SIMPLE,
        lambda lp, ref, mask: kl_k3_weighted(lp, ref, ref + 0.5, mask),
        lambda lp, ref, mask: kl_straight_through(lp, ref, ref, mask),
    ],
)
def test_masked_values_never_leak(function, bad):
    mask = torch.tensor([[True, False, True, False]])
    lp = torch.tensor([[-1.0, bad, -2.0, -1.0]], requires_grad=True)
    ref = torch.tensor([[-1.5, bad, -1.0, bad]])
    with torch.autograd.detect_anomaly(check_nan=True):
        out = function(lp, ref, mask)
        out.sum().backward()
    assert out.isfinite().all() and lp.grad.isfinite().all() and lp.grad[mask].abs().min() > 0
    assert out[~mask].abs().max() == 0 and lp.grad[~mask].abs().max() == 0


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_masked_logits_never_leak(bad):
    logits, ref, mask = vocabulary_batch()
    clean = aligned_kl(logits, ref, mask)
    (clean_grad,) = torch.autograd.grad(clean.sum(), logits)
    used = torch.nn.functional.pad(mask[:, 1:], (0, 1))[..., None]  # the positions that speak of a token of the mask
    dirty = torch.where(used, logits.detach(), bad).requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        out = aligned_kl(dirty, torch.where(used, ref, bad), mask)
        out.sum().backward()
    assert torch.equal(out, clean) and torch.equal(dirty.grad, clean_grad)
    assert out[~mask].abs().max() == 0 and dirty.grad[~used[..., 0]].abs().max() == 0


@pytest.mark.parametrize("function", SIMPLE)
@FEW
@given(x=st.floats(-(2.0**100), 2.0**100, width=32), y=st.floats(-(2.0**100), 2.0**100, width=32))
def test_finite_and_signed(function, x, y):
    lp, ref = torch.tensor([[x, -1.0]], requires_grad=True), torch.tensor([[y, -1.0]])
    out = function(lp, ref)
    out.sum().backward()
    assert out.isfinite().all() and lp.grad.isfinite().all() and out[0, 1] == 0
    assert out.min() >= 0 or function in (kl_k1, k1_straight_through)
    if abs(x - y) > 21:
        assert lp.grad[0, 0] == (0 if function is not k3_weighted_on_policy else out[0, 0])  # the ratio still counts


@FEW
@given(seed=st.integers(0, 999), scale=st.sampled_from([0.0, 1e-4, 1.0, 50.0]))
def test_full_vocabulary_is_never_negative_and_shift_free(seed, scale):
    logits, ref, mask = vocabulary_batch(seed)
    near = (logits + scale * ref).float().detach()
    out = aligned_kl(near, logits.float(), mask)
    assert out.min() >= 0 and out.isfinite().all() and (scale > 0 or out.max() < 1e-6)
    torch.testing.assert_close(aligned_kl(near + 7.0, logits.float() - 7.0, mask), out, atol=1e-5, rtol=1e-4)


def test_only_the_policy_gets_a_gradient():
    lp, ref, old = (torch.randn(2, 3, requires_grad=True) for _ in range(3))
    logits, ref_logits = torch.randn(2, 3, V, requires_grad=True), torch.randn(2, 3, V, requires_grad=True)
    total = sum(f(lp, ref).sum() for f in SIMPLE) + kl_k3_weighted(lp, ref, old).sum()
    (total + aligned_kl(logits, ref_logits).sum()).backward()
    assert lp.grad is not None and logits.grad is not None
    assert ref.grad is None and old.grad is None and ref_logits.grad is None


def test_empty_and_bfloat16():
    for shape in ((0, 3), (2, 0)):
        zeros, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        assert all(f(zeros, zeros, mask).shape == shape for f in SIMPLE)
        logits = torch.zeros(*shape, V, requires_grad=True)
        out = aligned_kl(logits, logits, mask)
        out.sum().backward()
        assert out.shape == shape and logits.grad.shape == logits.shape
    lp, ref = torch.randn(2, 3, 4).bfloat16()
    for f in SIMPLE:
        assert f(lp, ref).dtype == torch.float32
        torch.testing.assert_close(f(lp, ref), f(lp.float(), ref.float()))
    logits = torch.randn(2, 3, V).bfloat16().requires_grad_()
    out = aligned_kl(logits, torch.zeros(2, 3, V).bfloat16())
    out.sum().backward()
    assert out.dtype == torch.float32 and logits.grad.dtype == torch.bfloat16


def test_no_value_is_read_on_the_host():
    with FakeTensorMode():
        x, mask = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3, dtype=torch.bool)
        logits = torch.zeros(2, 3, V, requires_grad=True)
        sum(f(x, x, mask).sum() for f in SIMPLE).backward()
        aligned_kl(logits, logits, mask, 0.5).sum().backward()


BOOL, FLOAT = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        *((lambda f=f: f(torch.zeros(3), torch.zeros(3)), "logprobs") for f in (kl_k1, kl_k2, kl_abs)),
        *((lambda f=f: f(FLOAT, torch.zeros(2, 2)), "ref_logprobs") for f in (kl_k1, kl_k2, kl_abs)),
        *((lambda f=f: f(FLOAT, FLOAT, FLOAT), "mask") for f in (kl_k1, kl_k2, kl_abs)),
        (lambda: kl_straight_through(FLOAT, FLOAT, torch.zeros(2, 2), BOOL), "value"),
        (lambda: kl_straight_through(FLOAT, FLOAT, BOOL), "value"),
        (lambda: kl_k3_weighted(FLOAT, FLOAT, torch.zeros(2, 2), BOOL), "old_logprobs"),
        (lambda: aligned_kl(FLOAT, FLOAT), "logits"),
        (lambda: aligned_kl(torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)), "ref_logits"),
        (lambda: aligned_kl(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4).long()), "ref_logits"),
        (lambda: aligned_kl(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), FLOAT), "mask"),
        (lambda: aligned_kl(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), BOOL[:, 1:]), "logits"),
        (lambda: aligned_kl(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), BOOL, 0.0), "temperature"),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        call()
