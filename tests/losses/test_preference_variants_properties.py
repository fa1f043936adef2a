"""The less common losses on preference pairs, LD-DPO and WPO: relations, edges and errors."""

import math
from functools import partial

import preference_pairs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from preference_pairs import EVERY, SMOOTHED, SORTED, WITH_LENGTHS, WITH_REFERENCE, arguments
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Bernoulli, kl_divergence

from rlkit.losses.preference import dpo_loss, ipo_loss, sequence_logprobs, simpo_loss
from rlkit.losses.preference_variants import (
    alpha_divergence_dpo_loss,
    alphapo_loss,
    aot_loss,
    aot_unpaired_loss,
    apo_down_loss,
    bco_loss,
    discopop_loss,
    exo_loss,
    forward_kl_dpo_loss,
    js_dpo_loss,
    ld_sequence_logprobs,
    nca_loss,
    sppo_loss,
    wpo_weights,
)

FEW = settings(max_examples=25, deadline=None, derandomize=True)
pairs = partial(preference_pairs.pairs, spread=3)


LOG2, LOG3 = math.log(2), math.log(3)  # sigmoid(log 2) = 2/3, sigmoid(log 3) = 3/4


def row(*numbers):
    return torch.tensor(numbers)


# --- identities


@FEW
@given(seed=st.integers(0, 999), beta=st.floats(0.01, 2.0), epsilon=st.floats(1e-4, 0.4))
def test_exo_is_a_reverse_kl(seed, beta, epsilon):
    w, v, rw, rv, *_ = (x.detach() for x in pairs(seed))
    loss = exo_loss(w, v, rw, rv, beta, epsilon)
    truth = Bernoulli(probs=torch.full_like(w, 1 - epsilon))
    torch.testing.assert_close(loss, kl_divergence(Bernoulli(logits=beta * (w - rw - v + rv)), truth))
    best = math.log((1 - epsilon) / epsilon) / beta
    torch.testing.assert_close(exo_loss(rw + best, rv, rw, rv, beta, epsilon), torch.zeros_like(w))
    far = row(1e5, -1e5).double()
    limits = row(-math.log1p(-epsilon), -math.log(epsilon)).double()
    torch.testing.assert_close(exo_loss(far, 0 * far, 0 * far, 0 * far, beta, epsilon), limits, rtol=1e-5, atol=1e-7)


@FEW
@given(seed=st.integers(0, 999), beta=st.floats(0.01, 2.0), delta=st.floats(-3, 3))
def test_relations_between_the_losses(seed, beta, delta):
    w, v, rw, rv, *_ = pairs(seed)
    zeros, data = torch.zeros_like(w), (w, v, rw, rv)
    both = ipo_loss(w, zeros, rw, zeros, beta) + ipo_loss(zeros, v, zeros, rv, beta)
    torch.testing.assert_close(sppo_loss(*data, beta), both)
    own = bco_loss(w, w, rw, rw, 0.0, beta)
    torch.testing.assert_close(nca_loss(*data, beta), 0.5 * bco_loss(*data, 0.0, beta) + 0.5 * own)
    shifted = bco_loss(w + delta / beta, v + delta / beta, rw, rv, delta, beta)
    torch.testing.assert_close(shifted, bco_loss(*data, 0, beta))
    torch.testing.assert_close(
        bco_loss(*data, torch.tensor(delta, dtype=torch.float64), beta), bco_loss(*data, delta, beta)
    )
    assert (bco_loss(*data, delta, beta) >= dpo_loss(*data, beta)).all()  # the paper's bound, for any shift
    mean = (bco_loss(*data, delta, beta), bco_loss(w, v.roll(1), rw, rv.roll(1), delta, beta))
    torch.testing.assert_close(mean[0].sum(), mean[1].sum())  # the two responses need not share a prompt
    torch.testing.assert_close(apo_down_loss(w, w, rw, rw, beta), 0.5 + (beta * (w - rw)).sigmoid())


