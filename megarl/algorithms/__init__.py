"""Advantages, policy losses, KL and aggregation: pure tensor math; no config object, no process
group.
"""

from megarl.algorithms.aggregation import AGGREGATIONS, MinibatchCounts, aggregate, token_weights
from megarl.algorithms.kl import KL_ESTIMATORS, kl_penalty
from megarl.algorithms.outcome_advantages import ADVANTAGES, Outcomes, grpo
from megarl.algorithms.packed import keep, positions, sequence_lengths, spread
from megarl.algorithms.policy_losses import (
    POLICY_LOSSES,
    SELECTIONS,
    LossInputs,
    LossSettings,
    TokenLoss,
    weighted_loss,
)

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "SELECTIONS",
    "LossInputs",
    "LossSettings",
    "MinibatchCounts",
    "Outcomes",
    "TokenLoss",
    "aggregate",
    "grpo",
    "keep",
    "kl_penalty",
    "positions",
    "sequence_lengths",
    "spread",
    "token_weights",
    "weighted_loss",
]
