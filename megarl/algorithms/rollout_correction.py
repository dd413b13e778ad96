"""Correction of the difference between the engine's policy and the trainer's: weights and
rejection.

rho = pi_old / pi_rollout, the trainer's probability of a token over the engine's. All bounds are
bounds on rho, or on an estimate of the divergence. https://fengyao.notion.site/off-policy-rl and
https://richardli.xyz/rl-collapse describe both; truncation is TIS, masking outside of two bounds
IcePop.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import torch

from megarl.algorithms.packed import (
    keep,
    sequence_lengths,
    sequence_max,
    sequence_mean,
    sequence_sum,
    spread,
)

__all__ = [
    "REJECTIONS",
    "Rejection",
    "divergence",
    "normalize_weights",
    "raw_weights",
    "reject",
    "rejection_statistic",
    "restrict_weights",
    "weight_mean",
]

REJECTIONS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)
LIMIT = 20.0  # |log rho| at most, before exp


def raw_weights(
    log_rho: torch.Tensor, response_mask: torch.Tensor, cu_seqlens: torch.Tensor, *, level: str
) -> torch.Tensor:
    """rho of each token ("token") or the product over its sequence ("sequence"), [T], 0 where
    masked.

    Args:
        log_rho: [T] old_log_probs - rollout_log_probs; clamped to [-20, 20] before exp.
    """
    if level == "sequence":
        log_rho = spread(sequence_sum(log_rho, response_mask, cu_seqlens), cu_seqlens)
    elif level != "token":
        raise ValueError(f"level={level!r} must be token or sequence")
    return keep(log_rho.detach().clamp(-LIMIT, LIMIT).exp(), response_mask)


def restrict_weights(weights: torch.Tensor, *, high: float, low: float | None) -> torch.Tensor:
    """Truncate to `high` (low None), or set to 0 what lies outside [low, high], [T]."""
    if low is None:
        return weights.clamp(max=high)
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


def weight_mean(
    weights: torch.Tensor, response_mask: torch.Tensor, cu_seqlens: torch.Tensor, *, level: str
) -> torch.Tensor:
    """Mean weight of the tokens or of the sequences that have tokens, as [2]: (sum, count), to add
    over ranks.
    """
    if level == "token":
        return torch.stack([keep(weights, response_mask).sum(), response_mask.sum()])
    is_used = sequence_lengths(response_mask, cu_seqlens) > 0
    means = sequence_mean(weights, response_mask, cu_seqlens)
    return torch.stack([means.sum(), is_used.sum().to(means.dtype)])


def normalize_weights(weights: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Divide by the mean over the whole minibatch, [T]; unchanged when that mean is 0.

    Args:
        total: [2] (sum, count) from `weight_mean`, summed over micro-batches and ranks.
    """
    mean = total[0] / total[1].clamp(min=1)
    return torch.where(mean > 1e-8, weights / mean.clamp(min=1e-8), weights)


def divergence(log_rho: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate of KL(rollout || old) from a token of the rollout, [T]; see kl.py.

    k1 = -log rho; k2 = log(rho)^2 / 2; k3 = rho - 1 - log rho; log rho clamped to [-20, 20].
    """
    d = log_rho.detach().clamp(-LIMIT, LIMIT)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return d.exp() - 1 - d
    raise ValueError(f"unknown divergence {estimator!r}; use k1, k2 or k3")


@dataclass(frozen=True)
class Rejection:
    """One criterion. k1: keep low <= rho <= high. k2, k3: keep divergence <= high, low unused."""

    name: str  # one of REJECTIONS
    high: float
    low: float | None = None

    def __post_init__(self) -> None:
        if self.name not in REJECTIONS:
            raise ValueError(f"unknown rejection {self.name!r}; use one of {', '.join(REJECTIONS)}")
        if self.high <= 0 or (self.low is not None and not 0 < self.low <= self.high):
            raise ValueError(f"bounds of {self.name}: need 0 < low={self.low} <= high={self.high}")

    @property
    def bounds(self) -> tuple[float, float]:
        """Kept interval of the statistic. k1 is -log rho, so bounds on rho change places."""
        if not self.name.endswith("k1"):
            return 0.0, self.high
        return -log(self.high), -log(1 / self.high if self.low is None else self.low)


def rejection_statistic(
    rejection: Rejection,
    log_rho: torch.Tensor,
    response_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """The number the criterion looks at, [T]: of the token, or sum, mean or maximum over its
    sequence.

    Bounds on the mean of k1 bound the geometric mean of rho, on its sum the product.
    """
    level, estimator = rejection.name.rsplit("_", 1)
    values = divergence(log_rho, estimator)
    if level == "token":
        return keep(values, response_mask)
    over = {"seq_sum": sequence_sum, "seq_mean": sequence_mean, "seq_max": sequence_max}[level]
    return keep(spread(over(values, response_mask, cu_seqlens), cu_seqlens), response_mask)


def reject(
    rejections: list[Rejection],
    log_rho: torch.Tensor,
    response_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """The response mask without the tokens that fail any criterion, [T]; all criteria see the full
    mask.

    A token whose statistic is NaN is rejected.
    """
    out = response_mask
    for rejection in rejections:
        low, high = rejection.bounds
        statistic = rejection_statistic(rejection, log_rho, response_mask, cu_seqlens)
        out = torch.where((statistic >= low) & (statistic <= high), out, 0.0)
    return out
