"""Which implementation of an operator runs: MEGARL_KERNELS=auto|torch|cpu|triton.

auto: Triton on CUDA, the C++ library on CPU, plain torch where neither is at hand. A backend that
is named must work, or the call fails. Every choice is logged once.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os

import torch
from megarl_kernels import native

__all__ = ["BACKENDS", "CPU_DTYPES", "TRITON_DTYPES", "choose_backend", "triton_is_possible"]

BACKENDS = ("auto", "torch", "cpu", "triton")
CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
logger = logging.getLogger(__name__)


def choose_backend(op: str, tensor: torch.Tensor, *, has_triton: bool = True) -> str:
    """torch, cpu or triton for this operator on this tensor's device and dtype.

    Args:
        op: the operator's name, for messages.
        tensor: one whose device and dtype decide.
        has_triton: whether the operator has a Triton kernel that takes these arguments.

    Raises:
        ValueError: MEGARL_KERNELS is not one of BACKENDS, or names a backend that cannot run this.
    """
    wanted = os.environ.get("MEGARL_KERNELS", "auto")
    if wanted not in BACKENDS:
        raise ValueError(f"MEGARL_KERNELS={wanted} must be one of {', '.join(BACKENDS)}")
    device = tensor.device.type
    if wanted == "auto":
        if device == "cuda":
            obstacle = _triton_obstacle(device, tensor.dtype, has_triton)
            chosen = "torch" if obstacle else "triton"
        else:
            obstacle = _cpu_obstacle(device, tensor.dtype)
            chosen = "torch" if obstacle else "cpu"
    else:
        chosen, obstacle = wanted, None
        if wanted == "cpu":
            obstacle = _cpu_obstacle(device, tensor.dtype)
        elif wanted == "triton":
            obstacle = _triton_obstacle(device, tensor.dtype, has_triton)
        if obstacle:
            raise ValueError(
                f"MEGARL_KERNELS={wanted} cannot run {op}: {obstacle}; use MEGARL_KERNELS=auto"
            )
    _log_once(op, chosen, wanted, obstacle)
    return chosen


def _cpu_obstacle(device: str, dtype: torch.dtype) -> str | None:
    if device != "cpu":
        return f"the tensors are on {device}"
    if dtype not in CPU_DTYPES:
        return f"the C++ library has no {dtype}"
    return native.obstacle()


def triton_is_possible(device: str) -> bool:
    """Whether Triton kernels run on this device: CUDA, or anything under Triton's interpreter."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (device == "cuda" or is_interpreted) and importlib.util.find_spec("triton") is not None


def _triton_obstacle(device: str, dtype: torch.dtype, has_triton: bool) -> str | None:
    if not triton_is_possible(device):
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        return f"the tensors are on {device}"
    if not has_triton:
        return "there is no Triton kernel for these arguments"
    if dtype not in TRITON_DTYPES:
        return f"the Triton kernels have no {dtype}"
    return None


@functools.cache
def _log_once(op: str, chosen: str, wanted: str, obstacle: str | None) -> None:
    logger.info("%s: backend %s (MEGARL_KERNELS=%s)", op, chosen, wanted)
    if obstacle:
        logger.warning("%s runs in plain torch: %s", op, obstacle)
