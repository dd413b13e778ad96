"""What a plan moves, per item and rank, and the windows in which it moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from megarl.reshard.plan.planner import Block, Plan
from megarl.reshard.plan.rect import IntArray

__all__ = ["Traffic", "Window", "count_traffic", "cut_windows"]


@dataclass(frozen=True, eq=False)
class Traffic:
    """Arrays [items, ranks]; elements, except num_ops."""

    local: IntArray  # copied from the rank's own shard
    packed: IntArray  # packed for sending; a piece that goes to several ranks is packed once
    near_in: IntArray  # received from, sent to ranks of the node
    near_out: IntArray
    far_in: IntArray  # received from, sent to other nodes
    far_out: IntArray
    num_ops: IntArray  # sends and receives

    @property
    def received(self) -> IntArray:
        return self.near_in + self.far_in

    def per_window(self, windows: Sequence[Window]) -> Traffic:
        """The same with the items of each window added up: arrays [windows, ranks]."""
        starts = [window.start for window in windows]
        return Traffic(
            *(np.add.reduceat(getattr(self, f.name), starts, axis=0) for f in fields(self))
        )


@dataclass(frozen=True)
class Window:
    """Items start..stop-1: all ranks exchange them together."""

    start: int
    stop: int


def count_traffic(plan: Plan) -> Traffic:
    """Add up the transfers of all blocks."""
    count = max((int(g.items.max()) + 1 for g in plan.groups), default=0)
    shape = count, plan.world_size
    flat = [np.zeros(count * plan.world_size, np.int64) for _ in range(7)]
    for block in plan.blocks:
        _add(block, plan, flat)
    return Traffic(*(array.reshape(shape) for array in flat))


def _add(block: Block, plan: Plan, flat: list[IntArray]) -> None:
    local, packed, near_in, near_out, far_in, far_out, num_ops = flat
    world, area = plan.world_size, block.cell.area
    start = plan.groups[block.group].items[:, None] * world  # [N, 1] index of the item's rank 0
    if len(block.local):
        np.add.at(local, (start + block.local).ravel(), area)
    if not len(block.target):
        return
    source = block.source.astype(np.int64)
    is_near = source // plan.gpus_per_node == (block.target // plan.gpus_per_node)[None, :]
    at_source = start + source
    at_target = np.broadcast_to(start + block.target, source.shape)
    for mask, sent, got in ((is_near, near_out, near_in), (~is_near, far_out, far_in)):
        if mask.any():
            np.add.at(sent, at_source[mask], area)
            np.add.at(got, at_target[mask], area)
    np.add.at(num_ops, at_source.ravel(), 1)
    np.add.at(num_ops, at_target.ravel(), 1)
    tensor, position = np.nonzero(~block.is_forward)
    distinct = np.unique(tensor * len(packed) + at_source[tensor, position])
    np.add.at(packed, distinct % len(packed), area)


def cut_windows(traffic: Traffic, *, max_elements: int, max_ops: int) -> list[Window]:
    """Longest runs of items of which no rank packs and receives more than max_elements,
    assembles more
    than max_elements, or does more than max_ops sends and receives; at least one item each."""
    windows, start = [], 0
    total = np.zeros((3, traffic.local.shape[1]), np.int64)
    limits = np.array([max_elements, max_elements, max_ops])
    for item in range(len(traffic.local)):
        received = traffic.near_in[item] + traffic.far_in[item]
        load = np.stack(
            [traffic.packed[item] + received, traffic.local[item] + received, traffic.num_ops[item]]
        )
        total += load
        if item > start and (total.max(axis=1) > limits).any():
            windows.append(Window(start, item))
            start, total = item, load
    if len(traffic.local):
        windows.append(Window(start, len(traffic.local)))
    return windows
