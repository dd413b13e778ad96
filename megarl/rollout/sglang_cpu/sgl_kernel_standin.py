"""Stand-in for the CPU build of `sgl_kernel`, for which there is no wheel.

`install` copies this file to site-packages/sgl_kernel/__init__.py. SGLang imports the package
unguarded in CPU mode; of its functions only these two run on a CPU without AMX. No
torch.ops.sgl_kernel is registered, so every layer of SGLang takes its own plain torch path: nothing
of its scheduler, cache, sampler or weight updater is replaced. Any other name can be imported and
raises when called.
"""

from __future__ import annotations

import ctypes
from typing import Any

__version__ = "0.0.0+megarl.cpu.standin"
IS_MEGARL_STANDIN = True


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any,
    req_to_token: Any,
    start_offset: Any,
    end_offset: Any,
    out_cache_loc: Any,
    pool_len: Any,
) -> None:
    """req_to_token[request, start:end] = the next (end - start) entries of out_cache_loc."""
    position = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for request, start, end in rows:
        count = end - start
        req_to_token[request, start:end] = out_cache_loc[position : position + count].to(
            req_to_token.dtype
        )
        position += count


def copy_all_layer_kv_cache_cpu(data_ptrs: Any, strides: Any, tgt_loc: Any, src_loc: Any) -> None:
    """For each layer buffer (address, bytes per slot): slot tgt_loc[i] = slot src_loc[i], read
    before written.
    """
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        slots = [ctypes.string_at(address + slot * size, size) for slot in sources]
        for slot, data in zip(targets, slots, strict=True):
            ctypes.memmove(address + slot * size, data, size)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in")

    missing.__name__ = name
    return missing
