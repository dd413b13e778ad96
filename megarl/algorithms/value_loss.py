"""Loss of the critic."""

from __future__ import annotations

import torch

__all__ = ["clipped_value_loss"]


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """max((v - R)^2, (v bounded to v_old +- clip, - R)^2) / 2 per token.

    PPO's value clipping, https://arxiv.org/abs/1707.06347 (the form of OpenAI baselines).

    Args:
        values: [T] current critic, carries the gradient.
        old_values: [T] critic before the step's first update.
        returns: [T] from `gae`.
        clip: > 0.

    Returns:
        (token losses [T], is_clipped [T]: 1 where the bound gave the larger loss).
    """
    bounded = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    plain, clipped = (values - returns).square(), (bounded - returns).square()
    return torch.maximum(plain, clipped) / 2, (clipped > plain).to(values.dtype)
