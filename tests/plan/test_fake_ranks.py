"""Tensors without memory: operations whose result depends on real masks."""

import pytest
import torch

from rlkit.plan import fake_ranks
from rlkit.plan.fake_ranks import FloatsWithoutMemory
from rlkit.plan.ledger import Ledger


@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 2, 3)])
def test_a_real_mask_chooses_as_many_numbers_as_it_has_true_entries(shape):
    mask = torch.tensor([True, False, True, True, False, False]).reshape(shape)
    with FloatsWithoutMemory(Ledger()):
        x = torch.empty(shape, requires_grad=True)
        chosen = x[mask]
        y = torch.zeros_like(x)
        y[mask] = chosen
        y.sum().backward()
    assert chosen.shape == (3,) and y.shape == shape and x.grad.shape == shape


def test_the_positions_of_a_mask_take_no_memory():
    """Those of masks over all numbers of all tokens, as in ERNIE 4.5 VL, took a GiB for a layer, and much time."""
    mask = torch.ones(1, 100, 20, dtype=torch.bool)
    positions = fake_ranks._positions([mask, None])
    assert [None if x is None else x.shape for x in positions] == [(2000,)] * 3 + [None]
    assert all(x is None or x.untyped_storage().nbytes() <= 8 for x in positions)
