"""kl_in_reward, overlong_penalty, adaptive_kl_coef, FixedKL, AdaptiveKL."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from rlkit.advantages.naive import shaping as naive
from rlkit.advantages.shaping import AdaptiveKL, FixedKL, adaptive_kl_coef, kl_in_reward, overlong_penalty

FEW = settings(max_examples=25, deadline=None, derandomize=True)


def batch(seed=0, b=3, t=5):
    g = torch.Generator().manual_seed(seed)
    rewards, kl = torch.randn(2, b, t, generator=g, dtype=torch.float64)
    return rewards, kl, torch.rand(b, t, generator=g) < 0.6


# --- kl_in_reward


@FEW
@given(seed=st.integers(0, 999), b=st.integers(0, 4), t=st.integers(0, 5), coef=st.floats(0, 2))
def test_kl_in_reward_equals_the_loop(seed, b, t, coef):
    rewards, kl, mask = batch(seed, b, t)
    out = kl_in_reward(rewards, kl, mask, coef)
    for row in range(b):
        for k in range(t):
            expected = rewards[row, k].item() - coef * kl[row, k].item() if mask[row, k] else 0.0
            assert out[row, k].item() == pytest.approx(expected, abs=1e-12)
    scalar = kl_in_reward(rewards, kl, mask, torch.tensor(coef, dtype=torch.float64))
    torch.testing.assert_close(scalar, out)


def test_kl_in_reward_golden():
    out = kl_in_reward(
        torch.tensor([[9.0, 0.0, 1.0]]), torch.tensor([[9.0, -2.0, 4.0]]), torch.tensor([[False, True, True]]), 0.5
    )
    assert out.tolist() == [[0.0, 1.0, -1.0]]


def test_k1_in_the_reward_has_the_gradient_of_the_sequence_kl():
    """Two tokens out of three, enumerated: E[G grad log pi], G the reward to go, is minus the gradient of the KL."""
    g = torch.Generator().manual_seed(0)
    first, second = torch.randn(3, generator=g).double(), torch.randn(3, 3, generator=g).double()
    theta = [first.requires_grad_(), second.requires_grad_()]
    ref = [torch.randn(3, generator=g).double().log_softmax(0), torch.randn(3, 3, generator=g).double().log_softmax(1)]
    logp = [theta[0].log_softmax(0), theta[1].log_softmax(1)]
    exact, surrogate, mask = 0 * first.sum(), 0 * first.sum(), torch.ones(1, 2, dtype=torch.bool)
    for a in range(3):
        for b in range(3):
            lp = torch.stack([logp[0][a], logp[1][a, b]])
            k1 = lp - torch.stack([ref[0][a], ref[1][a, b]])
            exact = exact + lp.sum().exp() * k1.sum()
            shaped = kl_in_reward(torch.zeros(1, 2), k1[None], mask, 1.0)[0]
            to_go = torch.stack([shaped.sum(), shaped[1]])
            surrogate = surrogate + lp.sum().exp().detach() * (to_go * lp).sum()
    for found, wanted in zip(
        torch.autograd.grad(surrogate, theta, retain_graph=True), torch.autograd.grad(exact, theta), strict=True
    ):
        torch.testing.assert_close(found, -wanted)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_masked_values_never_leak(bad):
    rewards, kl, mask = batch()
    dirty = kl_in_reward(torch.where(mask, rewards, bad), torch.where(mask, kl, bad), mask, 0.1)
    assert torch.equal(dirty, kl_in_reward(rewards, kl, mask, 0.1)) and dirty[~mask].abs().max() == 0


def test_kl_in_reward_gives_no_gradient_and_takes_bfloat16():
    rewards, kl, mask = batch()
    assert not kl_in_reward(rewards, kl.requires_grad_(), mask, 0.1).requires_grad
    low = kl_in_reward(rewards.bfloat16(), kl.bfloat16(), mask, 0.1)
    assert low.dtype == torch.float32
    assert torch.equal(low, kl_in_reward(rewards.bfloat16().float(), kl.bfloat16().float(), mask, 0.1))
    assert kl_in_reward(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 3).bool(), 0.1).shape == (0, 3)


# --- overlong_penalty


@FEW
@given(
    lengths=st.lists(st.integers(0, 60), max_size=8),
    buffer=st.integers(0, 40),
    penalty=st.sampled_from([0.0, 0.5, 2.0]),
)
def test_overlong_penalty_equals_the_loop(lengths, buffer, penalty):
    out = overlong_penalty(torch.tensor(lengths, dtype=torch.long), 40, buffer, penalty)
    expected = naive.overlong_penalty(torch.tensor(lengths), 40, buffer, penalty).tolist()
    assert out.dtype == torch.float32 and out.tolist() == pytest.approx(expected, abs=1e-6)


def test_overlong_penalty_golden():
    lengths = torch.tensor([0, 12, 16, 18, 20, 21, 400])
    torch.testing.assert_close(overlong_penalty(lengths, 20, 4), torch.tensor([0.0, 0, 0, -0.5, -1, -1, -1]))
    torch.testing.assert_close(overlong_penalty(lengths, 20, 0, 3.0), torch.tensor([0.0, 0, 0, 0, 0, -3, -3]))
    assert overlong_penalty(lengths.double(), 20, 4).dtype == torch.float64


# --- controllers


def test_adaptive_kl_coef_golden():
    assert adaptive_kl_coef(0.2, 6.6, 6.0, 100, 10) == pytest.approx(0.2 * 1.01)  # 10% above: e = 0.1
    assert adaptive_kl_coef(0.2, 600.0, 6.0, 100, 10) == pytest.approx(0.2 * 1.02)  # e is held at 0.2
    assert adaptive_kl_coef(0.2, -1.0, 6.0, 100, 10) == pytest.approx(0.2 * 0.98)
    assert adaptive_kl_coef(0.2, math.inf, 6.0, 100, 10) == pytest.approx(0.2 * 1.02)
    assert adaptive_kl_coef(0.2, 6.0, 6.0, 100, 10) == 0.2 and adaptive_kl_coef(0.2, 9.0, 6.0, 100, 0) == 0.2
    assert adaptive_kl_coef(1.0, 7.2, 6.0, 10) == pytest.approx(1.02)  # the paper's K of 0.1 an update


@FEW
@given(coef=st.floats(1e-6, 10), kl=st.floats(-5, 50), target=st.floats(0.01, 10), steps=st.floats(0, 499))
def test_adaptive_kl_coef_moves_towards_the_target(coef, kl, target, steps):
    after = adaptive_kl_coef(coef, kl, target, 100, steps)
    assert after > 0 and (after - coef) * (kl - target) >= 0


def test_adaptive_kl_holds_its_target():
    """A policy whose KL is 1 / coef: the controller finds the coefficient whose KL is the target."""
    controller = AdaptiveKL(kl_coef=1.0, target=4.0, horizon=10)
    for _ in range(200):
        controller.update(1 / controller.kl_coef)
    assert controller.kl_coef == pytest.approx(0.25, rel=1e-2)


def test_controllers_return_save_and_restore():
    fixed, adaptive = FixedKL(0.1), AdaptiveKL(0.1, target=6.0, horizon=100)
    assert fixed.update(50.0, 10) == fixed.kl_coef == 0.1
    assert adaptive.update(torch.tensor(50.0), 10) == adaptive.kl_coef == pytest.approx(0.102)
    for controller in (fixed, adaptive):
        copy = type(controller)(**json.loads(json.dumps(vars(controller))))
        assert copy == controller and copy.update(1.0, 10) == controller.update(1.0, 10)


def test_no_value_is_read_on_the_host():
    with FakeTensorMode():
        x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
        kl_in_reward(x, x, mask, x.sum())
        overlong_penalty(mask.sum(1), 10, 4)


FLOAT, BOOL = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: kl_in_reward(torch.zeros(3), FLOAT, BOOL, 0.1), "rewards"),
        (lambda: kl_in_reward(FLOAT, torch.zeros(2, 2), BOOL, 0.1), "kl"),
        (lambda: kl_in_reward(FLOAT, FLOAT, FLOAT, 0.1), "mask"),
        (lambda: kl_in_reward(FLOAT, FLOAT, BOOL, -0.1), "kl_coef"),
        (lambda: kl_in_reward(FLOAT, FLOAT, BOOL, torch.zeros(2)), "kl_coef"),
        (lambda: overlong_penalty(FLOAT, 10, 4), "lengths"),
        (lambda: overlong_penalty(torch.zeros(2), 0, 0), "max_length"),
        (lambda: overlong_penalty(torch.zeros(2), 10, 11), "buffer"),
        (lambda: overlong_penalty(torch.zeros(2), 10, -1), "buffer"),
        (lambda: overlong_penalty(torch.zeros(2), 10, 4, -1.0), "penalty"),
        (lambda: adaptive_kl_coef(-1.0, 1.0, 1.0, 10), "kl_coef"),
        (lambda: adaptive_kl_coef(1.0, math.nan, 1.0, 10), "kl"),
        (lambda: adaptive_kl_coef(1.0, 1.0, 0.0, 10), "target"),
        (lambda: adaptive_kl_coef(1.0, 1.0, 1.0, 0), "horizon"),
        (lambda: adaptive_kl_coef(1.0, 1.0, 1.0, 10, 50), "steps"),
        (lambda: adaptive_kl_coef(1.0, 1.0, 1.0, 10, -1), "steps"),
        (lambda: AdaptiveKL(1.0, 1.0, 10).update(math.nan), "kl"),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        call()
