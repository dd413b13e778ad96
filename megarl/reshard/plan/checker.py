"""Exactly once: does a plan write each wanted element once, from a rank that truly has it?

Knows nothing of how the planner chose: it collects what each rank would be given according to the
blocks, paints it on a grid, and compares with the layouts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megarl.reshard.plan.planner import Block, Plan
from megarl.reshard.plan.rect import Rect, TensorGroup

__all__ = ["find_errors"]


def find_errors(plan: Plan, *, tensors: dict[str, tuple[int, int]] | None = None) -> list[str]:
    """What is wrong with the plan, one line per finding; empty: each element exactly once.

    Args:
        plan: to check.
        tensors: {name: (rows, columns)} that the groups must tile, one entry per tensor, names
        as in
            the groups' templates; None: do not check.
    """
    blocks: dict[int, list[Block]] = defaultdict(list)
    for block in plan.blocks:
        blocks[block.group].append(block)
    errors = [] if tensors is None else _check_tiling(plan.groups, tensors)
    for number, group in enumerate(plan.groups):
        where = f"{group.name} ({group.num_tensors} tensors) {group.region}"
        errors += [f"{where}: {e}" for e in _check_coverage(group, blocks[number], plan.world_size)]
        for block in blocks[number]:
            errors += [f"{where} {block.cell}: {e}" for e in _check_senders(group, block, plan)]
    errors += [f"block of unknown group {n}" for n in blocks if not 0 <= n < len(plan.groups)]
    return errors


def _count(wanted: Sequence[Rect], given: Sequence[Rect]) -> bool:
    """Paint both on the grid of all their edges: equal, and nothing painted twice?"""
    everything = [*wanted, *given]
    rows = sorted({x for r in everything for x in (r.row_start, r.row_stop)})
    columns = sorted({x for r in everything for x in (r.column_start, r.column_stop)})

    def paint(rects: Sequence[Rect]) -> NDArray[np.int64]:
        grid = np.zeros((len(rows), len(columns)), np.int64)
        for r in rects:
            grid[
                rows.index(r.row_start) : rows.index(r.row_stop),
                columns.index(r.column_start) : columns.index(r.column_stop),
            ] += 1
        return grid

    return np.array_equal(np.minimum(paint(wanted), 1), paint(given))


def _check_coverage(group: TensorGroup, blocks: list[Block], world_size: int) -> list[str]:
    """Each target rank is given its rectangles once, other ranks nothing."""
    wanted = [(s.rect, s.ranks) for s in group.target]
    given = [(b.cell, ranks) for b in blocks for ranks in (b.local, b.target)]
    table = np.zeros((len(wanted) + len(given), world_size), np.int16)
    for row, (_, ranks) in enumerate(wanted + given):
        np.add.at(table[row], ranks, 1)
    errors = []
    for rank in _examples(table):
        times = table[:, rank].tolist()
        mine = [r for (r, _), n in zip(wanted, times[: len(wanted)], strict=True) if n]
        got = [r for (r, _), n in zip(given, times[len(wanted) :], strict=True) for _ in range(n)]
        if not _count(mine, got):
            errors.append(f"rank {rank} wants {mine} and is given {got}")
    return errors


def _examples(table: NDArray[np.int16]) -> list[int]:
    """One rank for each distinct column of `table` other than zero: ranks treated alike are
    alike.
    """
    if table.max(initial=0) <= 1 and len(table) <= 62:
        codes = (1 << np.arange(len(table))) @ table.astype(np.int64)  # columns as binary numbers
        distinct, ranks = np.unique(codes, return_index=True)
        return [rank for code, rank in zip(distinct.tolist(), ranks.tolist(), strict=True) if code]
    return np.flatnonzero(table.any(axis=0)).tolist()


def _check_senders(group: TensorGroup, block: Block, plan: Plan) -> list[str]:
    """Each sender holds the cell, or has fetched it before and hands it on inside its node."""
    holds = np.zeros(plan.world_size, np.bool_)
    for shard in group.source:
        if shard.rect.contains(block.cell):
            holds[shard.ranks] = True
    shape = group.num_tensors, len(block.target)
    if block.source.shape != shape or block.is_forward.shape != shape:
        return [f"senders have shape {block.source.shape}, not {shape}"]
    errors = []
    if not holds[block.local].all():
        errors.append(f"rank {block.local[~holds[block.local]][0]} copies what it does not hold")
    fetched = np.zeros((group.num_tensors, plan.world_size), np.bool_)
    tensor, position = np.nonzero(~block.is_forward)
    sender = block.source[tensor, position]
    if not holds[sender].all():
        errors.append(f"rank {sender[~holds[sender]][0]} sends what it does not hold")
    fetched[tensor, block.target[position]] = True
    tensor, position = np.nonzero(block.is_forward)
    sender = block.source[tensor, position]
    if not fetched[tensor, sender].all():
        errors.append("a rank hands on what it has not received")
    node = plan.gpus_per_node
    if (sender // node != block.target[position] // node).any():
        errors.append("a rank hands on to another node")
    if (block.source == block.target).any():
        errors.append("a rank sends to itself")
    return errors


def _check_tiling(groups: Sequence[TensorGroup], tensors: dict[str, tuple[int, int]]) -> list[str]:
    """The groups' regions tile each tensor, and the targets together want all of each region."""
    errors = []
    regions: dict[str, list[Rect]] = {name: [] for name in tensors}
    for group in groups:
        for k in range(group.num_tensors):
            regions.setdefault(group.tensor_name(k), []).append(group.region)
    good: set[tuple[tuple[int, int], tuple[Rect, ...]]] = set()
    for name, parts in regions.items():
        if name not in tensors:
            errors.append(f"{name} is no tensor of the model")
            continue
        key = tensors[name], tuple(parts)
        if key not in good:
            if _count([Rect(0, tensors[name][0], 0, tensors[name][1])], parts):
                good.add(key)
            else:
                errors.append(f"{name}: {parts} do not tile {tensors[name]}")
    for group in groups:
        union = [s.rect for s in group.target]
        if not _covers(group.region, union):
            errors.append(f"{group.name} {group.region}: the rollout ranks want only {union}")
    return errors


def _covers(region: Rect, rects: list[Rect]) -> bool:
    """Is every element of `region` in some rectangle?"""
    rows = sorted({region.row_start, region.row_stop, *(x for r in rects for x in r[:2])})
    columns = sorted({region.column_start, region.column_stop, *(x for r in rects for x in r[2:])})
    small = (Rect(a, b, c, d) for a, b in pairwise(rows) for c, d in pairwise(columns))
    return all(any(r.contains(s) for r in rects) for s in small if region.contains(s))
