"""What every policy loss gets and gives: packed tokens in, token losses and token statistics out.

No sums over tokens are taken here: `aggregation` weighs the token losses. A loss on whole sequences
(GSPO, GMPO) needs each sequence whole in its micro-batch and gives every trained token of it a
token loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["LossInputs", "LossSettings", "TokenLoss", "log_ratio"]


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """One packed micro-batch. Values where response_mask is 0 have no effect."""

    log_probs: torch.Tensor  # [T] current policy, carries the gradient
    old_log_probs: torch.Tensor  # [T] policy before this step's first update
    advantages: torch.Tensor  # [T]
    response_mask: torch.Tensor  # [T] 1 on trained tokens
    cu_seqlens: torch.Tensor  # [S+1] int32
    selected: torch.Tensor | None = (
        None  # [T] bool: tokens chosen on the whole minibatch (SELECTIONS)
    )


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Numbers of all losses; each says which it reads. Defaults and ranges: config,
    AlgorithmConfig.
    """

    clip_low: float
    clip_high: float
    clip_dual: float = 3.0
    cov_frac: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    cov_kl_coef: float = 1.0
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    dro_beta: float = 0.1


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """All [T] in the dtype of log_probs; meaningful where response_mask is 1."""

    loss: torch.Tensor  # differentiable
    ratio: torch.Tensor  # pi / pi_old, of the token or of its sequence as the loss uses it
    is_clipped: (
        torch.Tensor
    )  # 1 where a bound on the ratio, or a selection, changed the token's loss
    is_clipped_dual: torch.Tensor  # 1 where the bound clip_dual did


def log_ratio(tokens: LossInputs) -> torch.Tensor:
    """log pi - log pi_old, clamped to [-20, 20], [T]."""
    return (tokens.log_probs - tokens.old_log_probs).clamp(-20.0, 20.0)
