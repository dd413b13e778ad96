"""Which GPU plays which rollout rank: the assignment that lets most bytes stay where they are.

A stage of a replica must stay inside its block of neighbouring GPUs (a node when it fits there),
so GPUs are permuted inside blocks, and blocks of equal stages among each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

import numpy as np
from scipy.optimize import linear_sum_assignment

from megarl.reshard.plan.mesh import Mesh
from megarl.reshard.plan.rect import IntArray, TensorGroup

__all__ = ["overlap", "place_roles"]


def overlap(groups: Sequence[TensorGroup], world_size: int) -> IntArray:
    """[source rank, target rank]: elements that the target rank wants and the source rank holds."""
    out = np.zeros((world_size, world_size), np.int64)
    for group in groups:
        for source in group.source:
            for target in group.target:
                common = source.rect.intersect(target.rect)
                if common:
                    out[np.ix_(source.ranks, target.ranks)] += common.area * group.num_tensors
    return out


def place_roles(shared: IntArray, rollout: Mesh, gpus_per_node: int) -> IntArray:
    """[rollout.size] GPU of each rollout rank; equal gains keep the contiguous order.

    Args:
        shared: `overlap` of the groups in contiguous order.
        rollout: rollout rank r is rank rollout.rank_offset + r of `shared`.
        gpus_per_node: GPUs with fast links among each other.
    """
    size, first = rollout.size, rollout.rank_offset
    pool = np.arange(first, first + size)
    block = lcm(rollout.inner, min(gpus_per_node, size))
    if size % block:
        block = size
    # stage after stage, so that a block's roles are of one stage where the numbers allow it
    roles = np.lexsort((np.arange(size), rollout.stage)).reshape(-1, block)
    gpus = pool.reshape(-1, block)
    # twice the gain plus one for staying: elements count first, order decides ties
    gain = 2 * block * shared[np.ix_(pool, pool)]
    gain[np.arange(size), np.arange(size)] += 1
    count = len(gpus)
    total = np.zeros((count, count), np.int64)
    inside = np.zeros((count, count, block), np.int64)
    known: dict[bytes, tuple[int, IntArray]] = {}
    for i in range(count):
        for j in range(count):
            part = gain[np.ix_(gpus[i] - first, roles[j])]
            key = part.tobytes()
            if key not in known:
                rows, columns = linear_sum_assignment(part, maximize=True)
                known[key] = int(part[rows, columns].sum()), np.argsort(columns)
            total[i, j], inside[i, j] = known[key]
    out = np.zeros(size, np.int64)
    for i, j in zip(*linear_sum_assignment(total, maximize=True), strict=True):
        out[roles[j]] = gpus[i][inside[i, j]]
    return out
