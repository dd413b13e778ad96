"""Collectives on ragged and Python data, and agreement on failure.

Every rank of the group calls, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["PeerFailure", "all_agree", "exchange", "gather_lists", "gather_objects"]

T = TypeVar("T")


class PeerFailure(RuntimeError):
    """Another rank failed; the message names it and its error."""


def gather_objects(value: T, group: ProcessGroup | None = None) -> list[T]:
    """`value` of every rank of the group, by group rank. Pickled: for small metadata only."""
    out: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, value, group=group)
    return out  # type: ignore[return-value]


def gather_lists(values: list[T], group: ProcessGroup | None = None) -> list[T]:
    """Concatenation of every rank's list, in rank order."""
    return [v for part in gather_objects(values, group) for v in part]


def all_agree(what: str, action: Callable[[], T], group: ProcessGroup | None = None) -> T:
    """Run a rank-local `action`; if it raises on any rank, all raise before the next collective.

    Raises:
        The rank's own exception where it happened; PeerFailure elsewhere.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except Exception as e:  # re-raised below, after the peers know
        error = e
    notes = gather_objects(None if error is None else f"{type(error).__name__}: {error}", group)
    if error is not None:
        raise error
    failed = [(i, note) for i, note in enumerate(notes) if note is not None]
    if failed:
        raise PeerFailure(f"{what} failed on rank {failed[0][0]}: {failed[0][1]}")
    return result  # type: ignore[return-value]


def exchange(
    send: Mapping[int, torch.Tensor], num_recv: Mapping[int, int], *, dtype: torch.dtype
) -> dict[int, torch.Tensor]:
    """Point-to-point exchange of flat CPU tensors of different length.

    Args:
        send: {destination global rank: [N] tensor of `dtype`}; empty tensors are not sent.
        num_recv: {source global rank: number of elements to expect}; both sides must agree.

    Returns:
        {source: [num_recv[source]] tensor}. A rank's message to itself is handed over uncopied.
    """
    me = dist.get_rank()
    received = {src: torch.empty(n, dtype=dtype) for src, n in num_recv.items()}
    work = [dist.irecv(received[s], src=s) for s, n in sorted(num_recv.items()) if n and s != me]
    work += [dist.isend(t, dst=d) for d, t in sorted(send.items()) if t.numel() and d != me]
    for w in work:
        assert w is not None  # None is for ranks outside the group: there are none
        w.wait()
    if me in num_recv:
        own = send.get(me, torch.empty(0, dtype=dtype))
        if own.numel() != num_recv[me]:
            raise ValueError(
                f"rank {me} sends itself {own.numel()} elements, expects {num_recv[me]}"
            )
        received[me] = own
    return received