@FEW
@given(seed=st.integers(0, 999), beta=st.floats(0.01, 2.0))
def test_alpha_runs_from_dpo_to_forward_kl(seed, beta):
    w, v, rw, rv, n, m = pairs(seed)
    torch.testing.assert_close(alpha_divergence_dpo_loss(w, v, rw, rv, beta, 0.0), dpo_loss(w, v, rw, rv, beta))
    near = alpha_divergence_dpo_loss(w, v, rw, rv, beta, 1e-13)
    torch.testing.assert_close(near, dpo_loss(w, v, rw, rv, beta), rtol=1e-6, atol=1e-6)
    one, forward = alpha_divergence_dpo_loss(w, v, rw, rv, beta, 1.0), forward_kl_dpo_loss(w, v, rw, rv, beta)
    torch.testing.assert_close(one, forward)
    assert (alpha_divergence_dpo_loss(w, v, rw, rv, beta) != forward).any()
    torch.testing.assert_close(alphapo_loss(w, v, n, m, 0.0, beta, 0.3), simpo_loss(w, v, n, m, beta, 0.3))
    near = alphapo_loss(w, v, n, m, 1e-13, beta, 0.3)
    torch.testing.assert_close(near, simpo_loss(w, v, n, m, beta, 0.3), rtol=1e-6, atol=1e-6)
    again = alpha_divergence_dpo_loss(w / n, v / m, 0 * w, 0 * v, beta, 0.25)  # AlphaPO of means, with no reference
    torch.testing.assert_close(alphapo_loss(w, v, n, m, 0.25, beta, 0.0), again)


@FEW
@given(seed=st.integers(0, 999), beta=st.floats(0.01, 2.0))
def test_swapping_chosen_and_rejected_mirrors(seed, beta):
    """Two win rates that add up to 1; the reward of JS is bounded by beta log 2, so its loss is too."""
    w, v, rw, rv, n, m = pairs(seed)
    for loss in (js_dpo_loss, forward_kl_dpo_loss, partial(alpha_divergence_dpo_loss, alpha=0.3)):
        there, back = loss(w, v, rw, rv, beta), loss(v, w, rv, rw, beta)
        torch.testing.assert_close((-there).exp() + (-back).exp(), torch.ones_like(w))
    there, back = alphapo_loss(w, v, n, m, 0.5, beta, 0.0), alphapo_loss(v, w, m, n, 0.5, beta, 0.0)
    torch.testing.assert_close((-there).exp() + (-back).exp(), torch.ones_like(w))
    sure = js_dpo_loss(rw + 1e4, rv, rw, rv, beta)
    torch.testing.assert_close(sure, torch.full_like(sure, math.log(1 + math.exp(-beta * LOG2))))


def test_discopop_at_both_ends_of_tau():
    h = torch.tensor([-9.0, -1.0, -0.1, 0.1, 1.0, 9.0], dtype=torch.float64)
    zeros = torch.zeros_like(h)
    logistic, exponential = (1 + (-h).exp()).log(), (-h).exp()
    cold, warm = (discopop_loss(h, zeros, zeros, zeros, 1.0, tau) for tau in (1e-4, 1e9))
    torch.testing.assert_close(cold, torch.where(h < 0, logistic, exponential))
    torch.testing.assert_close(warm, (logistic + exponential) / 2)


def test_equal_policy_and_reference():
    w, v, *_ = pairs()
    golden = {"apo_down": 1.0, "nca": 2 * LOG2, "sppo": 50.0, "discopop": 0.5 * LOG2 + 0.5}
    golden |= dict.fromkeys(["js", "alpha", "forward_kl", "aot_unpaired", "aot", "aot_smoothed"], LOG2)
    for name, value in golden.items():
        torch.testing.assert_close(EVERY[name](w, v, w, v), torch.full_like(w, value))


def test_a_quantile_of_one_pair_is_dpo():
    w, v, rw, rv, *_ = pairs(p=1)
    for loss in (aot_loss, aot_unpaired_loss):
        torch.testing.assert_close(loss(w, v, rw, rv, 0.3, 0.2), dpo_loss(w, v, rw, rv, 0.3, 0.2))
    many = pairs(3, p=9)[:4]
    for loss in (aot_loss, aot_unpaired_loss):  # more than one pair: not DPO of each, and not free of the split
        whole, parts = loss(*many), torch.cat([loss(*(x[k : k + 3] for x in many)) for k in (0, 3, 6)])
        assert not torch.isclose(whole.sum(), parts.sum()) and not torch.isclose(whole.sum(), dpo_loss(*many).sum())


