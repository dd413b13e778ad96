"""What a reward is: text and prompt in, number out. Data path: after rollout, before advantages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from megarl.types import Prompt

__all__ = ["Reward", "RewardResult"]


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """Score of one response."""

    reward: float  # what the algorithm optimises
    accuracy: float  # 1.0 if the answer is right, else 0.0, whatever the reward's shape
    parsed: str | None  # the answer read from the text, None if none was found
    reason: str  # why, for dumps


class Reward(ABC):
    """One way to score. Options are keyword arguments of the constructor, which checks them."""

    @abstractmethod
    def score(self, text: str, prompt: Prompt) -> RewardResult:
        """Score a decoded response. Never raises on any text; time is linear in its length."""

    @abstractmethod
    def check_ground_truth(self, ground_truth: str) -> None:
        """Raise ValueError with value and rule if this reward cannot use a row's ground truth."""
