"""The less common losses on preference pairs, LD-DPO and WPO: against the loop, and by hand."""

import math
from functools import partial

import preference_pairs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlkit.advantages
from rlkit.losses import simpo_loss
from rlkit.losses.preference_variants import (
    a_star_po_loss,
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
    tpo_loss,
    wpo_weights,
)

FEW = settings(max_examples=25, deadline=None, derandomize=True)
pairs = partial(preference_pairs.pairs, spread=3)


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


def test_golden_tpo():
    """log 3 apart at beta 1 and margin log 3: sigmoid(0) = 1/2; and the gold response's 0.7 of 2 nats."""
    chosen, rejected, gold = (x.requires_grad_() for x in (row(-1.0), row(-1.0 - LOG3), row(-2.0)))
    loss = tpo_loss(chosen, rejected, gold, beta=1.0, alpha=0.7, gamma=LOG3)
    torch.testing.assert_close(loss, row(LOG2 + 1.4))
    slopes = torch.autograd.grad(loss.sum(), (chosen, rejected, gold))
    torch.testing.assert_close(slopes, (row(-0.5), row(0.5), row(-0.7)))


def test_golden_a_star_po():
    """The log-ratio is 2, so beta 1/2 makes 1; the advantage is 0.25."""
    logprobs = row(-3.0).requires_grad_()
    loss = a_star_po_loss(logprobs, row(-5.0), row(1.0), row(0.75), beta=0.5)
    torch.testing.assert_close(loss, row(0.5625))
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], row(0.75))


@FEW
@given(seed=st.integers(0, 99))
def test_tpo_is_simpo_beside_the_likelihood_of_a_third_response(seed):
    chosen, rejected, gold, _, lengths, others = pairs(seed)
    ours = tpo_loss(chosen / lengths, rejected / others, gold, beta=2.0, alpha=0.3, gamma=0.5)
    torch.testing.assert_close(ours, simpo_loss(chosen, rejected, lengths, others, 2.0, 0.5) - 0.3 * gold)


@FEW
@given(seed=st.integers(0, 99), beta=st.floats(0.01, 5))
def test_the_optimal_policy_has_no_a_star_po_loss(seed, beta):
    """pi* = ref exp((r - V*) / beta), with V* = beta log of the mean of exp(r / beta) over all responses there are."""
    g = torch.Generator().manual_seed(seed)
    ref = torch.randn(6, generator=g, dtype=torch.float64).log_softmax(0)
    rewards = torch.rand(6, generator=g, dtype=torch.float64)
    best = (ref + rewards / beta).log_softmax(0).requires_grad_()
    values = (beta * (ref + rewards / beta).logsumexp(0)).expand(6)
    loss = a_star_po_loss(best, ref, rewards, values, beta)
    torch.testing.assert_close(loss, torch.zeros_like(loss))
    one = rlkit.advantages.optimal_values(rewards, torch.zeros(6).long(), beta)  # of a uniform reference
    uniform = torch.full((6,), 1 / 6, dtype=torch.float64).log()
    best = (uniform + rewards / beta).log_softmax(0)
    torch.testing.assert_close(a_star_po_loss(best, uniform, rewards, one, beta), torch.zeros_like(loss))


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
