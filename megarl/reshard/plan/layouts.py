"""Both sides' layouts of a model: one description per kind, repeated over layers and experts.

A group holds the tensors that have the same shards and the same holders, so planning costs what
the number of groups and of ranks touched costs, not what the model's elements cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from megarl.config.errors import require
from megarl.reshard.plan.mesh import Mesh, engine_stages, training_stages
from megarl.reshard.plan.rect import IntArray, Rect, Shard, TensorGroup
from megarl.reshard.plan.shapes import Cut, ModelShape, TensorKind

__all__ = ["build_groups", "move_target"]

Keys = tuple[tuple[int, ...], ...]  # of a group's tensors: depth, kind, chunk, slot, stage
NO_INDEX = np.array([-1])


@dataclass
class _Side:
    """One mesh over one model: stages of layers and holders of shards."""

    mesh: Mesh
    model: ModelShape
    stages: IntArray  # [num_layers]

    def __post_init__(self) -> None:
        self._holders: dict[tuple[object, ...], IntArray] = {}

    def stage_sets(self, kind: TensorKind) -> list[tuple[int, ...]]:
        """Stages of each layer of the kind; one entry for a kind outside the layers."""
        last = self.mesh.pp - 1
        if kind.layers:
            return [(int(self.stages[layer]),) for layer in kind.layers]
        return [{"first": (0,), "last": (last,), "ends": tuple(sorted({0, last}))}[kind.place]]

    def expert_groups(self, kind: TensorKind) -> IntArray:
        """[num_experts] expert parallel index of each expert; [1] zeros for other tensors."""
        if kind.place != "expert":
            return np.zeros(1, np.int64)
        experts = self.model.num_experts
        require(
            experts % self.mesh.ep == 0, f"{self.mesh.side}.ep", self.mesh.ep,
            f"does not divide the {experts} experts", f"use a divisor of {experts}",
        )  # fmt: skip
        return np.arange(experts) // (experts // self.mesh.ep)

    def rects(self, kind: TensorKind) -> list[Rect | None]:
        size = self.mesh.etp if kind.place == "expert" else self.mesh.tp
        return self.model.rects(kind, self.mesh.side, size)

    def shards(
        self, kind: TensorKind, rects: list[Rect | None], stages: tuple[int, ...], ep: int
    ) -> tuple[Shard, ...]:
        """Distinct rectangles and their holders; tp indices with the same rectangle share a
        shard.
        """
        indices: dict[Rect, list[int]] = {}
        for index, rect in enumerate(rects):
            if rect is not None:
                indices.setdefault(rect, []).append(index)
        is_expert = kind.place == "expert"
        return tuple(
            Shard(rect, self._ranks(is_expert, stages, ep, tuple(i))) for rect, i in indices.items()
        )

    def _ranks(
        self, is_expert: bool, stages: tuple[int, ...], ep: int, indices: tuple[int, ...]
    ) -> IntArray:
        key = (is_expert, stages, ep, indices)
        if key not in self._holders:
            mesh = self.mesh
            index = mesh.etp_index if is_expert else mesh.tp_index
            mask = np.isin(mesh.stage, stages) & np.isin(index, indices)
            if is_expert:
                mask &= mesh.ep_index == ep
            self._holders[key] = np.flatnonzero(mask) + mesh.rank_offset
        return self._holders[key]


def build_groups(
    model: ModelShape, train: Mesh, rollout: Mesh, *, max_item_bytes: int, element_size: int
) -> list[TensorGroup]:
    """Groups of all tensors of `model`, target ranks in contiguous order (rollout rank r on GPU r).

    Tensors are cut and experts bundled so that of one item a rank holds at most max_item_bytes,
    both sides together (at least one row or column, and one expert, each).

    Raises:
        ConfigError: the model does not divide over a mesh.
    """
    source = _Side(train, model, training_stages(model.num_layers, train.pp, train.vpp))
    target = _Side(rollout, model, engine_stages(model.num_layers, rollout.pp))
    built: list[tuple[Keys, TensorGroup]] = []  # keys of the items, group
    for number, kind in enumerate(model.kinds):
        built += _kind_groups(number, kind, source, target, max_item_bytes // element_size)
    # in the order of the keys neighbours have different senders: all stages at equal depth, and
    # experts of different training ranks
    keys = {key for keys, _ in built for key in keys}
    position = {key: i for i, key in enumerate(sorted(keys))}
    return [
        replace(group, items=np.array([position[key] for key in keys])) for keys, group in built
    ]


def _kind_groups(
    number: int, kind: TensorKind, source: _Side, target: _Side, max_elements: int
) -> Iterator[tuple[Keys, TensorGroup]]:
    sides = source, target
    rects = [side.rects(kind) for side in sides]
    source_stages, target_stages = (side.stage_sets(kind) for side in sides)
    source_ep, target_ep = (side.expert_groups(kind) for side in sides)
    largest = [max(r.area for r in side if r) for side in rects]
    bundle = _experts_per_item(largest, source_ep, target_ep, max_elements)
    slots = _slots(source_ep, target_ep) // bundle
    depths = _depths(source_stages)
    regions = _regions(kind, rects, largest, max_elements)
    for chunk, region in enumerate(regions):
        clipped = [[r and r.intersect(region) for r in side] for side in rects]
        for stages in dict.fromkeys(zip(source_stages, target_stages, strict=True)):
            where = [
                i for i, pair in enumerate(zip(source_stages, target_stages, strict=True))
                if pair == stages
            ]  # fmt: skip
            for eps in dict.fromkeys(zip(source_ep.tolist(), target_ep.tolist(), strict=True)):
                experts = np.flatnonzero((source_ep == eps[0]) & (target_ep == eps[1]))
                keys = tuple(
                    (depths[i], number, chunk, int(slots[e]), stages[0][0])
                    for i in where for e in experts
                )  # fmt: skip
                layers = np.array([kind.layers[i] for i in where]) if kind.layers else NO_INDEX
                numbers = experts if kind.place == "expert" else NO_INDEX
                yield keys, TensorGroup(
                    kind.name, region,
                    np.repeat(layers, len(numbers)), np.tile(numbers, len(layers)),
                    np.zeros(len(keys), np.int64),
                    source.shards(kind, clipped[0], stages[0], eps[0]),
                    target.shards(kind, clipped[1], stages[1], eps[1]),
                    is_replicated=kind.cut is Cut.NONE,
                )  # fmt: skip


def _depths(stages: list[tuple[int, ...]]) -> list[int]:
    """How many earlier layers lie on the same training stage."""
    seen: dict[tuple[int, ...], int] = {}
    out = []
    for stage in stages:
        seen[stage] = seen.get(stage, -1) + 1
        out.append(seen[stage])
    return out


def _slots(source_ep: IntArray, target_ep: IntArray) -> IntArray:
    """[experts] turn of each expert on its target rank: neighbours come from different source
    ranks.
    """
    per_source, per_target = (len(ep) // (int(ep[-1]) + 1) for ep in (source_ep, target_ep))
    local = np.arange(per_target)
    turn = np.argsort(np.lexsort((local, local % per_source)))
    return np.tile(turn, len(target_ep) // per_target)


def _experts_per_item(
    largest: list[int], source_ep: IntArray, target_ep: IntArray, max_elements: int
) -> int:
    """Experts of one target rank that travel together."""
    per_source, per_target = (len(ep) // (int(ep[-1]) + 1) for ep in (source_ep, target_ep))
    reach = -(-per_source // per_target)  # target ranks whose experts one source rank holds
    return int(min(max(max_elements // (reach * largest[0] + largest[1]), 1), per_target))


def _regions(
    kind: TensorKind, rects: list[list[Rect | None]], largest: list[int], max_elements: int
) -> list[Rect]:
    """Cut a tensor too large for an item; if it can be, along the dimension tp leaves whole."""
    across_columns = kind.cut is not Cut.COLUMNS and kind.columns > 1
    length = kind.columns if across_columns else kind.rows
    per_line = -(-sum(largest) // length)
    count = -(-length // max(max_elements // per_line, 1))
    edges = [length * i // count for i in range(count + 1)]
    spans = list(pairwise(edges))
    if across_columns:
        return [Rect(0, kind.rows, a, b) for a, b in spans]
    return [Rect(a, b, 0, kind.columns) for a, b in spans]


def move_target(
    groups: list[TensorGroup], role_map: IntArray, offset: int = 0
) -> list[TensorGroup]:
    """The same groups with rollout rank r on GPU role_map[r]; `offset` is rollout rank 0 in
    `groups`.
    """
    moved: dict[int, IntArray] = {}

    def move(shard: Shard) -> Shard:
        key = id(shard.ranks)  # shared by many shards and alive as long as `groups`
        if key not in moved:
            moved[key] = np.sort(role_map[shard.ranks - offset])
        return Shard(shard.rect, moved[key])

    return [replace(g, target=tuple(move(s) for s in g.target)) for g in groups]
