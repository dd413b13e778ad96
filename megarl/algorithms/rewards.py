"""Changes to the reward before advantages are estimated, and resampling of responses by reward."""

from __future__ import annotations

import torch

__all__ = ["RESAMPLING", "overlong_penalty", "resample", "resampling_weights"]

RESAMPLING = ("pow", "max_min", "max_random")


def overlong_penalty(lengths: torch.Tensor, *, max_length: int, cache: int) -> torch.Tensor:
    """0 up to max_length - cache tokens, then falling linearly to -1 at max_length, -1 beyond, [N].

    DAPO, https://arxiv.org/abs/2503.14476, eq. 13. Maximum 20, cache 4: lengths 16, 17, 18, 20, 21
    -> 0, -.25, -.5, -1, -1.

    Args:
        lengths: [N] response tokens.
        cache: in 1 .. max_length.
    """
    if not 1 <= cache <= max_length:
        raise ValueError(f"cache={cache} must be in 1 .. max_length={max_length}")
    excess = lengths.to(torch.float32) - (max_length - cache)
    return -(excess / cache).clamp(0.0, 1.0)


def resampling_weights(rewards: torch.Tensor, method: str, *, power: float = 2.0) -> torch.Tensor:
    """How likely each response is to be drawn again, [N], not normalised.

    pow         |r| ^ power
    max_min     1 for the best and the worst reward of the batch, else 0
    max_random  0.4 for the best reward of the batch, else 0.1

    Policy filtration, PF-PPO, https://arxiv.org/abs/2409.06957.
    """
    if method == "pow":
        return rewards.abs().pow(power)
    if method == "max_min":
        return ((rewards == rewards.max()) | (rewards == rewards.min())).to(rewards.dtype)
    if method == "max_random":
        return torch.where(rewards == rewards.max(), 0.4, 0.1).to(rewards.dtype)
    raise ValueError(f"unknown resampling {method!r}; use one of {', '.join(RESAMPLING)}")


def resample(weights: torch.Tensor, *, seed: int) -> torch.Tensor:
    """Draw N positions with replacement, in proportion to weights + 1e-8, [N] int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(weights + 1e-8, weights.numel(), replacement=True, generator=generator)
