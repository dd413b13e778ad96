"""Moves the actor's weights from the training layout into the engines' layout.

Knows no engine and no model family.
"""

from megarl.reshard.push import PushStats, WeightPush

__all__ = ["PushStats", "WeightPush"]
