"""The worker pool itself: order, errors, time limits and recovery."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from distributed.pool import WorkerError, WorkerPool

pytestmark = pytest.mark.distributed


def rank_and_sum(*, base: int) -> tuple[int, int]:
    total = torch.tensor(base + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("only rank one")
    dist.barrier()


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def sleep_long() -> None:
    time.sleep(60)


def test_results_come_in_rank_order(pool2: WorkerPool) -> None:
    assert pool2.run(rank_and_sum, base=10) == [(0, 21), (1, 21)]


def test_errors_deaths_and_hangs_are_reported_and_the_pool_recovers(pool2: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"rank 1:(.|\n)*only rank one"):
        pool2.run(fail_on_one)
    assert pool2.run(rank_and_sum, base=0) == [(0, 1), (1, 1)]
    with pytest.raises(WorkerError, match="on rank 1:\nthe process died"):
        pool2.run(die_on_one)
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] within 1 s"):
        pool2.run(sleep_long, limit_s=1.0)
    assert pool2.run(rank_and_sum, base=1) == [(0, 3), (1, 3)]
