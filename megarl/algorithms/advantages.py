"""Advantage estimators on outcome rewards.

They give one number per response; the trainer spreads it over the response's tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["ADVANTAGES", "grpo"]


def grpo(
    rewards: torch.Tensor, groups: torch.Tensor, *, normalize_by_std: bool = True, eps: float = 1e-6
) -> torch.Tensor:
    """Group-relative advantage: A_i = (r_i - mean of its group) / (std of its group + eps).

    DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1; without the division it is
    Dr. GRPO, https://arxiv.org/abs/2503.20783. The standard deviation is the unbiased one.

    Args:
        rewards: [N] float, one per response.
        groups: [N] int, any labels; responses to one prompt row share one.

    Returns:
        [N] float32. A group of one, and a group without spread, has advantage 0: it says nothing
        about which response was better.
    """
    _, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    r = rewards.to(torch.float64)
    mean = torch.zeros(len(counts), dtype=r.dtype).index_add_(0, index, r) / counts
    centred: torch.Tensor = r - mean[index]
    if normalize_by_std:
        square = torch.zeros_like(mean).index_add_(0, index, centred.square())
        std = (square / (counts - 1).clamp(min=1)).sqrt()
        centred = centred / (std[index] + eps)
    return centred.to(torch.float32)


ADVANTAGES: dict[str, Callable[..., torch.Tensor]] = {"grpo": grpo}
