"""Qwen2 and Qwen2.5: query, key and value have a bias that config.json does not mention."""

from __future__ import annotations

from megarl.models.families.base import Family

__all__ = ["QWEN2"]

QWEN2 = Family(architecture="Qwen2ForCausalLM", qkv_bias=True)
