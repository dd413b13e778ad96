"""Qwen3 dense: no projection bias, RMSNorm on every query and key head."""

from __future__ import annotations

from megarl.models.families.base import Family

__all__ = ["QWEN3"]

QWEN3 = Family(architecture="Qwen3ForCausalLM", qk_norm=True)
