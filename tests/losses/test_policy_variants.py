"""The policy losses beside clipped_policy_loss, and the two masks."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_batches import FEW, B, T, batch

from rlkit.losses import cispo_loss, gpg_loss, gppo_loss, reinforce_loss, sapo_loss, top_entropy_mask
from rlkit.losses.policy import clipped_policy_loss
from rlkit.losses.reductions import sequence_mean, sequence_sum_mean, token_mean
from rlkit.losses.sequence_policy import (
    gmpo_loss,
    gspo_loss,
    gspo_token_loss,
    luspo_loss,
    off_policy_sequence_mask,
    topr_loss,
)

CLIPPED = [cispo_loss, gppo_loss, gspo_loss, gspo_token_loss, luspo_loss, gmpo_loss]
LOSSES = [*CLIPPED, sapo_loss, reinforce_loss, topr_loss]
LOG_WEIGHTED = [cispo_loss, reinforce_loss, topr_loss]  # the value holds the log-probability itself


def grad_of(loss, lp, weights=None):
    return torch.autograd.grad((loss if weights is None else loss * weights).sum(), lp)[0]


KNOBS = {  # the defaults first
    cispo_loss: [dict(clip_low=0.2, clip_high=0.28), dict(clip_low=1.0, clip_high=0.1)],
    gppo_loss: [
        dict(clip_low=0.2, clip_high=0.2),
        dict(clip_low=0.1, clip_high=0.4),
        dict(clip_low=0.0, clip_high=0.0),
    ],
    gspo_loss: [dict(clip_low=3e-4, clip_high=4e-4), dict(clip_low=0.1, clip_high=0.3)],
    gspo_token_loss: [dict(clip_low=3e-4, clip_high=4e-4), dict(clip_low=0.1, clip_high=0.3)],
    luspo_loss: [dict(clip_low=2e-3, clip_high=2.5e-3), dict(clip_low=0.3, clip_high=0.1)],
    gmpo_loss: [dict(log_clip_low=0.4, log_clip_high=0.4), dict(log_clip_low=0.1, log_clip_high=0.6)],
    sapo_loss: [dict(tau_pos=1.0, tau_neg=1.05), dict(tau_pos=3.0, tau_neg=0.5)],
    reinforce_loss: [{}],
    topr_loss: [{}],
}


def test_the_default_knobs():
    lp, old, adv, mask = batch()
    for fn in LOSSES:
        assert torch.equal(fn(lp, old, adv, mask), fn(lp, old, adv, mask, **KNOBS[fn][0]))


def test_golden_token_losses():
    """Ratios 0.5, 1, 2; log-probabilities -1, -2, -3."""
    lp = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]], requires_grad=True)
    old = lp.detach() - torch.tensor([[0.5, 1.0, 2.0]]).log()
    adv, mask = torch.tensor([2.0, -1.0]), torch.ones(2, 3, dtype=torch.bool)
    cispo = cispo_loss(lp, old, adv, mask)  # weights 0.8, 1, 1.28
    torch.testing.assert_close(cispo, torch.tensor([[1.6, 4.0, 7.68], [-0.8, -2.0, -3.84]]))
    torch.testing.assert_close(grad_of(cispo, lp), torch.tensor([[-1.6, -2.0, -2.56], [0.8, 1.0, 1.28]]))
    one_sided = cispo_loss(lp, old, adv, mask, clip_low=1e6, clip_high=0.5)
    torch.testing.assert_close(one_sided, torch.tensor([[1.0, 4.0, 9.0], [-0.5, -2.0, -4.5]]))
    gppo = gppo_loss(lp, old, adv, mask, 0.2, 0.3)
    torch.testing.assert_close(gppo, torch.tensor([[-1.0, -2.0, -2.6], [0.8, 1.0, 2.0]]))
    torch.testing.assert_close(grad_of(gppo, lp), gppo)  # bounded where the clip binds, not 0
    plain = reinforce_loss(lp, old, adv, mask)
    torch.testing.assert_close(plain, torch.tensor([[2.0, 4.0, 6.0], [-1.0, -2.0, -3.0]]))
    torch.testing.assert_close(grad_of(plain, lp), torch.tensor([[-2.0] * 3, [1.0] * 3]))


def test_golden_sapo():
    """With r - 1 = log 3 and tau 1 the gate is 4 * 3/4; with r = 1 and tau 2 it is 4/2 * 1/2."""
    r = 1 + math.log(3)
    lp = torch.tensor([[math.log(r), 0.0], [math.log(r), 0.0]], requires_grad=True)
    adv, mask = torch.tensor([1.0, -2.0]), torch.ones(2, 2, dtype=torch.bool)
    loss = sapo_loss(lp, torch.zeros(2, 2), adv, mask, tau_pos=1.0, tau_neg=2.0)
    torch.testing.assert_close(loss, torch.tensor([[-3.0, -2.0], [2 * 2 * 0.9, 2.0]]))  # sigmoid(2 log 3) = 9/10
    expected = torch.tensor([[-4 * 3 / 16 * r, -1.0], [2 * 4 * 0.09 * r, 2.0]])
    torch.testing.assert_close(grad_of(loss, lp), expected)


def test_golden_sequence_losses():
    """Token ratios 4 and 1 make a sequence ratio of 2; 1/4 and 1 one of 1/2. The last row has one token."""
    lp = torch.tensor([[4.0, 1.0], [0.25, 1.0], [4.0, 1.0], [0.25, 1.0], [3.0, 9.0]]).log().requires_grad_()
    old, adv = torch.zeros(5, 2), torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
    mask = torch.tensor([[True, True]] * 4 + [[True, False]])
    gspo = gspo_loss(lp, old, adv, mask, 0.2, 0.5)
    value = torch.tensor([[-1.5] * 2, [-0.5] * 2, [2.0] * 2, [0.8] * 2, [-1.5, 0.0]])
    slope = torch.tensor([[0.0] * 2, [-0.5] * 2, [2.0] * 2, [0.0] * 2, [0.0] * 2])
    torch.testing.assert_close(gspo, value)
    torch.testing.assert_close(grad_of(gspo, lp), slope)
    token = gspo_token_loss(lp, old, adv, mask, 0.2, 0.5)
    torch.testing.assert_close(token, value)
    torch.testing.assert_close(grad_of(token, lp), slope)
    length = torch.tensor([[2.0]] * 4 + [[1.0]])
    luspo = luspo_loss(lp, old, adv, mask, 0.2, 0.5)
    torch.testing.assert_close(luspo, value * length)
    torch.testing.assert_close(grad_of(luspo, lp), slope * length)
    # log 2 above: 4 counts as 2 where A > 0, so the mean ratio is sqrt 2; 1/4 counts as 1/2 where A < 0
    gmpo = gmpo_loss(lp, old, adv, mask, math.log(2), math.log(2))
    root = math.sqrt(2)
    torch.testing.assert_close(gmpo, torch.tensor([[-root] * 2, [-0.5] * 2, [2.0] * 2, [1 / root] * 2, [-2.0, 0.0]]))
    torch.testing.assert_close(
        grad_of(gmpo, lp), torch.tensor([[0.0, -root], [-0.5, -0.5], [2.0, 2.0], [0.0, 1 / root], [0.0, 0.0]])
    )
    topr = topr_loss(lp, old, adv, mask)  # whole-sequence ratios 4 and 1/4
    torch.testing.assert_close(grad_of(topr, lp), torch.tensor([[-1.0] * 2] * 2 + [[1.0] * 2, [0.25] * 2, [-1.0, 0.0]]))


@pytest.mark.parametrize("outcome", [True, False])
@pytest.mark.parametrize("fn", LOSSES)
def test_on_policy_ratio_is_one(fn, outcome):
    """At ratio 1 the gradient of the sum is -A on each token, also with clip 0 and nothing detached."""
    lp, _, adv, mask = batch()
    adv = adv[:, :1].expand(B, T) if outcome or fn in (gspo_loss, luspo_loss, gmpo_loss) else adv
    scale = mask.sum(1, keepdim=True) if fn is luspo_loss else 1.0
    for knobs in ({}, dict.fromkeys(KNOBS[fn][0], 0.0)) if fn in CLIPPED else ({},):
        loss = fn(lp, lp, adv[:, 0] if outcome else adv, mask, **knobs)
        torch.testing.assert_close(grad_of(loss, lp), torch.where(mask, -adv, 0.0) * scale)
        if fn not in [*LOG_WEIGHTED, sapo_loss]:
            torch.testing.assert_close(loss, torch.where(mask, -adv, 0.0) * scale)


def test_sapo_on_policy_value():
    lp, _, adv, mask = batch()
    tau = torch.where(adv > 0, 1.0, 1.05).double()
    torch.testing.assert_close(sapo_loss(lp, lp, adv, mask), torch.where(mask, -2 * adv / tau, 0.0), rtol=1e-6, atol=0)
    exact = sapo_loss(lp, lp, -adv.abs(), mask)  # the temperature is not rounded to float32
    torch.testing.assert_close(exact, torch.where(mask, 2 * adv.abs() / 1.05, 0.0), rtol=1e-14, atol=0)


@pytest.mark.parametrize("fn", [gspo_loss, gspo_token_loss, luspo_loss])
def test_one_token_a_row_is_the_clipped_loss(fn):
    lp, old, adv, _ = batch()
    for t in range(T):
        mask = (torch.arange(T) == t).expand(B, T)
        ours, theirs = fn(lp, old, adv, mask, 0.2, 0.3), clipped_policy_loss(lp, old, adv, mask, 0.2, 0.3)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(grad_of(ours, lp), grad_of(theirs, lp))


@pytest.mark.parametrize("reduce", [sequence_mean, sequence_sum_mean, token_mean])
def test_gspo_token_has_gspos_gradient(reduce):
    lp, old, adv, mask = batch(3, 0.2)
    a = gspo_loss(lp, old, adv[:, 0], mask, 0.05, 0.1)
    b = gspo_token_loss(lp, old, adv[:, 0], mask, 0.05, 0.1)
    torch.testing.assert_close(a, b)
    grad = grad_of(reduce(a, mask), lp)
    torch.testing.assert_close(grad, grad_of(reduce(b, mask), lp))
    assert (grad[mask] != 0).any() and (grad[mask] == 0).any()  # rows inside the clip and rows beyond


def test_luspo_is_gspo_times_length():
    lp, old, adv, mask = batch(3, 0.2)
    a = sequence_mean(luspo_loss(lp, old, adv[:, 0], mask, 0.05, 0.1), mask)
    b = sequence_sum_mean(gspo_loss(lp, old, adv[:, 0], mask, 0.05, 0.1), mask)
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(grad_of(a, lp), grad_of(b, lp))


def test_cispo_gradient_is_that_of_the_weighted_ratio():
    """Inside the bounds that of ratio * A, outside that of bound * A * logprob; never 0."""
    lp, old, adv, mask = batch()
    inside = mask & ((lp - old).exp() > 0.8) & ((lp - old).exp() < 1.28)
    grad = grad_of(cispo_loss(lp, old, adv, mask), lp)
    plain = grad_of(-(lp - old).exp() * adv, lp)
    assert 0 < inside.sum() < mask.sum()
    torch.testing.assert_close(grad[inside], plain[inside])
    assert (grad[mask] != 0).all()
    wide = cispo_loss(lp, old, adv, mask, math.inf, math.inf)
    torch.testing.assert_close(grad_of(wide, lp)[mask], plain[mask])


def test_gppo_is_the_clipped_loss_in_value_and_where_it_is_not_clipped():
    lp, old, adv, mask = batch()
    ours, ppo = gppo_loss(lp, old, adv, mask), clipped_policy_loss(lp, old, adv, mask)
    torch.testing.assert_close(ours, ppo)
    grad, clipped = grad_of(ours, lp), grad_of(ppo, lp)
    torch.testing.assert_close(grad[clipped != 0], clipped[clipped != 0])
    assert (clipped[mask] == 0).any() and (grad[mask] != 0).all()


def test_gmpo_without_clips_is_gspo_without_clips():
    lp, old, adv, mask = batch()
    a = gmpo_loss(lp, old, adv, mask, math.inf, math.inf)
    b = gspo_loss(lp, old, adv, mask, math.inf, math.inf)
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(grad_of(a, lp), grad_of(b, lp))


def test_a_token_of_advantage_0_counts_as_ratio_1_in_gmpo():
    """The paper raises the ratio to the power of the advantage's sign."""
    logprobs = torch.tensor([[0.3, -0.2, -5.0]], requires_grad=True)
    advantages, mask = torch.tensor([[1.0, -1.0, 0.0]]), torch.ones(1, 3, dtype=torch.bool)
    loss = gmpo_loss(logprobs, torch.zeros(1, 3), advantages, mask)
    mean = math.exp((0.3 - 0.2 + 0.0) / 3)
    torch.testing.assert_close(loss, torch.tensor([[-mean, mean, 0.0]]))
    gradient = torch.autograd.grad(loss[0, 0], logprobs)[0]
    torch.testing.assert_close(gradient, torch.tensor([[-mean / 3, -mean / 3, 0.0]]))


