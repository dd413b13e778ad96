"""Losses on the probability ratio: PPO and those whose clip or gate ends the gradient."""

from __future__ import annotations

import torch

from megarl.algorithms.packed import sequence_mean, spread
from megarl.algorithms.policy_losses.base import LossInputs, LossSettings, TokenLoss, log_ratio

__all__ = ["clip_range", "geo_mean", "gspo", "ppo_clip", "sapo"]


def clip_range(ratio: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    """The ratio bounded to [1 - clip_low, 1 + clip_high]."""
    return ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)


def ppo_clip(tokens: LossInputs, settings: LossSettings) -> TokenLoss:
    """PPO's clipped surrogate, -min(rA, clip(r, 1-low, 1+high)A), bounded by -dual*A where A < 0.

    PPO, https://arxiv.org/abs/1707.06347, eq. 7; dual clip, https://arxiv.org/abs/1912.09729, eq.
    5; separate bounds, DAPO, https://arxiv.org/abs/2503.14476. Reads clip_low, clip_high,
    clip_dual.
    """
    advantages, ratio = tokens.advantages, log_ratio(tokens).exp()
    plain = -advantages * ratio
    clipped = -advantages * clip_range(ratio, settings)
    loss = torch.maximum(plain, clipped)
    bound = -advantages * settings.clip_dual
    dual = (advantages < 0) & (loss > bound)
    return TokenLoss(
        loss=torch.where(dual, bound, loss),
        ratio=ratio.detach(),
        is_clipped=(clipped > plain).to(ratio.dtype),
        is_clipped_dual=dual.to(ratio.dtype),
    )


def gspo(tokens: LossInputs, settings: LossSettings) -> TokenLoss:
    """PPO's clip on the sequence's ratio s = exp(mean over its tokens of log r), at most e^10.

    Token form, so that token advantages work: s_t = sg(s) pi_t / sg(pi_t).
    https://arxiv.org/abs/2507.18071. Reads clip_low, clip_high (of the order of 1e-4).
    """
    difference = tokens.log_probs - tokens.old_log_probs
    mean = sequence_mean(difference.detach(), tokens.response_mask, tokens.cu_seqlens)
    gradient = tokens.log_probs - tokens.log_probs.detach()  # 0, carries the token's gradient
    ratio = (spread(mean, tokens.cu_seqlens) + gradient).clamp(max=10.0).exp()
    plain = -tokens.advantages * ratio
    clipped = -tokens.advantages * clip_range(ratio, settings)
    return TokenLoss(
        loss=torch.maximum(plain, clipped),
        ratio=ratio.detach(),
        is_clipped=(clipped > plain).to(ratio.dtype),
        is_clipped_dual=torch.zeros_like(ratio.detach()),
    )


def geo_mean(tokens: LossInputs, settings: LossSettings) -> TokenLoss:
    """-A * exp(mean over the sequence's tokens of log r, clipped per token to [-low, high] where
    that lowers rA).

    GMPO, https://arxiv.org/abs/2507.20673. A is the mean advantage of the sequence's tokens. Every
    trained token of a sequence has the sequence's loss, so seq_mean_token_mean is the paper's mean
    over sequences. Reads clip_low, clip_high: bounds on the log-ratio.
    """
    mask, cu_seqlens = tokens.response_mask, tokens.cu_seqlens
    difference = tokens.log_probs - tokens.old_log_probs
    bounded = difference.clamp(-settings.clip_low, settings.clip_high)
    sign = tokens.advantages.sign()
    worse = sign * torch.minimum(sign * difference, sign * bounded)
    ratio = spread(sequence_mean(worse, mask, cu_seqlens).exp(), cu_seqlens)
    advantage = spread(sequence_mean(tokens.advantages, mask, cu_seqlens), cu_seqlens)
    return TokenLoss(
        loss=-advantage * ratio,
        ratio=ratio.detach(),
        is_clipped=((worse != difference) & (sign != 0)).to(ratio.dtype),
        is_clipped_dual=torch.zeros_like(ratio.detach()),
    )


def sapo(tokens: LossInputs, settings: LossSettings) -> TokenLoss:
    """-A * sigmoid(tau (r - 1)) * 4 / tau: a gate that closes smoothly instead of a clip.

    https://arxiv.org/abs/2511.20347; tau is sapo_tau_pos where A > 0, else sapo_tau_neg.
    """
    ratio = log_ratio(tokens).exp()
    tau = torch.where(tokens.advantages > 0, settings.sapo_tau_pos, settings.sapo_tau_neg)
    zeros = torch.zeros_like(ratio.detach())
    return TokenLoss(
        loss=-tokens.advantages * torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau),
        ratio=ratio.detach(),
        is_clipped=zeros,
        is_clipped_dual=zeros,
    )
