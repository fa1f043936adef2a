"""Losses on preference pairs and on single responses, their inputs and their statistics."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pair_losses import EVERY, WITH_LENGTHS, WITH_REFERENCE, arguments
from preference_pairs import pairs

from rlkit.losses.preference import (
    apo_zero_loss,
    bradley_terry_loss,
    dpo_loss,
    hinge_dpo_loss,
    ipo_loss,
    kto_kl_estimate,
    kto_loss,
    orpo_loss,
    preference_stats,
    reward_centring_loss,
    robust_dpo_loss,
    sequence_logprobs,
    sequence_mean_logprobs,
    simpo_loss,
    slic_loss,
)

FEW = settings(max_examples=25, deadline=None, derandomize=True)


# --- values and gradients


def test_golden():
    def row(*numbers):
        return torch.tensor(numbers)

    w, v, rw, rv = row(-3.0, -3.0), row(-5.0, -5.0), row(-4.0, -2.0), row(-4.0, -5.0)  # h = 2 and -1
    softplus_minus, softplus_one = math.log(1 + math.exp(-2)), math.log(1 + math.e)
    torch.testing.assert_close(dpo_loss(w, v, rw, rv, beta=1.0), row(softplus_minus, softplus_one))
    torch.testing.assert_close(  # the flipped side adds x to softplus(-x)
        dpo_loss(w, v, rw, rv, 1.0, 0.25), row(softplus_minus + 0.5, softplus_one - 0.25)
    )
    torch.testing.assert_close(robust_dpo_loss(w, v, rw, rv, 1.0, 0.25), row(softplus_minus - 1.0, softplus_one + 0.5))
    torch.testing.assert_close(ipo_loss(w, v, rw, rv, beta=0.25), row(0.0, 9.0))
    torch.testing.assert_close(hinge_dpo_loss(w, v, rw, rv, beta=0.25), row(0.5, 1.25))
    torch.testing.assert_close(slic_loss(w, v), row(0.0, 0.0))
    torch.testing.assert_close(slic_loss(w, v, margin=3.5), row(1.5, 1.5))
    third = math.log(3)  # sigmoid(log 3) = 3/4
    torch.testing.assert_close(apo_zero_loss(row(third), row(-third), row(0.0), row(0.0), 1.0), row(0.5))
    torch.testing.assert_close(apo_zero_loss(row(-third), row(-third), row(0.0), row(0.0), 1.0), row(1.0))
    lengths = torch.tensor([2]), torch.tensor([4])
    torch.testing.assert_close(  # means -1 and -2: the logit is 2 - 1
        simpo_loss(row(-2.0), row(-8.0), *lengths), row(math.log(1 + math.exp(-1)))
    )
    half, fifth = math.log(0.5), math.log(0.2)  # odds 1 and 1/4: their ratio is 4, and 4 / (1 + 4) = 4/5
    torch.testing.assert_close(orpo_loss(row(2 * half), row(4 * fifth), *lengths), row(-math.log(0.8)))
    torch.testing.assert_close(bradley_terry_loss(row(third), row(0.0)), row(-math.log(0.75)))
    torch.testing.assert_close(bradley_terry_loss(row(2 * third), row(0.0), row(third)), row(-math.log(0.75)))
    torch.testing.assert_close(reward_centring_loss(row(1.5, 1.0), row(0.5, -1.0)), row(4.0, 0.0))


def test_gradient_golden():
    """d DPO / d chosen = -beta sigmoid(-beta h), eq. 7's weight; nothing for a hinge that is met."""
    w, v = torch.tensor([math.log(3), 20.0], requires_grad=True), torch.zeros(2, requires_grad=True)
    zeros = torch.zeros(2)
    dpo_loss(w, v, zeros, zeros, beta=1.0).sum().backward()
    torch.testing.assert_close(w.grad[0], torch.tensor(-0.25))
    torch.testing.assert_close(v.grad, -w.grad)
    (grad,) = torch.autograd.grad(hinge_dpo_loss(w, v, zeros, zeros).sum(), w)
    torch.testing.assert_close(grad, torch.tensor([-0.1, 0.0]))


def test_sequence_logprobs_golden():
    lp, mask = torch.tensor([[0.0, -1.0, -3.0, 7.0]]), torch.tensor([[False, True, True, False]])
    assert sequence_logprobs(lp, mask).tolist() == [-4.0] and sequence_mean_logprobs(lp, mask).tolist() == [-2.0]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e30])