def test_topr_of_good_sequences_is_reinforce():
    lp, old, adv, mask = batch()
    torch.testing.assert_close(topr_loss(lp, old, adv.abs(), mask), reinforce_loss(lp, old, adv.abs(), mask))


def test_gpg_is_reinforce():
    lp, old, adv, mask = batch()
    assert torch.equal(gpg_loss(lp, old, adv, mask), reinforce_loss(lp, lp * 2, adv, mask))


@pytest.mark.parametrize("fn", LOSSES)
def test_only_logprobs_get_a_gradient(fn):
    lp, old, adv, mask = batch()
    old.requires_grad_()
    adv.requires_grad_()
    fn(lp, old, adv, mask).sum().backward()
    assert lp.grad is not None and old.grad is None and adv.grad is None


@pytest.mark.parametrize("fn", LOSSES)
def test_mask_equals_slice(fn):
    lp, old, adv, mask = batch(5, 0.1)
    loss = fn(lp, old, adv, mask)
    for b in range(B):
        m = mask[b]
        whole = torch.ones(1, int(m.sum()), dtype=torch.bool)
        torch.testing.assert_close(loss[b, m], fn(lp[b, m][None], old[b, m][None], adv[b, m][None], whole)[0])


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e4])
@pytest.mark.parametrize("where", ["logprobs", "old_logprobs", "advantages", "all"])
@pytest.mark.parametrize("fn", LOSSES)
def test_masked_ratio_no_nan_gradient(fn, bad, where):
    lp, old, adv, mask = batch(5, 0.1)
    clean = fn(lp, old, adv, mask)
    clean_grad = grad_of(clean, lp)
    dirty = [
        torch.where(mask, x.detach(), bad if where in (name, "all") else x.detach())
        for name, x in (("logprobs", lp), ("old_logprobs", old), ("advantages", adv))
    ]
    dirty[0].requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        loss = fn(*dirty, mask)
        loss.sum().backward()
    assert torch.equal(loss, clean) and torch.equal(dirty[0].grad, clean_grad)
    assert loss[~mask].abs().max() == 0 and dirty[0].grad[~mask].abs().max() == 0


