"""whiten: checks, dispatch, and the sum of the moments over a process group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megarl_kernels import native
from megarl_kernels.dispatch import choose_backend
from torch.distributed import ProcessGroup

__all__ = ["whiten"]


@torch.no_grad()
def whiten(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    group: ProcessGroup | None = None,
    eps: float = 1e-8,
) -> torch.Tensor:
    """Scale to mean 0 and variance 1 over the mask: (x - mean) / sqrt(var + eps).

    The variance is the unbiased one; with fewer than two live elements everything is 0. Moments are
    float64 sums, all-reduced over `group`, so the result does not depend on how x is split.

    Args:
        x: any shape, floating point.
        mask: shape of x, bool or integer; elements outside are never used, NaN included. None: all.
        group: ranks that hold other parts of x; all must call. None: this rank has everything.
        eps: added to the variance, >= 0.

    Returns:
        Shape of x, float32 (float64 for float64), 0 outside the mask. Not differentiable.

    Raises:
        ValueError: shape, dtype, device or eps do not fit.
    """
    if not x.is_floating_point():
        raise ValueError(f"x is {x.dtype}; it must be floating point")
    if mask is not None and (mask.shape != x.shape or mask.is_floating_point()):
        raise ValueError(
            f"mask {tuple(mask.shape)} {mask.dtype} must be {tuple(x.shape)}, bool or integer"
        )
    if mask is not None and mask.device != x.device:
        raise ValueError(f"mask is on {mask.device}, x on {x.device}")
    if eps < 0:
        raise ValueError(f"eps={eps} must be >= 0")
    x = x.float().contiguous() if x.dtype == torch.float16 else x.contiguous()
    mask = None if mask is None else (mask != 0).contiguous()
    backend = choose_backend("whiten", x, has_triton=False)
    if backend == "cpu":
        sums = torch.empty(3, dtype=torch.float64)
        native.call("megarl_moments", x.dtype, x, mask, x.numel(), sums)
    else:
        sums = _moments(x, mask)
    if group is not None:
        dist.all_reduce(sums, group=group)
    count, total, squares = sums.unbind()
    mean = total / count.clamp(min=1)
    variance = ((squares - total * mean) / (count - 1).clamp(min=1)).clamp(min=0)
    scale = torch.where(count > 1, (variance + eps).rsqrt(), 0.0)
    dtype = torch.promote_types(x.dtype, torch.float32)
    if backend == "cpu":
        out = torch.empty_like(x, dtype=dtype)
        native.call(
            "megarl_whiten", x.dtype, x, mask, x.numel(), mean.item(), scale.item(), out
        )  # fmt: skip
        return out
    scaled = ((x.double() - mean) * scale).to(dtype)
    return scaled if mask is None else scaled.masked_fill(~mask, 0.0)


def _moments(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """[3] float64: count, sum, sum of squares over the mask."""
    wide = x.double()
    if mask is None:
        count = wide.new_tensor(float(x.numel()))
    else:
        wide, count = wide.masked_fill(~mask, 0.0), mask.sum().double()
    return torch.stack([count, wide.sum(), wide.square().sum()])
