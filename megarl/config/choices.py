"""Names the registries know, as data.

Settings are checked before torch, and so the registries, are imported. A contract test keeps each
list equal to its registry.
"""

from __future__ import annotations

__all__ = ["ADVANTAGES", "ARCHITECTURES", "POLICY_LOSSES", "REWARDS", "REWARD_OPTIONS"]

ADVANTAGES = ("grpo",)
"""megarl.algorithms.ADVANTAGES"""
POLICY_LOSSES = ("ppo_clip",)
"""megarl.algorithms.POLICY_LOSSES"""
REWARDS = ("number",)
"""megarl.rewards.REWARDS"""
REWARD_OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "number": {"method": ("strict", "flexible"), "format_reward": ()},
}
"""{reward: {option: its valid values; empty where the reward itself checks}}"""
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Hugging Face architectures megarl.models builds."""