@pytest.mark.parametrize("adv", [1.0, -1.0, 0.0])
@pytest.mark.parametrize(
    ("fn", "log_ratio"),
    [
        (fn, x)
        for fn in LOSSES
        for x in (25.0, 100.0, 1e4, math.inf, -25.0, -1e4, -math.inf)
        if math.isfinite(x) or fn not in LOG_WEIGHTED  # whose values would be infinite
    ],
)
def test_extreme_unmasked_ratio(fn, log_ratio, adv):
    """Finite values and gradients; those with a log-ratio in the graph give a token beyond +-20 no gradient."""
    lp = torch.tensor([[log_ratio, 0.0], [0.0, 0.0]], requires_grad=True)
    loss = fn(lp, torch.zeros(2, 2), torch.tensor([adv, adv]), torch.ones(2, 2, dtype=torch.bool))
    loss.sum().backward()
    assert loss.isfinite().all() and lp.grad.isfinite().all()
    if fn not in LOG_WEIGHTED:
        assert lp.grad[0, 0] == 0
    if fn is cispo_loss:
        assert lp.grad[0, 0].item() == pytest.approx(-adv * (1.28 if log_ratio > 0 else 0.8))
    torch.testing.assert_close(lp.grad[1], torch.full((2,), -adv * (2 if fn is luspo_loss else 1)))


