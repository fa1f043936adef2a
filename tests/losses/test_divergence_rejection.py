"""Masks by a divergence of sampler and trainer: of a token, and the sum, mean and maximum over a sequence."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from rlkit.losses import (
    align_with_tokens,
    full_vocabulary_kl,
    kl_k2,
    kl_k3,
    rejection_mask,
    sequence_max_divergence_mask,
    sequence_mean_divergence_mask,
    sequence_sum_divergence_mask,
    token_divergence_mask,
)
from rlkit.losses.naive import mismatch as naive

FEW = settings(max_examples=25, deadline=None, derandomize=True)
# each with a bound that has something on both sides
CASES = {
    token_divergence_mask: 0.1,
    sequence_sum_divergence_mask: 0.5,
    sequence_mean_divergence_mask: 0.1,
    sequence_max_divergence_mask: 0.3,
}
FUNCTIONS = list(CASES)
every = pytest.mark.parametrize("fn", FUNCTIONS)


def batch(seed=0, b=8, t=7):
    g = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.1, 1.5, b, dtype=torch.float64)[:, None]
    divergence = scale * torch.rand(b, t, generator=g, dtype=torch.float64).square()
    mask = torch.rand(b, t, generator=g) < 0.7
    mask[1] = False
    return divergence, mask


def naive_of(fn):
    return getattr(naive, fn.__name__)


@every
def test_equals_the_loop_over_log_ratios(fn):
    """verl's k2 and k3, from the log-probabilities."""
    g = torch.Generator().manual_seed(7)
    rollout = -3 * torch.rand(8, 7, generator=g, dtype=torch.float64)
    logprobs = rollout + torch.linspace(0.1, 1.2, 8)[:, None] * torch.randn(8, 7, generator=g, dtype=torch.float64)
    _, mask = batch()
    d = (logprobs - rollout).tolist()
    high = CASES[fn]
    for estimate, formula in ((kl_k2, lambda x: x * x / 2), (kl_k3, lambda x: math.exp(x) - 1 - x)):
        expected = naive_of(fn)(torch.tensor([[formula(x) for x in row] for row in d]), mask, high)
        keep = fn(estimate(rollout, logprobs, mask), mask, high)
        assert torch.equal(keep, expected) and 0 < keep.sum() < mask.sum()


def test_golden():
    divergence = torch.tensor([[0.5, 0.25, 1.0, 9.0], [0.5, 0.5, 0.5, 9.0], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True, False], [True, True, False, False], [False] * 4])
    x = (divergence, mask)
    assert token_divergence_mask(*x, 0.5).int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0] * 4]
    assert token_divergence_mask(*x, 0.49).int().tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [0] * 4]
    assert sequence_sum_divergence_mask(*x, 1.75).int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [0] * 4]
    assert sequence_sum_divergence_mask(*x, 1.74).int().tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [0] * 4]
    assert sequence_mean_divergence_mask(*x, 0.5).int().tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [0] * 4]
    assert sequence_mean_divergence_mask(*x, 0.59).int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [0] * 4]
    assert sequence_max_divergence_mask(*x, 0.99).int().tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [0] * 4]
    assert sequence_max_divergence_mask(*x, 1.0).int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [0] * 4]


@FEW
@given(seed=st.integers(0, 999), high=st.floats(0, 2))
def test_kinship(seed, high):
    divergence, mask = batch(seed)
    token, total, mean, largest = (fn(divergence, mask, high) for fn in FUNCTIONS)
    for keep in (token, total, mean, largest):
        assert not (keep & ~mask).any()
    assert not (total & ~largest).any() and not (largest & ~mean).any()  # sum >= maximum >= mean
    assert torch.equal(largest, mask & (token == mask).all(1, keepdim=True))
    one = torch.arange(7) == torch.arange(8)[:, None] % 7  # one token a sequence
    first, *others = (fn(divergence, one, high) for fn in FUNCTIONS)
    assert all(torch.equal(first, other) for other in others)


def test_bounds_on_k3_are_bounds_on_the_ratio():
    g = torch.Generator().manual_seed(2)
    rollout, (_, mask) = -torch.rand(8, 7, generator=g, dtype=torch.float64), batch()
    logprobs = rollout + torch.randn(8, 7, generator=g, dtype=torch.float64)
    high = 1.5 - 1 - math.log(1.5)  # of a ratio of 1.5, and of another below 1, found by halving
    low, top = 1e-9, 1.0
    for _ in range(200):
        middle = (low + top) / 2
        low, top = (middle, top) if middle - 1 - math.log(middle) > high else (low, middle)
    keep = token_divergence_mask(kl_k3(rollout, logprobs, mask), mask, high * (1 + 1e-12))
    assert torch.equal(keep, rejection_mask(logprobs, rollout, mask, top, 1.5)) and 0 < keep.sum() < mask.sum()


@every
def test_any_divergence_will_do(fn):
    logits, other = torch.randn(2, 8, 7, 5, generator=torch.Generator().manual_seed(0)).double()
    kl = align_with_tokens(full_vocabulary_kl(logits, other))
    _, mask = batch()
    keep = fn(kl, mask, 0.8)
    assert torch.equal(keep, naive_of(fn)(kl, mask, 0.8))


