"""Rewards by name; one line each."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from megarl.config.errors import ConfigError, require
from megarl.config.typecheck import did_you_mean
from megarl.rewards.base import Reward
from megarl.rewards.number import NumberReward

__all__ = ["REWARDS", "create_reward", "reward_options"]

REWARDS: dict[str, type[Reward]] = {
    "number": NumberReward,
}


def reward_options(name: str) -> list[str]:
    """Names of the options of a reward."""
    return list(inspect.signature(REWARDS[name]).parameters)


def create_reward(name: str, options: Mapping[str, Any]) -> Reward:
    """Build a reward. Raises ConfigError for an unknown name, an unknown option or a bad value."""
    rule = "is not a known name" + did_you_mean(name, REWARDS)
    require(name in REWARDS, "reward.name", name, rule, f"use {', '.join(REWARDS)}")
    known = reward_options(name)
    for option in options:
        if option not in known:
            raise ConfigError(
                f"unknown key reward.options.{option}{did_you_mean(option, known)}; "
                f"valid options of {name}: {', '.join(known)}"
            )
    return REWARDS[name](**options)