@FEW
@given(seed=st.integers(0, 999), pad=st.integers(0, 4))
def test_rows_permute_and_padding_is_nothing(seed, pad):
    lp, old, adv, mask = batch(seed, 0.1)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(seed))
    wide = [
        torch.nn.functional.pad(x, (0, pad), value=v) for x, v in ((lp, 9.0), (old, -9.0), (adv, 9.0), (mask, False))
    ]
    for fn in LOSSES:
        loss = fn(lp, old, adv, mask)
        torch.testing.assert_close(fn(lp[order], old[order], adv[order], mask[order]), loss[order])
        padded = fn(*wide)
        torch.testing.assert_close(padded[:, :T], loss)
        assert padded[:, T:].abs().sum() == 0


@FEW
@given(
    x=st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=3, max_size=3),
    adv=st.floats(-1024, 1024, width=32),
)
def test_any_finite_numbers_stay_finite(x, adv):
    for fn in LOSSES:
        lp = torch.tensor([x], requires_grad=True)
        loss = fn(lp, torch.zeros(1, 3), torch.tensor([adv]), torch.tensor([[True, True, False]]))
        loss.sum().backward()
        assert loss.isfinite().all() and lp.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
@pytest.mark.parametrize("fn", LOSSES)
def test_empty_batch(fn, shape):
    lp = torch.zeros(shape, requires_grad=True)
    mask = torch.zeros(shape, dtype=torch.bool)
    loss = fn(lp, lp, torch.zeros(shape[0]), mask)
    loss.sum().backward()
    assert loss.shape == shape and lp.grad.shape == shape
    assert top_entropy_mask(lp, mask).shape == shape
    assert off_policy_sequence_mask(lp, lp, torch.zeros(shape[0]), mask, 0.1).shape == shape


