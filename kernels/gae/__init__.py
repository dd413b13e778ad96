"""Generalised advantage estimation and discounted sums over packed sequences."""

from megarl_kernels.gae.op import discounted_sum, gae
from megarl_kernels.gae.reference import gae_reference

__all__ = ["discounted_sum", "gae", "gae_reference"]
