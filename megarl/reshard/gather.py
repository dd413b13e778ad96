"""Windows of a weight push and the per-tensor gather that fills them.

Pure part: which canonical tensors travel together and who sends which boxes, the same on every
rank. Collective part: `gather_window` broadcasts each sender's boxes to all ranks. Simple and
bounded (one window of full tensors at a time); shard-to-shard transfer behind the same interface
belongs to the planner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from megarl.rollout.base import WeightSyncError
from megarl.types import Box, WeightLayout

__all__ = ["Piece", "Window", "cut_shards", "gather_window", "plan_windows"]


@dataclass(frozen=True)
class Piece:
    """A box of a canonical tensor and where its sender keeps it."""

    canonical: str
    source: Box
    parameter: str
    target: Box


@dataclass(frozen=True)
class Window:
    """Canonical tensors that travel together: all that the engine's `parameters` are made of."""

    canonical: tuple[str, ...]
    parameters: tuple[str, ...]
    senders: tuple[tuple[int, tuple[Piece, ...]], ...]  # (rank, what it broadcasts), by rank


def plan_windows(
    train: Sequence[WeightLayout], engine: WeightLayout, *, max_bytes: int, element_size: int
) -> list[Window]:
    """Group the engine's parameters into windows of at most `max_bytes`, at least one parameter.

    Args:
        train: layout of every rank of the job, by rank.
        engine: layout of any engine rank (parameter names and their tensors are the same on all).
        max_bytes: size of a window's full canonical tensors.
        element_size: bytes of one element.

    Raises:
        WeightSyncError: the trainers together do not hold some canonical tensor completely.
    """
    holders = _first_holders(train)
    feeds: dict[str, list[str]] = {name: [] for name in engine.parameters}
    for p in engine.placements:
        if p.canonical not in feeds[p.parameter]:
            feeds[p.parameter].append(p.canonical)
    windows: list[Window] = []
    names: list[str] = []
    parameters: list[str] = []
    size = 0
    for parameter, needed in feeds.items():
        num_bytes = sum(prod(engine.canonical_shapes[c]) for c in needed) * element_size
        if parameters and size + num_bytes > max_bytes:
            windows.append(_window(names, parameters, holders))
            names, parameters, size = [], [], 0
        parameters.append(parameter)
        names += [c for c in needed if c not in names]
        size += num_bytes
    windows.append(_window(names, parameters, holders))
    for name in (c for w in windows for c in w.canonical):
        held = sum(p.source.num_elements for _, p in holders.get(name, []))
        if held != prod(engine.canonical_shapes[name]):
            raise WeightSyncError(
                f"the trainers hold {held} of {prod(engine.canonical_shapes[name])} "
                f"elements of {name}"
            )
    return windows


def _first_holders(train: Sequence[WeightLayout]) -> dict[str, list[tuple[int, Piece]]]:
    """{canonical: [(lowest rank that holds the box, piece)]}, each box once."""
    holders: dict[str, list[tuple[int, Piece]]] = {}
    seen: set[tuple[str, Box]] = set()
    for rank, layout in enumerate(train):
        for p in layout.placements:
            if (p.canonical, p.source) not in seen:
                seen.add((p.canonical, p.source))
                piece = Piece(p.canonical, p.source, p.parameter, p.target)
                holders.setdefault(p.canonical, []).append((rank, piece))
    return holders


def _window(
    names: list[str], parameters: list[str], holders: Mapping[str, list[tuple[int, Piece]]]
) -> Window:
    by_rank: dict[int, list[Piece]] = {}
    for name in names:
        for rank, piece in holders.get(name, []):
            by_rank.setdefault(rank, []).append(piece)
    senders = tuple((rank, tuple(pieces)) for rank, pieces in sorted(by_rank.items()))
    return Window(tuple(names), tuple(parameters), senders)


def gather_window(
    window: Window,
    parameters: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The window's canonical tensors, whole, on every rank. Collective over the whole job.

    Args:
        window: from `plan_windows`.
        parameters: this rank's local parameters.
        shapes: canonical shapes.
        dtype: dtype on the wire and in the engine; converted before sending.
        device: of the result.
    """
    full = {c: torch.empty(shapes[c], dtype=dtype, device=device) for c in window.canonical}
    me = dist.get_rank()
    for rank, pieces in window.senders:
        if rank == me:
            flat = torch.cat(
                [
                    parameters[p.parameter].detach()[p.target.slices].to(device, dtype).reshape(-1)
                    for p in pieces
                ]
            )
        else:
            flat = torch.empty(
                sum(p.source.num_elements for p in pieces), dtype=dtype, device=device
            )
        dist.broadcast(flat, src=rank)
        parts = flat.split([p.source.num_elements for p in pieces])
        for piece, part in zip(pieces, parts, strict=True):
            full[piece.canonical][piece.source.slices] = part.view(piece.source.shape)
    return full


def cut_shards(
    window: Window, full: Mapping[str, torch.Tensor], engine: WeightLayout
) -> dict[str, torch.Tensor]:
    """This engine rank's local parameters of the window; vocabulary padding is zero."""
    wanted = set(window.parameters)
    some = next(iter(full.values()))
    shards = {
        n: torch.zeros(engine.parameters[n], dtype=some.dtype, device=some.device)
        for n in window.parameters
    }
    for p in engine.placements:
        if p.parameter in wanted:
            shards[p.parameter][p.target.slices] = full[p.canonical][p.source.slices]
    return shards
