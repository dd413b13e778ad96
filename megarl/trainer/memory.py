"""Host memory of a rank: what it holds, and giving back what the allocator keeps."""

from __future__ import annotations

import ctypes
import ctypes.util

import psutil
import torch

__all__ = ["resident_bytes", "trim_memory"]


def resident_bytes() -> int:
    """Physical memory of this process, bytes."""
    return int(psutil.Process().memory_info().rss)


def trim_memory(device: torch.device) -> None:
    """Return freed heap pages to the system when training on CPU.

    Micro-batches differ in length from step to step; glibc then keeps ever more odd-sized holes,
    and a rank grew by gigabytes over twenty steps. Nothing to do on CUDA or with another C library.
    """
    if device.type != "cpu":
        return
    trim = getattr(ctypes.CDLL(ctypes.util.find_library("c")), "malloc_trim", None)
    if trim is not None:
        trim(0)
