"""Masked standardisation, across process groups too."""

from megarl_kernels.whiten.op import whiten
from megarl_kernels.whiten.reference import whiten_reference

__all__ = ["whiten", "whiten_reference"]
