"""Which rank rows move to. That the rows arrive, and that the gradient stays the same, is tested in `test_ranks.py`."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.data import append_response, collate, prompt_sample
from rlkit.engines.balance import assign_to_ranks, rebalance_across_ranks
from rlkit.engines.distributed import init_distributed

COSTS = st.lists(st.lists(st.integers(0, 50), max_size=5), min_size=1, max_size=4)


def sums(costs, new_ranks):
    """The sum of costs on each rank."""
    found = [0] * len(costs)
    for of_rank, ranks in zip(costs, new_ranks, strict=True):
        for cost, rank in zip(of_rank, ranks, strict=True):
            found[rank] += cost
    return found


def test_golden_assignments():
    assert assign_to_ranks([[9, 8, 7], [3]]) == [[0, 1, 1], [0]]
    assert assign_to_ranks([[4, 4], [4, 4]]) == [[0, 0], [1, 1]]  # nothing to gain: nothing moves
    assert assign_to_ranks([[5, 5, 5], []]) == [[0, 1, 0], []]
    assert assign_to_ranks([[], []]) == [[], []] and assign_to_ranks([[3, 1]]) == [[0, 0]]


@given(costs=COSTS)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_largest_sum_does_not_grow_and_is_near_its_minimum(costs):
    new_ranks = assign_to_ranks(costs)
    assert [len(of_rank) for of_rank in new_ranks] == [len(of_rank) for of_rank in costs]
    assert new_ranks == assign_to_ranks(costs)
    assert max(sums(costs, new_ranks)) <= max(map(sum, costs))
    flat = [cost for of_rank in costs for cost in of_rank]
    if 1 <= len(flat) <= 6:
        best = min(
            max(sum(cost for cost, rank in zip(flat, ranks, strict=True) if rank == k) for k in range(len(costs)))
            for ranks in product(range(len(costs)), repeat=len(flat))
        )
        assert max(sums(costs, new_ranks)) <= 4 / 3 * best


def test_one_rank_keeps_its_batch():
    init_distributed("cpu")
    batch = collate([append_response(prompt_sample([1, 2]), [3], [-1.0])])
    assert rebalance_across_ranks(batch) is batch and rebalance_across_ranks(batch, None) is batch
