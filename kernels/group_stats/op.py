"""group_mean_std: one number per response is too little for a kernel; torch on every device."""

from __future__ import annotations

import torch

__all__ = ["group_mean_std"]


@torch.no_grad()
def group_mean_std(
    x: torch.Tensor, groups: torch.Tensor, *, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and unbiased standard deviation of each element's group, two passes in float64.

    Args:
        x: [N] floating point.
        groups: [N] integer labels, any values.
        mask: [N] bool or integer; elements outside are never used. None: all.

    Returns:
        (mean [N], std [N]), float32 (float64 for float64): those of the element's group, over its
        live elements. std is 0 for a group with one, both are 0 for a group with none.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    if x.dim() != 1 or groups.shape != x.shape or groups.is_floating_point():
        raise ValueError(
            f"x {tuple(x.shape)} must be [N], groups {tuple(groups.shape)} [N] integer"
        )
    if mask is not None and (mask.shape != x.shape or mask.is_floating_point()):
        raise ValueError(f"mask {tuple(mask.shape)} {mask.dtype} must be [N], bool or integer")
    labels, index = torch.unique(groups, return_inverse=True)
    live = torch.ones_like(x, dtype=torch.bool) if mask is None else mask != 0
    wide = x.double().masked_fill(~live, 0.0)
    zeros = wide.new_zeros(labels.numel())
    count = zeros.index_add(0, index, live.double())
    mean = zeros.index_add(0, index, wide) / count.clamp(min=1)
    centred = (wide - mean[index]).masked_fill(~live, 0.0)
    std = (zeros.index_add(0, index, centred.square()) / (count - 1).clamp(min=1)).sqrt()
    dtype = torch.promote_types(x.dtype, torch.float32)
    return mean[index].to(dtype), std[index].to(dtype)