@pytest.mark.parametrize("name", EVERY)
def test_masked_values_leak_nowhere_and_mask_equals_slice(name, bad):
    """From tokens to loss: what lies outside the mask changes neither value nor gradient; nor does its being there."""
    g = torch.Generator().manual_seed(1)
    clean = -torch.rand(2, 5, generator=g, dtype=torch.float64)
    mask = torch.tensor([[False, True, True, True, False], [False, False, True, True, False]])
    ref = torch.tensor([-1.5, -1.0], dtype=torch.float64)

    def loss(tokens, masks):
        chosen, rejected = (sequence_logprobs(x[None], m[None]) for x, m in zip(tokens, masks, strict=True))
        data = (chosen, rejected, ref[:1], ref[1:], *(m.sum()[None] for m in masks))
        return EVERY[name](*arguments(name, data))

    dirty = torch.where(mask, clean, bad).requires_grad_()
    out = loss(dirty, mask)
    out.sum().backward()
    sliced = [clean[b, mask[b]].requires_grad_() for b in range(2)]
    expected = loss(sliced, [torch.ones_like(x, dtype=torch.bool) for x in sliced])
    torch.testing.assert_close(out, expected)
    expected.sum().backward()
    torch.testing.assert_close(dirty.grad[mask], torch.cat([x.grad for x in sliced]))
    assert dirty.grad[~mask].abs().max() == 0


# --- identities


def test_equal_policy_and_reference():
    w, v, *_ = pairs()
    target = torch.full_like(w, math.log(2))
    torch.testing.assert_close(dpo_loss(w, v, w, v), target)
    torch.testing.assert_close(dpo_loss(w, v, w, v, 0.7, 0.3), target)
    torch.testing.assert_close(robust_dpo_loss(w, v, w, v), target)
    torch.testing.assert_close(ipo_loss(w, v, w, v, 0.5), torch.ones_like(w))
    torch.testing.assert_close(hinge_dpo_loss(w, v, w, v), torch.ones_like(w))
    torch.testing.assert_close(apo_zero_loss(w, v, w, v), torch.ones_like(w))
    torch.testing.assert_close(kto_loss(w, w, v > w, 0.0), torch.full_like(w, 0.5))


@FEW
@given(seed=st.integers(0, 999), beta=st.floats(0.01, 2.0), flip=st.floats(0.0, 0.4))
def test_swapping_chosen_and_rejected_mirrors(seed, beta, flip):
    """-log s(x) and -log s(-x) are x apart; smoothing mixes the two; the robust loss's mean over flips is DPO's."""
    w, v, rw, rv, n, m = pairs(seed)
    there, back = dpo_loss(w, v, rw, rv, beta), dpo_loss(v, w, rv, rw, beta)
    torch.testing.assert_close(back - there, beta * ((w - rw) - (v - rv)))
    torch.testing.assert_close(dpo_loss(w, v, rw, rv, beta, flip), (1 - flip) * there + flip * back)
    mean = (1 - flip) * robust_dpo_loss(w, v, rw, rv, beta, flip) + flip * robust_dpo_loss(v, w, rv, rw, beta, flip)
    torch.testing.assert_close(mean, there)
    target = 1 / (2 * beta)
    torch.testing.assert_close(
        ipo_loss(w, v, rw, rv, beta) - ipo_loss(v, w, rv, rw, beta), -4 * target * ((w - rw) - (v - rv))
    )
    torch.testing.assert_close(
        orpo_loss(w, v, n, m).neg().exp() + orpo_loss(v, w, m, n).neg().exp(), torch.ones_like(w)
    )
    torch.testing.assert_close(
        apo_zero_loss(w, v, rw, rv, beta) + apo_zero_loss(v, w, rv, rw, beta), 2 * torch.ones_like(w)
    )


@FEW
@given(seed=st.integers(0, 999), beta=st.floats(0.1, 5.0), gamma=st.floats(0.0, 3.0))
def test_simpo_scaling(seed, beta, gamma):
    """Beta times the log-probabilities is beta; so are lengths cut by it; without gamma it is DPO of means alone."""
    w, v, _, _, n, m = pairs(seed)
    expected = simpo_loss(w, v, n, m, beta, gamma)
    torch.testing.assert_close(simpo_loss(beta * w, beta * v, n, m, 1.0, gamma), expected)
    torch.testing.assert_close(simpo_loss(w, v, 2 * n, 2 * m, 2 * beta, gamma), expected)
    zeros = torch.zeros_like(w)
    torch.testing.assert_close(simpo_loss(w, v, n, m, beta, 0.0), dpo_loss(w / n, v / m, zeros, zeros, beta))
    torch.testing.assert_close(
        simpo_loss(w, v, n, m, beta, gamma), bradley_terry_loss(beta * w / n, beta * v / m, zeros + gamma)
    )


