"""Losses on log pi, weighted by a constant: the gradient is weight * A * grad log pi and nothing is
clipped away.
"""

from __future__ import annotations

import torch

from megarl.algorithms.policy_losses.base import LossInputs, LossSettings, TokenLoss, log_ratio
from megarl.algorithms.policy_losses.clipped import clip_range

__all__ = ["cispo", "dppo_kl", "dppo_tv", "dro", "reinforce"]


def _token_loss(
    loss: torch.Tensor, ratio: torch.Tensor, is_clipped: torch.Tensor, is_dual: torch.Tensor
) -> TokenLoss:
    dtype = ratio.dtype
    return TokenLoss(
        loss=loss, ratio=ratio, is_clipped=is_clipped.to(dtype), is_clipped_dual=is_dual.to(dtype)
    )


def reinforce(tokens: LossInputs, settings: LossSettings) -> TokenLoss:
    """-A log pi. Williams 1992, https://doi.org/10.1007/BF00992696; the loss of GPG,
    https://arxiv.org/abs/2504.02546.
    """
    ratio = log_ratio(tokens).detach().exp()
    never = torch.zeros_like(ratio)
    return _token_loss(-tokens.advantages * tokens.log_probs, ratio, never, never)


def cispo(tokens: LossInputs, settings: LossSettings) -> TokenLoss:
    """-sg(clip(r, 1-low, 1+high)) A log pi: the weight is bounded, no token loses its gradient.

    MiniMax-M1, https://arxiv.org/abs/2506.13585. Reads clip_low, clip_high.
    """
    ratio = log_ratio(tokens).detach().exp()
    weight = clip_range(ratio, settings)
    loss = -weight * tokens.advantages * tokens.log_probs
    return _token_loss(loss, ratio, weight != ratio, torch.zeros_like(ratio))


def dppo_tv(tokens: LossInputs, settings: LossSettings) -> TokenLoss:
    """-sg(min(r, dual)) A log pi where the token's probability has not moved too far the way A
    pushes it, else 0.

    Too far: pi - pi_old > high where A > 0, < -low elsewhere (total variation of "this token or
    another"). DPPO, https://arxiv.org/abs/2602.04879. Reads clip_low, clip_high: bounds on the
    probability difference, and clip_dual (20 is usual).
    """
    moved = tokens.log_probs.detach().exp() - tokens.old_log_probs.exp()
    inside = torch.where(
        tokens.advantages > 0, moved <= settings.clip_high, moved >= -settings.clip_low
    )
    return _dppo(tokens, settings, inside)


def dppo_kl(tokens: LossInputs, settings: LossSettings) -> TokenLoss:
    """DPPO with the KL of "this token or another" as its measure of distance.

    Too far: p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)) > high where A > 0 and p
    > p_old, or > low where A <= 0 and p < p_old. https://arxiv.org/abs/2602.04879. Reads clip_low,
    clip_high: bounds on that KL, and clip_dual.
    """
    log_p, log_q = tokens.log_probs.detach(), tokens.old_log_probs
    p, q = log_p.exp(), log_q.exp()
    kl = q * (log_q - log_p) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
    inside = torch.where(
        tokens.advantages > 0,
        (kl <= settings.clip_high) | (p <= q),
        (kl <= settings.clip_low) | (p >= q),
    )
    return _dppo(tokens, settings, inside)


def _dppo(tokens: LossInputs, settings: LossSettings, inside: torch.Tensor) -> TokenLoss:
    ratio = log_ratio(tokens).detach().exp()
    weight = ratio.clamp(max=settings.clip_dual)
    loss = torch.where(inside, -weight * tokens.advantages * tokens.log_probs, 0.0)
    return _token_loss(loss, ratio, ~inside, inside & (ratio > settings.clip_dual))


def dro(tokens: LossInputs, settings: LossSettings) -> TokenLoss:
    """-A log pi + beta / 2 (log pi - log pi_old)^2: a quadratic pull to the old policy in place of
    a clip.

    Direct reward optimisation, https://arxiv.org/abs/2405.19107, in policy-gradient form:
    advantages stand for reward - value, the old policy for the reference. Reads dro_beta.
    """
    difference = tokens.log_probs - tokens.old_log_probs
    ratio = difference.detach().clamp(-20.0, 20.0).exp()
    loss = -tokens.advantages * tokens.log_probs + settings.dro_beta / 2 * difference.square()
    never = torch.zeros_like(ratio)
    return _token_loss(loss, ratio, never, never)
