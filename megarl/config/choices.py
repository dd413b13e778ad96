"""Names the registries know, as data.

Settings are checked before torch, and so the registries, are imported. A contract test keeps each
list equal to its registry.
"""

from __future__ import annotations

__all__ = ["ADVANTAGES", "ARCHITECTURES", "POLICY_LOSSES", "REWARDS", "REWARD_OPTIONS"]

ADVANTAGES = (
    "grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
)  # fmt: skip
"""megarl.algorithms.ADVANTAGES"""
POLICY_LOSSES = (
    "ppo_clip", "gspo", "sapo", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "dro",
    "reinforce", "gpg", "clip_cov", "kl_cov",
)  # fmt: skip
"""megarl.algorithms.POLICY_LOSSES"""
REWARDS = ("number",)
"""megarl.rewards.REWARDS"""
REWARD_OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "number": {"method": ("strict", "flexible"), "format_reward": ()},
}
"""{reward: {option: its valid values; empty where the reward itself checks}}"""
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Hugging Face architectures megarl.models builds."""