@every
def test_equal_logprobs_change_nothing(fn):
    lp, mask = batch()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for estimate in (kl_k2, kl_k3):
            assert torch.equal(fn(estimate(-lp.to(dtype), -lp.to(dtype), mask), mask, 0.0), mask)


@every
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e9, -1e9])
def test_what_is_masked_changes_nothing(fn, bad):
    divergence, mask = batch()
    for high in (0.0, 0.2, 0.5, math.inf):
        assert torch.equal(fn(torch.where(mask, divergence, bad), mask, high), fn(divergence, mask, high))


@every
def test_mask_equals_slice(fn):
    divergence, mask = batch(3)
    for high in (0.1, 0.3, 0.5):
        keep = fn(divergence, mask, high)
        for b in range(8):
            one = torch.ones(1, int(mask[b].sum()), dtype=torch.bool)
            assert torch.equal(keep[b][mask[b]], fn(divergence[b][mask[b]][None], one, high)[0])
        assert not keep[~mask].any()


@every
def test_nan_and_inf_are_rejected(fn):
    mask = torch.ones(3, 2, dtype=torch.bool)
    divergence = torch.tensor([[math.nan, 0.0], [math.inf, 0.0], [0.0, 0.0]])
    whole = fn is not token_divergence_mask
    assert fn(divergence, mask, 1.0).tolist() == [[False, not whole], [False, not whole], [True, True]]
    assert fn(divergence, mask, math.inf).tolist() == [[False, not whole], [True, True], [True, True]]


@every
def test_ends_of_the_estimates(fn):
    """k2 ends at 200 on both sides; k3 at 19 where the trainer finds a token impossible."""
    mask = torch.ones(2, 1, dtype=torch.bool)
    logprobs, rollout = torch.tensor([[-math.inf], [0.0]]), torch.tensor([[0.0], [-math.inf]])
    assert fn(kl_k2(rollout, logprobs, mask), mask, 200).tolist() == [[True], [True]]
    assert fn(kl_k2(rollout, logprobs, mask), mask, 199.9).tolist() == [[False], [False]]
    assert fn(kl_k3(rollout, logprobs, mask), mask, 19.001).tolist() == [[True], [False]]
    assert fn(kl_k3(rollout, logprobs, mask), mask, 18.999).tolist() == [[False], [False]]


@FEW
@given(seed=st.integers(0, 999), pad=st.integers(0, 5), fn=st.sampled_from(FUNCTIONS))
def test_rows_permute_and_padding_is_nothing(seed, pad, fn):
    high, (divergence, mask) = CASES[fn], batch(seed)
    keep = fn(divergence, mask, high)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(fn(divergence[order], mask[order], high), keep[order])
    wide = torch.nn.functional.pad(divergence, (0, pad), value=math.nan), torch.nn.functional.pad(mask, (0, pad))
    assert torch.equal(fn(*wide, high), torch.nn.functional.pad(keep, (0, pad)))


@every
def test_nothing_gets_a_gradient(fn):
    divergence, mask = batch()
    keep = fn(divergence.requires_grad_(), mask, 0.2)
    assert keep.dtype == torch.bool and not keep.requires_grad


@every
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0), (2, 3)])
def test_empty_batch(fn, shape):
    keep = fn(torch.full(shape, math.nan), torch.zeros(shape, dtype=torch.bool), 1.0)
    assert keep.shape == shape and not keep.any()


@every
def test_bfloat16_inputs(fn):
    divergence, mask = batch()
    small = divergence.bfloat16()
    assert torch.equal(fn(small, mask, 0.2), fn(small.float(), mask, 0.2))


def test_bfloat16_is_summed_in_float32():
    """600 times 1/256: a sum in bfloat16 stops growing at 1."""
    long, every_token = torch.full((1, 600), 1 / 256).bfloat16(), torch.ones(1, 600, dtype=torch.bool)
    assert sequence_sum_divergence_mask(long, every_token, 600 / 256).all()
    assert not sequence_sum_divergence_mask(long, every_token, 599 / 256).any()


def test_compiles_without_a_graph_break():
    def all_of_them(divergence, mask):
        return [fn(divergence, mask, 0.2) for fn in FUNCTIONS]

    x = batch()
    compiled = torch.compile(all_of_them, fullgraph=True, backend="eager")(*x)
    assert all(torch.equal(a, b) for a, b in zip(compiled, all_of_them(*x), strict=True))


def test_nothing_reads_a_value_on_the_host():
    with FakeTensorMode():
        for fn in FUNCTIONS:
            fn(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), 0.2)


@every
@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"divergence": torch.zeros(2)}, "divergence"),
        ({"divergence": torch.zeros(2, 2)}, "divergence"),
        ({"divergence": torch.zeros(2, 3, dtype=torch.long)}, "divergence"),
        ({"mask": torch.ones(2, 3)}, "mask"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, "mask"),
        ({"high": -0.1}, "high"),
        ({"high": math.nan}, "high"),
    ],
)
def test_errors_name_the_argument(fn, change, name):
    arguments = {"divergence": torch.zeros(2, 3), "mask": torch.ones(2, 3, dtype=torch.bool), "high": 1.0}
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        fn(**(arguments | change))
