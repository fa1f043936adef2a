"""Clip-Cov, KL-Cov, DPPO, DRO and VESPO."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from trust_regions import batch, clip_cov, dppo_kl, dppo_tv, dro, grad_of, kl_cov, vespo

from rlkit.losses.policy import clipped_policy_loss
from rlkit.losses.trust_region import clip_cov_loss, dppo_kl_loss, dppo_tv_loss, dro_loss, kl_cov_loss, vespo_loss

FEW = settings(max_examples=25, deadline=None, derandomize=True)
LOSSES = [clip_cov, kl_cov, dppo_tv, dppo_kl, dro, vespo]
PER_TOKEN = [dppo_tv, dppo_kl, dro]
every = pytest.mark.parametrize("fn", LOSSES)


@every
def test_on_policy_gradient_is_the_policy_gradient(fn):
    """At ratio 1 the gradient is -A on every token that is not dropped, also where the caller detaches nothing."""
    lp, _, adv, mask = batch()
    knobs = {"share": 0.0} if fn is clip_cov else {}
    grad = grad_of(fn(lp, lp, adv, mask, **knobs), lp)
    torch.testing.assert_close(grad, torch.where(mask, -adv, 0.0))


@pytest.mark.parametrize("fn", [dppo_tv_loss, dppo_kl_loss])
def test_inside_the_region_is_the_importance_weighted_policy_gradient(fn):
    lp, old, adv, mask = batch()
    loss = fn(lp, old, adv, mask, 9.0, 9.0)
    expected = torch.where(mask, -adv * (lp - old).exp(), 0.0)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad_of(loss, lp), expected)


def test_no_share_is_the_loss_without_covariances():
    lp, old, adv, mask = batch()
    ppo = clipped_policy_loss(lp, old, adv, mask, 0.3, 0.4)
    torch.testing.assert_close(clip_cov(lp, old, adv, mask, share=0), ppo)
    plain = torch.where(mask, -adv * (lp - old).exp(), 0.0)
    torch.testing.assert_close(kl_cov(lp, old, adv, mask, share=0), plain)
    torch.testing.assert_close(kl_cov(lp, old, adv, mask, kl_coef=0.0), plain)


@every
def test_only_logprobs_get_a_gradient(fn):
    lp, old, adv, mask = batch()
    old.requires_grad_()
    adv.requires_grad_()
    fn(lp, old, adv, mask).sum().backward()
    assert lp.grad is not None and old.grad is None and adv.grad is None


@every
def test_mask_equals_slice(fn):
    lp, old, adv, mask = batch()
    loss = fn(lp, old, adv, mask)
    for rows in [[b] for b in range(6)] if fn is vespo else [list(range(6))]:
        one = torch.ones(1, int(mask[rows].sum()), dtype=torch.bool)
        sliced = fn(*(x[rows][mask[rows]][None] for x in (lp, old, adv)), one)
        torch.testing.assert_close(loss[rows][mask[rows]], sliced[0])


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e4])
@pytest.mark.parametrize("where", ["logprobs", "old_logprobs", "advantages", "all"])
@every
def test_masked_ratio_no_nan_gradient(fn, bad, where):
    lp, old, adv, mask = batch()
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


@pytest.mark.parametrize("log_ratio", [25.0, 100.0, 1e4, math.inf, -25.0, -1e4, -math.inf])
@pytest.mark.parametrize("adv", [1.0, -1.0, 0.0])
@every
def test_extreme_unmasked_ratio(fn, log_ratio, adv):
    lp = torch.tensor([[log_ratio, -1.0], [-1.0, -1.0]], requires_grad=True)
    mask, old = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.0, -1.0], [-1.0, -1.0]])
    loss = fn(lp, old, torch.tensor([adv, adv]), mask)
    loss.sum().backward()
    assert loss.isfinite().all() and lp.grad.isfinite().all() and lp.grad[0, 0] == 0
    if fn in PER_TOKEN:
        assert lp.grad[0, 1] == -adv


@FEW
@given(seed=st.integers(0, 999), pad=st.integers(0, 5), fn=st.sampled_from(LOSSES))
def test_rows_permute_and_padding_is_nothing(seed, pad, fn):
    lp, old, adv, mask = batch(seed)
    loss = fn(lp, old, adv, mask)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(fn(lp[order], old[order], adv[order], mask[order]), loss[order])
    wide = [
        torch.nn.functional.pad(x, (0, pad), value=v) for x, v in ((lp, 9.0), (old, -9.0), (adv, 9.0), (mask, False))
    ]
    padded = fn(*wide)
    torch.testing.assert_close(padded[:, :7], loss)
    assert padded[:, 7:].abs().sum() == 0


@FEW
@given(
    x=st.floats(-(2.0**60), 2.0**60, width=32),
    y=st.floats(-(2.0**60), 2.0**60, width=32),
    adv=st.floats(-1024, 1024, width=32),
    fn=st.sampled_from(LOSSES),
)
def test_any_finite_numbers_stay_finite(x, y, adv, fn):
    lp = torch.tensor([[x, -1.0]], requires_grad=True)
    loss = fn(lp, torch.tensor([[y, -1.0]]), torch.tensor([[adv, 1.0]]), torch.ones(1, 2, dtype=torch.bool))
    loss.sum().backward()
    assert loss.isfinite().all() and lp.grad.isfinite().all()


def test_vespo_without_decay_does_not_overflow():
    lp = torch.tensor([[19.0, 19.0, -1.0]], requires_grad=True)
    loss = vespo_loss(lp, torch.zeros(1, 3), torch.ones(1), torch.ones(1, 3, dtype=torch.bool), k_pos=9.0, lambda_pos=0)
    assert loss.isfinite().all() and grad_of(loss, lp).isfinite().all()


@every
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)])
def test_empty_batch(fn, shape):
    lp = torch.zeros(shape, requires_grad=True)
    loss = fn(lp, lp, torch.zeros(shape[0]), torch.zeros(shape, dtype=torch.bool))
    loss.sum().backward()
    assert loss.shape == shape and lp.grad.shape == shape and lp.grad.abs().sum() == 0


@every
def test_bfloat16_inputs(fn):
    lp, old, adv, mask = (x.detach().bfloat16() if x.is_floating_point() else x for x in batch())
    loss = fn(lp.requires_grad_(), old, adv, mask)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, fn(lp.float(), old.float(), adv.float(), mask))
    assert grad_of(loss, lp).dtype == torch.bfloat16


def test_compiles():
    def all_of_them(*x):
        return [fn(*x) for fn in LOSSES]

    lp, old, adv, mask = batch()
    compiled = torch.compile(all_of_them, backend="eager", fullgraph=True)(lp, old, adv[:, 0], mask)
    torch.testing.assert_close(compiled, all_of_them(lp, old, adv[:, 0], mask))


@every
def test_transforms(fn):
    lp, old, adv, mask = batch()
    functional = torch.func.grad(lambda x: fn(x, old, adv[:, 0], mask).sum())(lp.detach())
    torch.testing.assert_close(functional, grad_of(fn(lp, old, adv[:, 0], mask), lp))


def test_nothing_reads_a_value_on_the_host():
    """Fake tensors hold no values."""
    with FakeTensorMode():
        x, mask = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3, dtype=torch.bool)
        for fn in LOSSES:
            fn(x, x, torch.zeros(2), mask).sum().backward()


KNOBS = {
    clip_cov_loss: [
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"cov_low": 5.0}, "cov_high"),
        ({"share": 1.1}, "share"),
        ({"share": math.nan}, "share"),
        ({"uniform": torch.zeros(2, 2)}, "uniform"),
        ({"uniform": torch.zeros(2, 3, dtype=torch.long)}, "uniform"),
    ],
    kl_cov_loss: [({"share": -0.1}, "share"), ({"kl_coef": -1.0}, "kl_coef")],
    dppo_tv_loss: [
        ({"delta_low": -0.1}, "delta_low"),
        ({"delta_high": -0.1}, "delta_high"),
        ({"ratio_high": 0.0}, "ratio_high"),
    ],
    dppo_kl_loss: [
        ({"delta_low": -0.1}, "delta_low"),
        ({"delta_high": -0.1}, "delta_high"),
        ({"ratio_high": 0.0}, "ratio_high"),
    ],
    dro_loss: [({"kl_coef": 0.0}, "kl_coef"), ({"kl_coef": math.nan}, "kl_coef")],
    vespo_loss: [({name: -0.1}, name) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")],
}
TENSORS = [
    ({"logprobs": torch.zeros(2)}, "logprobs"),
    ({"logprobs": torch.zeros(2, 3, dtype=torch.long)}, "logprobs"),
    ({"old_logprobs": torch.zeros(2, 2)}, "old_logprobs"),
    ({"advantages": torch.zeros(3)}, "advantages"),
    ({"advantages": torch.zeros(2, 1)}, "advantages"),
    ({"advantages": torch.zeros(2, dtype=torch.long)}, "advantages"),
    ({"mask": torch.ones(2, 3)}, "mask"),
    ({"mask": torch.ones(3, dtype=torch.bool)}, "mask"),
]


@pytest.mark.parametrize(("fn", "change", "name"), [(f, *case) for f, own in KNOBS.items() for case in TENSORS + own])
def test_errors_name_the_argument(fn, change, name):
    arguments = {
        "logprobs": torch.zeros(2, 3),
        "old_logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2),
        "mask": torch.ones(2, 3, dtype=torch.bool),
    } | ({"uniform": torch.zeros(2, 3)} if fn is clip_cov_loss else {})
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        fn(**(arguments | change))