@pytest.mark.parametrize("fn", LOSSES)
def test_bfloat16_inputs(fn):
    lp, old, adv, mask = (x.detach().bfloat16() if x.is_floating_point() else x for x in batch())
    loss = fn(lp.requires_grad_(), old, adv, mask)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, fn(lp.float(), old.float(), adv.float(), mask))
    assert grad_of(loss, lp).dtype == torch.bfloat16


@pytest.mark.parametrize("fn", LOSSES)
def test_compiles_and_transforms(fn):
    lp, old, adv, mask = batch()
    expected = fn(lp, old, adv[:, 0], mask)
    compiled = torch.compile(fn, backend="eager", fullgraph=True)(lp, old, adv[:, 0], mask)
    torch.testing.assert_close(compiled, expected)
    functional = torch.func.grad(lambda x: fn(x, old, adv[:, 0], mask).sum())(lp.detach())
    torch.testing.assert_close(functional, grad_of(expected, lp))


WRONG = [
    ({"logprobs": torch.zeros(2)}, "logprobs"),
    ({"logprobs": torch.zeros(2, 3, dtype=torch.long)}, "logprobs"),
    ({"old_logprobs": torch.zeros(2, 2)}, "old_logprobs"),
    ({"advantages": torch.zeros(3)}, "advantages"),
    ({"advantages": torch.zeros(2, 1)}, "advantages"),
    ({"advantages": torch.zeros(2, dtype=torch.long)}, "advantages"),
    ({"mask": torch.ones(2, 3)}, "mask"),
    ({"mask": torch.ones(3, dtype=torch.bool)}, "mask"),
]
CLIPS = [({"clip_low": -0.1}, "clip_low"), ({"clip_high": math.nan}, "clip_high")]
LOG_CLIPS = [({"log_clip_low": -0.1}, "log_clip_low"), ({"log_clip_high": math.nan}, "log_clip_high")]
TAUS = [({"tau_pos": 0.0}, "tau_pos"), ({"tau_neg": -1.0}, "tau_neg")]


@pytest.mark.parametrize(
    ("fn", "change", "name"),
    [
        (fn, *w)
        for fn in LOSSES
        for w in WRONG + (LOG_CLIPS if fn is gmpo_loss else CLIPS if fn in CLIPPED else TAUS if fn is sapo_loss else [])
    ]
    + [(off_policy_sequence_mask, *w) for w in [*WRONG, ({"high": -0.1}, "high")]],
)
def test_errors_name_the_argument(fn, change, name):
    arguments = {
        "logprobs": torch.zeros(2, 3),
        "old_logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2),
        "mask": torch.ones(2, 3, dtype=torch.bool),
    } | ({"high": 0.1} if fn is off_policy_sequence_mask else {})
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        fn(**(arguments | change))
