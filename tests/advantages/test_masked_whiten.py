"""masked_whiten: the tokens of a mask shifted to mean 0 and scaled to variance 1."""

import math
import statistics

import pytest
import torch
from reward_batches import over_ranks

from rlkit.advantages import masked_whiten


def batch(seed=0, b=4, t=9):
    """Values and a mask with gaps; the first row is empty."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(b, t, generator=g) < 0.6
    mask[:1] = False
    return torch.randn(b, t, generator=g, dtype=torch.float64), mask


def test_masked_whiten_equals_the_loop():
    x, mask = batch()
    kept = x[mask].tolist()
    out = masked_whiten(x, mask, eps=0.5)
    mean, var = statistics.mean(kept), statistics.variance(kept)  # divisor n - 1
    assert out[mask].tolist() == pytest.approx([(v - mean) / math.sqrt(var + 0.5) for v in kept])
    assert out[~mask].abs().sum() == 0
    out = masked_whiten(x, mask, eps=0.0)[mask]
    assert out.mean().item() == pytest.approx(0, abs=1e-12) and out.var().item() == pytest.approx(1)


def test_masked_whiten_golden():
    x, mask = torch.tensor([[1.0, 2.0, 3.0, 50.0]]), torch.tensor([[True, True, True, False]])
    torch.testing.assert_close(masked_whiten(x, mask, eps=0.0), torch.tensor([[-1.0, 0.0, 1.0, 0.0]]))
    torch.testing.assert_close(masked_whiten(x, mask, eps=3.0), torch.tensor([[-0.5, 0.0, 0.5, 0.0]]))


def test_masked_whiten_in_parts_with_the_statistics_of_the_whole():
    x, mask = batch(5, 6, 7)
    whole = masked_whiten(x, mask)
    parts = over_ranks(lambda rows, add: masked_whiten(x[rows], mask[rows], global_sum=add), slice(0, 2), slice(2, 6))
    torch.testing.assert_close(torch.cat(parts), whole)
    assert not torch.allclose(torch.cat([masked_whiten(x[:3], mask[:3]), masked_whiten(x[3:], mask[3:])]), whole)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_masked_whiten_of_one_value_is_zero(eps):
    equal = torch.full((2, 50), 0.1)
    assert masked_whiten(equal, torch.ones(2, 50, dtype=torch.bool), eps=eps).abs().max() < 1e-6
    single = torch.tensor([[True, False]])
    assert masked_whiten(torch.tensor([[5.0, 6.0]]), single, eps=eps).tolist() == [[0.0, 0.0]]
    assert masked_whiten(torch.tensor([[5.0, 6.0]]), ~single & single, eps=eps).tolist() == [[0.0, 0.0]]
