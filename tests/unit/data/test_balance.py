from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data import karmarkar_karp, sequence_cost

COSTS = st.lists(st.integers(0, 1000), max_size=40)


def sums(costs: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(costs[i] for i in part) for part in parts]


def test_cost_is_tokens_plus_the_quadratic_share_of_attention() -> None:
    # 2 n^2 h over 24 h^2 with n = 24, h = 2: 24 * 24 * 2 * 2 / (24 * 4) = 24
    assert sequence_cost(24, hidden_size=2) == 24 + 24
    assert sequence_cost(0, hidden_size=8) == 0


def test_textbook_example_of_the_differencing_method() -> None:
    # Differences 8-7=1, 6-5=1, 4-1=3, 3-1=2: sums 16 and 14 (the optimum 15 is missed, as in the
    # literature).
    assert karmarkar_karp([8, 7, 6, 5, 4], 2) == [[1, 3, 4], [0, 2]]


def test_equal_size_splits_counts_evenly() -> None:
    parts = karmarkar_karp([100, 1, 1, 1, 1, 1], 3, equal_size=True)
    assert [len(p) for p in parts] == [2, 2, 2]
    assert sorted(map(len, karmarkar_karp([5, 4, 3, 2, 1], 3, equal_size=True))) == [1, 2, 2]


def test_fewer_items_than_parts_leave_parts_empty() -> None:
    assert karmarkar_karp([5], 3) == [[0], [], []]
    assert karmarkar_karp([], 2) == [[], []]


def test_no_part_is_refused() -> None:
    with pytest.raises(ValueError, match="num_parts=0 must be >= 1"):
        karmarkar_karp([1], 0)


@given(COSTS, st.integers(1, 6), st.booleans())
def test_every_item_is_in_exactly_one_part_and_none_is_empty(
    costs: list[int], num_parts: int, equal: bool
) -> None:
    parts = karmarkar_karp(costs, num_parts, equal_size=equal)
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    if len(costs) >= num_parts:
        assert all(parts)
    if equal:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 6))
def test_largest_part_is_at_most_the_mean_plus_the_largest_item(
    costs: list[int], num_parts: int
) -> None:
    assert max(sums(costs, karmarkar_karp(costs, num_parts))) <= sum(costs) / num_parts + max(costs)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(2, 3))
def test_close_to_the_best_of_all_partitions(costs: list[int], num_parts: int) -> None:
    best = min(
        max(
            sum(c for c, p in zip(costs, places, strict=True) if p == part)
            for part in range(num_parts)
        )
        for places in product(range(num_parts), repeat=len(costs))
    )
    # Proven for two parts is 7/6 of the best and 4/3 - 1/(3k) in general (Michiels et al. 2003).
    assert (
        max(sums(costs, karmarkar_karp(costs, num_parts)))
        <= best * (4 / 3 - 1 / (3 * num_parts)) + 1e-9
    )


@given(COSTS, st.integers(1, 6), st.booleans(), st.randoms())
def test_costs_of_the_parts_do_not_depend_on_the_order_of_the_items(
    costs: list[int], num_parts: int, equal: bool, rng: random.Random
) -> None:
    def contents(values: list[int]) -> list[list[int]]:
        return [
            sorted(values[i] for i in part)
            for part in karmarkar_karp(values, num_parts, equal_size=equal)
        ]

    shuffled = list(costs)
    rng.shuffle(shuffled)
    assert contents(shuffled) == contents(costs)
