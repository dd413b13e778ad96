"""Fixtures of the whole suite: worker pools, started on first use and ended with the session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from distributed.pool import WorkerPool

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _pool(size: int) -> Iterator[WorkerPool]:
    pool = WorkerPool(size)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool1() -> Iterator[WorkerPool]:
    """One rank: megatron without its patches and groups in the process of pytest."""
    yield from _pool(1)


@pytest.fixture(scope="session")
def pool2() -> Iterator[WorkerPool]:
    yield from _pool(2)


@pytest.fixture(scope="session")
def pool4() -> Iterator[WorkerPool]:
    yield from _pool(4)
