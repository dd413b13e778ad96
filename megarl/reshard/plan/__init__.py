"""Planning of the weight push: layouts, role placement, plan, certificate. Imports no torch."""

from megarl.reshard.plan.certificate import Certificate, Hardware, PlannedReshard, plan_reshard
from megarl.reshard.plan.checker import find_errors
from megarl.reshard.plan.local import (
    LocalPiece,
    WindowOperations,
    groups_from_layouts,
    local_pieces,
    split_windows,
)
from megarl.reshard.plan.mesh import Mesh, parse_mesh
from megarl.reshard.plan.planner import Operation, Plan, build_plan, rank_operations
from megarl.reshard.plan.rect import Rect, Shard, TensorGroup
from megarl.reshard.plan.shapes import ModelShape, model_shape, read_config

__all__ = [
    "Certificate",
    "Hardware",
    "LocalPiece",
    "Mesh",
    "ModelShape",
    "Operation",
    "Plan",
    "PlannedReshard",
    "Rect",
    "Shard",
    "TensorGroup",
    "WindowOperations",
    "build_plan",
    "find_errors",
    "groups_from_layouts",
    "local_pieces",
    "model_shape",
    "parse_mesh",
    "plan_reshard",
    "rank_operations",
    "read_config",
    "split_windows",
]
