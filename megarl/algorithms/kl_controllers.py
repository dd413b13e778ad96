"""How the weight of the KL changes during training. Plain numbers; state_dict goes into the
checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import isfinite

__all__ = [
    "AdaptiveKLController",
    "FixedKLController",
    "KLController",
    "MovingAverageKLController",
]


class KLController(ABC):
    """Holds the current weight in `value`."""

    value: float

    @abstractmethod
    def update(self, kl: float, num_samples: int) -> None:
        """Take note of the mean KL of a step's trained tokens."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class FixedKLController(KLController):
    """The weight never changes."""

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self, kl: float, num_samples: int) -> None:
        pass


class AdaptiveKLController(KLController):
    """value *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon.

    Ziegler et al., https://arxiv.org/abs/1909.08593, section 2.2.
    """

    def __init__(self, value: float, *, target: float, horizon: float) -> None:
        if not (target > 0 and horizon > 0):
            raise ValueError(f"target={target} and horizon={horizon} must be > 0")
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, kl: float, num_samples: int) -> None:
        if not isfinite(kl):
            raise ValueError(f"kl={kl} is not finite; the KL weight would never recover")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * num_samples / self.horizon


class MovingAverageKLController(AdaptiveKLController):
    """The adaptive controller fed with a moving average, so that one step's outlier does not move
    the weight.

    average = decay * average + (1 - decay) * kl, starting from the first kl seen.
    """

    def __init__(self, value: float, *, target: float, horizon: float, decay: float = 0.9) -> None:
        super().__init__(value, target=target, horizon=horizon)
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay} must be in [0, 1)")
        self.decay = decay
        self.average: float | None = None

    def update(self, kl: float, num_samples: int) -> None:
        first = self.average is None
        average = kl if first else self.decay * (self.average or 0.0) + (1 - self.decay) * kl
        super().update(average, num_samples)
        self.average = average

    def state_dict(self) -> dict[str, float]:
        seen = {} if self.average is None else {"average": self.average}
        return {**super().state_dict(), **seen}

    def load_state_dict(self, state: dict[str, float]) -> None:
        super().load_state_dict(state)
        self.average = state.get("average")