def test_relations_between_the_losses():
    w, v, rw, rv, n, m = pairs()
    torch.testing.assert_close(dpo_loss(w, v, rw, rv, 0.4), bradley_terry_loss(0.4 * (w - rw), 0.4 * (v - rv)))
    zeros = torch.zeros_like(w)
    torch.testing.assert_close(slic_loss(w, v, 2.5), 2.5 * hinge_dpo_loss(w, v, zeros, zeros, 1 / 2.5))
    penalised = dpo_loss(w + 0.02 / 0.4 * n, v + 0.02 / 0.4 * m, rw, rv, 0.4)  # R-DPO, as the docstring has it
    expected = [-(0.4 * (w[i] - rw[i] - v[i] + rv[i]) + 0.02 * (n[i] - m[i])).sigmoid().log() for i in range(7)]
    torch.testing.assert_close(penalised, torch.stack(expected))


def test_ipo_of_means_is_its_length_averaged_form():
    lp = torch.tensor([[-1.0, -3.0, 0.0], [-2.0, -2.0, -5.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    zero = torch.zeros(1)
    sums, means = sequence_logprobs(lp, mask), sequence_mean_logprobs(lp, mask)
    torch.testing.assert_close(ipo_loss(sums[:1], sums[1:], zero, zero, 0.5), torch.tensor([16.0]))  # (5 - 1)^2
    torch.testing.assert_close(ipo_loss(means[:1], means[1:], zero, zero, 0.5), torch.tensor([0.0]))  # (1 - 1)^2


def test_references_get_no_gradient():
    for name, loss in WITH_REFERENCE.items():
        data = [x.detach().requires_grad_() for x in pairs()[:4]]
        loss(*data).sum().backward()
        assert [x.grad is not None for x in data] == [True, True, False, False], name
    rewards, margin = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    bradley_terry_loss(rewards, torch.zeros(2), margin).sum().backward()
    assert rewards.grad is not None and margin.grad is None


# --- numbers at the edge


@pytest.mark.parametrize("far", [1e4, -1e4, 1e8, -1e8])
@pytest.mark.parametrize("name", EVERY)
def test_extreme_margins(name, far):
    for where in (0, 1):
        for dtype in (torch.float32, torch.float64):
            data = [x.detach() for x in pairs(dtype=dtype)]
            data[where] = data[where] + (far if name in WITH_REFERENCE else -abs(far))
            data[0].requires_grad_()
            data[1].requires_grad_()
            loss = EVERY[name](*arguments(name, data))
            loss.sum().backward()
            assert loss.isfinite().all() and data[0].grad.isfinite().all() and data[1].grad.isfinite().all()


@pytest.mark.parametrize("far", [1e4, -1e4])
def test_extreme_rewards_and_responses(far):
    x = torch.tensor([far, 1.0], requires_grad=True)
    zero, good = torch.zeros(2), torch.tensor([True, False])
    losses = (
        bradley_terry_loss(x, zero),
        slic_loss(x, zero),
        kto_loss(x, zero, good, 0.0),
        kto_loss(x, zero, ~good, 0.0),
    )
    for loss in losses:
        (grad,) = torch.autograd.grad(loss.sum(), x)
        assert loss.isfinite().all() and grad.isfinite().all()
    torch.testing.assert_close(losses[0][0], torch.tensor(max(0.0, -far)))


def test_dpo_is_linear_far_out():
    zero, h = torch.zeros(1), torch.tensor([-1e4], requires_grad=True)
    loss = dpo_loss(h, zero, zero, zero)
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.tensor([1e3]))
    torch.testing.assert_close(h.grad, torch.tensor([-0.1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orpo_of_certain_responses(dtype):
    """p = 1 has infinite odds: they count as e^20, with gradient 0 at that answer, and nothing is nan."""
    lp = torch.tensor([0.0, -2.0, 0.0], dtype=dtype, requires_grad=True)
    other = torch.tensor([-2.0, 0.0, 0.0], dtype=dtype, requires_grad=True)
    n = torch.full((3,), 2)
    loss = orpo_loss(lp, other, n, n)
    loss.sum().backward()
    log_odds = -1 - math.log(1 - math.exp(-1))
    expected = [math.log1p(math.exp(log_odds - 20)), math.log1p(math.exp(20 - log_odds)), math.log(2)]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=dtype))
    assert lp.grad[[0, 2]].abs().sum() == 0 and other.grad[1:].abs().sum() == 0
    torch.testing.assert_close(lp.grad[1], torch.tensor(-0.5 / (1 - math.exp(-1)), dtype=dtype))


def test_orpo_near_certainty_is_exact_in_float32():
    lp = torch.tensor([-1e-6])
    one = torch.ones(1, dtype=torch.long)
    exact = orpo_loss(torch.tensor([-1.0]).double(), lp.double(), one, one)
    torch.testing.assert_close(orpo_loss(torch.tensor([-1.0]), lp, one, one), exact.float(), rtol=1e-5, atol=0)


def test_a_length_of_zero_counts_as_one():
    zero, one = torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.long)
    for loss in WITH_LENGTHS.values():
        lp = torch.tensor([-1.0])
        torch.testing.assert_close(loss(lp, 2 * lp, zero, zero), loss(lp, 2 * lp, one, one))


@FEW
@given(numbers=st.lists(st.floats(-1e6, 0, width=32), min_size=4, max_size=4), beta=st.floats(0.01, 10))
def test_any_log_probabilities_stay_finite(numbers, beta):
    data = [torch.tensor([x], requires_grad=True) for x in numbers]
    lengths = torch.tensor([3]), torch.tensor([1])
    losses = [loss(*data, beta) for loss in (dpo_loss, robust_dpo_loss, ipo_loss, hinge_dpo_loss, apo_zero_loss)]
    losses += [orpo_loss(*data[:2], *lengths), simpo_loss(*data[:2], *lengths, beta)]
    losses += [kto_loss(*data[:2], torch.tensor([True]), 0.0, beta)]
    for loss in losses:
        grads = torch.autograd.grad(loss.sum(), data[0])
        assert loss.isfinite().all() and grads[0].isfinite().all()


def test_no_pairs():
    empty, none = torch.zeros(0, requires_grad=True), torch.zeros(0, dtype=torch.long)
    losses = [loss(empty, empty, empty, empty) for loss in WITH_REFERENCE.values()]
    losses += [loss(empty, empty, none, none) for loss in WITH_LENGTHS.values()]
    losses += [slic_loss(empty, empty), kto_loss(empty, empty, none.bool(), 0.0)]
    losses += [bradley_terry_loss(empty, empty, empty), reward_centring_loss(empty, empty)]
    for loss in losses:
        loss.sum().backward()
        assert loss.shape == (0,) and empty.grad.shape == (0,)
    assert sequence_logprobs(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)).shape == (0,)
    assert sequence_mean_logprobs(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)).tolist() == [0, 0]
    assert all(x == 0 for x in preference_stats(empty, empty).values())


