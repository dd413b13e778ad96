"""Plans of random layouts, run element by element, against sets of elements."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.reshard.plan import (
    Operation,
    Plan,
    Rect,
    Shard,
    TensorGroup,
    build_plan,
    find_errors,
    rank_operations,
)
from megarl.reshard.plan.traffic import count_traffic, cut_windows

Element = tuple[int, int, int, int]  # group, tensor of the group, row, column


@dataclass(frozen=True)
class Case:
    groups: list[TensorGroup]
    world_size: int
    gpus_per_node: int

    def plan(self) -> Plan:
        return build_plan(self.groups, world_size=self.world_size, gpus_per_node=self.gpus_per_node)

    def operations(self, rank: int) -> list[Operation]:
        return rank_operations(
            self.groups, rank, world_size=self.world_size, gpus_per_node=self.gpus_per_node
        )

    def elements(self, side: str) -> list[set[Element]]:
        """Of each rank."""
        out: list[set[Element]] = [set() for _ in range(self.world_size)]
        for g, group in enumerate(self.groups):
            for shard in group.source if side == "source" else group.target:
                for rank in shard.ranks.tolist():
                    out[rank] |= {
                        (g, k, *rc) for k in range(group.num_tensors) for rc in points(shard.rect)
                    }
        return out


def points(rect: Rect) -> list[tuple[int, int]]:
    return [
        (r, c)
        for r in range(rect.row_start, rect.row_stop)
        for c in range(rect.column_start, rect.column_stop)
    ]


@st.composite
def partitions(draw: st.DrawFn, rows: int, columns: int) -> list[Rect]:
    """Cut a [rows, columns] tensor along one dimension, or not, or into a grid."""

    def edges(length: int) -> list[int]:
        inner = draw(st.sets(st.integers(1, length - 1), max_size=3)) if length > 1 else set()
        return [0, *sorted(inner), length]

    how = draw(st.sampled_from(["whole", "rows", "columns", "grid"]))
    r = edges(rows) if how in ("rows", "grid") else [0, rows]
    c = edges(columns) if how in ("columns", "grid") else [0, columns]
    return [Rect(a, b, x, y) for a, b in pairwise(r) for x, y in pairwise(c)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world = draw(st.integers(1, 8))
    ranks = st.sets(st.integers(0, world - 1), min_size=1).map(lambda s: np.array(sorted(s)))
    groups, item = [], 0
    for g in range(draw(st.integers(1, 3))):
        rows, columns, num = (
            draw(st.integers(1, 6)),
            draw(st.integers(1, 4)),
            draw(st.integers(1, 4)),
        )
        source = [Shard(r, draw(ranks)) for r in draw(partitions(rows, columns))]
        wanted = draw(partitions(rows, columns))
        target = [Shard(r, draw(ranks)) for r in wanted if draw(st.booleans()) or len(wanted) == 1]
        groups.append(
            TensorGroup(
                f"t{g}.{{layer}}", Rect(0, rows, 0, columns), np.arange(num), np.full(num, -1),
                np.arange(item, item + num), tuple(source), tuple(target),
            )
        )  # fmt: skip
        item += num
    return Case(groups, world, draw(st.integers(1, world)))


@settings(deadline=None, max_examples=150)
@given(cases())
def test_running_the_plan_gives_each_rank_each_element_once_from_a_holder(case: Case) -> None:
    held, wanted = case.elements("source"), case.elements("target")
    assert find_errors(case.plan()) == []
    got: list[Counter[Element]] = [Counter() for _ in range(case.world_size)]
    all_operations = [case.operations(rank) for rank in range(case.world_size)]
    node = [rank // case.gpus_per_node for rank in range(case.world_size)]
    into_node: Counter[tuple[int, Element]] = Counter()
    received = np.zeros(case.world_size, int)
    for op in sorted({op for ops in all_operations for op in ops}):
        # both ends know of it, and nobody else
        knowing = {r for r, ops in enumerate(all_operations) if op in ops}
        assert knowing == {op.source, op.target}
        g, k = locate(case, op)
        elements = {(g, k, *rc) for rc in points(op.cell)}
        has = set(got[op.source]) if op.is_forward else held[op.source]
        assert elements <= has
        got[op.target].update(elements)
        if op.source != op.target:
            received[op.target] += len(elements)
        if node[op.source] != node[op.target]:
            into_node.update((node[op.target], e) for e in elements)
    assert [set(c) for c in got] == wanted
    assert all(n == 1 for c in got for n in c.values())
    # the bounds, from sets of elements
    assert received.tolist() == [len(w - h) for w, h in zip(wanted, held, strict=True)]
    for n in range(max(node) + 1):
        members = [r for r in range(case.world_size) if node[r] == n]
        missing = set().union(*(wanted[r] for r in members)) - set().union(
            *(held[r] for r in members)
        )
        assert {e: c for (v, e), c in into_node.items() if v == n} == dict.fromkeys(missing, 1)


def locate(case: Case, op: Operation) -> tuple[int, int]:
    first = 0
    for g, group in enumerate(case.groups):
        if op.tensor < first + group.num_tensors:
            return g, op.tensor - first
        first += group.num_tensors
    raise AssertionError(op)


@settings(deadline=None, max_examples=100)
@given(cases())
def test_traffic_and_windows_count_the_operations(case: Case) -> None:
    traffic = count_traffic(case.plan())
    expected = {name: np.zeros_like(traffic.local) for name in ("local", "in", "out", "far", "ops")}
    packed: set[tuple[int, int, int, Rect]] = set()
    for op in {op for rank in range(case.world_size) for op in case.operations(rank)}:
        if op.source == op.target:
            expected["local"][op.item, op.source] += op.cell.area
            continue
        expected["out"][op.item, op.source] += op.cell.area
        expected["in"][op.item, op.target] += op.cell.area
        if op.source // case.gpus_per_node != op.target // case.gpus_per_node:
            expected["far"][op.item, op.target] += op.cell.area
        expected["ops"][op.item, [op.source, op.target]] += 1
        if not op.is_forward:
            packed.add((op.item, op.source, op.tensor, op.cell))
    pack = np.zeros_like(traffic.local)
    for item, source, _, cell in packed:
        pack[item, source] += cell.area
    for got, want in (
        (traffic.local, expected["local"]), (traffic.received, expected["in"]),
        (traffic.near_out + traffic.far_out, expected["out"]), (traffic.far_in, expected["far"]),
        (traffic.num_ops, expected["ops"]), (traffic.packed, pack),
    ):  # fmt: skip
        np.testing.assert_array_equal(got, want)
    windows = cut_windows(traffic, max_elements=20, max_ops=6)
    assert [w.start for w in windows[1:]] == [w.stop for w in windows[:-1]]
    assert (windows[0].start, windows[-1].stop) == (0, len(traffic.local))
    loads = [
        (traffic.packed + traffic.received, 20),
        (traffic.local + traffic.received, 20),
        (traffic.num_ops, 6),
    ]
    for i, w in enumerate(windows):
        for array, limit in loads:
            assert w.stop == w.start + 1 or array[w.start : w.stop].sum(axis=0).max() <= limit
        if i + 1 < len(windows):  # no window could have been longer
            assert any(a[w.start : w.stop + 1].sum(axis=0).max() > n for a, n in loads)


def test_three_shards_become_two_without_a_common_multiple() -> None:
    thirds = tuple(Shard(Rect(2 * i, 2 * i + 2, 0, 1), np.array([i])) for i in range(3))
    halves = tuple(Shard(Rect(3 * i, 3 * i + 3, 0, 1), np.array([i])) for i in range(2))
    one = np.zeros(1, np.int64)
    group = TensorGroup("t", Rect(0, 6, 0, 1), one, one, one, thirds, halves)
    moves = {
        (op.source, op.target, op.cell.row_start, op.cell.row_stop)
        for rank in range(3)
        for op in rank_operations([group], rank, world_size=3, gpus_per_node=8)
    }
    assert moves == {(0, 0, 0, 2), (1, 0, 2, 3), (1, 1, 3, 4), (2, 1, 4, 6)}


def test_replicas_share_the_sending() -> None:
    """4 holders on two nodes, 12 tensors, 4 takers on two other nodes: 2 fetches each, 24 sends
    over 4.
    """
    num = np.arange(12)
    whole = Rect(0, 1, 0, 1)
    group = TensorGroup(
        "{layer}",
        whole,
        num,
        num,
        num,
        (Shard(whole, np.arange(4)),),
        (Shard(whole, np.arange(4, 8)),),
    )
    traffic = count_traffic(build_plan([group], world_size=8, gpus_per_node=2))
    assert traffic.far_out.sum(axis=0).tolist() == [6, 6, 6, 6, 0, 0, 0, 0]
    assert traffic.far_in.sum(axis=0).tolist() == [0, 0, 0, 0, 6, 6, 6, 6]
    assert traffic.near_in.sum(axis=0).tolist() == [0, 0, 0, 0, 6, 6, 6, 6]


def test_an_element_nobody_holds_is_an_error() -> None:
    one = np.zeros(1, np.int64)
    half, whole = Rect(0, 1, 0, 1), Rect(0, 2, 0, 1)
    group = TensorGroup("t", whole, one, one, one, (Shard(half, one),), (Shard(whole, one),))
    with pytest.raises(ValueError, match="no training rank holds"):
        build_plan([group], world_size=1, gpus_per_node=1)
