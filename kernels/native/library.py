"""Calls into the C++ library: tensors become pointers, ints int64_t, floats double.

torch must be loaded first: its OpenMP runtime is then the library's too, with one pool of threads.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from megarl_kernels.native.build import BuildError, build

__all__ = ["DTYPE_CODES", "call", "obstacle"]

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}  # as in common.h


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    try:
        return ctypes.CDLL(str(build()))
    except BuildError as error:
        return str(error)
    except OSError as error:
        return f"cannot load the C++ library: {error}"


def obstacle() -> str | None:
    """Why the library cannot be used; None when it can."""
    library = _load()
    return library if isinstance(library, str) else None


def call(name: str, *arguments: torch.Tensor | torch.dtype | int | float | None) -> None:
    """Run one exported function with as many threads as torch uses."""
    library = _load()
    assert not isinstance(library, str), library
    function = getattr(library, name)
    function.restype = None
    function(*(_convert(a) for a in arguments), ctypes.c_int64(torch.get_num_threads()))


def _convert(
    value: torch.Tensor | torch.dtype | int | float | None,
) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_double:
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, torch.dtype):
        return ctypes.c_int64(DTYPE_CODES[value])
    if isinstance(value, float):
        return ctypes.c_double(value)
    return ctypes.c_int64(value)