@FEW
@given(seed=st.integers(0, 999), shift=st.integers(1, 6))
def test_permutations(seed, shift):
    """Pairs in another order: the same entries there, and AOT's stay; its sides may even be shuffled apart."""
    data = pairs(seed)
    order, other = torch.randperm(7, generator=torch.Generator().manual_seed(seed)), torch.arange(7).roll(shift)
    for name, loss in EVERY.items():
        given_to = arguments(name, data)
        whole, moved = loss(*given_to), loss(*(x[order] for x in given_to))
        torch.testing.assert_close(moved, whole if name in {**SORTED, **SMOOTHED} else whole[order])
    w, v, rw, rv, *_ = data
    torch.testing.assert_close(aot_loss(w[order], v[order], rw[other], rv[other]), aot_loss(w, v, rw, rv))
    torch.testing.assert_close(
        aot_unpaired_loss(w[order], v[other], rw[order], rv[other]), aot_unpaired_loss(w, v, rw, rv)
    )


def test_ld_at_both_ends():
    g = torch.Generator().manual_seed(2)
    lp, mask = -torch.rand(3, 6, generator=g), torch.rand(3, 6, generator=g) < 0.7
    lengths = mask.sum(1)
    whole = sequence_logprobs(lp, mask)
    torch.testing.assert_close(ld_sequence_logprobs(lp, mask, lengths // 2, 1.0), whole)
    torch.testing.assert_close(ld_sequence_logprobs(lp, mask, lengths, 0.0), whole)
    torch.testing.assert_close(ld_sequence_logprobs(lp, mask, 0 * lengths, 0.25), 0.25 * whole)


def test_wpo_weights_of_a_uniform_policy_are_one():
    mask = torch.tensor([[True, True, False], [False, False, False]])
    weights = wpo_weights(torch.full((2, 3), -math.log(8), requires_grad=True), torch.full((2, 3), 1 / 8), mask)
    torch.testing.assert_close(weights, torch.ones(2))
    assert not weights.requires_grad


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e30])
def test_masked_values_leak_nowhere_and_mask_equals_slice(bad):
    mask = torch.tensor([[False, True, True, True, False], [False, False, True, True, False]])
    clean = -torch.rand(2, 5, generator=torch.Generator().manual_seed(1))
    dirty, sums = torch.where(mask, clean, bad).requires_grad_(), torch.where(mask, -clean, bad)
    shared = torch.tensor([2, 1])
    loss = ld_sequence_logprobs(dirty, mask, shared)
    loss.sum().backward()
    assert dirty.grad[~mask].abs().max() == 0 and dirty.grad[mask].tolist() == [1.0, 1.0, 0.5, 1.0, 0.5]
    weights = wpo_weights(dirty, sums, mask)
    for b in range(2):
        part = clean[b : b + 1, mask[b]]
        every = torch.ones_like(part, dtype=torch.bool)
        torch.testing.assert_close(loss[b : b + 1], ld_sequence_logprobs(part, every, shared[b : b + 1]))
        torch.testing.assert_close(weights[b : b + 1], wpo_weights(part, -part, every))


def test_references_and_shifts_get_no_gradient():
    for name, loss in WITH_REFERENCE.items():
        data = [x.detach().requires_grad_() for x in pairs()[:4]]
        loss(*data).sum().backward()
        assert [x.grad is not None for x in data] == [True, True, False, False], name
    delta = torch.tensor(0.2, requires_grad=True)
    bco_loss(*data, delta).sum().backward()
    assert delta.grad is None


# --- numbers at the edge


@pytest.mark.parametrize("far", [1e4, -1e4, 1e8, -1e8])
@pytest.mark.parametrize("name", EVERY)
def test_extreme_log_ratios(name, far):
    for where in (0, 1):
        for dtype in (torch.float32, torch.float64):
            data = [x.detach() for x in pairs(dtype=dtype)]
            data[where] = data[where] + (far if name in WITH_REFERENCE else -abs(far))
            data[0].requires_grad_()
            data[1].requires_grad_()
            loss = EVERY[name](*arguments(name, data))
            loss.sum().backward()
            assert loss.isfinite().all() and data[0].grad.isfinite().all() and data[1].grad.isfinite().all()