def test_bfloat16_inputs():
    data = [x.detach() for x in pairs(dtype=torch.bfloat16)]
    wide = [x.float() if x.is_floating_point() else x for x in data]
    for name, loss in EVERY.items():
        out = loss(*arguments(name, data))
        assert out.dtype == torch.float32, name
        torch.testing.assert_close(out, loss(*arguments(name, wide)))
    good = data[0] > -10
    assert kto_loss(data[0], data[2], good, 0.0).dtype == torch.float32
    for loss in (slic_loss, bradley_terry_loss, reward_centring_loss):
        assert loss(*data[:2]).dtype == torch.float32
        torch.testing.assert_close(loss(*data[:2]), loss(*wide[:2]))
    tokens = torch.full((1, 1000), -1.0078125, dtype=torch.bfloat16)  # summed in bfloat16 it would round
    torch.testing.assert_close(
        sequence_logprobs(tokens, torch.ones(1, 1000, dtype=torch.bool)), torch.tensor([-1007.8125])
    )


@pytest.mark.parametrize("name", [*EVERY, "kto", "bradley_terry", "slic"])
def test_compiles_without_a_graph_break(name):
    data = pairs(p=3)
    if name == "kto":
        loss, given_to = kto_loss, (data[0], data[2], data[1] > data[0], 0.5)
    elif name in EVERY:
        loss, given_to = EVERY[name], arguments(name, data)
    else:
        loss, given_to = {"bradley_terry": bradley_terry_loss, "slic": slic_loss}[name], data[:2]
    compiled = torch.compile(loss, backend="eager", fullgraph=True)(*given_to)
    torch.testing.assert_close(compiled, loss(*given_to))
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), data[0]) for x in (compiled, loss(*given_to))))


# --- statistics


