"""From WeightLayouts to a plan and back: what a rank packs and unpacks of its own parameters.

`groups_from_layouts` plans from what running models and engines say they hold, instead of from
config.json; `local_pieces` finds a planned cell in a rank's parameters. A cell that lies in several
pieces (Megatron interleaves q, k, v) or several parameters gives several pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from megarl.reshard.plan.planner import Operation
from megarl.reshard.plan.rect import IntArray, Rect, Shard, TensorGroup
from megarl.reshard.plan.traffic import Window

if TYPE_CHECKING:
    from megarl.types.layout import Placement, WeightLayout

__all__ = ["LocalPiece", "WindowOperations", "groups_from_layouts", "local_pieces", "split_windows"]

Holders = dict[Rect, list[int]]  # rectangle of a tensor -> ranks
Clipped = tuple[tuple[Rect, tuple[int, ...]], ...]  # the same inside a region, in order


@dataclass(frozen=True)
class LocalPiece:
    """`cell[in_cell]` lies at `parameter[in_parameter]`; a vector's cell is one column."""

    parameter: str
    in_parameter: tuple[slice, ...]
    in_cell: tuple[slice, slice]


@dataclass(frozen=True)
class WindowOperations:
    """What one rank does in one window: all of `first`, then all of `forwards`."""

    first: list[Operation]  # local copies, sends from the own shard, and what they bring
    forwards: list[Operation]  # handing on, and being handed, what `first` has fetched


def groups_from_layouts(
    train: Sequence[WeightLayout | None],
    rollout: Sequence[WeightLayout | None],
    *,
    max_item_bytes: int,
    element_size: int,
) -> list[TensorGroup]:
    """Groups of the tensors that the rollout side wants, in its order; one item per tensor or part.

    Args:
        train, rollout: layout of each GPU on either side, by GPU; None: it plays no part there.
        max_item_bytes: rows of larger tensors are split, down to one row.

    Raises:
        ValueError: both sides disagree about the shape of a tensor, or a tensor has more than two
            dimensions.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    held, wanted = (_collect(side, shapes) for side in (train, rollout))
    alike: dict[tuple[Rect, Clipped, Clipped], tuple[list[str], list[int]]] = {}
    item = 0
    for name in wanted:
        rows, columns = _matrix(name, shapes[name])
        height = max(max_item_bytes // (element_size * columns), 1)
        for top, bottom in pairwise([*range(0, rows, height), rows]):
            region = Rect(top, bottom, 0, columns)
            key = region, _clip(held.get(name, {}), region), _clip(wanted[name], region)
            names, items = alike.setdefault(key, ([], []))
            names.append(name)
            items.append(item)
            item += 1
    return [_group(*key, names, items) for key, (names, items) in alike.items()]


def _collect(
    layouts: Sequence[WeightLayout | None], shapes: dict[str, tuple[int, ...]]
) -> dict[str, Holders]:
    """{tensor: who holds which rectangle}; fills `shapes`."""
    out: dict[str, Holders] = {}
    for rank, layout in enumerate(layouts):
        if layout is None:
            continue
        for name, placements in layout.by_canonical().items():
            shape = layout.canonical_shapes[name]
            if shapes.setdefault(name, shape) != shape:
                raise ValueError(f"{name} is {shapes[name]} on one rank and {shape} on rank {rank}")
            for rect in _merge({_rect(p) for p in placements}):
                out.setdefault(name, {}).setdefault(rect, []).append(rank)
    return out


def _matrix(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) > 2:
        raise ValueError(f"{name} has shape {shape}; describe it as tensors of two dimensions")
    return shape[0], shape[1] if len(shape) == 2 else 1


def _rect(placement: Placement) -> Rect:
    start, stop = placement.source.start, placement.source.stop
    columns = (start[1], stop[1]) if len(start) == 2 else (0, 1)
    return Rect(start[0], stop[0], *columns)


def _merge(rects: set[Rect]) -> list[Rect]:
    """Join rectangles of the same columns whose rows follow each other or overlap."""
    out: list[Rect] = []
    for rect in sorted(rects, key=lambda r: (r.column_start, r.column_stop, r.row_start)):
        last = out[-1] if out else None
        if last and last[2:] == rect[2:] and rect.row_start <= last.row_stop:
            out[-1] = last._replace(row_stop=max(last.row_stop, rect.row_stop))
        else:
            out.append(rect)
    return out


def _clip(holders: Holders, region: Rect) -> Clipped:
    clipped: Holders = {}
    for rect, ranks in holders.items():
        inside = rect.intersect(region)
        if inside:
            clipped.setdefault(inside, []).extend(ranks)
    return tuple((rect, tuple(sorted(ranks))) for rect, ranks in sorted(clipped.items()))


def _group(
    region: Rect, source: Clipped, target: Clipped, names: list[str], items: list[int]
) -> TensorGroup:
    def shards(clipped: Clipped) -> tuple[Shard, ...]:
        return tuple(Shard(rect, np.array(ranks, np.int64)) for rect, ranks in clipped)

    none: IntArray = np.full(len(items), -1)
    return TensorGroup(
        names[0], region, none, none, np.array(items), shards(source), shards(target),
        names=tuple(names),
    )  # fmt: skip


def local_pieces(placements: Sequence[Placement], cell: Rect) -> list[LocalPiece]:
    """Where `cell` of a tensor lies in this rank's parameters.

    Args:
        placements: of that tensor, as WeightLayout.by_canonical gives them.
    """
    out = []
    for p in placements:
        rect = _rect(p)
        common = rect.intersect(cell)
        if common:
            starts = (common.row_start - rect.row_start, common.column_start - rect.column_start)
            lengths = (
                common.row_stop - common.row_start, common.column_stop - common.column_start,
            )  # fmt: skip
            in_parameter = tuple(
                slice(base + start, base + start + length)
                for base, start, length in zip(p.target.start, starts, lengths, strict=False)
            )
            top, left = common.row_start - cell.row_start, common.column_start - cell.column_start
            in_cell = slice(top, top + lengths[0]), slice(left, left + lengths[1])
            out.append(LocalPiece(p.parameter, in_parameter, in_cell))
    return out


def split_windows(
    operations: Sequence[Operation], windows: Sequence[Window]
) -> list[WindowOperations]:
    """One rank's operations (as rank_operations orders them) by window and phase."""
    edges = np.searchsorted([op.item for op in operations], [w.stop for w in windows]).tolist()
    out = []
    for start, stop in pairwise([0, *edges]):
        part = operations[start:stop]
        out.append(
            WindowOperations(
                [op for op in part if not op.is_forward], [op for op in part if op.is_forward]
            )
        )
    return out
