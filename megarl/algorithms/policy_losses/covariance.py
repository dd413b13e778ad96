"""Clip-Cov and KL-Cov: hold back the few tokens whose log-prob and advantage covary most, to keep
entropy.

https://arxiv.org/abs/2505.22617. Which tokens those are is a question to the whole minibatch: the
`select_*` functions answer it over the trained tokens of all ranks, and the losses take the answer.
"""

from __future__ import annotations

import torch

from megarl.algorithms.policy_losses.base import LossInputs, LossSettings, TokenLoss, log_ratio
from megarl.algorithms.policy_losses.clipped import clip_range

__all__ = ["clip_cov", "kl_cov", "select_clip_cov", "select_kl_cov"]


def _covariance(log_probs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """(log pi - its mean) (A - its mean), [N] float64."""
    log_probs, advantages = log_probs.detach().double(), advantages.double()
    return (log_probs - log_probs.mean()) * (advantages - advantages.mean())


def select_clip_cov(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    settings: LossSettings,
    *,
    seed: int,
) -> torch.Tensor:
    """Which tokens Clip-Cov silences: max(1, cov_frac * N) drawn among those with cov_low < cov <
    cov_high.

    A token that PPO's clip already holds is not drawn.

    Args:
        log_probs, old_log_probs, advantages: [N], all trained tokens of the minibatch, in an order
            that
            does not depend on how it is split.
        seed: of the draw.

    Returns:
        [N] bool.
    """
    chosen = torch.zeros(log_probs.numel(), dtype=torch.bool, device=log_probs.device)
    if not log_probs.numel():
        return chosen
    ratio = (log_probs.detach() - old_log_probs).clamp(-20.0, 20.0).exp()
    is_clipped = -advantages * clip_range(ratio, settings) > -advantages * ratio
    cov = _covariance(log_probs, advantages)
    candidates = ((cov > settings.cov_low) & (cov < settings.cov_high) & ~is_clipped).nonzero()
    candidates = candidates.squeeze(1)
    limit = max(int(settings.cov_frac * log_probs.numel()), 1)
    order = torch.randperm(candidates.numel(), generator=torch.Generator().manual_seed(seed))
    chosen[candidates[order[:limit].to(candidates.device)]] = True
    return chosen


def select_kl_cov(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    settings: LossSettings,
    *,
    seed: int,
) -> torch.Tensor:
    """Which tokens KL-Cov penalises: the max(1, cov_frac * N) of largest covariance; nothing is
    drawn.

    Args and Returns: as `select_clip_cov`.
    """
    chosen = torch.zeros(log_probs.numel(), dtype=torch.bool, device=log_probs.device)
    if log_probs.numel():
        limit = max(int(settings.cov_frac * log_probs.numel()), 1)
        chosen[_covariance(log_probs, advantages).topk(limit).indices] = True
    return chosen


def _selected(tokens: LossInputs) -> torch.Tensor:
    assert tokens.selected is not None, "this loss needs the minibatch's selection"
    return tokens.selected


def clip_cov(tokens: LossInputs, settings: LossSettings) -> TokenLoss:
    """PPO's clip without dual clip; 0 on a selected token. Reads clip_low, clip_high, cov_*."""
    selected, ratio = _selected(tokens), log_ratio(tokens).exp()
    plain = -tokens.advantages * ratio
    clipped = -tokens.advantages * clip_range(ratio, settings)
    return TokenLoss(
        loss=torch.where(selected, 0.0, torch.maximum(plain, clipped)),
        ratio=ratio.detach(),
        is_clipped=((clipped > plain) | selected).to(ratio.dtype),
        is_clipped_dual=torch.zeros_like(ratio.detach()),
    )


def kl_cov(tokens: LossInputs, settings: LossSettings) -> TokenLoss:
    """-A r, plus cov_kl_coef * |log r| on selected tokens. Reads cov_frac, cov_kl_coef."""
    selected, difference = _selected(tokens), log_ratio(tokens)
    loss = -tokens.advantages * difference.exp()
    penalty = torch.where(selected, settings.cov_kl_coef * difference.abs(), 0.0)
    ratio = difference.detach().exp()
    return TokenLoss(
        loss=loss + penalty,
        ratio=ratio,
        is_clipped=selected.to(ratio.dtype),
        is_clipped_dual=torch.zeros_like(ratio),
    )
