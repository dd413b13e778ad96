"""Mean and standard deviation within groups."""

from megarl_kernels.group_stats.op import group_mean_std

__all__ = ["group_mean_std"]
