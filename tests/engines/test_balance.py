"""Which rank rows are dealt to. That they arrive, and that the gradient is the same, stands in `test_ranks.py`."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.data import collate, extend, prompt
from rlkit.engines.balance import deal, rebalance_across_ranks
from rlkit.engines.distributed import init_distributed

COSTS = st.lists(st.lists(st.integers(0, 50), max_size=5), min_size=1, max_size=4)


def sums(costs, to):
    found = [0] * len(costs)
    for own, new in zip(costs, to, strict=True):
        for cost, rank in zip(own, new, strict=True):
            found[rank] += cost
    return found


def test_golden_deals():
    assert deal([[9, 8, 7], [3]]) == [[0, 1, 1], [0]]
    assert deal([[4, 4], [4, 4]]) == [[0, 0], [1, 1]]  # nothing to gain: nothing moves
    assert deal([[5, 5, 5], []]) == [[0, 1, 0], []]
    assert deal([[], []]) == [[], []] and deal([[3, 1]]) == [[0, 0]]


@given(costs=COSTS)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_rank_has_more_than_the_dearest_had_and_nearly_the_least_it_can(costs):
    to = deal(costs)
    assert [len(own) for own in to] == [len(own) for own in costs] and to == deal(costs)
    assert max(sums(costs, to)) <= max(map(sum, costs))
    flat = [cost for own in costs for cost in own]
    if 1 <= len(flat) <= 6:
        best = min(
            max(sum(cost for cost, rank in zip(flat, ranks, strict=True) if rank == k) for k in range(len(costs)))
            for ranks in product(range(len(costs)), repeat=len(flat))
        )
        assert max(sums(costs, to)) <= 4 / 3 * best


def test_one_rank_keeps_its_batch():
    init_distributed("cpu")
    batch = collate([extend(prompt([1, 2]), [3], [-1.0])])
    assert rebalance_across_ranks(batch) is batch and rebalance_across_ranks(batch, None) is batch
