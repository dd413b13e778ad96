"""The pure half of the weight push on a hand-made model: a [4, 2] matrix "m", a [3] vector "v"."""

from __future__ import annotations

import pytest
import torch

from megarl.reshard.gather import cut_shards, plan_windows
from megarl.rollout.base import WeightSyncError
from megarl.types import Box, Placement, WeightLayout

SHAPES: dict[str, tuple[int, ...]] = {"m": (4, 2), "v": (3,)}


def row_split(rank: int) -> WeightLayout:
    """Rank 0 holds rows 0-1 of m, rank 1 rows 2-3; both hold v."""
    rows = Box((2 * rank, 0), (2 * rank + 2, 2))
    return WeightLayout(
        SHAPES,
        {"local_m": (2, 2), "local_v": (3,)},
        [
            Placement("m", rows, "local_m", Box.full((2, 2))),
            Placement("v", Box.full((3,)), "local_v", Box.full((3,))),
        ],
    )


def whole_padded() -> WeightLayout:
    """An engine that keeps m with two padding rows below."""
    return WeightLayout(
        SHAPES,
        {"em": (6, 2), "ev": (3,)},
        [
            Placement("m", Box.full((4, 2)), "em", Box.full((4, 2))),
            Placement("v", Box.full((3,)), "ev", Box.full((3,))),
        ],
    )


def test_each_box_is_sent_once_by_its_lowest_holder() -> None:
    windows = plan_windows(
        [row_split(0), row_split(1)], whole_padded(), max_bytes=1000, element_size=4
    )
    assert len(windows) == 1
    sent = {rank: [(p.canonical, p.source) for p in pieces] for rank, pieces in windows[0].senders}
    assert sent[0] == [("m", Box((0, 0), (2, 2))), ("v", Box.full((3,)))]
    assert sent[1] == [("m", Box((2, 0), (4, 2)))]


def test_a_small_window_holds_one_parameter_each() -> None:
    windows = plan_windows(
        [row_split(0), row_split(1)], whole_padded(), max_bytes=1, element_size=4
    )
    assert [w.parameters for w in windows] == [("em",), ("ev",)]
    assert [w.canonical for w in windows] == [("m",), ("v",)]


def test_a_box_that_no_trainer_holds_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match="4 of 8 elements of m"):
        plan_windows([row_split(0), row_split(0)], whole_padded(), max_bytes=1000, element_size=4)


def test_cut_shards_places_boxes_and_leaves_padding_zero() -> None:
    window = plan_windows(
        [row_split(0), row_split(1)], whole_padded(), max_bytes=1000, element_size=4
    )[0]
    m, v = torch.arange(8.0).view(4, 2), torch.tensor([7.0, 8.0, 9.0])
    shards = cut_shards(window, {"m": m, "v": v}, whole_padded())
    assert torch.equal(shards["em"], torch.cat([m, torch.zeros(2, 2)]))
    assert torch.equal(shards["ev"], v)


def test_a_layout_that_leaves_its_tensor_is_refused() -> None:
    layout = WeightLayout(
        SHAPES, {"x": (3,)}, [Placement("v", Box((1,), (4,)), "x", Box.full((3,)))]
    )
    with pytest.raises(ValueError, match="outside"):
        layout.check()
