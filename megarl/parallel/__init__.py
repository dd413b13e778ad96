"""Mesh arithmetic, process groups and collectives. Knows no model and no engine."""

from megarl.parallel.collectives import (
    PeerFailure,
    all_agree,
    exchange,
    gather_lists,
    gather_objects,
)
from megarl.parallel.dims import AXES, Coordinate, ParallelDims
from megarl.parallel.groups import ParallelGroups
from megarl.parallel.world import World, free_port, init_world

__all__ = [
    "AXES", "Coordinate", "ParallelDims", "ParallelGroups", "PeerFailure", "World", "all_agree",
    "exchange", "free_port", "gather_lists", "gather_objects", "init_world",
]  # fmt: skip
