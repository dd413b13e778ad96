"""The job: rank, size, device and the rendezvous store. Made once by each rank's main()."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megarl.config.errors import ConfigError, require

__all__ = ["World", "free_port", "init_world"]


@dataclass(frozen=True, kw_only=True)
class World:
    """One rank's view of the job."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    store: (
        dist.Store
    )  # the launcher's TCPStore: outlives any one rank, so it also carries failure notices


def free_port() -> int:
    """A TCP port that was free on loopback a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def init_world(*, device: str, timeout_s: float) -> World:
    """Join the job torchrun started, or make a job of one process.

    Args:
        device: "auto", "cpu" or "cuda".
        timeout_s: limit of the rendezvous and of every collective on the default group, seconds.

    Raises:
        ConfigError: device is "cuda" and there is none, or the rendezvous port cannot be used.
    """
    for key, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "1"),
    ):
        os.environ.setdefault(key, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    has_cuda = torch.cuda.is_available()
    require(
        has_cuda or device != "cuda", "trainer.device", device, "but torch sees no CUDA device",
        "use trainer.device=cpu",
    )  # fmt: skip
    local_rank = int(os.environ["LOCAL_RANK"])
    on_cuda = has_cuda and device != "cpu"
    where = torch.device("cuda", local_rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(where)
    limit = timedelta(seconds=timeout_s)
    try:
        store, rank, size = next(rendezvous("env://", timeout=limit))
    except dist.DistNetworkError as error:
        where_to = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ConfigError(
            f"MASTER_ADDR:MASTER_PORT={where_to} cannot be used for the rendezvous "
            f"({str(error).splitlines()[0]}); "
            "choose a free port, or let torchrun --standalone do it"
        ) from error
    store.set_timeout(limit)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        store=dist.PrefixStore("megarl", store), rank=rank, world_size=size, timeout=limit,
    )  # fmt: skip
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        device=where,
        store=store,
    )
