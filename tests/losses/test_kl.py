"""kl_k3."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.losses import kl_k3

FEW = settings(max_examples=25, deadline=None, derandomize=True)


def distributions(distance=1.0):
    g = torch.Generator().manual_seed(0)
    theta = torch.randn(6, generator=g, dtype=torch.float64)
    ref = (theta + distance * torch.randn(6, generator=g, dtype=torch.float64)).log_softmax(0)
    return theta.requires_grad_(), ref


def exact(theta, ref, direction):
    """Gradients of the two divergences from scalar sums over the vocabulary."""
    logp = theta - theta.exp().sum().log()
    if direction == "policy||ref":
        kl = sum(logp[v].exp() * (logp[v] - ref[v]) for v in range(6))
    else:
        kl = sum(ref[v].exp() * (ref[v] - logp[v]) for v in range(6))
    return torch.autograd.grad(kl, theta)[0], kl.item()


def expected_gradient(theta, ref, weighted):
    """E over the policy's own tokens, by enumeration, of the gradient of k3 (times the ratio, where weighted)."""
    logp = theta.log_softmax(0)
    k3 = kl_k3(logp[None], ref[None])[0]
    if weighted:
        k3 = (logp - logp.detach()).exp() * k3
    return torch.autograd.grad((logp.detach().exp() * k3).sum(), theta)[0]


def test_kl_gradient_matches_exact():
    theta, ref = distributions()
    of_policy, _ = exact(theta, ref, "policy||ref")
    of_ref, _ = exact(theta, ref, "ref||policy")
    assert (of_policy - of_ref).norm() > 0.1 * of_policy.norm()  # the two can be told apart
    torch.testing.assert_close(expected_gradient(theta, ref, weighted=False), of_ref)  # biased: the other direction
    torch.testing.assert_close(expected_gradient(theta, ref, weighted=True), of_policy)


def test_directions_agree_near_the_reference():
    gaps = []
    for distance in (1e-2, 1e-3):
        theta, ref = distributions(distance)
        of_policy, _ = exact(theta, ref, "policy||ref")
        gaps.append(((expected_gradient(theta, ref, weighted=False) - of_policy).norm() / of_policy.norm()).item())
    assert gaps[0] < 0.02 and gaps[1] < 0.2 * gaps[0]


def test_value_is_unbiased():
    theta, ref = distributions()
    logp = theta.log_softmax(0)
    assert (logp.exp() * kl_k3(logp[None], ref[None])[0]).sum().item() == pytest.approx(
        exact(theta, ref, "policy||ref")[1]
    )


def test_golden():
    out = kl_k3(torch.tensor([[0.0, -math.log(2), 0.0]]), torch.tensor([[0.0, 0.0, -math.log(2)]]))
    torch.testing.assert_close(out, torch.tensor([[0.0, 1 - math.log(2), math.log(2) - 0.5]]))


def test_small_differences_keep_their_digits():
    """exp(d) - 1 - d in float32 is 0 or negative noise at d = 1e-4; the truth is d**2 / 2."""
    d = torch.tensor([[1e-4, -1e-4]])
    torch.testing.assert_close(kl_k3(torch.zeros(1, 2), d), torch.full((1, 2), 5e-9), rtol=2e-2, atol=0)


def test_mask_equals_slice():
    lp, ref = torch.randn(2, 3, 4)
    mask = torch.rand(3, 4) < 0.5
    torch.testing.assert_close(kl_k3(lp, ref, mask)[mask], kl_k3(lp[mask][None], ref[mask][None])[0])


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e4])
def test_masked_values_never_leak(bad):
    mask = torch.tensor([[True, False, True, False]])
    lp = torch.tensor([[-1.0, bad, -2.0, -1.0]], requires_grad=True)
    ref = torch.tensor([[-1.5, -1.0, -1.0, bad]])
    with torch.autograd.detect_anomaly(check_nan=True):
        out = kl_k3(lp, ref, mask)
        out.sum().backward()
    assert out.isfinite().all() and lp.grad.isfinite().all()
    assert out[~mask].abs().max() == 0 and lp.grad[~mask].abs().max() == 0


@FEW
@given(
    x=st.floats(-(2.0**100), 2.0**100, width=32), y=st.floats(-(2.0**100), 2.0**100, width=32), pad=st.integers(0, 3)
)
def test_finite_and_not_negative(x, y, pad):
    lp = torch.tensor([[x, -1.0]], requires_grad=True)
    ref = torch.tensor([[y, -1.0]])
    out = kl_k3(lp, ref)
    out.sum().backward()
    assert out.min() >= 0 and out.isfinite().all() and lp.grad.isfinite().all() and out[0, 1] == 0
    wide = kl_k3(*(torch.nn.functional.pad(v, (0, pad)) for v in (lp, ref)))
    assert torch.equal(wide[:, :2], out) and torch.equal(kl_k3(lp.flip(1), ref.flip(1)), out.flip(1))


def test_empty_and_bfloat16():
    assert kl_k3(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)).shape == (0, 3)
    lp, ref = torch.randn(2, 3, 4).bfloat16()
    assert kl_k3(lp, ref).dtype == torch.float32
    torch.testing.assert_close(kl_k3(lp, ref), kl_k3(lp.float(), ref.float()))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((torch.zeros(3), torch.zeros(3)), "logprobs"),
        ((torch.zeros(2, 3), torch.zeros(2, 2)), "ref_logprobs"),
        ((torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3)), "mask"),
        ((torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 2, dtype=torch.bool)), "logprobs"),
    ],
)
def test_errors_name_the_argument(arguments, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        kl_k3(*arguments)
