"""Cost of a sequence, and number partitioning that spreads costs evenly. Pure Python."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["karmarkar_karp", "sequence_cost"]


def sequence_cost(num_tokens: int, hidden_size: int) -> float:
    """Work of one sequence in a transformer layer, in units of one token's matrix products.

    n tokens, width h: the projections and the MLP take 24 n h^2 floating-point operations (the 12
    h^2 weights of a plain layer, 2 each), causal attention 2 n^2 h (scores and weighted sum, half
    of n x n). Divided by 24 h^2: `n + n^2 / (12 h)`.
    """
    return num_tokens + num_tokens * num_tokens / (12 * hidden_size)


@dataclass(order=True)
class _State:
    """A partial partition in the heap: widest spread first, then the earliest made."""

    negative_spread: float
    serial: int
    parts: list[tuple[float, list[int]]]  # (sum, items), sums descending


def karmarkar_karp(
    costs: Sequence[float], num_parts: int, *, equal_size: bool = False
) -> list[list[int]]:
    """Split positions of `costs` into parts of nearly equal sum (largest differencing method).

    The two partial partitions of widest spread are merged, heaviest part with lightest, until one
    is left (Karmarkar and Karp 1982; https://en.wikipedia.org/wiki/Largest_differencing_method).

    Args:
        costs: >= 0 each.
        equal_size: numbers of items per part differ by at most one.

    Returns:
        `num_parts` ascending lists that cover every position once, heaviest first; none is empty
        when there are enough items. Ties are broken by position, so the result is the same in every
        process.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts={num_parts} must be >= 1")
    # Items are numbered by descending cost, so the outcome does not depend on the order of `costs`.
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    width = num_parts if equal_size else 1
    heap = [
        _make_state(
            serial,
            [(costs[order[r]], r) for r in range(first, min(first + width, len(order)))],
            num_parts,
        )
        for serial, first in enumerate(range(0, len(order), width))
    ]
    if not heap:
        return [[] for _ in range(num_parts)]
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        merged = [
            (a_sum + b_sum, a_items + b_items)
            for (a_sum, a_items), (b_sum, b_items) in zip(
                first.parts, reversed(second.parts), strict=True
            )
        ]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, _State(merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    parts = _fill_empty([items for _, items in heap[0].parts])
    return [sorted(order[r] for r in part) for part in parts]


def _make_state(serial: int, block: Sequence[tuple[float, int]], num_parts: int) -> _State:
    """Each item (cost, number) of the block in a part of its own, the other parts empty."""
    parts: list[tuple[float, list[int]]] = [(cost, [item]) for cost, item in block]
    parts += [(0.0, [])] * (num_parts - len(parts))
    return _State(parts[-1][0] - parts[0][0], serial, parts)


def _fill_empty(parts: list[list[int]]) -> list[list[int]]:
    """Items of no cost may all end in one part: move one from the largest to each empty part."""
    for part in parts:
        largest = max(parts, key=len)
        if not part and len(largest) > 1:
            part.append(largest.pop())
    return parts
