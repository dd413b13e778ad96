"""The specification of gae: the textbook loop, one token at a time."""

from __future__ import annotations

import itertools

import torch

__all__ = ["gae_reference"]


def gae_reference(
    rewards: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    gamma: float,
    lam: float,
    mask: torch.Tensor | None = None,
    bootstrap: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns as `megarl_kernels.gae` describes them, in the dtype of the inputs."""
    live = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask.bool()
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    bounds = cu_seqlens.tolist()
    for s, (first, end) in enumerate(itertools.pairwise(bounds)):
        advantage = rewards.new_zeros(())
        next_value = rewards.new_zeros(()) if bootstrap is None else bootstrap[s].to(rewards.dtype)
        for t in range(end - 1, first - 1, -1):
            if live[t]:
                delta = rewards[t] + gamma * next_value - values[t]
                advantage = delta + gamma * lam * advantage
                next_value = values[t]
                advantages[t] = advantage
                returns[t] = advantage + values[t]
    return advantages, returns
