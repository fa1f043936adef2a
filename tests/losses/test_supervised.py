"""DFT and CHORD; the load-balancing loss; adaptive entropy control."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_batches import FEW, batch

from rlkit.losses import adaptive_entropy_coef, chord_mu, chord_phi_loss, dft_loss, load_balancing_loss, token_logprobs


def test_golden_dft_and_chord():
    p = torch.tensor([[0.25, 0.5, 1.0]])
    logprobs, mask = p.log().requires_grad_(), torch.ones(1, 3, dtype=torch.bool)
    for fn, weight in ((dft_loss, p), (chord_phi_loss, torch.tensor([[0.1875, 0.25, 0.0]]))):
        loss = fn(logprobs, mask)
        torch.testing.assert_close(loss, -weight * p.log())
        torch.testing.assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], -weight)


def test_dft_has_the_gradient_of_the_probability():
    """-sg(p) grad log p = -grad p: what makes the weight of a rare token bounded."""
    logits = torch.randn(2, 5, 7, dtype=torch.float64).requires_grad_()
    tokens, mask = torch.randint(7, (2, 5)), torch.rand(2, 5) < 0.7
    logprobs = token_logprobs(logits, tokens)
    ours = torch.autograd.grad(dft_loss(logprobs, mask).sum(), logits, retain_graph=True)[0]
    expected = torch.autograd.grad(-(logprobs.exp() * mask).sum(), logits)[0]
    torch.testing.assert_close(ours, expected)


@FEW
@given(seed=st.integers(0, 99))
def test_phi_learns_most_from_a_probability_of_a_half(seed):
    lp, _, _, mask = batch(seed)
    lp = lp.detach().clamp(max=0).requires_grad_()
    weight = -torch.autograd.grad(chord_phi_loss(lp, mask).sum(), lp)[0]
    assert (weight <= 0.25).all() and (weight >= 0).all() and (weight[~mask] == 0).all()


def test_golden_mu():
    schedule = [chord_mu(step, warmup=10, decay=20, peak=0.8, valley=0.2) for step in (0, 5, 10, 20, 30, 99)]
    assert schedule == pytest.approx([0.0, 0.4, 0.8, 0.5, 0.2, 0.2])
    assert chord_mu(0, warmup=0, decay=0) == 0.05 and chord_mu(0, warmup=0, decay=5) == pytest.approx(0.9)
    for name in ("peak", "valley"):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            chord_mu(0, 1, 1, **{name: 1.5})


def test_golden_load_balancing():
    """Two experts, two tokens to the first: E (f1 P1 + f2 P2) = 2 (1 * 3/4 + 0 * 1/4)."""
    logits = torch.log(torch.tensor([[[3.0, 1.0], [3.0, 1.0], [1.0, 9.0]]])).requires_grad_()
    mask = torch.tensor([[True, True, False]])
    loss = load_balancing_loss(logits, mask, 1)
    torch.testing.assert_close(loss, torch.tensor(1.5))
    slope = torch.autograd.grad(loss, logits)[0]  # of 2 P1: p (1 - p) = 3/16 a token, over two tokens
    torch.testing.assert_close(slope, torch.tensor([[[3 / 16, -3 / 16], [3 / 16, -3 / 16], [0, 0]]]))


@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_load_balancing_of_one_layer_is_that_of_transformers(top_k):
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    g = torch.Generator().manual_seed(top_k)
    logits, mask = torch.randn(3, 8, 6, generator=g).requires_grad_(), torch.rand(3, 8, generator=g) < 0.7
    ours = load_balancing_loss(logits, mask, top_k)
    theirs = mixtral.load_balancing_loss_func((logits.view(24, 6),), 6, top_k, mask.long())
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(x, logits)[0] for x in (ours, theirs)))


@FEW
@given(seed=st.integers(0, 99), top_k=st.integers(1, 6))
def test_an_even_router_has_the_least_load(seed, top_k):
    logits = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mask = torch.ones(3, 8, dtype=torch.bool)
    shifted = torch.stack([logits[0, 0].roll(e) for e in range(6)]).repeat(4, 1).view(3, 8, 6)  # each expert in turn
    assert load_balancing_loss(shifted, mask, top_k).item() == pytest.approx(top_k)
    assert load_balancing_loss(logits, mask, 6).item() == pytest.approx(6)  # all experts take every token
    one = torch.zeros(3, 8, 6).index_fill(2, torch.tensor([0]), 50.0)
    assert load_balancing_loss(one, mask, 1).item() == pytest.approx(6)


def test_parts_of_a_batch_add_up_to_the_load_of_the_whole():
    """With the shares of all and the tokens of all: micro-batches and ranks are the whole, in gradient too."""
    logits = torch.randn(4, 5, 6, dtype=torch.float64).requires_grad_()
    mask = torch.rand(4, 5) < 0.7
    whole = load_balancing_loss(logits, mask, 2)
    chosen = torch.zeros(4, 5, 6, dtype=torch.float64).scatter(2, logits.detach().topk(2).indices, 1)
    counts = (chosen * mask[..., None]).sum((0, 1))
    parts = [load_balancing_loss(logits[i : i + 1], mask[i : i + 1], 2, mask.sum(), lambda _: counts) for i in range(4)]
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(*(torch.autograd.grad(x, logits, retain_graph=True) for x in (sum(parts), whole)))


def test_golden_adaptive_entropy():
    assert adaptive_entropy_coef(0.1, 0.2, 0.3) == pytest.approx(0.105)
    assert adaptive_entropy_coef(0.1, 0.3, 0.3) == pytest.approx(0.105)  # at most the target
    assert adaptive_entropy_coef(0.1, 0.31, 0.3) == pytest.approx(0.095)
    assert adaptive_entropy_coef(0.001, 9.0, 0.3) == 0 and adaptive_entropy_coef(0.999, 0.0, 0.3) == 1
    coef = 0.0
    for _ in range(400):  # an entropy that answers the coefficient settles at the target
        coef = adaptive_entropy_coef(coef, entropy=2 * coef, target=0.3)
    assert coef == pytest.approx(0.15, abs=0.006)
    with pytest.raises(ValueError, match="^high: expected a number >= low"):
        adaptive_entropy_coef(0.1, 0.2, 0.3, low=0.5, high=0.1)
    with pytest.raises(ValueError, match="^step: expected"):
        adaptive_entropy_coef(0.1, 0.2, 0.3, step=-math.inf)
