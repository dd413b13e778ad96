"""Plans made from WeightLayouts, executed in numpy: real trainer parameters to real engine ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megarl.models import weight_layout
from megarl.parallel import ParallelDims
from megarl.reshard.plan import (
    Mesh,
    Rect,
    build_plan,
    find_errors,
    groups_from_layouts,
    local_pieces,
    rank_operations,
    split_windows,
)
from megarl.reshard.plan.layouts import build_groups, move_target
from megarl.reshard.plan.placement import overlap, place_roles
from megarl.reshard.plan.shapes import model_shape
from megarl.reshard.plan.traffic import count_traffic, cut_windows
from megarl.rollout.sglang_layout import hf_weight_layout, sglang_weight_layout
from megarl.types import Box, Placement, WeightLayout

TINY: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
    "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 12,
    "num_key_value_heads": 6, "head_dim": 2, "vocab_size": 131,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-6,
}  # fmt: skip
Parameters = dict[str, np.ndarray]


def fill(layout: WeightLayout, tensors: Parameters) -> Parameters:
    """The rank's parameters by the layout's own placements; padding is 0."""
    out = {name: np.zeros(shape) for name, shape in layout.parameters.items()}
    for p in layout.placements:
        out[p.parameter][p.target.slices] = tensors[p.canonical][p.source.slices]
    return out


def run(
    train: list[WeightLayout | None], rollout: list[WeightLayout | None], *, gpus_per_node: int
) -> tuple[list[Parameters], list[Parameters]]:
    """What the plan makes of the rollout parameters, and what they should be."""
    world = len(train)
    groups = groups_from_layouts(train, rollout, max_item_bytes=400, element_size=4)
    plan = build_plan(groups, world_size=world, gpus_per_node=gpus_per_node)
    assert find_errors(plan) == []
    windows = cut_windows(count_traffic(plan), max_elements=150, max_ops=20)
    shapes = next(x for x in rollout if x).canonical_shapes
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    source = [fill(x, tensors) if x else {} for x in train]
    expected = [fill(x, tensors) if x else {} for x in rollout]
    got = [{n: np.zeros_like(v) for n, v in p.items()} for p in expected]
    work = [
        split_windows(
            rank_operations(groups, r, world_size=world, gpus_per_node=gpus_per_node), windows
        )
        for r in range(world)
    ]  # fmt: skip
    assert len(windows) > 3
    for w in range(len(windows)):
        fetched: dict[tuple[int, str, Rect], np.ndarray] = {}
        for phase in ("first", "forwards"):
            wires: dict[tuple[int, int], list[np.ndarray]] = {}
            for rank in range(world):
                for op in getattr(work[rank][w], phase):
                    if op.source != rank:
                        continue
                    if op.is_forward:
                        value = fetched[rank, op.name, op.cell]
                    else:
                        value = pack(train[rank], source[rank], op.name, op.cell)
                    wires.setdefault((rank, op.target), []).append(value)
            for rank in range(world):
                for op in getattr(work[rank][w], phase):
                    if op.target != rank:
                        continue
                    # both ends in the same order: the next value on the wire is the right one
                    value = wires[op.source, rank].pop(0)
                    fetched[rank, op.name, op.cell] = value
                    unpack(rollout[rank], got[rank], op.name, op.cell, value)
            assert not any(wires.values())
    return got, expected


def pack(layout: WeightLayout | None, held: Parameters, name: str, cell: Rect) -> np.ndarray:
    assert layout is not None
    out = np.full((cell.row_stop - cell.row_start, cell.column_stop - cell.column_start), np.nan)
    for piece in local_pieces(layout.by_canonical()[name], cell):
        part = held[piece.parameter][piece.in_parameter]
        out[piece.in_cell] = part.reshape(out[piece.in_cell].shape)
    assert not np.isnan(out).any()
    return out


def unpack(
    layout: WeightLayout | None, into: Parameters, name: str, cell: Rect, value: np.ndarray
) -> None:
    assert layout is not None
    for piece in local_pieces(layout.by_canonical()[name], cell):
        view = into[piece.parameter][piece.in_parameter]
        view[...] = value[piece.in_cell].reshape(view.shape)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("gpus_per_node", [1, 2, 8])
@pytest.mark.parametrize(
    ("tp", "pp", "dp", "rollout_tp"),
    [
        (2, 1, 1, 1), (1, 2, 1, 1), (2, 2, 1, 2), (1, 1, 4, 2), (3, 1, 2, 2), (2, 3, 1, 3),
        (1, 1, 12, 12),
    ],
)  # fmt: skip
def test_every_engine_parameter_is_what_the_checkpoint_would_give(
    tp: int, pp: int, dp: int, rollout_tp: int, gpus_per_node: int, tied: bool
) -> None:
    config = {**TINY, "tie_word_embeddings": tied}
    dims = ParallelDims(tp=tp, pp=pp, dp=dp)
    train = [weight_layout(config, dims, r) for r in range(dims.size)]
    rollout = [sglang_weight_layout(config, rollout_tp, r % rollout_tp) for r in range(dims.size)]
    got, expected = run([*train], [*rollout], gpus_per_node=gpus_per_node)
    for mine, right in zip(got, expected, strict=True):
        for name, value in right.items():
            np.testing.assert_array_equal(mine[name], value, err_msg=name)


def test_an_in_process_model_and_disjoint_pools_use_the_same_plan() -> None:
    dims = ParallelDims(tp=2, pp=2)
    train = [*(weight_layout(TINY, dims, r) for r in range(4)), None, None]
    rollout = [None, None, None, None, hf_weight_layout(TINY), hf_weight_layout(TINY)]
    got, expected = run(train, rollout, gpus_per_node=4)
    for mine, right in zip(got, expected, strict=True):
        for name, value in right.items():
            np.testing.assert_array_equal(mine[name], value, err_msg=name)


def test_both_ways_of_describing_the_layouts_move_the_same_bytes() -> None:
    train, rollout = Mesh(side="train", tp=2, pp=3, etp=2), Mesh(side="rollout", tp=3, dp=2, etp=3)
    compact = build_groups(model_shape(TINY), train, rollout, max_item_bytes=10**9, element_size=1)
    roles = place_roles(overlap(compact, 6), rollout, 2)
    dims = ParallelDims(tp=2, pp=3)
    on_gpu = np.argsort(roles)
    exact = groups_from_layouts(
        [weight_layout(TINY, dims, r) for r in range(6)],
        [sglang_weight_layout(TINY, 3, int(on_gpu[gpu]) % 3) for gpu in range(6)],
        max_item_bytes=10**9, element_size=1,
    )  # fmt: skip
    received = [
        count_traffic(build_plan(g, world_size=6, gpus_per_node=2)).received.sum(axis=0).tolist()
        for g in (move_target(compact, roles), exact)
    ]
    assert received[0] == received[1]
    assert sum(received[0]) > 0


def test_layouts_that_disagree_about_a_shape_are_refused() -> None:
    def layout(rows: int) -> WeightLayout:
        box = Box.full((rows, 1))
        return WeightLayout({"t": (rows, 1)}, {"p": (rows, 1)}, [Placement("t", box, "p", box)])

    with pytest.raises(ValueError, match="t is"):
        groups_from_layouts([layout(2)], [layout(3)], max_item_bytes=8, element_size=1)
    cube = Box.full((1, 1, 1))
    deep = WeightLayout({"t": (1, 1, 1)}, {"p": (1, 1, 1)}, [Placement("t", cube, "p", cube)])
    with pytest.raises(ValueError, match="two dimensions"):
        groups_from_layouts([deep], [deep], max_item_bytes=8, element_size=1)
