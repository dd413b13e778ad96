"""The checker finds each way in which a plan can be wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from megarl.reshard.plan import (
    Hardware,
    Plan,
    Rect,
    Shard,
    build_plan,
    find_errors,
    model_shape,
    parse_mesh,
    plan_reshard,
)
from megarl.reshard.plan.planner import Block

SHAPES = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 2, "vocab_size": 64,
    "num_experts": 4, "moe_intermediate_size": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two stages on four nodes of two: local copies, transfers inside, fetches, and fan-out."""
    return plan_reshard(
        model_shape(SHAPES),
        parse_mesh("train", "tp=2,pp=2,dp=2,ep=2"), parse_mesh("rollout", "tp=1,dp=8"),
        hardware=Hardware(gpus_per_node=2), element_size=2,
    ).plan  # fmt: skip


def first(plan: Plan, condition: Callable[[Block], bool]) -> int:
    return next(i for i, block in enumerate(plan.blocks) if condition(block))


def changed(plan: Plan, index: int, *blocks: Block) -> Plan:
    return replace(plan, blocks=[*plan.blocks[:index], *blocks, *plan.blocks[index + 1 :]])


def test_the_plan_as_built_is_right_and_uses_every_kind_of_transfer(plan: Plan) -> None:
    assert find_errors(plan) == []
    assert any(len(b.local) for b in plan.blocks)
    assert any(b.is_forward.any() for b in plan.blocks)
    assert any((~b.is_forward).any() for b in plan.blocks)


def test_a_missing_block_is_found(plan: Plan) -> None:
    assert "is given" in find_errors(changed(plan, 0))[0]


def test_a_block_twice_is_found(plan: Plan) -> None:
    assert "is given" in find_errors(changed(plan, 0, plan.blocks[0], plan.blocks[0]))[0]


def test_a_missing_local_copy_is_found(plan: Plan) -> None:
    i = first(plan, lambda b: len(b.local) > 0)
    assert find_errors(changed(plan, i, replace(plan.blocks[i], local=plan.blocks[i].local[1:])))


def test_a_missing_receiver_is_found(plan: Plan) -> None:
    i = first(plan, lambda b: len(b.target) > 0)
    b = plan.blocks[i]
    cut = replace(b, target=b.target[1:], source=b.source[:, 1:], is_forward=b.is_forward[:, 1:])
    assert any("is given" in e for e in find_errors(changed(plan, i, cut)))


def test_a_smaller_cell_is_found(plan: Plan) -> None:
    i = first(plan, lambda b: b.cell.row_stop - b.cell.row_start > 1)
    b = plan.blocks[i]
    smaller = b.cell._replace(row_stop=b.cell.row_stop - 1)
    assert any("is given" in e for e in find_errors(changed(plan, i, replace(b, cell=smaller))))


def test_overlapping_cells_are_found(plan: Plan) -> None:
    i = first(plan, lambda b: b.cell.row_start > 0)
    b = plan.blocks[i]
    larger = b.cell._replace(row_start=b.cell.row_start - 1)
    assert any("is given" in e for e in find_errors(changed(plan, i, replace(b, cell=larger))))


def test_a_sender_without_the_cell_is_found(plan: Plan) -> None:
    i = first(plan, lambda b: (~b.is_forward).any())
    b = plan.blocks[i]
    holders = {
        r for s in plan.groups[b.group].source if s.rect.contains(b.cell) for r in s.ranks.tolist()
    }
    stranger = next(r for r in range(8) if r not in holders)
    source = b.source.copy()
    source[0, int(np.flatnonzero(~b.is_forward[0])[0])] = stranger
    errors = find_errors(changed(plan, i, replace(b, source=source)))
    assert any(f"rank {stranger} sends what it does not hold" in e for e in errors)


def test_a_copy_by_a_rank_without_the_cell_is_found(plan: Plan) -> None:
    i = first(plan, lambda b: len(b.target) > 0)
    b = plan.blocks[i]
    moved = replace(
        b, local=np.append(b.local, b.target[0]), target=b.target[1:], source=b.source[:, 1:],
        is_forward=b.is_forward[:, 1:],
    )  # fmt: skip
    errors = find_errors(changed(plan, i, moved))
    assert any(f"rank {b.target[0]} copies what it does not hold" in e for e in errors)


def test_handing_on_what_was_never_received_is_found(plan: Plan) -> None:
    i = first(plan, lambda b: bool(b.is_forward.any()))
    b = plan.blocks[i]
    everything = np.ones_like(b.is_forward)
    errors = find_errors(changed(plan, i, replace(b, is_forward=everything)))
    assert any("hands on what it has not received" in e for e in errors)


def test_handing_on_to_another_node_is_found(plan: Plan) -> None:
    i = first(plan, lambda b: bool(b.is_forward.any()))
    b = plan.blocks[i]
    k, m = (int(x[0]) for x in np.nonzero(b.is_forward))
    other = next(
        j for j, t in enumerate(b.target)
        if t // 2 != b.target[m] // 2 and not b.is_forward[k, j]
    )  # fmt: skip
    source = b.source.copy()
    source[k, m] = b.target[other]
    errors = find_errors(changed(plan, i, replace(b, source=source)))
    assert any("hands on to another node" in e for e in errors)


def test_a_forgotten_tensor_is_found() -> None:
    whole, one = Rect(0, 2, 0, 1), np.zeros(1, np.int64)
    plan = plan_reshard(
        model_shape(SHAPES), parse_mesh("train", "tp=1"), parse_mesh("rollout", "tp=1"),
        hardware=Hardware(), element_size=2,
    ).plan  # fmt: skip
    shapes = {g.tensor_name(k): (0, 0) for g in plan.groups for k in range(g.num_tensors)}
    for group in plan.groups:
        for k in range(group.num_tensors):
            shapes[group.tensor_name(k)] = group.region.row_stop, group.region.column_stop
    assert find_errors(plan, tensors=shapes) == []
    assert "do not tile" in find_errors(plan, tensors={**shapes, "forgotten": (2, 1)})[0]
    del shapes["model.norm.weight"]
    assert "no tensor of the model" in find_errors(plan, tensors=shapes)[0]
    # rollout ranks that together do not want all of a tensor
    group = replace(
        plan.groups[0], name="t", region=whole, layers=one, experts=one, items=one,
        source=(Shard(whole, one),), target=(Shard(Rect(0, 1, 0, 1), one),),
    )  # fmt: skip
    half = build_plan([group], world_size=1, gpus_per_node=1)
    assert "want only" in find_errors(half, tensors={"t": (2, 1)})[0]
