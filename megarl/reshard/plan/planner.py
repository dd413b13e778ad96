"""Who sends which cell of which tensor to whom. Pure: every rank computes the same, or its part.

Per cell and target rank: keep it where the rank holds it, else take it from a holder in the node,
else one rank of the node fetches it from another node and hands it on inside. Holders take turns
by the tensor's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from megarl.reshard.plan.rect import IntArray, Rect, TensorGroup, cells

__all__ = ["Block", "Operation", "Plan", "build_plan", "rank_operations"]


@dataclass(frozen=True, eq=False)
class Block:
    """One cell of all N tensors of a group."""

    group: int
    cell: Rect
    local: IntArray  # [L] ranks that copy the cell from their own shard
    target: IntArray  # [M] ranks that receive it, ascending
    source: NDArray[np.int32]  # [N, M] who sends it to them
    is_forward: NDArray[np.bool_]  # [N, M] the sender has itself just received it


@dataclass(frozen=True, eq=False)
class Plan:
    groups: Sequence[TensorGroup]
    blocks: Sequence[Block]
    world_size: int
    gpus_per_node: int


@dataclass(frozen=True, order=True)
class Operation:
    """What a rank does with one cell. Sorted, both ends of a transfer see them in the same
    order.
    """

    item: int
    is_forward: bool  # after the others of its window
    tensor: int  # number of the tensor in the plan
    cell: Rect
    source: int
    target: int  # == source: a local copy
    name: str
    region: Rect


def build_plan(groups: Sequence[TensorGroup], *, world_size: int, gpus_per_node: int) -> Plan:
    """The whole plan.

    Raises:
        ValueError: some wanted element is held by no source.
    """
    blocks = [block for _, block in _blocks(groups, world_size, gpus_per_node, None)]
    return Plan(groups, blocks, world_size, gpus_per_node)


def rank_operations(
    groups: Sequence[TensorGroup], rank: int, *, world_size: int, gpus_per_node: int
) -> list[Operation]:
    """What `rank` copies, sends and receives, in order; groups without it are only stepped over."""
    out: list[Operation] = []
    for first, block in _blocks(groups, world_size, gpus_per_node, rank):
        group = groups[block.group]
        # of each edge: tensor, source, target, is_forward
        edges = [(k, rank, rank, False) for k in range(group.num_tensors) if rank in block.local]
        mine = (block.source == rank) | (block.target == rank)[None, :]
        for k, m in zip(*np.nonzero(mine), strict=True):
            edge = int(block.source[k, m]), int(block.target[m]), bool(block.is_forward[k, m])
            edges.append((int(k), *edge))
        out += [
            Operation(
                int(group.items[k]), forward, first + k, block.cell, source, target,
                group.tensor_name(k), group.region,
            )
            for k, source, target, forward in edges
        ]  # fmt: skip
    return sorted(out)


@lru_cache(maxsize=4096)
def _cells(
    source: tuple[Rect, ...], target: tuple[Rect, ...]
) -> list[tuple[Rect, tuple[int, ...], tuple[int, ...]]]:
    return cells(source, target)


def _blocks(
    groups: Sequence[TensorGroup], world_size: int, gpus_per_node: int, rank: int | None
) -> Iterator[tuple[int, Block]]:
    """(number of the group's first tensor, block), of all groups or of those `rank` takes part
    in.
    """
    node = np.arange(world_size) // gpus_per_node
    firsts = accumulate((g.num_tensors for g in groups), initial=0)
    for number, (group, first) in enumerate(zip(groups, firsts, strict=False)):
        table = _cells(tuple(s.rect for s in group.source), tuple(s.rect for s in group.target))
        for turn, (cell, held, wanted) in enumerate(table):
            if not held:
                raise ValueError(f"no training rank holds {cell} of {group.tensor_name(0)}")
            holders = _union([group.source[i].ranks for i in held])
            takers = _union([group.target[i].ranks for i in wanted])
            if rank is not None and not (rank in holders or rank in takers):
                continue
            tensors = np.arange(first + turn, first + turn + group.num_tensors)
            yield first, _route(number, cell, holders, takers, node, tensors)


def _union(ranks: list[IntArray]) -> IntArray:
    return ranks[0] if len(ranks) == 1 else np.unique(np.concatenate(ranks))


def _route(
    group: int, cell: Rect, holders: IntArray, takers: IntArray, node: IntArray, tensors: IntArray
) -> Block:
    """Choose the senders. `tensors` [N]: numbers that decide whose turn it is."""
    is_holder = np.zeros(len(node), np.bool_)
    is_holder[holders] = True
    local, target = takers[is_holder[takers]], takers[~is_holder[takers]]
    shape = len(tensors), len(target)
    source = np.zeros(shape, np.int32)
    is_forward = np.zeros(shape, np.bool_)
    if len(target):
        target_node, turn = node[target], tensors[:, None]
        low = np.searchsorted(node[holders], target_node, "left")
        near = np.searchsorted(node[holders], target_node, "right") - low
        inside = np.flatnonzero(near)
        if len(inside):
            source[:, inside] = holders[low[inside] + (turn + inside) % near[inside]]
        outside = np.flatnonzero(near == 0)
        if len(outside):
            _, start, which, count = np.unique(
                target_node[outside], return_index=True, return_inverse=True, return_counts=True
            )
            fetcher = outside[start[which] + turn % count[which]]  # [N, outside] index in target
            far = holders[(turn * len(start) + which) % len(holders)]
            is_forward[:, outside] = fetcher != outside
            source[:, outside] = np.where(fetcher == outside, far, target[fetcher])
    return Block(group, cell, local, target, source, is_forward)
