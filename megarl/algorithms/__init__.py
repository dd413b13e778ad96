"""Advantages, policy losses, KL and aggregation: pure tensor math, no config, no process group."""

from megarl.algorithms.advantages import ADVANTAGES, grpo
from megarl.algorithms.aggregation import MinibatchCounts, sequence_lengths, token_weights
from megarl.algorithms.kl import KL_ESTIMATORS, kl_penalty
from megarl.algorithms.policy_losses import POLICY_LOSSES, ClipRange, TokenLoss, ppo_clip

__all__ = [
    "ADVANTAGES", "KL_ESTIMATORS", "POLICY_LOSSES", "ClipRange", "MinibatchCounts", "TokenLoss",
    "grpo", "kl_penalty", "ppo_clip", "sequence_lengths", "token_weights",
]  # fmt: skip
