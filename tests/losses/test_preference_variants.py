"""The less common losses on preference pairs, and the weightings of LD-DPO and WPO."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
PAIRWISE = {  # an entry of the loss is a pair's
    "apo_down": partial(apo_down_loss, beta=0.3),
    "exo": partial(exo_loss, beta=0.3, label_smoothing=0.01),
    "nca": partial(nca_loss, beta=0.3),
    "sppo": partial(sppo_loss, beta=0.1),
    "bco": partial(bco_loss, delta=0.4, beta=0.3),
    "discopop": partial(discopop_loss, beta=0.3, tau=0.5),
    "discopop_wide": partial(discopop_loss, beta=0.3, tau=3.0),
    "alpha": partial(alpha_divergence_dpo_loss, beta=0.3, alpha=0.4),
    "alpha0": partial(alpha_divergence_dpo_loss, beta=0.3, alpha=0.0),
    "forward_kl": partial(forward_kl_dpo_loss, beta=0.3),
    "js": partial(js_dpo_loss, beta=0.3),
}
SORTED = {"aot": partial(aot_loss, beta=0.3), "aot_unpaired": partial(aot_unpaired_loss, beta=0.3)}
SMOOTHED = {name + "_smoothed": partial(loss, label_smoothing=0.2) for name, loss in SORTED.items()}
WITH_REFERENCE = {**PAIRWISE, **SORTED, **SMOOTHED}
WITH_LENGTHS = {"alphapo": alphapo_loss, "alphapo_minus": partial(alphapo_loss, alpha=-0.5, beta=1.3, gamma=0.4)}
EVERY = {**WITH_REFERENCE, **WITH_LENGTHS}


def pairs(seed=0, p=7, dtype=torch.float64):
    """chosen, rejected, ref_chosen, ref_rejected, chosen_lengths, rejected_lengths; the first two get gradients."""
    g = torch.Generator().manual_seed(seed)
    ref = -20 * torch.rand(2, p, generator=g, dtype=torch.float64) - 4
    policy = (ref + 3 * torch.randn(2, p, generator=g, dtype=torch.float64)).clamp(max=-0.1)
    chosen, rejected = (x.to(dtype).requires_grad_() for x in policy)
    lengths = torch.randint(1, 9, (2, p), generator=g)
    return chosen, rejected, *(x.to(dtype) for x in ref), *lengths


def arguments(name, data):
    return data[:4] if name in WITH_REFERENCE else (*data[:2], *data[4:])


# --- the loop: plain numbers, derivatives by hand


def s(x):
    return 1 / (1 + math.exp(-x))


def soft(x):
    """-log sigmoid(x); its derivative is -s(-x)."""
    return math.log(1 + math.exp(-x))


def apo_down(a, b):
    x, y = 0.3 * a, 0.3 * (a - b)
    return s(x) + s(-y), 0.3 * s(x) * s(-x) - 0.3 * s(y) * s(-y), 0.3 * s(y) * s(-y)


def exo(a, b):
    x = 0.3 * (a - b)
    slope = 0.3 * s(x) * s(-x) * (x - math.log(0.99 / 0.01))
    return s(x) * math.log(s(x) / 0.99) + s(-x) * math.log(s(-x) / 0.01), slope, -slope


def nca(a, b):
    x, y = 0.3 * a, 0.3 * b
    return soft(x) + 0.5 * soft(-x) + 0.5 * soft(-y), 0.3 * (0.5 * s(x) - s(-x)), 0.3 * 0.5 * s(y)


def sppo(a, b):
    return (a - 5) ** 2 + (b + 5) ** 2, 2 * (a - 5), 2 * (b + 5)


def bco(a, b):
    x, y = 0.3 * a - 0.4, 0.3 * b - 0.4
    return soft(x) + soft(-y), -0.3 * s(-x), 0.3 * s(y)


def discopop(tau):
    def pair(a, b):
        x = 0.3 * (a - b)
        m = s(x / tau)
        slope = -(1 - m) * s(-x) - m * math.exp(-x) + m * (1 - m) / tau * (math.exp(-x) - soft(x))
        return (1 - m) * soft(x) + m * math.exp(-x), 0.3 * slope, -0.3 * slope

    return pair


def power(alpha):
    def pair(a, b):
        z = 0.3 / alpha * (math.exp(-alpha * b) - math.exp(-alpha * a))
        return soft(z), -0.3 * s(-z) * math.exp(-alpha * a), 0.3 * s(-z) * math.exp(-alpha * b)

    return pair


def dpo(a, b):
    x = 0.3 * (a - b)
    return soft(x), -0.3 * s(-x), 0.3 * s(-x)


def smoothed(a, b):
    x = 0.3 * (a - b)
    slope = 0.3 * (0.2 * s(x) - 0.8 * s(-x))
    return 0.8 * soft(x) + 0.2 * soft(-x), slope, -slope


def js(a, b):
    z = 0.3 * math.log(s(a) / s(b))
    return soft(z), -0.3 * s(-z) * s(-a), 0.3 * s(-z) * s(-b)


def alphapo(alpha, beta, gamma):
    def pair(w, v, n, m):
        p, q = math.exp(w / n), math.exp(v / m)
        z = beta * (q**-alpha - p**-alpha) / alpha - gamma
        return soft(z), -s(-z) * beta * p**-alpha / n, s(-z) * beta * q**-alpha / m

    return pair


ORACLE = {
    "apo_down": apo_down,
    "exo": exo,
    "nca": nca,
    "sppo": sppo,
    "bco": bco,
    "discopop": discopop(0.5),
    "discopop_wide": discopop(3.0),
    "alpha": power(0.4),
    "alpha0": dpo,
    "forward_kl": power(1.0),
    "js": js,
    "alphapo": alphapo(0.25, 2.5, 0.1),
    "alphapo_minus": alphapo(-0.5, 1.3, 0.4),
}


def looped(name, w, v, *rest):
    """The loss as a list of numbers, and the gradients of sum_i (i + 1) loss_i."""
    count = len(w)
    loss, dw, dv = [0.0] * count, [0.0] * count, [0.0] * count
    if name in ORACLE:
        for i in range(count):
            numbers = [x[i] for x in rest]
            given_to = (w[i], v[i], *numbers) if name in WITH_LENGTHS else (w[i] - numbers[0], v[i] - numbers[1])
            loss[i], up, down = ORACLE[name](*given_to)
            dw[i], dv[i] = (i + 1) * up, (i + 1) * down
        return loss, dw, dv
    rw, rv = rest
    if name.startswith("aot_unpaired"):  # who stands at place k, and their values
        tops = sorted((w[i] - rw[i], i) for i in range(count))
        bottoms = sorted((v[i] - rv[i], i) for i in range(count))
    else:
        tops = sorted((w[i] - v[i], i) for i in range(count))
        bottoms = sorted((rw[i] - rv[i], i) for i in range(count))
    for k in range(count):
        (a, i), (b, j) = tops[k], bottoms[k]
        loss[k], up, down = (smoothed if name.endswith("_smoothed") else dpo)(a, b)
        dw[i] += (k + 1) * up
        if name.startswith("aot_unpaired"):
            dv[j] += (k + 1) * down
        else:
            dv[i] -= (k + 1) * up
    return loss, dw, dv


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", EVERY)
def test_equals_the_loop(name, seed):
    given_to = arguments(name, pairs(seed))
    loss = EVERY[name](*given_to)
    weights = torch.arange(1.0, 8, dtype=torch.float64)
    grads = torch.autograd.grad((loss * weights).sum(), given_to[:2])
    expected = looped(name, *(x.tolist() for x in given_to))
    assert loss.dtype == torch.float64
    for came, numbers in zip((loss, *grads), expected, strict=True):
        torch.testing.assert_close(came, torch.tensor(numbers, dtype=torch.float64))


def test_weights_equal_the_loop():
    g = torch.Generator().manual_seed(0)
    lp, sums = -2 * torch.rand(4, 7, generator=g).double(), 0.9 * torch.rand(4, 7, generator=g).double() + 0.1
    mask = torch.rand(4, 7, generator=g) < 0.7
    mask[2] = False
    shared = torch.tensor([0, 2, 3, 9])
    lp.requires_grad_()
    cut, weights = ld_sequence_logprobs(lp, mask, shared, 0.3), wpo_weights(lp, sums, mask)
    (grad,) = torch.autograd.grad((cut * torch.arange(1.0, 5)).sum(), lp)
    for b in range(4):
        total, ratio, seen = 0.0, 1.0, 0
        for t in range(7):
            share = 0.0
            if mask[b, t]:
                seen += 1
                share = 1.0 if seen <= shared[b] else 0.3
                total += share * lp[b, t].item()
                ratio *= math.exp(lp[b, t].item()) / sums[b, t].item()
            assert grad[b, t].item() == pytest.approx((b + 1) * share)
        assert cut[b].item() == pytest.approx(total) and weights[b].item() == pytest.approx(ratio ** (1 / max(1, seen)))
    assert cut.dtype == weights.dtype == torch.float64


# --- numbers by hand

LOG2, LOG3 = math.log(2), math.log(3)  # sigmoid(log 2) = 2/3, sigmoid(log 3) = 3/4


def row(*numbers):
    return torch.tensor(numbers)


@pytest.mark.parametrize(
    ("loss", "up", "down", "expected"),
    [
        (apo_down_loss, row(-LOG3, LOG3), row(-2 * LOG3, 2 * LOG3), row(0.5, 1.5)),  # 1/4 + 1/4; 3/4 + 3/4
        (  # q = 3/4 is the minimum; 1/2 log(2/3) + 1/2 log 2; 1/4 log(1/3) + 3/4 log 3
            partial(exo_loss, label_smoothing=0.25),
            row(LOG3, 0.0, -LOG3),
            row(0.0, 0.0, 0.0),
            row(0.0, 0.5 * math.log(4 / 3), 0.5 * LOG3),
        ),
        (nca_loss, row(LOG2), row(-LOG2), row(2 * LOG3 - 1.5 * LOG2)),  # -log(2/3) - log(1/3)/2 - log(2/3)/2
        (partial(bco_loss, delta=1.0), row(1 + LOG3), row(1 - LOG3), row(-2 * math.log(0.75))),
        (partial(bco_loss, delta=1.0), row(1.0), row(1 + LOG3), row(LOG2 + math.log(4))),  # -log(1/2) - log(1/4)
        (  # m = 3/4, 1/2, 1/4 and exp(-x) = 1/3, 1, 3
            partial(discopop_loss, tau=1.0),
            row(LOG3, 0.0, -LOG3),
            row(0.0, 0.0, 0.0),
            row(0.25 * math.log(4 / 3) + 0.25, 0.5 * LOG2 + 0.5, 0.75 * math.log(4) + 0.75),
        ),
        (partial(discopop_loss, tau=0.5), row(LOG3), row(0.0), row(0.1 * math.log(4 / 3) + 0.3)),  # m = 9/10
        (partial(alpha_divergence_dpo_loss, alpha=0.5), row(2 * LOG2), row(0.0), row(math.log(1 + math.exp(-1)))),
        (forward_kl_dpo_loss, row(LOG2), row(-LOG2), row(math.log(1 + math.exp(-1.5)))),  # f' = 1/2 and -1
        (js_dpo_loss, row(LOG3), row(0.0), row(math.log(5 / 3))),  # (3/4) / (1/2) = 3/2, and 3/2 / (1 + 3/2) = 3/5
        (aot_loss, row(4.0, 1.0), row(1.0, 0.0), row(math.log(1 + math.exp(-1)), math.log(1 + math.exp(-3)))),
        (aot_unpaired_loss, row(3.0, 1.0), row(0.0, 2.0), row(*2 * [math.log(1 + math.exp(-1))])),
    ],
)
def test_golden(loss, up, down, expected):
    """Beta 1 and a reference of zeros, so that up and down are the log-ratios."""
    zeros = torch.zeros_like(up)
    torch.testing.assert_close(loss(up, down, zeros, zeros, beta=1.0), expected)


def test_more_golden():
    two, four = torch.tensor([2]), torch.tensor([4])
    torch.testing.assert_close(  # targets +-2: nothing left; (3 - 2)^2 + (-1 + 2)^2
        sppo_loss(row(2.0, 4.0), row(-2.0, 0.0), row(0.0, 1.0), row(0.0, 1.0), beta=0.25), row(0.0, 2.0)
    )
    half, quarter = row(2 * math.log(0.5)), row(4 * math.log(0.25))
    torch.testing.assert_close(  # p = 1/2 and 1/4, r = 1 - 2 and 1 - 4: the logit is 2 - 1
        alphapo_loss(half, quarter, two, four, alpha=1.0, beta=1.0, gamma=1.0), row(math.log(1 + math.exp(-1)))
    )
    torch.testing.assert_close(  # r = p - 1: the logit is 4 (3/4 - 1/2)
        alphapo_loss(half, quarter, two, four, alpha=-1.0, beta=4.0, gamma=0.0), row(math.log(1 + math.exp(-1)))
    )
    lp, mask = row(0.0, -1.0, -2.0, -4.0, 7.0)[None], torch.tensor([[False, True, True, True, False]])
    assert ld_sequence_logprobs(lp, mask, torch.tensor([1])).tolist() == [-4.0]  # -1 + (-2 - 4) / 2
    assert ld_sequence_logprobs(lp, mask, torch.tensor([2]), 0.0).tolist() == [-3.0]
    weights = wpo_weights(row(0.5, 0.25, 0.5).log()[None], row(0.125, 0.25, 9.0)[None], mask[:, 2:])  # (4 * 1)^(1/2)
    torch.testing.assert_close(weights, row(2.0))


def test_aot_sorts_policy_and_reference_apart():
    """Margins 3 and 1 against 2 and 0: in order both gain 1, where DPO sees 3 - 2 and 1 - 0 or, swapped, 3 and -1."""
    zeros = torch.zeros(2)
    for ref in (row(2.0, 0.0), row(0.0, 2.0)):
        loss = aot_loss(row(3.0, 1.0), zeros, ref, zeros, beta=1.0)
        torch.testing.assert_close(loss, row(*2 * [math.log(1 + math.exp(-1))]))


def test_gradient_golden():
    """At h = 0, beta 1: the slopes of each formula, by hand."""
    golden = {
        apo_down_loss: (0.0, 0.25),  # 1/4 - 1/4 and 1/4
        nca_loss: (-0.25, 0.25),
        partial(bco_loss, delta=0.0): (-0.5, 0.5),
        partial(exo_loss, label_smoothing=0.25): (-0.25 * LOG3, 0.25 * LOG3),  # s s' (x - log 3)
        sppo_loss: (-1.0, 1.0),
        partial(discopop_loss, tau=1.0): (-0.75 + 0.25 * (1 - LOG2), 0.75 - 0.25 * (1 - LOG2)),
        forward_kl_dpo_loss: (-0.5, 0.5),
        js_dpo_loss: (-0.25, 0.25),  # DPO's, halved: f'' is 1/2 at 1
    }
    zeros = torch.zeros(1)
    for loss, slopes in golden.items():
        w, v = torch.zeros(2, 1, requires_grad=True)
        grads = torch.autograd.grad(loss(w, v, zeros, zeros, beta=1.0).sum(), (w, v))
        torch.testing.assert_close(torch.cat(grads), row(*slopes))


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
    torch.testing.assert_close(mean[0].sum(), mean[1].sum())  # the two answers need not share a prompt
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


def test_both_answers_forgotten():
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