def test_preference_stats_golden_and_parts_add_up():
    up = torch.tensor([1.0, 2.0, -1.0, 0.5], requires_grad=True)
    down = torch.tensor([0.0, 2.0, 1.0, 0.0])
    stats = preference_stats(up, down)
    golden = {"accuracy": 0.5, "margin": -0.125, "chosen": 0.625, "rejected": 0.75}
    assert {k: v.item() for k, v in stats.items()} == {f"preference/{k}": v for k, v in golden.items()}
    assert all(v.ndim == 0 and not v.requires_grad and v.dtype == torch.float32 for v in stats.values())
    for total in (4, torch.tensor(4)):
        parts = preference_stats(up[:1], down[:1], total), preference_stats(up[1:], down[1:], total)
        for key, whole in stats.items():
            torch.testing.assert_close(parts[0][key] + parts[1][key], whole)
    assert all(v == 0 for v in preference_stats(up, down, 0).values())


# --- errors
ONE, TWO, INT = torch.zeros(2), torch.zeros(3), torch.ones(2, dtype=torch.long)
FOUR = (ONE,) * 4


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: sequence_logprobs(torch.zeros(3), torch.ones(3, dtype=torch.bool)), "mask"),
        (lambda: sequence_logprobs(torch.zeros(2, 3), torch.ones(2, 3)), "mask"),
        (lambda: sequence_mean_logprobs(torch.zeros(2, 2), torch.ones(2, 3, dtype=torch.bool)), "logprobs"),
        (lambda: dpo_loss(ONE, TWO, ONE, ONE), "rejected"),
        (lambda: dpo_loss(INT, ONE, ONE, ONE), "chosen"),
        (lambda: dpo_loss(torch.zeros(2, 1), ONE, ONE, ONE), "chosen"),
        (lambda: dpo_loss(ONE, ONE, TWO, ONE), "ref_chosen"),
        (lambda: dpo_loss(ONE, ONE, ONE, TWO), "ref_rejected"),
        (lambda: dpo_loss(*FOUR, beta=0.0), "beta"),
        (lambda: dpo_loss(*FOUR, label_smoothing=0.5), "label_smoothing"),
        (lambda: dpo_loss(*FOUR, label_smoothing=-0.1), "label_smoothing"),
        (lambda: robust_dpo_loss(*FOUR, label_smoothing=0.5), "label_smoothing"),
        (lambda: robust_dpo_loss(*FOUR, beta=-1.0), "beta"),
        (lambda: ipo_loss(*FOUR, beta=0.0), "beta"),
        (lambda: ipo_loss(ONE, TWO, ONE, ONE), "rejected"),
        (lambda: hinge_dpo_loss(*FOUR, beta=math.nan), "beta"),
        (lambda: apo_zero_loss(*FOUR, beta=0.0), "beta"),
        (lambda: slic_loss(ONE, TWO), "rejected"),
        (lambda: slic_loss(ONE, ONE, -1.0), "margin"),
        (lambda: simpo_loss(ONE, ONE, ONE, INT), "chosen_lengths"),
        (lambda: simpo_loss(ONE, ONE, INT, INT[:1]), "rejected_lengths"),
        (lambda: simpo_loss(ONE, ONE, INT, INT, beta=0.0), "beta"),
        (lambda: simpo_loss(ONE, ONE, INT, INT, gamma=-1.0), "gamma"),
        (lambda: orpo_loss(ONE, ONE, INT, INT.bool()), "rejected_lengths"),
        (lambda: orpo_loss(ONE, TWO, INT, INT), "rejected"),
        (lambda: kto_loss(ONE, TWO, INT.bool(), 0.0), "ref_logprobs"),
        (lambda: kto_loss(ONE, ONE, INT, 0.0), "desirable"),
        (lambda: kto_loss(ONE, ONE, INT[:1].bool(), 0.0), "desirable"),
        (lambda: kto_loss(ONE, ONE, INT.bool(), torch.zeros(2)), "kl"),
        (lambda: kto_loss(ONE, ONE, INT.bool(), -0.1), "kl"),
        (lambda: kto_loss(ONE, ONE, INT.bool(), 0.0, beta=0.0), "beta"),
        (lambda: kto_loss(ONE, ONE, INT.bool(), 0.0, desirable_weight=-1.0), "desirable_weight"),
        (lambda: kto_loss(ONE, ONE, INT.bool(), 0.0, undesirable_weight=-1.0), "undesirable_weight"),
        (lambda: kto_kl_estimate(ONE, TWO), "ref_logprobs"),
        (lambda: bradley_terry_loss(ONE, TWO), "rejected_rewards"),
        (lambda: bradley_terry_loss(ONE, ONE, TWO), "margin"),
        (lambda: reward_centring_loss(INT, ONE), "chosen_rewards"),
        (lambda: preference_stats(ONE, TWO), "rejected_rewards"),
        (lambda: preference_stats(ONE, ONE, -1), "total"),
        (lambda: preference_stats(ONE, ONE, ONE), "total"),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        call()