@FEW
@given(numbers=st.lists(st.floats(-1e6, 0, width=32), min_size=4, max_size=4), beta=st.floats(0.01, 10))
def test_any_log_probabilities_stay_finite(numbers, beta):
    data = [torch.tensor([x], requires_grad=True) for x in numbers]
    lengths = torch.tensor([3]), torch.tensor([1])
    losses = [loss(*data, beta=beta) for loss in WITH_REFERENCE.values()]
    losses += [loss(*data[:2], *lengths, beta=beta) for loss in WITH_LENGTHS.values()]
    for loss in losses:
        grads = torch.autograd.grad(loss.sum(), data[:2])
        assert loss.isfinite().all() and all(grad.isfinite().all() for grad in grads)


def test_both_responses_forgotten():
    """exp(-h) is over 1e40: TRL's scores are inf - inf. Here the two are equal, and nothing moves."""
    w, v = torch.tensor([[-100.0], [-120.0]], requires_grad=True)
    zeros, one = torch.zeros(1), torch.ones(1, dtype=torch.long)
    for loss in (forward_kl_dpo_loss(w, v, zeros, zeros), alphapo_loss(w, v, one, one, alpha=1.0, gamma=0.0)):
        torch.testing.assert_close(loss, row(LOG2))
        assert all((grad == 0).all() for grad in torch.autograd.grad(loss.sum(), (w, v)))


def test_discopop_far_out_is_logistic_or_exponential():
    h, zeros = torch.tensor([-1e4, 200.0], requires_grad=True), torch.zeros(2)
    loss = discopop_loss(h, zeros, zeros, zeros)
    torch.testing.assert_close(loss, row(500.0, math.exp(-10)))
    loss.sum().backward()
    torch.testing.assert_close(h.grad, row(-0.05, -0.05 * math.exp(-10)))


def test_a_length_of_zero_counts_as_one():
    zero, one, lp = torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.long), torch.tensor([-1.0])
    torch.testing.assert_close(alphapo_loss(lp, 2 * lp, zero, zero), alphapo_loss(lp, 2 * lp, one, one))


def test_no_pairs():
    empty, none = torch.zeros(0, requires_grad=True), torch.zeros(0, dtype=torch.long)
    for name, loss in EVERY.items():
        out = loss(*arguments(name, (empty, empty, empty, empty, none, none)))
        out.sum().backward()
        assert out.shape == (0,) and empty.grad.shape == (0,)
    rows, mask = torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)
    assert ld_sequence_logprobs(rows, mask, none).shape == wpo_weights(rows, rows, mask).shape == (0,)


def test_bfloat16_inputs():
    data = [x.detach() for x in pairs(dtype=torch.bfloat16)]
    wide = [x.float() if x.is_floating_point() else x for x in data]
    for name, loss in EVERY.items():
        out = loss(*arguments(name, data))
        assert out.dtype == torch.float32, name
        torch.testing.assert_close(out, loss(*arguments(name, wide)))
    lp = torch.full((1, 1000), -1.0078125, dtype=torch.bfloat16)  # summed in bfloat16 it would round
    mask, n = torch.ones(1, 1000, dtype=torch.bool), torch.tensor([500])
    torch.testing.assert_close(ld_sequence_logprobs(lp, mask, n), row(-1.0078125 * 750))
    torch.testing.assert_close(wpo_weights(lp, lp.exp(), mask), wpo_weights(lp.float(), lp.exp().float(), mask))


@pytest.mark.parametrize("name", EVERY)
def test_compiles_without_a_graph_break_and_functional_gradient(name):
    torch.compiler.reset()  # all partials share one count of recompilations
    w, v, *rest = arguments(name, pairs(p=3))
    compiled = torch.compile(EVERY[name], backend="eager", fullgraph=True)(w, v, *rest)
    torch.testing.assert_close(compiled, EVERY[name](w, v, *rest))
    expected = torch.autograd.grad(EVERY[name](w, v, *rest).sum(), (w, v))
    torch.testing.assert_close(torch.autograd.grad(compiled.sum(), (w, v)), expected)
    functional = torch.func.grad(lambda *policy: EVERY[name](*policy, *rest).sum(), argnums=(0, 1))
    torch.testing.assert_close(functional(w.detach(), v.detach()), expected)


