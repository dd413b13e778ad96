"""The certificate of a plan: exactly once, bytes against the bound, peak buffer, simulated seconds.

The bound. A rank that plays rollout rank j on GPU i must hold target(j) afterwards and holds
source(i) before, so it receives at least |target(j) - source(i)| bytes; a node at least what its
ranks want and none of them holds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megarl.config.errors import require
from megarl.reshard.plan.checker import find_errors
from megarl.reshard.plan.layouts import build_groups, move_target
from megarl.reshard.plan.mesh import Mesh
from megarl.reshard.plan.placement import overlap, place_roles
from megarl.reshard.plan.planner import Plan, build_plan
from megarl.reshard.plan.rect import IntArray, TensorGroup, cells
from megarl.reshard.plan.shapes import ModelShape
from megarl.reshard.plan.traffic import Traffic, Window, count_traffic, cut_windows

__all__ = ["Certificate", "Hardware", "MaxMean", "NodeIngress", "PlannedReshard", "plan_reshard"]

# Small items let a window draw on many senders; smaller ones cost planning time.
ITEMS_PER_WINDOW = 8
WINDOW_LATENCY_S = 1e-4  # assumed for the start and the end of a window; simulated times only


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Links and bounds. One NIC per GPU; both rates are per GPU and direction."""

    gpus_per_node: int = 8
    nic_gbps: float = 400.0
    nvlink_gbps: float = 3600.0
    max_window_bytes: int = 256 * 2**20
    max_window_ops: int = 4096


@dataclass(frozen=True)
class MaxMean:
    max: int
    mean: float


