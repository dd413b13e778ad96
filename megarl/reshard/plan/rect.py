"""Rectangles of a canonical tensor and who holds them. A vector is a matrix with one column."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["IntArray", "Rect", "Shard", "TensorGroup", "cells"]

IntArray = NDArray[np.int64]


class Rect(NamedTuple):
    """Half open: rows row_start..row_stop, columns column_start..column_stop."""

    row_start: int
    row_stop: int
    column_start: int
    column_stop: int

    @property
    def area(self) -> int:
        return (self.row_stop - self.row_start) * (self.column_stop - self.column_start)

    def intersect(self, other: Rect) -> Rect | None:
        rows = max(self.row_start, other.row_start), min(self.row_stop, other.row_stop)
        columns = (
            max(self.column_start, other.column_start),
            min(self.column_stop, other.column_stop),
        )
        return Rect(*rows, *columns) if rows[0] < rows[1] and columns[0] < columns[1] else None

    def contains(self, other: Rect) -> bool:
        return self.intersect(other) == other


@dataclass(frozen=True, eq=False)
class Shard:
    """`ranks` (ascending, at least one) each hold `rect`."""

    rect: Rect
    ranks: IntArray


@dataclass(frozen=True, eq=False)
class TensorGroup:
    """Part `region` of N canonical tensors that lie alike: same shape, same shards, same holders.

    A rank holds disjoint rectangles of one tensor on each side.
    """

    name: str  # "{layer}" and "{expert}" stand for the numbers below
    region: Rect
    layers: IntArray  # [N] layer of each tensor, -1: no layer
    experts: IntArray  # [N] expert of each tensor, -1: none
    items: IntArray  # [N] position in the order of execution; tensors of one item travel together
    source: tuple[Shard, ...]  # training
    target: tuple[Shard, ...]  # rollout; ranks are GPUs of the job, too
    names: tuple[str, ...] = ()  # [N] the tensors' names, where `name` is no pattern
    is_replicated: bool = False  # every rank of a stage holds all of it, on both sides

    @property
    def num_tensors(self) -> int:
        return len(self.items)

    def tensor_name(self, index: int) -> str:
        if self.names:
            return self.names[index]
        return self.name.format(layer=self.layers[index], expert=self.experts[index])


def cells(
    source: Iterable[Rect], target: Iterable[Rect]
) -> list[tuple[Rect, tuple[int, ...], tuple[int, ...]]]:
    """Cut the plane along every edge: (cell, source rectangles around it, target rectangles
    around it).

    Only cells inside a target rectangle; in row-major order. No length needs to divide another.
    """
    source, target = list(source), list(target)
    both = source + target
    rows = sorted({r.row_start for r in both} | {r.row_stop for r in both})
    columns = sorted({r.column_start for r in both} | {r.column_stop for r in both})
    out = []
    for top, bottom in pairwise(rows):
        for left, right in pairwise(columns):
            cell = Rect(top, bottom, left, right)
            wanted = tuple(i for i, r in enumerate(target) if r.contains(cell))
            if wanted:
                held = tuple(i for i, r in enumerate(source) if r.contains(cell))
                out.append((cell, held, wanted))
    return out
