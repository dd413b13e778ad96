"""Parameters on their way into an engine: their digest and how they cross a process boundary.

Both sides of a push use `digest`, so equal digests prove that the bytes arrived. `export_shard`
moves no data through the network: the bytes it returns are a handle to memory of this machine.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler

import torch

from megarl.rollout.base import WeightSyncError
from megarl.types import WeightLayout

__all__ = [
    "ExportedShard",
    "PushLedger",
    "digest",
    "export_shard",
    "file_system_sharing",
    "read_shard",
]

_CHUNK = 1 << 20  # elements hashed at once: bounds the working memory to a few int64 buffers of it
_MULTIPLIERS = (-7046029254386353131, -4417276706812531889)  # odd 64-bit constants
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: torch.Tensor) -> str:
    """A 128-bit fingerprint of dtype, shape and bytes, computed on the tensor's own device.

    Two sums over all elements x[i] * m[i] mod 2**64, with odd pseudo-random m[i]: one changed
    element always changes both, and the result is the same on CPU and GPU. It guards against
    mistakes, not against attack.
    """
    bits = tensor.detach().contiguous().reshape(-1).view(_WIDTHS[tensor.element_size()])
    sums = [torch.zeros((), dtype=torch.int64, device=bits.device) for _ in _MULTIPLIERS]
    for start in range(0, bits.numel(), _CHUNK):
        x = bits[start : start + _CHUNK].to(torch.int64)
        position = torch.arange(
            start + 1, start + 1 + x.numel(), dtype=torch.int64, device=bits.device
        )
        for total, multiplier in zip(sums, _MULTIPLIERS, strict=True):
            m = position * multiplier
            m.bitwise_xor_(m >> 29).mul_(_MULTIPLIERS[0]).bitwise_or_(1)
            total += (m * x).sum()
    words = "".join(f"{int(total) & (2**64 - 1):016x}" for total in sums)
    return f"{str(tensor.dtype).removeprefix('torch.')}:{'x'.join(map(str, tensor.shape))}:{words}"


@dataclass(frozen=True)
class ExportedShard:
    """What `export_shard` made: enough to check the parameter without opening the memory."""

    shape: tuple[int, ...]
    dtype: str
    payload: bytes


@contextmanager
def file_system_sharing() -> Iterator[None]:
    """Share CPU tensors by name. The default passes file descriptors, which needs related
    processes.
    """
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def export_shard(tensor: torch.Tensor) -> bytes:
    """Bytes by which another process of this machine can open `tensor`, which must outlive the
    push.

    On CPU the tensor's storage is moved into shared memory; on CUDA the bytes hold an IPC handle.
    """
    tensor = tensor.detach().contiguous()
    with file_system_sharing():
        payload = bytes(ForkingPickler.dumps(tensor))
    header = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    return pickle.dumps((*header, payload))


def read_shard(exported: bytes) -> ExportedShard:
    """Undo the outer layer of `export_shard`. Raises WeightSyncError for any other bytes."""
    try:
        shape, dtype, payload = pickle.loads(exported)
        return ExportedShard(tuple(shape), str(dtype), bytes(payload))
    except (pickle.UnpicklingError, TypeError, ValueError, EOFError) as error:
        raise WeightSyncError(f"not the bytes of an exported parameter: {error}") from error


class PushLedger:
    """What one weight push has delivered so far, checked against what the engine holds."""

    def __init__(self, layouts: list[WeightLayout], dtype: torch.dtype) -> None:
        self.layouts = layouts
        self.dtype = str(dtype).removeprefix("torch.")
        self.delivered: list[set[str]] = [set() for _ in layouts]

    def add(self, tp_rank: int, shard: Mapping[str, torch.Tensor | ExportedShard]) -> None:
        """Record parameters. Raises WeightSyncError on an unknown name, a wrong shape or a wrong
        dtype.
        """
        wanted = self.layouts[tp_rank].parameters
        for name, value in shard.items():
            if name not in wanted:
                raise WeightSyncError(
                    f"engine rank {tp_rank} has no parameter {name!r}; it has {len(wanted)}, "
                    f"such as {next(iter(wanted))!r}"
                )
            dtype = str(value.dtype).removeprefix("torch.")
            if tuple(value.shape) != tuple(wanted[name]) or dtype != self.dtype:
                raise WeightSyncError(
                    f"{name} for engine rank {tp_rank} is {dtype} {tuple(value.shape)}, "
                    f"the engine holds {self.dtype} {tuple(wanted[name])}"
                )
        self.delivered[tp_rank].update(shard)

    def require_complete(self) -> None:
        """Raise WeightSyncError unless every parameter of every rank was delivered."""
        for tp_rank, (layout, got) in enumerate(zip(self.layouts, self.delivered, strict=True)):
            missing = [name for name in layout.parameters if name not in got]
            if missing:
                raise WeightSyncError(
                    f"partial push: {len(missing)} of {len(layout.parameters)} parameters of "
                    f"engine rank {tp_rank} were not sent, first {missing[0]!r}"
                )
