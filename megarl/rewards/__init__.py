"""Rewards: rules that score a response. Registered by name; see registry."""

from megarl.rewards.base import Reward, RewardResult
from megarl.rewards.number import NumberReward
from megarl.rewards.registry import REWARDS, create_reward, reward_options

__all__ = ["REWARDS", "NumberReward", "Reward", "RewardResult", "create_reward", "reward_options"]