@dataclass(frozen=True)
class NodeIngress:
    max: int
    lower_bound: int  # of the node that must receive most


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What `megarl plan reshard --json` prints; bytes per push."""

    exactly_once: bool  # by checker.find_errors
    world_size: int
    model_bytes: int
    recv_bytes_per_rank: MaxMean
    lower_bound_bytes_per_rank: MaxMean
    full_gather_bytes_per_rank: int  # most any rank receives if every rank assembles every tensor
    replicated_bytes: int  # part of model_bytes: tensors that no rank cuts
    replicated_recv_bytes_per_rank: MaxMean  # part of recv_bytes_per_rank
    sent_bytes_per_rank: MaxMean
    node_ingress_bytes: NodeIngress
    peak_buffer_bytes: int  # two windows packed and received, and one of the engine's shard
    num_ops_max: int  # sends and receives of the busiest rank, all windows
    num_ops_window_max: int  # and of the busiest window
    num_windows: int
    predicted_seconds: float  # simulated: see predict_seconds
    role_map: list[int]  # GPU of each rollout rank
    plan_seconds: float
    errors: list[str]  # findings of the checker

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, eq=False)
class PlannedReshard:
    plan: Plan
    windows: Sequence[Window]
    certificate: Certificate


def plan_reshard(
    model: ModelShape,
    train: Mesh,
    rollout: Mesh,
    *,
    hardware: Hardware,
    element_size: int,
    placement: str = "optimal",
) -> PlannedReshard:
    """Plan, count and check the move of `model` from `train` to `rollout`.

    Args:
        placement: "optimal", or "contiguous": rollout rank r on GPU r.

    Raises:
        ConfigError: the model does not divide over a mesh.
    """
    start = time.perf_counter()
    groups = build_groups(
        model, train, rollout,
        max_item_bytes=hardware.max_window_bytes // ITEMS_PER_WINDOW, element_size=element_size,
    )  # fmt: skip
    world = max(mesh.rank_offset + mesh.size for mesh in (train, rollout))
    shared = overlap(groups, world)
    roles = np.arange(rollout.size) + rollout.rank_offset
    if placement == "optimal":
        roles = place_roles(shared, rollout, hardware.gpus_per_node)
    groups = move_target(groups, roles, rollout.rank_offset)
    plan = build_plan(groups, world_size=world, gpus_per_node=hardware.gpus_per_node)
    traffic = count_traffic(plan)
    windows = cut_windows(
        traffic,
        max_elements=hardware.max_window_bytes // element_size,
        max_ops=hardware.max_window_ops,
    )
    require(
        bool(windows), "model", model.num_elements, "has no tensors to move", "use another model"
    )
    moved = traffic.per_window(windows)
    del traffic
    errors = find_errors(plan, tensors=_tensor_shapes(model))
    wanted = _held(groups, world, "target")
    kept = np.zeros(world, np.int64)
    kept[roles] = shared[roles, np.arange(rollout.size) + rollout.rank_offset]
    needed, received = wanted - kept, moved.received.sum(axis=0)
    node = np.arange(world) // hardware.gpus_per_node
    ingress = np.bincount(node, weights=moved.far_in.sum(axis=0))
    small = [g for g in groups if g.is_replicated]
    certificate = Certificate(
        exactly_once=not errors,
        world_size=world,
        model_bytes=model.num_elements * element_size,
        recv_bytes_per_rank=_max_mean(received, element_size),
        lower_bound_bytes_per_rank=_max_mean(needed, element_size),
        full_gather_bytes_per_rank=int(
            (model.num_elements - _held(groups, world, "source").min()) * element_size
        ),
        replicated_bytes=sum(g.region.area * g.num_tensors for g in small) * element_size,
        replicated_recv_bytes_per_rank=_max_mean(_received(plan, small), element_size),
        sent_bytes_per_rank=_max_mean((moved.near_out + moved.far_out).sum(axis=0), element_size),
        node_ingress_bytes=NodeIngress(
            int(ingress.max()) * element_size,
            int(_node_ingress_bound(groups, node).max()) * element_size,
        ),
        peak_buffer_bytes=_peak_elements(moved) * element_size,
        num_ops_max=int(moved.num_ops.sum(axis=0).max()),
        num_ops_window_max=int(moved.num_ops.max()),
        num_windows=len(windows),
        predicted_seconds=predict_seconds(moved, hardware, element_size),
        role_map=roles.tolist(),
        plan_seconds=time.perf_counter() - start,
        errors=errors,
    )  # fmt: skip
    return PlannedReshard(plan, windows, certificate)


def predict_seconds(moved: Traffic, hardware: Hardware, element_size: int) -> float:
    """Simulated, not measured: windows one after the other, links full, nothing else in the way.

    sum over windows of WINDOW_LATENCY_S + max over ranks of
    max(far in, far out) / nic + max(near in, near out) / nvlink (the fan-out follows the fetch).
    """
    far = np.maximum(moved.far_in, moved.far_out)
    near = np.maximum(moved.near_in, moved.near_out)
    bits = 8.0 * element_size
    seconds = far * bits / (hardware.nic_gbps * 1e9) + near * bits / (hardware.nvlink_gbps * 1e9)
    return float(seconds.max(axis=1).sum() + WINDOW_LATENCY_S * len(seconds))


def _max_mean(elements: IntArray, element_size: int) -> MaxMean:
    return MaxMean(int(elements.max()) * element_size, float(elements.mean()) * element_size)


def _peak_elements(moved: Traffic) -> int:
    """Most elements in buffers at a time: window w is being unpacked while w + 1 arrives."""
    received = moved.received
    buffers = moved.packed + received
    following = np.zeros_like(buffers)
    following[:-1] = buffers[1:]
    return int((buffers + following + moved.local + received).max())


def _held(groups: Sequence[TensorGroup], world_size: int, side: str) -> IntArray:
    """[world_size] elements each rank holds on `side`."""
    out = np.zeros(world_size, np.int64)
    for group in groups:
        for shard in group.source if side == "source" else group.target:
            out[shard.ranks] += shard.rect.area * group.num_tensors
    return out


def _received(plan: Plan, groups: Sequence[TensorGroup]) -> IntArray:
    """[world_size] elements received of `groups`."""
    out, wanted = np.zeros(plan.world_size, np.int64), {id(g) for g in groups}
    for block in plan.blocks:
        if id(group := plan.groups[block.group]) in wanted:
            out[block.target] += block.cell.area * group.num_tensors
    return out


def _node_ingress_bound(groups: Sequence[TensorGroup], node: IntArray) -> IntArray:
    """[nodes] elements that some rank of the node wants and none holds, from the layouts alone."""
    out = np.zeros(int(node.max()) + 1, np.int64)
    for group in groups:
        held = [set(node[s.ranks].tolist()) for s in group.source]
        wanted = [set(node[s.ranks].tolist()) for s in group.target]
        for cell, i, j in cells([s.rect for s in group.source], [s.rect for s in group.target]):
            missing = set().union(*(wanted[x] for x in j)) - set().union(*(held[x] for x in i))
            out[list(missing)] += cell.area * group.num_tensors
    return out


def _tensor_shapes(model: ModelShape) -> dict[str, tuple[int, int]]:
    """{tensor name: (rows, columns)} of the whole checkpoint."""
    return {
        kind.name.format(layer=layer, expert=expert): (kind.rows, kind.columns)
        for kind in model.kinds
        for layer in kind.layers or [-1]
        for expert in (range(model.num_experts) if kind.place == "expert" else [-1])
    }
