"""The C++ library for CPU: built by g++ at first use, called through ctypes."""

from megarl_kernels.native.build import build, cache_dir
from megarl_kernels.native.library import call, obstacle

__all__ = ["build", "cache_dir", "call", "obstacle"]
