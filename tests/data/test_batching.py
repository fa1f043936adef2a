import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.data.batching import balanced_partitions, token_budget_batches

LENGTHS = st.lists(st.integers(0, 40), max_size=30)


def sums(lengths: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(lengths[row] for row in part) for part in parts]


def test_golden_batches():
    assert token_budget_batches([4, 8, 1, 4, 2, 1], 10) == [[1, 4], [0, 2, 3, 5]]
    assert token_budget_batches([3, 20, 3], 10) == [[1], [0, 2]]  # one row over the budget, alone
    assert token_budget_batches([3, 3, 3, 3], 6, micro_batch_group=[7, -1, 7, -1]) == [[0, 2], [1, 3]]
    # a group over the budget
    assert token_budget_batches([6, 1, 6, 2], 10, micro_batch_group=[0, 1, 0, 1]) == [[0, 2], [1, 3]]
    assert token_budget_batches([0, 0], 1) == [[0, 1]]
    assert token_budget_batches([], 1) == []


@given(lengths=LENGTHS, budget=st.integers(1, 60), data=st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_batches_hold_every_row_once_within_the_budget(lengths, budget, data):
    ids = data.draw(st.none() | st.lists(st.integers(0, 8), min_size=len(lengths), max_size=len(lengths)))
    batches = token_budget_batches(lengths, budget, micro_batch_group=ids)
    assert batches == token_budget_batches(lengths, budget, micro_batch_group=ids)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert all(batch == sorted(batch) and batch for batch in batches)
    groups = list(range(len(lengths))) if ids is None else ids
    for total, batch in zip(sums(lengths, batches), batches, strict=True):
        here = {groups[row] for row in batch}
        assert total <= budget or len(here) == 1
        assert [row for row in range(len(lengths)) if groups[row] in here] == batch


def test_batches_are_few():
    """Against the lower bound ceil(sum / budget), and against the true optimum where it can be searched."""
    for seed in range(5):
        rng = random.Random(seed)
        for lengths, budget in [
            ([rng.randint(100, 4096) for _ in range(1024)], 16384),
            ([min(8192, int(rng.lognormvariate(6.5, 0.8))) for _ in range(512)], 16384),
        ]:
            assert len(token_budget_batches(lengths, budget)) <= -(-sum(lengths) // budget) + 1
        lengths = [rng.randint(1, 10) for _ in range(6)]
        best = min(
            len(set(cut)) for cut in product(range(4), repeat=6)
            if all(sum(n for n, c in zip(lengths, cut, strict=True) if c == part) <= 15 for part in range(4))
        )  # fmt: skip
        assert len(token_budget_batches(lengths, 15)) <= best + 1


def test_golden_partitions():
    assert balanced_partitions([5, 4, 3, 3, 3], 2) == [[0, 3], [1, 2, 4]]
    assert balanced_partitions([9, 1, 1, 1], 2) == [[0], [1, 2, 3]]
    assert balanced_partitions([9, 1, 1, 2], 2) == [[0], [1, 2, 3]]
    assert balanced_partitions([1], 3) == [[0], [], []]
    assert balanced_partitions([], 2) == [[], []]


@given(lengths=LENGTHS, k=st.integers(1, 6))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_partitions_hold_every_row_once_and_balance(lengths, k):
    parts = balanced_partitions(lengths, k)
    assert parts == balanced_partitions(lengths, k) and len(parts) == k
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    totals = sums(lengths, parts)
    assert max(totals) - min(totals) <= max(lengths, default=0)


def test_partitions_of_a_batch_are_tight():
    rng = random.Random(0)
    lengths = [rng.randint(100, 4096) for _ in range(1024)]
    totals = sums(lengths, balanced_partitions(lengths, 64))
    assert max(totals) < 1.005 * sum(lengths) / 64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: token_budget_batches([1.5], 4), "lengths: expected integers"),
        (lambda: token_budget_batches([3, -1], 4), "lengths: expected 0 or more, got -1 in row 1"),
        (lambda: token_budget_batches([1], 0), "budget: expected at least 1 token, got 0"),
        (
            lambda: token_budget_batches([1, 2], 4, micro_batch_group=[0]),
            "micro_batch_group: expected 2 ids, one per row, got 1",
        ),
        (lambda: balanced_partitions([1], 0), "k: expected at least 1 list, got 0"),
        (lambda: balanced_partitions(["a"], 1), "lengths: expected integers"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
