from __future__ import annotations

from itertools import product

import pytest

from megarl.parallel import AXES, Coordinate, ParallelDims


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (2, 1, 2, 2), (4, 2, 1, 3), (1, 1, 8, 1), (3, 1, 2, 1)]
)
@pytest.mark.parametrize("offset", [0, 5])
def test_rank_and_coordinate_are_inverse(sizes: tuple[int, ...], offset: int) -> None:
    dims = ParallelDims(**dict(zip(AXES, sizes, strict=True)), rank_offset=offset)
    assert dims.size == sizes[0] * sizes[1] * sizes[2] * sizes[3]
    assert [dims.rank(dims.coordinate(r)) for r in dims.ranks] == list(
        range(offset, offset + dims.size)
    )


def test_tp_is_the_fastest_axis_and_pp_the_slowest() -> None:
    dims = ParallelDims(tp=2, dp=2, pp=2)
    assert dims.coordinate(1) == Coordinate(tp=1, cp=0, dp=0, pp=0)
    assert dims.coordinate(2) == Coordinate(tp=0, cp=0, dp=1, pp=0)
    assert dims.coordinate(4) == Coordinate(tp=0, cp=0, dp=0, pp=1)
    assert dims.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert dims.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert dims.groups("tp", "pp") == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize("axes", [("tp",), ("pp",), ("cp", "dp"), ("tp", "cp", "dp"), AXES])
def test_groups_partition_the_ranks_and_differ_only_along_their_axes(axes: tuple[str, ...]) -> None:
    dims = ParallelDims(tp=2, cp=3, dp=2, pp=2, rank_offset=3)
    groups = dims.groups(*axes)
    assert sorted(r for g in groups for r in g) == list(dims.ranks)
    for group, axis in product(groups, set(AXES) - set(axes)):
        assert len({getattr(dims.coordinate(r), axis) for r in group}) == 1


def test_impossible_sizes_and_foreign_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="tp=0"):
        ParallelDims(tp=0)
    with pytest.raises(ValueError, match="sequence_parallel"):
        ParallelDims(sequence_parallel=True)
    with pytest.raises(ValueError, match="rank 4"):
        ParallelDims(tp=4).coordinate(4)
