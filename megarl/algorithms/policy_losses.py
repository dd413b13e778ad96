"""Policy losses per token: packed tensors in, token losses and token statistics out.

No sums are taken here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["POLICY_LOSSES", "ClipRange", "TokenLoss", "ppo_clip"]


@dataclass(frozen=True)
class ClipRange:
    """Bounds of the probability ratio, [1 - low, 1 + high], and the dual clip where A < 0."""

    low: float
    high: float
    dual: float


@dataclass(frozen=True)
class TokenLoss:
    """All [T] float32; meaningful where response_mask is 1."""

    loss: torch.Tensor  # differentiable
    ratio: torch.Tensor  # pi / pi_old
    is_clipped: torch.Tensor  # 1 where clipping removed the gradient (upper or lower bound)
    is_clipped_dual: torch.Tensor  # 1 where the dual clip did


def ppo_clip(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip: ClipRange,
) -> TokenLoss:
    """PPO's clipped surrogate, -min(rA, clip(r, 1-low, 1+high)A), bounded by -dual*A where A < 0.

    PPO, https://arxiv.org/abs/1707.06347, eq. 7;
    dual clip, https://arxiv.org/abs/1912.09729, eq. 5;
    separate bounds, DAPO, https://arxiv.org/abs/2503.14476.

    Args:
        log_probs, old_log_probs, advantages: [T] float32. The log-ratio is clamped to [-20, 20].
    """
    ratio = (log_probs - old_log_probs).clamp(-20.0, 20.0).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    loss = torch.maximum(plain, clipped)
    bound = -advantages * clip.dual
    dual = (advantages < 0) & (loss > bound)
    return TokenLoss(
        loss=torch.where(dual, bound, loss),
        ratio=ratio.detach(),
        is_clipped=(clipped > plain).float(),
        is_clipped_dual=dual.float(),
    )


POLICY_LOSSES: dict[str, Callable[..., TokenLoss]] = {"ppo_clip": ppo_clip}
