from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.parallel import (
    ParallelDims,
    ParallelGroups,
    PeerFailure,
    all_agree,
    exchange,
    gather_lists,
)
from megarl.trainer.metrics import Reducer, reduce_values, to_floats

pytestmark = pytest.mark.distributed


def ragged_exchange() -> dict[int, list[int]]:
    """Rank r sends r + d + 1 copies of 10 r + d to rank d, and nothing from 1 to 0."""
    me, world = dist.get_rank(), dist.get_world_size()

    def size(src: int, dst: int) -> int:
        return 0 if (src, dst) == (1, 0) else src + dst + 1

    send = {d: torch.full((size(me, d),), 10 * me + d) for d in range(world)}
    got = exchange(send, {s: size(s, me) for s in range(world)}, dtype=torch.int64)
    return {s: t.tolist() for s, t in got.items()}


def test_exchange_delivers_ragged_and_empty_messages(pool4: Any) -> None:
    for me, got in enumerate(pool4.run(ragged_exchange)):
        for src, values in got.items():
            size = 0 if (src, me) == (1, 0) else src + me + 1
            assert values == [10 * src + me] * size


def fail_on_rank_one() -> str:
    def action() -> int:
        if dist.get_rank() == 1:
            raise KeyError("only here")
        return 7

    try:
        all_agree("the thing", action)
    except KeyError as e:
        outcome = f"own {e}"
    except PeerFailure as e:
        outcome = f"peer {e}"
    dist.barrier()  # nobody is left behind in a collective
    return outcome


def test_a_failure_on_one_rank_reaches_every_rank_and_leaves_no_collective_open(pool2: Any) -> None:
    first, second = pool2.run(fail_on_rank_one)
    assert first == "peer the thing failed on rank 1: KeyError: 'only here'"
    assert second == "own 'only here'"


def lists_and_groups() -> tuple[list[int], dict[str, list[int]]]:
    me = dist.get_rank()
    groups = ParallelGroups.build(ParallelDims(tp=2, pp=2), timeout_s=30)
    assert groups is not None
    names = ("tp", "pp", "dp", "role", "embd", "pos_embd")
    return gather_lists([me] * me), {
        n: dist.get_process_group_ranks(getattr(groups, n)) for n in names
    }


def test_groups_hold_the_ranks_of_their_axes(pool4: Any) -> None:
    results = pool4.run(lists_and_groups)
    assert all(r[0] == [1, 2, 2, 3, 3, 3] for r in results)
    assert results[0][1] == {
        "tp": [0, 1], "pp": [0, 2], "dp": [0], "role": [0, 1, 2, 3], "embd": [0, 2], "pos_embd": [0]
    }  # fmt: skip
    assert results[3][1]["pp"] == [1, 3]
    assert results[3][1]["pos_embd"] == [3]


REDUCERS: dict[str, Reducer] = {"a": "mean", "b": "max", "c": "sum"}


def reduce_unequal() -> dict[str, float]:
    me = dist.get_rank()
    values = {
        "a": torch.tensor([1.0, 1.0]) if me == 0 else torch.tensor([9.0, 3.0]),
        "b": torch.tensor([float("nan") if me == 1 else 5.0]),
        "c": torch.tensor([2.0 + me]),
    }
    return to_floats(reduce_values(values, REDUCERS, None), REDUCERS)


def test_means_are_weighted_by_count_and_a_nan_survives_a_maximum(pool2: Any) -> None:
    for out in pool2.run(reduce_unequal):
        assert out["a"] == 2.5
        assert out["b"] != out["b"]
        assert out["c"] == 5.0
