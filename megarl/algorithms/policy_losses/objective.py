"""One micro-batch's share of the minibatch's policy loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from megarl.algorithms.aggregation import aggregate
from megarl.algorithms.packed import keep
from megarl.algorithms.policy_losses.base import LossInputs, LossSettings, TokenLoss

__all__ = ["clean", "weighted_loss"]


def clean(tokens: LossInputs) -> LossInputs:
    """The inputs with 0 under the mask.

    Masking the result alone is not enough: where a masked token is NaN, the derivative inside is
    NaN, and 0 * NaN would reach the model.
    """
    mask = tokens.response_mask
    return replace(
        tokens,
        log_probs=keep(tokens.log_probs, mask),
        old_log_probs=keep(tokens.old_log_probs, mask),
        advantages=keep(tokens.advantages, mask),
    )


def weighted_loss(
    policy_loss: Callable[[LossInputs, LossSettings], TokenLoss],
    tokens: LossInputs,
    settings: LossSettings,
    *,
    weights: torch.Tensor,
    rollout_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, TokenLoss]:
    """(sum of weight * token loss, the token losses and statistics).

    Args:
        policy_loss: one of POLICY_LOSSES.
        tokens: one packed micro-batch.
        weights: [T] from `token_weights`, by counts of the whole minibatch.
        rollout_weights: [T] pi_old / pi_rollout as `rollout_correction` bounds it; None: 1.
    """
    out = policy_loss(clean(tokens), settings)
    loss = out.loss
    if rollout_weights is not None:
        loss = loss * keep(rollout_weights, tokens.response_mask).detach()
    return aggregate(loss, weights, tokens.response_mask), out
