"""ParallelDims: sizes of the mesh axes and the pure arithmetic rank <-> coordinate.

Rank order, fastest first: tp, cp, dp, pp (tp neighbours share a node). Megatron's expert mesh
(ep inside dp * cp * tp) is left to the issue that trains MoE; ep is 1 here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

__all__ = ["AXES", "Coordinate", "ParallelDims"]

AXES = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True, order=True)
class Coordinate:
    """Place of a rank on the mesh."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Sizes of one role's mesh on ranks rank_offset .. rank_offset + size - 1."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    rank_offset: int = 0

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ValueError(f"{axis}={getattr(self, axis)} must be >= 1")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp > 1")

    @property
    def size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def ranks(self) -> range:
        return range(self.rank_offset, self.rank_offset + self.size)

    def coordinate(self, rank: int) -> Coordinate:
        """Coordinate of global rank `rank`. Raises ValueError for a rank of another pool."""
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not in {self.ranks}")
        rest, at = rank - self.rank_offset, {}
        for axis in AXES:
            rest, at[axis] = divmod(rest, getattr(self, axis))
        return Coordinate(**at)

    def rank(self, at: Coordinate) -> int:
        """Global rank at a coordinate."""
        rank, stride = self.rank_offset, 1
        for axis in AXES:
            rank += getattr(at, axis) * stride
            stride *= getattr(self, axis)
        return rank

    def groups(self, *axes: str) -> list[list[int]]:
        """Every group of ranks that differ only along `axes`.

        Ranks ascend within a group; groups are in the order of their first ranks.
        """
        fixed = [a for a in AXES if a not in axes]
        out = []
        for values in product(*(range(getattr(self, a)) for a in reversed(fixed))):
            at = dict(zip(reversed(fixed), values, strict=True))
            members = product(*(range(getattr(self, a)) for a in reversed(axes)))
            ranks = [
                self.rank(Coordinate(**at, **dict(zip(reversed(axes), m, strict=True))))
                for m in members
            ]
            out.append(sorted(ranks))
        return sorted(out)
