"""The specification of whiten, for one process."""

from __future__ import annotations

import torch

__all__ = ["whiten_reference"]


def whiten_reference(
    x: torch.Tensor, mask: torch.Tensor | None = None, *, eps: float = 1e-8
) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) over the mask, 0 outside; unbiased variance, 0 below two."""
    live = torch.ones_like(x, dtype=torch.bool) if mask is None else mask.bool()
    chosen = x[live]
    if chosen.numel() < 2:
        return torch.zeros_like(x)
    scaled = (chosen - chosen.mean()) / (chosen.var(unbiased=True) + eps).sqrt()
    return torch.zeros_like(x).masked_scatter(live, scaled)