def test_weights_compile_and_nothing_reads_a_value():
    lp, mask, n = -torch.rand(2, 4), torch.ones(2, 4, dtype=torch.bool), torch.tensor([1, 3])
    for weigh, given_to in ((ld_sequence_logprobs, (lp, mask, n)), (wpo_weights, (lp, -lp, mask))):
        compiled = torch.compile(weigh, backend="eager", fullgraph=True)(*given_to)
        torch.testing.assert_close(compiled, weigh(*given_to))
    with FakeTensorMode():  # which holds no values
        x, n, mask = torch.zeros(2), torch.ones(2, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool)
        for name, loss in EVERY.items():
            loss(*arguments(name, (x, x, x, x, n, n)))
        bco_loss(x, x, x, x, torch.zeros(()))
        ld_sequence_logprobs(torch.zeros(2, 3), mask, n)
        wpo_weights(torch.zeros(2, 3), torch.zeros(2, 3), mask)


# --- errors

ONE, TWO, INT = torch.zeros(2), torch.zeros(3), torch.ones(2, dtype=torch.long)
FOUR, TOKENS, MASK = (ONE,) * 4, torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_errors_of_every_loss_with_a_reference(name):
    loss = WITH_REFERENCE[name]
    for given_to, wrong in (
        ((INT, ONE, ONE, ONE), "chosen"),
        ((TOKENS, ONE, ONE, ONE), "chosen"),
        ((ONE, TWO, ONE, ONE), "rejected"),
        ((ONE, ONE, TWO, ONE), "ref_chosen"),
        ((ONE, ONE, ONE, INT), "ref_rejected"),
    ):
        with pytest.raises(ValueError, match=rf"^{wrong}: expected .*, got "):
            loss(*given_to)
    for beta in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=r"^beta: expected .*, got "):
            loss(*FOUR, beta=beta)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: exo_loss(*FOUR, label_smoothing=0.0), "label_smoothing"),
        (lambda: exo_loss(*FOUR, label_smoothing=0.5), "label_smoothing"),
        (lambda: aot_loss(*FOUR, label_smoothing=0.5), "label_smoothing"),
        (lambda: aot_unpaired_loss(*FOUR, label_smoothing=-0.1), "label_smoothing"),
        (lambda: bco_loss(*FOUR, delta=ONE), "delta"),
        (lambda: bco_loss(*FOUR, delta=math.nan), "delta"),
        (lambda: discopop_loss(*FOUR, tau=0.0), "tau"),
        (lambda: alpha_divergence_dpo_loss(*FOUR, alpha=-0.1), "alpha"),
        (lambda: alphapo_loss(ONE, TWO, INT, INT), "rejected"),
        (lambda: alphapo_loss(ONE, ONE, ONE, INT), "chosen_lengths"),
        (lambda: alphapo_loss(ONE, ONE, INT, INT[:1]), "rejected_lengths"),
        (lambda: alphapo_loss(ONE, ONE, INT, INT, alpha=math.inf), "alpha"),
        (lambda: alphapo_loss(ONE, ONE, INT, INT, beta=0.0), "beta"),
        (lambda: alphapo_loss(ONE, ONE, INT, INT, gamma=-1.0), "gamma"),
        (lambda: ld_sequence_logprobs(ONE, MASK, INT), "logprobs"),
        (lambda: ld_sequence_logprobs(TOKENS, TOKENS, INT), "mask"),
        (lambda: ld_sequence_logprobs(TOKENS, MASK, ONE), "shared_lengths"),
        (lambda: ld_sequence_logprobs(TOKENS, MASK, INT[:1]), "shared_lengths"),
        (lambda: ld_sequence_logprobs(TOKENS, MASK, INT, alpha=1.1), "alpha"),
        (lambda: wpo_weights(TOKENS, ONE, MASK), "sum_pi_squared"),
        (lambda: wpo_weights(TOKENS[:1], TOKENS, MASK), "logprobs"),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        call()
